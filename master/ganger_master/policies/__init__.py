"""Policies by name: who goes first, who places them, and what nobody may do meanwhile.

See docs/design/003-policies.md for the parts a policy is made of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from ganger_master.core.model import Job
from ganger_master.policies.order import Order
from ganger_master.policies.order.fifo import FIFO, FIFO_BACKFILL
from ganger_master.policies.order.las import LAS
from ganger_master.policies.order.las2d import LAS2D
from ganger_master.policies.order.srsf import SRSF
from ganger_master.policies.order.srtf import SRTF


class Places(Enum):
    """Who finds places for gangs: each job's own scheduler when it is its turn, or the planner for all at once."""

    JOBS = "jobs"
    PLANNER = "planner"


@dataclass(frozen=True, slots=True)
class Policy:
    name: str
    order: Order
    places: Places

    @property
    def protects_all(self) -> bool:
        """Nobody may take what a job further ahead waits for, however small."""
        return self.order.is_strict

    @property
    def key(self) -> Callable[[Job], tuple[int, ...]]:
        """Of a waiting job in the master's queue: smaller goes first, ties are broken by the job's number."""
        return _by_submission


def _by_submission(job: Job) -> tuple[int, ...]:
    return (-job.spec.priority, job.number)


POLICIES = {
    "fifo": Policy("fifo", FIFO, Places.JOBS),
    "fifo-backfill": Policy("fifo-backfill", FIFO_BACKFILL, Places.JOBS),
    **{order.name: Policy(order.name, order, Places.PLANNER) for order in (SRTF, SRSF, LAS, LAS2D)},
}
# Names of before.
_ALIASES = {"backfill": "fifo-backfill"}


def policy_named(name: str) -> Policy:
    """KeyError, naming the known ones, for an unknown name."""
    try:
        return POLICIES[_ALIASES.get(name, name)]
    except KeyError:
        raise KeyError(f"there is no policy {name!r}; there are {', '.join(sorted(POLICIES))}") from None
