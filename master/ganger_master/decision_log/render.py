"""What replays of recordings found, of a master's decisions and of a planner's plans: as text, and as plain values for
--json."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from ganger.units import format_cores, format_memory
from msgspec import Struct

from ganger_master.core import commands
from ganger_master.core.answers import ChangeAnswer
from ganger_master.core.plan_changes import PlanChange, claims_in
from ganger_master.decision_log.counterfactual import Counterfactual, CounterfactualPlan, Difference
from ganger_master.decision_log.job_history import (
    Free,
    Moment,
    RecordedHistory,
    RequestedPlace,
    VerdictReason,
    verdict_of,
)
from ganger_master.decision_log.recording import Header
from ganger_master.decision_log.rerun import (
    Broke,
    Decided,
    DecisionEntry,
    Differs,
    Drawn,
    Ended,
    Entry,
    JudgedPlan,
    Made,
)


@dataclass(slots=True)
class RequestCounts:
    """Requests and planned changes of one job."""

    requests: int = 0
    approved: int = 0
    # Reason of the last refusal.
    reason: str = ""


@dataclass(slots=True)
class LogSummary:
    commands: Counter[str] = field(default_factory=Counter)
    # Counts by reason of refusal; "": approved.
    verdicts: Counter[str] = field(default_factory=Counter)
    batches: int = 0
    jobs: dict[int, RequestCounts] = field(default_factory=dict)

    def record(self, entry: DecisionEntry) -> None:
        match entry:
            case Drawn():
                self.batches += 1
            case Decided(_, _, command, answer, _):
                self.commands[type(command).__name__] += 1
                match command:
                    case commands.RequestGang(number=number):
                        numbers = [number]
                    case commands.ProposePlan(changes=changes):
                        numbers = [change.number for change in changes]
                    case _:
                        return
                for number in numbers:
                    self._count(number, *verdict_of(answer, number))
            case _:
                return

    def _count(self, number: int, verdict: str, whys: tuple[VerdictReason, ...]) -> None:
        asking = self.jobs.setdefault(number, RequestCounts())
        asking.requests += 1
        if verdict == "approved":
            asking.approved += 1
            self.verdicts[""] += 1
            return
        asking.reason = whys[0].reason if whys else "nothing said"
        self.verdicts[asking.reason] += 1


# Maximum number of characters shown of a difference.
_LONGEST_VALUE = 2_000
_MOST_CANDIDATES = 4


def headline(header: Header, seconds: float, tally: LogSummary, reason: str) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(header.began))
    commands = sum(tally.commands.values())
    done = f"{seconds:.1f} s, {commands:,} commands, {tally.batches:,} batches"
    return f"recorded {when} by ganger {header.ganger}, policy {header.policy}: {done} ({reason})"


def agreement(differences: Sequence[Differs], began: float) -> Iterator[str]:
    if not differences:
        yield "every decision is as recorded"
        return
    first = differences[0]
    yield f"decided otherwise at {_at(first.time, began)}, line {first.number}: {first.what}"
    yield f"  recorded: {_cut(first.recorded)}"
    yield f"  now:      {_cut(first.now)}"
    if len(differences) > 1:
        yield f"  {len(differences) - 1:,} more differ; they may follow from this one"


def history_lines(history: RecordedHistory, began: float) -> Iterator[str]:
    yield f"job {history.number}"
    if not history.moments:
        yield "  nothing is recorded of it"
    for moment in history.moments:
        yield f"  {_at(moment.time, began):>10}  {_sentence(moment)}"
        for detail in _details(moment):
            yield f"  {'':10}    {detail}"


def counterfactual_lines(other: Counterfactual, began: float, only: int | None = None) -> Iterator[str]:
    name = other.policy.name
    differences = [one for one in other.differences if only is None or one.job == only]
    if other.passes:
        yield f"{name} plans for all jobs at once: {other.passes:,} plans on the recorded states, where they change:"
        for planned in other.planned:
            if only is None or only in planned.starts or only in planned.stops:
                yield f"  {_at(planned.time, began):>10}  {_planned(planned)}"
    else:
        yield f"{name}: {len(differences):,} of {other.verdicts:,} verdicts would have been others"
        for one in differences:
            yield f"  {_at(one.time, began):>10}  job {one.job}: {_difference(one)}"
    yield "each decided on the state as it was: what would have followed is not in a recording"


def plain(
    header: Header,
    seconds: float,
    reason: str,
    tally: LogSummary,
    differences: Sequence[Differs],
    history: RecordedHistory | None,
    other: Counterfactual | None,
) -> dict[str, Any]:
    """Times are Unix seconds of the master's clock."""
    builtin: dict[str, Any] = {
        "recording": {
            "began": header.began,
            "seconds": seconds,
            "ganger": header.ganger,
            "policy": header.policy,
            "with_environment": header.with_environment,
            "end_reason": reason,
        },
        "commands": dict(sorted(tally.commands.items())),
        "batches": tally.batches,
        "verdicts": {name or "approved": count for name, count in sorted(tally.verdicts.items())},
        "jobs": {
            str(number): {"requests": job.requests, "approved": job.approved, "last_reason": job.reason or None}
            for number, job in sorted(tally.jobs.items())
        },
        "differences": len(differences),
        "first_difference": None if not differences else msgspec.to_builtins(differences[0]),
    }
    if history is not None:
        builtin["job"] = {"number": history.number, "moments": msgspec.to_builtins(history.moments)}
    if other is not None:
        builtin["otherwise"] = {
            "policy": other.policy.name,
            "verdicts": other.verdicts,
            "differences": msgspec.to_builtins(other.differences),
            "plans": other.passes,
            "planned": msgspec.to_builtins(other.planned, str_keys=True),
        }
    return builtin


