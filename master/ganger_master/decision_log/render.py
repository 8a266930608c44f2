"""What replays of recordings found, of a master's decisions and of a planner's plans: as text, and as plain values for
--json."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from ganger.text import counted, format_cores, format_memory, format_ranges
from msgspec import Struct

from ganger_master.core.answers import ChangeAnswer
from ganger_master.core.plan_changes import PlanChange, claims_in
from ganger_master.decision_log.recording import Header, Line
from ganger_master.decision_log.replay_findings import (
    Counterfactual,
    CounterfactualPlan,
    Difference,
    Free,
    Moment,
    RecordedHistory,
    RequestedPlace,
    VerdictReason,
    jobs_of,
    verdict_of,
)
from ganger_master.decision_log.rerun import (
    Broke,
    Decided,
    DecisionEntry,
    Differs,
    Drawn,
    Ended,
    JudgedPlan,
    Made,
    PlanRerun,
    Rerun,
)

# Maximum number of characters shown of a difference.
_LONGEST_VALUE = 2_000
_MOST_CANDIDATES = 4


@dataclass(slots=True)
class RequestCounts:
    """Requests and planned changes of one job."""

    requests: int = 0
    approved: int = 0
    # Reason of the last refusal.
    reason: str = ""


class DecisionReport:
    """Run it, then read. `number`: of the job whose history is kept; `policy`: another one to compare with; `until_s`:
    stop after so many seconds from where the recording began.

    Raises KeyError for an unknown policy, ValueError for one that needs an oracle or measurements."""

    headings = ("JOB", "REQUESTS", "APPROVED", "LAST REFUSAL")

    def __init__(self, recorded: Iterable[Line], number: int | None, policy: str | None, until_s: float | None) -> None:
        self.history = None if number is None else RecordedHistory(number)
        self.other = None if policy is None else Counterfactual(policy)
        self._rerun = Rerun(recorded)
        self.header, self._until_s = self._rerun.header, until_s
        self.last_s, self.last_line, self.end_reason = self.header.began, 0, ""
        self.differences: list[Differs] = []
        self._commands: Counter[str] = Counter()
        # Counts by reason of refusal; "": approved.
        self._verdicts: Counter[str] = Counter()
        self._batches = 0
        self._jobs: dict[int, RequestCounts] = {}

    def run(self) -> None:
        """Repeat the decisions. Raises LineError."""
        rerun, history, until_s = self._rerun, self.history, self._until_s
        for entry in rerun:
            if until_s is not None and entry.time > self.header.began + until_s:
                self.end_reason = f"as far as {until_s:g} s"
                if history is not None and rerun.state is not None:
                    history.situation(self.last_line, self.last_s, self.end_reason, rerun.state)
                return
            self.last_line, self.last_s = entry.number, entry.time
            self._record(entry)
            if history is not None:
                history.record(entry, rerun.state)
            if self.other is not None:
                self.other.record(entry, rerun.state)

    def _record(self, entry: DecisionEntry) -> None:
        match entry:
            case Differs():
                self.differences.append(entry)
            case Ended(reason=reason):
                self.end_reason = reason
            case Drawn():
                self._batches += 1
            case Decided(command=command, answer=answer):
                self._commands[type(command).__name__] += 1
                for number in jobs_of(command):
                    self._count(number, *verdict_of(answer, number))
            case _:
                return

    def _count(self, number: int, verdict: str, whys: tuple[VerdictReason, ...]) -> None:
        asking = self._jobs.setdefault(number, RequestCounts())
        asking.requests += 1
        if verdict == "approved":
            asking.approved += 1
            self._verdicts[""] += 1
            return
        asking.reason = whys[0].reason if whys else "no reason given"
        self._verdicts[asking.reason] += 1

    def missing(self) -> str:
        """Return that nothing is recorded of the job; empty if something is."""
        if self.history is None or self.history.moments or self.differences:
            return ""
        since = "" if self._until_s is None else f" in the first {self._until_s:g} s"
        return f"nothing is recorded of job {self.history.number}{since}"

    def text(self) -> Iterator[str]:
        began, commands = self.header.began, sum(self._commands.values())
        done = (
            f"{self.last_s - began:.1f} s, {counted(commands, 'command', ',')}, {counted(self._batches, 'batch', ',')}"
        )
        yield f"recorded {_by(self.header)}: {done} ({self.end_reason})"
        yield from agreement(self.differences, began)
        if self.history is not None:
            yield ""
            yield from history_lines(self.history, began)
        if self.other is not None:
            yield ""
            yield from counterfactual_lines(self.other, began, None if self.history is None else self.history.number)

    def rows(self) -> list[tuple[str, str, str, str]]:
        if self.other is not None:
            return []
        counts = sorted(self._jobs.items())
        return [(str(number), str(one.requests), str(one.approved), one.reason) for number, one in counts]

    def plain(self) -> dict[str, Any]:
        """Times are Unix seconds of the master's clock."""
        history, other = self.history, self.other
        builtin = _about(self, with_environment=self.header.with_environment) | {
            "commands": dict(sorted(self._commands.items())),
            "batches": self._batches,
            "verdicts": {name or "approved": count for name, count in sorted(self._verdicts.items())},
            "jobs": {
                str(number): {"requests": job.requests, "approved": job.approved, "last_reason": job.reason or None}
                for number, job in sorted(self._jobs.items())
            },
            **_differences(self.differences),
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


def _by(header: Header) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(header.began))
    return f"{when} by ganger {header.ganger}, policy {header.policy}"


