"""Events, the only way in which state changes, and what a batch of them has changed.

The order of obligations after a batch: commit `state.take_changes()` and every `HistoryRow` in one transaction, then
let the rest out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import msgspec
from ganger.cluster.refusals import Refusal
from ganger.cluster.resources import STORED_NAMES, Claim, ConfigurationSet, LocalityLevel
from msgspec import Struct
from msgspec.structs import replace

from ganger_master.core.accounting import UserUsage
from ganger_master.core.answers import Answer
from ganger_master.core.commands import NO_MARKS, ClaimTurns, KeepPlace, Line, Marks, Observe, OpenSession, RecordedEnd
from ganger_master.core.gang_model import Gang, TimesliceGroup
from ganger_master.core.job_model import JobRecord, Request, SuspendLevel
from ganger_master.core.job_spec import JobSpec, Update
from ganger_master.core.node_model import AccessToken, Counters, Element, Node, Reservation
from ganger_master.core.plan_changes import NO_PURPOSE, CoresCurve, Purpose, TrialFinding


class Event(Struct, frozen=True, gc=False):
    """What all events have. `time`: Unix seconds; `cause`: the user or program behind the event."""

    time: float
    cause: str


# The events of a command, and its answer once they are durable.
Decision: TypeAlias = tuple[tuple[Event, ...], Answer]


class JobSubmitted(Event, frozen=True, gc=False):
    number: int
    uid: str
    user: str
    request_id: str
    spec: JobSpec


class ArraySubmitted(Event, frozen=True, gc=False):
    """An array was accepted: its members are the jobs of the numbers that follow; the first has the request id."""

    number: int
    uids: tuple[str, ...]
    user: str
    request_id: str
    specs: tuple[JobSpec, ...]


class ArrayCancelled(Event, frozen=True, gc=False):
    number: int
    reason: str


class RungReached(Event, frozen=True, gc=False):
    """A member's value at all rungs up to this amount of the resource that it had not come to before."""

    number: int
    value: float | None
    at: float


class JobCancelled(Event, frozen=True, gc=False):
    number: int
    reason: str


class JobUpdated(Event, frozen=True, gc=False):
    """A job gets a new spec. `update`: the update that was requested, under this id."""

    number: int
    spec: JobSpec
    update: Update
    request_id: str


class ArrayUpdated(Event, frozen=True, gc=False):
    """Members of an array get new specs, by number."""

    number: int
    specs: tuple[tuple[int, JobSpec], ...]
    update: Update
    request_id: str


class JobSuspended(Event, frozen=True, gc=False):
    number: int
    level: SuspendLevel
    by_plan: bool = False
    purpose: Purpose = NO_PURPOSE


class JobResumed(Event, frozen=True, gc=False):
    number: int
    purpose: Purpose = NO_PURPOSE


class GangApproved(Event, frozen=True, gc=False):
    """A gang for a PENDING job: in place if these are its parked pieces, else under a new epoch."""

    number: int
    claims: tuple[Claim, ...]
    level: LocalityLevel


class GangRefused(Event, frozen=True, gc=False):
    """Kept for `why`; changes nothing durable."""

    number: int
    refusals: tuple[Refusal, ...]
    turn: int
    turn_kept: bool
    # Of the view the refusals were found on: what changed since may help.
    view_version: int


class StartOffered(Event, frozen=True, gc=False):
    """A plan starts a job: its scheduler gets a lease with the plan's place as a suggestion. Nothing durable."""

    number: int
    claims: tuple[Claim, ...]


class GangReleased(Event, frozen=True, gc=False):
    number: int


class MoveBegun(Event, frozen=True, gc=False):
    number: int
    claims: tuple[Claim, ...]
    level: LocalityLevel
    purpose: Purpose = NO_PURPOSE


class ResizeBegun(Event, frozen=True, gc=False):
    """The whole placement of the world to come."""

    number: int
    claims: tuple[Claim, ...]
    level: LocalityLevel
    reason: str = ""
    purpose: Purpose = NO_PURPOSE


