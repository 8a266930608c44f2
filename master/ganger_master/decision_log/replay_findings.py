"""What is found in a replay: the history of one job, and what another policy would have decided.

Each decision of another policy is taken on the recorded state and discarded, so that recorded reports and requests stay
meaningful. The consequences of such decisions cannot be derived from a recording.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace as replace_fields

from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.refusals import Refusal
from ganger.cluster.resources import Claim
from ganger.job_state import JobState
from ganger.text import counted
from msgspec import Struct
from msgspec.structs import replace

from ganger_master.core import commands
from ganger_master.core.answers import Answer, Approved, ChangeAnswer, JobAnswer, PlanAnswer, Refused, Rejected
from ganger_master.core.commands import Command
from ganger_master.core.decide import decide
from ganger_master.core.explain import explain
from ganger_master.core.job_model import JobRecord
from ganger_master.core.plan_changes import StartChange, SuspendChange, claims_in
from ganger_master.core.queue import GrantedLease
from ganger_master.core.state import State
from ganger_master.decision_log.rerun import Begun, Broke, Decided, DecisionEntry, Drawn, Ended, RecordedCommand
from ganger_master.planner.context import context_of
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.order_stage import plan_by
from ganger_master.policies import ResizeByOptimus, live_policy_named
from ganger_master.policies.fairness import TeamUse


class VerdictReason(Struct, frozen=True):
    """One reason of a verdict. `message`: the reason with its figures as text."""

    reason: str
    message: str
    figures: dict[str, int] = {}
    node: str = ""
    job: str = ""


class Held(Struct, frozen=True):
    """GPUs that another job holds on a node."""

    job: str
    gpus: int


class Free(Struct, frozen=True):
    """Free resources of a node at one instant."""

    node: str
    takes_gangs: bool
    gpus_free: tuple[int, ...]
    gpus: int
    free_millicores: int
    free_memory_bytes: int
    held: tuple[Held, ...] = ()


class RequestedPlace(Struct, frozen=True):
    """The requested resources of a gang on one node."""

    node: str
    gpus: tuple[int, ...]
    millicores: int
    memory_bytes: int


class Moment(Struct, frozen=True):
    """One thing that happened to the job. `line`: of the recording; `what`: lower_snake; `text`: the rest in words.

    `rank`: in the queue, from 1; zero where it has none. `verdict`: "approved", "refused", "passed" or nothing.
    `candidates`: places asked for, best first. `free`: on the nodes of these, before the decision."""

    line: int
    time: float
    what: str
    text: str = ""
    verdict: str = ""
    rank: int = 0
    turn: int = 0
    why: tuple[VerdictReason, ...] = ()
    candidates: tuple[tuple[RequestedPlace, ...], ...] = ()
    free: tuple[Free, ...] = ()


class RecordedHistory:
    """Collects the history of one job: call `record` with every entry of the replay and its state."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.moments: list[Moment] = []
        self._before: Moment | None = None
        # The last recorded rank in the planner's queue.
        self._last_rank = 0

    def record(self, entry: DecisionEntry, state: State | None) -> None:
        if state is None:
            return
        match entry:
            case Begun(number, time, cause):
                self._add(self._situation(number, time, "state", cause, state))
            case RecordedCommand(number, time, command):
                self._before = self._asked(number, time, command, state)
            case Decided(_, _, command, answer, _):
                self._decided(command, answer)
            case Drawn(number, time, effects, turns):
                for row in effects.history:
                    if row.subject == f"jobs/{self.number}":
                        figures = " ".join(f"{name}={value}" for name, value in sorted(row.figures.items()))
                        text = ", ".join(part for part in (row.message, figures, f"by {row.cause.rstrip(':')}") if part)
                        self._add(Moment(number, row.time, row.kind, text))
                for turn in turns:
                    if turn.number == self.number:
                        self._add(Moment(number, time, "turn", _turn_text(turn), rank=turn.rank, turn=turn.turn))
            case Broke(number, time, error, _):
                self._add(Moment(number, time, "core_failed", error))
            case Ended(number, time, reason):
                self._add(self._situation(number, time, "end", reason, state))
            case _:
                return

    def situation(self, line: int, time: float, text: str, state: State) -> None:
        """Record the situation of the job where the replay stops."""
        self._add(self._situation(line, time, "end", text, state))

    def _add(self, moment: Moment | None) -> None:
        if moment is not None:
            self.moments.append(moment)

    def _situation(self, line: int, time: float, what: str, cause: str, state: State) -> Moment | None:
        job = state.jobs.get(self.number)
        if job is None:
            # It has ended, and the core has dropped it.
            return Moment(line, time, what, f"{cause}; it is gone") if self.moments else None
        found = explain(state, self.number, time)
        rank = state.queue_rank(self.number)
        gang = state.gangs.get(job.epoch)
        places = (_places(gang.claims),) if gang is not None and job.state is JobState.HOLDING else ()
        text = f"{cause}; {_stands(state, job, time)}"
        return Moment(line, time, what, text, rank=rank, why=_whys(found.blockers), candidates=places)

    def _asked(self, line: int, time: float, command: Command, state: State) -> Moment | None:
        number, rank = self.number, state.queue_rank(self.number)
        match command:
            case commands.RequestGang(number=requested) if requested == number:
                scheduler = command.scheduler or "the default scheduler"
                turn = state.leases.get(command.turn)
                late = "" if turn is not None or not command.turn else ", which it no longer has"
                how = f"in turn {command.turn}{late}" if command.turn else "out of turn"
                text = f"{scheduler} {'asks' if command.candidates else 'passes'} {how}, {_free_in_all(state)}"
                places = tuple(_places(claims) for claims in command.candidates)
                free = _free_on(state, number, command.candidates)
                whys = _whys(command.blockers)
                return Moment(line, time, "request", text, "", rank, command.turn, whys, places, free)
            case commands.ProposePlan():
                change = next((one for one in command.changes if one.number == number), None)
                if change is None:
                    return self._ranked(line, time, command, state)
                text = f"the {command.proposer} proposes to {change.kind.lower()} it, {_free_in_all(state)}"
                claims = claims_in(change)
                places = (_places(claims),) if claims else ()
                free = _free_on(state, number, [claims])
                return Moment(line, time, "plan", text, "", rank, 0, (), places, free)
            case commands.SubmitJob():
                # The job gets its number with the answer.
                return Moment(line, time, "submit", f"{command.user or 'an unknown user'} submits it")
            case _ if getattr(command, "number", 0) == number:
                user = getattr(command, "user", "") or "an unknown user"
                return Moment(line, time, _snake(type(command).__name__), f"asked by {user}", rank=rank)
            case _:
                return None

    def _ranked(self, line: int, time: float, command: commands.ProposePlan, state: State) -> Moment | None:
        """Return a moment if a plan that does not change the job gives it another rank in the queue."""
        if command.line is None or self.number not in command.line.numbers:
            return None
        rank = command.line.numbers.index(self.number) + 1
        if rank == self._last_rank:
            return None
        self._last_rank = rank
        text = f"the {command.proposer} lets it wait, {len(command.line.numbers)} wait in all, {_free_in_all(state)}"
        return Moment(line, time, "ranked", text, rank=rank)

    def _decided(self, command: Command, answer: Answer) -> None:
        moment, self._before = self._before, None
        if moment is None or (isinstance(command, commands.SubmitJob) and answer != JobAnswer(self.number)):
            return
        if moment.what == "ranked":
            self._add(moment)
            return
        verdict, whys = verdict_of(answer, self.number)
        if isinstance(command, commands.RequestGang) and not command.candidates and verdict == "refused":
            verdict = "passed"
        text = moment.text
        if isinstance(answer, Approved) and len(moment.candidates) > 1:
            text += f"; candidate {answer.candidate + 1} is taken"
        self._add(replace(moment, text=text, verdict=verdict, why=whys or moment.why))


