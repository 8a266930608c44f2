"""What a change of a running job is for, whom it helps, and what it is expected to save and to cost."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from msgspec import Struct


class Goal(StrEnum):
    NONE = ""
    # Closer together, for a job that is slower where it is.
    LOCALITY = "LOCALITY"
    # Room for a gang that waits.
    HOLE = "HOLE"
    # Out of a pack.
    UNPACK = "UNPACK"
    # Off a node that is being emptied.
    DRAIN = "DRAIN"
    # Fewer nodes that are neither full nor idle.
    DEFRAGMENT = "DEFRAGMENT"
    # Who was parked for another goes on.
    RETURN = "RETURN"
    # Onto GPUs that nobody wants.
    GROW = "GROW"
    # GPUs for who wants them, or that were worth too little.
    GIVE_BACK = "GIVE_BACK"
    # On devices together with others, which is tried and measured.
    PACK = "PACK"
    # Back to where it was: a move did not help.
    UNDO = "UNDO"
    # Its place for another that needs it more, which gives its own.
    EXCHANGE = "EXCHANGE"
    # Off a node where it was measured to be slower beside others.
    BALANCE = "BALANCE"
    # As much time on devices as others have, of those who take turns.
    FAIRNESS = "FAIRNESS"


class Purpose(Struct, frozen=True, gc=False, omit_defaults=True):
    """`job`: the number of the one that gets the room, zero if it is for none. `saved`: GPU-seconds, beyond what the
    change costs. `pause_seconds`: how long the job is expected to stand still. `detail`: the figures it rests on."""

    goal: Goal = Goal.NONE
    job: int = 0
    saved: float = 0.0
    pause_seconds: float = 0.0
    detail: str = ""

    @property
    def figures(self) -> dict[str, str]:
        """For the history of the job."""
        if self.goal is Goal.NONE:
            return {}
        helped = {"for": f"jobs/{self.job}"} if self.job else {}
        expected = {"saved_gpu_seconds": f"{self.saved:.1f}", "expected_pause_ms": f"{1000 * self.pause_seconds:.0f}"}
        if self.goal in (Goal.GROW, Goal.GIVE_BACK):
            # What that is worth is measured afterwards.
            return {"goal": self.goal.value, **helped}
        if self.detail:
            return {"goal": self.goal.value, **helped, "detail": self.detail}
        return {"goal": self.goal.value, **helped, **expected}


NO_PURPOSE: Final = Purpose()


class TrialFinding(Struct, frozen=True, gc=False):
    """What was measured after a change. `gain`: the rate after it by the rate before, and its standard deviation; of a
    pack the sum over all in it. `detail`: what was measured of whom."""

    number: int
    goal: Goal
    kept: bool
    gain: float
    deviation: float = 0.0
    detail: str = ""
