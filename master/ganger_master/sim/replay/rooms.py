"""What is free in the simulated cluster, as a what-if for plans."""

from __future__ import annotations

from collections.abc import Sequence

from ganger.placement.candidates import places
from ganger.resources.values import Claim, GangShape
from ganger.resources.view import View


class OnView:
    """The state's own view, taken from and given back to; gangs go where Gandiva's Algorithm 1 says."""

    def __init__(self, view: View) -> None:
        self._view = view

    def take(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            self._view.take(claim)

    def give(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            self._view.give(claim)

    def place(self, shape: GangShape) -> tuple[Claim, ...] | None:
        found = places(self._view, shape, limit=1)
        return found[0] if found else None


class AnyFree(OnView):
    """Any free devices serve, from the first node on."""

    def place(self, shape: GangShape) -> tuple[Claim, ...] | None:
        view, missing = self._view, shape.gpus
        claims = []
        for slot, free in enumerate(view.free):
            if not free or not missing:
                continue
            mask = 0
            while free and missing:
                lowest = free & -free
                mask |= lowest
                free ^= lowest
                missing -= 1
            nothing = (0,) * len(view.millicores[slot])
            claims.append(Claim(view.nodes[slot], mask, nothing, 0, tasks=(mask.bit_count(),)))
        return None if missing else tuple(claims)
