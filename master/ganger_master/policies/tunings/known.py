"""What is known of what cores and memory do to the jobs at hand; of whom nothing is known gets its share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ganger_master.policies.job_facts import Flags, Integers
from ganger_master.policies.tunings import ROUNDING, Gangs, Profiles, TuningNodes, gangs


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """`position`: of jobs by number, where in `profiles` each is; -1: nobody has measured it. Numbers of jobs never
    change what they mean, but a job that was not known may be later. Without `knows_memory` the profiles are of cores
    alone, whatever their memory: each job makes the most of its share of that, and no more."""

    profiles: Profiles
    position: Callable[[Integers], Integers]
    knows_memory: bool = True


def _nobody(numbers: Integers) -> Integers:
    return np.full(len(numbers), -1)


NOTHING = Known(Profiles(np.ones(1), np.ones(1), np.ones((1, 1, 1))), _nobody, knows_memory=False)


def known_gangs(known: Known, numbers: Integers, gpus: Integers, is_local: Flags, nodes: TuningNodes) -> Gangs:
    """Gangs by number of their jobs. One that nobody has measured makes the most of its proportional share, and no more
    of anything else: so that is what it is given."""
    position = known.position(numbers)
    profiles = known.profiles if known.knows_memory else _up_to_share(known.profiles, nodes)
    if (position < 0).any():
        profiles = _with_shares(profiles, nodes)
        position = np.where(position < 0, len(profiles.rates) - 1, position)
    return gangs(gpus, position, profiles, is_local=is_local)


def _with_shares(profiles: Profiles, nodes: TuningNodes) -> Profiles:
    """With one profile more, the last: it rises up to the largest share that there is."""
    has_gpus = nodes.gpus > 0
    share_cores = max(float(nodes.share_cores[has_gpus].max(initial=0.0)), ROUNDING)
    share_memory = _share_of_memory(nodes)
    cores = np.unique(np.append(profiles.cores, share_cores))
    memory = np.unique(np.append(profiles.memory_bytes, share_memory))
    rates = profiles.at(np.arange(len(profiles.rates))[:, None, None], cores[None, :, None], memory[None, None, :])
    of_cores = np.minimum(cores / share_cores, 1.0)
    unknown = of_cores[:, None] * np.minimum(memory / share_memory, 1.0)[None, :]
    return Profiles(cores, memory, np.concatenate([rates, unknown[None]]))


def _up_to_share(profiles: Profiles, nodes: TuningNodes) -> Profiles:
    """The same with all memory up to the largest share that there is."""
    return Profiles(profiles.cores, np.array([_share_of_memory(nodes)]), profiles.rates[:, :, -1:])


def _share_of_memory(nodes: TuningNodes) -> float:
    return max(float(nodes.share_memory[nodes.gpus > 0].max(initial=0.0)), 1.0)
