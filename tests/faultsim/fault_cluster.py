"""A whole cluster under virtual time: master, daemons, ranks, job schedulers, users; faults and checkers beside it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from faultsim.checkers import Oracle, RuleBrokenError
from faultsim.engine import Engine
from faultsim.faults import NONE, Faults, Network
from faultsim.master_process import SimMaster, SimStore
from faultsim.node_daemon import SimDaemon
from faultsim.node_rotation import NodeRotation
from faultsim.random_planner import go_elsewhere, let_go, wild_plan
from faultsim.rank_processes import OPAQUE, Physics, spec_steps
from faultsim.scheduler_host import SimHost
from ganger.cluster.resources import ConfigurationSet
from ganger.job_state import JobState
from ganger.scheduling import JobScheduler
from ganger_master.core.answers import Answer, JobAnswer
from ganger_master.core.commands import (
    CancelJob,
    Command,
    CordonNode,
    DrainNode,
    MoveJob,
    OpenStore,
    RemoveNode,
    ResizeJob,
    ResumeJob,
    SubmitJob,
    SuspendJob,
    UncordonNode,
    UpdateJob,
)
from ganger_master.core.desired_projection import DesiredSet
from ganger_master.core.events import HistoryRow
from ganger_master.core.gang_model import OutcomeKind
from ganger_master.core.job_model import SuspendLevel
from ganger_master.core.job_spec import JobSpec, Update
from ganger_master.core.queue import GrantedLease
from ganger_master.core.settings import CoreSettings
from ganger_master.core.state import State

_RETRY_SECONDS = 5.0
_ENDS = ("job_succeeded", "job_failed", "job_cancelled")


@dataclass(slots=True)
class Submission:
    uid: str
    request_id: str
    spec: JobSpec
    number: int = 0
    refused: bool = False


class FaultCluster:
    """Nodes join at once; `submit` retries with its request id until it is answered, as a client does."""

    def __init__(
        self,
        seed: int,
        nodes: Sequence[tuple[str, ConfigurationSet]],
        settings: CoreSettings | None = None,
        faults: Faults = NONE,
        step_seconds: float = 1.0,
    ) -> None:
        self.engine = Engine(seed)
        self.faults = faults
        self.network = Network(self.engine, faults)
        self.oracle = Oracle()
        self.physics = Physics(self.engine, self.oracle, step_seconds)
        self.physics.faults = faults
        self.master = self._make_master(settings or CoreSettings())
        self.daemons: dict[str, SimDaemon] = {}
        self.submissions: list[Submission] = []
        self.host = SimHost(self.engine, self.network, self.master)
        # Users' own, by the name their jobs give; a job whose scheduler is not here has one that is dead.
        self.hosts: dict[str, SimHost] = {}
        for name, configuration_set in nodes:
            self.add_node(name, configuration_set)

    def _make_master(self, settings: CoreSettings, store: SimStore | None = None) -> SimMaster:
        def on_news(node: str, desired: DesiredSet) -> None:
            if node in self.daemons and self.daemons[node].master is master:
                self.daemons[node].on_news(desired)

        master = SimMaster(self.engine, settings, self.faults, on_news, self._on_turns, self._on_history, store)
        return master

    def start_another_master(self, stay: Collection[str]) -> SimMaster:
        """Start a master on the store of the present one, which runs on. Return the former one; daemons in `stay` keep
        to it."""
        former = self.master
        self.master = self.host.master = self._make_master(former.settings, former.store)
        for name, daemon in self.daemons.items():
            if name not in stay:
                daemon.master = self.master
        self.master.take_over()
        return former

    @property
    def state(self) -> State:
        return self.master.state

    def add_node(
        self,
        name: str,
        configuration_set: ConfigurationSet,
        capabilities: dict[str, str] | None = None,
        make_turns: Callable[[SimDaemon], NodeRotation] | None = None,
    ) -> SimDaemon:
        daemon = SimDaemon(
            self.engine, self.network, self.master, self.physics, name, configuration_set, capabilities,
            make_turns=make_turns,
        )  # fmt: skip
        self.daemons[name] = daemon
        self.oracle.memory[name] = configuration_set.device_memory_bytes
        daemon.start()
        return daemon

    def add_scheduler(self, name: str, make_scheduler: Callable[[], JobScheduler]) -> SimHost:
        """A user's own, for the jobs that name it."""
        host = self.hosts[name] = SimHost(self.engine, self.network, self.master, make_scheduler, name)
        return host

    def submit(self, spec: JobSpec, user: str = "") -> Submission:
        number = len(self.submissions) + 1
        submission = Submission(f"uid-{number}", f"request-{number}", spec)
        self.submissions.append(submission)
        self.oracle.submitted(submission.uid, spec_steps(spec), spec.gpu_memory_bytes)
        if spec.command[0] == OPAQUE:
            self.physics.opaque.add(submission.uid)

        def answered(answer: Answer) -> None:
            if isinstance(answer, JobAnswer) and not submission.number:
                if submission.uid not in {job.uid for job in self.state.jobs.values()} and self.oracle.is_restored:
                    # Answered before the database went back.
                    submission.refused = True
                    return
                submission.number = answer.number
                self.oracle.acknowledged(answer.number, submission.uid)
                if spec.scheduler in self.hosts:
                    self.hosts[spec.scheduler].serve(answer.number)
            elif not isinstance(answer, JobAnswer):
                submission.refused = True

        def attempt() -> None:
            if submission.number or submission.refused:
                return
            command = SubmitJob(spec, submission.uid, user, submission.request_id)
            self.send(command, answered)
            self.engine.after(_RETRY_SECONDS, attempt)

        attempt()
        return submission

    def send(self, command: Command, reply: Callable[[Answer], None] | None = None) -> None:
        """A call over the network, answered over the network."""

        def answer_back(answer: Answer) -> None:
            if reply is not None:
                self.network.send(lambda: reply(answer))

        self.network.send(lambda: self.master.call(command, answer_back))

    def ask(self, command: Command) -> Answer:
        """A call without network or delay; for scenarios. The answer as it was decided."""
        found: list[Answer] = []
        self.master.call(command, found.append)
        self.run_until(lambda: bool(found), 60.0)
        return found[0]

    def run_for(self, seconds: float) -> None:
        self.engine.run(self.engine.now + seconds)

    def run_until(self, holds: Callable[[], bool], within: float) -> bool:
        self.engine.run(self.engine.now + within, holds)
        return holds()

    def check(self) -> None:
        """Check the invariants that are visible from outside."""
        if not self.master.is_up:
            return
        jobs = self.state.jobs
        self.oracle.check_kept({number: job.uid for number, job in jobs.items()})
        for job in jobs.values():
            if job.state is JobState.SUCCEEDED:
                self.oracle.check_succeeded(job.uid)

    def check_devices(self) -> None:
        """Check that no device that a process may use counts as free, or as another job's, once its node has
        reported."""
        state = self.state
        if not self.master.is_up or state.counters.restoring is not None:
            return
        for (epoch, name), ranks in self.physics.ranks.items():
            node = state.nodes.get(name)
            if node is None or node.lost or not node.heard or not ranks.is_on_devices:
                continue
            uid, claim = ranks.order.uid, ranks.wanted.claim
            if claim.device_mask & state.rows[name].free_mask:
                raise RuleBrokenError(f"{uid} epoch {epoch} runs on devices of {name} that count as free")
            # The oracle judges whether a gang that the master knows may step. A gang on a node that had not reported
            # when the restore was settled may be where the master has another one.
            known = epoch in state.gangs or name in self.settled_without
            for gang in [state.gangs[of] for of in state.gangs.places_on.get(name, ()) if not known]:
                held = [piece.held for piece in gang.pieces if piece.claim.node == name and piece.held is not None]
                owns = claim.device_mask & ~claim.shared_mask
                if state.jobs[gang.job].uid != uid and any(owns & one.device_mask for one in held):
                    raise RuleBrokenError(f"{uid} epoch {epoch} runs on devices of {name} that jobs/{gang.job} holds")

    # -- backups -------------------------------------------------------------------------------------------------------

    def backup(self) -> dict[tuple[str, str], bytes]:
        """Return a copy of the master's database, made while it runs."""
        return dict(self.master.durable)

    def restore(self, copy: dict[tuple[str, str], bytes], opened: OpenStore) -> None:
        """Put the copy in the place of the database, as an operator does, and start the master. `opened`: its first
        command."""
        self.master.restore(copy, opened)
        known = {
            number: (job.uid, 0 if job.checkpoint is None else job.checkpoint.step)
            for number, job in self.state.jobs.items()
        }
        ran = {gang.uid for gang in self.physics.gangs.values()}
        self.oracle.rolled_back(known, remembered=ran if opened.marks is None else None)
        for submission in self.submissions:
            job = self.state.jobs.get(submission.number)
            if submission.number and (job is None or job.uid != submission.uid):
                # Accepted since, and lost with the database.
                submission.refused = True

    # -- faults --------------------------------------------------------------------------------------------------------

    def unleash(self) -> None:
        """Starts every kind of crash the faults name, each at its own random pace."""
        faults = self.faults
        self._again(faults.master_crash_seconds, lambda: self.master.crash(self.engine.between(0.1, 20.0)))
        self._again(faults.daemon_crash_seconds, self._crash_daemon)
        self._again(faults.node_crash_seconds, self._crash_node)
        self._again(faults.rank_crash_seconds, self._crash_rank)
        self._again(faults.scheduler_crash_seconds, self._crash_scheduler)
        self._again(faults.clock_set_seconds, self.master.set_clock)
        self._again(faults.removal_seconds, lambda: self.send(RemoveNode(self._pick(self.daemons).name)))

    def heal(self) -> None:
        """Nothing goes wrong from here on; everything that is down comes back by itself."""
        self.faults = self.network.faults = self.master.faults = self.physics.faults = self.faults.healed()

    def unleash_users(self, mean_seconds: float) -> None:
        """Users who suspend, resume, move and cancel whatever they have, without asking what it does."""
        self._again(mean_seconds, self._meddle, lambda: self.meddling)

    def unleash_planner(self, mean_seconds: float, turns: float = 0.3) -> None:
        """One that proposes whatever can be proposed, and what cannot, `turns` of it about rows; and operators who
        empty nodes."""
        dice = self.engine.random
        self._again(mean_seconds, lambda: self.send(wild_plan(self.state, dice, turns)), lambda: self.meddling)
        self._again(10.0 * mean_seconds, self._empty_a_node, lambda: self.meddling)

    def unleash_resizes(self, mean_seconds: float) -> None:
        """Users who give their elastic jobs other numbers of devices, or of tasks of roles, whatever they do."""
        self._again(mean_seconds, self._resize, lambda: self.meddling)

    meddling = True
    # Nodes that had not reported when the last restore was settled.
    settled_without: frozenset[str] = frozenset()

    def _again(self, mean_seconds: float, act: Callable[[], None], holds: Callable[[], bool] | None = None) -> None:
        if not mean_seconds:
            return
        faults = self.faults

        def go() -> None:
            if not (holds() if holds is not None else self.faults is faults):
                return
            act()
            self.engine.after(self.engine.random.expovariate(1.0 / mean_seconds), go)

        self.engine.after(self.engine.random.expovariate(1.0 / mean_seconds), go)

    def _crash_daemon(self) -> None:
        daemon = self._pick(self.daemons)
        if daemon.is_up:
            daemon.crash()
            self.engine.after(self.engine.between(0.1, 10.0), lambda: self._start(daemon))

    def _crash_node(self) -> None:
        daemon = self._pick(self.daemons)
        if daemon.is_up:
            daemon.reboot(self.engine.chance(self.faults.wiped))
            self.engine.after(self.engine.between(5.0, self.faults.node_away_seconds), lambda: self._start(daemon))

    @staticmethod
    def _start(daemon: SimDaemon) -> None:
        if not daemon.is_up:
            daemon.start()

    def _crash_rank(self) -> None:
        alive = [ranks for ranks in self.physics.ranks.values() if ranks.is_alive]
        if alive:
            ranks = self.engine.random.choice(alive)
            # Without a known exit the preemption budget pays, so that every job can still end well.
            self.physics.kill(ranks.node, ranks.order.epoch, OutcomeKind.UNKNOWN, "killed")

    def _crash_scheduler(self) -> None:
        host = self.engine.random.choice([self.host, *self.hosts.values()])
        if host.is_up:
            host.crash(self.engine.between(0.1, 10.0))

    def _pick(self, daemons: dict[str, SimDaemon]) -> SimDaemon:
        return daemons[self.engine.random.choice(sorted(daemons))]

    def _meddle(self) -> None:
        known = [submission.number for submission in self.submissions if submission.number]
        if not known:
            return
        number = self.engine.random.choice(known)
        what = self.engine.random.random()
        level = self.engine.random.choice(list(SuspendLevel))
        spec = self.state.jobs[number].spec if number in self.state.jobs else None
        if spec is not None and spec.is_elastic and what < 0.5:
            self.send(ResizeJob(number, self.engine.random.randint(spec.gpus_min, spec.gpus_max + 1)))
        elif what < 0.35:
            self.send(SuspendJob(number, level))
        elif what < 0.65:
            self.send(ResumeJob(number))
        elif what < 0.85:
            self.send(MoveJob(number))
        elif what < 0.95:
            self.send(UpdateJob(number, self._other_wishes()))
        else:
            self.send(CancelJob(number))

    def _other_wishes(self) -> Update:
        """What a user comes to want of a job: now and then more than it may have once it has started."""
        memory = self.engine.random.choice([None, 0, 1 << 30])
        return Update(priority=self.engine.random.randint(-1, 1), memory_bytes=memory)

    def _empty_a_node(self) -> None:
        name = self._pick(self.daemons).name
        drains = self.engine.chance(0.5)
        self.send(DrainNode(name, "a new fan") if drains else CordonNode(name, "a new fan"))
        self.engine.after(self.engine.between(5.0, 60.0), lambda: self.send(UncordonNode(name)))

    def _resize(self) -> None:
        dice = self.engine.random
        known = [one for one in self.submissions if one.number and (one.spec.is_elastic or one.spec.has_role_ranges)]
        if not known:
            return
        one = dice.choice(known)
        if one.spec.is_elastic:
            self.send(ResizeJob(one.number, dice.randint(1, 8)))
        else:
            tasks = tuple([(role.name, dice.randint(1, role.tasks_max)) for role in one.spec.roles])
            self.send(ResizeJob(one.number, 0, tasks=tasks))

    # -- what the master says ------------------------------------------------------------------------------------------

    def _on_history(self, row: HistoryRow) -> None:
        if row.kind in _ENDS:
            self.oracle.finished(self.state.jobs[int(row.subject.removeprefix("jobs/"))].uid)
        if row.kind in ("move_committed", "resize_committed"):
            source, epoch = int(row.figures["source"]), int(row.figures["epoch"])
            stopped_at = {ranks.stop_step for (of, _), ranks in self.physics.ranks.items() if of == source}
            has = {ranks.restored_step for (of, _), ranks in self.physics.ranks.items() if of == epoch}
            # A side whose machine lost its disk meanwhile tells nothing any more.
            if stopped_at and has:
                self.oracle.moved(row.subject, epoch, stopped_at, has)
        elif row.kind == "job_submitted" and row.cause == "health":
            job = self.state.jobs[int(row.subject.removeprefix("jobs/"))]
            self.oracle.submitted(job.uid, spec_steps(job.spec), job.spec.gpu_memory_bytes)
            self.physics.opaque.add(job.uid)
        elif row.kind == "gang_approved":
            job = self.state.jobs[int(row.subject.removeprefix("jobs/"))]
            self.oracle.placed(job.uid, int(row.figures["epoch"]))
        elif row.kind == "turn_refused":
            # A job that turns out to have no boundaries starts over: the master did not know.
            self.oracle.died(self.state.jobs[int(row.subject.removeprefix("jobs/"))].uid)
        elif row.kind == "job_failed":
            job = self.state.jobs[int(row.subject.removeprefix("jobs/"))]
            if row.figures.get("failure") == "NO_CHECKPOINT":
                self.oracle.check_without_checkpoint(job.uid, [one.path for one in self.physics.on_storage(job.uid)])
        elif row.kind in ("end_not_known", "gang_adopted"):
            self.oracle.decided_anew(self.state.jobs[int(row.subject.removeprefix("jobs/"))].uid)
        elif row.kind == "restore_settled":
            self.settled_without = frozenset(filter(None, row.message.removeprefix("without ").split(", ")))
            for node in sorted(self.settled_without):
                self.oracle.unreported(self._attempts_on(node))
        elif row.kind == "quarantine_ended":
            self.oracle.decided_anew(row.figures["uid"])
        elif row.kind == "checkpoint_complete":
            job = self.state.jobs[int(row.subject.removeprefix("jobs/"))]
            self.oracle.made_known(job.uid, int(row.figures["step"]))
        elif row.kind == "node_lost":
            node = row.subject.removeprefix("nodes/")
            silent = self.engine.now - self.daemons[node].last_contact
            # An operator may say so at once.
            allowed = self.master.settings.lost_after_s if row.cause == "clock" else None
            self.oracle.given_up(node, silent, allowed or 0.0, self._attempts_on(node))

    def _attempts_on(self, node: str) -> list[tuple[str, int]]:
        return [(ranks.order.uid, epoch) for (epoch, name), ranks in self.physics.ranks.items() if name == node]

    def _on_turns(self, turns: list[GrantedLease]) -> None:
        for turn in turns:
            host = self.hosts.get(turn.scheduler) if turn.scheduler else self.host
            if host is not None:
                self.network.send(partial(host.take, turn))


