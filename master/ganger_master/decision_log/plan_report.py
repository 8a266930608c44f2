"""What the replay of a planner's recording found, as text and as plain values for --json."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from ganger_master.core.answers import ChangeAnswer
from ganger_master.core.plan_changes import PlanChange, claims_in
from ganger_master.decision_log.recording import Header
from ganger_master.decision_log.render import agreement
from ganger_master.decision_log.rerun import Broke, Differs, Ended, Entry, JudgedPlan, Made


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