def _sentence(moment: Moment) -> str:
    rank = f" (place {moment.rank} in the queue)" if moment.rank else ""
    turn = f" {moment.turn}" if moment.what == "turn" else ""
    verdict = f": {moment.verdict.upper()}" if moment.verdict else ""
    text = f", {moment.text}" if moment.text else ""
    return f"{moment.what.replace('_', ' ')}{turn}{rank}{text}{verdict}"


def _details(moment: Moment) -> Iterator[str]:
    for why in moment.why:
        yield f"{why.reason}: {why.message}"
    for position, candidate in enumerate(moment.candidates[:_MOST_CANDIDATES]):
        which = f"candidate {position + 1}: " if len(moment.candidates) > 1 else "for " if moment.verdict else "has "
        yield which + "; ".join(map(_place, candidate))
    if len(moment.candidates) > _MOST_CANDIDATES:
        yield f"and {len(moment.candidates) - _MOST_CANDIDATES} candidates more"
    for free in moment.free:
        yield _free(free)


def _place(place: RequestedPlace) -> str:
    gpus = f"GPUs {_numbers(place.gpus)}" if place.gpus else "no GPU"
    return f"{place.node} {gpus}, {format_cores(place.millicores)} cores, {format_memory(place.memory_bytes)}"


def _free(free: Free) -> str:
    gpus = f"GPUs {_numbers(free.gpus_free)} of {free.gpus}" if free.gpus_free else f"none of {free.gpus} GPUs"
    held = ", ".join(f"{one.job} has {one.gpus}" for one in free.held)
    closed = "" if free.takes_gangs else " (takes no gangs)"
    room = f"{format_cores(free.free_millicores)} cores, {format_memory(free.free_memory_bytes)}"
    return f"free on {free.node}{closed}: {gpus}, {room}" + (f"; {held}" if held else "")


def _difference(one: Difference) -> str:
    recorded, otherwise = _verdict(one.recorded, one.recorded_why), _verdict(one.otherwise, one.otherwise_why)
    return f"{recorded} as recorded, {otherwise} otherwise"


def _verdict(verdict: str, whys: Sequence[VerdictReason]) -> str:
    return f"{verdict} ({whys[0].reason}: {whys[0].message})" if whys else verdict


def _planned(planned: CounterfactualPlan) -> str:
    starts = [f"start job {number} on {','.join(nodes)}" for number, nodes in planned.starts.items()]
    stops = [f"stop job {number}" for number in planned.stops]
    return "; ".join([*stops, *starts]) or "nothing to start or to stop"


def _numbers(bits: Sequence[int]) -> str:
    """ "0-3,6"."""
    parts: list[list[int]] = []
    for bit in bits:
        if parts and parts[-1][-1] == bit - 1:
            parts[-1] = [parts[-1][0], bit]
        else:
            parts.append([bit])
    return ",".join("-".join(map(str, part)) for part in parts)


