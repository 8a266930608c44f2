"""Events: the only way in which state changes. `apply(state, event)` draws all consequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from ganger.cluster.refusals import Refusal
from ganger.cluster.resources import Claim, LocalityLevel
from msgspec import Struct

from ganger_master.core.commands import NO_MARKS, ClaimTurns, Line, Marks, Observe, OpenSession, Promise, RecordedEnd
from ganger_master.core.job_model import JobSpec, SuspendLevel, Update
from ganger_master.core.plan_changes import NO_PURPOSE, Purpose, TrialFinding


class JobSubmitted(Struct, frozen=True, gc=False):
    time: float
    cause: str
    number: int
    uid: str
    user: str
    request_id: str
    spec: JobSpec


class ArraySubmitted(Struct, frozen=True, gc=False):
    """An array was accepted: its members are the jobs of the numbers that follow; the first has the request id."""

    time: float
    cause: str
    number: int
    uids: tuple[str, ...]
    user: str
    request_id: str
    specs: tuple[JobSpec, ...]


class ArrayCancelled(Struct, frozen=True, gc=False):
    time: float
    cause: str
    number: int
    reason: str


class RungReached(Struct, frozen=True, gc=False):
    """A member's value at all rungs up to this amount of the resource that it had not come to before."""

    time: float
    cause: str
    number: int
    value: float | None
    at: float


class JobCancelled(Struct, frozen=True, gc=False):
    time: float
    cause: str
    number: int
    reason: str


class JobUpdated(Struct, frozen=True, gc=False):
    """A job gets a new spec. `update`: the update that was requested, under this id."""

    time: float
    cause: str
    number: int
    spec: JobSpec
    update: Update
    request_id: str


class ArrayUpdated(Struct, frozen=True, gc=False):
    """Members of an array get new specs, by number."""

    time: float
    cause: str
    number: int
    specs: tuple[tuple[int, JobSpec], ...]
    update: Update
    request_id: str


class JobSuspended(Struct, frozen=True, gc=False):
    time: float
    cause: str
    number: int
    level: SuspendLevel
    by_plan: bool = False
    purpose: Purpose = NO_PURPOSE


class JobResumed(Struct, frozen=True, gc=False):
    time: float
    cause: str
    number: int
    purpose: Purpose = NO_PURPOSE


class GangApproved(Struct, frozen=True, gc=False):
    """A gang for a PENDING job: in place if these are its parked pieces, else under a new epoch."""

    time: float
    cause: str
    number: int
    claims: tuple[Claim, ...]
    level: LocalityLevel


class GangRefused(Struct, frozen=True, gc=False):
    """Kept for `why`; changes nothing durable."""

    time: float
    cause: str
    number: int
    refusals: tuple[Refusal, ...]
    turn: int
    turn_kept: bool
    # Of the view the refusals were found on: what changed since may help.
    view_version: int


class StartOffered(Struct, frozen=True, gc=False):
    """A plan starts a job that has a scheduler of its own, which gets a lease with the plan's place as a suggestion;
    changes nothing durable."""

    time: float
    cause: str
    number: int
    claims: tuple[Claim, ...]


class GangReleased(Struct, frozen=True, gc=False):
    time: float
    cause: str
    number: int


class MoveBegun(Struct, frozen=True, gc=False):
    time: float
    cause: str
    number: int
    claims: tuple[Claim, ...]
    level: LocalityLevel
    purpose: Purpose = NO_PURPOSE


class ResizeBegun(Struct, frozen=True, gc=False):
    """The whole placement of the world to come."""

    time: float
    cause: str
    number: int
    claims: tuple[Claim, ...]
    level: LocalityLevel
    reason: str = ""
    purpose: Purpose = NO_PURPOSE


class CoresChanged(Struct, frozen=True, gc=False):
    """New claims on the same nodes and devices, or the same ones for a re-pin."""

    time: float
    cause: str
    number: int
    claims: tuple[Claim, ...]
    repin: bool
    reason: str = ""


