"""A modelled daemon: follows the desired set with delays, reports the complete observed set, crashes and comes back.

Its ranks outlive it (`ranks.Physics`); what it keeps itself (session, versions, what was wanted) dies with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from faultsim.engine import Engine
from faultsim.faults import Network
from faultsim.master_process import SimMaster
from faultsim.node_rotation import NodeRotation, NoTurns
from faultsim.rank_processes import Doing, Physics, Ranks
from ganger.cluster.resources import ConfigurationSet
from ganger_daemon.core.hook_outcomes import CheckRecord
from ganger_master.core.answers import Answer, Refused, SessionAnswer
from ganger_master.core.commands import Answer as AnswerCommand
from ganger_master.core.commands import FinishedGang, Marks, Observe, ObservedGang, OpenSession
from ganger_master.core.desired_projection import DesiredGang, DesiredSet
from ganger_master.core.gang_model import GangIntent, ObservedPhase, Outcome, OutcomeKind, Restore, StoredOrder
from ganger_master.core.job_model import Capabilities, Checkpoint, SuspendLevel
from msgspec.structs import replace

_HEARTBEAT_SECONDS = 2.0
_BUSY_SECONDS = 8.0
# Between two looks at whose turn it is.
_TURN_SECONDS = 0.25
# Samples that an elastic job takes at once, whatever the number of its ranks.
_GLOBAL_BATCH = 24
_ALL_LEVELS = Capabilities(pause=True, offload=True, checkpoint=True, known=True)
_NO_LEVELS = Capabilities(known=True)


class SimDaemon:
    def __init__(
        self,
        engine: Engine,
        network: Network,
        master: SimMaster,
        physics: Physics,
        name: str,
        configuration_set: ConfigurationSet,
        capabilities: dict[str, str] | None = None,
        rack: str = "r1",
        make_turns: Callable[[SimDaemon], NodeRotation] | None = None,
    ) -> None:
        self.engine = engine
        self.network = network
        self.master = master
        self.physics = physics
        self.name = name
        self.configuration_set = configuration_set
        self.capabilities = capabilities or {}
        self.rack = rack
        self.storage_proved = True
        # What its health checks have shown.
        self.health = CheckRecord()
        self.device_faults: dict[int, str] = {}
        self.offers = _ALL_LEVELS
        # Whether it can tell what processes keep of its devices.
        self.measures = True
        self.is_up = False
        self.incarnation = 0
        self.session = ""
        self.observation = 0
        # The newest desired set it obeys already, and the newest it has begun to: an older one is not begun again.
        self.desired_version = 0
        self.heard_version = 0
        self.wanted: set[int] = set()
        self.orders: dict[int, DesiredGang] = {}
        # On its disk: the next ids of the master's database that it saw, and the newest ended gang of each job.
        self.seen = Marks()
        self.finished: dict[str, FinishedGang] = {}
        # Epochs of gangs whose orders the master requests.
        self.describe: tuple[int, ...] = ()
        self.last_contact = engine.now
        self.turns: NodeRotation = make_turns(self) if make_turns is not None else NoTurns()
        physics.turns[name] = self.turns

    def start(self) -> None:
        self.is_up = True
        self.incarnation += 1
        self._open()
        self._beat(self.incarnation)
        self._turn(self.incarnation)

    def crash(self) -> None:
        """The process dies; ranks go on."""
        self.is_up = False
        self.incarnation += 1
        self.session = ""

    def reboot(self, wiped: bool = False) -> None:
        """The machine goes down: its ranks with it, and all that is known of them if its disk is wiped."""
        self.crash()
        for ranks in list(self.physics.ranks.values()):
            if ranks.node == self.name and ranks.is_alive:
                self.physics.kill(self.name, ranks.order.epoch, OutcomeKind.UNKNOWN, "the machine went down")
            if ranks.node == self.name and wiped:
                if ranks.outcome in (OutcomeKind.DONE, OutcomeKind.YIELDED):
                    # How it ended, and the checkpoint it left, was still to be told.
                    self.physics.oracle.died(ranks.order.uid)
                self.physics.forget(self.name, ranks.order.epoch)
        if wiped:
            self.turns.forget()
            self.seen, self.finished = Marks(), {}

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self.session, self.observation, self.desired_version, self.heard_version = "", 0, 0, 0
        self.wanted.clear()
        self.describe = ()
        command = OpenSession(
            self.name,
            f"machine-{self.name}",
            self.configuration_set,
            rack=self.rack,
            fabric="f1",
            peer_address=f"{self.name}:1",
            stream_address=f"{self.name}:2",
            capabilities=self.capabilities,
            seen=self.seen,
        )
        incarnation = self.incarnation

        def opened(answer: Answer) -> None:
            if self.is_up and incarnation == self.incarnation and isinstance(answer, SessionAnswer):
                if self.session and _number(answer.session) <= _number(self.session):
                    return
                self.session, self.observation = answer.session, 0
                self.desired_version = self.heard_version = 0
                self.wanted.clear()
                self.report()

        def reply(answer: Answer) -> None:
            self.network.send(lambda: opened(answer))

        self.network.send(lambda: self.master.call(command, reply))

    def _beat(self, incarnation: int) -> None:
        if incarnation != self.incarnation or not self.is_up:
            return
        if self.session:
            self.report()
        else:
            self._open()
        self.engine.after(self.engine.between(0.5, 1.0) * _HEARTBEAT_SECONDS, lambda: self._beat(incarnation))

    def _turn(self, incarnation: int) -> None:
        if incarnation == self.incarnation and self.is_up:
            self.turns.follow()
            self.engine.after(_TURN_SECONDS, lambda: self._turn(incarnation))

    def report(self) -> None:
        """One Reconcile: the complete observed set up; the desired set comes back if nothing gets lost."""
        self.observation += 1
        session, sent, master = self.session, self.engine.now, self.master
        command = Observe(
            self.name,
            session,
            self.observation,
            self.desired_version,
            self._observed(),
            device_faults=dict(self.device_faults),
            node_faults={"health_check": self.health.reason} if self.health.reason else {},
            storage_proved=self.storage_proved,
            rows=self.turns.observed(),
            # Only a restored master reads it.
            finished=tuple(self.finished.values()) if self.master.state.counters.restoring is not None else (),
        )

        def received() -> None:
            at = self.engine.now
            master.call(command, lambda answer: observed(answer, at))

        def observed(answer: Answer, at: float) -> None:
            if isinstance(answer, Refused):
                self.network.send(lambda: self._superseded(session))
                return
            master.answer_poll(AnswerCommand(self.name, session), at, answered)

        def answered(answer: Answer) -> None:
            desired = master.committed.get(self.name, DesiredSet())
            if not isinstance(answer, Refused):
                self.network.send(lambda: self._on_desired(session, desired, sent))

        self.network.send(received)

    def on_news(self, desired: DesiredSet) -> None:
        """The held call is answered because something changed."""
        session, sent = self.session, self.engine.now
        if not self.is_up or not session:
            return

        def answered(answer: Answer) -> None:
            if not isinstance(answer, Refused):
                self.network.send(lambda: self._on_desired(session, desired, sent))

        self.master.answer_poll(AnswerCommand(self.name, session), sent, answered)

    def _superseded(self, session: str) -> None:
        if self.is_up and session == self.session:
            self._open()

    def _on_desired(self, session: str, desired: DesiredSet, sent: float) -> None:
        if not self.is_up or session != self.session or desired.version < self.heard_version:
            return
        self.heard_version = desired.version
        self.last_contact = max(self.last_contact, sent)
        after = self.master.settings.lost_after_s
        if desired.version or self.physics.leases.get(self.name, math.inf) >= self.engine.now:
            # An answer without orders renews no lease that has ended.
            self.physics.extend_lease(self.name, math.inf if after is None else self.last_contact + after)
        if desired.describe != self.describe:
            self.describe = desired.describe
            self.report()
        if not desired.version:
            # An answer without orders changes nothing.
            return
        self._note_seen(desired)
        self.physics.share(self.name, desired.gangs)
        if desired.version > self.desired_version and self.engine.chance(self.network.faults.late):
            self._obey_slowly(session, desired)
        else:
            self._obey(desired)

    def _note_seen(self, desired: DesiredSet) -> None:
        epochs = [gang.epoch + 1 for gang in desired.gangs]
        jobs = [gang.job + 1 for gang in desired.gangs]
        self.seen = Marks(
            self.master.state.counters.store,
            max(self.seen.desired_version, desired.version),
            max([self.seen.next_epoch, *epochs]),
            max([self.seen.next_job, *jobs]),
        )

    def _obey_slowly(self, session: str, desired: DesiredSet) -> None:
        """Busy with the first gangs; says what it has meanwhile, with the version before."""
        self.turns.hear(desired.rows)
        for gang in desired.gangs[: self.engine.random.randint(0, len(desired.gangs))]:
            self._hear(gang)
        self.report()

        def rest() -> None:
            if self.is_up and session == self.session and desired.version >= self.heard_version:
                self._obey(desired)

        self.engine.after(self.engine.between(0.1, _BUSY_SECONDS), rest)

    def _hear(self, told: DesiredGang) -> None:
        self.wanted.add(told.epoch)
        if told.members and told.members[0].node == self.name:
            self.physics.kept[told.epoch] = told.kept_checkpoints
            self.physics.prune(told.uid, told.epoch)
        ranks = self.physics.ranks.get((told.epoch, self.name))
        known = self.finished.get(told.uid)
        if ranks is None and known is not None and told.epoch <= known.epoch:
            # It never starts again.
            self.physics.report_gone(self.name, told)
        elif ranks is None or not self.turns.rules(ranks, told):
            self.physics.obey(self.name, told)
        elif told.master_sequence >= ranks.wanted.master_sequence:
            ranks.newest_order = told

    def _obey(self, desired: DesiredSet) -> None:
        before = self._observed()
        self.turns.hear(desired.rows)
        self.desired_version = desired.version
        for epoch in desired.acknowledged_epochs:
            ranks = self.physics.ranks.get((epoch, self.name))
            if ranks is not None and not ranks.is_alive:
                self._note_finished(self._observed_gang(ranks), len(self.physics.gangs[epoch].nodes))
                self.physics.forget(self.name, epoch)
        named = {gang.epoch for gang in desired.gangs}
        for gang in desired.gangs:
            self._hear(gang)
        for epoch in sorted(self.wanted - named):
            present = self.physics.ranks.get((epoch, self.name))
            if present is not None and present.is_alive:
                self.physics.kill(self.name, epoch, OutcomeKind.STOPPED, "not wanted any more")
        self.turns.know()
        self.turns.follow()
        if self._observed() != before:
            self.report()

    def _note_finished(self, gang: ObservedGang, nodes: int) -> None:
        known = self.finished.get(gang.uid)
        if known is None or gang.epoch > known.epoch:
            self.finished[gang.uid] = FinishedGang(
                gang.job, gang.uid, gang.epoch, gang.outcome, nodes, gang.checkpoint, gang.has_stepped
            )

    # -- observed ------------------------------------------------------------------------------------------------------

    def _observed(self) -> tuple[ObservedGang, ...]:
        own = [ranks for (_, node), ranks in sorted(self.physics.ranks.items()) if node == self.name]
        return tuple(self._observed_gang(ranks) for ranks in own)

    def _observed_gang(self, ranks: Ranks) -> ObservedGang:
        gang = self.physics.gangs[ranks.order.epoch]
        checkpoint = None
        if ranks.checkpoint is not None:
            step, path = ranks.checkpoint
            checkpoint = Checkpoint(step, gang.epoch, path, nodes=(self.name,) if ranks.order.on_nodes else ())
        attached = ranks.doing not in (Doing.WAITING, Doing.FORKING)
        measures = self.measures and ranks.level is SuspendLevel.OFFLOAD
        residue = self.physics.residue_of(gang.uid) if measures else 0
        phase, level, stop_sequence = _phase(ranks, gang.stepped and gang.step > 0), ranks.level, ranks.stop_sequence
        stop_step = ranks.stop_step
        if ranks.switch != (0, 0) and ranks.wanted.intent is GangIntent.RUN:
            # The master does not need the active slice: time-sliced gangs count as running.
            if phase is not ObservedPhase.ENDED:
                phase = ObservedPhase.RUNNING if gang.stepped else ObservedPhase.STARTING
            level, stop_sequence, stop_step = SuspendLevel.NONE, 0, 0
        elif ranks.switch != (0, 0):
            stop_sequence = ranks.wanted.stop_sequence
        return ObservedGang(
            job=ranks.order.job,
            uid=ranks.order.uid,
            epoch=gang.epoch,
            phase=phase,
            master_sequence=ranks.wanted.master_sequence,
            level=level,
            stop_sequence=stop_sequence,
            stop_step=stop_step,
            trouble=ranks.trouble,
            outcome=Outcome(ranks.outcome, ranks.exit_code, message=ranks.message, checkpoints=ranks.found),
            checkpoint=checkpoint,
            peak_device_bytes=self.physics.peak_of(gang.uid) if gang.stepped else 0,
            capabilities=self._offered(ranks) if attached else Capabilities(),
            device_mask=ranks.order.claim.device_mask,
            # A part that was launched is not launched again by a machine that has lost it.
            pids=(1,) if attached else (),
            devices_idle=phase is ObservedPhase.RUNNING and self._is_idle(ranks),
            residue_bytes=(residue,) * self.configuration_set.devices if measures else (),
            kept_memory_bytes=int(self.physics.memory_used * ranks.order.claim.memory_bytes) if measures else 0,
            newest_order=_newest_order(ranks) if gang.epoch in self.describe else None,
            has_stepped=phase is ObservedPhase.ENDED and gang.stepped,
        )

    def _is_idle(self, ranks: Ranks) -> bool:
        gang, after_s = self.physics.gangs[ranks.order.epoch], ranks.wanted.idle_after_s
        return 0.0 < after_s <= self.physics.engine.now - gang.stepped_at

    def _offered(self, ranks: Ranks) -> Capabilities:
        spec = ranks.order.spec
        if self.physics.gangs[ranks.order.epoch].opaque:
            return _NO_LEVELS
        if ranks.order.uid in self.physics.hung:
            return replace(self.offers, offload_by="in place")
        if spec is not None and spec.has_role_ranges:
            return replace(self.offers, resize=False, reshard=True, role_divides=(0, _GLOBAL_BATCH))
        if spec is None or not spec.is_elastic:
            return self.offers
        return replace(self.offers, resize=True, resize_divides=_GLOBAL_BATCH)


def _newest_order(ranks: Ranks) -> StoredOrder:
    wanted, restore = ranks.wanted, ranks.wanted.restore
    return StoredOrder(
        master_sequence=wanted.master_sequence,
        intent=wanted.intent,
        claim=wanted.claim,
        nodes=tuple([member.node for member in wanted.members]),
        level=wanted.level,
        stop_sequence=wanted.stop_sequence,
        user=wanted.user,
        spec=wanted.spec,
        restore=Restore(restore.checkpoint_path, restore.parked_epoch, restore.step, restore.alone),
        threads=wanted.threads,
        checkpoint_request=wanted.checkpoint_request,
        repin_request=wanted.repin_request,
        is_sliced=ranks.switch != (0, 0),
    )


def _phase(ranks: Ranks, stepped: bool) -> ObservedPhase:
    match ranks.doing:
        case Doing.WAITING | Doing.FORKING:
            return ObservedPhase.STARTING
        case Doing.PREPARED:
            return ObservedPhase.PREPARED if ranks.order.intent is GangIntent.PREPARE else ObservedPhase.STARTING
        case Doing.READY:
            return ObservedPhase.READY
        case Doing.RUNNING:
            if ranks.order.stop_sequence:
                return ObservedPhase.STOPPING
            return ObservedPhase.RUNNING if stepped else ObservedPhase.STARTING
        case Doing.PARKED:
            return ObservedPhase.PARKED
        case Doing.ENDED:
            return ObservedPhase.ENDED


def _number(session: str) -> int:
    return int(session.rpartition("-")[2])
