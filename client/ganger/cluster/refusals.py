"""Why something cannot be: the one vocabulary of refusals.

A *blocker* stands in the way until the cluster changes, a *race* may go away at the next try, a *mistake* is the
caller's and will never work.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, Flag, auto
from functools import lru_cache
from typing import Final

from msgspec import Struct, field


class RefusalKind(Enum):
    BLOCKER = "blocker"
    RACE = "race"
    MISTAKE = "mistake"


class Effect(Flag):
    """What a reason means for the job that is refused."""

    NONE = 0
    # Other gangs give up devices, cores or memory, or a node comes back: the job keeps its place in the queue.
    WAITS_FOR_CAPACITY = auto()
    # No other job of the queue can end it: jobs behind this one may start. A strict queue waits for nodes all the same.
    PASSED_OVER = auto()
    # An operator or the user has to act: it is named before reasons that time may end.
    NAMED_FIRST = auto()
    # Another node may do: the job's scheduler leaves this one out.
    EXCLUDES_NODE = auto()


_CAPACITY = Effect.WAITS_FOR_CAPACITY
_OF_NODE = Effect.PASSED_OVER | Effect.NAMED_FIRST | Effect.EXCLUDES_NODE
_OF_PARTITION = Effect.PASSED_OVER | Effect.NAMED_FIRST
_BLOCKER, _RACE, _MISTAKE = RefusalKind.BLOCKER, RefusalKind.RACE, RefusalKind.MISTAKE


class Reason(Enum):
    """Why something is refused. All consequences of a reason are in its row.

    The value is the name, as refusals are stored under. `meaning`: one sentence for people. `effects`: what it means
    for the job, read as attributes. `excluded_s`: seconds for which the planner leaves the node out for the job.
    """

    kind: RefusalKind
    meaning: str
    waits_for_capacity: bool
    is_passed_over: bool
    is_named_first: bool
    excludes_node: bool
    excluded_s: float

    def __new__(
        cls, name: str, kind: RefusalKind, meaning: str, effects: Effect = Effect.NONE, excluded_s: float = 0.0
    ) -> Reason:
        reason = object.__new__(cls)
        reason._value_, reason.kind, reason.meaning = name, kind, meaning
        # Plain attributes: a member test of `Flag` costs ten times as much.
        reason.waits_for_capacity = bool(effects & Effect.WAITS_FOR_CAPACITY)
        reason.is_passed_over = bool(effects & Effect.PASSED_OVER)
        reason.is_named_first = bool(effects & Effect.NAMED_FIRST)
        reason.excludes_node = bool(effects & Effect.EXCLUDES_NODE)
        reason.excluded_s = excluded_s
        return reason

    # Hashed often; that of `Enum` is a call of Python code.
    __hash__ = object.__hash__

    GPUS = "GPUS", _BLOCKER, "not enough free devices", _CAPACITY
    CORES = "CORES", _BLOCKER, "not enough free cores beside the devices", _CAPACITY
    MEMORY = "MEMORY", _BLOCKER, "not enough free host memory", _CAPACITY
    DEVICE_MEMORY = "DEVICE_MEMORY", _BLOCKER, "not enough memory left on the devices", _CAPACITY
    DISK = "DISK", _BLOCKER, "not enough free disk bandwidth", _CAPACITY
    NETWORK = "NETWORK", _BLOCKER, "not enough free network bandwidth", _CAPACITY
    LOCALITY = "LOCALITY", _BLOCKER, "free devices lie further apart than the job accepts", _CAPACITY
    DEVICE_TYPE = (
        "DEVICE_TYPE",
        _BLOCKER,
        "no node with this device type is available",
        Effect.PASSED_OVER | Effect.NAMED_FIRST,
    )
    NODE_UNAVAILABLE = (
        "NODE_UNAVAILABLE",
        _BLOCKER,
        "the node takes no gangs: unknown, silent, cordoned or lost",
        Effect.WAITS_FOR_CAPACITY | Effect.PASSED_OVER | Effect.EXCLUDES_NODE,
    )
    NODE_SILENT = "NODE_SILENT", _BLOCKER, "the node's daemon does not call, so no order reaches it"
    PROTECTED = "PROTECTED", _BLOCKER, "the queue is strict, and another job goes first", Effect.EXCLUDES_NODE
    KEPT = "KEPT", _BLOCKER, "what it needs of the node is kept for a job that goes first", Effect.EXCLUDES_NODE
    RANKED = "RANKED", _BLOCKER, "the planner lets others have the devices first"
    QUOTA = "QUOTA", _BLOCKER, "the user's share is used up", Effect.PASSED_OVER | Effect.NAMED_FIRST
    NO_SUCH_PARTITION = "NO_SUCH_PARTITION", _BLOCKER, "the cluster has no partition of this name", _OF_PARTITION
    PARTITION_CLOSED = "PARTITION_CLOSED", _BLOCKER, "the user may not use the partition", _OF_PARTITION
    PARTITION_TIME = "PARTITION_TIME", _BLOCKER, "the job may run for longer than the partition allows", _OF_PARTITION
    PARTITION_LIMIT = "PARTITION_LIMIT", _BLOCKER, "the partition allows no more GPUs", _OF_PARTITION
    ARRAY_LIMIT = "ARRAY_LIMIT", _BLOCKER, "as many members of its array as may run at once run or are about to"
    DEPENDENCY = "DEPENDENCY", _BLOCKER, "it starts after other jobs have ended"
    FAILING = "FAILING", _BLOCKER, "its attempts fail one after the other, so it is tried again later"
    STORAGE_NOT_SHARED = (
        "STORAGE_NOT_SHARED",
        _BLOCKER,
        "the checkpoint lies on storage the node does not see",
        _OF_NODE,
        900.0,
    )
    CHECKPOINT_AWAY = (
        "CHECKPOINT_AWAY",
        _BLOCKER,
        "the nodes whose disks have its checkpoint cannot be reached",
        Effect.PASSED_OVER | Effect.NAMED_FIRST,
    )
    CANNOT_SWITCH_USER = "CANNOT_SWITCH_USER", _BLOCKER, "the daemon cannot become the job's user", _OF_NODE, 900.0
    NODE_RESERVED = "NODE_RESERVED", _BLOCKER, "the node is reserved for other users", _OF_NODE
    CANNOT_RESTORE = "CANNOT_RESTORE", _BLOCKER, "the node cannot restore the job's process image", _OF_NODE, 900.0
    QUARANTINED = "QUARANTINED", _BLOCKER, "a gang of it that the master did not start is there already"
    LAUNCH_FAILED = (
        "LAUNCH_FAILED",
        _BLOCKER,
        "the job could not be launched there, and no other job has been since",
        Effect.NAMED_FIRST | Effect.EXCLUDES_NODE,
        30.0,
    )

    # What a program of a newer version refuses for; its sentence is in the detail. Nothing here refuses for it.
    UNKNOWN = "UNKNOWN", _BLOCKER, "a reason that this version does not have", Effect.EXCLUDES_NODE

    STALE_REVISION = "STALE_REVISION", _RACE, "the job has changed since the request was computed"
    OUT_OF_TURN = "OUT_OF_TURN", _RACE, "the placement lease has expired or belongs to another job"
    NODE_GONE = "NODE_GONE", _RACE, "the node left the view"

    GANG_IMPOSSIBLE = "GANG_IMPOSSIBLE", _MISTAKE, "no cluster of this make could ever hold the gang"
    NOT_IN_PARTITION = (
        "NOT_IN_PARTITION",
        _MISTAKE,
        "the node is not in the job's partition",
        Effect.EXCLUDES_NODE,
        900.0,
    )
    CLAIM_MISMATCH = "CLAIM_MISMATCH", _MISTAKE, "the claims do not add up to the job's tasks"
    NOT_SUPPORTED = "NOT_SUPPORTED", _MISTAKE, "not built yet"
    WRONG_STATE = "WRONG_STATE", _MISTAKE, "the job's state does not allow it"
    QUANTUM = "QUANTUM", _MISTAKE, "the quantum is shorter than a slice switch allows"
    LEVEL_UNAVAILABLE = "LEVEL_UNAVAILABLE", _MISTAKE, "the job cannot be suspended at this level"


class Refusal(Struct, frozen=True, gc=False):
    """One reason with its figures: `Refusal(Reason.GPUS, {"needed": 8, "largest_free": 4}, node="n1")`."""

    reason: Reason
    figures: Mapping[str, int] = field(default_factory=dict)
    node: str = ""
    job: str = ""
    detail: str = ""

    @property
    def message(self) -> str:
        """One sentence for a person: the detail or meaning, the figures, the node and job it is about."""
        parts = [self.detail or self.reason.meaning]
        if figures := figures_in_words(self.figures):
            parts[0] += f" ({figures})"
        if self.node:
            parts.append(f"on {self.node}")
        if self.job:
            parts.append(f"because of {self.job}")
        return ", ".join(parts)


# How figures are put, by name without unit. Empty: the detail has it in words, or it is a number for programs.
_WORDS: Final[Mapping[str, str]] = {
    "needed": "{} needed",
    "free": "{} free",
    "largest_free": "{} free together",
    "largest_bytes": "{} at most",
    "draining": "{} on draining nodes",
    "devices_with_room": "{} with room",
    "conflicting": "{} in use",
    "available": "{} nodes available",
    "nodes": "{} in all",
    "claimed": "{} claimed",
    "gpus_min": "at least {}",
    "gpus_max": "at most {}",
    "gpus_per_task": "{} for each task",
    "global_batch": "a global batch of {}",
    "first_rank": "that one has place {}",
    "rank": "this one place {}",
    "socket": "socket {}",
    "revision": "revision {}",
    "given": "revision {} given",
    **dict.fromkeys(("held", "largest", "limit", "limit_seconds", "level", "widest"), ""),
}


def figures_in_words(figures: Mapping[str, int]) -> str:
    """Return figures as a person reads them, what is needed first: "8 needed, 4 free", "1.5G needed", "0.5 cores
    free"."""
    found = []
    for name in sorted(figures, key=_rank):
        base = _without_unit(name)
        # Where all that is free is together, one figure tells both.
        is_told = base == "largest_free" and figures.get(name.removeprefix("largest_")) == figures[name]
        words = "" if is_told else _WORDS.get(name, _WORDS.get(base, "{} " + base.replace("_", " ")))
        if words:
            found.append(words.format(_amount(name, figures[name])))
    return ", ".join(found)


_UNITS: Final = ("_bytes", "_mb_per_s", "_millicores")
_ORDER: Final = {name: at for at, name in enumerate(_WORDS)}


@lru_cache(1 << 8)
def _rank(name: str) -> tuple[int, str]:
    return _ORDER.get(_without_unit(name), len(_ORDER)), name


@lru_cache(1 << 8)
def _without_unit(name: str) -> str:
    return next((name.removesuffix(unit) for unit in _UNITS if name.endswith(unit)), name)


def _amount(name: str, value: int) -> str:
    if name.endswith("_bytes"):
        power = max(0, min(4, (abs(value).bit_length() - 1) // 10))
        return f"{value / (1 << 10 * power):.5g}{'BKMGT'[power]}"
    if name.endswith("_mb_per_s"):
        return f"{value} MB/s"
    return f"{value / 1_000:.5g} cores" if name.endswith("_millicores") else str(value)
