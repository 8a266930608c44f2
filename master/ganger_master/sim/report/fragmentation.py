"""How many free GPUs the next job could not use where they are.

The measure of FGD (Weng et al., "Beware of Fragmentation", USENIX ATC 2023, section 4): of a node n and a kind of task
m, the fragment F_n(m) is the node's free GPUs if m could not run there, and otherwise the free GPUs too small for it
(none here: GPUs are whole); F_n is its mean over kinds of tasks by how often they are asked for; a cluster's is the sum
over nodes. A gang of more GPUs than a node has needs the node whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ganger_master.sim.traces.workload import Floats, Integers, Workload

# Kinds of tasks beyond these are too rare to tell.
_MOST_KINDS = 128


@dataclass(frozen=True, eq=False)
class Demand:
    """Kinds of gangs and how often each is asked for: columns of one entry a kind.

    `millicores` and `memory_bytes` are for each GPU, 0 where nothing is asked. `accepts[m, t]`: whether kind m runs on
    GPUs of type t, in the order in which the types were given. `shares` add up to 1.
    """

    gpus: Integers
    millicores: Floats
    memory_bytes: Floats
    accepts: NDArray[np.bool_]
    shares: Floats


def demand_of(jobs: Workload, device_types: tuple[str, ...]) -> Demand:
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
    frequent = np.argsort(-counts, kind="stable")[:_MOST_KINDS]
    kinds, counts = kinds[frequent], counts[frequent]
    accepted = [jobs.gpu_type.names[int(code)] for code in kinds[:, 3]]
    accepts = [[not wish or kind in wish.split("|") for kind in device_types] for wish in accepted]
    return Demand(
        kinds[:, 0].astype(np.int64),
        kinds[:, 1],
        kinds[:, 2],
        np.array(accepts, bool).reshape(len(kinds), len(device_types)),
        counts / counts.sum(),
    )


def fragmented_gpus(
    demand: Demand,
    free_gpus: Integers,
    free_millicores: Integers,
    free_memory_bytes: Integers,
    devices: Integers,
    device_types: Integers,
) -> Floats:
    """Expected free GPUs of each node that the next gang could not use: columns of one entry a node, of any part of the
    cluster, so that after a change only the nodes it touched are asked about. `device_types`: positions in the types
    that the demand was made with."""
    gpus = np.minimum(demand.gpus[:, None], devices[None, :])
    usable = (
        (gpus <= free_gpus)
        & (gpus * demand.millicores[:, None] <= free_millicores)
        & (gpus * demand.memory_bytes[:, None] <= free_memory_bytes)
        & demand.accepts[:, device_types]
    )
    return np.asarray(free_gpus * (demand.shares @ ~usable))
