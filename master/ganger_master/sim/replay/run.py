"""A workload through the production core on virtual time, under one policy."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from ganger.resources.topology import bits

from ganger_master.core import commands, machine
from ganger_master.core.answers import PlanAnswer, Refused
from ganger_master.core.commands import Command
from ganger_master.core.model import Gang, JobState
from ganger_master.core.purpose import Finding
from ganger_master.core.settings import Settings
from ganger_master.core.sharing import CAPABILITY
from ganger_master.core.state import State
from ganger_master.planner.acting import Moving, Terms
from ganger_master.planner.elastic import Sizes, with_sizes
from ganger_master.planner.moves import Inner, moves_nobody, plan_moves
from ganger_master.planner.packed import plan_packed
from ganger_master.planner.passes import plan_by
from ganger_master.planner.refused import NOBODY, KeptOut
from ganger_master.planner.shared import NOTHING as NOTHING_REMEMBERED
from ganger_master.planner.shared import plan_shared
from ganger_master.planner.table import LiveTable
from ganger_master.planner.target import Pass
from ganger_master.policies import Places, policy_named
from ganger_master.policies.facts import Capacity, Flags, Floats, Integers
from ganger_master.policies.introspect.slicing import quantum_s
from ganger_master.policies.optimus_belief import nothing_believed
from ganger_master.policies.order.las2d import LAS2D
from ganger_master.policies.place.anywhere import ANYWHERE
from ganger_master.policies.room import Room
from ganger_master.policies.tune.known import NOTHING
from ganger_master.sim.replay.clock import Clock
from ganger_master.sim.replay.footprints import Footprints
from ganger_master.sim.replay.ledger import Ledger
from ganger_master.sim.replay.meters import Meters
from ganger_master.sim.replay.nodes import Nodes
from ganger_master.sim.replay.options import FREE, Options
from ganger_master.sim.replay.rates import Rates, without_arenas
from ganger_master.sim.replay.scaling import Scaling
from ganger_master.sim.replay.sizes import Sizing
from ganger_master.sim.replay.specs import devices_only, specs_of
from ganger_master.sim.replay.turns import Turns
from ganger_master.sim.replay.windows import Windows
from ganger_master.sim.replay.work import Work
from ganger_master.sim.report.outcomes import Run
from ganger_master.sim.traces.profiles import with_models
from ganger_master.sim.traces.servers import Servers
from ganger_master.sim.traces.statistics import offered_load
from ganger_master.sim.traces.workload import Workload

if TYPE_CHECKING:
    from ganger_master.sim.replay.measured import Measured

# A trace's clock begins at zero, and a time of zero means "never" in the core.
EPOCH_S = 1_000_000.0
_NEVER_S = 1e12
_DEFAULTS = Options()
# In ideal runs service is counted as it is, not in queues.
_CONTINUOUS = {"tiresias": LAS2D}
_CAPABILITIES = {CAPABILITY: "yes"}
# Plans of one instant: one stops, the next starts what that made room for.
_PLANS_AT_ONCE = 64


def simulate(
    jobs: Workload,
    servers: Servers,
    policy: str,
    options: Options = _DEFAULTS,
    progress: Callable[[int, int], None] | None = None,
) -> Run:
    """Every job from submission to end. Every gang must fit into the cluster (`traces.transform.that_fit`) and every
    duration be known. KeyError for an unknown policy; `progress` is told how many jobs have ended, of how many."""
    began, began_cpu = time.perf_counter(), time.process_time()
    if options.ideal:
        servers = devices_only(servers)
    if options.rates == "profiles":
        jobs, servers = with_models(jobs, options.seed), without_arenas(servers)
    replay = _Replay(jobs, servers, policy, options, progress)
    replay.run()
    end = replay.clock.now
    return Run(
        policy=policy,
        outcomes=replay.ledger.outcomes(),
        gpus=servers.gpus,
        cores=servers.millicores / 1000,
        start_s=float(jobs.submit_s[0]) if len(jobs) else 0.0,
        end_s=end - EPOCH_S,
        series=replay.meters.series(end - EPOCH_S),
        shares=replay.policy.shares,
        seed=options.seed,
        offered_load=offered_load(jobs, servers.gpus),
        wall_s=time.perf_counter() - began,
        cpu_s=time.process_time() - began_cpu,
        peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        events=replay.events,
    )


class _Replay:
    def __init__(
        self,
        jobs: Workload,
        servers: Servers,
        policy: str,
        options: Options,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.policy = policy_named(policy)
        if options.ideal:
            # Where any free devices serve there is nothing for a job's own scheduler to weigh.
            order = _CONTINUOUS.get(self.policy.order.name, self.policy.order)
            self.policy = replace(self.policy, order=order, placement=ANYWHERE, places=Places.PLANNER)
        self.order = self.policy.order if options.ideal else self.policy.aging_order
        if options.round_s is not None:
            # A round begins with an empty cluster.
            self.order = replace(self.order, preempts=True)
        # What gangs have is not changed while they run.
        policy_of = self.policy
        self._is_plain = policy_of.tuning is None and policy_of.tetris is None and not policy_of.resizes
        self.jobs = jobs
        self.options = options
        self.progress = progress
        self.clock = Clock(EPOCH_S)
        self.settings = Settings(
            lost_after_seconds=None,
            policy=policy,
            checkpoint_interval_seconds=-1.0,
            jobs_waiting_limit=len(jobs) + 1,
            # Nobody here becomes less choosy with time: only what changes in the cluster gives a job another chance.
            turn_again_seconds=_NEVER_S,
            # Ended jobs are looked at by nobody.
            request_kept_seconds=0.0,
            finished_jobs_limit=1_000,
        )
        self.state = State(self.settings, EPOCH_S)
        self.state.policy = self.policy
        self.table = LiveTable(learns=self.order.learns or self.policy.tetris is not None)
        self.work = Work(jobs.duration_s)
        self.nodes = Nodes(
            self.clock,
            self.state,
            FREE if options.ideal else options.costs,
            self.send,
            self._begins,
            self._ends,
            self._changes,
            lambda number, gang: self.ledger.moves(number - 1, gang),
            self._peak_bytes,
        )
        # None: every job runs at its recorded pace.
        self.rates = Rates(jobs, servers) if options.rates == "profiles" else None
        self.known = NOTHING if self.rates is None else self.rates.known(self._is_profiled)
        # None: no job has another size than that of its trace.
        is_elastic = bool((jobs.min_gpus < jobs.max_gpus).any())
        self.scaling = Scaling(jobs, options.seed) if is_elastic else None
        # None: nobody shares GPUs.
        self.footprints = Footprints(jobs, servers, options.seed) if self.policy.shares else None
        # What daemons measure of memory is what says who can rest in that of its host.
        grows = is_elastic and self.policy.grows
        measures = grows or self.policy.moves
        self.memory = Footprints(jobs, servers, options.seed) if measures else self.footprints
        self.windows = None if self.memory is None else Windows(self.memory, options.seed)
        self.shared = NOTHING_REMEMBERED
        # Who trains on a device, by node and number of the device, and where they do, by position.
        self._on: dict[tuple[str, int], set[int]] = {}
        self._where: dict[int, Gang] = {}
        self._switches_at = -np.inf
        # What is under way of moves, and when that is looked at though nothing happens.
        self.moving = Moving()
        self._moves_at = np.inf
        self.turns = Turns(self.state, self.send)
        self.events = 0
        self._happened = False
        # Somebody found no place in the last plan.
        self._is_waited_for = False
        # Jobs came, started, stopped or ended since the last plan.
        self._is_news = False
        # Whom the last plan started when it left nothing for another one to do, and when that was.
        self._placed: frozenset[int] = frozenset()
        self._placed_at = -np.inf
        self._wake: float | None = None
        self._back_at = self._last_plan = self._packed_at = -np.inf
        self.ledger = Ledger(jobs)
        self.room = Room(self.state.view)
        # None: nobody grows onto idle GPUs.
        self.sizing = (
            Sizing(
                self.policy.placement,
                self.table,
                self.room,
                self.windows,
                self.clock,
                options.plan_every_s,
                self._learn,
            )
            if grows and self.windows is not None
            else None
        )
        self.capacity = Capacity(
            servers.gpus,
            servers.millicores / 1000,
            float(servers.memory_bytes),
            max(group.configuration_set.devices for group in servers.groups),
        )
        self.measured = self._measured()
        self._specs = specs_of(jobs, servers, options.ideal, EPOCH_S)
        self._open(servers)
        self.quantum_s = quantum_s(self.nodes.switch_s) if options.round_s is None else options.round_s
        self.meters = Meters(jobs, self.state, servers.millicores)
        if len(jobs):
            self._expect(0)

    def run(self) -> None:
        while self.ledger.ended < len(self.jobs) and self.clock.next_time() is not None:
            self.events += self.clock.run_instant()
            self._settle()
        stuck = len(self.jobs) - self.ledger.ended
        assert not stuck, f"{stuck} jobs never ended"

    def send(self, command: Command) -> object:
        answer, happened = machine.advance(self.state, command, self.clock.now)
        assert not isinstance(answer, Refused), f"{type(command).__name__} was refused: {answer}"
        self._happened = self._happened or bool(happened)
        return answer

    # -- the cluster and its jobs --------------------------------------------------------------------------------------

    def _open(self, servers: Servers) -> None:
        for group in servers.groups:
            for row in group.rows():
                self.send(
                    commands.OpenSession(
                        row.node,
                        f"machine-{row.node}",
                        group.configuration_set,
                        rack=row.rack,
                        fabric=row.fabric,
                        capabilities=_CAPABILITIES,
                    )
                )
                self.nodes.report_of(row.node)
        self._finish()

    def _expect(self, job: int) -> None:
        self.clock.at(EPOCH_S + float(self.jobs.submit_s[job]), lambda: self._submit(job))

    def _submit(self, job: int) -> None:
        user = self.jobs.user[job] or self.jobs.tenant[job]
        self.send(commands.SubmitJob(self._specs[job], self.jobs.job_ids[job], user))
        if (self.rates is not None and self.policy.tuning is not None) or self.measured is not None:
            self.clock.at(self.clock.now + self.options.profile_s, self._learn)
        if job + 1 < len(self.jobs):
            self._expect(job + 1)

    def _begins(self, number: int, gang: Gang, held_since: float) -> float:
        job, now = number - 1, self.clock.now
        self.ledger.trains(job, held_since - EPOCH_S, now - EPOCH_S)
        ends = self._let_go(self.work.begin(job, now, self._rate(job, gang)))
        if self.windows is not None:
            self._where[job] = gang
            for device in _devices(gang):
                self._on.setdefault(device, set()).add(job)
            ends = self._let_go(self._beside(job))
            self._retime(self._company(job, gang))
        return ends

    def _company(self, job: int, gang: Gang) -> frozenset[int]:
        """Who trains on its devices, too."""
        if self.footprints is None:
            return frozenset()
        return frozenset(other for device in _devices(gang) for other in self._on.get(device, ()) if other != job)

    def _beside(self, job: int) -> float:
        """It goes on beside those who are on its devices now; when it ends then."""
        assert self.windows is not None
        rate = self._rate(job, self._where[job])
        gang = self._where[job]
        beside = frozenset(other + 1 for other in self._company(job, gang))
        self.windows.trains(job + 1, self.clock.now, rate, beside, gang.devices)
        if self.sizing is not None and self._specs[job].is_elastic:
            self.sizing.trains(job + 1)
        return self.work.change(job, self.clock.now, rate)

    def _retime(self, company: frozenset[int]) -> None:
        for other in sorted(company):
            self.nodes.retimed(other + 1)

    def _peak_bytes(self, number: int) -> int:
        return 0 if self.memory is None else self.memory.memory_bytes(number - 1)

    def _changes(self, number: int, gang: Gang) -> float | None:
        job = number - 1
        if job in self._where:
            return self._let_go(self._beside(job))
        if self.rates is None:
            return None
        return self._let_go(self.work.change(job, self.clock.now, self._rate(job, gang)))

    def _rate(self, job: int, gang: Gang) -> float:
        """Against the pace of its trace."""
        rate = 1.0 if self.rates is None else self.rates.rate(job, gang)
        if self.footprints is not None:
            rate *= self.footprints.speed(job, sorted(self._company(job, gang)))
        return rate if self.scaling is None else rate * self.scaling.rate(job, gang.devices)

    def _let_go(self, ends: float) -> float:
        """When its devices are given back."""
        step = self.options.round_s
        if step is None:
            return ends
        # Held to the end of the round.
        return EPOCH_S + step * float(np.ceil(round((ends - EPOCH_S) / step, 9)))

    def _ends(self, number: int, gang: Gang, held_since: float, finished: bool) -> None:
        job, now = number - 1, self.clock.now
        self.work.stop(job, now)
        if self.windows is not None and self._where.pop(job, None) is not None:
            for device in _devices(gang):
                self._on[device].discard(job)
            self.windows.forget(number) if finished else self.windows.rests(number, now)
            self._retime(self._company(job, gang))
        self.ledger.leaves(job, gang, held_since - EPOCH_S, now - EPOCH_S, finished)
        if finished and self.measured is not None:
            self.measured.forget(number)
        if finished and self.progress is not None:
            self.progress(self.ledger.ended, len(self.jobs))

    # -- what follows --------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Everything that follows at this instant."""
        for _ in range(_PLANS_AT_ONCE):
            while self.nodes.report() or self._happened:
                self._finish()
                if self.clock.next_time() == self.clock.now:
                    self.events += self.clock.run_instant()
            if not self._plan():
                break
        self.meters.read(self.clock.now - EPOCH_S)

    def _finish(self) -> None:
        self._happened = False
        now = self.clock.now
        effects = machine.finish(self.state, now)
        self._is_news = self._is_news or bool(effects.jobs)
        self.state.take_changes()
        has_planner = self.policy.places is Places.PLANNER
        for number in effects.jobs:
            job = self.state.jobs.get(number)
            if number not in self._placed or job is None or job.state is not JobState.HOLDING:
                self._placed = frozenset()
            if job is not None:
                if has_planner:
                    self.table.put(job, self.state.gangs.get(job.epoch))
                self.nodes.follow(number)
        if effects.turns:
            self.turns.take(effects.turns, now)
        if effects.wake_at is not None:
            self._wake = wake = effects.wake_at
            # For what is never to be, nothing is kept in mind.
            if wake < _NEVER_S:
                self.clock.at(wake, lambda: self._tick(wake))

    def _tick(self, wake: float) -> None:
        if self._wake == wake:
            self._wake = None
            self.send(commands.Tick())

    def _plan(self) -> bool:
        """Proposes a plan if it is time for one; whether it changed anything."""
        if self.policy.places is Places.JOBS or not len(self.table):
            return False
        if self.policy.shares:
            return self._share()
        now = self.clock.now
        if self._placed and now == self._placed_at:
            # All that happened since is what that plan said.
            self._is_news = False
            return False
        may_stop = self._may_stop()
        if not may_stop and now < self._moves_at and not (self._is_news and self._may_start()):
            return False
        is_news, self._is_news = self._is_news, False
        looks = may_stop or self.sizing is not None or (self.policy.moves and not self._moves_nobody())
        if not looks and self._is_vain():
            return False
        sizes = Sizes() if self.sizing is None else self.sizing.plan(())
        # Nobody need be stopped for GPUs that are on their way, and who finds room need not wait for a plan that stops
        # others.
        may_stop = may_stop and not sizes.is_giving
        findings: tuple[Finding, ...] = ()
        if self.policy.moves:
            found, findings = self._moved(now, may_stop, is_news)
        else:
            found = self._pass(now, may_stop)
        self._is_waited_for = found.waits
        if found.next_change_s < np.inf and self.options.round_s is None:
            self._come_back(max(found.next_change_s, self._last_plan + self.options.plan_every_s))
        if self.sizing is not None:
            found = with_sizes(found, sizes)
        is_carried_out = self._propose(found, (*findings, *sizes.findings))
        if self._leaves_nothing_to_do(found):
            self._placed, self._placed_at = frozenset(change.number for change in found.changes), now
        return is_carried_out

    def _leaves_nothing_to_do(self, found: Pass) -> bool:
        """Whether another plan at this instant would change nothing: all who were chosen have a place now, and would be
        chosen again."""
        if found.waits or not self._is_plain or self.policy.moves or self.sizing is not None:
            return False
        if not self.order.is_steady or self.order.next_change is not None:
            return False
        jobs = self.state.jobs
        return all(change.kind == "START" and jobs[change.number].state is JobState.HOLDING for change in found.changes)

    def _is_vain(self) -> bool:
        """Whether a plan that may stop nobody would start nobody either, and need not say when the next one is due."""
        comes_back = self._back_at == self._last_plan + self.options.plan_every_s > self.clock.now
        if not comes_back or not self._is_plain or not self.table.has_waiting:
            return False
        self.room.refresh()
        if self.table.least_waiting_gpus <= self.room.free_devices:
            return False
        # What is known of jobs depends on when one looks.
        self.table.look(self.clock.now, self.order)
        return True

    def _share(self) -> bool:
        """The same where jobs share GPUs: on news, and at the end of every quantum."""
        now = self.clock.now
        if self.options.round_s is not None and not (self._may_stop() or self._may_start()):
            return False
        if not self._is_news and now < self._switches_at:
            return False
        self._is_news = False
        assert self.windows is not None
        self.windows.now = now
        before, sizes = self.shared, Sizes()
        if self.sizing is not None:
            sizes = self.sizing.plan({*before.turns.sharers, *before.packs.on_trial})
        found, findings = Pass(), sizes.findings
        # Else who waits is about to have devices of its own.
        if not sizes.is_giving:
            found, self.shared, packed = plan_shared(
                self.policy.placement,
                self.table,
                now,
                self.room,
                before,
                self.windows,
                self.capacity.gpus,
                self.quantum_s,
            )
            findings = (*findings, *packed)
            self._switches_at = found.next_change_s
            if self._switches_at < np.inf:
                self._come_back(self._switches_at)
        found = with_sizes(found, sizes)
        if not found.changes and not findings:
            terms = Terms(
                self.policy.placement,
                holes=False,
                per_hour=self.options.moves_per_hour,
                on_trial=self.shared.packs.on_trial,
            )
            return self._propose(*self._with_moves(lambda kept_out, may_stop: Pass(), terms))
        answer = self._answer(found.changes, findings)
        if answer is None:
            return False
        refused = frozenset(verdict.number for verdict in answer.verdicts if not verdict.approved)
        self.shared = self.shared.without(before, refused)
        return len(refused) < len(answer.verdicts)

    def _moved(self, now: float, may_stop: bool, is_news: bool) -> tuple[Pass, tuple[Finding, ...]]:
        """The pass, where jobs are moved too."""
        return self._with_moves(
            lambda kept_out, may: self._pass(now, may, kept_out), self._terms_of_moves(), may_stop, is_news
        )

    def _terms_of_moves(self) -> Terms:
        return Terms(
            self.policy.placement,
            draining=tuple(self.state.draining),
            is_strict=self.order.is_strict,
            per_hour=self.options.moves_per_hour,
        )

    def _moves_nobody(self) -> bool:
        return moves_nobody(self.moving, self._terms_of_moves(), self.table, self.clock.now, self.room)

    def _with_moves(
        self, inner: Inner, terms: Terms, may_stop: bool = False, is_news: bool = True
    ) -> tuple[Pass, tuple[Finding, ...]]:
        assert self.windows is not None
        self.windows.now = self.clock.now
        terms = replace(terms, rated=self.windows)
        found, self.moving, findings, again_s = plan_moves(
            inner, terms, self.table, self.clock.now, self.room, self.moving, NOBODY, may_stop, is_news
        )
        if again_s != self._moves_at:
            self._moves_at = again_s
            if again_s < np.inf:
                self.clock.at(max(again_s, self.clock.now), _nothing)
        return found, findings

    def _propose(self, found: Pass, findings: tuple[Finding, ...] = ()) -> bool:
        answer = self._answer(found.changes, findings)
        return answer is not None and any(verdict.approved for verdict in answer.verdicts)

    def _answer(self, changes: tuple[commands.Change, ...], findings: tuple[Finding, ...] = ()) -> PlanAnswer | None:
        if not changes and not findings:
            return None
        promises = self.moving.promises if self.policy.moves else None
        answer = self.send(commands.ProposePlan(changes, promises=promises, findings=findings))
        assert isinstance(answer, PlanAnswer)
        if self.sizing is not None:
            self.sizing.refused({verdict.number for verdict in answer.verdicts if not verdict.approved})
        return answer

    def _pass(self, now: float, may_stop: bool, kept_out: KeptOut = NOBODY) -> Pass:
        tuning = self.policy.tuning
        is_packed = tuning is not None and tuning.place is not None and not self.policy.is_placement_named
        if tuning is not None and is_packed and self.options.round_s is not None and may_stop:
            # Whoever was stopped may go before others then, but a round stops nobody twice.
            may_stop, self._packed_at = self._packed_at != now, now
            packed = plan_packed(
                tuning,
                self.order,
                self.table,
                now,
                self.capacity,
                self.room.view,
                may_stop,
                self._oracle,
                known=self.known,
            )
            if packed is not None:
                return packed
        return plan_by(
            self.policy,
            self.order,
            self.table,
            now,
            self.capacity,
            self.room,
            may_stop,
            remaining_s=self._oracle,
            kept_out=kept_out,
            known=self.known,
            believed=nothing_believed if self.measured is None else self.measured.believed,
            resize_s=self._resize_s,
        )

    @property
    def _resize_s(self) -> float:
        costs = self.options.costs
        return 0.0 if self.options.ideal else costs.suspend_s + costs.start_s + costs.resume_s

    def _may_start(self) -> bool:
        """Whether a plan at this instant may start somebody though it may stop nobody: within a round only those for
        whom it made way."""
        step = self.options.round_s
        return step is None or 0.0 < (self.clock.now - EPOCH_S) % step <= self.nodes.longest_stop_s

    def _may_stop(self) -> bool:
        """Whether a plan at this instant may stop who runs; if not, sees to it that the next one is made in time."""
        now, step = self.clock.now, self.options.round_s
        if step is not None:
            rounds = (now - EPOCH_S) / step
            whole = np.floor(rounds)
            self._come_back(EPOCH_S + step * (whole + 1))
            return bool(rounds == whole)
        if self.options.ideal:
            return self._is_news
        if now != self._last_plan and now < self._last_plan + self.options.plan_every_s:
            if self._is_waited_for and self._is_news:
                self._come_back(self._last_plan + self.options.plan_every_s)
            return False
        self._last_plan = now
        return True

    def _come_back(self, time: float) -> None:
        if self._back_at <= self.clock.now or time < self._back_at:
            self._back_at = time
            self.clock.at(time, _nothing)

    def _measured(self) -> Measured | None:
        """What a policy that resizes jobs measures; None for all others."""
        if not self.policy.resizes:
            return None
        # Fits need SciPy, for which no other policy's run is to wait.
        from ganger_master.sim.replay.losses import Losses
        from ganger_master.sim.replay.measured import Measured

        scaling, work, clock, profile_s = self.scaling, self.work, self.clock, self.options.profile_s
        return Measured(
            Losses(self.jobs, self.options.seed),
            lambda job: work.done(job, clock.now),
            lambda job, gpus: 1.0 if scaling is None else scaling.rate(job, gpus),
            lambda job: float(self.jobs.submit_s[job]) + profile_s <= clock.now - EPOCH_S,
            self.capacity.gpus_per_node,
            self.options.seed,
        )

    def _is_profiled(self, numbers: Integers) -> Flags:
        known: Flags = self.jobs.submit_s[numbers - 1] + self.options.profile_s <= self.clock.now - EPOCH_S
        return known

    def _learn(self) -> None:
        """There is more to go by than before."""
        self._is_news = True

    def _oracle(self, numbers: Integers) -> Floats:
        return self.work.remaining(numbers - 1, self.clock.now)


def _devices(gang: Gang) -> Iterator[tuple[str, int]]:
    return ((claim.node, device) for claim in gang.claims for device in bits(claim.device_mask))


def _nothing() -> None:
    """Time passes."""
