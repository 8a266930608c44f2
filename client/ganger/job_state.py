"""The states of a job, as the master keeps them and as users see them, and the time that a job is in each."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class JobState(StrEnum):
    """PENDING waits for a gang, HOLDING has one, SUSPENDED was asked for by a user; the others are final.

    STOPPED: by the stop rule of its array, and what the job had reached stands. See docs/reference/cli.md.
    """

    PENDING = "PENDING"
    HOLDING = "HOLDING"
    SUSPENDED = "SUSPENDED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    STOPPED = "STOPPED"

    @property
    def is_finished(self) -> bool:
        return self in _FINISHED


class DeadlineOutcome(StrEnum):
    """``AT_RISK``: the job has not ended, and is expected to end late; ``OPEN``: it has not, and may end in time."""

    MET = "met"
    MISSED = "missed"
    AT_RISK = "at_risk"
    OPEN = "open"


def deadline_outcome(
    state: JobState, deadline: float, now: float, *, is_over: bool, is_late: bool = False
) -> DeadlineOutcome | None:
    """Return whether a job keeps its deadline. None without one, and for a job that was cancelled or stopped before it.

    ``deadline``: Unix seconds, 0 for none; ``now``: of its end, if it ``is_over``; ``is_late``: as it is expected."""
    if not deadline:
        return None
    if now > deadline:
        return DeadlineOutcome.MISSED
    if not is_over:
        return DeadlineOutcome.AT_RISK if is_late else DeadlineOutcome.OPEN
    if state is JobState.SUCCEEDED:
        return DeadlineOutcome.MET
    return DeadlineOutcome.MISSED if state is JobState.FAILED else None


_FINISHED = (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.STOPPED)


@dataclass(slots=True)
class Totals:
    """Sums over a history, in seconds unless named otherwise. `turns_s`: time while the job was time-sliced, its own
    slices and those of other jobs. `lost_s`: run time of failed attempts since their last checkpoints."""

    waited_s: float = 0.0
    ran_s: float = 0.0
    turns_s: float = 0.0
    parked_s: float = 0.0
    starting_s: float = 0.0
    lost_s: float = 0.0
    moves: int = 0
    move_pauses_ms: float = 0.0
    resizes: int = 0
    resize_pauses_ms: float = 0.0
    suspensions: int = 0
    checkpoints: int = 0
    failures: int = 0


class Span(NamedTuple):
    """A time in which a job was in one state: "waited", "starting", "ran", "turns" or "parked" (as in the totals).
    Times are Unix seconds. ``gpus``: those of its gang; ``part``: of the time slices on them that are its own;
    ``keeps``: whether it holds them, also while it is parked."""

    begin: float
    end: float
    state: str
    gpus: int
    part: float
    keeps: bool


@dataclass(slots=True)
class JobTimes:
    """State of a job after the events of its history so far. Times are Unix seconds, zero for states it is not in."""

    totals: Totals = field(default_factory=Totals)
    # "waited", "starting", "ran" or "parked", as in the totals; "" for none.
    state: str = ""
    since: float = 0.0
    stopping_since: float = 0.0
    moving_since: float = 0.0
    # Start of the work that is on no checkpoint yet.
    unsaved_since: float = 0.0
    # Its state is kept in memory on a node.
    is_resuming: bool = False
    # Its share of time slices where it is, and where it moves to; "" where it is not time-sliced.
    slice_share: str = ""
    next_slice_share: str = ""
    spans: list[Span] = field(default_factory=list)
    gpus: int = 0
    # GPUs after the change of size under way.
    becomes: int = 0
    # At which it was parked last.
    level: str = ""

    def enter(self, now: float, state: str = "") -> None:
        """Add the time of the present state to the totals, and begin another one."""
        if self.state:
            name = "turns_s" if self.state == "ran" and self.slice_share else f"{self.state}_s"
            setattr(self.totals, name, getattr(self.totals, name) + now - self.since)
            keeps = self.state in ("ran", "starting") or (self.state == "parked" and self.level == "PAUSE")
            part = _part_of(self.slice_share) if self.slice_share else 1.0
            self.spans.append(Span(self.since, now, name.removesuffix("_s"), self.gpus, part, keeps))
        self.state, self.since, self.stopping_since = state, now, 0.0

    def lasted(self, now: float, state: str) -> float:
        """Return the seconds for which it has been in this state; 0 if it is in another."""
        return now - self.since if self.state == state else 0.0

    def set_slice_share(self, now: float, share: str) -> None:
        """Set the share of time slices from `now` on, "" for none. Run time counts as time-sliced or not by it."""
        if self.state == "ran" and bool(share) != bool(self.slice_share):
            self.enter(now, "ran")
        self.slice_share = share


def _part_of(share: str) -> float:
    """Return the part of the time slices in a text as "1 of 4 time slices"."""
    own, _, rest = share.partition(" of ")
    of = rest.partition(" ")[0]
    return min(1.0, int(own) / int(of)) if own.isdecimal() and of.isdecimal() and int(of) else 1.0
