"""Policies by name: who goes first, where gangs go, with how many cores, and who places them. Names compose: "srtf",
"tiresias+best-fit", "srtf+tetris+synergy-tune".

See docs/design/003-policies.md for the parts a policy is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from ganger_master.core.model import JobRecord
from ganger_master.policies.orders import JobOrder
from ganger_master.policies.orders.aging import with_aging
from ganger_master.policies.orders.fifo import FIFO_BACKFILL
from ganger_master.policies.orders.registry import ORDERS, order_named
from ganger_master.policies.placements import PLACEMENTS, PlacementPreference, placement_named
from ganger_master.policies.placements.tetris import Alignment, Knobs

if TYPE_CHECKING:
    from ganger_master.policies.tunings import Tuning


class Places(Enum):
    """Who finds places for gangs: each job's own scheduler when it is its turn, or the planner for all at once."""

    JOBS = "jobs"
    PLANNER = "planner"


@dataclass(frozen=True, slots=True)
class Policy:
    name: str
    order: JobOrder
    placement: PlacementPreference
    places: Places
    # Cores and memory of gangs; None: what their jobs ask for.
    tuning: Tuning | None = None
    # The placement was named: a tuning that would place for itself follows it.
    is_placement_named: bool = False
    # Tetris chooses jobs and places at once; None: the order chooses.
    tetris: Knobs | None = None
    # Optimus: a pass of its own says how many GPUs each elastic job has.
    resizes: bool = False
    # Jobs share GPUs, in turns and at once: a pass of its own (`planner.slices`).
    shares: bool = False
    # Running jobs are moved, for others and for themselves: a pass around the others (`planner.moves`).
    moves: bool = False
    # While some wait, jobs that run are tried on one device together: a pass beside the others
    # (`planner.colocation_stage`).
    packs: bool = False
    # Elastic jobs grow onto idle GPUs and give them back: a pass before the others (`planner.growth_stage`).
    grows: bool = False

    @property
    def aging_order(self) -> JobOrder:
        """The order, changed so that nobody waits for ever: what a planner goes by. Where nobody passes anybody no wait
        need be bounded."""
        return self.order if self.order.is_strict else with_aging(self.order)

    @property
    def protects_all(self) -> bool:
        """Nobody may take what a job further ahead waits for, however small."""
        return self.order.is_strict

    @property
    def key(self) -> Callable[[JobRecord], tuple[int, ...]]:
        """Of a waiting job in the master's queue: smaller goes first, ties are broken by the job's number."""
        return _by_submission


def _by_submission(job: JobRecord) -> tuple[int, ...]:
    return (-job.spec.priority, job.number)


# Other names of orders: those of before, and what the papers call them.
_ALIASES = {"backfill": "fifo-backfill", "las2d": "tiresias", "las2d-gittins": "tiresias-gittins"}
# Tetris, by the dot product and, as in the Virginia report, by the angle alone. How much work is left is learned, or
# told by an oracle for comparison.
_TETRIS_ORACLE = "tetris-oracle"
_TETRIS = {
    "tetris": Knobs(),
    "tetris-cos": Knobs(srtf_weight=0.0, alignment=Alignment.COSINE),
    _TETRIS_ORACLE: Knobs(),
}
_OPTIMUS, _GANDIVA = "optimus", "gandiva"
# Its order, and packs; without packs where jobs are moved or cores weighed, which goes by who has devices alone.
_GANGER, _GANGER_ORDER = "ganger", "ganger-alone"
# What makes a policy move running jobs.
_MOVES = "defrag"
# What makes a policy grow elastic jobs onto idle GPUs.
_GROWS = "elastic"
# What makes a policy pack running jobs.
_PACKS = "packs"
# What else may follow a plus, and what it is for.
INTROSPECTIONS = {_MOVES: "running jobs are moved", _GROWS: "elastic jobs grow and shrink", _PACKS: "gangs share GPUs"}
# Compositions that have a name of their own. Synergy's under the one of its orders that needs no oracle.
_COMPOSED = {"synergy": "las+synergy-tune"}
NAMES = tuple(sorted({*ORDERS, *_ALIASES, *_TETRIS, *_COMPOSED, _OPTIMUS, _GANDIVA, _GANGER}))


def live_policy_named(name: str) -> Policy:
    """One that a live cluster can go by: KeyError for an unknown name, ValueError for one that asks an oracle."""
    policy = policy_named(name)
    if policy.order.knows_durations:
        live = [known for known in NAMES if not policy_named(known).order.knows_durations]
        raise ValueError(
            f"policy {name!r} asks an oracle how long jobs take: for the simulator only; there are {', '.join(live)}"
        )
    return policy


