"""Policies by name: who goes first, where gangs go, and who places them. Names compose: "srtf", "tiresias+best-fit".

See docs/design/003-policies.md for the parts a policy is made of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from ganger_master.core.model import Job
from ganger_master.policies.order import Order
from ganger_master.policies.order.aging import with_aging
from ganger_master.policies.order.registry import ORDERS, order_named
from ganger_master.policies.place import PLACEMENTS, Placement, placement_named

_DEFAULT_PLACEMENT = "gandiva"


class Places(Enum):
    """Who finds places for gangs: each job's own scheduler when it is its turn, or the planner for all at once."""

    JOBS = "jobs"
    PLANNER = "planner"


@dataclass(frozen=True, slots=True)
class Policy:
    name: str
    order: Order
    placement: Placement
    places: Places

    @property
    def aging_order(self) -> Order:
        """The order, changed so that nobody waits for ever: what a planner goes by."""
        return with_aging(self.order) if self.order.preempts else self.order

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


# Other names of orders: those of before, and what the papers call them.
_ALIASES = {"backfill": "fifo-backfill", "las2d": "tiresias", "las2d-gittins": "tiresias-gittins"}
NAMES = tuple(sorted({*ORDERS, *_ALIASES}))


def live_policy_named(name: str) -> Policy:
    """One that a live cluster can go by: KeyError for an unknown name, ValueError for one that asks an oracle."""
    policy = policy_named(name)
    if policy.order.knows_durations:
        live = [known for known in NAMES if not order_named(_ALIASES.get(known, known)).knows_durations]
        raise ValueError(
            f"policy {name!r} asks an oracle how long jobs take: for the simulator only; there are {', '.join(live)}"
        )
    return policy


def policy_named(name: str) -> Policy:
    """An order's name, or an order's and a placement's with a plus between. KeyError, naming the known ones, for
    others."""
    order_name, *parts = name.split("+")
    if order_name not in NAMES:
        raise KeyError(f"there is no policy {order_name!r}; there are {', '.join(NAMES)}")
    order = order_named(_ALIASES.get(order_name, order_name))
    unknown = [part for part in parts if part not in PLACEMENTS]
    if unknown:
        raise KeyError(f"there is no placement {unknown[0]!r}; there are {', '.join(PLACEMENTS)}")
    if len(parts) > 1:
        raise KeyError(f"policy {name!r} names more than one placement")
    placement = placement_named(parts[0] if parts else _DEFAULT_PLACEMENT)
    # Who stops nobody has nothing to weigh against each other: each job looks for its own place.
    places = Places.PLANNER if order.preempts or parts else Places.JOBS
    return Policy(name, order, placement, places)
