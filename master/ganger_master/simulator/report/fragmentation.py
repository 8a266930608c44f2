"""Which kinds of gangs a workload asks for, and how often: what the measure of fragmentation goes by."""

from __future__ import annotations

import numpy as np
from ganger.cluster.fragmentation import MOST_KINDS, GangMix

from ganger_master.simulator.traces.workload import Workload


def demand_of(jobs: Workload, device_types: tuple[str, ...]) -> GangMix:
    """The kinds of gangs in a workload, the most frequent 128 of them; ValueError of none."""
    if not len(jobs):
        raise ValueError("no job asks for anything")
    per_gpu = np.column_stack(
        (
            jobs.gpus,
            np.nan_to_num(jobs.cpus) * 1000 / jobs.gpus,
            np.nan_to_num(jobs.memory_bytes) / jobs.gpus,
            jobs.gpu_type.codes,
        )
    )
    kinds, counts = np.unique(per_gpu, axis=0, return_counts=True)
    frequent = np.argsort(-counts, kind="stable")[:MOST_KINDS]
    kinds, counts = kinds[frequent], counts[frequent]
    accepted = [jobs.gpu_type.names[int(code)] for code in kinds[:, 3]]
    accepts = [[not wish or kind in wish.split("|") for kind in device_types] for wish in accepted]
    return GangMix(
        kinds[:, 0].astype(np.int64),
        kinds[:, 1],
        kinds[:, 2],
        np.array(accepts, bool).reshape(len(kinds), len(device_types)),
        counts / counts.sum(),
        device_types,
    )
