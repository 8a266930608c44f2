"""The tunings by name, and the short ones: by a fixed rule (baselines of the CPU poster, Xiao et al., SoCC 2018), and
by prediction: cores by marginal gain per core, up to each job's sweet point (the same poster).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from ganger_master.estimators.cores_and_memory import CpuModel
from ganger_master.policies.orders import Floats
from ganger_master.policies.tunings import (
    ENOUGH,
    ROUNDING,
    Gangs,
    Pieces,
    Profiles,
    Tuning,
    TuningNodes,
    demands,
    proportionally,
)
from ganger_master.policies.tunings.exact import EXACT
from ganger_master.policies.tunings.synergy import SYNERGY_GREEDY, SYNERGY_OPT, SYNERGY_TUNE

SERVER_CORES = 3.0
WORKER_CORES = 4.0


def tune_proportionally(gangs: Gangs, nodes: TuningNodes, placed: Pieces) -> Pieces:
    """Give cores and memory in proportion to GPUs, whatever the job: the poster's `bind` (24 cores, 4 GPUs: 6)."""
    return proportionally(nodes, placed)


def tune_by_role(gangs: Gangs, nodes: TuningNodes, placed: Pieces) -> Pieces:
    """Give 3 cores to a parameter server and 4 to a worker with its GPU: the task-role heuristic of the poster. It
    reads neither jobs nor nodes; memory is proportional. Where a node has fewer cores than its tasks would take, every
    piece is reduced in proportion; the plain rule would leave such gangs unplaced."""
    wanted = WORKER_CORES * placed.gpus + SERVER_CORES * placed.parameter_servers
    return placed.given(_scaled(placed, wanted, nodes.cores), proportionally(nodes, placed).memory_bytes)


def tune_shared(gangs: Gangs, nodes: TuningNodes, placed: Pieces) -> Pieces:
    """Let all gangs of a node share its cores and memory without isolation; GPUs are exclusive.

    The model is processor sharing: every gang starts as many busy threads as it can use, up to its demand, and the
    operating system serves all threads alike. While they fit, each gang receives its demand, and beyond that a part of
    the node's cores in proportion to its demand; the same holds for the page cache. The cost of context switches is not
    modelled, which flatters sharing.
    """
    demand = demands(gangs, nodes)
    return placed.given(
        _scaled(placed, placed.gpus * demand.cores[placed.gang], nodes.cores),
        _scaled(placed, placed.gpus * demand.memory_bytes[placed.gang], nodes.memory_bytes),
    )


def _scaled(placed: Pieces, wanted: Floats, capacity: Floats) -> Floats:
    used = np.bincount(placed.node, weights=wanted, minlength=len(capacity))
    part = capacity / np.maximum(used, capacity + (capacity <= 0.0))
    return np.asarray(wanted * part[placed.node], float)


PROPORTIONAL = Tuning("proportional", tune_proportionally, by_profiles=False)
BIND = Tuning("bind", tune_proportionally, by_profiles=False)
ROLE = Tuning("role", tune_by_role, by_profiles=False)
SHARED = Tuning("shared", tune_shared)


def predicted(models: Sequence[CpuModel], most_cores: int) -> Profiles:
    """Profiles of fitted curves on whole cores up to `most_cores`. The poster knows nothing of memory: any serves."""
    cores = np.arange(1.0, most_cores + 1.0)
    rates = np.array([model.rates(cores) for model in models]).reshape(len(models), most_cores, 1)
    return Profiles(cores, np.ones(1), np.maximum.accumulate(rates, axis=1))


def tune(gangs: Gangs, nodes: TuningNodes, placed: Pieces) -> Pieces:
    cores = np.zeros(len(placed))
    order = np.argsort(placed.node, kind="stable")
    starts = np.flatnonzero(np.diff(placed.node[order], prepend=-1))
    for rows in np.split(order, starts[1:]) if len(order) else []:
        capacity = float(nodes.cores[placed.node[rows[0]]])
        cores[rows] = shared_out([_curve(gangs, placed, int(row), capacity) for row in rows], capacity)
    return placed.given(cores, proportionally(nodes, placed).memory_bytes)


def tune_asked(gangs: Gangs, nodes: TuningNodes, placed: Pieces) -> Pieces:
    """Tune as the predictor, and give no more memory than a gang was shown to use, if less than its share."""
    found = tune(gangs, nodes, placed)
    if len(gangs.profiles.memory_bytes) < 2:
        return found
    wanted = placed.gpus * demands(gangs, nodes).memory_bytes[placed.gang]
    return found.given(found.cores, np.minimum(found.memory_bytes, wanted))


def shared_out(curves: Sequence[Floats], capacity: float) -> list[float]:
    """Return the cores for each curve. Entry i of a curve is the value of i + 1 cores; the last is the sweet point.
    Each curve gets at least one core, or an equal part where there are fewer. Cores without a use are left over. Ties
    go to the curve named first."""
    if capacity < len(curves):
        return [capacity / len(curves)] * len(curves)
    held = [1] * len(curves)
    left = int(capacity * (1.0 + ROUNDING)) - len(curves)
    heap: list[tuple[float, int, int]] = []

    def push(curve: int) -> None:
        step = _step(curves[curve], held[curve], left)
        if step is not None:
            heapq.heappush(heap, (-step[0], curve, step[1]))

    for curve in range(len(curves)):
        push(curve)
    while heap:
        _, curve, count = heapq.heappop(heap)
        # others may have taken what this step needs: then a shorter one competes again
        if count <= left:
            held[curve] += count
            left -= count
        push(curve)
    return [float(count) for count in held]


def _step(curve: Floats, held: int, left: int) -> tuple[float, int] | None:
    """(gain for each core, cores) of the most gainful step; the shortest of equals."""
    ahead = curve[held : held + left]
    if not len(ahead):
        return None
    gains = (ahead - curve[held - 1]) / np.arange(1, len(ahead) + 1)
    count = int(np.argmax(gains))
    return (float(gains[count]), count + 1) if gains[count] > ROUNDING else None


def _curve(gangs: Gangs, placed: Pieces, row: int, capacity: float) -> Floats:
    """S(c)/S(theta) for whole cores of the piece, from one to its sweet point."""
    gang, gpus = int(placed.gang[row]), int(placed.gpus[row])
    most = max(1, min(int(capacity), int(np.ceil(gangs.profiles.cores[-1] * gpus))))
    rates = gangs.profiles.at(
        gangs.profile[gang], np.arange(1, most + 1) / gpus, np.array(gangs.profiles.memory_bytes[-1])
    )
    sweet = int(np.argmax(rates >= ENOUGH * rates[-1]))
    return np.asarray(rates[: sweet + 1] / max(float(rates[sweet]), 1e-9), float)


PREDICTOR = Tuning("predictor", tune)
AUTO = Tuning("auto", tune_asked, keeps_requests=True)

TUNINGS = {
    tuning.name: tuning
    for tuning in (AUTO, BIND, EXACT, PREDICTOR, PROPORTIONAL, ROLE, SHARED, SYNERGY_GREEDY, SYNERGY_OPT, SYNERGY_TUNE)
}
