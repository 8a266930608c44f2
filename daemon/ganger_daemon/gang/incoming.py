"""State of a gang that migrates to this node: it makes room for the state of all local ranks while the source still
trains, fetches each rank's state in a thread, and raises ARENA_AVAILABLE as bytes arrive."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from ganger.agent.v1 import agent_pb2
from ganger.injob.page_layout import PageState, Word
from ganger.protocol.gang_orders import DesiredOrder, OrderIntent
from ganger.text import os_failure

from ganger_daemon.gang.gang_context import GangContext, OfGang
from ganger_daemon.gang.gang_launcher import GangLauncher
from ganger_daemon.gang.launch_plan import bytes_ahead_per_rank
from ganger_daemon.transfer.state_stream import Landing, StreamError, StreamRequest, fetch, wait_for_pages

log = logging.getLogger(__name__)

_RESTING = (PageState.INIT, PageState.RESTORING, PageState.WAITING)


@dataclass(frozen=True, slots=True)
class RankTransfer:
    """Transfer of one rank's state: source, arena, and `available`, which takes the bytes received so far.

    `bytes_ahead`: bytes of the arena that the job itself allocates; the transfer waits for them."""

    rank: int
    address: str
    request: StreamRequest
    open_arena: Callable[[], int]
    arena_bytes: int
    bytes_ahead: int
    available: Callable[[int], None]
    # Directory of the certificate to show; empty: the token in the request does.
    tls: str = ""


class StateTransfers:
    """Transfers of all local ranks of one migrating gang. `changed` is called from their threads."""

    def __init__(self, transfers: tuple[RankTransfer, ...], changed: Callable[[], None]) -> None:
        self._changed = changed
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._without_room = {one.rank for one in transfers}
        self._trouble = ""
        self._on_their_way = {one.rank for one in transfers}
        self._threads = [
            threading.Thread(target=self._travel, args=(one,), name=f"state-stream-in-{one.rank}", daemon=True)
            for one in transfers
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def cancel(self) -> None:
        self._cancelled.set()

    @property
    def trouble(self) -> str:
        with self._lock:
            return self._trouble

    @property
    def has_room(self) -> bool:
        """Whether there is room for every rank's state."""
        with self._lock:
            return not self._without_room

    @property
    def is_whole(self) -> bool:
        """Whether every rank's state has come."""
        with self._lock:
            return not self._on_their_way

    def _travel(self, one: RankTransfer) -> None:
        try:
            fd = one.open_arena()
        except Exception as error:  # The launcher may be gone: whatever the cause, the migration cannot continue
            self._fail(f"rank {one.rank}: its arena cannot be opened: {os_failure(error)}")
            return
        try:
            if one.bytes_ahead:
                wait_for_pages(fd, one.bytes_ahead, self._cancelled)
            with Landing(fd, one.arena_bytes) as landing:
                landing.enter(one.bytes_ahead)
                with self._lock:
                    self._without_room.discard(one.rank)
                self._changed()
                fetch(one.address, one.request, landing, one.available, self._cancelled, tls=one.tls)
        except (StreamError, OSError, ValueError) as error:
            if not self._cancelled.is_set():
                self._fail(f"rank {one.rank}: {os_failure(error)}")
            return
        else:
            with self._lock:
                self._on_their_way.discard(one.rank)
        finally:
            os.close(fd)
        self._changed()

    def _fail(self, why: str) -> None:
        log.warning("migration cannot continue", extra={"why": why})
        with self._lock:
            self._trouble = self._trouble or why
        self._changed()


class IncomingState(OfGang):
    """The state that the local ranks of one gang receive, if it migrates to this node."""

    def __init__(self, context: GangContext, launcher: GangLauncher) -> None:
        super().__init__(context)
        self._launcher = launcher
        self._transfers: StateTransfers | None = None

    @property
    def trouble(self) -> str:
        return self._transfers.trouble if self._transfers is not None else ""

    @property
    def is_whole(self) -> bool:
        return self._transfers is not None and self._transfers.is_whole

    def has_room(self, wanted: DesiredOrder) -> bool:
        """Return whether there is room for every rank's state; true for a gang that awaits none."""
        return not wanted.moves_in if self._transfers is None else self._transfers.has_room

    def follow(self, desired: agent_pb2.DesiredGang, wanted: DesiredOrder) -> None:
        """Begin the transfers, once, if the ranks await a state and have not used it yet."""
        if (
            self._transfers is not None
            or not wanted.moves_in
            or wanted.intent not in (OrderIntent.PREPARE, OrderIntent.RUN)
        ):
            return
        if any(self._pages.progress(rank).state in _RESTING for rank in self._ranks):
            source = desired.restore.parked
            addresses = {rank: member.stream_address for member in source.members for rank in member.ranks}
            transfers = tuple(self._of_rank(rank, desired, addresses) for rank in self._ranks)
            self._transfers = StateTransfers(transfers, self._wake_from_thread)
            self._loop = asyncio.get_running_loop()
            self._transfers.start()

    def cancel(self) -> None:
        if self._transfers is not None:
            self._transfers.cancel()

    def _wake_from_thread(self) -> None:
        with suppress(RuntimeError):  # The loop has ended
            self._loop.call_soon_threadsafe(self._context.wake)

    def _of_rank(self, rank: int, desired: agent_pb2.DesiredGang, addresses: Mapping[int, str]) -> RankTransfer:
        host, page, launcher = self._context.host, self._pages[rank], self._launcher
        open_arena, arena_bytes = launcher.open_arena, launcher.arena_bytes
        bytes_ahead = bytes_ahead_per_rank(desired, len(self._ranks), arena_bytes)
        if desired.restore.parked.is_process_image:
            # It comes before its process, which could allocate nothing.
            open_arena, arena_bytes, bytes_ahead = launcher.open_image_arena, launcher.image_arena_bytes, 0
        # After growth several ranks restore from the image of one.
        source_rank = rank % max(1, len(addresses))
        source_epoch, received = desired.restore.parked.epoch, page.get(Word.ARENA_AVAILABLE)

        def make_available(size_bytes: int) -> None:
            if self._pages.readable:
                page.set(Word.ARENA_AVAILABLE, size_bytes)

        return RankTransfer(
            rank,
            addresses.get(source_rank, ""),
            StreamRequest(host.token, desired.job_uid, source_epoch, 0, source_rank, received),
            partial(open_arena, rank),
            arena_bytes,
            bytes_ahead,
            make_available,
            host.tls,
        )
