"""What happened: the only way state changes. `apply(state, event)` draws all consequences.

Every event carries its time and its cause ("user:ann", "scheduler:default", "planner", "daemon:n1", "clock"), so the
same events give the same state, always.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ganger.resources.reasons import Refusal

from ganger_master.core.commands import ClaimTurns, Observe, OpenSession
from ganger_master.core.model import Claim, JobSpec, Level, SuspendLevel


@dataclass(frozen=True, slots=True)
class JobSubmitted:
    time: float
    cause: str
    number: int
    uid: str
    user: str
    request_id: str
    spec: JobSpec


@dataclass(frozen=True, slots=True)
class JobCancelled:
    time: float
    cause: str
    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class JobSuspended:
    time: float
    cause: str
    number: int
    level: SuspendLevel
    by_plan: bool = False


@dataclass(frozen=True, slots=True)
class JobResumed:
    time: float
    cause: str
    number: int


@dataclass(frozen=True, slots=True)
class GangApproved:
    """A gang for a PENDING job: in place if these are its parked pieces, else under a new epoch."""

    time: float
    cause: str
    number: int
    claims: tuple[Claim, ...]
    level: Level


@dataclass(frozen=True, slots=True)
class GangRefused:
    """Kept for `why`; changes nothing durable."""

    time: float
    cause: str
    number: int
    refusals: tuple[Refusal, ...]
    turn: int
    turn_kept: bool
    # Of the view the refusals were found on: what changed since may help.
    view_version: int


@dataclass(frozen=True, slots=True)
class GangReleased:
    time: float
    cause: str
    number: int


@dataclass(frozen=True, slots=True)
class MoveBegun:
    time: float
    cause: str
    number: int
    claims: tuple[Claim, ...]
    level: Level


@dataclass(frozen=True, slots=True)
class CoresChanged:
    """New claims on the same nodes and devices, or the same ones for a re-pin."""

    time: float
    cause: str
    number: int
    claims: tuple[Claim, ...]
    repin: bool


@dataclass(frozen=True, slots=True)
class SessionOpened:
    time: float
    cause: str
    request: OpenSession
    session: str


@dataclass(frozen=True, slots=True)
class NodeObserved:
    time: float
    cause: str
    report: Observe


@dataclass(frozen=True, slots=True)
class NodeAnswered:
    time: float
    cause: str
    node: str
    desired_version: int


@dataclass(frozen=True, slots=True)
class NodeMarked:
    """An operator's word: DRAIN, CORDON or UNCORDON."""

    time: float
    cause: str
    node: str
    mark: str
    reason: str


@dataclass(frozen=True, slots=True)
class NodeLost:
    time: float
    cause: str
    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class TurnsClaimed:
    time: float
    cause: str
    claim: ClaimTurns


@dataclass(frozen=True, slots=True)
class TimePassed:
    time: float
    cause: str = "clock"


Event: TypeAlias = (
    JobSubmitted
    | JobCancelled
    | JobSuspended
    | JobResumed
    | GangApproved
    | GangRefused
    | GangReleased
    | MoveBegun
    | CoresChanged
    | SessionOpened
    | NodeObserved
    | NodeAnswered
    | NodeMarked
    | NodeLost
    | TurnsClaimed
    | TimePassed
)
