"""How many free GPUs the next gang could not use where they are.

The measure of FGD (Weng et al., "Beware of Fragmentation", USENIX ATC 2023, section 4): of a node n and a kind of task
m, the fragment F_n(m) is the node's free GPUs if m could not run there, and otherwise the free GPUs too small for it
(none here: GPUs are whole); F_n is its mean over kinds of tasks by how often they are asked for; a cluster's is the sum
over nodes. A gang of more GPUs than a node has needs the node whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ganger.cluster.fit import demand
from ganger.cluster.resources import ConfigurationSet, GangShape

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


# Kinds of tasks beyond these are too rare to tell.
MOST_KINDS: Final = 128


@dataclass(frozen=True, eq=False)
class GangMix:
    """Kinds of gangs and how often each is asked for: columns of one entry a kind.

    `millicores` and `memory_bytes` are for each GPU, 0 where nothing is asked. `accepts[m, t]`: whether kind m runs on
    GPUs of type t, in the order in which the types were given. `shares` add up to 1.
    """

    gpus: Integers
    millicores: Floats
    memory_bytes: Floats
    accepts: NDArray[np.bool_]
    shares: Floats
    # Names of the device types, for callers that look them up by name.
    device_types: tuple[str, ...] = ()


def fragmented_gpus(
    demand: GangMix,
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


def demand_of_shapes(shapes: Iterable[GangShape], sets: Iterable[ConfigurationSet]) -> GangMix:
    """The kinds among these gangs, the most frequent 128 of them, on a cluster of these configuration sets; gangs
    without devices leave no fragments. ValueError if none has any.

    What a shape leaves to the node's proportional share is counted on the first set that has devices of its type.
    """
    with_devices = sorted((item for item in sets if item.devices), key=lambda item: item.name)
    types = tuple(sorted({item.device_type for item in with_devices}))
    kinds: Counter[tuple[int, float, float, str]] = Counter()
    for shape, count in Counter(shapes).items():
        at = next((item for item in with_devices if shape.device_type in ("", item.device_type)), None)
        if shape.gpus and at is not None:
            needed = demand(at, shape, tuple(role.tasks for role in shape.roles))
            kind = (shape.gpus, needed.millicores / shape.gpus, needed.memory_bytes / shape.gpus, shape.device_type)
            kinds[kind] += count
    if not kinds:
        raise ValueError("no gang asks for devices that the cluster has")
    # Most frequent first; ties by the kind itself, so that the order of the shapes does not matter.
    frequent = sorted(kinds.items(), key=lambda item: (-item[1], item[0]))[:MOST_KINDS]
    gpus, millicores, memory, wishes = zip(*(kind for kind, _ in frequent), strict=True)
    counts = np.array([count for _, count in frequent], np.float64)
    return GangMix(
        np.array(gpus, np.int64),
        np.array(millicores, np.float64),
        np.array(memory, np.float64),
        np.array([[wish in ("", item) for item in types] for wish in wishes], np.bool_),
        counts / counts.sum(),
        types,
    )
