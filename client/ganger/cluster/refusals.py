"""Why something cannot be: the one vocabulary of refusals.

A *blocker* stands in the way until the cluster changes, a *race* may go away at the next try, a *mistake* is the
caller's and will never work.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from msgspec import Struct, field


class RefusalKind(Enum):
    BLOCKER = "blocker"
    RACE = "race"
    MISTAKE = "mistake"


class Reason(Enum):
    """The value is the name, as refusals are stored under; `meaning` is one sentence for the documentation."""

    kind: RefusalKind
    meaning: str

    def __new__(cls, name: str, kind: RefusalKind, meaning: str) -> Reason:
        reason = object.__new__(cls)
        reason._value_, reason.kind, reason.meaning = name, kind, meaning
        return reason

    # Asked for all the time, and that of `Enum` is a call of Python's.
    __hash__ = object.__hash__

    GPUS = "GPUS", RefusalKind.BLOCKER, "not enough free devices"
    CORES = "CORES", RefusalKind.BLOCKER, "not enough free cores beside the devices"
    MEMORY = "MEMORY", RefusalKind.BLOCKER, "not enough free host memory"
    DEVICE_MEMORY = "DEVICE_MEMORY", RefusalKind.BLOCKER, "not enough memory left on the devices"
    LOCALITY = "LOCALITY", RefusalKind.BLOCKER, "free devices lie further apart than the job accepts"
    DEVICE_TYPE = "DEVICE_TYPE", RefusalKind.BLOCKER, "no node with this device type is available"
    NODE_UNAVAILABLE = (
        "NODE_UNAVAILABLE",
        RefusalKind.BLOCKER,
        "the node takes no gangs: unknown, silent, cordoned or lost",
    )
    NODE_SILENT = "NODE_SILENT", RefusalKind.BLOCKER, "the node's daemon does not call, so no order reaches it"
    PROTECTED = "PROTECTED", RefusalKind.BLOCKER, "the pieces are kept for a job that goes first"
    RESERVED = "RESERVED", RefusalKind.BLOCKER, "the pieces are reserved for a large gang"
    RANKED = "RANKED", RefusalKind.BLOCKER, "the planner lets others have the devices first"
    QUOTA = "QUOTA", RefusalKind.BLOCKER, "the user's share is used up"
    ARRAY_LIMIT = "ARRAY_LIMIT", RefusalKind.BLOCKER, "so many members of its array as may run at once do or wait to"
    FAILING = "FAILING", RefusalKind.BLOCKER, "its attempts fail one after the other, so it is tried again later"
    STORAGE_NOT_SHARED = (
        "STORAGE_NOT_SHARED",
        RefusalKind.BLOCKER,
        "the checkpoint lies on storage the node does not see",
    )
    CANNOT_SWITCH_USER = "CANNOT_SWITCH_USER", RefusalKind.BLOCKER, "the daemon cannot become the job's user"
    QUARANTINED = "QUARANTINED", RefusalKind.BLOCKER, "a gang of it that the master did not start is there already"
    LAUNCH_FAILED = (
        "LAUNCH_FAILED",
        RefusalKind.BLOCKER,
        "the job could not be launched there, and no other job has been since",
    )

    STALE_REVISION = "STALE_REVISION", RefusalKind.RACE, "the job has changed since the request was computed"
    OUT_OF_TURN = "OUT_OF_TURN", RefusalKind.RACE, "the turn has expired or belongs to another"
    NODE_GONE = "NODE_GONE", RefusalKind.RACE, "the node left the view"

    GANG_IMPOSSIBLE = "GANG_IMPOSSIBLE", RefusalKind.MISTAKE, "no cluster of this make could ever hold the gang"
    CLAIM_MISMATCH = "CLAIM_MISMATCH", RefusalKind.MISTAKE, "the claims do not add up to the job's tasks"
    NOT_SUPPORTED = "NOT_SUPPORTED", RefusalKind.MISTAKE, "not built yet"
    WRONG_STATE = "WRONG_STATE", RefusalKind.MISTAKE, "the job's state does not allow it"
    QUANTUM = "QUANTUM", RefusalKind.MISTAKE, "a quantum is too short for what a switch of rows takes"
    LEVEL_UNAVAILABLE = "LEVEL_UNAVAILABLE", RefusalKind.MISTAKE, "the job cannot be suspended at this level"


class Refusal(Struct, frozen=True, gc=False):
    """One reason with its figures: `Refusal(Reason.GPUS, {"needed": 8, "largest_free": 4}, node="n1")`."""

    reason: Reason
    figures: Mapping[str, int] = field(default_factory=dict)
    node: str = ""
    job: str = ""
    detail: str = ""

    @property
    def message(self) -> str:
        """One sentence for a person: the meaning, the detail, the figures, the node and job it is about."""
        parts = [self.detail or self.reason.meaning]
        if self.figures:
            parts.append(" ".join([_figure(name, self.figures[name]) for name in sorted(self.figures)]))
        if self.node:
            parts.append(f"on {self.node}")
        if self.job:
            parts.append(f"because of {self.job}")
        return ", ".join(parts)


def _figure(name: str, value: int) -> str:
    """ "needed=8"; bytes and millicores as people count them, "needed=1.5G" and "free_cores=0.5"."""
    if name.endswith("_bytes"):
        power = max(0, min(4, (abs(value).bit_length() - 1) // 10))
        return f"{name.removesuffix('_bytes')}={value / (1 << 10 * power):.5g}{'BKMGT'[power]}"
    if name.endswith("_millicores"):
        return f"{name.removesuffix('_millicores')}_cores={value / 1_000:.5g}"
    return f"{name}={value}"
