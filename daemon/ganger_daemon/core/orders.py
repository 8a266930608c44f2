"""Orders for gangs and their ranking, as pure values of the messages in `agent.proto`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum


@dataclass(frozen=True, slots=True, order=True)
class OrderKey:
    """Rank of an order, compared field by field; the highest received is obeyed."""

    epoch: int = 0
    master_sequence: int = 0
    set_epoch: int = 0
    local_sequence: int = 0

    @property
    def number(self) -> int:
        """The order's number in the control pages of its epoch: as the keys rise, so do their numbers. Room for four
        million orders of a master, 4,095 leaders of a node set and 268 million switches of each."""
        return self.master_sequence << 40 | self.set_epoch << 28 | self.local_sequence

    @property
    def is_by_rotation(self) -> bool:
        """Whether the newest part of the order is a slice switch."""
        return self.set_epoch > 0


class OrderIntent(IntEnum):
    RUN = 1
    PREPARE = 2
    PARK = 3
    HAND_OVER = 4
    STOP = 5


class ParkLevel(IntEnum):
    """How much a parked gang gives up; NONE with intents that do not park."""

    NONE = 0
    PAUSE = 1
    OFFLOAD = 2
    CHECKPOINT = 3


class PartPhase(IntEnum):
    STARTING = 1
    PREPARED = 2
    READY = 3
    RUNNING = 4
    STOPPING = 5
    PARKED = 6
    ENDED = 7


class PartOutcomeKind(IntEnum):
    DONE = 1
    YIELDED = 2
    FAILED = 3
    OUT_OF_MEMORY = 4
    STOPPED = 5
    UNKNOWN = 6
    LAUNCH_FAILED = 7
    FENCED = 8
    ESCALATED = 9
    STATE_UNREADABLE = 10
    STATE_OUTDATED = 11


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A complete checkpoint on storage; `path` is relative to the job's directory."""

    step: int
    epoch: int
    path: str
    size_bytes: int = 0
    time_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PartOutcome:
    kind: PartOutcomeKind
    exit_code: int = 0
    rank: int = 0
    message: str = ""
    # The newest ones, where it could not start from the one that was named.
    found: tuple[FoundCheckpoint, ...] = ()


@dataclass(frozen=True, slots=True)
class DesiredOrder:
    """Order for one gang on this node."""

    job_uid: str
    order: OrderKey
    intent: OrderIntent
    level: ParkLevel = ParkLevel.NONE
    stop_sequence: int = 0
    grace_seconds: float = 10.0
    checkpoint_first: bool = False
    moves_in: bool = False  # its state comes from an older epoch's arenas

    @property
    def epoch(self) -> int:
        return self.order.epoch

    @property
    def ends_at_once(self) -> bool:
        """Whether the gang is stale: its job may run elsewhere by now, so no instruction of it may run any more."""
        return self.intent is OrderIntent.STOP and not self.checkpoint_first and self.grace_seconds <= 0


def hastened(wanted: DesiredOrder, is_stale: bool) -> DesiredOrder:
    """Return the order without grace if it stops a stale gang; else unchanged."""
    if wanted.intent is not OrderIntent.STOP or not is_stale:
        return wanted
    return replace(wanted, grace_seconds=0.0, checkpoint_first=False, stop_sequence=0)
