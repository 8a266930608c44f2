"""B5. Six jobs of one GPU each take turns on four (Gandiva, OSDI 2018, figure 9: each gets four sixths of the time,
and switching costs no more than 2 %).

Set-up: one node of four GPUs, slices of 60 s, two hours. The production's slicing decides which jobs run next; what is
modelled is time: a job that enters a slice trains after the switch, which is suspending one job and resuming another
with its state offloaded to host memory. Those costs are not simulated but measured live on this code
(docs/measurements/figures.md, medians of the demo on processors: 41 ms and 24 ms); Gandiva's are beside them
(0.1 to 1 s). Nothing is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

from ganger.cluster.topology import Topology, parse_topology
from ganger_master.policies.fairness import QUANTUM_S

from experiments.experiment import CoreUse, Experiment, MeasuredRows, Row, Setting
from experiments.slice_model import RotatedGang, SharedNode, credited, next_row, seated

_JOBS, _GPUS, _SLICES = 6, 4, 120
# Seconds to suspend one and resume another.
_COSTS = {"measured": 0.041 + 0.024, "gandiva-least": 0.1, "gandiva-most": 1.0}


def parts(setting: Setting) -> Sequence[Row]:
    return [{"cost": name, "switch_s": seconds} for name, seconds in _COSTS.items()]


def measure(setting: Setting, part: Row) -> Sequence[Row]:
    set_of_four = parse_topology("1x4", name="p100", device_type="p100", millicores=12_000, memory_bytes=448 * 10**9)
    node = SharedNode("node", Topology(set_of_four), (1 << _GPUS) - 1)
    sharers: tuple[RotatedGang, ...] = tuple(RotatedGang(number, 1) for number in range(_JOBS))
    trained, switches = dict.fromkeys(range(_JOBS), 0.0), 0
    for _ in range(_SLICES):
        row = next_row(sharers, [node], QUANTUM_S)
        # a job that moves to another GPU pays as one that enters
        late = {*row.entering(sharers), *row.shifted(sharers)}
        for number in row.seats:
            trained[number] += QUANTUM_S - (part["switch_s"] if number in late else 0.0)
        switches += len(late)
        sharers = credited(seated(sharers, row), row.seats.keys(), QUANTUM_S, QUANTUM_S)
    elapsed = _SLICES * QUANTUM_S
    return [
        {"job": number, "share": seconds / elapsed, "switches": switches, "gpus": _GPUS}
        for number, seconds in trained.items()
    ]


def conclude(rows: Sequence[Row]) -> MeasuredRows:
    entitled = _GPUS / _JOBS

    def shares(cost: str) -> list[float]:
        return [row["share"] for row in rows if row["cost"] == cost]

    return MeasuredRows(
        {
            "share_off_by": max(abs(share / entitled - 1.0) for share in shares("measured")),
            "aggregate": sum(shares("measured")) / _GPUS,
            "switch_seconds": _COSTS["measured"],
            "aggregate_at_1_s": sum(shares("gandiva-most")) / _GPUS,
            "share_off_by_at_1_s": max(abs(share / entitled - 1.0) for share in shares("gandiva-most")),
        },
        seeds=1,
        load=_JOBS / _GPUS,
        why="the cost of a switch is an input, measured live on processors with small models; gigabytes on GPUs take "
        "longer, as Gandiva's up to 1 s did",
    )


SLICED_GPUS = Experiment("B5", parts, measure, conclude, core=CoreUse.ARITHMETIC)
