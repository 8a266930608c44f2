"""The reason for a change of a running job, and what the change is expected to save and to cost."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from msgspec import Struct


class Goal(StrEnum):
    """What a change is for."""

    NONE = ""
    # Move a job that is slower where it is onto devices closer together.
    LOCALITY = "LOCALITY"
    # Make room for a pending gang.
    HOLE = "HOLE"
    # End a co-location.
    UNPACK = "UNPACK"
    # Leave a node that is drained.
    DRAIN = "DRAIN"
    # Reduce the nodes that are neither full nor idle.
    DEFRAGMENT = "DEFRAGMENT"
    # Resume a job that was parked for another.
    RETURN = "RETURN"
    # Give an elastic job GPUs that no other job wants.
    GROW = "GROW"
    # Take GPUs that other jobs want, or that brought too little, from an elastic job.
    GIVE_BACK = "GIVE_BACK"
    # Co-locate jobs on devices, as a trial.
    PACK = "PACK"
    # Revert a move that did not help.
    UNDO = "UNDO"
    # Exchange places with a job that needs this one more.
    EXCHANGE = "EXCHANGE"
    # Leave a node where it was measured to be slower beside others.
    BALANCE = "BALANCE"
    # Give time-sliced jobs equal shares of device time.
    FAIRNESS = "FAIRNESS"


class Purpose(Struct, frozen=True, gc=False, omit_defaults=True):
    """The reason for one change.

    job: number of the job that gets the room; zero: none. saved: expected gain in GPU-seconds, beyond what the change
    costs. pause_seconds: expected pause of the job that changes. detail: the measurements that the change rests on.
    """

    goal: Goal = Goal.NONE
    job: int = 0
    saved: float = 0.0
    pause_seconds: float = 0.0
    detail: str = ""

    @property
    def figures(self) -> dict[str, str]:
        """Return the figures for the history of the job."""
        if self.goal is Goal.NONE:
            return {}
        helped = {"for": f"jobs/{self.job}"} if self.job else {}
        expected = {"saved_gpu_seconds": f"{self.saved:.1f}", "expected_pause_ms": f"{1000 * self.pause_seconds:.0f}"}
        if self.goal in (Goal.GROW, Goal.GIVE_BACK):
            # The gain of a resize is measured afterwards.
            return {"goal": self.goal.value, **helped}
        if self.detail:
            return {"goal": self.goal.value, **helped, "detail": self.detail}
        return {"goal": self.goal.value, **helped, **expected}


NO_PURPOSE: Final = Purpose()


class TrialFinding(Struct, frozen=True, gc=False):
    """The outcome of a measured change.

    gain: rate after the change divided by the rate before, with its standard deviation; for a co-location the sum over
    its jobs. detail: the measured rates by job.
    """

    number: int
    goal: Goal
    kept: bool
    gain: float
    deviation: float = 0.0
    detail: str = ""
