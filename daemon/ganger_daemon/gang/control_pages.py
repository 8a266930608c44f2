"""Control pages of one gang on this node: those that local ranks write, and mirrors of ranks on other nodes. Orders go
into every page; their details are in a file beside the pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ganger.failpoints import hit
from ganger.injob.page import Page, PageMismatchError, PageOrder, PageProgress, RawPoint, now_ns, page_path
from ganger.injob.page_access import PageError
from ganger.injob.page_layout import VERSION, Capability, Flag, PageOrderKind, PageParkLevel, Word
from ganger.protocol.gang_orders import DesiredOrder, OrderIntent
from ganger.protocol.stop_rules import RelayedPoint, expired
from ganger.text import os_failure

from ganger_daemon.checkpoints.storage import unfinished_template
from ganger_daemon.core.part_facts import Rank
from ganger_daemon.node.accounts import Account
from ganger_daemon.node.daemon_files import GangPaths, make_directory, read_json, write_json
from ganger_daemon.node.process_identity import NO_PROCESS, ProcessId


def page_order(wanted: DesiredOrder) -> PageOrder | None:
    """Return an order as the page holds it, without deadline; None for a STOP that is sent as a signal."""
    if wanted.intent is OrderIntent.RUN or wanted.asks_to_leave:
        # A rank that waits at a boundary would not see the signal's flag in its loop.
        return PageOrder(wanted.order.number, PageOrderKind.RUN, 0, 0, 0)
    level = int(wanted.level) or PageParkLevel.PAUSE
    match wanted.intent:
        case OrderIntent.PREPARE:
            return PageOrder(wanted.order.number, PageOrderKind.WAIT, 0, 0, 0)
        case OrderIntent.HAND_OVER:
            level = PageParkLevel.HAND_OVER
        case OrderIntent.STOP:
            if not wanted.checkpoint_first:
                return None
            level = PageParkLevel.CHECKPOINT
    return PageOrder(wanted.order.number, PageOrderKind.STOP, wanted.stop_sequence, level, 0)


def write_details(storage: Path | None, paths: GangPaths, name: str) -> None:
    """Write orders/NAME.json, which names the place of a shard on `storage`. It precedes the order, so that every
    reader of the order finds it. A daemon that takes over does not rewrite it: the file's time is that of the order."""
    if paths.account is None:
        make_directory(paths.orders)
    template = "" if storage is None else unfinished_template(storage, paths.job_uid, paths.epoch)
    details = {"checkpoint_directory": template, "checkpoint": template} if template else {}
    path = paths.orders / f"{name}.json"
    if not path.exists() or read_json(path) != details:
        write_json(path, details, mode=paths.read_mode)
    hit("order-half-written")


@dataclass(frozen=True, slots=True)
class RunMark:
    """Time of the last order to run, and each rank's step at that time; all zero for the first run of an epoch."""

    ordered_ns: int = 0
    steps: Mapping[int, int] = field(default_factory=dict)

    def journal(self) -> dict[str, Any]:
        return {"ns": self.ordered_ns, "steps": dict(self.steps)}

    @classmethod
    def recall(cls, left: Mapping[str, Any]) -> RunMark:
        steps = {int(rank): int(step) for rank, step in left.get("steps", {}).items()}
        return cls(int(left.get("ns", 0)), steps)


