"""The changes of a plan: one struct for each kind, their union `PlanChange`, and the reason for a change."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, TypeAlias, assert_never

from ganger.cluster.resources import STORED_NAMES, Claim
from msgspec import Struct

from ganger_master.core.job_model import SuspendLevel


class Goal(StrEnum):
    """What a change is for."""

    NONE = ""
    # Move a job that is slower where it is onto devices closer together.
    LOCALITY = "LOCALITY"
    # Make room for a pending gang.
    HOLE = "HOLE"
    # End a co-location.
    UNPACK = "UNPACK"
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
    # Release devices that the job does not use.
    IDLE = "IDLE"
    # Continue with other numbers of tasks of its roles.
    RESIZE = "RESIZE"


class Purpose(Struct, frozen=True, gc=False, omit_defaults=True, rename=STORED_NAMES):
    """The reason for one change.

    job: number of the job that gets the room; zero: none. saved: expected gain in GPU-seconds, beyond what the change
    costs. pause_s: expected pause of the job that changes. detail: the measurements that the change rests on.
    """

    goal: Goal = Goal.NONE
    job: int = 0
    saved: float = 0.0
    pause_s: float = 0.0
    detail: str = ""

    @property
    def figures(self) -> dict[str, str]:
        """Return the figures for the history of the job."""
        if self.goal is Goal.NONE:
            return {}
        helped = {"for": f"jobs/{self.job}"} if self.job else {}
        expected = {"saved_gpu_seconds": f"{self.saved:.1f}", "expected_pause_ms": f"{1000 * self.pause_s:.0f}"}
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


class CurvePoint(Struct, frozen=True, gc=False):
    """A rate in steps/s with this number of CPU cores for each GPU. is_inherited: of an earlier job of the series.
    memory_bytes: of host memory for each GPU; zero: all that the job had."""

    cores: float
    rate: float
    is_inherited: bool = False
    memory_bytes: int = 0


# Most points of a curve, and of its fit.
CURVE_POINTS: Final = 64


class CoresCurve(Struct, frozen=True, gc=False):
    """What was measured of a job with several numbers of cores for each GPU.

    points: measured, by cores. fitted: the fitted curve at whole numbers of cores; empty with fewer than two points.
    sweet_point, sweet_low, sweet_high: the cores from which more do not help, with bounds of 95 % confidence; the upper
    one is zero where the rate still rises at the most cores measured. fit_error: largest relative deviation of the
    curve from a point. enough_millicores: the fewest with 99 % of the best rate by the curve; zero without one.
    trial_millicores: under trial; zero: none. tried_s, lost_s: time in ended trials, and how much less the job would
    have needed for the same steps. phase: what the job did; others: the curves of its other phases. memory_points: with
    less memory for each GPU, by memory, the last one with all that it had. enough_memory_bytes: the least of these that
    cost nothing; zero: not measured. trial_memory_bytes: for each GPU, under trial by its daemons; zero: none.
    """

    number: int
    points: tuple[CurvePoint, ...]
    fitted: tuple[CurvePoint, ...] = ()
    sweet_point: float = 0.0
    sweet_low: float = 0.0
    sweet_high: float = 0.0
    fit_error: float = 0.0
    enough_millicores: int = 0
    trial_millicores: int = 0
    tried_s: float = 0.0
    lost_s: float = 0.0
    phase: str = ""
    others: tuple[CoresCurve, ...] = ()
    memory_points: tuple[CurvePoint, ...] = ()
    enough_memory_bytes: int = 0
    trial_memory_bytes: int = 0


class _JobChange(Struct, frozen=True, gc=False):
    """`number` and `revision`: of the job that changes. A change of another revision is refused."""

    number: int
    revision: int


class _PlanChange(_JobChange, frozen=True, gc=False, kw_only=True, tag_field="kind"):
    """What all kinds have.

    together: changes with the same number are approved or refused as one; 0: alone. reason: the expected gain, with its
    figures.
    """

    together: int = 0
    reason: str = ""
    purpose: Purpose = NO_PURPOSE

    @property
    def kind(self) -> str:
        """Return the name of the kind, for logs and messages."""
        return str(self.__struct_config__.tag)


class StartChange(_PlanChange, frozen=True, gc=False, tag="START"):
    """Start a pending job on these claims, or resume it there."""

    claims: tuple[Claim, ...]


class MoveChange(_PlanChange, frozen=True, gc=False, tag="MOVE"):
    """Move a gang to these claims."""

    claims: tuple[Claim, ...]


class ResizeChange(_PlanChange, frozen=True, gc=False, tag="RESIZE"):
    """Let an elastic job continue with the devices of these claims."""

    claims: tuple[Claim, ...]


class CoresChange(_PlanChange, frozen=True, gc=False, tag="CORES"):
    """Give a gang other cores and host memory on its devices."""

    claims: tuple[Claim, ...]


class SuspendChange(_PlanChange, frozen=True, gc=False, tag="SUSPEND"):
    """Park a gang at a level; NONE: the level that frees most without leaving memory."""

    level: SuspendLevel = SuspendLevel.NONE


class ResumeChange(_PlanChange, frozen=True, gc=False, tag="RESUME"):
    """Resume a parked gang in place."""


class SliceChange(_PlanChange, frozen=True, gc=False, tag="ROW", rename=STORED_NAMES):
    """Place a gang in slices of a time-slice group. All gangs of the group have one such change, together.

    claims: where the gang starts or moves to; empty: it stays. node_set: number of the group, 0: a new one. rows: the
    slices in which the gang runs, from 0. quantum_s, level: the same in all changes of the group.
    """

    claims: tuple[Claim, ...] = ()
    level: SuspendLevel = SuspendLevel.NONE
    node_set: int = 0
    rows: tuple[int, ...] = ()
    quantum_s: float = 0.0


# Changes that are judged one by one; those of a time-slice group are judged as one matrix.
SingleChange: TypeAlias = StartChange | MoveChange | ResizeChange | CoresChange | SuspendChange | ResumeChange
PlanChange: TypeAlias = SingleChange | SliceChange


def claims_in(change: PlanChange) -> tuple[Claim, ...]:
    """Return the claims that a change names, none for a suspension or a resumption in place."""
    match change:
        case StartChange() | MoveChange() | ResizeChange() | CoresChange() | SliceChange():
            return change.claims
        case SuspendChange() | ResumeChange():
            return ()
        case _:
            assert_never(change)
