"""A gang's part on this node: a loop that reads pages and exits, lets the core judge them, and acts on the judgement.

The daemon may die at any instruction. Pages, exit records and the process group hold the state; `wanted.json` and
`local.json` are hints that save messages.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ganger.agent.v1 import agent_pb2
from ganger.injob import metrics
from ganger.injob.launcher.client import LauncherError
from ganger.injob.metrics import ReportedMetric
from ganger.injob.page import PageError, now_ns
from ganger.protocol.gang_orders import OrderIntent, OrderKey, ParkLevel, hastened

from ganger_daemon.core import gang_judgement
from ganger_daemon.core.gang_judgement import next_look
from ganger_daemon.core.outcomes import PartOutcome, PartOutcomeKind, PartPhase
from ganger_daemon.failpoints import hit
from ganger_daemon.gang import exit_watcher
from ganger_daemon.gang.adoption import find_ranks, recall_master_desired, recall_notes, recall_wanted_checkpoints
from ganger_daemon.gang.agreeing import Agreeing
from ganger_daemon.gang.boundary_relay import Hub, Peers, RelayMessage
from ganger_daemon.gang.checkpointing import Saving
from ganger_daemon.gang.control_pages import ControlPages, RunMark, page_order, write_details
from ganger_daemon.gang.core_pinning import Pinning
from ganger_daemon.gang.desired_messages import DEFAULT_GRACE_SECONDS, local_part, to_json, wanted_of, with_spec_of
from ganger_daemon.gang.device_memory import MemoryWatch
from ganger_daemon.gang.escalation import Freezer, Pressing
from ganger_daemon.gang.exit_watcher import Deaths
from ganger_daemon.gang.incoming import Incoming
from ganger_daemon.gang.job_socket import JobSocketServer
from ganger_daemon.gang.launch_plan import LaunchRefusedError, has_no_agent
from ganger_daemon.gang.observation import Watching, observe
from ganger_daemon.gang.rank_errors import Complaints, summary_of
from ganger_daemon.gang.rank_launch import Launching
from ganger_daemon.gang.shared_memory import Segments
from ganger_daemon.gang.step_rate import PageSample, StepRate, Using
from ganger_daemon.node.node_context import NodeContext
from ganger_daemon.node.process_identity import RankProcess
from ganger_daemon.node.safe_files import make_directory, write_hint

log = logging.getLogger(__name__)

# Exit code of a shell that could not execute a command.
_NOT_EXECUTED = 127
_COPYING = {PartPhase.STOPPING: gang_judgement.RankState.SAVING, PartPhase.PREPARED: gang_judgement.RankState.RESTORING}
_NOT_STARTED = (PartOutcomeKind.LAUNCH_FAILED, PartOutcomeKind.STATE_UNREADABLE, PartOutcomeKind.STATE_OUTDATED)
_YOUNG_SECONDS = 60.0
_LOG_SECONDS = 10.0
# Longest wait of a gang that has ended for the copy of its logs, if storage hangs.
_MIRROR_S = 30.0
# Most packets of a job that are logged; further ones are only in the job's own log.
_LOGGED_PACKETS = 10_000


class LocalGang:
    """A gang's part on this node, made from a desired message, or from a former daemon's state (`adopt`).

    `run` is its loop. `blocked_by`: the job that is on its devices; `cores_kept_by`: the leaving job that still has
    cores; `phase_changed`: called when its phase, or the agreement of a peer, has changed."""

    def __init__(
        self,
        host: NodeContext,
        peers: Peers,
        desired: agent_pb2.DesiredGang,
        blocked_by: Callable[[LocalGang], str],
        cores_kept_by: Callable[[LocalGang], str],
        phase_changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.host = host
        self.peers = peers
        self.desired = desired
        # The master's desired state. `desired` is the same, or what a slice switch has made of it.
        self.master_desired = desired
        self.wanted = wanted_of(desired)
        self.peer_agreement = 0  # relayed last by a peer
        self._phase_changed = phase_changed
        self.part = local_part(desired, host.node)
        self.paths = host.paths.of(desired.job_uid, desired.epoch)
        self.pages = ControlPages(self.paths.run, desired.epoch, self.part.world, self.part.ranks)
        self._make_parts(blocked_by, cores_kept_by)
        self.judgement = gang_judgement.Judgement(PartPhase.STARTING)
        self.judged_order = self.wanted  # the order that `judgement` is about
        self.judged_master_desired = self.master_desired
        self.stop_wanted = False  # the desired set lacks it: it is being stopped
        self.forgotten = False
        self._socket: JobSocketServer | None = None
        self._packets = 0
        self._wake = asyncio.Event()
        self._launched = False
        self._launched_at = 0.0
        self._ordered_at = 0.0
        self._launch_failure: PartOutcome | None = None
        self._order_due = True
        self._unwritten: OrderKey | None = None  # the last order that could not be written, as logged
        self._mark = RunMark()
        self._settled: PartOutcome | None = None
        self._reaped = False
        self._logs_at = time.monotonic()
        self._memory_limit_bytes = 0  # set last; zero: only at the launch
        self._mirroring: asyncio.Task[None] | None = None
        self._lease_written = -1
        self._observed: bytes = b""
        # set once the observed set can report it truly
        self.judged = asyncio.Event()
        self._handed_logs = 0
        # from the start: a desired version with this gang is answered with its state
        self.observed = observe(self)

    def _make_parts(self, blocked_by: Callable[[LocalGang], str], cores_kept_by: Callable[[LocalGang], str]) -> None:
        """Make the objects for launch, exits, device memory, checkpoints and so on."""
        host, peers, desired = self.host, self.peers, self.desired
        self.launching = Launching(host, peers, self.paths, self.part, blocked_by, cores_kept_by, self._write_local)
        self.deaths = Deaths(self.paths, self.wake, self.launching.launcher_lives)
        self.pinning = Pinning(host, self.paths.group, self.pages, self.part)
        self.memory = MemoryWatch(
            host,
            self.part,
            lambda: bool(self.desired.claim.shared_mask),
            self.paths.group,
            lambda: int(self.desired.claim.arena_bytes),
        )
        self.saving = Saving(
            host, peers, self.paths, self.part, self.pages, desired, self.launching.running_launcher, self.wake
        )
        self._agreeing = Agreeing(peers, self.paths, self.part, self.pages, self.saving)
        self.rank_errors = Complaints(host, self.paths, self.part, self.pages)
        self._escalation = Pressing(host, self.paths, self.deaths)
        self._step_rate = StepRate(self.pages, self.part.ranks)
        self._utilization = Using(host, self.paths.group, desired.claim.device_mask)
        self._stall_watch = Watching(self.pages, self.part.ranks)
        self._incoming = Incoming(host, self.part, self.pages, self.launching, self.wake)
        self._freezer = Freezer(host, self.paths.group)
        self._segments = Segments(host, self.paths.group)

    # -- state ----------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> PartPhase:
        return self.judgement.phase

    @property
    def is_leaving(self) -> bool:
        """Whether another gang gets its resources soon: it is being stopped or parked."""
        if self.stop_wanted or self.phase is PartPhase.ENDED or self.master_desired.intent == agent_pb2.INTENT_STOP:
            return True
        rests = self.master_desired.intent in (agent_pb2.INTENT_PARK, agent_pb2.INTENT_HAND_OVER)
        return rests and self.phase is not PartPhase.PARKED

    @property
    def uid_and_epoch(self) -> tuple[str, int]:
        return (self.desired.job_uid, self.desired.epoch)

    @property
    def launched(self) -> bool:
        return self._launched

    @property
    def may_be_on_devices(self) -> bool:
        """Whether its processes run or may run at any moment. An earlier observation does not prove the contrary."""
        if self.judgement.phase is PartPhase.ENDED:
            return False
        if not self._launched:
            return self.launching.is_under_way
        return gang_judgement.may_be_on_devices(self.wanted, self.judged_order, self.judgement)

    @property
    def has_stepped(self) -> bool:
        """Whether a local rank has done a step in this epoch."""
        if not self._launched or not self.pages.readable:
            return self._launched
        return any(self.pages.progress(rank).step_time_ns for rank in self.part.ranks)

    @property
    def first_step_ns(self) -> int:
        """Time when the last local rank finished its first step since the gang was started or resumed; zero before."""
        if not self._launched or not self.pages.readable:
            return 0
        times = [self.pages.progress(rank).first_step_time_ns for rank in self.part.ranks]
        return max(times) if all(times) else 0

    @property
    def last_step_ns(self) -> int:
        """Time of the newest step of a local rank; zero without pages."""
        if not self._launched or not self.pages.readable:
            return 0
        return max(self.pages.progress(rank).step_time_ns for rank in self.part.ranks)

    @property
    def iteration_seconds(self) -> float:
        return self._step_rate.iteration_seconds

    @property
    def cannot_park(self) -> bool:
        """Whether it was ordered to park at a boundary and will not reach the ordered level."""
        if self.wanted.intent is not OrderIntent.PARK or self.judged_order is not self.wanted or not self._launched:
            return False
        if self.judgement.phase is PartPhase.PARKED:
            return self.judgement.level < self.wanted.level
        if self.judgement.phase is not PartPhase.STOPPING or not self._has_no_boundaries():
            return False
        # a job without a hello may still be importing
        is_late = time.monotonic() - self._ordered_at > self.host.order_patience_seconds
        return is_late or any(rank.opaque for rank in self.facts().ranks) or has_no_agent(self.desired.spec)

    @property
    def hub(self) -> Hub:
        return self._agreeing.hub

    def wake(self) -> None:
        """Run the next tick at once."""
        self._wake.set()

    def mark_gone(self, outcome: PartOutcome) -> None:
        """Report only an outcome: nothing of the gang is on this node."""
        self._settled = outcome
        self._reaped = True
        self._judge_anew()

    def set_master_desired(self, desired: agent_pb2.DesiredGang) -> None:
        """Record the master's desired state, which the gang follows only as its slices allow."""
        self.master_desired = with_spec_of(desired, self.master_desired)

    def set_kept_checkpoints(self, paths: Sequence[str]) -> None:
        """Note the paths of the checkpoints that the master may start the job from."""
        if self.saving.want(paths) and self._launched:
            self._write_local()

    def apply_order(self, desired: agent_pb2.DesiredGang) -> None:
        """Take a newer order. Returns at once; the loop carries it out."""
        merged = with_spec_of(desired, self.desired)
        wanted = hastened(wanted_of(merged), self._is_stale)
        if wanted.ends_at_once:
            # also for a daemon that takes over
            merged.grace.FromSeconds(0)
            merged.checkpoint_first = False
        if not wanted.order.is_by_rotation:
            self.master_desired = merged
        if wanted.order <= self.wanted.order and self._launched:
            return
        was_running = self.wanted.intent is OrderIntent.RUN
        same_stop = wanted.stop_sequence != 0 and wanted.stop_sequence == self.wanted.stop_sequence
        # slice switches are too frequent for INFO
        log.log(
            logging.DEBUG if wanted.order.is_by_rotation else logging.INFO,
            "order",
            extra={
                "job": desired.job,
                "epoch": desired.epoch,
                "intent": wanted.intent.name,
                "suspend_level": wanted.level.name,
            },
        )
        if self._launched and self.pages.readable:
            self.saving.obey(self.wanted, wanted)
            if wanted.intent is OrderIntent.RUN and not was_running and self.wanted.intent is not OrderIntent.PREPARE:
                self._mark = self.pages.mark()
            if not same_stop:
                self.memory.begin(self.deaths.processes)
        self.desired, self.wanted = merged, wanted
        self._ordered_at = time.monotonic()
        self._order_due = True
        if self._launched:
            make_directory(self.paths.job)
            write_hint(self.paths.wanted, to_json(merged))
        self._escalation.begin(self.wanted, time.monotonic(), self._step_rate.iteration_seconds)
        self.wake()

    def stop(self, is_stale: bool = False) -> None:
        """Stop the gang, which the master no longer wants. `is_stale`: the master wants a newer epoch of the job."""
        self.stop_wanted = True
        is_stale = is_stale or self._is_stale
        stop = replace(
            self.wanted, intent=OrderIntent.STOP, grace_seconds=DEFAULT_GRACE_SECONDS, checkpoint_first=False
        )
        self.wanted = hastened(stop, is_stale)
        self._escalation.begin(self.wanted, time.monotonic(), self._step_rate.iteration_seconds)
        self.wake()

    @property
    def _is_stale(self) -> bool:
        """Whether its lease has ended, so that its job may have been started elsewhere. An order is applied before
        the answer that brought it extends the lease."""
        is_over = self._freezer.lease_is_over
        if is_over is None and self._launched and self.pages.readable:
            is_over = self.pages.lease_is_over(now_ns())
        return self._launched and gang_judgement.has_outlived_lease(self.wanted, self._freezer.frozen, is_over)

    # -- life -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run until forgotten. A tick that fails is logged and retried: a bug never drops a gang."""
        while not self.forgotten:
            try:
                await self._tick()
                pause = self._pause()
            except asyncio.CancelledError:
                raise
            except PageError as error:
                self.pages.spoil(str(error))
                continue
            except Exception:
                log.exception("gang loop failed", extra={"job": self.desired.job, "epoch": self.desired.epoch})
                pause = 1.0
            try:
                await asyncio.wait_for(self._wake.wait(), pause)
            except TimeoutError:
                pass
            self._wake.clear()

    async def close(self) -> None:
        """Release what the daemon holds of the gang. Ranks go on."""
        self._incoming.cancel()
        await self._agreeing.close()
        if self._socket is not None:
            self._socket.close()
        self.deaths.close()
        self.pages.close()

    def adopt(self, children: Mapping[str, RankProcess]) -> None:
        """Take over what a former daemon left. `children`: processes of the launchers, by name."""
        self._mark = recall_notes(self.host, self.paths, self.launching, self.memory, self._segments)
        self.master_desired = recall_master_desired(self.paths, self.desired)
        kept = exit_watcher.kept(self.paths)
        noted = recall_wanted_checkpoints(self.paths)
        self.saving.recall(self.wanted.stop_sequence, kept.step if kept is not None else None, noted)
        if kept is not None:
            self._settled = kept.outcome
            if self._settled.kind in _NOT_STARTED:
                self._launch_failure = self._settled
        ranks = find_ranks(self.paths, self.part, self.pages, self.launching, children)
        if ranks is not None:
            self._launched = True
            self._launched_at = time.monotonic()
            for rank, process in ranks.items():
                self.deaths.watch(rank, process)
                if self.deaths.is_live(rank):
                    self.host.cgroups.track(self.paths.group, process.pid)
            self._freezer.recall()
            # If its lease ended after an order to stop, it would run beside its successor for the rest of its grace.
            self.wanted = hastened(self.wanted, self._is_stale)
        self._escalation.begin(self.wanted, time.monotonic(), self._step_rate.iteration_seconds)
        self._judge_anew()
        log.info(
            "gang adopted", extra={"job": self.desired.job, "epoch": self.desired.epoch, "running": self._launched}
        )

    # -- the tick -------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        now = time.monotonic()
        if self._launched and not self._reaped and self.pages.damage():
            await self._escalation.abandon(self.pages.damage())
        if self._launched and not self._reaped and self.pages.readable:
            await self._begin_attending()
            await self._follow_memory_limit()
            if self._order_due:
                await self._try_to_write_order()
            if self.deaths.awaited:
                await self.deaths.settle(lambda rank: self.pages.progress(rank).exit_code)
            self._agreeing.relay(self.wanted, self.judgement.phase)
            self._write_lease()
            await self._tend(now)
        else:
            if self.deaths.awaited:
                await self.deaths.settle(lambda rank: None)
            if self._launched and not self._reaped:
                await self._freezer.follow(self.facts(), now)
        if self._launched and not self._reaped:
            await self._look_for_segments(now)
        facts = self.facts()
        before = self.judgement.phase
        self.judgement, self.judged_order, self.judged_master_desired = (
            gang_judgement.judge(facts, now),
            facts.wanted,
            self.master_desired,
        )
        if self.judgement.phase is PartPhase.PARKED and (
            self.judgement.level >= ParkLevel.OFFLOAD or self.wanted.order.is_by_rotation
        ):
            # before a gang that comes to its devices looks for cores
            self.pinning.give_up()
        if self.judgement.phase is not before:
            self._phase_changed()
        for todo in self.judgement.todo:
            await self._do(todo, facts, now)
        if self._launched and not self._reaped and not (self._order_due and self._unwritten):
            await self._escalation.press(self.facts(), self.pages, now)
        self._publish_observation()

    def facts(self) -> gang_judgement.GangPart:
        ranks: tuple[gang_judgement.Rank, ...] = ()
        if self._launched:
            if self.pages.readable:
                ranks = self.pages.ranks(self._mark)
            else:
                # pages that were lost with the machine's memory no longer show which ranks were let go
                is_gone = not self.pages.damage()
                ranks = tuple(
                    gang_judgement.Rank(rank, opaque=bool(self.pages.foreign), let_go=is_gone)
                    for rank in self.part.ranks
                )
            ranks = tuple(replace(rank, exit=self.deaths.exits.get(rank.rank)) for rank in ranks)
        facts = self._facts(ranks)
        return replace(
            facts, refusal=self.rank_errors.refusal(facts, self.saving.keeper.refusal(self.wanted.stop_sequence))
        )

    def _facts(self, ranks: tuple[gang_judgement.Rank, ...]) -> gang_judgement.GangPart:
        return gang_judgement.GangPart(
            wanted=self.wanted,
            ranks=ranks,
            launched=self._launched,
            launched_at=self._launched_at,
            world=self.part.world,
            no_agent=has_no_agent(self.desired.spec),
            restores=self.desired.HasField("restore"),
            frozen=self._freezer.frozen,
            launch_failure=self._launch_failure,
            has_room=self._incoming.has_room(self.wanted),
            memory_freed=self.memory.freed,
            published_step=self.saving.published_step(self.wanted, self._settled),
            escalated=self._escalation.escalated,
            out_of_memory=self._launched and not self._reaped and self._was_out_of_memory(),
            damage=self.pages.damage(),
            stop_signalled=self._escalation.stop_signalled,
            settled=self._settled,
        )

    def _was_out_of_memory(self) -> bool:
        killed = any(ending.signal == gang_judgement.SIGKILL for ending in self.deaths.exits.values())
        return killed and self.host.cgroups.oom_kills(self.paths.group) > 0

    async def _do(self, todo: gang_judgement.Todo, facts: gang_judgement.GangPart, now: float) -> None:
        match todo:
            case gang_judgement.Todo.LAUNCH:
                await self._launch()
            case gang_judgement.Todo.VERIFY_MEMORY:
                self.memory.verify(self.pages, self.deaths.processes, self.desired.claim.device_mask)
                if self.memory.freed:
                    self._write_local()
                    self.wake()
            case gang_judgement.Todo.TERMINATE:
                await self._look_for_segments(now, at_once=True)
                self._escalation.terminate(self.wanted, now)
            case gang_judgement.Todo.KILL:
                await self._escalation.end()
            case gang_judgement.Todo.REAP:
                await self._reap()

    async def _launch(self) -> None:
        self._segments.begin()
        try:
            launched = await self.launching.launch(self.desired, self.wanted, self.pages)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if not isinstance(error, self.launching.REFUSALS):
                log.exception("launch failed", extra={"job": self.desired.job})
            kind = error.kind if isinstance(error, LaunchRefusedError) else PartOutcomeKind.LAUNCH_FAILED
            found = error.found if isinstance(error, LaunchRefusedError) else ()
            # The exit code shows the master that the command is at fault, and not the node.
            is_command = isinstance(error, LauncherError) and error.reason == "COMMAND"
            self._launch_failure = PartOutcome(
                kind, _NOT_EXECUTED if is_command else 0, 0, str(error) or type(error).__name__, found
            )
            self.wake()
            return
        if launched is None:
            return  # devices or cores are not free yet: retried at the next tick
        hit("between-fork-and-page")
        for rank, process in launched.items():
            self.deaths.watch(rank, process)
        self._launched = True
        self._launched_at = time.monotonic()
        self._write_local()
        log.info("gang launched", extra={"job": self.desired.job, "epoch": self.desired.epoch})
        if self.wanted.intent is OrderIntent.PREPARE:
            hit("after-prepare")
        self.wake()

    async def _begin_attending(self) -> None:
        """Start socket, boundary relay and incoming transfers of a running gang, each once."""
        if self._socket is None:
            self._socket = JobSocketServer(self.paths.socket, self._receive_packet)
            self.pages.written = self._socket.nudge
            try:
                self._socket.start()
            except OSError as error:
                log.warning("job socket not made", extra={"error": str(error)})
        self._agreeing.begin(self.desired.members[0], self.wanted, self.receive_points)
        await self._incoming.follow(self.desired, self.wanted)

    async def _follow_memory_limit(self) -> None:
        """Set the memory limit to the claim; while parked at OFFLOAD, to the memory that it keeps."""
        claim, kept = self.desired.claim, self.memory.kept_bytes
        if not claim.memory_bytes:
            return
        rests = kept and self.wanted.intent is OrderIntent.PARK and not self.wanted.order.is_by_rotation
        limit = (min(kept, claim.memory_bytes) if rests else claim.memory_bytes) + claim.arena_bytes
        if limit != self._memory_limit_bytes:
            self._memory_limit_bytes = limit
            await asyncio.to_thread(self.host.cgroups.set_memory_limit, self.paths.group, limit)

    async def _try_to_write_order(self) -> None:
        """Write the order. If the disk is full, the loop goes on and the next tick retries."""
        try:
            await self._write_order()
        except OSError as error:
            if self._unwritten != self.wanted.order:
                self._unwritten = self.wanted.order
                log.error("order not written", extra={"job": self.desired.job, "error": str(error)})
            return
        if self._unwritten is not None:
            # the ranks' deadline begins only now
            self._unwritten = None
            self._escalation.begin(self.wanted, time.monotonic(), self._step_rate.iteration_seconds)

    async def _write_order(self) -> None:
        order = page_order(self.wanted)
        if order is None:
            self._order_due = False
            return
        storage = self.host.storage.path if self.host.storage.proved else None
        await asyncio.to_thread(
            write_details, self.paths.orders, str(order.sequence), storage, self.desired.job_uid, self.desired.epoch
        )
        deadline = now_ns() + int(self.host.order_deadline_seconds * 1e9) if order.stop_sequence else 0
        self.pages.write_order(order.sequence, order.order, order.stop_sequence, order.level, deadline)
        self._order_due = False
        self._write_local()

    # -- messages -------------------------------------------------------------------------------------------------

    def receive_points(self, received: RelayMessage) -> None:
        """Take boundary points from another daemon of this gang."""
        if not self._reaped and self.pages.readable:
            self._agreeing.receive(received)
            if received.agreement and received.agreement != self.peer_agreement:
                self.peer_agreement = received.agreement
                self._phase_changed()
            self.wake()

    def _receive_packet(self, packet: dict[str, Any]) -> None:
        if packet.get("event") in ("error", "note", "hello"):
            self._packets += 1
            if self._packets <= _LOGGED_PACKETS:
                if "message" in packet:
                    packet = {**packet, "message": summary_of(str(packet["message"]))}
                log.info("packet of the job", extra={"job": self.desired.job, "packet": str(packet)[:500]})
            elif self._packets == _LOGGED_PACKETS + 1:
                log.warning("further packets of the job are not logged", extra={"job": self.desired.job})
        self.wake()

    # -- parts of every tick --------------------------------------------------------------------------------------

    def _write_lease(self) -> None:
        until = self.host.lease_until_ns
        if until is not None and until != self._lease_written and not self.wanted.ends_at_once:
            self._lease_written = until
            if self.pages.lease_is_over(now_ns()):
                self._freezer.doubt()
            self.pages.extend_lease(until)

    async def _tend(self, now: float) -> None:
        ranks = self.pages.ranks(self._mark)
        for rank in ranks:
            if rank.hello and self.memory.attach(rank.rank, self.deaths.processes.get(rank.rank)):
                self._write_local()
        if self.wanted.stop_sequence:
            self.memory.sample(self.pages, self.deaths.processes)
            agreement = self.wanted.stop_sequence
            acked = [point.ack_sequence == agreement for point in self.pages.points().values()]
            if any(acked) and not all(acked):
                hit("partial-acks")
        if self.wanted.intent is OrderIntent.RUN and self.judgement.phase is PartPhase.RUNNING:
            await self.pinning.follow(self.desired, self._step_rate.iteration_seconds)
        await self.saving.tend(self.desired, self.wanted, self.judgement.phase, now, not self.deaths.exits)
        facts = self.facts()
        await self._freezer.follow(facts, now)
        if any(gang_judgement.is_opaque(facts, rank, now) for rank in facts.ranks):
            await self._stall_watch.look_at_processes((one.pid for one in self.deaths.processes.values()), now)
        if now - self._logs_at >= _LOG_SECONDS:
            self._logs_at = now
            self._begin_mirroring()

    # -- the end --------------------------------------------------------------------------------------------------

    async def _reap(self) -> None:
        """Remove what is left of a gang without processes. Its outcome stays until the master has acknowledged it."""
        if self._reaped:
            return
        facts = self.facts()
        if gang_judgement.awaits_publication(facts) and self.host.storage.path is not None:
            return  # the pages are still needed
        outcome = gang_judgement.judge(facts, time.monotonic()).outcome
        if outcome is None:
            return  # its checkpoint can be searched only once the master has named the storage
        hit("before-reap")
        self._incoming.cancel()
        if self._settled is None:
            self._settled = outcome
            await asyncio.to_thread(exit_watcher.keep, self.paths, outcome, facts.published_step)
        self._reaped = True
        await self._agreeing.close()
        if self._socket is not None:
            self._socket.close()
        await self._mirror_logs(sealed=True)
        self.memory.detach()
        await self._look_for_segments(time.monotonic(), at_once=True)
        await self.launching.clean()
        await asyncio.to_thread(self._segments.remove)
        self.deaths.close()
        log.info(
            "gang ended", extra={"job": self.desired.job, "epoch": self.desired.epoch, "outcome": outcome.kind.name}
        )
        self.wake()

    async def forget(self) -> None:
        """Remove all of the gang but its logs: the master has the outcome."""
        self.forgotten = True
        self.pages.close()
        await asyncio.to_thread(self.paths.discard)
        self.wake()

    # -- helpers --------------------------------------------------------------------------------------------------

    def _pause(self) -> float:
        phase = self.judgement.phase
        copying = _COPYING.get(phase) if self.pages.readable else None
        return next_look(
            phase,
            is_over=self._reaped,
            is_launched=self._launched,
            is_copying=copying is not None
            and any(self.pages.progress(rank).state == copying for rank in self.part.ranks),
            is_verifying=self.memory.waiting,
            is_death_awaited=self.deaths.awaited,
            is_preparing=self.wanted.intent is OrderIntent.PREPARE,
            is_young=time.monotonic() - max(self._launched_at, self._ordered_at) < _YOUNG_SECONDS,
            is_agreeing=self.pages.readable and bool(self._agreeing.in_flight(self.wanted, phase)),
        )

    def trouble(self) -> str:
        """Return why a migration, or a stop at the ordered level, cannot continue; else the last checkpoint's error."""
        reason = self.pages.foreign or self._incoming.trouble
        reason = reason or self.rank_errors.under(self.wanted.order, self.saving.saved_request)
        if reason:
            return reason
        if gang_judgement.is_beyond(self.facts()):
            why = self.rank_errors.reason("BOUNDARIES") or "this job has no boundaries"
            what = self.wanted.level.name if self.wanted.intent is OrderIntent.PARK else "a move"
            return f"{why}: {what} is not possible"
        is_to_rest = self.judgement.phase is PartPhase.STOPPING and self.wanted.intent is OrderIntent.PARK
        if is_to_rest and not self._freezer.frozen and self._has_no_boundaries():
            return f"this job has no boundaries: {self.wanted.level.name} cannot be had of it"
        if self.wanted.intent in (OrderIntent.PREPARE, OrderIntent.HAND_OVER):
            return self._escalation.given_up  # nothing else stands in the way of a move
        reason = self.launching.trouble or self.memory.trouble or self.pinning.trouble
        return reason or self.saving.keeper.trouble or self.host.storage.trouble

    def _has_no_boundaries(self) -> bool:
        facts, now = self.facts(), time.monotonic()
        return any(gang_judgement.is_opaque(facts, rank, now) for rank in facts.ranks if rank.exit is None)

    def progress(self) -> tuple[PageSample, float, float] | None:
        """Return the newest sample, steps per second and data-wait share since the last call; None before the first
        boundary."""
        if not self._launched or self._reaped or not self.pages.readable:
            return None
        if self.wanted.order.is_by_rotation and self.phase is not PartPhase.RUNNING:
            self._step_rate.forget()
            self._utilization.forget()
            return None
        return self._step_rate.measure()

    def used(self, data_wait_share: float) -> float | None:
        """Return the utilization of its devices since the last call, 0 to 1; None where nothing reports it."""
        return self._utilization.measure(data_wait_share)

    def metrics(self) -> tuple[ReportedMetric, ...]:
        """Return the named values that the job has reported through its first rank."""
        if not self._launched or 0 not in self.part.ranks or not self.pages.readable:
            return ()
        return metrics.read(self.pages[0])

    def stall_reason(self) -> str:
        """Return why a gang that should run makes no progress; empty otherwise."""
        lives = self._launched and not self._reaped and self.pages.readable
        is_meant_to = self.wanted.intent is OrderIntent.RUN and self.judgement.phase in (
            PartPhase.STARTING,
            PartPhase.RUNNING,
        )
        return self._stall_watch.stall_reason(lives and is_meant_to)

    def _write_local(self) -> None:
        fields = {
            "grant": [list(share) for share in self.host.shares_of(self.paths.group)],
            "baselines": self.memory.baselines(),
            "mark": self._mark.journal(),
            "kept_memory_bytes": self.memory.kept_bytes,
            "wanted_checkpoints": self.saving.wanted_paths,
            "segments": self._segments.journal(),
            "told": to_json(self.master_desired) if self.wanted.order.is_by_rotation else {},
            **self.launching.journal(),
        }
        write_hint(self.paths.local, fields)

    async def _look_for_segments(self, now: float, *, at_once: bool = False) -> None:
        if await self._segments.look(now, at_once=at_once):
            self._write_local()

    def _begin_mirroring(self) -> None:
        """Copy logs in a task of its own: storage may hang."""
        if self._mirroring is None or self._mirroring.done():
            self._mirroring = asyncio.create_task(self._mirror_logs())

    async def _mirror_logs(self, sealed: bool = False) -> None:
        logs, part = self.host.logs, self.part
        if sealed and self._mirroring is not None:
            await asyncio.wait((self._mirroring,), timeout=_MIRROR_S)
        try:
            await self.host.storage.work.run(
                logs.mirror_all, self.desired.job_uid, part.ranks, self.desired.epoch, sealed, within_s=_MIRROR_S
            )
        except OSError as error:
            log.warning("log not copied", extra={"job": self.desired.job, "error": str(error)})

    def _judge_anew(self) -> None:
        """Judge and observe the gang before its first tick."""
        self.judgement, self.judged_order = gang_judgement.judge(self.facts(), time.monotonic()), self.wanted
        self.judged_master_desired = self.master_desired
        self.observed = observe(self)

    def _publish_observation(self) -> None:
        if self.judgement.phase is PartPhase.PARKED and self._handed_logs != self.wanted.order.number:
            self._handed_logs = self.wanted.order.number
            self._begin_mirroring()
        message = observe(self)
        new = message.SerializeToString(deterministic=True)
        if new != self._observed:
            if self.judgement.phase is PartPhase.PARKED:
                hit("parked-before-report")
            if self.judgement.phase is PartPhase.READY and self.wanted.intent is OrderIntent.PREPARE:
                hit("before-move-commit")
            self._observed = new
            self.observed = message
            self.judged.set()
            self.host.changed()
