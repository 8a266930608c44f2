"""Who should hold GPUs now, by counts: the first in order whose gangs fit together."""

from __future__ import annotations

import numpy as np

from ganger_master.policies.facts import Flags, Integers


def chosen(ranked: Integers, gpus: Integers, free: int, is_strict: bool = False, kept: Flags | None = None) -> Integers:
    """Positions of the jobs that fit into `free` GPUs, in order: `ranked` are positions, first job first; `gpus` is by
    position. Who does not fit is passed over, or ends the pass if that `is_strict`. `kept` (by position) hold theirs
    whatever comes, and are chosen before all others.

    Whole stretches of the order are taken at once: each look takes the longest stretch that fits and drops all that
    can no longer fit, so there are about as many looks as there are sizes of gangs.
    """
    taken: list[Integers] = []
    if kept is not None:
        staying = ranked[kept[ranked]]
        taken.append(staying)
        free -= int(gpus[staying].sum())
        ranked = ranked[~kept[ranked]]
    while len(ranked) and free > 0:
        sizes = gpus[ranked]
        together = np.cumsum(sizes)
        fitting = int(np.searchsorted(together, free, side="right"))
        if fitting:
            taken.append(ranked[:fitting])
            free -= int(together[fitting - 1])
        if is_strict:
            break
        ranked, sizes = ranked[fitting:], sizes[fitting:]
        ranked = ranked[sizes <= free]
    return np.concatenate(taken) if taken else ranked[:0]
