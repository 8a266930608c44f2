"""A view as plain values, and the same view made of them: decisions made with it equal those of the original.

Beside what nodes have free that takes what ties are broken by: slots, also empty ones, and the numbers of racks.
"""

from __future__ import annotations

from msgspec import Struct

from ganger.cluster.resources import ConfigurationSet, NodeRow
from ganger.cluster.view import LoadMode, View


class ViewImage(Struct, frozen=True, gc=False):
    """Everything of a view that an answer may depend on."""

    sets: tuple[ConfigurationSet, ...]
    version: int
    freed: int
    mode: LoadMode
    # By slot; None where a node has left.
    rows: tuple[NodeRow | None, ...]
    # By slot: devices that may ever be free; zero where a node has left.
    in_service: tuple[int, ...]
    # Slots for the nodes that come next, the last one first.
    vacant: tuple[int, ...]
    # Fabric and rack, in the order of their numbers.
    places: tuple[tuple[str, str], ...]
    # By slot: devices of the idle view if one was made; it stays while nodes stay.
    idle: tuple[int, ...] | None = None


def image_of_view(view: View) -> ViewImage:
    """Shares nothing with the view that changes."""
    return ViewImage(
        sets=tuple(view.sets.values()),
        version=view.version,
        freed=view.freed,
        mode=view.mode,
        rows=tuple([view._row(slot) if name else None for slot, name in enumerate(view.nodes)]),
        in_service=tuple([mask if name else 0 for mask, name in zip(view._in_service, view.nodes, strict=True)]),
        vacant=tuple(view._vacant),
        places=tuple(view._place_codes),
        idle=None if view._idle is None else tuple(view._idle.free),
    )


def view_of_image(image: ViewImage) -> View:
    """KeyError or ValueError if its parts do not go together."""
    view = View(image.sets)
    view._place_codes = {place: code for code, place in enumerate(image.places)}
    for row, in_service in zip(image.rows, image.in_service, strict=True):
        if row is None:
            view._grow()
        else:
            view.put(row, in_service)
    view._vacant = list(image.vacant)
    view.version, view.freed, view.mode = image.version, image.freed, image.mode
    if image.idle is not None:
        view._idle = view.emptied(everywhere_available=True)
        view._idle.free = list(image.idle)
    return view