def verdict_of(answer: Answer, number: int) -> tuple[str, tuple[VerdictReason, ...]]:
    """Return the verdict of an answer on a job, "approved" or "refused", and the reasons of a refusal."""
    match answer:
        case Rejected(refusals=refusals):
            return "refused", _whys(refusals)
        case PlanAnswer(verdicts=verdicts):
            own = next((verdict for verdict in verdicts if verdict.number == number), ChangeAnswer(number, False, 0))
            return ("approved" if own.approved else "refused"), _whys(own.refusals)
        case Refused(reason=reason, message=message):
            return "refused", (VerdictReason(reason, message),)
        case _:
            return "approved", ()


def _whys(refusals: Iterable[Refusal]) -> tuple[VerdictReason, ...]:
    return tuple(VerdictReason(one.reason.name, one.message, dict(one.figures), one.node, one.job) for one in refusals)


def _places(claims: Iterable[Claim]) -> tuple[RequestedPlace, ...]:
    return tuple(
        RequestedPlace(claim.node, _bits(claim.device_mask), sum(claim.millicores), claim.memory_bytes)
        for claim in claims
    )


def _free_on(state: State, number: int, candidates: Iterable[Sequence[Claim]]) -> tuple[Free, ...]:
    names = dict.fromkeys(claim.node for claims in candidates for claim in claims)
    return tuple(_free(state, number, name) for name in names if name in state.view)


