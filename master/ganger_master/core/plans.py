"""Plans: changes that are approved one by one, or together where they have the same id."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from ganger.cluster.refusals import Reason, Refusal
from ganger.cluster.resources import Claim
from ganger.job_state import JobState

from ganger_master.core import answers, commands, events, gang_orders
from ganger_master.core.answers import RefusedError
from ganger_master.core.approval import CandidateApproval, judge, judge_change, level_of, requested_memory
from ganger_master.core.colocation import per_device
from ganger_master.core.commands import CHANGES_LIMIT, CLAIMS_LIMIT, KEPT_PLACES_LIMIT, LINE_LIMIT
from ganger_master.core.elastic import (
    check_resize,
    devices_of,
    judge_resize,
    rests_for_any_size,
    shape_for,
    shares_nothing,
    taken_by,
)
from ganger_master.core.events import Decision, Event
from ganger_master.core.gang_model import GangIntent, GangPhase
from ganger_master.core.job_model import JobRecord, SuspendLevel
from ganger_master.core.job_rules import shut_out
from ganger_master.core.placement_leases import offer_start
from ganger_master.core.plan_changes import (
    CoresChange,
    MoveChange,
    PlanChange,
    Purpose,
    ResizeChange,
    ResumeChange,
    SingleChange,
    SliceChange,
    StartChange,
    SuspendChange,
    claims_in,
)
from ganger_master.core.preconditions import check_move, check_suspend, unfinished
from ganger_master.core.state import State
from ganger_master.core.timeslice_admission import judge_rows

# The events of a change, or why it is refused; those of a group, and refusals by job.
_Judged: TypeAlias = tuple[Event, ...] | Refusal
_JudgedGroup: TypeAlias = tuple[list[Event], dict[int, Refusal]]


def propose_plan(state: State, command: commands.ProposePlan, now: float) -> Decision:
    """Judge a plan: verdicts in the order of its changes, and events in the order in which they were judged."""
    if problem := _too_long(command):
        raise RefusedError("PLAN_INVALID", problem)
    line = command.line
    numbers = [change.number for change in command.changes]
    if len(set(numbers)) != len(numbers):
        raise RefusedError("PLAN_INVALID", "one change per job")
    trial = _Trial(state, command.kept_places)
    happening: list[Event] = []
    verdicts: dict[int, answers.ChangeAnswer] = {}
    for group in _groups(command.changes):
        events_of_group, refusals = _judge_group(trial, group, command.proposer, now)
        happening.extend(events_of_group)
        for change in group:
            own = (refusals[change.number],) if change.number in refusals else ()
            verdicts[change.number] = answers.ChangeAnswer(change.number, not refusals, 0, own)
    ordered = tuple(verdicts[number] for number in numbers)
    kept_places = command.kept_places
    if kept_places is not None:
        kept_places = tuple([one for one in kept_places if not _is_shut_out(state, one, now)])
        happening.append(events.PlacesKept(now, command.proposer, kept_places))
    happening.extend(
        [events.ChangeJudged(now, command.proposer, one) for one in command.findings if one.number in state.jobs]
    )
    if command.curves:
        happening.append(events.CoresMeasured(now, command.proposer, command.curves))
    if line is not None:
        happening.append(events.JobsRanked(now, command.proposer, line))
    return tuple(happening), answers.PlanAnswer(ordered, state.view.version)


def kept_claims(state: State, places: Sequence[commands.KeepPlace]) -> dict[int, tuple[Claim, ...]]:
    """Return the places that a planner keeps, by the number of the job; those of waiting jobs count."""
    known = [(state.jobs.get(one.number), one.claims) for one in places]
    return {job.number: claims for job, claims in known if job is not None and job.is_waiting}


def _is_shut_out(state: State, place: commands.KeepPlace, now: float) -> bool:
    """Return whether a place is for a waiting job that may not start there: it is kept for none."""
    job = state.jobs.get(place.number)
    nodes = {claim.node for claim in place.claims}
    return job is not None and job.is_waiting and bool(shut_out(state, job, nodes, now))


def _too_long(plan: commands.ProposePlan) -> str:
    kept_places, line = plan.kept_places or (), plan.line.numbers if plan.line is not None else ()
    claims = sum([len(claims_in(change)) for change in plan.changes])
    kept = sum([len(place.claims) for place in kept_places])
    others = max(len(kept_places), len(plan.findings), len(plan.curves))
    later = "propose the others in the next one"
    exceeded = [
        (len(plan.changes), CHANGES_LIMIT, f"changes, at most {CHANGES_LIMIT} in a plan: {later}"),
        (claims, CLAIMS_LIMIT, f"claims in the changes, at most {CLAIMS_LIMIT} in a plan: {later}"),
        (len(line), LINE_LIMIT, f"jobs in the line, at most {LINE_LIMIT}"),
        (others, KEPT_PLACES_LIMIT, f"places kept, findings or curves, at most {KEPT_PLACES_LIMIT} of each"),
        (kept, CLAIMS_LIMIT, f"claims in the places kept, at most {CLAIMS_LIMIT}"),
    ]
    return next((f"{count} {text}" for count, most, text in exceeded if count > most), "")


def _groups(changes: Sequence[PlanChange]) -> list[list[PlanChange]]:
    """Return the changes in groups that are judged as one: those with the same `together`, at the first one's place."""
    groups: dict[tuple[bool, int], list[PlanChange]] = {}
    for change in changes:
        key = (True, change.together) if change.together else (False, change.number)
        groups.setdefault(key, []).append(change)
    return list(groups.values())


