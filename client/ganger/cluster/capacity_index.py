"""What was worked out of every node for one kind of gang, kept while few nodes change: most gangs ask what others of
their kind have just asked, and between the two a handful of nodes came free or were taken.

Kept with a view for as long as that lives; a copy begins with nothing. What is not asked again soon is worked out from
nothing, by scans of all nodes at once, and so is what a gang asks for the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from typing import Final, Protocol, TypeVar

from ganger.cluster.view import DerivedValue, View


class Following(Protocol):
    """What can be brought up to date node by node."""

    def follow(self, slots: Collection[int]) -> None:
        """These nodes may have come, left or changed, and no others since the last call."""


_Followed = TypeVar("_Followed", bound=Following)


def kept(view: View, key: Hashable, make: Callable[[], _Followed]) -> _Followed | None:
    """What `make` made of the view for this key, up to date; None if it is not worth it, and a scan is to do.

    `key` names all that the answer depends on beside the nodes.
    """
    shelf, nodes = view.kept, len(view.nodes)
    one = shelf.pop(key, None)
    if one is None:
        while len(shelf) >= min(_MOST, max(1, _MOST_ROWS // max(1, nodes))):
            # Who was not asked for the longest is at the front.
            del shelf[next(iter(shelf))]
        shelf[key] = DerivedValue(view.changes)
        return None
    shelf[key] = one
    changed = view.changed_since(one.at)
    one.at = view.changes
    if changed is None or len(changed) > _FEW + nodes // _FEW_OF:
        one.what = None
    elif changed:
        if one.what is None:
            one.what = make()
        else:
            one.what.follow(set(changed))
    found: _Followed | None = one.what
    return found


# Nodes whose changes are cheaper to follow one by one than a scan of all is: so many, and one of so many there are.
_FEW: Final = 32
_FEW_OF: Final = 64
# Kinds of gangs of a view, and nodes times kinds: some 20 MB.
_MOST: Final = 128
_MOST_ROWS: Final = 1 << 18
