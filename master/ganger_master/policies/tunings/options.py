"""Which amounts are worth giving to a GPU of a gang: none is beaten by another that is as fast and no dearer, and none
is slower than the proportional share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ganger_master.policies.job_facts import Floats
from ganger_master.policies.tunings import ROUNDING, Profiles


@dataclass(frozen=True, slots=True, eq=False)
class AmountOptions:
    """By cores, then memory, ascending; for each GPU. `value` is the rate against that of the share."""

    cores: Floats
    memory_bytes: Floats
    value: Floats

    def __len__(self) -> int:
        return len(self.cores)


def options(
    profiles: Profiles,
    profile: int,
    share_cores: float,
    share_memory: float,
    most_cores: float = np.inf,
    most_memory: float = np.inf,
    is_cuttable: bool = False,
) -> AmountOptions:
    """Of the measured amounts, whole cores and the share itself, those up to the most that is there (never less than
    the share). At least one: the cheapest that is as fast as the share. A share that runs nothing makes every value
    one. `is_cuttable`: only those that cut back to the share, one resource or both, stay as fast as it."""
    most_cores, most_memory = max(most_cores, share_cores), max(most_memory, share_memory)
    whole = np.arange(1.0, np.floor(min(most_cores, float(profiles.cores[-1]))) + 1.0)
    cores = _up_to(np.concatenate([profiles.cores, whole, [share_cores]]), most_cores)
    memory = _up_to(np.concatenate([profiles.memory_bytes, [share_memory]]), most_memory)
    which = np.array(profile)
    rates = profiles.at(which, cores[:, None], memory[None, :])
    floor = float(profiles.at(which, np.array(share_cores), np.array(share_memory)))
    values = rates / floor if floor > 0.0 else np.ones_like(rates)
    if is_cuttable:
        cut = profiles.at(which, np.minimum(cores, share_cores)[:, None], np.minimum(memory, share_memory)[None, :])
        values = np.where(cut >= floor * (1.0 - ROUNDING), values, 0.0)
    # faster than everything with no more of either
    best_before = np.maximum.accumulate(np.maximum.accumulate(values, axis=0), axis=1)
    padded = np.pad(best_before, ((1, 0), (1, 0)), constant_values=-np.inf)
    beaten_by = np.maximum(padded[:-1, 1:], padded[1:, :-1])
    kept = (values >= 1.0 - ROUNDING) & (values > beaten_by * (1.0 + ROUNDING))
    if not kept.any():
        kept[int(np.searchsorted(cores, share_cores)), int(np.searchsorted(memory, share_memory))] = True
    row, column = np.nonzero(kept)
    return AmountOptions(cores[row], memory[column], values[row, column])


def _up_to(points: Floats, most: float) -> Floats:
    found = np.unique(points)
    return found[found <= most * (1.0 + ROUNDING)]
