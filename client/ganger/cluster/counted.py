"""Places by counts: what is free of servers that have nothing but devices, without a room or its index."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ganger.cluster.resources import Claim, GangShape, LocalityLevel
from ganger.cluster.view import View


class FreeDevices:
    """Gang after gang finds here what it would find `anywhere` in a room that all those before it had taken their
    places in. The view is not changed."""

    def __init__(self, view: View) -> None:
        self._view = view
        # By slot.
        self._free = [free if takes else 0 for free, takes in zip(view.free, view.available, strict=True)]
        self.count = sum([free.bit_count() for free in self._free])

    def take(self, shape: GangShape) -> tuple[Claim, ...] | None:
        """A place, now taken, for a gang that names nothing but devices (`is_counted`); None: there is none."""
        if shape.gpus > self.count:
            return None
        (role,) = shape.roles
        each, remaining = role.shape.gpus, role.tasks
        view, claims = self._view, []
        for slot, free in enumerate(self._free):
            tasks = min(remaining, free.bit_count() // each)
            if tasks:
                topology = view.topologies[slot]
                mask = topology.best(free, tasks * each)
                assert mask is not None, f"{view.nodes[slot]} has fewer devices free than are counted"
                claims.append(Claim(view.nodes[slot], mask, (0,) * len(topology.sockets), 0, tasks=(tasks,)))
                remaining -= tasks
                if not remaining:
                    break
        if remaining:
            # What is free is scattered over nodes that have too little each.
            return None
        self._exchange(claims)
        self.count -= shape.gpus
        return tuple(claims)

    def give(self, claims: tuple[Claim, ...]) -> None:
        """The inverse of `take`."""
        self._exchange(claims)
        self.count += sum([claim.device_mask.bit_count() for claim in claims])

    def _exchange(self, claims: Iterable[Claim]) -> None:
        for claim in claims:
            self._free[self._view.slots[claim.node]] ^= claim.device_mask


def is_counted(shape: GangShape) -> bool:
    """Whether all that matters for a place of such a gang is how many devices are free."""
    if len(shape.roles) > 1 or shape.device_type or shape.nodes or shape.device_memory_bytes:
        return False
    task, locality = shape.roles[0].shape, shape.locality
    return task.gpus > 0 and not (task.millicores or task.memory_bytes) and locality.widest is _ANYWHERE


# To look up a member of an enumeration takes Python 3.11 as long as a call.
_ANYWHERE: Final = LocalityLevel.CLUSTER