def _about(report: DecisionReport | PlanReport, **more: object) -> dict[str, Any]:
    header = report.header
    facts = {"began": header.began, "seconds": report.last_s - header.began, "ganger": header.ganger}
    return {"recording": {**facts, "policy": header.policy, **more, "end_reason": report.end_reason}}


def _differences(found: Sequence[Differs]) -> dict[str, Any]:
    return {"differences": len(found), "first_difference": msgspec.to_builtins(found[0]) if found else None}


def agreement(differences: Sequence[Differs], began: float, what: str = "decision") -> Iterator[str]:
    if not differences:
        yield f"every {what} is as recorded"
        return
    first = differences[0]
    yield f"decided otherwise at {_at(first.time, began)}, line {first.number}: {first.what}"
    yield f"  recorded: {_cut(first.recorded)}"
    yield f"  now:      {_cut(first.now)}"
    if len(differences) > 1:
        yield f"  and {counted(len(differences) - 1, 'more difference', ',')}, which may follow from this one"


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
        plans = counted(other.passes, "plan", ",")
        yield f"{name} plans for all jobs at once: {plans} on the recorded states, where they change:"
        for planned in other.planned:
            if only is None or only in planned.starts or only in planned.stops:
                yield f"  {_at(planned.time, began):>10}  {_planned(planned)}"
    else:
        yield f"{name}: {len(differences):,} of {other.verdicts:,} verdicts would have been others"
        for one in differences:
            yield f"  {_at(one.time, began):>10}  job {one.job}: {_difference(one)}"
    yield "each decided on the state as it was: what would have followed is not in a recording"


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
    gpus = f"GPUs {format_ranges(place.gpus)}" if place.gpus else "no GPU"
    return (
        f"{place.node} {gpus}, {counted(format_cores(place.millicores), 'core')}, {format_memory(place.memory_bytes)}"
    )


def _free(free: Free) -> str:
    gpus = (
        f"GPUs {format_ranges(free.gpus_free)} of {free.gpus}"
        if free.gpus_free
        else f"none of {counted(free.gpus, 'GPU')}"
    )
    held = ", ".join(f"{one.job} has {one.gpus}" for one in free.held)
    closed = "" if free.takes_gangs else " (takes no gangs)"
    room = f"{counted(format_cores(free.free_millicores), 'core')}, {format_memory(free.free_memory_bytes)}"
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
    """Run it, then read. `number`: of the job whose changes are kept; None: of no job. `until_s`: as in `PlanRerun`."""

    headings = ("CHANGE", "PROPOSED", "APPROVED")

    def __init__(self, recorded: Iterable[Line], number: int | None, until_s: float | None) -> None:
        self._rerun, self.number = PlanRerun(recorded, until_s), number
        self.header, self.plans = self._rerun.header, 0
        self.last_s, self.last_line, self.end_reason = self.header.began, 0, ""
        # At most one.
        self.differences: list[Differs] = []
        self.failure: Broke | None = None
        self.changes: list[PlannedChange] = []
        # By kind of change: proposed and approved ones.
        self._proposed: Counter[str] = Counter()
        self._approved: Counter[str] = Counter()

    def run(self) -> None:
        """Make the plans again. Raises LineError."""
        for entry in self._rerun:
            self.last_line, self.last_s = entry.number, entry.time
            match entry:
                case Made():
                    self.plans += 1
                case JudgedPlan(number, at, plan, answers):
                    for change, answer in zip(plan.changes, answers, strict=True):
                        self._count(number, at, change, answer)
                case Differs():
                    self.differences.append(entry)
                case Broke():
                    self.failure = entry
                case Ended(reason=reason):
                    self.end_reason = reason

    def _count(self, line: int, at: float, change: PlanChange, answer: ChangeAnswer) -> None:
        self._proposed[change.kind] += 1
        self._approved[change.kind] += answer.approved
        if change.number == self.number:
            why = answer.refusals[0].message if answer.refusals else ""
            self.changes.append(PlannedChange(line, at, change, answer.approved, why))

    def missing(self) -> str:
        return "" if self.changes or self.differences or self.failure else f"no plan changes job {self.number}"

    def text(self) -> Iterator[str]:
        began = self.header.began
        plans = counted(self.plans, "plan", ",")
        done = f"{self.last_s - began:.1f} s, {self._rerun.observations:,} observations, {plans}"
        yield f"planner recorded {_by(self.header)}: {done} ({self.end_reason})"
        yield from agreement(self.differences, began, "plan")
        if self.differences:
            yield "  later plans are not made: the recorded verdict is on another plan"
        if self.failure is not None:
            yield f"the planner fails again at {_at(self.failure.time, began)}: {self.failure.error}"
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

    def plain(self) -> dict[str, Any]:
        """Times are Unix seconds of the master's clock."""
        builtin = _about(self, program=self.header.program) | {
            "observations": self._rerun.observations,
            "plans": self.plans,
            "changes": {
                kind: {"proposed": count, "approved": self._approved[kind]}
                for kind, count in sorted(self._proposed.items())
            },
            **_differences(self.differences),
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