def _judge_group(trial: _Trial, group: Sequence[PlanChange], proposer: str, now: float) -> _JudgedGroup:
    """Return the events of changes with one id, or a refusal for each; the trial is unchanged if one is refused."""
    happening: list[Event] = []
    refused: dict[int, Refusal] = {}
    # A single change has changed nothing when it is refused.
    mark = trial.mark() if len(group) > 1 else None
    singles = [change for change in group if not isinstance(change, SliceChange)]
    if len(singles) < len(group):
        happening, refused = _judge_rows(trial, group, proposer, now)
    else:
        for change in singles:
            judged = trial.disturbed(change) or _judge_change(trial.state, change, proposer, now)
            if isinstance(judged, Refusal):
                refused[change.number] = judged
                break
            happening.extend(judged)
            for event in judged:
                trial.happen(event)
    if not refused:
        return happening, {}
    if mark is not None:
        trial.undo(mark)
    blamed = f"jobs/{next(iter(refused))}"
    for one in group:
        if one.number not in refused:
            detail = f"it is to happen together with a change of {blamed}, which is refused"
            refused[one.number] = Refusal(Reason.STALE_REVISION, detail=detail, job=f"jobs/{one.number}")
    return [], refused


def _judge_rows(trial: _Trial, group: Sequence[PlanChange], proposer: str, now: float) -> _JudgedGroup:
    for change in group:
        if (disturbed := trial.disturbed(change)) is not None:
            return [], {change.number: disturbed}
    judged = judge_rows(trial.state, group, proposer, now)
    if not isinstance(judged, events.RowsChanged):
        number, refusal = judged
        return [], {number: refusal}
    trial.happen(judged)
    return [judged], {}


