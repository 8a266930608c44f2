"""Turn wished cores and memory into changes of a plan, in an order in which each fits after those before it.

Gangs that give back come first, then starts, then gangs that get more, so that a new job finds what its neighbours held
beyond their share. Nothing is given twice; wishes that do not fit are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ganger.cluster.claims import resplit_cores, split_cores
from ganger.cluster.resources import Claim, LocalityLevel
from ganger.cluster.view import View
from msgspec.structs import replace

from ganger_master.core.job_model import JobRecord
from ganger_master.core.plan_changes import CoresChange, PlanChange, StartChange

# Millicores and bytes of each claim.
Amounts: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class CoresWish:
    """Other amounts for a gang's claims. For a job that is to start, the claims name its nodes, with device masks, or
    without them if `gpus` has the numbers. With less than `least` it does not start."""

    job: JobRecord
    claims: tuple[Claim, ...]
    amounts: Amounts
    least: Amounts
    gpus: tuple[int, ...] = ()


@dataclass(slots=True)
class Fitted:
    """`held_back`: some jobs could not start yet."""

    changes: list[PlanChange] = field(default_factory=list)
    held_back: bool = False


def fitted(view: View, running: Sequence[CoresWish], starting: Sequence[CoresWish]) -> Fitted:
    """Return changes in an order in which they fit. `view` is left unchanged."""
    free = _Free(view)
    found = Fitted()
    growing = []
    for wish in running:
        if all(_is_less(claim, amounts) for claim, amounts in zip(wish.claims, wish.amounts, strict=True)):
            _retune(free, wish, found)
        else:
            growing.append(wish)
    # A gang that gives one resource and wants more of another comes first.
    growing.sort(key=lambda wish: not _gives(wish))
    giving = sum(map(_gives, growing))
    for wish in growing[:giving]:
        _retune(free, wish, found)
    for wish in starting:
        claims = free.place(wish)
        if claims is None:
            found.held_back = True
        else:
            found.changes.append(StartChange(wish.job.number, wish.job.revision, claims))
    for wish in growing[giving:]:
        _retune(free, wish, found)
    return found


def _retune(free: _Free, wish: CoresWish, found: Fitted) -> None:
    claims = tuple([free.retuned(claim, *amounts) for claim, amounts in zip(wish.claims, wish.amounts, strict=True)])
    if claims != wish.claims:
        found.changes.append(CoresChange(wish.job.number, wish.job.revision, claims))


def _is_less(claim: Claim, amounts: tuple[int, int]) -> bool:
    return amounts[0] <= sum(claim.millicores) and amounts[1] <= claim.memory_bytes


def _gives(wish: CoresWish) -> bool:
    return any(
        amounts[0] < sum(claim.millicores) or amounts[1] < claim.memory_bytes
        for claim, amounts in zip(wish.claims, wish.amounts, strict=True)
    )


@dataclass(slots=True)
class _Node:
    slot: int
    mask: int
    millicores: list[int]
    memory: int


class _Free:
    """Free amounts by node, while changes are made one after the other."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._nodes: dict[str, _Node] = {}

    def retuned(self, claim: Claim, millicores: int, memory_bytes: int) -> Claim:
        """Return the claim with these amounts, as far as they are free, and take the difference."""
        node = self._node(claim.node)
        if node is None:
            return claim
        held = sum(claim.millicores)
        wanted = min(millicores, held + sum(node.millicores))
        if wanted != held:
            split = resplit_cores(claim.millicores, node.millicores, wanted)
            node.millicores = [
                have + old - new for have, old, new in zip(node.millicores, claim.millicores, split, strict=True)
            ]
        else:
            split = claim.millicores
        memory = min(memory_bytes, claim.memory_bytes + node.memory)
        node.memory += claim.memory_bytes - memory
        return replace(claim, millicores=split, memory_bytes=memory)

    def place(self, wish: CoresWish) -> tuple[Claim, ...] | None:
        """Return the claims with the wished amounts, as far as free, and take them; None if that is too little."""
        made = []
        for at, claim in enumerate(wish.claims):
            node = self._node(claim.node)
            if node is None or not self._view.available[node.slot]:
                return None
            millicores = min(wish.amounts[at][0], sum(node.millicores))
            memory = min(wish.amounts[at][1], node.memory - claim.arena_bytes)
            mask = claim.device_mask or self._mask(node, wish, at)
            if (
                mask is None
                or mask & ~node.mask
                or millicores < max(1, wish.least[at][0])
                or memory < wish.least[at][1]
            ):
                return None
            split = split_cores(self._view.topologies[node.slot], node.millicores, mask, millicores)
            assert split is not None, "so many are free"
            made.append(replace(claim, device_mask=mask, millicores=split, memory_bytes=memory))
        for claim in made:
            node = self._nodes[claim.node]
            node.mask &= ~claim.device_mask
            node.millicores = [have - taken for have, taken in zip(node.millicores, claim.millicores, strict=True)]
            node.memory -= claim.memory_bytes + claim.arena_bytes
        return tuple(made)

    def _mask(self, node: _Node, wish: CoresWish, at: int) -> int | None:
        if not wish.gpus:
            return 0
        room = wish.job.shape.device_memory_bytes
        free = node.mask & self._view.roomy(node.slot, room) if room else node.mask
        widest = min(wish.job.shape.locality.widest, LocalityLevel.NODE)
        return self._view.topologies[node.slot].best(free, wish.gpus[at], widest)

    def _node(self, name: str) -> _Node | None:
        found = self._nodes.get(name)
        if found is None:
            slot = self._view.slots.get(name)
            if slot is None:
                return None
            view = self._view
            found = self._nodes[name] = _Node(slot, view.free[slot], list(view.millicores[slot]), view.memory[slot])
        return found
