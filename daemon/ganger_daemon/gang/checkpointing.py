"""Checkpoints of one gang: requests to its ranks, which agree on the step through their pages, publication by the
keeper, and the release of ranks that saved."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from functools import partial, reduce
from operator import and_
from pathlib import Path
from typing import Any

import grpc
from ganger.agent.v1 import agent_pb2, peer_pb2
from ganger.failpoints import hit
from ganger.injob.launcher.client import Launcher, LauncherError
from ganger.injob.launcher.process_record import LaunchError, publish
from ganger.injob.page import PageProgress
from ganger.injob.page_layout import CHECKPOINT_BIT, Capability, PageParkLevel
from ganger.protocol.gang_orders import DesiredOrder, Mechanism, OrderIntent
from ganger.wire.endpoints import EndpointError
from ganger.wire.resource_names import parse_node_name
from ganger.wire.times import seconds

from ganger_daemon.checkpoints.gang_checkpoints import GangCheckpoints, OnNode, StorageError
from ganger_daemon.checkpoints.storage import (
    CHECKPOINTS,
    IMAGES,
    CheckpointName,
    Shard,
    ShardReport,
    directories,
    parse_final,
)
from ganger_daemon.core.gang_judgement import PartPhase
from ganger_daemon.core.part_facts import PartOutcome, PartOutcomeKind, keeps_state
from ganger_daemon.gang.control_pages import page_order, write_details
from ganger_daemon.gang.gang_context import GangContext, OfGang, error_of
from ganger_daemon.gang.process_image import GangImages
from ganger_daemon.gang.replay_check import ReplayCheck
from ganger_daemon.node.node_context import ORDER_DEADLINE_S, PeerCalls
from ganger_daemon.transfer.state_stream import StreamError

log = logging.getLogger(__name__)

# Longest work on storage, which may read whole shards; and how long the gang's loop waits for it at once.
_WORK_S = 3600.0
_PATIENCE_S = 0.2
_STORAGE_REASONS = ("STORAGE_FULL", "STORAGE_FAILED")


class CheckpointCoordinator(OfGang):
    """Checkpoints of one gang on this node. `launcher` returns that of the local ranks, if any, and may block."""

    def __init__(
        self,
        context: GangContext,
        desired: agent_pb2.DesiredGang,
        launcher: Callable[[], Launcher | None],
        images: GangImages,
    ) -> None:
        super().__init__(context)
        self._images = images
        self._members = desired.members
        self._user = desired.user
        self._launcher = launcher
        self._replay = ReplayCheck(context, launcher)
        self._tidy_due = False
        by_node = [list(member.ranks) for member in desired.members]
        self.keeper = GangCheckpoints(
            desired.job_uid,
            desired.epoch,
            self._part.world,
            self._part.leads,
            self._publish,
            self._report,
            context.wake,
            _names(desired.kept_checkpoints),
            partial(self._host.storage.work.run, within_s=_WORK_S),
            OnNode(self._host.node, self._collect, self._copy, by_node) if self._part.on_nodes else None,
            self._part.roles,
        )
        # Daemons of which one is to have a copy of each checkpoint, as the master's newest answer names them.
        self.copy_peers: Collection[str] = ()
        self._work: asyncio.Task[None] | None = None
        self._recalling: asyncio.Task[None] | None = None
        self._pruning: asyncio.Task[None] | None = None

    def recall(self, stop_sequence: int, step: int | None, wanted: Collection[str] | None) -> None:
        """Restore the state of a former daemon. `step`: of the checkpoint that the gang ended with; `wanted`: noted
        paths of the checkpoints that the master may start the job from, None without a note."""
        self.keeper.wanted = None if wanted is None else _names(wanted)
        # Storage may hang: its checkpoints are reported once they have been read.
        self._recalling = asyncio.create_task(self._recall())
        if step is not None:
            self.keeper.handed[stop_sequence] = step

    def want(self, paths: Collection[str]) -> bool:
        """Note the checkpoints that the master would start the job from; others may go. Return whether they changed."""
        names = _names(paths)
        if names == self.keeper.wanted:
            return False
        self.keeper.wanted = names
        if self._part.leads and (self._pruning is None or self._pruning.done()):
            # Beside the gang's loop: storage may hang.
            self._pruning = asyncio.create_task(self._prune())
        return True

    @property
    def wanted_paths(self) -> list[str] | None:
        """Paths of the checkpoints that the master needs, for the next daemon; None before the master has sent them."""
        names = self.keeper.wanted
        return None if names is None else [f"checkpoints/{name}" for name in sorted(names)]

    @property
    def is_checking(self) -> bool:
        """Whether the script is run a second time before its ranks end."""
        return self._replay.is_running

    @property
    def saved_request(self) -> int:
        """Number of the request that led to the newest published checkpoint; 0 if a stop did, or there is none."""
        newest = next(reversed(self.keeper.handed), 0)
        return newest & ~CHECKPOINT_BIT if newest & CHECKPOINT_BIT else 0

    async def _recall(self) -> None:
        with suppress(OSError):
            await self._host.storage.work.run(self.keeper.recall, self._context.storage, within_s=_WORK_S)
        self._context.wake()

    async def _prune(self) -> None:
        storage = self._context.storage
        if storage is not None:
            with suppress(OSError):
                await self._host.storage.work.run(self.keeper.prune, storage, within_s=_WORK_S)

    def obey(self, wanted: DesiredOrder, newer: DesiredOrder) -> None:
        """Abandon the checkpoint of an order to save and end, if the newer order is another one."""
        if _saves(wanted) and not _saves(newer):
            self.keeper.abandon(wanted.stop_sequence)
            self._tidy_due = True

    def published_step(self, wanted: DesiredOrder, settled: PartOutcome | None) -> int | None:
        """Return the step of the checkpoint that the present stop has published; None before."""
        for agreement in (wanted.stop_sequence, wanted.order.master_sequence):
            if agreement in self.keeper.handed:
                return self.keeper.handed[agreement]
        if settled is not None and settled.kind is PartOutcomeKind.YIELDED and self.keeper.handed:
            return max(self.keeper.handed.values())
        return None

    async def tend(
        self,
        desired: agent_pb2.DesiredGang,
        wanted: DesiredOrder,
        phase: PartPhase,
        now: float,
        is_whole: bool,
        is_opaque: bool,
    ) -> None:
        """Request checkpoints that are due, report durable ones, and let saved ranks end. Called every tick.

        `is_whole`: no rank has ended; `is_opaque`: nothing in some rank can obey an order at a boundary. Where storage
        is slow or hangs, the gang's loop continues meanwhile."""
        storage = self._context.storage
        if storage is None:
            return
        if self._work is None:
            self._work = asyncio.create_task(self._tend(storage, desired, wanted, phase, now, is_whole, is_opaque))
            await asyncio.wait((self._work,), timeout=_PATIENCE_S)
            if not self._work.done():
                self._work.add_done_callback(lambda _: self._context.wake())
        if self._work.done():
            work, self._work = self._work, None
            work.result()

    async def _tend(
        self,
        storage: Path,
        desired: agent_pb2.DesiredGang,
        wanted: DesiredOrder,
        phase: PartPhase,
        now: float,
        is_whole: bool,
        is_opaque: bool,
    ) -> None:
        if self._tidy_due and phase in (PartPhase.RUNNING, PartPhase.PARKED):
            # Before that, the ranks may be saving.
            self._tidy_due = False
            await self._host.storage.work.run(self.keeper.tidy, storage, within_s=_WORK_S)
        found = [self._pages.progress(rank) for rank in self._part.ranks]
        runs = (
            wanted.intent is OrderIntent.RUN
            and phase is PartPhase.RUNNING
            and is_whole
            and self._context.proved_storage is not None
        )
        # A checkpoint from which a rank could not be restored is of no use.
        able = reduce(and_, [progress.capabilities for progress in found])
        is_able = able & Capability.CHECKPOINT and keeps_state(Mechanism(desired.spec.mechanism), able)
        # An image needs the number of the newest one.
        is_recalled = self._recalling is None or self._recalling.done()
        # Stopped processes must run before: an image has them as they are.
        may_be_taken = self._images.are_possible and not self._images.is_moving
        without_agent = is_opaque and may_be_taken and is_recalled
        if runs and (is_able or without_agent):
            await self._request_if_due(storage, desired, now)
        await self._hand_on_running(storage, found, without_agent=without_agent and runs)
        await self._hand_on_leaving(storage, wanted, found, without_agent=without_agent)

    def request(self, number: int) -> None:
        """Request checkpoint `number` from the local ranks; the relay carries the request to the others."""
        write_details(self._context.proved_storage, self._paths, f"checkpoint-{number}")
        self._pages.request_checkpoint(number)

    async def _request_if_due(self, storage: Path, desired: agent_pb2.DesiredGang, now: float) -> None:
        interval_s = seconds(desired.checkpoint_interval)
        request = int(desired.checkpoint_request)
        if not self.keeper.due(now, interval_s, request):
            return
        running = self._pages.checkpoint_sequence()
        unsettled = bool(running) and not self.keeper.is_settled(running)
        waited = now - self.keeper.requested_at
        if unsettled and not self.keeper.refusal(running) and waited < ORDER_DEADLINE_S:
            return  # One agreement at a time
        if unsettled:
            # Before the check for room: files of the last request take up some.
            await self._host.storage.work.run(self.keeper.tidy, storage, within_s=_WORK_S)
        missing = await self._host.storage.work.run(self.keeper.room_missing, storage, within_s=_WORK_S)
        self.keeper.note_request(now, request)
        if missing:
            self.keeper.trouble = "STORAGE_FULL: checkpoints are skipped, storage has no room for one; the last is kept"
            log.warning("checkpoint skipped", extra={"job": desired.job, "missing_bytes": missing})
            return
        self.request((running & ~CHECKPOINT_BIT) + 1)

    async def _hand_on_running(self, storage: Path, found: list[PageProgress], *, without_agent: bool) -> None:
        agreement = self._pages.checkpoint_sequence()
        if not agreement or self.keeper.is_settled(agreement):
            return
        steps = {progress.checkpoint_step for progress in found}
        failed = [rank for rank, one in zip(self._part.ranks, found, strict=True) if one.checkpoint_failed == agreement]
        refusal = self.keeper.refusal(agreement)
        if failed and not refusal:
            error = error_of(self._paths, failed[0], f"checkpoint-{agreement & ~CHECKPOINT_BIT}")
            refusal = str(error or f"STORAGE_FAILED: rank {failed[0]}: its shard could not be written")
        if refusal:
            await self.keeper.refuse(agreement, refusal)
        elif all(progress.checkpoint_done == agreement for progress in found) and len(steps) == 1:
            await self._make_durable(storage, agreement, steps.pop(), is_image=by_image(found))
        elif without_agent:
            await self._make_durable(storage, agreement, self._step_without_agent(agreement, found), is_image=True)
        if by_image(found) and (self.keeper.refusal(agreement) or self._images.is_taken(agreement)):
            self._pages.resume_after_image(agreement)

    async def receive_refusal(self, agreement: int, why: str) -> None:
        """Take the report of a member whose ranks cannot write shards; one of an earlier checkpoint is ignored."""
        if self._pages.readable and agreement == self._pages.checkpoint_sequence():
            await self.keeper.refuse(agreement, why)

    async def _hand_on_leaving(
        self, storage: Path, wanted: DesiredOrder, found: list[PageProgress], *, without_agent: bool
    ) -> None:
        order = page_order(wanted)
        is_parking = wanted.intent is OrderIntent.PARK
        if order is None or order.level != PageParkLevel.CHECKPOINT or not is_parking:
            await self._replay.give_up()
        if order is None or order.level != PageParkLevel.CHECKPOINT:
            return
        steps = {progress.checkpoint_step for progress in found}
        if all(progress.reached_seq >= order.seq for progress in found) and len(steps) == 1:
            step = steps.pop()
            if not is_parking or await self._arrives(storage, order.stop_seq, step, found):
                await self._make_durable(storage, order.stop_seq, step, is_image=by_image(found))
        elif without_agent or self._images.has_ended:
            # Without boundaries it is stopped wherever it is, and cannot leave by itself.
            step = self._step_without_agent(order.stop_seq, found)
            await self._make_durable(storage, order.stop_seq, step, is_image=True, goes_on=False)
        if self.keeper.is_settled(order.stop_seq):
            self._pages.let_leave(order.seq)

    def _step_without_agent(self, agreement: int, found: list[PageProgress]) -> int:
        """Return the step of an image of processes that count no steps, or do not stop at one. Each image has a step of
        its own, by which the newest is known."""
        if (taken := self._images.step_of(agreement)) is not None:
            return taken
        published = self.keeper.published
        return max([published.step + 1 if published is not None else 0, *(progress.step for progress in found)])

    async def _arrives(self, storage: Path, agreement: int, step: int, found: list[PageProgress]) -> bool:
        """Return whether a second run arrives at the step, for ranks whose state is for one; refuse the checkpoint
        where it does not. False while it runs."""
        is_done = self.keeper.is_settled(agreement) or self.keeper.refusal(agreement)
        if is_done or not all(progress.capabilities & Capability.REPLAY for progress in found):
            return not self.keeper.refusal(agreement)
        tmp, final = directories(storage, self._paths.job_uid, self._paths.epoch, step)
        why = "" if final.exists() else await self._replay.of(agreement, step, tmp)
        if why:
            await self.keeper.refuse(agreement, why)
        return why == ""

    async def _make_durable(
        self, storage: Path, agreement: int, step: int, *, is_image: bool, goes_on: bool = True
    ) -> None:
        """Have the shards of an agreement published, which ranks have written; or take their process images first."""
        refusal = ""
        if is_image:
            refusal = await self._images.take(storage, agreement, step, goes_on=goes_on)
        if refusal and (goes_on or not self._images.is_withdrawn(agreement)):
            await self.keeper.refuse(agreement, refusal)
        if refusal:
            return
        place = self._images.place if is_image else CHECKPOINTS
        await self.keeper.durable(storage, agreement, step, self._part.ranks, place)

    def _publish(self, tmp: Path, final: Path, manifest: dict[str, Any]) -> None:
        """Blocks. The launcher publishes, as the job's user; without one this daemon does, and what is its own."""
        is_own = self._paths.account is not None and final.parent.name == IMAGES
        launcher = None if is_own else self._launcher()
        hit("before-rename")
        try:
            (publish if launcher is None else launcher.publish)(str(tmp), str(final), manifest)
        except (LauncherError, LaunchError) as error:
            if final.exists():
                return
            if launcher is None or error.reason in _STORAGE_REASONS:
                raise StorageError(error.reason, str(error)) from error
            raise OSError(str(error)) from error

    def _collect(self, unfinished: Path, shards: Collection[Shard]) -> None:
        """Fetch the shards of other nodes for a checkpoint on this node's disk. Blocks. Raises OSError."""
        streams = {rank: member.stream_address for member in self._members for rank in member.ranks}
        for shard in shards:
            if shard.rank in self._part.ranks:
                continue
            try:
                self._host.fetcher.shard(
                    streams[shard.rank], self._paths.job_uid, unfinished, shard, self._paths.account
                )
            except (StreamError, EndpointError) as error:
                raise OSError(f"shard of rank {shard.rank}: {error}") from error

    async def _copy(self, path: str) -> tuple[tuple[str, ...], str]:
        """Have another node keep a copy of a checkpoint. Return the nodes that do, and why not where there is none."""
        request = peer_pb2.KeepCheckpointRequest(
            job_uid=self._paths.job_uid, path=path, stream=self._members[0].stream_address, user=self._user
        )
        return await copy_to_first(self._context.peers, self.copy_peers, request)

    async def _report(self, report: ShardReport) -> bool:
        leader = self._members[0]
        return await self._context.peers.shard_written(
            leader.peer_address, self._paths.job_uid, self._paths.epoch, report
        )


async def copy_to_first(
    calls: PeerCalls, peers: Collection[str], request: peer_pb2.KeepCheckpointRequest
) -> tuple[tuple[str, ...], str]:
    """Have the first of these daemons that can keep a copy of a checkpoint. Return its node, or why there is none."""
    reasons = []
    for peer in peers:
        try:
            answer = await calls.stub(peer).KeepCheckpoint(request)
        except grpc.aio.AioRpcError as error:
            reasons.append(f"{peer}: {error.details()}")
            continue
        return (parse_node_name(answer.node),), ""
    return (), f"COPY_MISSING: the checkpoint is on one node only: {'; '.join(reasons)}" if reasons else ""


def by_image(found: Iterable[PageProgress]) -> bool:
    """Return whether these ranks wait for the daemon to take their process images, and write no shards."""
    return all(progress.capabilities & Capability.IMAGE for progress in found)


def _names(paths: Iterable[str]) -> frozenset[CheckpointName]:
    found = [parse_final(Path(path).name) for path in paths]
    return frozenset(name for name in found if name is not None)


def _saves(wanted: DesiredOrder) -> bool:
    order = page_order(wanted)
    return order is not None and order.level == PageParkLevel.CHECKPOINT