class _Trial:
    """The state as it will be once the changes approved so far have happened, as far as the next ones can see it: what
    is free, what is kept, and the users' shares. The state itself until that differs, then a shallow copy: only for
    judging. `kept_places`: the places that the plan keeps, which replace those of the last one; None: these stand."""

    def __init__(self, state: State, kept_places: Sequence[commands.KeepPlace] | None) -> None:
        self._state = self._real = state
        # Places of jobs that the plan starts: they are taken, so they are kept no longer.
        self._released: list[tuple[int, tuple[Claim, ...]]] = []
        if kept_places is not None and (kept_places or state.queue.kept_by_plan):
            self._keep(kept_claims(state, kept_places))
        self._given_and_taken: list[tuple[tuple[Claim, ...], tuple[Claim, ...]]] = []
        # The part of that which shares devices with other gangs.
        self._joined: list[Claim] = []
        self._limits = [state.limits]
        # Events that are not applied yet: to copy a large view costs as much as many verdicts.
        self._unapplied: list[Event] = []
        # Nodes whose slice matrix a change of this plan replaces.
        self._rows_on: set[str] = set()
        # Claims of jobs that then have two worlds.
        self._resized: list[Claim] = []

    @property
    def state(self) -> State:
        self._look()
        return self._state

    def mark(self) -> tuple[int, int, int, int]:
        self._look()
        return len(self._given_and_taken), len(self._limits), len(self._joined), len(self._released)

    def happen(self, event: Event) -> None:
        # A stop takes nothing, and what it gives back counts only once that is free.
        if type(event) is not events.JobSuspended:
            self._unapplied.append(event)

    def _look(self) -> None:
        if self._unapplied:
            unapplied, self._unapplied = self._unapplied, []
            for event in unapplied:
                self._show(event)

    def _show(self, event: Event) -> None:
        given, taken = _exchange(self._state, event)
        if taken:
            self._differ()
            self._given_and_taken.append((given, taken))
            if type(event) is not events.CoresChanged:
                self._joined += [claim for claim in taken if claim.shared_mask]
            self._exchange(given, taken)
        match event:
            case events.GangApproved(number=number, claims=claims) | events.StartOffered(number=number, claims=claims):
                self._use_share(self._state.jobs[number], devices_of(claims))
                if kept := self._state.queue.kept_by_plan.get(number):
                    self._released.append((number, kept))
                    self._keep({other: one for other, one in self._state.queue.kept_by_plan.items() if other != number})
            case events.ResizeBegun(number=number, claims=claims):
                job = self._state.jobs[number]
                self._resized.extend([*self._state.gangs[job.epoch].claims, *claims])
                self._use_share(job, max(0, devices_of(claims) - job.gpus))
            case events.RowsChanged(starts=starts, takes=takes):
                self._rows_on.update([claim.node for claim in takes])
                for number, (claims, _) in starts.items():
                    self._use_share(self._state.jobs[number], devices_of(claims))

    def _differ(self) -> None:
        if self._state.view is self._real.view:
            self._state = copy.copy(self._state)
            self._state.view = self._real.view.copy()

    def _keep(self, places: dict[int, tuple[Claim, ...]]) -> None:
        if self._state is self._real:
            self._state = copy.copy(self._real)
        self._state.queue = copy.copy(self._real.queue)
        self._state.queue.kept_by_plan = places

    def undo(self, mark: tuple[int, int, int, int]) -> None:
        self._unapplied.clear()
        if len(self._released) > mark[3]:
            self._keep({**self._state.queue.kept_by_plan, **dict(self._released[mark[3] :])})
            del self._released[mark[3] :]
        for given, taken in reversed(self._given_and_taken[mark[0] :]):
            self._exchange(taken, given)
        del self._given_and_taken[mark[0] :], self._limits[mark[1] :], self._joined[mark[2] :]
        if self._state is not self._real:
            self._state.limits = self._limits[-1]

    def disturbed(self, change: PlanChange) -> Refusal | None:
        """Return a refusal if an earlier change of the plan shares the devices: this one is to be judged after it."""
        self._look()
        claims = claims_in(change)
        if self._rows_on:
            job = self._state.jobs.get(change.number)
            gang = self._state.gangs.get(job.epoch) if job is not None else None
            for claim in (*claims, *(gang.claims if gang is not None else ())):
                if claim.node in self._rows_on:
                    detail = "another change of this plan time-slices gangs there"
                    return Refusal(Reason.STALE_REVISION, job=f"jobs/{change.number}", node=claim.node, detail=detail)
        for claim in claims if self._resized else ():
            if any(claim.node == one.node and claim.shared_mask & one.device_mask for one in self._resized):
                detail = "another change of this plan resizes a job that is there"
                return Refusal(Reason.STALE_REVISION, job=f"jobs/{change.number}", node=claim.node, detail=detail)
        if not self._joined:
            return None
        job = self._state.jobs.get(change.number)
        gang = self._state.gangs.get(job.epoch) if job is not None else None
        own = (*claims, *(gang.claims if gang is not None else ()))
        for claim in self._joined:
            if any(claim.node == other.node and claim.device_mask & other.device_mask for other in own):
                detail = "another change of this plan shares its devices"
                return Refusal(Reason.STALE_REVISION, job=f"jobs/{change.number}", node=claim.node, detail=detail)
        return None

    def _exchange(self, given: Sequence[Claim], taken: Sequence[Claim]) -> None:
        for claim in given:
            self._state.view.give(claim)
        for claim in taken:
            self._state.view.take(claim)

    def _use_share(self, job: JobRecord, devices: int) -> None:
        if self._state.limits:
            self._differ()
            self._limits.append(self._state.limits.less(self._state.owners(job), devices))
            self._state.limits = self._limits[-1]


