"""One gang's local part, alive: a loop that reads pages and exits, lets core judge, and does what is left to do.

The loop may die with the daemon at any instruction. What counts is in the pages, in the exit records and in the
group of processes; `wanted.json` and `local.json` are hints that save questions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from ganger.agent.v1 import agent_pb2
from ganger.injob.launcher.client import LauncherError
from ganger.injob.page import CHECKPOINT_BIT, now_ns
from ganger.injob.page import Level as PageLevel
from ganger.v1 import job_pb2

from ganger_daemon.checkpoints.keeper import Keeper, StorageError, publish_here
from ganger_daemon.checkpoints.layout import parse_final
from ganger_daemon.checkpoints.publish import Shard
from ganger_daemon.checkpoints.storage import free_bytes
from ganger_daemon.control.jobsocket import JobSocket
from ganger_daemon.control.memory import MemoryWatch
from ganger_daemon.control.orders import page_order, write_details
from ganger_daemon.control.pages import ControlPages, RunMark
from ganger_daemon.control.pinning import Pinning
from ganger_daemon.control.rates import Look, iteration_seconds, rate_between
from ganger_daemon.control.relaying import Heard, Hub, Link, to_wire
from ganger_daemon.core import escalation
from ganger_daemon.core import gang as core
from ganger_daemon.core.leases import expired
from ganger_daemon.core.orders import Intent, Level, Outcome, OutcomeKind, Phase, Wanted
from ganger_daemon.core.relay import merge_all
from ganger_daemon.failpoints import hit
from ganger_daemon.host import Host
from ganger_daemon.transfer.arrival import Arrival
from ganger_daemon.transfer.request import StreamRequest

from . import signals
from .complaints import complaint_of, summary_of
from .deaths import Deaths
from .desired import from_json, local_part, order_key_to_wire, to_json, wanted_of, with_spec_of
from .directories import read_json, write_json
from .launch import StateUnreadableError
from .launchers import is_python
from .launching import Launching
from .observation import observe
from .processes import ProcessId

log = logging.getLogger(__name__)

_FAST_SECONDS = 0.0015
_BUSY_SECONDS = 0.005
_COPY_SECONDS = 0.02
_COPYING = {Phase.STOPPING: core.RankState.SAVING, Phase.PREPARED: core.RankState.RESTORING}
_SLOW_SECONDS = 0.25
_LOG_SECONDS = 10.0
_FAILURE_GRACE_SECONDS = 5.0
_STORAGE_REASONS = ("STORAGE_FULL", "STORAGE_FAILED")


class Peers(Protocol):
    """What a gang asks of the other daemons."""

    async def rendezvous(self, address: str, job_uid: str, epoch: int) -> tuple[str, int]: ...

    async def shard_written(
        self, address: str, job_uid: str, epoch: int, agreement: int, step: int, shards: tuple[Shard, ...]
    ) -> bool: ...

    def link(self, address: str, heard: Callable[[Heard], None]) -> Link: ...


class LocalGang:
    """Made from a desired message, or from what a former daemon left (`adopt`). `run` is its loop."""

    def __init__(
        self, host: Host, peers: Peers, desired: agent_pb2.DesiredGang, blocked_by: Callable[[LocalGang], str]
    ) -> None:
        self.host = host
        self.peers = peers
        self.desired = desired
        self.wanted = wanted_of(desired)
        self.part = local_part(desired, host.node)
        self.paths = host.paths.of(desired.job_uid, desired.epoch)
        self.pages = ControlPages(self.paths.run, desired.epoch, self.part.world, self.part.ranks)
        self.launching = Launching(host, peers, self.paths, self.part, blocked_by)
        self.deaths = Deaths(self.paths, self.wake, self.launching.launcher_lives)
        self.pinning = Pinning(host, self.paths.group, self.pages, self.part)
        self.memory = MemoryWatch(host, self.part)
        self.keeper = Keeper(
            desired.job_uid,
            desired.epoch,
            self.part.world,
            self.part.leads,
            self._publish,
            self._report_shards,
            self.news,
            parse_final(Path(desired.restore.checkpoint_path).name),
        )
        self.hub = Hub()
        self.judgement = core.Judgement(Phase.STARTING)
        self.judged_under = self.wanted  # the order the judgement is of
        self.stop_wanted = False  # nobody wants it: being stopped
        self.forgotten = False
        self._link: Link | None = None
        self._socket: JobSocket | None = None
        self._arrival: Arrival | None = None
        self._wake = asyncio.Event()
        self._launched = False
        self._launched_at = 0.0
        self._launch_failure: Outcome | None = None
        self._order_due = True
        self._mark = RunMark()
        self._ladder: escalation.Ladder | None = None
        self._escalated = False
        self._stop_signalled = False
        self._settled: Outcome | None = None
        self._reaped = False
        self._refused = (0, "")  # (order, why its level cannot be had)
        self._last_tick = time.monotonic()
        self._logs_at = time.monotonic()
        self._lease_written = -1
        self._frozen = False
        self._tidy_due = False
        self._look: Look | None = None
        self._iteration = 0.0
        self._observed: bytes = b""
        # set once the observed set can say something true of it
        self.judged = asyncio.Event()
        self._handed_logs = 0
        # from the first moment: a desired version that wants this gang is answered with what is known of it
        self.observed = observe(self)

    # -- what others ask ------------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        return self.judgement.phase

    @property
    def uid_and_epoch(self) -> tuple[str, int]:
        return (self.desired.job_uid, self.desired.epoch)

    @property
    def launched(self) -> bool:
        return self._launched

    def wake(self) -> None:
        self._wake.set()

    def announce(self) -> None:
        """A new gang is in the observed set from its first moment, also while others are launched before it."""
        self._publish_observation()

    def mark_gone(self, outcome: Outcome) -> None:
        """Nothing of it is here: only its outcome is reported."""
        self._settled = outcome
        self._reaped = True
        self._look_again()

    def news(self) -> None:
        """Something changed that the observed set may show."""
        self.wake()

    def obey(self, desired: agent_pb2.DesiredGang) -> None:
        """A newer order. Returns at once; the loop carries it out."""
        merged = with_spec_of(desired, self.desired)
        wanted = wanted_of(merged)
        if wanted.order <= self.wanted.order and self._launched:
            return
        was_running = self.wanted.intent is Intent.RUN
        same_stop = wanted.stop_sequence != 0 and wanted.stop_sequence == self.wanted.stop_sequence
        log.info(
            "order",
            extra={
                "job": desired.job,
                "epoch": desired.epoch,
                "intent": wanted.intent.name,
                "suspend_level": wanted.level.name,
            },
        )
        if self._launched and self.pages.mapped:
            self._abandon_checkpoint(wanted)
            if wanted.intent is Intent.RUN and not was_running and self.wanted.intent is not Intent.PREPARE:
                steps = {rank: self.pages.progress(rank).step for rank in self.part.ranks}
                self._mark = RunMark(now_ns(), steps)
            if not same_stop:
                self.memory.begin(self.deaths.processes)
        self.desired, self.wanted = merged, wanted
        self._order_due = True
        write_json(self.paths.wanted, to_json(merged)) if self.paths.job.exists() else None
        self._begin_ladder()
        self.wake()

    def _abandon_checkpoint(self, newer: Wanted) -> None:
        """The ranks were to save and end, and are to do something else now."""
        order = page_order(newer)
        if self.wanted.level is not Level.CHECKPOINT or (order and order.level == PageLevel.CHECKPOINT):
            return
        self.keeper.abandon(self.wanted.stop_sequence)
        self._tidy_due = True

    def stop(self, grace_seconds: float = 10.0) -> None:
        """Nobody wants it any more."""
        self.stop_wanted = True
        self.wanted = replace(self.wanted, intent=Intent.STOP, grace_seconds=grace_seconds, checkpoint_first=False)
        self._begin_ladder()
        self.wake()

    # -- life -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until forgotten. A tick that fails is logged and tried again: a gang is never dropped because of a bug."""
        while not self.forgotten:
            try:
                await self._tick()
                pause = self._pause()
            except asyncio.CancelledError:
                raise
            except Exception:
                log.exception("gang loop failed", extra={"job": self.desired.job, "epoch": self.desired.epoch})
                pause = 1.0
            try:
                await asyncio.wait_for(self._wake.wait(), pause)
            except TimeoutError:
                pass
            self._wake.clear()

    async def close(self) -> None:
        """The daemon ends; ranks go on."""
        if self._arrival is not None:
            self._arrival.cancel()
        if self._link is not None:
            await self._link.close()
        if self._socket is not None:
            self._socket.close()
        self.deaths.close()
        self.pages.close()

    def adopt(self) -> None:
        """Takes over what a former daemon left: the pages and exit records are the truth."""
        left = read_json(self.paths.local)
        self.launching.recall(left)
        self.host.adopt_cores(
            self.paths.group, [(int(core_id), int(share)) for core_id, share in left.get("grant", [])]
        )
        self.memory.recall({int(pid): int(size) for pid, size in left.get("baselines", {}).items()})
        mark = left.get("mark", {})
        self._mark = RunMark(
            int(mark.get("ns", 0)), {int(rank): int(step) for rank, step in mark.get("steps", {}).items()}
        )
        self.keeper.recall(self.host.storage.path)
        settled = read_json(self.paths.outcome)
        if settled:
            self._settled = Outcome(
                OutcomeKind(int(settled["kind"])),
                int(settled["exit_code"]),
                int(settled["rank"]),
                str(settled["message"]),
            )
            if settled.get("step") is not None:
                self.keeper.handed[self.wanted.stop_sequence] = int(settled["step"])
            if self._settled.kind in (OutcomeKind.LAUNCH_FAILED, OutcomeKind.STATE_UNREADABLE):
                self._launch_failure = self._settled
        if self.pages.open():
            found = {rank: self.pages.process(rank) for rank in self.part.ranks}
            if all(process.pid for process in found.values()):
                self._launched = True
                self._launched_at = time.monotonic()
                for rank, process in found.items():
                    self.deaths.watch(rank, process)
                    self.host.cgroups.track(self.paths.group, process.pid)
                self._frozen = self.host.cgroups.frozen(self.paths.group)
        elif any(self.paths.launch(rank).exists() for rank in self.part.ranks):
            # the pages went with the machine's memory, and so did the processes
            self._launched = True
            for rank in self.part.ranks:
                self.deaths.watch(rank, ProcessId(0, 0))
        self._begin_ladder()
        self._look_again()
        log.info(
            "gang adopted", extra={"job": self.desired.job, "epoch": self.desired.epoch, "running": self._launched}
        )

    # -- the tick -------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        now = time.monotonic()
        if self._launched and not self._reaped and self.pages.mapped:
            await self._begin_attending()
            if self._order_due:
                await self._write_order()
            if self.deaths.awaited:
                await self.deaths.settle(lambda rank: self.pages.progress(rank).exit_code)
            self._relay()
            self._write_lease()
            await self._tend(now)
        elif self.deaths.awaited:
            await self.deaths.settle(lambda rank: None)
        facts = self.facts()
        self.judgement, self.judged_under = core.judge(facts, now), facts.wanted
        for todo in self.judgement.todo:
            await self._do(todo, facts, now)
        await self._escalate(self.facts(), now)
        self._last_tick = now
        self._publish_observation()

    def facts(self) -> core.Gang:
        ranks: tuple[core.Rank, ...] = ()
        if self._launched:
            if self.pages.mapped:
                ranks = self.pages.ranks(self._mark)
            else:
                ranks = tuple(core.Rank(rank) for rank in self.part.ranks)
            ranks = tuple(replace(rank, exit=self.deaths.exits.get(rank.rank)) for rank in ranks)
        facts = self._facts(ranks)
        return replace(facts, refusal=self._refusal(facts))

    def _facts(self, ranks: tuple[core.Rank, ...]) -> core.Gang:
        return core.Gang(
            wanted=self.wanted,
            ranks=ranks,
            launched=self._launched,
            launched_at=self._launched_at,
            world=self.part.world,
            no_agent=self._has_no_agent(),
            restores=self.desired.HasField("restore"),
            frozen=self._frozen,
            launch_failure=self._launch_failure,
            has_room=not self.wanted.moves_in if self._arrival is None else self._arrival.has_room,
            memory_freed=self.memory.freed,
            published_step=self._published_step(),
            escalated=self._escalated,
            out_of_memory=self._launched
            and not self._reaped
            and self._has_killed()
            and self.host.cgroups.oom_kills(self.paths.group) > 0,
            stop_signalled=self._stop_signalled,
            settled=self._settled,
        )

    def _refusal(self, facts: core.Gang) -> str:
        """Why the level of the present order cannot be had. Stands until there is another order."""
        sequence = self.wanted.order.master_sequence
        if self._refused[0] == sequence:
            return self._refused[1]
        said = [complaint_of(self.paths, rank.rank, sequence) for rank in facts.ranks if core.refuses(facts, rank)]
        complaint = next((one for one in said if one is not None), None)
        text = str(complaint or self.keeper.refusal(self.wanted.stop_sequence))
        if not text:
            return ""
        if complaint is not None and complaint.reason == "STORAGE_FULL" and self.host.storage.path is not None:
            text += self._room(self.host.storage.path)
        self._refused = (sequence, text)
        return text

    def _room(self, storage: Path) -> str:
        needed = sum(
            max(progress.device_bytes, progress.arena_size)
            for progress in (self.pages.progress(rank) for rank in self.part.ranks)
        )
        free = free_bytes(storage)
        return f"; {storage} has {free} bytes free, this node's part needs about {needed}" if free is not None else ""

    def _has_no_agent(self) -> bool:
        spec = self.desired.spec
        return spec.agent == job_pb2.JobSpec.AGENT_NONE or not is_python(spec.command)

    def _has_killed(self) -> bool:
        return any(ending.signal == core.SIGKILL for ending in self.deaths.exits.values())

    def _published_step(self) -> int | None:
        for agreement in (self.wanted.stop_sequence, self.wanted.order.master_sequence):
            if agreement in self.keeper.handed:
                return self.keeper.handed[agreement]
        if self._settled is not None and self._settled.kind is OutcomeKind.YIELDED and self.keeper.handed:
            return max(self.keeper.handed.values())
        return None

    async def _do(self, todo: core.Todo, facts: core.Gang, now: float) -> None:
        match todo:
            case core.Todo.LAUNCH:
                await self._launch()
            case core.Todo.VERIFY_MEMORY:
                self.memory.verify(self.pages, self.deaths.processes, self.desired.claim.device_mask)
                self.wake() if self.memory.freed else None
            case core.Todo.TERMINATE:
                grace = self.wanted.grace_seconds if self.wanted.intent is Intent.STOP else _FAILURE_GRACE_SECONDS
                self._stop_signalled = True
                self._ladder = escalation.begin_stop(now, grace)
                signals.terminate(self.deaths.live())
            case core.Todo.REAP:
                await self._reap()

    async def _launch(self) -> None:
        try:
            launched = await self.launching.launch(self.desired, self.wanted, self.pages)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if not isinstance(error, self.launching.REFUSALS):
                log.exception("launch failed", extra={"job": self.desired.job})
            unreadable = isinstance(error, StateUnreadableError)
            kind = OutcomeKind.STATE_UNREADABLE if unreadable else OutcomeKind.LAUNCH_FAILED
            self._launch_failure = Outcome(kind, message=str(error) or type(error).__name__)
            self.wake()
            return
        if launched is None:
            return  # pieces not free yet: asked again at the next tick
        hit("between-fork-and-page")
        for rank, process in launched.items():
            self.deaths.watch(rank, process)
        self._launched = True
        self._launched_at = time.monotonic()
        self._write_local()
        log.info("gang launched", extra={"job": self.desired.job, "epoch": self.desired.epoch})
        if self.wanted.intent is Intent.PREPARE:
            hit("after-prepare")
        self.wake()

    async def _begin_attending(self) -> None:
        """Socket, relay, and the incoming move: what a running gang needs of this daemon, once."""
        if self._socket is None:
            self._socket = JobSocket(self.paths.socket, self._heard_packet)
            try:
                self._socket.start()
            except OSError as error:
                log.warning("job socket not made", extra={"error": str(error)})
        if self._link is None and not self.part.leads:
            leader = self.desired.members[0]
            self._link = self.peers.link(leader.peer_address, self.hear)
            key = order_key_to_wire(self.wanted.order)
            self._link.start(to_wire(self.desired.job_uid, self.desired.epoch, key, Heard(0, ())))
        if self._arrival is None and self._awaits_state():
            self._arrival = Arrival(await asyncio.to_thread(self._legs), self.wake)
            self._arrival.start()

    def _awaits_state(self) -> bool:
        """Its state comes from another node, and has not been used yet."""
        if not self.wanted.moves_in or self.wanted.intent not in (Intent.PREPARE, Intent.RUN):
            return False
        resting = (core.RankState.INIT, core.RankState.RESTORING, core.RankState.WAITING)
        return any(self.pages.progress(rank).state in resting for rank in self.part.ranks)

    def _legs(self) -> tuple[Any, ...]:
        source = self.desired.restore.parked
        requests = []
        for rank in self.part.ranks:
            member = next((member for member in source.members if rank in member.ranks), None)
            address = member.stream_address if member is not None else ""
            request = StreamRequest(self.host.token, self.desired.job_uid, source.epoch, 0, rank)
            requests.append((rank, address, request))
        return self.launching.legs(tuple(requests), self.pages)

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

    # -- relay ----------------------------------------------------------------------------------------------------

    def hear(self, heard: Heard) -> None:
        """Points from another daemon of this gang."""
        if self._reaped or not self.pages.mapped:
            return
        known = self.pages.points()
        merged = merge_all(known, heard.points, frozenset(self.part.ranks))
        self.pages.mirror(point for rank, point in merged.items() if point != known[rank])
        asked = bool(heard.agreement & CHECKPOINT_BIT) and heard.agreement > self.pages.checkpoint_sequence()
        if asked and not self.part.leads:
            self._request_checkpoint(heard.agreement & ~CHECKPOINT_BIT)
        self.wake()

    def _agreement(self) -> int:
        """The agreement in flight; 0 while there is none."""
        if self.wanted.stop_sequence and self.judgement.phase in (Phase.STOPPING, Phase.RUNNING, Phase.STARTING):
            return self.wanted.stop_sequence
        sequence = self.pages.checkpoint_sequence()
        if sequence and self.wanted.intent is Intent.RUN and not self.keeper.is_settled(sequence):
            return sequence
        return 0

    def _relay(self) -> None:
        if len(self.part.ranks) == self.part.world:
            return
        agreement = self._agreement()
        if not agreement:
            return
        points = self.pages.points()
        own = [points[rank] for rank in self.part.ranks]
        said = Heard(agreement, tuple(points.values()) if self.part.leads else tuple(own))
        message = to_wire(self.desired.job_uid, self.desired.epoch, order_key_to_wire(self.wanted.order), said)
        if self.part.leads:
            self.hub.say(message)
        elif self._link is not None:
            self._link.say(message)

    def _heard_packet(self, packet: dict[str, Any]) -> None:
        if packet.get("event") in ("error", "note", "hello"):
            said = {**packet, "message": summary_of(str(packet["message"]))} if "message" in packet else packet
            log.info("job says", extra={"job": self.desired.job, "packet": str(said)[:500]})
        self.wake()

    # -- the small things of every tick ---------------------------------------------------------------------------

    def _write_lease(self) -> None:
        until = self.host.lease_until_ns
        if until is not None and until != self._lease_written:
            self._lease_written = until
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
        if self._tidy_due and self.judgement.phase in (Phase.RUNNING, Phase.PARKED) and self.host.storage.path:
            # not sooner: until they rest or run again the ranks may be saving
            self._tidy_due = False
            await asyncio.to_thread(self.keeper.tidy, self.host.storage.path)
        if self.wanted.intent is Intent.RUN and self.judgement.phase is Phase.RUNNING:
            await self.pinning.follow(self.desired, self._iteration)
            await self._ask_checkpoint(now)
        await self._durable_shards(ranks)
        await self._freeze_or_thaw(now)
        if now - self._logs_at >= _LOG_SECONDS:
            self._logs_at = now
            await asyncio.to_thread(self._mirror_logs, False)

    async def _ask_checkpoint(self, now: float) -> None:
        if not self.host.storage.proved or self.host.storage.path is None or self.deaths.exits:
            return
        seconds = self.desired.checkpoint_interval.ToTimedelta().total_seconds()
        request = int(self.desired.checkpoint_request)
        if not self.keeper.due(now, seconds, request):
            return
        running = self.pages.checkpoint_sequence()
        if (
            running
            and not self.keeper.is_settled(running)
            and not self.keeper.refusal(running)
            and now - self.keeper.schedule.last < escalation.DEADLINE_SECONDS
        ):
            return  # one agreement at a time
        missing = self.keeper.room_missing(self.host.storage.path)
        self.keeper.asked(now, request)
        if missing:
            self.keeper.trouble = f"storage lacks {missing} bytes for a checkpoint; the last one is kept"
            log.warning("checkpoint skipped", extra={"job": self.desired.job, "missing_bytes": missing})
            return
        if running and not self.keeper.is_settled(running):
            await asyncio.to_thread(self.keeper.tidy, self.host.storage.path)
        self._request_checkpoint((running & ~CHECKPOINT_BIT) + 1)

    def _request_checkpoint(self, number: int) -> None:
        storage = self.host.storage.path if self.host.storage.proved else None
        write_details(self.paths.orders, f"checkpoint-{number}", storage, self.desired.job_uid, self.desired.epoch)
        self.pages.request_checkpoint(number)

    async def _durable_shards(self, ranks: tuple[core.Rank, ...]) -> None:
        storage = self.host.storage.path
        if storage is None:
            return
        agreement = self.pages.checkpoint_sequence()
        if agreement and not self.keeper.is_settled(agreement):
            found = [self.pages.progress(rank) for rank in self.part.ranks]
            steps = {progress.checkpoint_step for progress in found if progress.checkpoint_done == agreement}
            if all(progress.checkpoint_done == agreement for progress in found) and len(steps) == 1:
                await self.keeper.durable(storage, agreement, steps.pop(), self.part.ranks)
        order = page_order(self.wanted)
        if order is None or order.level != PageLevel.CHECKPOINT:
            return
        found = [self.pages.progress(rank) for rank in self.part.ranks]
        steps = {progress.checkpoint_step for progress in found}
        if all(progress.reached_seq >= order.sequence for progress in found) and len(steps) == 1:
            await self.keeper.durable(storage, order.stop_sequence, steps.pop(), self.part.ranks)
        if self.keeper.is_settled(order.stop_sequence):
            self.pages.let_leave(order.sequence)

    async def _freeze_or_thaw(self, now: float) -> None:
        """A job without boundaries cannot stop itself: not when the lease is over, not for a PAUSE."""
        due = core.should_freeze(self.facts(), now, expired(self.host.lease_until_ns or 0, now_ns()))
        if due == self._frozen:
            return
        act = self.host.cgroups.freeze if due else self.host.cgroups.thaw
        if await asyncio.to_thread(act, self.paths.group):
            self._frozen = due
            log.info("gang stands still" if due else "gang goes on", extra={"job": self.desired.job})

    def _mirror_logs(self, sealed: bool) -> None:
        for rank in self.part.ranks:
            try:
                self.host.logs.mirror(self.desired.job_uid, rank, self.desired.epoch, sealed)
            except OSError as error:
                log.warning("log not copied", extra={"job": self.desired.job, "rank": rank, "error": str(error)})

    # -- escalation -----------------------------------------------------------------------------------------------

    def _begin_ladder(self) -> None:
        now = time.monotonic()
        if self._stop_signalled:
            return
        stops = self.wanted.intent in (Intent.PARK, Intent.HAND_OVER)
        if stops or (self.wanted.intent is Intent.STOP and self.wanted.checkpoint_first):
            self._ladder = escalation.begin(
                now,
                self._iteration,
                self.wanted.grace_seconds,
                self.host.order_deadline_seconds,
                self.host.order_patience_seconds,
            )
        else:
            self._ladder = None

    async def _escalate(self, facts: core.Gang, now: float) -> None:
        if self._ladder is None or not self._launched or self._reaped:
            return
        live = self.deaths.live()
        if not live or (not self._stop_signalled and not core.is_disobedient(facts)):
            return
        if core.is_busy(facts):
            self._ladder = escalation.extend(self._ladder, now - self._last_tick)
        climbed = escalation.climb(self._ladder, now)
        if climbed is self._ladder:
            return
        self._ladder = climbed
        log.warning(
            "escalation", extra={"job": self.desired.job, "epoch": self.desired.epoch, "rung": climbed.rung.name}
        )
        match climbed.rung:
            case escalation.Rung.DUMP:
                said_hello = {rank.rank for rank in facts.ranks if rank.hello}
                signals.dump_stacks(
                    process
                    for rank, process in self.deaths.processes.items()
                    if rank in said_hello and self.deaths.is_live(rank)
                )
            case escalation.Rung.TERMINATE:
                self._escalated = self.wanted.intent is not Intent.STOP
                self._stop_signalled = True
                signals.terminate(live)
            case escalation.Rung.KILL:
                await signals.kill(self.host.cgroups, self.paths.group, live)

    # -- the end --------------------------------------------------------------------------------------------------

    async def _reap(self) -> None:
        """Every process is gone: what is left of the gang goes, its outcome stays until the master has it."""
        if self._reaped:
            return
        facts = self.facts()
        if self._shards_are_on_their_way(facts):
            return
        outcome = core.judge(facts, time.monotonic()).outcome
        if outcome is None:
            return  # its checkpoint cannot be looked for before the master has said where storage is
        hit("before-reap")
        if self._arrival is not None:
            self._arrival.cancel()
        self.paths.job.mkdir(parents=True, exist_ok=True)
        if self._settled is None:
            self._settled = outcome
            fields = {
                "kind": int(outcome.kind),
                "exit_code": outcome.exit_code,
                "rank": outcome.rank,
                "message": outcome.message,
                "step": facts.published_step,
            }
            await asyncio.to_thread(write_json, self.paths.outcome, fields, True)
        self._reaped = True
        if self._link is not None:
            await self._link.close()
        if self._socket is not None:
            self._socket.close()
        await asyncio.to_thread(self._mirror_logs, True)
        self.memory.detach()
        await self.launching.clean()
        self.deaths.close()
        log.info(
            "gang ended", extra={"job": self.desired.job, "epoch": self.desired.epoch, "outcome": outcome.kind.name}
        )
        self.wake()

    def _shards_are_on_their_way(self, facts: core.Gang) -> bool:
        """All ranks yielded, and the leader has not everything yet: the pages are still needed."""
        if facts.launch_failure is not None or not facts.ranks or core.settle(facts).kind is not OutcomeKind.YIELDED:
            return False
        return facts.published_step is None and bool(self.wanted.stop_sequence) and self.host.storage.path is not None

    async def forget(self) -> None:
        """The master has the outcome: nothing of the gang stays but its logs."""
        self.forgotten = True
        self.pages.close()
        await asyncio.to_thread(self.paths.remove)
        self.wake()

    # -- helpers --------------------------------------------------------------------------------------------------

    def _pause(self) -> float:
        phase = self.judgement.phase
        if self._reaped:
            return 60.0
        if not self._launched:
            return 0.05
        copying = _COPYING.get(phase) if self.pages.mapped else None
        if copying and any(self.pages.progress(rank).state == copying for rank in self.part.ranks):
            # the processor belongs to who copies; the rank sends word when it is done
            return _COPY_SECONDS
        if phase is Phase.STOPPING:
            return _FAST_SECONDS if not self.memory.waiting else _BUSY_SECONDS
        if self.deaths.awaited:
            return _BUSY_SECONDS
        if phase in (Phase.STARTING, Phase.PREPARED) or self.wanted.intent is Intent.PREPARE:
            # a script that never attaches is not worth a fast look for ever
            return _BUSY_SECONDS if time.monotonic() - self._launched_at < 60 else 0.05
        if self.pages.mapped and len(self.part.ranks) != self.part.world and self._agreement():
            return _FAST_SECONDS
        return _SLOW_SECONDS

    def trouble(self) -> str:
        """Why a move, or a stop at the wanted level, cannot go on; else what the last checkpoint suffered from."""
        if self._arrival is not None and self._arrival.trouble:
            return self._arrival.trouble
        sequence = self.wanted.order.master_sequence
        if self._refused[0] == sequence:
            return self._refused[1]
        for rank in self.part.ranks:
            complaint = complaint_of(self.paths, rank, sequence)
            if complaint is not None:
                return str(complaint)
        if self.judgement.phase is Phase.STOPPING and self.wanted.intent is Intent.PARK and not self._frozen:
            facts, now = self.facts(), time.monotonic()
            if any(core.is_opaque(facts, rank, now) for rank in facts.ranks if rank.exit is None):
                return f"this job has no boundaries: {self.wanted.level.name} cannot be had of it"
        if self.wanted.intent in (Intent.PREPARE, Intent.HAND_OVER):
            return ""  # nothing else stands in the way of a move
        return self.memory.trouble or self.pinning.trouble or self.keeper.trouble

    def progress(self) -> tuple[Look, float, float] | None:
        """(newest look, steps per second, share of waiting) since the last call; None before the first boundary."""
        if not self._launched or self._reaped or not self.pages.mapped:
            return None
        found = [self.pages.progress(rank) for rank in self.part.ranks]
        if not any(progress.step for progress in found):
            return None
        if any(progress.phase == core.RankPhase.REPLAY for progress in found):
            self._look = None  # steps done before are walked through, not made
            return None
        slowest = min(found, key=lambda progress: progress.step)
        look = Look(
            time.monotonic(),
            slowest.step,
            slowest.samples,
            max(progress.data_wait_ns for progress in found),
            slowest.loss,
            max(progress.restored_step for progress in found),
        )
        rate = rate_between(self._look, look)
        self._look = look
        self._iteration = iteration_seconds(rate) or self._iteration
        return look, rate.steps_per_second, rate.data_wait_share

    def _write_local(self) -> None:
        fields = {
            "grant": [list(share) for share in self.host.shares_of(self.paths.group)],
            "baselines": self.memory.baselines(),
            "mark": {"ns": self._mark.ordered_ns, "steps": dict(self._mark.steps)},
            **self.launching.journal(),
        }
        write_json(self.paths.local, fields)

    def _publish(self, tmp: Path, final: Path, manifest: dict[str, Any]) -> None:
        """Blocks. The launcher publishes, as the job's user; without one this daemon does."""
        launcher = self.launching.running_launcher()
        if launcher is None:
            publish_here(tmp, final, manifest)
            return
        hit("before-rename")
        try:
            launcher.publish(str(tmp), str(final), manifest)
        except LauncherError as error:
            if final.exists():
                return
            if error.reason in _STORAGE_REASONS:
                raise StorageError(error.reason, str(error)) from error
            raise OSError(str(error)) from error

    async def _report_shards(self, agreement: int, step: int, shards: tuple[Shard, ...]) -> bool:
        leader = self.desired.members[0]
        return await self.peers.shard_written(
            leader.peer_address, self.desired.job_uid, self.desired.epoch, agreement, step, shards
        )

    def _look_again(self) -> None:
        """What is reported until the first tick."""
        self.judgement, self.judged_under = core.judge(self.facts(), time.monotonic()), self.wanted
        self.observed = observe(self)

    def _publish_observation(self) -> None:
        if self.judgement.phase is Phase.PARKED and self._handed_logs != self.wanted.order.master_sequence:
            self._handed_logs = self.wanted.order.master_sequence
            self._mirror_logs(False)
        message = observe(self)
        new = message.SerializeToString(deterministic=True)
        if new != self._observed:
            if self.judgement.phase is Phase.PARKED:
                hit("parked-before-report")
            if self.judgement.phase is Phase.READY and self.wanted.intent is Intent.PREPARE:
                hit("before-move-commit")
            self._observed = new
            self.observed = message
            self.judged.set()
            self.host.changed()


def recall_desired(wanted_file: Path, gang_file: Path) -> agent_pb2.DesiredGang | None:
    """The newest order a former daemon obeyed for a gang, with what to run; None when there is nothing to adopt."""
    started = from_json(read_json(gang_file))
    newest = from_json(read_json(wanted_file))
    if started is None:
        return newest
    return started if newest is None else with_spec_of(newest, started)


__all__ = ["LocalGang", "Peers", "recall_desired"]
