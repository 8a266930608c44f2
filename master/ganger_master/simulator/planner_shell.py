"""The simulated planner: when it makes a plan and which, what it proposes, and what it knows."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from ganger.cluster.capacity_index import CapacityIndex

from ganger_master.core import commands
from ganger_master.core.answers import ChangeAnswer, PlanAnswer
from ganger_master.core.change_reason import TrialFinding
from ganger_master.core.commands import Command
from ganger_master.core.model import JobRecord, JobState
from ganger_master.core.state import State
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.loop import is_stop
from ganger_master.planner.order_stage import within_quotas
from ganger_master.planner.passes import plan_by, terms_of
from ganger_master.planner.plan import PlanDraft, may_start, started
from ganger_master.planner.refusal_backoff import NONE_EXCLUDED, ExcludedJobs
from ganger_master.planner_process.shell import parts_of
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
    """What the last plan said: whom it started and stopped, which are its `jobs`, and who follows once those have gone,
    first job first."""

    at: float
    started: frozenset[int] = frozenset()
    stopped: frozenset[int] = frozenset()
    follow: tuple[int, ...] = ()
    jobs: frozenset[int] = frozenset()


NOTHING_PLANNED = _Planned(-np.inf)


class Planning:
    """`send` gives the core a command. `rates`: None where every job runs at its recorded pace; `scaling`: None where
    every job has the size of its trace; `windows`: None where no policy asks what daemons measure. `work` is hidden but
    from oracles, and from what is reported of it."""

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
    ) -> None:
        self._jobs, self._policy, self._options = jobs, policy, options
        self._clock, self._state, self._nodes, self._work = clock, state, nodes, work
        self._windows, self._send = windows, send
        self._order = policy.order if options.ideal else policy.aging_order
        if options.round_s is not None:
            # A round begins with an empty cluster.
            self._order = replace(self._order, preempts=True)
        self._places = policy.places is Places.PLANNER
        # What gangs have is not changed while they run.
        self._is_plain = policy.tuning is None and policy.tetris is None and not policy.resizes
        # Nor anything else: plans are for those who wait.
        self._only_for_waiting = self._is_plain and not (policy.moves or policy.grows or policy.shares)
        # Any free GPUs serve, nobody is stopped, and time alone changes nothing.
        does_more = self._order.preempts or self._order.learns or policy.shares
        # Whose user has used its quota up finds no place, whatever is free.
        self._is_bounded = bool(state.settings.quota_devices)
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
        # What is under way of the sizes that a policy which weighs them has decided.
        self._resizing: Resizing | None = None
        # None: nobody grows onto idle GPUs, is moved, or shares GPUs.
        self.sizing = self._sizing() if scaling is not None and policy.grows else None
        self.moves = self._moves() if policy.moves else None
        self.sharing = self._sharing() if policy.shares else None
        self._packer = self._packing() if policy.packs else None
        # Whom the last plan that stopped somebody stopped for others: they rest until the next one may.
        self._displaced: frozenset[int] = frozenset()
        # Jobs came, started, stopped or ended since the last plan; those that the table does not show as they are now.
        self._is_news = False
        self._told: dict[int, None] = {}
        # If at its instant nothing has happened since but what it said, and no order ranks otherwise for that.
        self._planned = NOTHING_PLANNED
        self._back_at = self._stopped_at = self._packed_at = -np.inf
        # When the next plan is due without news; an earlier one, for another reason, does not end that.
        self._due_at = np.inf
        # Plans are made as a live planner makes them (`planner.loop`).
        self._is_paced = not options.ideal and options.round_s is None

    def told(self, numbers: Collection[int]) -> None:
        """These jobs came, changed or ended."""
        if not numbers or not self._places:
            return
        self._is_news = True
        self._told.update(dict.fromkeys(numbers))
        if not self._planned.jobs.issuperset(numbers):
            self._planned = NOTHING_PLANNED

    def learn(self) -> None:
        """There is more to go by than before."""
        self._is_news = True

    def plan(self) -> bool:
        """Proposes a plan if it is time for one; whether it changed anything."""
        if self._told:
            self._follow()
        if not len(self.table):
            return False
        self._come_back(self._due_at)
        if self.sharing is not None:
            return self._share(self.sharing)
        return self._plan() or (self._packer is not None and self._pack(self._packer))

    def _plan(self) -> bool:
        now = self._clock.now
        planned = self._carried_out(now)
        if planned.started and not planned.follow:
            # All who were chosen have a place now, and would be chosen again.
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
        looks = may_stop or sizing is not None or (moves is not None and not moves.moves_no_job())
        if self._starts_nobody() if self._only_starts else not looks and self._is_vain():
            return False
        if sizing is not None:
            sizing.plan(())
            # Nobody need be stopped for GPUs that are on their way, and who finds room need not wait for a plan that
            # stops others.
            may_stop = may_stop and not sizing.is_giving
        findings: tuple[TrialFinding, ...] = ()
        if moves is not None:
            found, findings = moves.around(lambda kept_out, may: self._pass(now, may, kept_out), may_stop, is_news)
        else:
            found = self._known_pass(now, planned) or self._pass(now, may_stop)
        self._displaced = found.displaced or self._displaced
        self._due_at = self._next_due_s(found)
        self._come_back(self._due_at)
        if sizing is not None:
            found, findings = sizing.beside(found), (*findings, *sizing.findings)
        self._resizing = found.resizing or self._resizing
        is_carried_out = self._propose(found, findings)
        self._planned = self._said(found, now)
        return is_carried_out

    def _next_due_s(self, found: PlanDraft) -> float:
        """When, after this pass, the next one is due whatever happens; infinite: not before something does."""
        due_s = np.inf
        if found.next_change_s < np.inf and self._options.round_s is None:
            # Sizes are weighed anew as often as somebody may be stopped.
            earliest = self._next_stop_s if self._policy.resizes else self._stopped_at + self._options.plan_every_s
            due_s = max(found.next_change_s, earliest)
        if self._is_paced and (found.waits or found.leaves_waiting):
            due_s = min(due_s, self._next_stop_s)
        return due_s

    def _follow(self) -> None:
        """The table shows everybody as they are now."""
        state, table = self._state, self.table
        for number in self._told:
            job = state.jobs.get(number)
            if job is not None:
                table.put(job, state.gangs.get(job.epoch))
            elif table.get(number) is not None:
                # So many ended at once that it is not kept.
                table.forget(number)
        self._told.clear()

    def _said(self, found: PlanDraft, now: float) -> _Planned:
        """What a plan said, where the next one of its instant will choose the same jobs."""
        is_steady = self._order.is_steady and self._order.next_change is None
        if not is_steady or not self._is_plain or self._policy.moves or self.sizing is not None or self._is_bounded:
            return NOTHING_PLANNED
        if found.waits and not (found.follow and not found.unplaced and self._policy.placement.by_counts):
            return NOTHING_PLANNED
        started = frozenset([change.number for change in found.changes if change.kind == "START"])
        stopped = frozenset([change.number for change in found.changes if change.kind == "SUSPEND"])
        return _Planned(now, started, stopped, found.follow, started | stopped)

    def _carried_out(self, now: float) -> _Planned:
        """What the last plan of this instant said, if all of it has come about."""
        planned, jobs = self._planned, self._state.jobs
        is_done = planned.at == now and all(jobs[number].state is JobState.HOLDING for number in planned.started)
        if is_done and all(number not in jobs or not jobs[number].epoch for number in planned.stopped):
            return planned
        return NOTHING_PLANNED

    def _known_pass(self, now: float, planned: _Planned) -> PlanDraft | None:
        """The pass that would be made, where it is known without ranking anybody who is chosen and finds room."""
        jobs: Sequence[JobRecord] = [self._state.jobs[number] for number in planned.follow]
        if not jobs and self._only_starts and self._order.by_arrival and self.table.has_waiting:
            jobs = self._first_of_queue()
        if not jobs:
            return None
        terms = terms_of(self._policy, self.table)
        return started(jobs, self._policy.placement, self.table, now, self._room, terms=terms)

    def _first_of_queue(self) -> list[JobRecord]:
        """Whom an order by arrival starts on the GPUs that are free."""
        state, found = self._state, []
        free, least = state.free_devices, self.table.least_waiting_gpus
        for number in state.waiting:
            if free < least:
                break
            job = state.jobs[number]
            if job.gpus <= free:
                found.append(job)
                free -= job.gpus
            elif self._order.is_strict:
                break
        return found

    def _starts_nobody(self) -> bool:
        """Whether a plan that can do no more than start somebody finds too few GPUs free, wherever they are."""
        state = self._state
        if not (self._order.is_strict and self._order.by_arrival):
            return not self.table.has_waiting or self.table.least_waiting_gpus > state.free_devices
        first = next(iter(state.waiting), None)
        return first is None or state.jobs[first].gpus > state.free_devices

    def _is_vain(self) -> bool:
        """Whether a plan that may stop nobody would start nobody either, and need not say when the next one is due."""
        comes_back = self._due_at == self._stopped_at + self._options.plan_every_s > self._clock.now
        if not comes_back or not self._is_plain or not self.table.has_waiting:
            return False
        terms = terms_of(self._policy, self.table)
        if may_start(self._policy.placement, self.table, self._room, terms, self._displaced):
            return False
        # What is known of jobs depends on when one looks.
        self.table.look(self._clock.now, self._order)
        return True

    def _share(self, sharing: Sharing) -> bool:
        """The same where jobs share GPUs: on news, and at the end of every quantum."""
        now, sizing, moves = self._clock.now, self.sizing, self.moves
        if self._options.round_s is not None and not (self._may_stop() or self._may_start()):
            return False
        if not self._is_news and now < sharing.switches_at:
            return False
        self._is_news = False
        found, findings, before = PlanDraft(), tuple[TrialFinding, ...](), sharing.remembered
        if sizing is not None:
            sizing.plan({*before.turns.sharers, *before.packs.on_trial})
            findings = sizing.findings
        # Else who waits is about to have devices of its own.
        if sizing is None or not sizing.is_giving:
            errands = () if moves is None else moves.moving.errands
            found, packed = sharing.plan(self._nodes.switch_s, errands, self._newcomers)
            findings = (*findings, *packed)
            self._due_at = sharing.switches_at
            self._come_back(self._due_at)
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
        """Once there is nothing else to do at an instant."""
        if self._told:
            return False
        before, answer, next_look_s = packer.packing, None, packer.next_look_s
        if self._clock.now >= next_look_s:
            answer = self._answer(*packer.plan())
            next_look_s = packer.next_look_s
        if next_look_s < np.inf:
            self._come_back(next_look_s)
        if answer is None:
            return False
        refused = frozenset(verdict.number for verdict in answer.verdicts if not verdict.approved)
        packer.packing = packer.packing.without(before, refused)
        return len(refused) < len(answer.verdicts)

    def _propose(self, found: PlanDraft, findings: tuple[TrialFinding, ...] = ()) -> bool:
        answer = self._answer(found.changes, findings)
        return answer is not None and any(verdict.approved for verdict in answer.verdicts)

    def _answer(
        self, changes: tuple[commands.Change, ...], findings: tuple[TrialFinding, ...] = ()
    ) -> PlanAnswer | None:
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

    def _answer_in_parts(self, changes: tuple[commands.Change, ...], findings: tuple[TrialFinding, ...]) -> PlanAnswer:
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

            # Whoever was stopped may go before others then, but a round stops nobody twice.
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
        """Whether a plan at this instant may start somebody though it may stop nobody: within a round only those for
        whom it made way."""
        step = self._options.round_s
        if step is None:
            return True
        since_s = rounds_until(self._clock.now, step) % 1.0 * step
        return 0.0 < since_s <= self._nodes.longest_stop_s + INSTANT_S

    @property
    def _newcomers(self) -> frozenset[int]:
        """Who has come since the round began, and waits for the next one; nobody without rounds."""
        step = self._options.round_s
        if step is None:
            return frozenset()
        began_s = round_start(math.floor(rounds_until(self._clock.now, step)), step)
        waiting = self.table.waiting_jobs(len(self.table))
        return frozenset([job.number for job in waiting if job.create_time > began_s])

    def _may_stop(self) -> bool:
        """Whether a plan at this instant may stop who runs; in rounds, sees to it that the next one is made in time."""
        now, step = self._clock.now, self._options.round_s
        if step is not None:
            rounds = rounds_until(now, step)
            whole = math.floor(rounds)
            self._come_back(round_start(whole + 1, step))
            return rounds == whole
        if self._options.ideal:
            return self._is_news
        return now == self._stopped_at or now >= self._stopped_at + self._options.plan_every_s

    @property
    def _next_stop_s(self) -> float:
        """When the next plan may stop somebody, if this one is now; the one after it, if this one may."""
        return (self._clock.now if self._may_stop() else self._stopped_at) + self._options.plan_every_s

    def _come_back(self, time: float) -> None:
        if time <= self._clock.now or time == np.inf:
            # This instant is planned for until nothing changes any more.
            return
        if self._back_at <= self._clock.now or time < self._back_at:
            self._back_at = time
            self._clock.at(time, _nothing)

    def _sizing(self) -> Sizing | None:
        from ganger_master.simulator.sizes import Sizing

        if self._windows is None:
            return None
        most_idle_s = self._options.plan_every_s
        return Sizing(
            self._policy.placement, self.table, self._room, self._windows, self._clock, most_idle_s, self.learn
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
        """What a policy that resizes jobs measures; None for all others."""
        if not self._policy.resizes:
            return None
        # Fits need SciPy, for which no other policy's run is to wait.
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
    """Time passes."""