def _exchange(state: State, event: Event) -> tuple[tuple[Claim, ...], tuple[Claim, ...]]:
    """Return the claims that an event gives back, and those that it takes at once."""
    match event:
        case events.GangApproved(number=number, claims=claims) | events.StartOffered(number=number, claims=claims):
            parked = state.gangs.get(state.jobs[number].epoch)
            if parked is None or not gang_orders.same_place(parked.claims, claims):
                return (), claims
            return parked.held, claims
        case events.MoveBegun(claims=claims):
            return (), claims
        case events.ResizeBegun(number=number, claims=claims):
            return (), taken_by(state.gangs[state.jobs[number].epoch], claims)
        case events.CoresChanged(number=number, claims=claims):
            return state.gangs[state.jobs[number].epoch].claims, claims
        case events.JobResumed(number=number):
            gang = state.gangs[state.jobs[number].epoch]
            if not gang_orders.has_given_up(gang):
                # It has given nothing up; it may hold its share of a time-slice group.
                return (), ()
            return gang.held, gang.claims
        case events.RowsChanged(takes=takes):
            return (), takes
        case _:
            return (), ()


def _judge_change(state: State, change: SingleChange, proposer: str, now: float) -> _Judged:
    try:
        return _judged(state, unfinished(state, change.number), change, proposer, now)
    except RefusedError as error:
        unavailable = error.refused.reason == "LEVEL_UNAVAILABLE"
        reason = Reason.LEVEL_UNAVAILABLE if unavailable else Reason.WRONG_STATE
        return Refusal(reason, detail=error.refused.message, job=f"jobs/{change.number}")


def _judged(state: State, job: JobRecord, change: SingleChange, proposer: str, now: float) -> _Judged:
    if change.revision != job.revision:
        return Refusal(Reason.STALE_REVISION, {"revision": job.revision, "given": change.revision}, job=job.name)
    if not job.spec.preemptible and isinstance(change, MoveChange | SuspendChange | ResizeChange):
        return Refusal(Reason.WRONG_STATE, detail="the job is not to be suspended or moved by plans", job=job.name)
    if not job.preemptible and isinstance(change, SuspendChange):
        detail = f"plans suspend no job of partition {job.partition.name!r}"
        return Refusal(Reason.WRONG_STATE, detail=detail, job=job.name)
    if isinstance(change, MoveChange | SuspendChange | ResizeChange):
        refusal = _in_vain(state, job, change.purpose, now)
        if refusal is not None:
            return refusal
    return _JUDGES[type(change)](state, job, change, proposer, now)


def _in_vain(state: State, job: JobRecord, purpose: Purpose, now: float) -> Refusal | None:
    """Return why the job that a change makes room for may not start there; None if it may, or if there is none.

    There: on the place that the planner keeps for it, else on any node that the changed job is on."""
    helped, gang = state.jobs.get(purpose.job), state.gangs.get(job.epoch)
    if helped is None or gang is None or not helped.is_waiting:
        return None
    kept = state.queue.kept_by_plan.get(helped.number)
    nodes = {claim.node for claim in kept} if kept else set(gang.nodes)
    refusals = shut_out(state, helped, nodes, now)
    closed = {refusal.node for refusal in refusals}
    is_in_vain = bool(closed) and (bool(kept) or "" in closed or closed == nodes)
    return refusals[0] if is_in_vain else None


def _judge_start(state: State, job: JobRecord, change: StartChange, proposer: str, now: float) -> _Judged:
    if not job.is_waiting or not change.claims:
        return Refusal(Reason.WRONG_STATE, job=job.name)
    shape = shape_for(job, change.claims, rests_for_any_size(state, job))
    if isinstance(shape, Refusal):
        return shape
    parked = state.gangs.get(job.epoch)
    if parked is not None and parked.devices != shape.gpus and any(claim.shared_mask for claim in change.claims):
        return shares_nothing(job)
    # A request for cores and memory is not binding where a plan tunes them.
    verdict = judge(state, job, (change.claims,), 0, now, retune=True, shape=shape)
    if not isinstance(verdict, CandidateApproval):
        return verdict.refusals[0]
    # No lease claims devices of other gangs, nor several changes at once.
    is_alone = not change.together and not any(claim.shared_mask for claim in verdict.claims)
    if is_alone and state.is_planned:
        return offer_start(state, job, tuple(verdict.claims), proposer, now)
    return (events.GangApproved(now, proposer, job.number, tuple(verdict.claims), verdict.level),)


