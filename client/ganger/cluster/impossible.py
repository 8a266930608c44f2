"""Whether a gang could ever be held by this cluster, and the largest of its kind that could."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from msgspec.structs import replace

from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.placement import place
from ganger.cluster.preferences import BEST_FIT
from ganger.cluster.refusals import Reason, Refusal
from ganger.cluster.resources import GangShape
from ganger.cluster.search import PlacementRequest
from ganger.cluster.view import View

# Every submission asks, most for one of few shapes; the answer holds as long as the idle cluster is the same.
_MOST_ANSWERS = 4096
_ANSWERS: WeakKeyDictionary[View, dict[GangShape, Refusal | None]] = WeakKeyDictionary()


def impossible(view: View, shape: GangShape) -> Refusal | None:
    """Why not even the idle cluster could hold the gang, with the largest that it could; None if it could.

    Cordoned, draining and lost nodes count: they may come back. None too while no node has ever joined.
    """
    if not view.slots:
        return None
    idle = view.idle()
    known = _ANSWERS.setdefault(idle, {})
    if shape not in known:
        if len(known) >= _MOST_ANSWERS:
            known.clear()
        known[shape] = _judge(idle, shape)
    return known[shape]


def _judge(idle: View, shape: GangShape) -> Refusal | None:
    patient = _at_its_widest(shape)
    index = CapacityIndex.of(idle)
    placement = place(index, PlacementRequest(patient), BEST_FIT)
    if placement.candidates:
        return None
    tasks = _largest(index, patient)
    by_devices = shape.gpus > 0 and len(shape.roles) == 1
    each, what = (shape.roles[0].shape.gpus, "devices") if by_devices else (1, "tasks")
    why = placement.refusals[0]
    if why.reason is Reason.DEVICE_MEMORY and not tasks:
        largest = why.figures["largest_free_bytes"]
        return Refusal(
            Reason.GANG_IMPOSSIBLE,
            {"needed_bytes": shape.device_memory_bytes, "largest_bytes": largest},
            detail="no device has so much memory",
        )
    return Refusal(
        Reason.GANG_IMPOSSIBLE,
        {**why.figures, "needed": shape.tasks * each, "largest": tasks * each},
        detail=f"not even the idle cluster could hold it ({why.detail or why.reason.meaning}); "
        f"the largest that fits has {tasks * each} {what}",
    )


def _largest(index: CapacityIndex, shape: GangShape) -> int:
    """Tasks of the largest gang of this kind the idle cluster could hold; roles keep their proportions. Zero: none."""
    # Fits are monotone in the number of tasks but for exact node counts, where fewer tasks than nodes never fit.
    low, high = 0, max(role.tasks for role in shape.roles)
    while low < high:
        middle = (low + high + 1) // 2
        if BEST_FIT.place(index, PlacementRequest(_scaled(shape, middle))) is not None:
            low = middle
        else:
            high = middle - 1
    return _scaled(shape, low).tasks if low else 0


def _scaled(shape: GangShape, most: int) -> GangShape:
    """The gang whose largest role has `most` tasks."""
    largest = max(role.tasks for role in shape.roles)
    roles = tuple(replace(role, tasks=max(1, role.tasks * most // largest)) for role in shape.roles)
    return replace(shape, roles=roles, nodes=min(shape.nodes, sum(role.tasks for role in roles)))


def _at_its_widest(shape: GangShape) -> GangShape:
    return replace(shape, locality=replace(shape.locality, wish=None), arena_bytes_per_device=0)
