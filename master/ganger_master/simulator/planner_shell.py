"""The simulated planner: decides when to plan, runs the pass of the policy and proposes the changes to the core."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from ganger.cluster.capacity_index import CapacityIndex
from ganger.job_state import JobState

from ganger_master.core import commands
from ganger_master.core.answers import ChangeAnswer, PlanAnswer
from ganger_master.core.change_reason import TrialFinding
from ganger_master.core.commands import Command
from ganger_master.core.job_model import JobRecord
from ganger_master.core.plan_changes import PlanChange, StartChange, SuspendChange
from ganger_master.core.state import State
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.order_stage import within_quotas
from ganger_master.planner.passes import plan_by, terms_of
from ganger_master.planner.plan import PlanDraft, may_start, started
from ganger_master.planner.plan_pace import is_stop
from ganger_master.planner.refusal_backoff import NONE_EXCLUDED, ExcludedJobs
from ganger_master.planner_process.plan_parts import parts_of
from ganger_master.policies import Places, Policy
from ganger_master.policies.job_facts import Capacity, Flags, Floats, Integers
from ganger_master.policies.optimus_sizes import nothing_believed
from ganger_master.simulator.inputs import ReplayOptions
from ganger_master.simulator.node_model import NodeModel
from ganger_master.simulator.replay import EPOCH_S, INSTANT_S, Clock, round_start, rounds_until
from ganger_master.simulator.traces.servers import Servers
from ganger_master.simulator.traces.workload import Workload
from ganger_master.simulator.true_rates import Work

if TYPE_CHECKING:
    # What most policies do not do is loaded only for those that do: it takes longer than to replay a hundred jobs.
    from ganger_master.planner.in_place_resize import Resizing
    from ganger_master.simulator.measurement_model import ModelledEstimates, ModelledRates
    from ganger_master.simulator.moves import Moves
    from ganger_master.simulator.packing import Packer
    from ganger_master.simulator.sharing import Sharing
    from ganger_master.simulator.sizes import Sizing
    from ganger_master.simulator.true_rates import Scaling, TrueRates


@dataclass(frozen=True, slots=True)
class _Planned:
    """The last plan: the jobs that it started and stopped (together `jobs`), and the jobs to start once the stopped
    ones have released their devices, in order."""

    at: float
    started: frozenset[int] = frozenset()
    stopped: frozenset[int] = frozenset()
    follow: tuple[int, ...] = ()
    jobs: frozenset[int] = frozenset()


NOTHING_PLANNED = _Planned(-np.inf)


class Planning:
    """Plans for one replay.

    `send` passes a command to the core and returns its answer. `rates`: None if every job runs at its recorded rate.
    `scaling`: None if no job is elastic. `windows`: None if the policy reads no measurements of daemons. `work`: the
    true remaining work, which only oracles and the modelled reports read. `received_s`: seconds for which each running
    job has trained, by number.
    """

    def __init__(
        self,
        jobs: Workload,
        servers: Servers,
        policy: Policy,
        options: ReplayOptions,
        clock: Clock,
        state: State,
        nodes: NodeModel,
        work: Work,
        rates: TrueRates | None,
        scaling: Scaling | None,
        windows: ModelledRates | None,
        send: Callable[[Command], object],
        received_s: Callable[[], Mapping[int, float]],
    ) -> None:
        self._jobs, self._policy, self._options = jobs, policy, options
        self._clock, self._state, self._nodes, self._work = clock, state, nodes, work
        self._windows, self._send, self._received_s = windows, send, received_s
        self._order = policy.order if options.ideal else policy.aging_order
        if options.round_s is not None:
            # A round begins with an empty cluster.
            self._order = replace(self._order, preempts=True)
        self._places = policy.places is Places.PLANNER
        # Running gangs keep their devices, cores and memory.
        self._is_plain = policy.tuning is None and policy.tetris is None and not policy.resizes
        # Plans concern pending jobs only.
        self._only_for_waiting = self._is_plain and not (policy.moves or policy.grows or policy.shares)
        does_more = self._order.preempts or self._order.learns or policy.shares
        # With quotas, free devices are no proof that a pending job can start.
        self._is_bounded = bool(state.settings.quota_devices)
        # A plan only starts jobs, on any free GPUs, and its outcome does not depend on time.
        only_starts = options.ideal and self._is_plain and not does_more and not self._is_bounded
        self._only_starts = only_starts and self._order.next_change is None and self._order.with_history is None
        learns = self._order.learns or policy.tetris is not None
        self.table = LiveTable(learns, state.settings.quota_devices)
        self._room = CapacityIndex(state.view)
        self._capacity = Capacity(
            servers.gpus,
            servers.millicores / 1000,
            float(servers.memory_bytes),
            max(group.configuration_set.devices for group in servers.groups),
        )
        self._known = None if rates is None else rates.known(self._is_profiled)
        self.measured = self._measured(scaling)
        # Resizes in progress of a policy that decides on sizes.
        self._resizing: Resizing | None = None
        # None: the policy does not grow, migrate or co-locate jobs.
        self.sizing = self._sizing() if scaling is not None and policy.grows else None
        self.moves = self._moves() if policy.moves else None
        self.sharing = self._sharing() if policy.shares else None
        self._packer = self._packing() if policy.packs else None
        # Jobs preempted by the last plan that preempted; they wait until the next plan that may preempt.
        self._displaced: frozenset[int] = frozenset()
        # Whether something changed since the last plan, and the jobs whose entries in the table are out of date.
        self._is_news = False
        self._changed: dict[int, None] = {}
        # Kept while nothing but this plan has happened at its instant and its effects do not change the ranking.
        self._planned = NOTHING_PLANNED
        self._wakes_s = self._stopped_at = self._packed_at = -np.inf
        # When the next plan is due without a change; an earlier plan for another reason does not reset this.
        self._due_at = np.inf
        # Whether plans follow the schedule of a live planner (`planner.loop`).
        self._is_paced = not options.ideal and options.round_s is None

    def jobs_changed(self, numbers: Collection[int]) -> None:
        """Note that these jobs were submitted, changed or ended."""
        if not numbers or not self._places:
            return
        self._is_news = True
        self._changed.update(dict.fromkeys(numbers))
        if not self._planned.jobs.issuperset(numbers):
            self._planned = NOTHING_PLANNED

    def estimates_changed(self) -> None:
        """Note that the policy has new measurements or profiles."""
        self._is_news = True

    def plan(self) -> bool:
        """Propose a plan if one is due. Return whether the core approved a change."""
        if self._changed:
            self._refresh_table()
        if not len(self.table):
            return False
        self._wake_at(self._due_at)
        if self.sharing is not None:
            return self._share(self.sharing)
        return self._plan() or (self._packer is not None and self._pack(self._packer))

    def _plan(self) -> bool:
        now = self._clock.now
        planned = self._carried_out(now)
        if planned.started and not planned.follow:
            # All chosen jobs have started; another pass would choose the same ones.
            self._is_news = False
            return False
        may_stop = self._may_stop()
        moves, sizing = self.moves, self.sizing
        is_due = may_stop or (moves is not None and moves.is_due)
        if not is_due and not (self._is_news and self._may_start()):
            return False
        is_news, self._is_news = self._is_news, False
        if self._only_for_waiting and not self.table.has_waiting:
            self._planned = NOTHING_PLANNED
            return False
        has_other_work = may_stop or sizing is not None or (moves is not None and not moves.has_nothing_to_move())
        if self._starts_no_job() if self._only_starts else not has_other_work and self._is_futile():
            return False
        if sizing is not None:
            sizing.plan(())
            # GPUs taken back from grown jobs will serve the pending jobs, so this plan need not preempt.
            may_stop = may_stop and not sizing.is_giving
        findings: tuple[TrialFinding, ...] = ()
        if moves is not None:
            found, findings = moves.around(lambda kept_out, may: self._pass(now, may, kept_out), may_stop, is_news)
        else:
            found = self._shortcut_pass(now, planned) or self._pass(now, may_stop)
        self._displaced = found.displaced or self._displaced
        self._due_at = self._next_due_s(found)
        self._wake_at(self._due_at)
        if sizing is not None:
            found, findings = sizing.beside(found), (*findings, *sizing.findings)
        self._resizing = found.resizing or self._resizing
        is_carried_out = self._propose(found, findings)
        self._planned = self._repeatable(found, now)
        return is_carried_out

    def _next_due_s(self, found: PlanDraft) -> float:
        """Return when the next pass is due without a change; infinite: only after a change."""
        due_s = np.inf
        if found.next_change_s < np.inf and self._options.round_s is None:
            # Sizes are decided as often as a plan may preempt.
            earliest = self._next_stop_s if self._policy.resizes else self._stopped_at + self._options.plan_every_s
            due_s = max(found.next_change_s, earliest)
        if self._is_paced and (found.waits or found.leaves_waiting):
            due_s = min(due_s, self._next_stop_s)
        return due_s

    def _refresh_table(self) -> None:
        """Bring the table up to date with the jobs that changed."""
        state, table = self._state, self.table
        for number in self._changed:
            job = state.jobs.get(number)
            if job is not None:
                table.put(job, state.gangs.get(job.epoch))
            elif table.get(number) is not None:
                # It ended, and the core has already dropped it from its finished jobs.
                table.forget(number)
        self._changed.clear()

    def _repeatable(self, found: PlanDraft, now: float) -> _Planned:
        """Return the plan if the next pass of its instant would choose the same jobs, else `NOTHING_PLANNED`."""
        is_steady = self._order.is_steady and self._order.next_change is None
        if not is_steady or not self._is_plain or self._policy.moves or self.sizing is not None or self._is_bounded:
            return NOTHING_PLANNED
        if found.waits and not (found.follow and not found.unplaced and self._policy.placement.by_counts):
            return NOTHING_PLANNED
        started = frozenset([change.number for change in found.changes if isinstance(change, StartChange)])
        stopped = frozenset([change.number for change in found.changes if isinstance(change, SuspendChange)])
        return _Planned(now, started, stopped, found.follow, started | stopped)

    def _carried_out(self, now: float) -> _Planned:
        """Return the last plan of this instant if all of its changes have taken effect, else `NOTHING_PLANNED`."""
        planned, jobs = self._planned, self._state.jobs
        is_done = planned.at == now and all(jobs[number].state is JobState.HOLDING for number in planned.started)
        if is_done and all(number not in jobs or not jobs[number].epoch for number in planned.stopped):
            return planned
        return NOTHING_PLANNED

    def _shortcut_pass(self, now: float, planned: _Planned) -> PlanDraft | None:
        """Return the result of the pass if the chosen jobs are known without ranking all jobs; else None."""
        jobs: Sequence[JobRecord] = [self._state.jobs[number] for number in planned.follow]
        if not jobs and self._only_starts and self._order.by_arrival and self.table.has_waiting:
            jobs = self._first_of_queue()
        if not jobs:
            return None
        terms = terms_of(self._policy, self.table)
        return started(jobs, self._policy.placement, self.table, now, self._room, terms=terms)

    def _first_of_queue(self) -> list[JobRecord]:
        """Return the jobs that an order by arrival starts on the free GPUs."""
        state, found = self._state, []
        free, least = state.nodes.free_devices, self.table.least_waiting_gpus
        for number in state.queue.waiting:
            if free < least:
                break
            job = state.jobs[number]
            if job.gpus <= free:
                found.append(job)
                free -= job.gpus
            elif self._order.is_strict:
                break
        return found

    def _starts_no_job(self) -> bool:
        """Return whether too few GPUs are free in all for a plan that can only start jobs."""
        state = self._state
        if not (self._order.is_strict and self._order.by_arrival):
            return not self.table.has_waiting or self.table.least_waiting_gpus > state.nodes.free_devices
        first = next(iter(state.queue.waiting), None)
        return first is None or state.jobs[first].gpus > state.nodes.free_devices

    def _is_futile(self) -> bool:
        """Return whether a plan that may not preempt would start no job and the next plan is already scheduled."""
        is_scheduled = self._due_at == self._stopped_at + self._options.plan_every_s > self._clock.now
        if not is_scheduled or not self._is_plain or not self.table.has_waiting:
            return False
        terms = terms_of(self._policy, self.table)
        if may_start(self._policy.placement, self.table, self._room, terms, self._displaced):
            return False
        # Skipping the pass must not skip its effect on the job estimates, which depend on the times of passes.
        self.table.look(self._clock.now, self._order)
        return True

    def _share(self, sharing: Sharing) -> bool:
        """Plan for a policy with time slices and co-location: after a change, and at the end of every quantum."""
        now, sizing, moves = self._clock.now, self.sizing, self.moves
        if self._options.round_s is not None and not (self._may_stop() or self._may_start()):
            return False
        if not self._is_news and now < sharing.next_look_s:
            return False
        self._is_news = False
        found, findings, before = PlanDraft(), tuple[TrialFinding, ...](), sharing.remembered
        if sizing is not None:
            sizing.plan(before.packs.on_trial)
            findings = sizing.findings
        # While grown jobs give GPUs back, pending jobs are about to get devices of their own.
        if sizing is None or not sizing.is_giving:
            errands = () if moves is None else moves.moving.errands
            found, packed = sharing.plan(self._nodes.switch_s, errands, self._newcomers)
            findings = (*findings, *packed)
            self._due_at = sharing.next_look_s
            self._wake_at(self._due_at)
        if sizing is not None:
            found = sizing.beside(found)
        if not found.changes and not findings:
            return moves is not None and self._propose(*moves.of_sharers(sharing.remembered.packs.on_trial))
        answer = self._answer(found.changes, findings)
        if answer is None:
            return False
        refused = frozenset(verdict.number for verdict in answer.verdicts if not verdict.approved)
        sharing.remembered = sharing.remembered.without(before, refused)
        return len(refused) < len(answer.verdicts)

    def _pack(self, packer: Packer) -> bool:
        """Propose co-locations, once no other change is due at this instant."""
        if self._changed:
            return False
        before, answer, next_look_s = packer.packing, None, packer.next_look_s
        if self._clock.now >= next_look_s:
            answer = self._answer(*packer.plan())
            next_look_s = packer.next_look_s
        if next_look_s < np.inf:
            self._wake_at(next_look_s)
        if answer is None:
            return False
        refused = frozenset(verdict.number for verdict in answer.verdicts if not verdict.approved)
        packer.packing = packer.packing.without(before, refused)
        return len(refused) < len(answer.verdicts)

    def _propose(self, found: PlanDraft, findings: tuple[TrialFinding, ...] = ()) -> bool:
        answer = self._answer(found.changes, findings)
        return answer is not None and any(verdict.approved for verdict in answer.verdicts)

    def _answer(self, changes: tuple[PlanChange, ...], findings: tuple[TrialFinding, ...] = ()) -> PlanAnswer | None:
        if not changes and not findings:
            return None
        answer = self._answer_in_parts(changes, findings)
        refused = {verdict.number for verdict in answer.verdicts if not verdict.approved}
        if self._is_paced:
            made = [change for change in changes if change.number not in refused]
            if any(is_stop(change, self._policy.resizes) for change in made):
                self._stopped_at = self._clock.now
        if self._resizing is not None:
            self._resizing = self._resizing.without(refused)
        if self.sizing is not None:
            self.sizing.refused(refused)
        return answer

    def _answer_in_parts(self, changes: tuple[PlanChange, ...], findings: tuple[TrialFinding, ...]) -> PlanAnswer:
        """Propose the plan in parts, as a live planner does, and return all verdicts."""
        promises = None if self.moves is None else self.moves.moving.promises
        verdicts: list[ChangeAnswer] = []
        version = 0
        for part in list(parts_of(changes)) or [()]:
            answer = self._send(commands.ProposePlan(part, promises=promises, findings=findings))
            assert isinstance(answer, PlanAnswer)
            verdicts.extend(answer.verdicts)
            version = answer.view_version
            promises, findings = None, ()
        return PlanAnswer(tuple(verdicts), version)

    def _pass(self, now: float, may_stop: bool, kept_out: ExcludedJobs = NONE_EXCLUDED) -> PlanDraft:
        tuning = self._policy.tuning
        is_packed = tuning is not None and tuning.place is not None and not self._policy.is_placement_named
        if tuning is not None and is_packed and self._options.round_s is not None and may_stop:
            from ganger_master.planner.synergy_round import plan_packed
            from ganger_master.policies.tunings.demand import NOTHING

            # A job that a round preempted may rank before others now, but a round preempts only once.
            may_stop, self._packed_at = self._packed_at != now, now
            kept_out = within_quotas(self._order, self.table, now, self._capacity, self._oracle, kept_out)
            packed = plan_packed(
                tuning,
                self._order,
                self.table,
                now,
                self._capacity,
                self._room.view,
                may_stop,
                self._oracle,
                kept_out,
                known=self._known or NOTHING,
            )
            if packed is not None:
                return packed
        if not may_stop:
            kept_out = kept_out.resting(self._displaced | self._newcomers)
        return plan_by(
            self._policy,
            self._order,
            self.table,
            now,
            self._capacity,
            self._room,
            may_stop,
            remaining_s=self._oracle,
            kept_out=kept_out,
            known=self._known,
            believed=nothing_believed if self.measured is None else self.measured.believed,
            resize_s=self._resize_s,
            resizing=self._resizing,
        )

    @property
    def _resize_s(self) -> float:
        costs = self._options.costs
        return 0.0 if self._options.ideal else costs.suspend_s + costs.start_s + costs.resume_s

    def _may_start(self) -> bool:
        """Return whether a plan at this instant may start jobs without preempting: in a round, only while the devices
        that its plan released become free."""
        step = self._options.round_s
        if step is None:
            return True
        since_s = rounds_until(self._clock.now, step) % 1.0 * step
        return 0.0 < since_s <= self._nodes.longest_stop_s + INSTANT_S

    @property
    def _newcomers(self) -> frozenset[int]:
        """Jobs submitted since the round began, which wait for the next one; empty without rounds."""
        step = self._options.round_s
        if step is None:
            return frozenset()
        began_s = round_start(math.floor(rounds_until(self._clock.now, step)), step)
        waiting = self.table.waiting_jobs(len(self.table))
        return frozenset([job.number for job in waiting if job.create_time > began_s])

    def _may_stop(self) -> bool:
        """Return whether a plan at this instant may preempt; in rounds, also schedule the plan of the next round."""
        now, step = self._clock.now, self._options.round_s
        if step is not None:
            rounds = rounds_until(now, step)
            whole = math.floor(rounds)
            self._wake_at(round_start(whole + 1, step))
            return rounds == whole
        if self._options.ideal:
            return self._is_news
        return now == self._stopped_at or now >= self._stopped_at + self._options.plan_every_s

    @property
    def _next_stop_s(self) -> float:
        """The next time at which a plan may preempt, after this instant."""
        return (self._clock.now if self._may_stop() else self._stopped_at) + self._options.plan_every_s

    def _wake_at(self, time: float) -> None:
        if time <= self._clock.now or time == np.inf:
            # `run` repeats the plan of this instant until it changes nothing.
            return
        if self._wakes_s <= self._clock.now or time < self._wakes_s:
            self._wakes_s = time
            self._clock.at(time, _nothing)

    def _sizing(self) -> Sizing | None:
        from ganger_master.simulator.sizes import Sizing

        if self._windows is None:
            return None
        most_idle_s = self._options.plan_every_s
        return Sizing(
            self._policy.placement,
            self.table,
            self._room,
            self._windows,
            self._clock,
            most_idle_s,
            self.estimates_changed,
        )

    def _moves(self) -> Moves:
        from ganger_master.simulator.moves import Moves

        assert self._windows is not None
        return Moves(
            self._policy.placement,
            self._order.is_strict,
            self._state,
            self.table,
            self._room,
            self._windows,
            self._clock,
            self._options.moves_per_hour,
        )

    def _sharing(self) -> Sharing:
        from ganger_master.simulator.sharing import Sharing

        assert self._windows is not None
        return Sharing(
            self._policy.placement,
            self.table,
            self._room,
            self._windows,
            self._clock,
            self._capacity.gpus,
            self._options.round_s,
            self._state,
            self._received_s,
        )

    def _packing(self) -> Packer:
        from ganger_master.simulator.packing import Packer

        assert self._windows is not None
        return Packer(
            self._policy.placement,
            self.table,
            self._room,
            self._windows,
            self._clock,
            self._capacity.gpus,
            self._options.plan_every_s,
        )

    def _measured(self, scaling: Scaling | None) -> ModelledEstimates | None:
        """Return the measurements of a policy that resizes jobs; None for all others."""
        if not self._policy.resizes:
            return None
        # The fits import SciPy, which takes long and which no other policy needs.
        from ganger_master.simulator.measurement_model import Losses, ModelledEstimates

        jobs, work, clock, options = self._jobs, self._work, self._clock, self._options
        return ModelledEstimates(
            Losses(jobs, options.seed),
            lambda job: work.done(job, clock.now),
            lambda job, gpus: 1.0 if scaling is None else scaling.rate(job, gpus),
            lambda job: float(jobs.submit_s[job]) + options.profile_s <= clock.now - EPOCH_S,
            self._capacity.gpus_per_node,
            options.seed,
        )

    def _is_profiled(self, numbers: Integers) -> Flags:
        known: Flags = self._jobs.submit_s[numbers - 1] + self._options.profile_s <= self._clock.now - EPOCH_S
        return known

    def _oracle(self, numbers: Integers) -> Floats:
        return self._work.remaining(numbers - 1, self._clock.now)


def _nothing() -> None:
    """Only let virtual time reach this instant."""