class SizeChosen(Event, frozen=True, gc=False):
    """With how many devices, or tasks by role, a job starts next."""

    number: int
    gpus: int
    tasks: tuple[int, ...] = ()


class CoresChanged(Event, frozen=True, gc=False):
    """New claims on the same nodes and devices, or the same ones for a re-pin."""

    number: int
    claims: tuple[Claim, ...]
    repin: bool
    reason: str = ""


class RowsChanged(Event, frozen=True, gc=False, rename=STORED_NAMES):
    """A time-slice group (`number`; zero: a new one) gets a slice matrix: the job numbers of each time slice."""

    number: int
    rows: tuple[tuple[int, ...], ...]
    quantum_s: float
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


class SessionOpened(Event, frozen=True, gc=False):
    request: OpenSession
    session: str


class NodeObserved(Event, frozen=True, gc=False):
    report: Observe


class NodeAnswered(Event, frozen=True, gc=False):
    node: str
    desired_version: int
    # Why the call could not be answered; empty: it was.
    problem: str = ""


class NodeMarked(Event, frozen=True, gc=False):
    """An operator's word: DRAIN, CORDON, UNCORDON or TEST."""

    node: str
    mark: str
    reason: str


class CopiesNoted(Event, frozen=True, gc=False):
    """A node's disk has these checkpoints, too: job and path of each."""

    node: str
    copies: tuple[tuple[int, str], ...]


class SlowNodeNoted(Event, frozen=True, gc=False):
    node: str
    reason: str


class NodesReserved(Event, frozen=True, gc=False):
    reservation: Reservation


class ReservationDeleted(Event, frozen=True, gc=False):
    name: str


class TokenChanged(Event, frozen=True, gc=False):
    """A token was made, or revoked."""

    token: AccessToken


class NodeLost(Event, frozen=True, gc=False):
    node: str
    reason: str


class NodeRemoved(Event, frozen=True, gc=False):
    node: str


class StoreOpened(Event, frozen=True, gc=False):
    """The database has the name `store`. `why` is set where it is an older copy; `marks`: how far it had come."""

    store: str
    why: str = ""
    marks: Marks = NO_MARKS


class EndsNoted(Event, frozen=True, gc=False):
    ends: Mapping[str, RecordedEnd]


class RestoreSettled(Event, frozen=True, gc=False):
    """A restore is settled with what the nodes have reported."""


class QuarantineEnded(Event, frozen=True, gc=False):
    uid: str
    epoch: int


class QuarantineAdopted(Event, frozen=True, gc=False):
    uid: str
    epoch: int


class TurnsClaimed(Event, frozen=True, gc=False):
    claim: ClaimTurns


class JobsRanked(Event, frozen=True, gc=False):
    """The planner ranked the waiting jobs. Volatile: it repeats the ranking."""

    line: Line


class PlacesKept(Event, frozen=True, gc=False):
    """The planner keeps places for pending jobs. Volatile: it repeats them."""

    kept_places: tuple[KeepPlace, ...]


class CoresMeasured(Event, frozen=True, gc=False):
    """The planner measured jobs with several amounts of cores or memory. Volatile: it repeats the curves."""

    curves: tuple[CoresCurve, ...]


class ChangeJudged(Event, frozen=True, gc=False):
    """A change was measured: for the history of its job."""

    finding: TrialFinding


class TimePassed(Event, frozen=True, gc=False):
    """Time has passed. `set_by`: seconds by which the clock was set. `newest_sent`: the newest lease that was sent;
    None: all were."""

    cause: str = "clock"
    set_by: float = 0.0
    stood_still: bool = False
    looks_again: bool = False
    newest_sent: int | None = None


class HistoryRow(Struct, frozen=True, gc=False):
    """One row of history, not truth. `subject` is "jobs/7" or "nodes/n1"; `kind` is lower_snake."""

    sequence: int
    time: float
    subject: str
    kind: str
    cause: str
    message: str = ""
    figures: Mapping[str, str] = msgspec.field(default_factory=dict)


