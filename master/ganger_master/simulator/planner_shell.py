"""The simulated planner: it feeds the planner's loop with what happens in the core, and proposes the loop's plans."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from ganger_master.core import commands
from ganger_master.core.answers import ChangeAnswer, PlanAnswer
from ganger_master.core.commands import Command
from ganger_master.core.state import State
from ganger_master.planner.context import ClusterChange, Plan, PlannerSettings, PlanVerdict, ProgressReports, parts_of
from ganger_master.planner.loop import PlannerLoop
from ganger_master.planner.plan_pace import EventPace, PlanPace, RoundPace
from ganger_master.policies import Grow, Policy, ResizeByOptimus
from ganger_master.policies.fairness import quantum_s
from ganger_master.policies.optimus_sizes import nothing_believed
from ganger_master.policies.orders import Capacity, Flags, Floats, Integers
from ganger_master.simulator.inputs import ReplayOptions
from ganger_master.simulator.node_model import NodeModel
from ganger_master.simulator.time_slices import EPOCH_S, Clock
from ganger_master.simulator.traces.servers import Servers
from ganger_master.simulator.traces.workload import Workload
from ganger_master.simulator.true_rates import SizeLaw, TrueRates, Work

if TYPE_CHECKING:
    # What most policies do not read is loaded only for those that do: it takes longer than to replay a hundred jobs.
    from ganger_master.simulator.measurement_model import ModelledEstimates, ModelledRates


class PlannedReplay(Protocol):
    """What the planner of a replay reads of it.

    rates: None if every job runs at its recorded rate. scaling: None if no job is elastic. windows: None if the policy
    reads no measurements of daemons. work: the true remaining work, which only oracles and the modelled reports read.
    """

    jobs: Workload
    servers: Servers
    policy: Policy
    options: ReplayOptions
    clock: Clock
    state: State
    nodes: NodeModel
    work: Work
    rates: TrueRates | None
    scaling: SizeLaw | None
    windows: ModelledRates | None

    def send(self, command: Command) -> object: ...
    # Return the seconds for which each running job has trained, by number.
    def received_s(self) -> Mapping[int, float]: ...


class Planning:
    """Plans for one replay."""

    def __init__(self, replay: PlannedReplay) -> None:
        self._replay, policy = replay, replay.policy
        self._clock, self._state, self._nodes = replay.clock, replay.state, replay.nodes
        self._windows, scaling = replay.windows, replay.scaling
        self._is_planned = policy.is_planned
        self.estimates = self._modelled_estimates()
        self._rates = self._modelled_rates()
        self._grows = policy.has(Grow) and scaling is not None
        # Jobs that changed since the loop observed them last.
        self._changed: dict[int, None] = {}
        # Time-slice groups with a matrix that some of their nodes have not acknowledged.
        self._changing: frozenset[int] = frozenset()
        self._made: PlannerLoop | None = None
        # When time is to reach the next instant for a plan; times at which new windows are due.
        self._wakes_s = -math.inf
        self._looks: set[float] = set()

    @property
    def loop(self) -> PlannerLoop:
        """The loop, made once the servers are there."""
        if self._made is None:
            # Where no job is elastic, none grows.
            settings = self._state.settings
            policy = self._replay.policy if self._grows else self._replay.policy.without(Grow)
            self._made = PlannerLoop(policy, self._settings(), self._rates)
            self._made.observe(
                ClusterChange(
                    self._state.view,
                    is_whole=True,
                    limits=self._state.limits,
                    teams=settings.teams,
                    usage_half_life_s=settings.usage_half_life_s,
                ),
                self._clock.now,
            )
        return self._made

    @cached_property
    def quantum_s(self) -> float:
        """Return the seconds of a time slice; it fills a round with its switch, or the cost of a switch decides."""
        switch_s, step_s = self._nodes.switch_s, self._replay.options.round_s
        least_s = quantum_s(switch_s, 0.0)
        if step_s is None:
            return max(self._replay.options.quantum_s, least_s)
        return math.ceil((least_s + switch_s) / step_s or 1.0) * step_s - switch_s

    def _settings(self) -> PlannerSettings:
        options, servers = self._replay.options, self._replay.servers
        costs = options.costs
        return PlannerSettings(
            self._pace(),
            resize_s=0.0 if options.ideal else costs.suspend_s + costs.start_s + costs.resume_s,
            oracle=self._oracle,
            capacity=Capacity(
                servers.gpus,
                servers.millicores / 1000,
                float(servers.memory_bytes),
                max(group.configuration_set.devices for group in servers.groups),
            ),
            # No client reads the order.
            line_limit=0,
            bounds_waits=not options.ideal,
            # Each rest would end with a plan, for as long as a job fits nowhere; events bring enough of them.
            unplaced_rest_s=0.0,
            look_s=options.round_s,
        )

    def _pace(self) -> PlanPace:
        """Return the pace of the options. Planning takes no virtual time."""
        options = self._replay.options
        every_s = options.plan_every_s
        if options.round_s is not None:
            settles_s = self._nodes.longest_stop_s
            return RoundPace(every_s, step_s=options.round_s, since_s=EPOCH_S, settles_s=settles_s)
        return EventPace(every_s) if options.ideal else PlanPace(every_s, least_rest_s=0.0, least_alone_s=0.0)

    def jobs_changed(self, numbers: Collection[int]) -> None:
        """Note that these jobs were submitted, changed or ended."""
        if self._is_planned:
            self._changed.update(dict.fromkeys(numbers))

    def estimates_changed(self) -> None:
        """Note that the policy has new measurements or profiles."""
        self.loop.observe(ProgressReports(profiled=(0,)), self._clock.now)

    def trains(self, number: int) -> None:
        """Note that an elastic job trains as of now: enough of it is measured some time later."""
        if self._grows and self._windows is not None:
            self._windows.now = self._clock.now
            self._look_at(self._windows.next_look_s(number))

    def plan(self) -> bool:
        """Propose a plan if one is due. Return whether the core approved a change."""
        if not self._is_planned:
            return False
        loop, now = self.loop, self._clock.now
        changing = frozenset([number for number, one in self._state.gangs.sets.items() if one.coming is not None])
        if self._changed or changing != self._changing:
            self._changing = changing
            self._follow(loop)
        if not len(loop.table):
            return False
        if self._windows is not None:
            self._windows.now = now
        plan, next_s = loop.step(now)
        if plan is None:
            self._wake_at(next_s)
            return False
        answers = self._propose(plan)
        loop.observe(PlanVerdict(answers), now)
        if self._grows and self._windows is not None:
            for number in loop.memory.growing.trials:
                self._look_at(self._windows.next_look_s(number))
        if any(answer.approved for answer in answers):
            return True
        self._wake_at(loop.next_s(now))
        return False

    def _follow(self, loop: PlannerLoop) -> None:
        state = self._state
        jobs, gone = [], []
        for number in self._changed:
            job = state.jobs.get(number)
            if job is not None:
                jobs.append((job, state.gangs.get(job.epoch), 0))
            else:
                # It ended, and the core has already dropped it from its finished jobs.
                gone.append(number)
        self._changed.clear()
        change = ClusterChange(
            state.view,
            jobs,
            gone,
            draining=tuple(state.nodes.draining),
            changing=self._changing,
            quantum_s=self.quantum_s,
            moves_per_hour=self._replay.options.moves_per_hour,
            free_devices=state.nodes.free_devices,
            usage=tuple(state.usage.values()),
        )
        loop.observe(change, self._clock.now)

    def _propose(self, plan: Plan) -> list[ChangeAnswer]:
        answers: list[ChangeAnswer] = []
        for part in parts_of(plan):
            answer = self._replay.send(
                commands.ProposePlan(part.changes, kept_places=part.kept_places, findings=part.findings)
            )
            assert isinstance(answer, PlanAnswer)
            answers.extend(answer.verdicts)
        return answers

    def _wake_at(self, time: float) -> None:
        if time <= self._clock.now or time == math.inf:
            # `run` repeats the plan of this instant until it changes nothing.
            return
        if self._wakes_s <= self._clock.now or time < self._wakes_s:
            self._wakes_s = time
            # Only lets virtual time reach this instant.
            self._clock.at(time, lambda: None)

    def _look_at(self, time: float) -> None:
        def look() -> None:
            self._looks.discard(time)
            self.estimates_changed()

        if self._clock.now < time < math.inf and time not in self._looks:
            self._looks.add(time)
            self._clock.at(time, look)

    def _modelled_rates(self) -> ModelledRates | None:
        replay, believed = self._replay, nothing_believed if self.estimates is None else self.estimates.believed
        curves = None if replay.rates is None else replay.rates.known(self._is_profiled)
        rates = replay.windows
        if rates is None and (curves is not None or self.estimates is not None):
            from ganger_master.simulator.measurement_model import ModelledRates

            rates = ModelledRates(None, replay.options.seed)
        if rates is not None:
            rates.answer_by(curves, believed, replay.received_s)
        return rates

    def _modelled_estimates(self) -> ModelledEstimates | None:
        replay = self._replay
        if not replay.policy.has(ResizeByOptimus):
            return None
        # The fits import SciPy, which takes long and which no other policy needs.
        from ganger_master.simulator.measurement_model import Losses, ModelledEstimates

        jobs, clock, options, scaling = replay.jobs, replay.clock, replay.options, replay.scaling
        return ModelledEstimates(
            Losses(jobs, options.seed),
            lambda job: replay.work.done(job, clock.now),
            lambda job, gpus: 1.0 if scaling is None else scaling.rate(job, gpus),
            lambda job: float(jobs.submit_s[job]) + options.profile_s <= clock.now - EPOCH_S,
            max(group.configuration_set.devices for group in replay.servers.groups),
            options,
        )

    def _is_profiled(self, numbers: Integers) -> Flags:
        since_s = self._replay.jobs.submit_s[numbers - 1] + self._replay.options.profile_s
        known: Flags = since_s <= self._clock.now - EPOCH_S
        return known

    def _oracle(self, numbers: Integers) -> Floats:
        return self._replay.work.remaining(numbers - 1, self._clock.now)