def _free(state: State, number: int, name: str) -> Free:
    row = state.view.row(name)
    return Free(
        name,
        row.available,
        _bits(row.free_mask),
        state.view.topology(name).devices,
        sum(row.free_millicores),
        row.free_memory_bytes,
        tuple(_held(state, number, name)),
    )


def _held(state: State, number: int, name: str) -> Iterator[Held]:
    for epoch, place in state.gangs.places_on.get(name, {}).items():
        gang = state.gangs[epoch]
        held = gang.pieces[place].held
        if held is not None and gang.job != number:
            yield Held(f"jobs/{gang.job}", held.device_mask.bit_count())


def _bits(mask: int) -> tuple[int, ...]:
    return tuple(bit for bit in range(mask.bit_length()) if mask >> bit & 1)


def _free_in_all(state: State) -> str:
    return f"{state.nodes.free_devices} of {counted(state.nodes.devices, 'GPU')} free in all"


def _stands(state: State, job: JobRecord, now: float) -> str:
    if job.is_waiting:
        return f"it waits for {max(0.0, now - job.pending_since):.0f} s, {len(state.queue.waiting)} wait in all"
    if job.state.is_finished:
        return f"it has ended: {job.state.value.lower()}"
    gang = state.gangs.get(job.epoch)
    return f"it is {job.state.value.lower()}" + (f", its gang {gang.phase.value.lower()}" if gang is not None else "")


def _turn_text(turn: GrantedLease) -> str:
    kept = f", places kept on {', '.join(turn.kept_nodes)}" if turn.kept_nodes else ""
    return f"to {turn.scheduler or 'the default scheduler'} for {turn.expires - turn.given:g} s{kept}"


def _snake(name: str) -> str:
    return "".join(f"_{sign.lower()}" if sign.isupper() else sign for sign in name).lstrip("_")


# -- another policy --------------------------------------------------------------------------------------------------

# Minimum time between two passes, each of which reads all jobs and nodes.
_PASS_S = 1.0


class Difference(Struct, frozen=True):
    """A verdict that the other policy would have decided differently. `line`: of the recording."""

    line: int
    time: float
    job: int
    recorded: str
    otherwise: str
    recorded_why: tuple[VerdictReason, ...] = ()
    otherwise_why: tuple[VerdictReason, ...] = ()


class CounterfactualPlan(Struct, frozen=True):
    """A plan of the other policy: the nodes of the jobs that it starts, and the jobs that it preempts."""

    line: int
    time: float
    starts: dict[int, tuple[str, ...]]
    stops: tuple[int, ...]