class Effects(Struct, frozen=True, gc=False):
    """The effects of one batch; empty when nothing happened."""

    history: tuple[HistoryRow, ...] = ()
    # Jobs that changed in a way their watchers see.
    jobs: tuple[int, ...] = ()
    # Nodes whose wanted set changed: answer their held Reconcile with `state.desired.of(node)`.
    nodes: tuple[str, ...] = ()
    # Nodes whose rows in the view changed.
    rows: tuple[str, ...] = ()
    # Turns that were given: send them (`state.leases`) to the stream of their scheduler.
    turns: tuple[int, ...] = ()
    # Send `Tick` at this time, if nothing wakes the core before; replaces any earlier one. None: unchanged.
    wake_at: float | None = None


# Characters of a text that is shown to people.
TEXT_MOST: Final = 1_000


def cut(text: str, most: int = TEXT_MOST) -> str:
    """Return the text, or its beginning with a mark that there was more."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


ELEMENT_TYPES: Final[Mapping[str, type[Element]]] = {
    "configuration_set": ConfigurationSet,
    "node": Node,
    "job": JobRecord,
    "request": Request,
    "gang": Gang,
    "node_set": TimesliceGroup,
    "user_usage": UserUsage,
    "reservation": Reservation,
    "access_token": AccessToken,
    "counters": Counters,
}


class StoredChanges(Struct, frozen=True, gc=False):
    """Elements to insert or replace, and keys to remove: (kind, key)."""

    puts: Mapping[tuple[str, str], Element]
    removes: tuple[tuple[str, str], ...]

    def __bool__(self) -> bool:
        return bool(self.puts or self.removes)


class Unstored:
    """Elements and history that a store does not have yet. is_kept: False where only the decisions matter."""

    def __init__(self, is_kept: bool) -> None:
        self.is_kept = is_kept
        # In the order in which they happened.
        self.history: list[HistoryRow] = []
        self._puts: dict[tuple[str, str], Element] = {}
        self._removes: dict[tuple[str, str], None] = {}
        self._counters_taken: Counters | None = None

    def put(self, key: tuple[str, str], element: Element) -> None:
        if self.is_kept:
            self._puts[key] = element
            self._removes.pop(key, None)

    def remove(self, key: tuple[str, str]) -> None:
        if self.is_kept:
            self._puts.pop(key, None)
            self._removes[key] = None

    def note(self, row: HistoryRow) -> None:
        self.history.append(row)

    def take_history(self) -> tuple[HistoryRow, ...]:
        history, self.history = tuple(self.history), []
        return history

    def take(self, counters: Counters) -> StoredChanges:
        """Return what became different since the last call. The caller stores it before any effect leaves."""
        if counters != self._counters_taken:
            self._counters_taken = replace(counters)
            self.put(("counters", ""), self._counters_taken)
        changes = StoredChanges(self._puts, tuple(self._removes))
        self._puts, self._removes = {}, {}
        return changes


@dataclass(slots=True)
class Dirty:
    """Elements touched: `jobs`, `rows`, `arenas`, `sets`, `arrays`, `ended` by the present event, others by the whole
    batch."""

    jobs: dict[int, None] = field(default_factory=dict)
    rows: dict[str, None] = field(default_factory=dict)
    arenas: dict[int, None] = field(default_factory=dict)
    sets: dict[int, None] = field(default_factory=dict)
    # Numbers of arrays of which a member may have ended.
    arrays: dict[int, None] = field(default_factory=dict)
    # Numbers of jobs that have ended, and of their arrays, while any job waits for the end of another.
    ended: dict[int, None] = field(default_factory=dict)
    # Numbers of jobs that may use other GPUs than before.
    usage: dict[int, None] = field(default_factory=dict)
    # Nodes whose desired state may have changed.
    wants: dict[str, None] = field(default_factory=dict)
    news: dict[int, None] = field(default_factory=dict)
    # Nodes whose rows differ from before.
    shown: dict[str, None] = field(default_factory=dict)
