"""Models of jobs by Synergy's split over classes of models (OSDI 2022)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from ganger_master.simulator.traces.workload import ModelClass, synergy_profiles

# Synergy's default split of jobs over image, language and speech (OSDI 2022, section 5; runner.py).
SYNERGY_SPLIT: Mapping[ModelClass, float] = {ModelClass.IMAGE: 20.0, ModelClass.LANGUAGE: 70.0, ModelClass.SPEECH: 10.0}


def models_by_split(jobs: int, seed: int, split: Mapping[ModelClass, float] = SYNERGY_SPLIT) -> list[str]:
    """Return a model for each of so many jobs, by Synergy's rule (task.py): the next job is of the class that is
    furthest below its share so far, and within a class models take turns; the seed decides the turns. ValueError for a
    split without a positive share, with a negative one, or of a class without profiles."""
    profiles, random = synergy_profiles(), np.random.default_rng(seed)
    total = sum(split.values())
    if not total > 0 or min(split.values()) < 0:
        raise ValueError(f"shares {', '.join(f'{share:g}' for share in split.values())} are no split of jobs")
    wanted = {kind: share / total for kind, share in split.items() if share > 0}
    turns: dict[ModelClass, Sequence[str]] = {}
    for kind in wanted:
        models = [name for name, profile in profiles.items() if profile.model_class is kind]
        if not models:
            raise ValueError(f"there is no profile of a {kind.value} model")
        turns[kind] = [models[index] for index in random.permutation(len(models)).tolist()]
    given = dict.fromkeys(wanted, 0)
    chosen = []
    for number in range(jobs):
        # Ties go to the class named first.
        kind = max(wanted, key=lambda kind: wanted[kind] * (number + 1) - given[kind])
        chosen.append(turns[kind][given[kind] % len(turns[kind])])
        given[kind] += 1
    return chosen