def _at(at: float, began: float) -> str:
    return f"{at - began:+.3f} s"


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}… ({len(text):,} characters)"


# -- plans -------------------------------------------------------------------------------------------------------------


class PlannedChange(Struct, frozen=True):
    """A recorded change of a job, with its verdict. `line`: of the recording; `why`: the reason of a refusal."""

    line: int
    time: float
    change: PlanChange
    approved: bool
    why: str = ""


class PlanReport:
    """Record every entry of a replay, then read. `number`: of the job whose changes are kept; None: of no job."""

    def __init__(self, header: Header, number: int | None = None) -> None:
        self.header, self.number = header, number
        self.plans = 0
        self.last_s, self.last_line, self.end_reason = header.began, 0, ""
        self.difference: Differs | None = None
        self.failure: Broke | None = None
        self.changes: list[PlannedChange] = []
        # By kind of change: proposed and approved ones.
        self._proposed: Counter[str] = Counter()
        self._approved: Counter[str] = Counter()

    def record(self, entry: Entry) -> None:
        self.last_line, self.last_s = entry.number, entry.time
        match entry:
            case Made():
                self.plans += 1
            case JudgedPlan(number, at, plan, answers):
                for change, answer in zip(plan.changes, answers, strict=True):
                    self._count(number, at, change, answer)
            case Differs():
                self.difference = entry
            case Broke():
                self.failure = entry
            case Ended(_, _, reason):
                self.end_reason = reason

    def _count(self, line: int, at: float, change: PlanChange, answer: ChangeAnswer) -> None:
        self._proposed[change.kind] += 1
        self._approved[change.kind] += answer.approved
        if change.number == self.number:
            why = answer.refusals[0].message if answer.refusals else ""
            self.changes.append(PlannedChange(line, at, change, answer.approved, why))

    def text(self, observations: int) -> Iterator[str]:
        header, began = self.header, self.header.began
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(began))
        done = f"{self.last_s - began:.1f} s, {observations:,} observations, {self.plans:,} plans"
        yield f"planner recorded {when} by ganger {header.ganger}, policy {header.policy}: {done} ({self.end_reason})"
        if self.difference is None:
            yield "every plan is as recorded"
        else:
            yield from agreement([self.difference], began)
            yield "  later plans are not made: the recorded verdict is on another plan"
        if self.failure is not None:
            yield f"the planner fails again at {self.failure.time - began:+.3f} s: {self.failure.error}"
        if self.number is not None:
            yield ""
            yield f"job {self.number}"
            if not self.changes:
                yield "  no plan changes it"
            for one in self.changes:
                verdict = "APPROVED" if one.approved else f"REFUSED: {one.why}"
                yield f"  {one.time - began:>+10.3f} s  {_change(one.change)}: {verdict}"

    def rows(self) -> list[tuple[str, str, str]]:
        """Return kind, number of proposed and number of approved changes."""
        return [(kind, str(count), str(self._approved[kind])) for kind, count in sorted(self._proposed.items())]

    def plain(self, observations: int) -> dict[str, Any]:
        """Times are Unix seconds of the master's clock."""
        header = self.header
        builtin: dict[str, Any] = {
            "recording": {
                "began": header.began,
                "seconds": self.last_s - header.began,
                "ganger": header.ganger,
                "policy": header.policy,
                "program": header.program,
                "end_reason": self.end_reason,
            },
            "observations": observations,
            "plans": self.plans,
            "changes": {
                kind: {"proposed": count, "approved": self._approved[kind]}
                for kind, count in sorted(self._proposed.items())
            },
            "differences": int(self.difference is not None),
            "first_difference": msgspec.to_builtins(self.difference),
        }
        if self.failure is not None:
            builtin["failure"] = self.failure.error
        if self.number is not None:
            builtin["job"] = {"number": self.number, "changes": msgspec.to_builtins(self.changes)}
        return builtin


def _change(change: PlanChange) -> str:
    nodes = ", ".join(dict.fromkeys(claim.node for claim in claims_in(change)))
    where = f" on {nodes}" if nodes else ""
    why = f", {change.reason}" if change.reason else ""
    return f"{change.kind}{where}{why}"