def everything_ended(cluster: FaultCluster) -> bool:
    """Every job that was accepted has ended."""
    jobs = cluster.state.jobs
    return all(
        submission.refused or (submission.number in jobs and jobs[submission.number].state.is_finished)
        for submission in cluster.submissions
    )


def require_progress(cluster: FaultCluster, within: float) -> None:
    """The liveness mode: everything is healed, users let go of what they suspended, and every job must end."""
    cluster.heal()
    cluster.meddling = False

    def resume_all() -> None:
        for number in list(cluster.state.jobs) if cluster.master.is_up else ():
            if cluster.state.jobs[number].state is JobState.SUSPENDED:
                cluster.send(ResumeJob(number))
        for name, node in cluster.state.nodes.items() if cluster.master.is_up else ():
            if node.cordoned:
                cluster.send(UncordonNode(name))
        cluster.send(let_go(cluster.state))
        cluster.engine.after(5.0, lambda: cluster.send(go_elsewhere(cluster.state)))
        if not everything_ended(cluster):
            cluster.engine.after(10.0, resume_all)

    resume_all()
    if not cluster.run_until(lambda: cluster.master.is_up and everything_ended(cluster), within):
        waiting = [
            f"{job.name} {job.state.value} epoch {job.epoch}+{job.next_epoch} ending {job.ending}"
            for job in cluster.state.jobs.values()
            if not job.state.is_finished
        ]
        raise RuleBrokenError(f"no progress within {within:g} s: {'; '.join(waiting)}")
    cluster.check()
