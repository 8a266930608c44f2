"""When the planner makes its next plan, and whether that one may stop who runs.

On news at once, so that whoever finds room starts; by itself when the order of jobs may have changed, when who waits
may take somebody's place again, or when what was refused may be asked for anew. Never so often that planning is all it
does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Final

from ganger_master.core.change_reason import Goal
from ganger_master.core.commands import Change
from ganger_master.core.model import SuspendLevel
from ganger_master.planner.plan import PlanDraft

# Of a core, at most a quarter is spent on plans.
_REST: Final = 3.0
_LEAST_REST_SECONDS: Final = 0.005
# Without news, two plans are at least this far apart, however soon something was to change.
_LEAST_ALONE_SECONDS: Final = 0.5
# After plans in a row of which something was refused.
_BACKOFF_SECONDS: Final = (0.1, 0.3, 1.0, 3.0, 10.0)


def is_stop(change: Change, resizes: bool) -> bool:
    """Whether a change that was made counts as stopping somebody. `resizes`: sizes are weighed, which for that is the
    same. Who rests in host memory loses no more than a moment, and who leaves a pack makes nobody wait longer for a
    place."""
    if change.kind == "RESIZE":
        return resizes
    return change.level is SuspendLevel.CHECKPOINT and change.purpose.goal is not Goal.UNPACK


@dataclass(frozen=True, slots=True)
class PlanPace:
    """Unix seconds. `every_s`: the least time between two plans that stop somebody."""

    every_s: float
    stopped_at_s: float = -inf
    # Plans in a row of which something was refused.
    failures: int = 0
    # No plan before the first, and one at the second though nothing happened.
    ready_s: float = -inf
    alone_s: float = inf

    def may_stop(self, now: float) -> bool:
        return now >= self.stopped_at_s + self.every_s

    def next_stop_s(self, now: float) -> float:
        """When the next plan may stop somebody, if this one is now; the one after it, if this one may."""
        return (now if self.may_stop(now) else self.stopped_at_s) + self.every_s

    def wait_s(self, now: float, is_news: bool) -> float:
        """Seconds to wait before the next plan; infinite: for news."""
        return max(0.0, self.ready_s - now, 0.0 if is_news else self.alone_s - now)

    def after(
        self, now: float, took_s: float, found: PlanDraft, *, stopped: bool, refused: bool, again_s: float = inf
    ) -> PlanPace:
        """Once a plan made and proposed until now is answered. `stopped`: somebody was; `refused`: something was.
        `again_s`: when what else was put off may be done."""
        stopped_at_s = now if stopped else self.stopped_at_s
        failures = self.failures + 1 if refused else 0
        rest_s = max(_LEAST_REST_SECONDS, _REST * took_s)
        alone_s = min(again_s, found.next_change_s)
        if found.waits or found.leaves_waiting:
            # Orders that change all the time are looked at again as often as somebody may be stopped for them.
            alone_s = min(alone_s, replace(self, stopped_at_s=stopped_at_s).next_stop_s(now))
        alone_s = max(alone_s, now + _LEAST_ALONE_SECONDS)
        if refused:
            rest_s = max(rest_s, _BACKOFF_SECONDS[min(failures, len(_BACKOFF_SECONDS)) - 1])
            alone_s = min(alone_s, now + rest_s)
        return replace(self, stopped_at_s=stopped_at_s, failures=failures, ready_s=now + rest_s, alone_s=alone_s)
