"""B16. Whether a gang is ever put further apart than it had to be (Xiao, SOSP 2017 student research, figures 1 and 2;
Chronus's speeds by locality: eight GPUs of VGG16 in four servers run at a quarter of the speed they have in one).

Set-up: clusters of 24 servers with 2 sockets of 2 switches of 2 GPUs, four servers a rack, three racks a fabric, filled
by the placement itself with gangs of 1 to 32 GPUs and emptied again at random, so that what is free lies in pieces. At
every placement the level of what was chosen (same switch, socket, server, rack, fabric, cluster) is held against the
closest that was free, found by trying every set of free GPUs of every server, and every rack and fabric.
`worse_than_free` is the share of placements of `locality` that were worse, `missed` that of gangs it found no place for
where there was one; the others, which weigh other things too, stand beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import combinations

import numpy as np
from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.resources import Claim, GangShape, LocalityLevel, NodeRow, Role, TaskShape
from ganger.cluster.search import PlacementRequest
from ganger.cluster.topology import Topology, parse_topology
from ganger.cluster.view import LoadMode, View
from ganger_master.policies.placements import PLACEMENTS
from ganger_master.simulator.report.figures import Interval, interval

from experiments.experiment import CoreUse, Experiment, MeasuredRows, Row, Setting

_NODES, _PER_RACK, _RACKS_PER_FABRIC = 24, 4, 3
_GPUS = (1, 1, 1, 2, 2, 4, 8, 16, 32)
_STEPS = 600
# Part of the steps at which a gang ends instead of one beginning.
_ENDS = 0.45
_SET = parse_topology("2x2x2", name="server", device_type="gpu", millicores=24_000, memory_bytes=500 * 10**9)
_PLACEMENTS = ("locality", "gandiva", "best-fit", "first-fit", "tetris", "fgd", "optimus")


def parts(setting: Setting) -> Sequence[Row]:
    return [{"placement": name, "seed": seed} for name in _PLACEMENTS for seed in setting.seeds(5)]


def measure(setting: Setting, part: Row) -> Sequence[Row]:
    random = np.random.default_rng(part["seed"])
    view = _idle()
    room = CapacityIndex(view)
    topology = Topology(_SET)
    placement = PLACEMENTS[part["placement"]]
    held: list[tuple[Claim, ...]] = []
    rows: list[Row] = []
    for _ in range(_STEPS):
        if held and random.random() < _ENDS:
            room.give(held.pop(int(random.integers(len(held)))))
            continue
        gpus = int(random.choice(_GPUS))
        claims = placement.place(room, PlacementRequest(GangShape((Role("worker", gpus, TaskShape(1)),))))
        best = _closest_free(view, topology, gpus)
        if best is None:
            assert claims is None, f"{part['placement']} finds {gpus} GPUs where there are not so many"
            continue
        chosen = None if claims is None else int(_level(view, topology, claims))
        rows.append({"gpus": gpus, "chosen": chosen, "best": int(best)})
        if claims is None:
            continue
        room.take(claims)
        held.append(claims)
    return rows


def conclude(rows: Sequence[Row]) -> MeasuredRows:
    seeds = sorted({row["seed"] for row in rows})

    def worse(name: str, seed: int, beyond: int = 0) -> float:
        """The share that was worse, and so bad that it was beyond this level."""
        of = [row for row in rows if (row["placement"], row["seed"]) == (name, seed) and row["chosen"] is not None]
        return float(np.mean([row["chosen"] > max(row["best"], beyond) for row in of]))

    missed = [row["chosen"] is None for row in rows if row["placement"] == "locality"]
    ours: dict[str, float | Interval] = {
        "worse_than_free": interval([worse("locality", seed) for seed in seeds]),
        "missed": float(np.mean(missed)),
    }
    for name in _PLACEMENTS[1:]:
        label = name.replace("-", "_")
        ours[f"worse_{label}"] = interval([worse(name, seed) for seed in seeds])
        ours[f"worse_beyond_a_server_{label}"] = interval([worse(name, seed, LocalityLevel.NODE) for seed in seeds])
    return MeasuredRows(
        ours,
        len(seeds),
        why="no figure to compare with; first-fit and optimus look at servers only, others weigh fit against a switch",
    )


def _idle() -> View:
    view = View((_SET,), mode=LoadMode.PACK)
    cores = tuple(socket.millicores for socket in _SET.sockets)
    for number in range(_NODES):
        rack = number // _PER_RACK
        fabric = f"f{rack // _RACKS_PER_FABRIC}"
        view.put(NodeRow(f"n{number:02}", _SET.name, 0xFF, cores, _SET.memory_bytes, rack=f"r{rack}", fabric=fabric))
    return view


def _level(view: View, topology: Topology, claims: Sequence[Claim]) -> LocalityLevel:
    """The worst pair of a gang's devices."""
    if len(claims) == 1:
        return topology.level(claims[0].device_mask)
    slots = [view.slots[claim.node] for claim in claims]
    if len({(view.fabrics[slot], view.racks[slot]) for slot in slots}) == 1:
        return LocalityLevel.RACK
    return LocalityLevel.FABRIC if len({view.fabrics[slot] for slot in slots}) == 1 else LocalityLevel.CLUSTER


def _closest_free(view: View, topology: Topology, gpus: int) -> LocalityLevel | None:
    """The closest level at which so many GPUs are free; None: nowhere."""
    in_server = [level for mask in view.free if (level := _closest_of(topology, mask, gpus)) is not None]
    if in_server:
        return min(in_server)
    free = [mask.bit_count() for mask in view.free]
    for level, places in (
        (LocalityLevel.RACK, list(zip(view.fabrics, view.racks, strict=True))),
        (LocalityLevel.FABRIC, list(view.fabrics)),
        (LocalityLevel.CLUSTER, [""] * len(free)),
    ):
        if any(sum(n for n, at in zip(free, places, strict=True) if at == place) >= gpus for place in set(places)):
            return level
    return None


@cache
def _closest_of(topology: Topology, free: int, gpus: int) -> LocalityLevel | None:
    """Of one server: by trying all sets of its free GPUs."""
    devices = [1 << bit for bit in range(topology.devices) if free >> bit & 1]
    levels = [topology.level(sum(chosen)) for chosen in combinations(devices, gpus)]
    return min(levels) if levels else None


CLOSEST_TIER = Experiment("B16", parts, measure, conclude, core=CoreUse.ARITHMETIC)
