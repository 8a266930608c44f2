"""What keeps a gang from being placed: the constraints without which it would fit, with figures.

Each constraint is left out in turn. One whose absence alone makes room is a true blocker: removing it starts the job.
When no single one does, all those that are short on their own are named.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, Protocol

from ganger.cluster.refusals import Reason, Refusal
from ganger.cluster.resources import ConfigurationSet, GangShape
from ganger.cluster.view import View

CONSTRAINTS: Final = (Reason.GPUS, Reason.DEVICE_MEMORY, Reason.CORES, Reason.MEMORY, Reason.LOCALITY)
OUT_OF_SERVICE: Final = (Reason.NODE_UNAVAILABLE,)
ALONE: Final = tuple([(reason,) for reason in CONSTRAINTS])
ALL_BUT: Final = tuple([tuple([other for other in CONSTRAINTS if other is not reason]) for reason in CONSTRAINTS])


class CapacityAnswers(Protocol):
    """What is to be known of the nodes of a view for one shape that may go no wider than `widest`."""

    @property
    def view(self) -> View: ...

    @property
    def shape(self) -> GangShape: ...

    def feasible(self, relaxed: tuple[Reason, ...]) -> bool:
        """Whether enough room is there by sums without these constraints; exact for gangs of one role, an upper bound
        for several."""

    def usable_sets(self) -> Collection[ConfigurationSet]:
        """Of the nodes that are to be used."""

    def usable_nodes(self) -> int: ...

    def unusable_nodes(self) -> Collection[str]: ...

    def figures(self, reason: Reason) -> Refusal: ...


def blockers(room: CapacityAnswers) -> tuple[Refusal, ...]:
    """Never empty: called when the gang found no place, though each piece alone may be there."""
    view, shape = room.view, room.shape
    typed = [item for item in view.sets.values() if not shape.gpus or shape.device_type in ("", item.device_type)]
    typed = [item for item in typed if item.devices or not shape.gpus]
    wanted = shape.device_type or "devices"
    if not any(view.topologies[slot].configuration_set in typed for slot in view.slots.values()):
        detail = f"no node has {wanted}" if view.slots else "no node has joined yet"
        return (Refusal(Reason.DEVICE_TYPE if view.slots else Reason.NODE_UNAVAILABLE, detail=detail),)
    if room.feasible(OUT_OF_SERVICE):
        # Where the nodes in service would do, had they room, that is what it waits for first.
        lacks = _lacking(room) if room.usable_nodes() and room.feasible(CONSTRAINTS) else ()
        return (*_type_out_of_service(room, typed), *lacks, _unavailable(room))
    refusals = _lacking(room)
    if room.usable_nodes() < len(view.slots) and not room.feasible(CONSTRAINTS):
        return (_unavailable(room), *refusals)
    return refusals


def _lacking(room: CapacityAnswers) -> tuple[Refusal, ...]:
    """What is short on the nodes in service."""
    shape = room.shape
    reasons = [reason for reason, alone in zip(CONSTRAINTS, ALONE, strict=True) if room.feasible(alone)]
    if not reasons:
        reasons = [reason for reason, others in zip(CONSTRAINTS, ALL_BUT, strict=True) if not room.feasible(others)]
    return tuple([room.figures(reason) for reason in reasons or [Reason.GPUS if shape.gpus else Reason.CORES]])


def _type_out_of_service(room: CapacityAnswers, typed: Collection[ConfigurationSet]) -> tuple[Refusal, ...]:
    """A job that names a device type waits for just its nodes, though others are in service."""
    usable = room.usable_sets()
    if not room.shape.device_type or not usable or any(one in typed for one in usable):
        return ()
    return (Refusal(Reason.DEVICE_TYPE, detail=f"no node with {room.shape.device_type} is in service"),)


def _unavailable(room: CapacityAnswers) -> Refusal:
    figures = {"nodes": len(room.view), "available": room.usable_nodes()}
    unusable = room.unusable_nodes()
    return Refusal(Reason.NODE_UNAVAILABLE, figures, node=next(iter(unusable)) if len(unusable) == 1 else "")