def policy_named(name: str) -> Policy:
    """An order's name, a placement's, a tuning's, "defrag" and "elastic", with a plus between; all but the first may be
    left out, or come in any order. KeyError, naming the known ones, for others."""
    whole = name.split("+")
    twice = next((part for part in whole[1:] if whole[1:].count(part) > 1), None)
    if twice is not None:
        raise KeyError(f"policy {name!r} names {twice} twice")
    if _MOVES in whole[1:]:
        if _PACKS in whole[1:]:
            raise KeyError(f"{_MOVES} and {_PACKS} cannot be composed: a job that is moved is measured alone")
        base = policy_named("+".join([part for part in whole if part != _MOVES]))
        # Who would be stopped to start elsewhere is moved there.
        order = replace(base.order, regroups=False)
        return replace(base, name=name, order=order, places=Places.PLANNER, moves=True, packs=False)
    if _GROWS in whole[1:]:
        base = policy_named("+".join([part for part in whole if part != _GROWS]))
        if base.resizes:
            raise KeyError(f"{base.name} decides on the size of elastic jobs itself: it takes no {_GROWS}")
        return replace(base, name=name, places=Places.PLANNER, grows=True)
    if _PACKS in whole[1:]:
        base = policy_named("+".join([part for part in whole if part != _PACKS]))
        other = base.shares or base.resizes or base.tetris is not None or base.tuning is not None or base.moves
        if other or not base.order.preempts:
            raise KeyError(f"{base.name} cannot be composed with {_PACKS}: that is for orders that stop jobs")
        return replace(base, name=name, packs=True)
    order_name, *parts = whole
    if order_name == _GANGER:
        base = policy_named("+".join([_GANGER_ORDER, *parts]))
        return replace(base, name=name, packs=base.tuning is None)
    if order_name in _COMPOSED:
        # What it is called is what it was asked for by.
        return replace(policy_named("+".join([_COMPOSED[order_name], *parts])), name=name)
    if order_name not in NAMES:
        raise KeyError(f"there is no policy {order_name!r}; {_meant(order_name, NAMES)}")
    if order_name == _OPTIMUS:
        if parts:
            raise KeyError(f"{order_name} places by itself: it takes no placement and no tuning")
        # Its pass goes by arrival, makes room for whom it chose, and lets nobody wait behind one who does not fit.
        order = replace(FIFO_BACKFILL, name=order_name, preempts=True)
        return Policy(name, order, placement_named(order_name), Places.PLANNER, resizes=True)
    if order_name in _TETRIS:
        if parts:
            raise KeyError(f"{order_name} places by itself: it takes no placement and no tuning")
        knobs = _TETRIS[order_name]
        order = replace(FIFO_BACKFILL, name=order_name, knows_durations=order_name == _TETRIS_ORACLE)
        placement = placement_named(order_name.removesuffix("-oracle"))
        return Policy(name, order, placement, Places.PLANNER, tetris=knobs)
    if order_name == _GANDIVA:
        if parts:
            raise KeyError(f"{order_name} places by itself: it takes no placement and no tuning")
        order = replace(FIFO_BACKFILL, name=order_name)
        return Policy(name, order, placement_named(order_name), Places.PLANNER, shares=True, moves=True, grows=True)
    order = order_named(_ALIASES.get(order_name, order_name))
    tunable = _tunings() if any(part not in PLACEMENTS for part in parts) else {}
    unknown = [part for part in parts if part not in PLACEMENTS and part not in tunable]
    if unknown:
        known = (*PLACEMENTS, *tunable, *INTROSPECTIONS)
        raise KeyError(f"there is no placement or tuning {unknown[0]!r}; {_meant(unknown[0], known)}")
    placements = [part for part in parts if part in PLACEMENTS]
    tunings = [part for part in parts if part in tunable]
    for kind, named in (("placement", placements), ("tuning", tunings)):
        if len(named) > 1:
            raise KeyError(f"policy {name!r} names more than one {kind}")
    placement = placement_named(placements[0] if placements else order.placement)
    # Who stops nobody has nothing to weigh against each other: each job looks for its own place.
    places = Places.PLANNER if order.preempts or parts else Places.JOBS
    tuning = tunable[tunings[0]] if tunings else None
    return Policy(name, order, placement, places, tuning=tuning, is_placement_named=bool(placements))


def _meant(name: str, known: Sequence[str]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name.lower(), known, 1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"


def _tunings() -> Mapping[str, Tuning]:
    # Most policies have none, and to load what they need takes longer than to replay a hundred jobs.
    from ganger_master.policies.tunings.catalogue import TUNINGS

    return TUNINGS
