"""What a daemon finds out about a gang's part on its node: its phase, its outcome, and checkpoints on storage."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


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
