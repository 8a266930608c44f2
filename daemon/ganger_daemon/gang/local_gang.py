"""A gang's part on this node: a loop that reads pages and exits, lets the core judge them, and acts on the judgement.
The daemon may die at any instruction: pages, exit records and the process group hold the state; `wanted.json` and
`local.json` are hints that save messages."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from ganger.agent.v1 import agent_pb2, peer_pb2
from ganger.failpoints import hit
from ganger.injob.page_access import PageError
from ganger.injob.page_layout import PageState
from ganger.protocol.gang_orders import DesiredOrder, OrderIntent, ParkLevel
from ganger.tracing import start_of_gang, tracer

from ganger_daemon.core import gang_judgement
from ganger_daemon.core.gang_judgement import PartPhase, next_look
from ganger_daemon.core.part_facts import GangPart, PartOutcome, PartOutcomeKind, awaits_publication
from ganger_daemon.gang import exit_watcher
from ganger_daemon.gang.gang_context import GangContext, ReceivedOrders
from ganger_daemon.gang.gang_parts import GangParts
from ganger_daemon.gang.job_output import JobSocketServer, LogMirror, PacketLog
from ganger_daemon.gang.observation import GangReport, JudgedState, is_by_signal, observe
from ganger_daemon.node.node_context import NodeContext, PeerCalls
from ganger_daemon.node.process_identity import RankProcess

log = logging.getLogger(__name__)

_COPYING = {PartPhase.STOPPING: PageState.SAVING, PartPhase.PREPARED: PageState.RESTORING}
_NOT_STARTED = (PartOutcomeKind.LAUNCH_FAILED, PartOutcomeKind.STATE_UNREADABLE, PartOutcomeKind.STATE_OUTDATED)
_YOUNG_S = 60.0


class LocalGang:
    """A gang's part on this node, made from a desired message, or from a former daemon's state (`adopt`).

    `run` is its loop. `blocked_by`: the job that is on its devices; `cores_kept_by`: a job that still has cores to
    give back; `phase_changed`: called when its phase, or the agreement of a peer, has changed; `judged` is set once
    `observed` can report the gang truly; `forgotten`: the master has its outcome, and it is over."""

    def __init__(
        self,
        host: NodeContext,
        peers: PeerCalls,
        desired: agent_pb2.DesiredGang,
        blocked_by: Callable[[LocalGang], str],
        cores_kept_by: Callable[[LocalGang], str],
        phase_changed: Callable[[], None] = lambda: None,
    ) -> None:
        """Raises DesiredInvalidError."""
        self._orders = ReceivedOrders(desired)
        self.context = GangContext.of(host, peers, desired, self.wake, self._write_notes)
        self.parts = GangParts.of(self.context, self._orders, lambda: blocked_by(self), lambda: cores_kept_by(self))
        judged = JudgedState(gang_judgement.Judgement(PartPhase.STARTING), self._orders.wanted, desired)
        self.report = GangReport(self.parts, judged)
        self._phase_changed = phase_changed
        self._made_at = self._launched_at = time.time()  # By the clock that spans of all nodes share
        self._socket: JobSocketServer | None = None
        self._packets = PacketLog(desired.job)
        self._logs = LogMirror(self.context, desired.job)
        self._parked_order = 0  # Number of the order under which it was seen parked last
        self._wake = asyncio.Event()
        self._observed: bytes = b""
        self.forgotten = False
        self.judged = asyncio.Event()
        # From the start: a desired version with this gang is answered with its state.
        self.observed = observe(self.report)

    # -- state ----------------------------------------------------------------------------------------------------

    @property
    def desired(self) -> agent_pb2.DesiredGang:
        """The master's desired state, or what a slice switch has made of it."""
        return self._orders.desired

    @property
    def master_desired(self) -> agent_pb2.DesiredGang:
        return self._orders.master_desired

    @property
    def wanted(self) -> DesiredOrder:
        return self._orders.wanted

    @property
    def stop_wanted(self) -> bool:
        """Whether the desired set lacks it: it is being stopped."""
        return self._orders.is_stop_wanted

    @property
    def judgement(self) -> gang_judgement.Judgement:
        return self.report.judged.judgement

    @property
    def phase(self) -> PartPhase:
        return self.report.judged.judgement.phase

    @property
    def uid_and_epoch(self) -> tuple[str, int]:
        return (self.desired.job_uid, self.desired.epoch)

    @property
    def launched(self) -> bool:
        return self.parts.launching.is_done

    @property
    def is_leaving(self) -> bool:
        """Whether another gang gets its resources soon: it is being stopped or parked."""
        intent = self.master_desired.intent
        if self.stop_wanted or self.phase is PartPhase.ENDED or intent == agent_pb2.INTENT_STOP:
            return True
        is_to_rest = intent in (agent_pb2.INTENT_PARK, agent_pb2.INTENT_HAND_OVER)
        return is_to_rest and self.phase is not PartPhase.PARKED

    @property
    def may_be_on_devices(self) -> bool:
        """Whether its processes run or may run at any moment, or may be left of a failed launch, whatever was seen."""
        if self.phase is PartPhase.ENDED:
            return self.parts.launching.failure is not None and not self.parts.exits.is_reaped
        if not self.launched:
            return self.parts.launching.is_under_way
        return gang_judgement.may_be_on_devices(self.wanted, self.report.judged.order, self.judgement)

    @property
    def cannot_park(self) -> bool:
        """Whether it was ordered to park at a boundary and will not reach the ordered level."""
        return self.launched and self.report.cannot_park

    # -- orders ---------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Run the next tick at once."""
        self._wake.set()

    def mark_gone(self, outcome: PartOutcome) -> None:
        """Report only an outcome: nothing of the gang is on this node."""
        self.parts.exits.settled = outcome
        self.parts.exits.is_reaped = True
        self._judge_anew()

    def set_master_desired(self, desired: agent_pb2.DesiredGang) -> None:
        """Record the master's desired state, which the gang follows only as its slices allow."""
        self._orders.set_master_desired(desired)

    def set_kept_checkpoints(self, paths: Sequence[str]) -> None:
        """Note the paths of the checkpoints that the master may start the job from."""
        if self.parts.saving.want(paths) and self.launched:
            self._write_notes()

    def try_memory(self, memory_bytes: int) -> None:
        """Begin a trial of so much memory for its processes here, or with zero end it."""
        if memory_bytes != self.parts.memory_trial.asked_bytes:
            self.parts.memory_trial.ask(memory_bytes)
            self.wake()

    def apply_order(self, desired: agent_pb2.DesiredGang) -> None:
        """Take a newer order. Returns at once; the loop carries it out."""
        orders, parts, pages = self._orders, self.parts, self.context.pages
        former = orders.take(desired, self._is_stale, self.launched, self._is_by_signal)
        if former is None:
            return
        wanted = orders.wanted
        if self.launched and pages.readable:
            parts.saving.obey(former, wanted)
            if wanted.intent is OrderIntent.RUN and former.intent not in (OrderIntent.RUN, OrderIntent.PREPARE):
                orders.mark = pages.mark()
            if wanted.stop_sequence == 0 or wanted.stop_sequence != former.stop_sequence:
                parts.memory.begin()
        if self.launched:
            orders.keep(self.context.paths)
        self._begin_escalation()
        self.wake()

    def stop(self, is_stale: bool = False) -> None:
        """Stop the gang, which the master no longer wants. `is_stale`: the master wants a newer epoch of the job."""
        self._orders.stop(is_stale or self._is_stale)
        self._begin_escalation()
        self.wake()

    @property
    def _is_by_signal(self) -> bool:
        return is_by_signal(self.parts)

    @property
    def _is_stale(self) -> bool:
        return self.launched and self.parts.freezer.is_stale(self.wanted)

    def _begin_escalation(self) -> None:
        self.parts.escalation.begin(self.wanted, time.monotonic(), self.parts.step_rate.iteration_s)

    def receive_points(self, received: peer_pb2.RankPoints) -> None:
        """Take boundary points from another daemon of this gang."""
        if not self.parts.exits.is_reaped and self.context.pages.readable:
            if self.parts.boundary.receive(received):
                self._phase_changed()
            self.wake()

    def _receive_packet(self, packet: dict[str, object]) -> None:
        self._packets.add(packet)
        self.wake()

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
                self.context.pages.spoil(str(error))
                continue
            except Exception:
                log.exception("gang loop failed", extra={"job": self.desired.job, "epoch": self.desired.epoch})
                pause = 1.0
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()
            self._wake.clear()

    async def close(self) -> None:
        """Release what the daemon holds of the gang. Ranks continue."""
        self.parts.incoming.cancel()
        await self.parts.launching.hooks.leave()
        # Without a daemon, a job that needs more memory would be slowed down by a trial.
        await self.parts.memory_trial.lift()
        await self.parts.boundary.close()
        if self._socket is not None:
            self._socket.close()
        self.parts.exits.close()
        self.context.pages.close()

    def adopt(self, children: Mapping[str, RankProcess]) -> None:
        """Take over what a former daemon left. `children`: processes of the launchers, by name."""
        context, orders, parts = self.context, self._orders, self.parts
        parts.recall_notes()
        stored = exit_watcher.kept(context.paths)
        noted = parts.recall_wanted_checkpoints()
        parts.saving.recall(orders.wanted.stop_sequence, None if stored is None else stored.step, noted)
        if stored is not None:
            parts.exits.settled = stored.outcome
            if stored.outcome.kind in _NOT_STARTED:
                parts.launching.failure = stored.outcome
        ranks = parts.find_ranks(children)
        if ranks is not None:
            parts.launching.confirm(ranks)
            parts.freezer.recall()
            # If its lease ended after an order to stop, it would run beside its successor for the rest of its grace.
            orders.hasten(self._is_stale)
        if self._is_by_signal:
            orders.mark_by_signal()
        self._begin_escalation()
        self._judge_anew()
        log.info("gang adopted", extra={"job": self.desired.job, "epoch": self.desired.epoch, "running": self.launched})

    # -- the tick -------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        now, parts = time.monotonic(), self.parts
        if parts.is_live:
            await self._follow_ranks(now)
        elif parts.exits.awaited:
            await parts.exits.settle(lambda rank: None, parts.launcher.lives)
        facts = self.parts.facts()
        before = self.phase
        self._judge(facts, now)
        if self.phase is PartPhase.PARKED and (
            self.judgement.level >= ParkLevel.OFFLOAD or self._orders.is_by_rotation
        ):
            # Release cores before the next gang on these devices claims them.
            parts.pinning.give_up()
        if self.phase is not before:
            if before is PartPhase.STARTING and self.phase is PartPhase.RUNNING:
                self._trace("first step", self._launched_at, time.time())
            self._phase_changed()
            if parts.is_live and self.context.pages.readable:
                parts.boundary.relay(self.wanted, self.phase)
        for todo in self.judgement.todo:
            await self._do(todo, facts, now)
        if parts.is_live and not self._orders.is_hindered:
            await parts.escalation.escalate(self.parts.facts(), now)
        self._publish_observation()

    async def _follow_ranks(self, now: float) -> None:
        """Bring launched ranks and the daemon to each other's news, through the pages where they can be read."""
        parts, pages = self.parts, self.context.pages
        if damage := pages.damage() or parts.devices.lost:
            await parts.escalation.abandon(damage)
        # Damaged pages do not show that the gang runs; then nothing holds its memory back.
        is_running = pages.readable and self.wanted.intent is OrderIntent.RUN and self.phase is PartPhase.RUNNING
        await parts.memory_trial.follow(parts.memory.limit_bytes, is_running, now)
        if pages.readable:
            await self._begin_attending()
            is_parked = self.wanted.intent is OrderIntent.PARK and not self._orders.is_by_rotation
            await parts.memory.follow_limit(self.desired.claim, is_parked)
            if self._orders.is_due and await self._orders.write(self.context):
                self._begin_escalation()  # The ranks' deadline begins only now
            if parts.exits.awaited:
                await parts.exits.settle(lambda rank: pages.progress(rank).exit_code, parts.launcher.lives)
            parts.boundary.relay(self.wanted, self.phase)
            if not self.wanted.ends_at_once:
                parts.freezer.extend_lease()
            await self._tend(now)
        else:
            if parts.exits.awaited:
                await parts.exits.settle(lambda rank: None, parts.launcher.lives)
            await parts.freezer.follow(self.parts.facts(), now)
        await self._look_for_segments(now)

    async def _begin_attending(self) -> None:
        if self._socket is None:
            paths = self.context.paths
            self._socket = JobSocketServer(paths.socket, self._receive_packet, paths.account)
            self.context.pages.written = self._socket.nudge
            self.parts.images.hang_up, self.parts.images.pick_up = self._socket.pause, self._socket.start
            self._socket.start()
        self.parts.boundary.begin(self.desired.members[0], self.wanted, self.receive_points)
        self.parts.incoming.follow(self.desired, self.wanted)

    async def _tend(self, now: float) -> None:
        parts, pages, wanted = self.parts, self.context.pages, self.wanted
        for rank in pages.ranks(self._orders.mark):
            if rank.hello and parts.memory.attach(rank.rank, parts.exits.processes.get(rank.rank)):
                self._write_notes()
        if wanted.stop_sequence:
            parts.memory.sample(pages, parts.exits.processes)
            acked = [point.ack_sequence == wanted.stop_sequence for point in pages.points().values()]
            if any(acked) and not all(acked):
                hit("partial-acks")
        if wanted.intent is OrderIntent.RUN and self.phase is PartPhase.RUNNING:
            await parts.pinning.follow(self.desired, self.parts.step_rate.iteration_s)
        parts.images.follow(wanted, parts.launcher.open_image_arena)
        parts.launching.follow_arrival(parts.incoming.is_whole)
        # Frozen processes are thawed first: an image has them as they stand.
        is_opaque = gang_judgement.has_opaque_rank(self.parts.facts(), now) and not parts.freezer.frozen
        await parts.saving.tend(self.desired, self.wanted, self.phase, now, not parts.exits.exits, is_opaque)
        facts = self.parts.facts()
        parts.devices.follow(facts, now, holds_still=parts.images.holds_still)
        await parts.freezer.follow(facts, now)
        if gang_judgement.has_opaque_rank(facts, now):
            pids = [process.pid for process in parts.exits.processes.values()]
            await parts.stall_watch.look_at_processes(pids, now)
        self._watch_use(facts, now)
        self._logs.follow(now)

    def _watch_use(self, facts: GangPart, now: float) -> None:
        parts, pages = self.parts, self.context.pages
        if self._orders.is_by_rotation and self.phase is not PartPhase.RUNNING:
            parts.idle_watch.stand()
        elif self.phase is not PartPhase.RUNNING or gang_judgement.is_at_work(facts):
            parts.idle_watch.begin_anew()
        else:
            parts.idle_watch.follow(map(pages.progress, self.context.part.ranks), now)
        if parts.idle_watch.is_news:
            self._write_notes()

    def _judge(self, facts: GangPart, now: float) -> None:
        judgement = gang_judgement.judge(facts, now)
        self.report.judged = JudgedState(judgement, facts.wanted, self._orders.master_desired)

    def _judge_anew(self) -> None:
        self._judge(self.parts.facts(), time.monotonic())
        self.observed = observe(self.report)

    async def _do(self, todo: gang_judgement.Todo, facts: GangPart, now: float) -> None:
        parts = self.parts
        match todo:
            case gang_judgement.Todo.LAUNCH:
                await self._launch()
            case gang_judgement.Todo.VERIFY_MEMORY:
                parts.memory.verify(self.context.pages, parts.exits.processes, self.desired.claim.device_mask)
                if parts.memory.freed:
                    self._write_notes()
                    self.wake()
            case gang_judgement.Todo.TERMINATE:
                await self._look_for_segments(now, at_once=True)
                parts.escalation.terminate(self.wanted, now)
            case gang_judgement.Todo.ASK_TO_SAVE:
                await self._look_for_segments(now, at_once=True)
                parts.escalation.ask_to_save(self.desired.spec, now)
                self._write_notes()
            case gang_judgement.Todo.KILL:
                await parts.escalation.end()
            case gang_judgement.Todo.END_HOOKS:
                await self._end_hooks(facts, now)
            case gang_judgement.Todo.REAP:
                await self._reap()

    async def _launch(self) -> None:
        self.parts.segments.begin()
        if not await self.parts.launching.attempt(self._orders):
            return  # Devices, cores or storage are not ready yet: retried at the next tick
        if self.launched:
            self._write_notes()
            log.info("gang launched", extra={"job": self.desired.job, "epoch": self.desired.epoch})
            self._launched_at = time.time()
            self._trace("launch", self._made_at, self._launched_at)
            if self.wanted.intent is OrderIntent.PREPARE:
                hit("after-prepare")
        self.wake()

    async def _end_hooks(self, facts: GangPart, now: float) -> None:
        if self._awaits_publication(facts):
            return
        await self._look_for_segments(now, at_once=True)
        self.parts.launching.hooks.close()

    def _awaits_publication(self, facts: GangPart) -> bool:
        return awaits_publication(facts) and self.context.storage is not None

    async def _reap(self) -> None:
        """Remove what is left of a gang without processes. Its outcome stays until the master has acknowledged it."""
        parts = self.parts
        if parts.exits.is_reaped:
            return
        facts = self.parts.facts()
        if self._awaits_publication(facts):
            return  # The pages are still needed
        outcome = gang_judgement.judge(facts, time.monotonic()).outcome
        if outcome is None:
            return  # Its checkpoint can be searched only once the master has named the storage
        hit("before-reap")
        parts.incoming.cancel()
        await parts.exits.store(outcome, facts.published_step)
        parts.exits.is_reaped = True
        if self._socket is not None:
            self._socket.close()
        await self._logs.finish()
        parts.memory.detach()
        await self._look_for_segments(time.monotonic(), at_once=True)
        await parts.launching.clean()
        await asyncio.to_thread(parts.segments.remove)
        parts.exits.close()
        log.info(
            "gang ended", extra={"job": self.desired.job, "epoch": self.desired.epoch, "outcome": outcome.kind.name}
        )
        self.wake()

    async def forget(self) -> None:
        """Remove all of the gang but its logs: the master has the outcome."""
        self.forgotten = True
        await self.parts.boundary.close()
        self.context.pages.close()
        await asyncio.to_thread(self.context.paths.discard)
        self.wake()

    # -- helpers --------------------------------------------------------------------------------------------------

    def _pause(self) -> float:
        pages, parts, phase = self.context.pages, self.parts, self.phase
        copying = _COPYING.get(phase) if pages.readable else None
        ranks = self.context.part.ranks if copying is not None else ()
        last_event_at = max(parts.launching.launched_at, self._orders.ordered_at)
        return next_look(
            phase,
            is_over=parts.exits.is_reaped,
            is_launched=self.launched,
            is_copying=parts.saving.is_checking or any(pages.progress(rank).state == copying for rank in ranks),
            is_verifying=parts.memory.waiting,
            is_death_awaited=parts.exits.awaited,
            is_preparing=self.wanted.intent is OrderIntent.PREPARE,
            is_young=time.monotonic() - last_event_at < _YOUNG_S,
            is_saving_itself=bool(parts.escalation.asked_to_save_s) and not parts.exits.awaited,
            is_in_hook=parts.launching.hooks.is_running,
            is_agreeing=pages.readable and bool(parts.boundary.in_flight(self.wanted, phase)),
        )

    def _trace(self, what: str, begin_s: float, end_s: float) -> None:
        desired, node = self.desired, self.context.host.node
        figures: dict[str, str | int] = {
            "ganger.node": node,
            "ganger.epoch": desired.epoch,
            "ganger.ranks": len(self.context.part.ranks),
        }
        tracer().add(
            desired.job_uid,
            f"{what} on {node}",
            begin_s,
            end_s,
            parent=start_of_gang(desired.epoch),
            attributes=figures,
        )

    def _write_notes(self) -> None:
        self.parts.write_notes()

    async def _look_for_segments(self, now: float, *, at_once: bool = False) -> None:
        if await self.parts.segments.look(now, at_once=at_once):
            self._write_notes()

    def _publish_observation(self) -> None:
        if self.phase is PartPhase.PARKED and self._parked_order != self.wanted.order.number:
            self._parked_order = self.wanted.order.number
            self._logs.begin()
        message = observe(self.report)
        new = message.SerializeToString(deterministic=True)
        if new != self._observed:
            if self.phase is PartPhase.PARKED:
                hit("parked-before-report")
            if self.phase is PartPhase.READY and self.wanted.intent is OrderIntent.PREPARE:
                hit("before-move-commit")
            self._observed = new
            self.observed = message
            self.judged.set()
            self.context.host.changed()
