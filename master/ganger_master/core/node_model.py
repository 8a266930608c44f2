"""Nodes, counters, and the union of all elements of the state. Units as in `job_model`."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, StrEnum
from typing import TypeAlias

from ganger.cluster.resources import ConfigurationSet
from msgspec import Struct, field

from ganger_master.core.accounting import UserUsage
from ganger_master.core.gang_model import Gang, ObservedPhase, Outcome, StoredOrder, TimesliceGroup
from ganger_master.core.job_model import JobRecord, Request, SuspendLevel


class NodeState(StrEnum):
    UNKNOWN = "UNKNOWN"
    READY = "READY"
    SILENT = "SILENT"
    CORDONED = "CORDONED"
    DRAINING = "DRAINING"
    LOST = "LOST"


class Stray(Struct, frozen=True, gc=False, omit_defaults=True):
    """A gang reported by a node that the master does not want there.

    `quarantined` ones (unknown job, epoch from the future) are left alone and hold their devices until they end or an
    operator decides; others are older epochs and are stopped. What it was found as stands until it is gone.
    """

    job: int
    uid: str
    epoch: int
    device_mask: int
    master_sequence: int
    quarantined: bool
    note: str = ""
    phase: ObservedPhase = ObservedPhase.NONE
    # Once the daemon has sent it.
    newest_order: StoredOrder | None = field(default=None, name="told")
    level: SuspendLevel = SuspendLevel.NONE
    stop_step: int = 0
    residue_bytes: tuple[int, ...] = ()
    outcome: Outcome = Outcome()
    # An operator has ordered its end.
    is_ordered: bool = False
    kept_memory_bytes: int = 0

    @property
    def holds_back(self) -> bool:
        """True if its job must not start beside it."""
        return self.quarantined or self.is_ordered


class ListChange(IntEnum):
    """How a list is changed: by another one, by more, or by less. The numbers are those of the wire."""

    REPLACE = 0
    ADD = 1
    REMOVE = 2


class Reservation(Struct, frozen=True, gc=False, omit_defaults=True):
    """Nodes that are kept for some users, or for maintenance, from `start` to `end` (Unix seconds). Without `users` for
    maintenance. `lead_s`: how long before the start the nodes are emptied. `user`: the operator that made it."""

    name: str
    nodes: tuple[str, ...]
    start: float
    end: float
    users: tuple[str, ...] = ()
    reason: str = ""
    lead_s: float = 600.0
    user: str = ""


class AccessToken(Struct, frozen=True, gc=False, omit_defaults=True):
    """A token of a user. `name`: its public part. `digest`: SHA-256 of the text, in hexadecimal digits. Times are Unix
    seconds; `revoke_time` is zero unless it is revoked. `creator`: the operator that made it."""

    name: str
    user: str
    digest: str
    create_time: float
    expiry: float
    creator: str = ""
    revoke_time: float = 0.0


class NodeTest(Struct, frozen=True, gc=False, omit_defaults=True):
    """A test that a node has to pass before it takes gangs. `reason`: the fault that has gone, or the operator's order.
    `devices`: mask of those that were at fault. `job`: that of the test, zero before it starts. `failure`: why it has
    failed; an operator returns the node then, or orders another test."""

    reason: str
    devices: int = 0
    job: int = 0
    failure: str = ""

    @property
    def text(self) -> str:
        """ "tested by jobs/7 (XID 79 has gone)"."""
        if self.failure:
            return f"its test failed (jobs/{self.job}): {self.failure}"
        return f"tested by jobs/{self.job} ({self.reason})" if self.job else f"to be tested ({self.reason})"


class Node(Struct, frozen=True, gc=False, omit_defaults=True):
    name: str
    machine_uuid: str
    configuration_set: str
    rack: str = ""
    fabric: str = ""
    peer_address: str = ""
    stream_address: str = ""
    capabilities: Mapping[str, str] = field(default_factory=dict)
    version: str = ""
    boot_id: str = ""
    session: str = ""
    # The present session has sent its complete observed set.
    heard: bool = False
    # Its daemon has not called for longer than one without news does.
    silent: bool = False
    # Why calls of its daemon cannot be answered; empty when they can.
    unanswerable: str = ""
    # Lost until it opens a session again.
    lost: bool = False
    cordoned: bool = False
    draining: bool = False
    state_reason: str = ""
    device_faults: Mapping[int, str] = field(default_factory=dict)
    # Why the node itself is out of service, by source, as its daemon reports it.
    faults: Mapping[str, str] = field(default_factory=dict)
    storage_proved: bool = False
    # Of the newest report that was applied.
    observation: int = 0
    applied_version: int = 0
    strays: tuple[Stray, ...] = ()
    # Ended gangs in the newest report whose outcome is kept: the daemon may forget them.
    acknowledged: tuple[int, ...] = ()
    # Gangs in a row that could not be launched here, since its session began or an operator uncordoned it, and the
    # message of the last failure.
    launch_failures: int = 0
    launch_failure: str = ""
    # Jobs that could not be launched here meanwhile, and then started on other nodes: the fault is not theirs.
    started_elsewhere: tuple[int, ...] = ()
    create_time: float = 0.0
    # The reservation that it is emptied for, or that lasts; in that case its users, none for maintenance.
    reservation: str = ""
    reserved_for: tuple[str, ...] = ()
    # Devices in service that are slower than they should be, and why: for people.
    device_warnings: Mapping[int, str] = field(default_factory=dict)
    test: NodeTest | None = None
    # Jobs step more slowly here than on other nodes: by how much.
    slow: str = ""

    @property
    def state(self) -> NodeState:
        if self.lost:
            return NodeState.LOST
        if not self.heard:
            return NodeState.UNKNOWN
        if self.silent or self.unanswerable:
            return NodeState.SILENT
        if self.is_emptied:
            return NodeState.DRAINING
        return NodeState.CORDONED if self.cordoned or self.test is not None else NodeState.READY

    @property
    def is_emptied(self) -> bool:
        """Return whether its jobs are to leave it: by an operator's order, for a fault of its own or a reservation."""
        return self.draining or bool(self.faults) or (bool(self.reservation) and not self.reserved_for)

    @property
    def takes_gangs(self) -> bool:
        is_reached = self.heard and not (self.lost or self.silent or self.unanswerable)
        return is_reached and not (self.is_emptied or self.cordoned or self.test is not None)

    @property
    def is_choosy(self) -> bool:
        """Return whether there may be jobs that it cannot take, whatever is free."""
        is_choosy = self.capabilities.get("switch_user", "yes") in ("no", "accounts")
        is_closed_to_some = not self.storage_proved or is_choosy
        return is_closed_to_some or self.launch_failures > 0 or bool(self.reserved_for)


