"""The changes of a plan: one struct for each kind, and their union `PlanChange`."""

from __future__ import annotations

from typing import TypeAlias, assert_never

from ganger.cluster.resources import Claim
from msgspec import Struct

from ganger_master.core.change_reason import NO_PURPOSE, Purpose
from ganger_master.core.job_model import SuspendLevel


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


class SliceChange(_PlanChange, frozen=True, gc=False, tag="ROW"):
    """Place a gang in slices of a time-slice group. All gangs of the group have one such change, together.

    claims: where the gang starts or moves to; empty: it stays. node_set: number of the group, 0: a new one. rows: the
    slices in which the gang runs, from 0. quantum_seconds, level: the same in all changes of the group.
    """

    claims: tuple[Claim, ...] = ()
    level: SuspendLevel = SuspendLevel.NONE
    node_set: int = 0
    rows: tuple[int, ...] = ()
    quantum_seconds: float = 0.0


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
