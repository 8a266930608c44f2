"""Policies by name: the order of jobs, placement, tuning of cores and memory, and changes of running jobs.

Names compose with a plus: "srtf", "tiresias+best-fit", "srtf+tetris+synergy-tune". The parts are described in
docs/design/003-policies.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from ganger_master.core.job_model import JobRecord
from ganger_master.policies.order_registry import FIFO_BACKFILL, ORDERS, order_named
from ganger_master.policies.orders import JobOrder, with_aging
from ganger_master.policies.placements import PLACEMENTS, PlacementPreference, placement_named
from ganger_master.policies.tetris import Alignment, Knobs

if TYPE_CHECKING:
    from ganger_master.policies.tunings import Tuning


class Places(Enum):
    """What places gangs: each job's own scheduler while it holds a lease, or the planner for all jobs at once."""

    JOBS = "jobs"
    PLANNER = "planner"


@dataclass(frozen=True, slots=True)
class Policy:
    """A composition of an order, a placement and, where named, a tuning and passes over running jobs.

    * `tuning`: cores and memory of gangs; None: as their jobs request.
    * `is_placement_named`: the name has a placement, so a tuning that could place follows it.
    * `tetris`: Tetris chooses jobs and places at once; None: the order chooses.
    * `resizes`: Optimus decides the number of GPUs of each elastic job.
    * `shares`: jobs share GPUs, by time slices and co-location (`planner.matrices`).
    * `moves`: running jobs are migrated, for other jobs and for their own sake (`planner.moves`).
    * `packs`: while jobs wait, running jobs are co-located on trial (`planner.colocation_stage`).
    * `grows`: elastic jobs grow onto idle GPUs and release them on demand (`planner.growth_stage`).
    """

    name: str
    order: JobOrder
    placement: PlacementPreference
    places: Places
    tuning: Tuning | None = None
    is_placement_named: bool = False
    tetris: Knobs | None = None
    resizes: bool = False
    shares: bool = False
    moves: bool = False
    packs: bool = False
    grows: bool = False

    @property
    def aging_order(self) -> JobOrder:
        """Return the order with bounded waiting, which planners use. A strict order needs no bound."""
        return self.order if self.order.is_strict else with_aging(self.order)

    @property
    def protects_all(self) -> bool:
        """Return whether no job may take GPUs that a job ahead of it waits for, however few."""
        return self.order.is_strict

    @property
    def key(self) -> Callable[[JobRecord], tuple[int, ...]]:
        """Return the sort key of pending jobs in the master's queue: smaller goes first."""
        return _by_submission


def _by_submission(job: JobRecord) -> tuple[int, ...]:
    return (-job.spec.priority, job.number)


# Other names of orders: former ones, and those of the papers.
_ALIASES = {"backfill": "fifo-backfill", "las2d": "tiresias", "las2d-gittins": "tiresias-gittins"}
# Tetris by the dot product and, as in the Virginia report, by the angle alone. The remaining work is estimated, or read
# from an oracle for comparison.
_TETRIS_ORACLE = "tetris-oracle"
_TETRIS = {
    "tetris": Knobs(),
    "tetris-cos": Knobs(srtf_weight=0.0, alignment=Alignment.COSINE),
    _TETRIS_ORACLE: Knobs(),
}
_OPTIMUS, _GANDIVA = "optimus", "gandiva"
# `ganger` is its order with co-location, but without it where jobs are migrated or cores are tuned: these measure jobs
# that have their devices alone.
_GANGER, _GANGER_ORDER = "ganger", "ganger-alone"
_MOVES, _GROWS, _PACKS = "defrag", "elastic", "packs"
# Further parts that may follow a plus.
INTROSPECTIONS = {_MOVES: "running jobs are moved", _GROWS: "elastic jobs grow and shrink", _PACKS: "gangs share GPUs"}
# Compositions with a name of their own. `synergy` has the one of Synergy's orders that needs no oracle.
_COMPOSED = {"synergy": "las+synergy-tune"}
NAMES = tuple(sorted({*ORDERS, *_ALIASES, *_TETRIS, *_COMPOSED, _OPTIMUS, _GANDIVA, _GANGER}))


def live_policy_named(name: str) -> Policy:
    """Return a policy for a live cluster; KeyError for an unknown name, ValueError for one that needs an oracle."""
    policy = policy_named(name)
    if policy.order.knows_durations:
        live = [known for known in NAMES if not policy_named(known).order.knows_durations]
        raise ValueError(
            f"policy {name!r} asks an oracle how long jobs take: for the simulator only; there are {', '.join(live)}"
        )
    return policy