class RowsChanged(Struct, frozen=True, gc=False):
    """A time-slice group (`number`; zero: a new one) gets a slice matrix: the job numbers of each time slice."""

    time: float
    cause: str
    number: int
    rows: tuple[tuple[int, ...], ...]
    quantum_seconds: float
    level: SuspendLevel
    starts: Mapping[int, tuple[tuple[Claim, ...], LocalityLevel]]
    # Jobs that a plan had parked there, and that resume in their slices.
    resumes: tuple[int, ...] = ()
    # What the set holds beyond what its gangs held before.
    takes: tuple[Claim, ...] = ()
    reason: str = ""
    # Jobs that move to the devices of their slices.
    moves: Mapping[int, tuple[tuple[Claim, ...], LocalityLevel, Purpose]] = {}
    # The slices that moving jobs of this group have where they are, until they are parked.
    stays: Mapping[int, tuple[int, ...]] = {}


class SessionOpened(Struct, frozen=True, gc=False):
    time: float
    cause: str
    request: OpenSession
    session: str


class NodeObserved(Struct, frozen=True, gc=False):
    time: float
    cause: str
    report: Observe


class NodeAnswered(Struct, frozen=True, gc=False):
    time: float
    cause: str
    node: str
    desired_version: int
    # Why the call could not be answered; empty: it was.
    problem: str = ""


class NodeMarked(Struct, frozen=True, gc=False):
    """An operator's word: DRAIN, CORDON or UNCORDON."""

    time: float
    cause: str
    node: str
    mark: str
    reason: str


class NodeLost(Struct, frozen=True, gc=False):
    time: float
    cause: str
    node: str
    reason: str


class NodeRemoved(Struct, frozen=True, gc=False):
    time: float
    cause: str
    node: str


class StoreOpened(Struct, frozen=True, gc=False):
    """The database has the name `store`. `why` is set where it is an older copy; `marks`: how far it had come."""

    time: float
    cause: str
    store: str
    why: str = ""
    marks: Marks = NO_MARKS


class EndsNoted(Struct, frozen=True, gc=False):
    time: float
    cause: str
    ends: Mapping[str, RecordedEnd]


class RestoreSettled(Struct, frozen=True, gc=False):
    """A restore is settled with what the nodes have reported."""

    time: float
    cause: str


class QuarantineEnded(Struct, frozen=True, gc=False):
    time: float
    cause: str
    uid: str
    epoch: int


class QuarantineAdopted(Struct, frozen=True, gc=False):
    time: float
    cause: str
    uid: str
    epoch: int


class TurnsClaimed(Struct, frozen=True, gc=False):
    time: float
    cause: str
    claim: ClaimTurns


class JobsRanked(Struct, frozen=True, gc=False):
    """The planner ranked the waiting jobs. Volatile: it repeats the ranking."""

    time: float
    cause: str
    line: Line


class PlacesPromised(Struct, frozen=True, gc=False):
    """The planner reserved places. Volatile: it repeats them."""

    time: float
    cause: str
    promises: tuple[Promise, ...]


class ChangeJudged(Struct, frozen=True, gc=False):
    """A change was measured: for the history of its job."""

    time: float
    cause: str
    finding: TrialFinding


class TimePassed(Struct, frozen=True, gc=False):
    """Time has passed. `set_by`: seconds by which the clock was set, forward or back. `told`: the newest lease that was
    sent; None: all were."""

    time: float
    cause: str = "clock"
    set_by: float = 0.0
    stood_still: bool = False
    looks_again: bool = False
    told: int | None = None


Event: TypeAlias = (
    JobSubmitted
    | ArraySubmitted
    | ArrayCancelled
    | RungReached
    | JobCancelled
    | JobUpdated
    | ArrayUpdated
    | JobSuspended
    | JobResumed
    | GangApproved
    | GangRefused
    | StartOffered
    | GangReleased
    | MoveBegun
    | ResizeBegun
    | CoresChanged
    | RowsChanged
    | SessionOpened
    | NodeObserved
    | NodeAnswered
    | NodeMarked
    | NodeLost
    | NodeRemoved
    | StoreOpened
    | EndsNoted
    | RestoreSettled
    | QuarantineEnded
    | QuarantineAdopted
    | TurnsClaimed
    | JobsRanked
    | PlacesPromised
    | ChangeJudged
    | TimePassed
)
