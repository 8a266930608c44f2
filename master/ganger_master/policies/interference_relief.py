"""Migrations off crowded nodes: a gang that was measured to be slower beside others goes to a node with fewer of them.

There is no forecast: the gang's own windows show, beyond chance, that it was faster with fewer devices in use around
it. The gangs on the new node must not be known to lose as much. The outcome is measured as that of every migration.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from ganger.cluster.capacity_index import CapacityIndex, Trial
from ganger.cluster.preferences import BEST_FIT
from ganger.cluster.search import PlacementRequest

from ganger_master.policies.make_room import Displacement, Movable
from ganger_master.policies.migration_choice import LEAST_GAIN, MigrationProposal, MigrationReason, Tried, tried
from ganger_master.policies.placements import PlacementPreference
from ganger_master.policies.trials import DOUBT, FIRST_WINDOWS, FailedTrials, TrialRates, normalised

_NOTHING: Final[FailedTrials[Tried]] = FailedTrials()


@dataclass(frozen=True, slots=True)
class Crowded:
    """A running gang on one node. `load`: devices that others have in use there; `rates`: its windows by load;
    `remaining_s`: its expected remaining time."""

    gang: Movable
    load: int
    rates: Mapping[int, tuple[float, ...]]
    remaining_s: float

    @property
    def node(self) -> str:
        return self.gang.claims[0].node


def relieved(
    room: CapacityIndex,
    gangs: Iterable[Crowded],
    *,
    now: float = 0.0,
    failed: FailedTrials[Tried] = _NOTHING,
    placement: PlacementPreference = BEST_FIT,
) -> list[MigrationProposal]:
    """Return migrations to free places, the largest saving first, at most one to or from a node at once."""
    gangs = sorted(gangs, key=lambda one: one.gang.number)
    view = room.view
    used: dict[str, float] = {
        name: view.topology(name).devices - view.free[slot].bit_count() for name, slot in view.slots.items()
    }
    there: dict[str, list[Crowded]] = {}
    for one in gangs:
        there.setdefault(one.node, []).append(one)
    found: list[MigrationProposal] = []
    trying = Trial(room)
    ranked = [(at_most(one), one) for one in gangs if one.gang.move_cost < math.inf]
    for (load, gain), one in sorted(ranked, key=lambda pair: (-pair[0][1], pair[1].gang.number)):
        saves = (1.0 - 1.0 / gain) * one.remaining_s * one.gang.shape.gpus - one.gang.move_cost
        # Both nodes are then used up: the gangs that stay have to be measured with the new load first.
        if gain < 1.0 + LEAST_GAIN or saves <= 0.0 or used[one.node] == math.inf:
            continue
        full = frozenset(name for name, count in used.items() if count > load or name == one.node)
        claims = placement.place(room, PlacementRequest(one.gang.shape, math.inf, avoid=full))
        if claims is None or len(claims) != 1 or failed.holds(tried(one.gang.number, one.gang.kind, claims), now):
            continue
        harm = sum(_lost(other, one.gang.shape.gpus) for other in there.get(claims[0].node, ()))
        if saves > harm:
            trying.take(claims)
            used[claims[0].node] = used[one.node] = math.inf
            found.append(MigrationProposal(MigrationReason.BALANCE, (Displacement(one.gang, claims),), saves - harm))
    trying.undo()
    return found


def at_most(one: Crowded) -> tuple[int, float]:
    """Return the load below the present one with the highest rate, and the lower bound of its speed-up over the present
    one; 1 where that was not measured."""
    here = one.rates.get(one.load, ())
    best = one.load, 1.0
    if len(here) < FIRST_WINDOWS or not sum(here) > 0.0:
        return best
    for load, rates in sorted(one.rates.items(), reverse=True):
        if load < one.load and len(rates) >= FIRST_WINDOWS:
            gain, _ = normalised([TrialRates(here, rates)]).bounds(DOUBT)
            if gain > best[1]:
                best = load, gain
    return best


def _lost(one: Crowded, more: int) -> float:
    """Return the GPU-seconds that a gang loses with `more` devices in use beside it; 0 where that was not measured."""
    here = one.rates.get(one.load, ())
    later = [rates for load, rates in sorted(one.rates.items()) if load >= one.load + more]
    if len(here) < FIRST_WINDOWS or not later or len(later[0]) < FIRST_WINDOWS or not sum(here) > 0.0:
        return 0.0
    speed = min(1.0, normalised([TrialRates(here, later[0])]).value)
    return (1.0 - speed) * one.remaining_s * one.gang.shape.gpus
