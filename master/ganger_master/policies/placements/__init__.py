"""Where a gang goes, by name: pure searches in a `CapacityIndex`, which they leave as it was.

All of them keep to the same words. A gang goes on one node if one has room for it and the job does not ask for more;
else it is spread over as few nodes as the placement's own rule allows, no further apart than the job accepts. What is
found fits.
"""

from __future__ import annotations

from typing import Final

from ganger.cluster.preferences import ANYWHERE, BEST_FIT, FIRST_FIT, GANDIVA, LOCALITY
from ganger.cluster.search import PlacementPreference

from ganger_master.policies.placements.fragmentation import FGD
from ganger_master.policies.placements.optimus import OPTIMUS, OPTIMUS_CARDS
from ganger_master.policies.placements.tetris import TETRIS, TETRIS_COS

__all__ = ["PLACEMENTS", "PlacementPreference", "placement_named"]

PLACEMENTS: Final = {
    placement.name: placement
    for placement in (
        FIRST_FIT,
        BEST_FIT,
        GANDIVA,
        LOCALITY,
        TETRIS,
        TETRIS_COS,
        OPTIMUS,
        OPTIMUS_CARDS,
        FGD,
        ANYWHERE,
    )
}


def placement_named(name: str) -> PlacementPreference:
    """KeyError, naming the known ones, for an unknown name."""
    try:
        return PLACEMENTS[name]
    except KeyError:
        raise KeyError(f"there is no placement {name!r}; there are {', '.join(PLACEMENTS)}") from None