class ControlPages:
    """Pages in one directory. `local` are the ranks of this node; the others are mirrors.

    No page is ever mapped: a job may truncate its pages at any instant. Reading a truncated page raises PageError, and
    `damage` reports it."""

    def __init__(self, directory: Path, epoch: int, world: int, local: tuple[int, ...]) -> None:
        self.directory = directory
        self.epoch = epoch
        self.world = world
        self.local = local
        self._pages: dict[int, Page] = {}
        self._damage = ""
        self.written: Callable[[], None] = lambda: None  # Wakes parked ranks
        self.foreign = ""  # Error of pages that another version of Ganger wrote; empty if there is none

    def create(self, threads: Mapping[int, int], *, is_restored: bool = False, account: Account | None = None) -> None:
        """Create missing pages and open all. Idempotent, also after a crash. `threads`: of each local rank.
        `is_restored`: for a process from an image. `account`: whose they are; None: this process's."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for rank in range(self.world):
            path = page_path(str(self.directory), rank)
            local_rank = self.local.index(rank) if rank in self.local else 0
            try:
                page = Page.create(
                    path,
                    epoch=self.epoch,
                    rank=rank,
                    world=self.world,
                    local_rank=local_rank,
                    threads=threads.get(rank, 0),
                    mapped=False,
                    owner=None if account is None else (account.uid, account.gid),
                )
                page.set(Word.FLAGS, Flag.RESTORED if is_restored else 0)
            except FileExistsError:
                page = Page.open(path, mapped=False)
            self._pages[rank] = page

    def open(self, version: int) -> bool:
        """Opens what a former daemon made, of that version; False when one is missing, damaged, or `foreign`."""
        try:
            for rank in range(self.world):
                if rank not in self._pages:
                    self._pages[rank] = Page.open(page_path(str(self.directory), rank), mapped=False)
        except FileNotFoundError:
            return False
        except OSError as error:
            self.spoil(f"a control page cannot be opened: {os_failure(error)}")
            return False
        except PageMismatchError as error:
            if version == VERSION:
                self.spoil(f"control page {error.path} was overwritten by its job")
            else:
                self.foreign = str(error)
            return False
        except PageError as error:
            self.spoil(str(error))
            return False
        return True

    @property
    def readable(self) -> bool:
        """Whether all pages exist and can be trusted."""
        return len(self._pages) == self.world and not self.damage()

    def spoil(self, why: str) -> None:
        """Distrust all pages from now on: one is damaged, or belongs to another process."""
        self._damage = self._damage or why

    def damage(self) -> str:
        """Return how the job damaged a page, or an empty text. A damaged page is never trusted again."""
        if not self._damage:
            pages = ((rank, self._pages[rank]) for rank in self.local if rank in self._pages)
            self._damage = next(filter(None, (page.damage(self.epoch, rank, self.world) for rank, page in pages)), "")
        return self._damage

    def close(self) -> None:
        for page in self._pages.values():
            page.close()
        self._pages.clear()

    def __getitem__(self, rank: int) -> Page:
        return self._pages[rank]

    def progress(self, rank: int) -> PageProgress:
        return self[rank].progress()

    def process(self, rank: int) -> ProcessId:
        """Return the process that a rank's page names, unverified; NO_PROCESS if pages cannot be read."""
        if not self.readable:
            return NO_PROCESS
        identity = self[rank].identity()
        return ProcessId(identity.pid, identity.start_ticks)

    def write_order(self, order: PageOrder) -> None:
        """Write an order into every page, mirrors included, so that all ranks of this node read the same."""
        for page in self._pages.values():
            if page.get(Word.ORDER_SEQ) < order.seq:
                page.write_order(
                    order.seq, order.order, stop_seq=order.stop_seq, level=order.level, deadline_ns=order.deadline_ns
                )
        self.written()

    def let_leave(self, sequence: int) -> None:
        """Let ranks end whose checkpoint is published."""
        for rank in self.local:
            self[rank].let_leave(sequence)
        self.written()

    def resume_after_image(self, agreement: int) -> None:
        """Let ranks continue after their process images were taken or given up."""
        for rank in self.local:
            self[rank].set(Word.IMAGED_SEQ, agreement)

    def extend_lease(self, until_ns: int) -> None:
        for rank in self.local:
            self[rank].extend_lease(until_ns)

    def lease_is_over(self, now: int) -> bool:
        """Return whether some local rank has outlived its lease."""
        return any(expired(self[rank].get(Word.LEASE_UNTIL), now) for rank in self.local)

    def fence(self) -> None:
        for rank in self.local:
            self[rank].fence()
        self.written()

    def retune(self, threads: Mapping[int, int]) -> int:
        """Order these numbers of threads, by local rank; return the sequence that acknowledges it."""
        sequence = max(self[rank].get(Word.RETUNE_SEQ) for rank in self.local) + 1
        for rank in self.local:
            self[rank].retune(sequence, threads[rank])
        self.written()
        return sequence

    def request_stacks(self) -> None:
        """Have every local rank with an agent print the stacks of its threads into its log. No answer comes."""
        for rank in self.local:
            if self.readable:
                # Cut, because the job may have written any number there.
                self[rank].set(Word.STACKS_SEQ, (self[rank].get(Word.STACKS_SEQ) + 1) & 0xFFFFFFFF)

    def threads(self) -> dict[int, int]:
        """Return the number of threads ordered of each local rank."""
        return {rank: self[rank].get(Word.THREADS) for rank in self.local}

    def request_checkpoint(self, number: int) -> int:
        sequence = 0
        for page in self._pages.values():
            sequence = page.request_checkpoint(number)
        return sequence

    def checkpoint_sequence(self) -> int:
        return self[self.local[0]].get(Word.CHECKPOINT_SEQ)

    def mark(self) -> RunMark:
        """Return the mark of a run that is ordered now."""
        return RunMark(now_ns(), {rank: self[rank].progress().step for rank in self.local})

    def points(self) -> dict[int, RelayedPoint]:
        """Return the boundary point of every rank; of other nodes, the last one received."""
        return {rank: RelayedPoint(rank, *self[rank].raw_point()) for rank in sorted(self._pages)}

    def mirror(self, points: Iterable[RelayedPoint]) -> None:
        for point in points:
            if point.rank in self._pages and point.rank not in self.local:
                self[point.rank].mirror(RawPoint(point.step, point.ack_sequence, point.ack_step, point.done))

    def ranks(self, mark: RunMark) -> tuple[Rank, ...]:
        """Return the local ranks for the core, without their exits."""
        found = []
        for rank in self.local:
            progress = self[rank].progress()
            found.append(
                Rank(
                    rank=rank,
                    state=progress.state,
                    phase=progress.phase,
                    step=progress.step,
                    ack_sequence=progress.ack_seq,
                    ack_step=progress.ack_step,
                    reached_sequence=progress.reached_seq,
                    reached_step=progress.reached_step,
                    first_step=_stepped(progress, mark, rank),
                    hello=progress.hello_time_ns != 0,
                    opaque=bool(progress.capabilities & Capability.OPAQUE or progress.opaque),
                    let_go=0 < progress.reached_seq <= self[rank].get(Word.LEAVE_SEQ),
                    fenced=self[rank].fenced,
                )
            )
        return tuple(found)


def _stepped(progress: PageProgress, mark: RunMark, rank: int) -> bool:
    if progress.first_step_time_ns == 0:
        return False
    # A stop that was cancelled before it was reached leaves the time of the first step as it was.
    return progress.first_step_time_ns >= mark.ordered_ns or progress.step > mark.steps.get(rank, progress.step)