def policy_named(name: str) -> Policy:
    """Return the policy of a composed name; KeyError, with the known names, if there is none.

    `name`: an order, then in any sequence at most one placement, one tuning and each of `INTROSPECTIONS`, with pluses.
    """
    first, *parts = name.split("+")
    twice = next((part for part in parts if parts.count(part) > 1), None)
    if twice is not None:
        raise KeyError(f"policy {name!r} names {twice} twice")
    if _MOVES in parts and _PACKS in parts:
        raise KeyError(f"{_MOVES} and {_PACKS} cannot be composed: a job that is moved is measured alone")
    for part, extended in ((_MOVES, _with_moves), (_GROWS, _with_growth), (_PACKS, _with_packs)):
        if part in parts:
            base = policy_named("+".join([first, *(other for other in parts if other != part)]))
            return replace(extended(base), name=name)
    if first == _GANGER:
        base = _composed("+".join([_GANGER_ORDER, *parts]))
        return replace(base, name=name, packs=base.tuning is None)
    if first in _COMPOSED:
        return replace(policy_named("+".join([_COMPOSED[first], *parts])), name=name)
    return _composed(name)


def _with_moves(base: Policy) -> Policy:
    # Migration replaces restarting jobs elsewhere.
    order = replace(base.order, regroups=False)
    return replace(base, order=order, places=Places.PLANNER, moves=True, packs=False)


def _with_growth(base: Policy) -> Policy:
    if base.resizes:
        raise KeyError(f"{base.name} decides on the size of elastic jobs itself: it takes no {_GROWS}")
    return replace(base, places=Places.PLANNER, grows=True)


def _with_packs(base: Policy) -> Policy:
    other = base.shares or base.resizes or base.tetris is not None or base.tuning is not None or base.moves
    if other or not base.order.preempts:
        raise KeyError(f"{base.name} cannot be composed with {_PACKS}: that is for orders that stop jobs")
    return replace(base, packs=True)


def _composed(name: str) -> Policy:
    """Return the policy of a name without `INTROSPECTIONS`."""
    first, *parts = name.split("+")
    if first not in NAMES:
        raise KeyError(f"there is no policy {first!r}; {_suggestion(first, NAMES)}")
    if first in (_OPTIMUS, _GANDIVA, *_TETRIS):
        if parts:
            raise KeyError(f"{first} places by itself: it takes no placement and no tuning")
        return _whole_policy(first)
    order = order_named(_ALIASES.get(first, first))
    tunable = _tunings() if any(part not in PLACEMENTS for part in parts) else {}
    unknown = [part for part in parts if part not in PLACEMENTS and part not in tunable]
    if unknown:
        known = (*PLACEMENTS, *tunable, *INTROSPECTIONS)
        raise KeyError(f"there is no placement or tuning {unknown[0]!r}; {_suggestion(unknown[0], known)}")
    placements = [part for part in parts if part in PLACEMENTS]
    tunings = [part for part in parts if part in tunable]
    for kind, named in (("placement", placements), ("tuning", tunings)):
        if len(named) > 1:
            raise KeyError(f"policy {name!r} names more than one {kind}")
    placement = placement_named(placements[0] if placements else order.placement)
    # Without preemption there are no jobs to weigh against each other: each job's scheduler places it.
    places = Places.PLANNER if order.preempts or parts else Places.JOBS
    tuning = tunable[tunings[0]] if tunings else None
    return Policy(name, order, placement, places, tuning=tuning, is_placement_named=bool(placements))


def _whole_policy(name: str) -> Policy:
    """Return Optimus, Gandiva or a Tetris, each of which brings its own placement."""
    order = replace(FIFO_BACKFILL, name=name)
    placement = placement_named(name.removesuffix("-oracle"))
    if name == _OPTIMUS:
        # Its pass visits jobs by arrival, preempts for the jobs it chose, and skips those that do not fit.
        return Policy(name, replace(order, preempts=True), placement, Places.PLANNER, resizes=True)
    if name == _GANDIVA:
        return Policy(name, order, placement, Places.PLANNER, shares=True, moves=True, grows=True)
    order = replace(order, knows_durations=name == _TETRIS_ORACLE)
    return Policy(name, order, placement, Places.PLANNER, tetris=_TETRIS[name])


def _suggestion(name: str, known: Sequence[str]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name.lower(), known, 1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"


def _tunings() -> Mapping[str, Tuning]:
    # Imported on demand: SciPy takes longer to load than a replay of a hundred jobs.
    from ganger_master.policies.tunings.catalogue import TUNINGS

    return TUNINGS