class Counterfactual:
    """Compares a policy with the recorded decisions: call `record` with every entry of the replay.

    Raises KeyError for an unknown policy, ValueError for one that needs an oracle or measurements.
    """

    def __init__(self, policy: str) -> None:
        self.policy = live_policy_named(policy)
        if self.policy.has(ResizeByOptimus):
            raise ValueError(f"policy {policy!r} goes by measured losses and speeds, which no recording has")
        # Numbers of recorded verdicts that the other policy decided too, and of its passes.
        self.verdicts = self.passes = 0
        self.differences: list[Difference] = []
        self.planned: list[CounterfactualPlan] = []
        self._table = LiveTable()
        self._passed_at = float("-inf")
        self._answer: Answer | None = None

    def record(self, entry: DecisionEntry, state: State | None) -> None:
        if state is None:
            return
        match entry:
            case Begun():
                self._table = _table_of(state)
                if state.settings.needs_planner:
                    self.policy = self.policy.planned
                self._passed_at = float("-inf")
            case Drawn(effects=effects):
                if self._table.teams is not None:
                    self._table.teams.put(state.usage.values())
                for number in effects.jobs:
                    job = state.jobs.get(number)
                    if job is not None:
                        self._table.put(job, state.gangs.get(job.epoch))
            case RecordedCommand(number, time, command):
                self._answer = None
                if not isinstance(command, commands.RequestGang | commands.ProposePlan):
                    return
                if not self.policy.is_planned:
                    self._answer = self._decide(state, command, time)
                elif time >= self._passed_at + _PASS_S:
                    self._passed_at = time
                    self._plan(state, number, time)
            case Decided(number, time, command, answer, _) if self._answer is not None:
                self._compare(number, time, command, answer, self._answer)
            case _:
                return

    def _decide(self, state: State, command: Command, now: float) -> Answer:
        twin = copy.copy(state)
        # The decision claims and releases resources, which changes the view.
        twin.view = state.view.copy()
        twin.settings, twin.policy = replace_fields(state.settings, policy=self.policy.name), self.policy
        return decide(twin, command, now)[1]

    def _compare(self, line: int, time: float, command: Command, recorded: Answer, other: Answer) -> None:
        for number in jobs_of(command):
            self.verdicts += 1
            (was, whys), (would_be, other_whys) = verdict_of(recorded, number), verdict_of(other, number)
            if was != would_be or [why.reason for why in whys] != [why.reason for why in other_whys]:
                self.differences.append(Difference(line, time, number, was, would_be, whys, other_whys))

    def _plan(self, state: State, line: int, time: float) -> None:
        view = state.view.copy()
        found = plan_by(context_of(self.policy, self._table, CapacityIndex(view), time))
        self.passes += 1
        starts = {
            change.number: tuple([claim.node for claim in change.claims])
            for change in found.changes
            if isinstance(change, StartChange)
        }
        stops = tuple(change.number for change in found.changes if isinstance(change, SuspendChange))
        planned = CounterfactualPlan(line, time, starts, stops)
        before = self.planned[-1] if self.planned else CounterfactualPlan(0, 0.0, {}, ())
        if (before.starts, before.stops) != (starts, stops):
            self.planned.append(planned)


def jobs_of(command: Command) -> Iterator[int]:
    """Yield the jobs that a scheduler or a planner asks something for."""
    match command:
        case commands.RequestGang(number=number):
            yield number
        case commands.ProposePlan(changes=changes):
            for change in changes:
                yield change.number
        case _:
            return


def _table_of(state: State) -> LiveTable:
    settings = state.settings
    teams = TeamUse(settings.teams, settings.usage_half_life_s) if settings.teams else None
    table = LiveTable(limits=state.limits, teams=teams)
    if teams is not None:
        teams.put(state.usage.values())
    for job in state.jobs.values():
        table.put(job, state.gangs.get(job.epoch))
    return table