def _judge_move(state: State, job: JobRecord, change: MoveChange, proposer: str, now: float) -> _Judged:
    try:
        claims = check_move(state, job, (), change.claims)
    except RefusedError as error:
        if error.refused.reason == "MOVE_REFUSED" and (
            refusals := judge_change(state, job, change.claims, retune=True)
        ):
            return refusals[0]
        raise
    return (events.MoveBegun(now, proposer, job.number, claims, level_of(state, claims), change.purpose),)


def _judge_resize(state: State, job: JobRecord, change: ResizeChange, proposer: str, now: float) -> _Judged:
    gang = check_resize(state, job, devices_of(change.claims))
    refusals = judge_resize(state, job, gang, change.claims)
    if refusals:
        return refusals[0]
    level = level_of(state, change.claims)
    return (events.ResizeBegun(now, proposer, job.number, change.claims, level, change.reason, change.purpose),)


def _judge_cores(state: State, job: JobRecord, change: CoresChange, proposer: str, now: float) -> _Judged:
    gang = state.gangs.get(job.epoch)
    if gang is None or gang.intent is not GangIntent.RUN or job.next_epoch or job.ending is not None:
        return Refusal(Reason.WRONG_STATE, job=job.name)
    if gang.epoch in state.gangs.set_of:
        return Refusal(Reason.WRONG_STATE, job=job.name, detail="it is time-sliced, and its cores are, too")
    if any(piece.gone for piece in gang.pieces):
        return Refusal(Reason.WRONG_STATE, job=job.name, detail="a part of it has ended")
    held = [(c.node, c.device_mask, c.arena_bytes, c.tasks, c.shared_mask, c.bandwidth) for c in gang.claims]
    if [(c.node, c.device_mask, c.arena_bytes, c.tasks, c.shared_mask, c.bandwidth) for c in change.claims] != held:
        detail = "only cores and memory may differ from what is held"
        return Refusal(Reason.CLAIM_MISMATCH, job=job.name, detail=detail)
    for old, new in zip(gang.claims, change.claims, strict=True):
        least = min(old.memory_bytes, requested_memory(state, job, old))
        if new.memory_bytes < least:
            figures = {"needed_bytes": least, "claimed_bytes": new.memory_bytes}
            detail = "it may use all the memory that it requests"
            return Refusal(Reason.CLAIM_MISMATCH, figures, job=job.name, node=old.node, detail=detail)
    refusals = judge_change(state, job, change.claims, holding=gang.claims, retune=True, arena=per_device(gang))
    if refusals:
        return refusals[0]
    return (events.CoresChanged(now, proposer, job.number, change.claims, False, change.reason),)


def _judge_suspend(state: State, job: JobRecord, change: SuspendChange, proposer: str, now: float) -> _Judged:
    gang = state.gangs.get(job.epoch)
    if job.state is not JobState.HOLDING or gang is None or job.ending is not None:
        return Refusal(Reason.WRONG_STATE, job=job.name)
    level = check_suspend(state, job, change.level)
    if level is SuspendLevel.NONE or (gang.intent is GangIntent.PARK and gang.park_level == level):
        return ()
    return (events.JobSuspended(now, proposer, job.number, level, by_plan=True, purpose=change.purpose),)


def _judge_resume(state: State, job: JobRecord, change: ResumeChange, proposer: str, now: float) -> _Judged:
    gang = state.gangs.get(job.epoch)
    if job.state is not JobState.HOLDING or gang is None or gang.intent is not GangIntent.PARK or job.next_epoch:
        return Refusal(Reason.WRONG_STATE, job=job.name)
    if gang.park_level is SuspendLevel.CHECKPOINT or job.ending is not None:
        return Refusal(Reason.WRONG_STATE, job=job.name, detail="its checkpoint is being written")
    if gang.phase is GangPhase.PARKED or gang_orders.has_given_up(gang):
        held = gang.held
        arena = per_device(gang)
        refusals = judge_change(state, job, gang.claims, held, retune=True, arena=arena, agreed_only=True)
        if refusals:
            return refusals[0]
    return (events.JobResumed(now, proposer, job.number, change.purpose),)


_JUDGES: Final[dict[type, Callable[[State, JobRecord, Any, str, float], _Judged]]] = {
    StartChange: _judge_start,
    MoveChange: _judge_move,
    ResizeChange: _judge_resize,
    CoresChange: _judge_cores,
    SuspendChange: _judge_suspend,
    ResumeChange: _judge_resume,
}