class PendingRestore(Struct, frozen=True, gc=False, omit_defaults=True):
    """The database is an older copy of what this cluster had. Until all nodes have reported what they run, nothing is
    started, stopped or changed. `why`: what revealed it, as a text for people."""

    since: float
    why: str


class Counters(Struct):
    """The next ids and versions, none of which is given twice. An epoch alone names a gang: it is unique.

    The one element that its state changes in place, because nearly every event counts something: what leaves the state
    is a copy.
    """

    next_job: int = 1
    next_epoch: int = 1
    next_event: int = 1
    next_session: int = 1
    next_set: int = 1
    view_version: int = 0
    # Of the newest set of gangs that any node is to want.
    desired_version: int = 0
    approved: int = 0
    # Gangs are packed, not spread apart: what the load made of it last.
    packs: bool = False
    storage_token: str = ""
    # Name of this database and of all its copies. Daemons and the file beside it record its next ids under this name.
    store: str = ""
    # Epochs [first, end) that were given after this copy was made, or by another master: ascending.
    skipped_epochs: tuple[tuple[int, int], ...] = ()
    # The same of numbers of jobs.
    skipped_jobs: tuple[tuple[int, int], ...] = ()
    restoring: PendingRestore | None = None


Element: TypeAlias = (
    JobRecord
    | Request
    | Gang
    | Node
    | TimesliceGroup
    | ConfigurationSet
    | UserUsage
    | Reservation
    | AccessToken
    | Counters
)
