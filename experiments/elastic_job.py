"""B7. A job grows from one GPU to four while they are idle and gives three back when others come (Gandiva, OSDI 2018,
figure 11; no figures are published with it).

Set-up: one node of four GPUs; ResNet-50 at one global batch of 256, its rates with 1, 2 and 4 A100 and what a change of
size takes as ElasticFlow measured them. The production's decisions grow and shrink jobs,
from rates measured in windows of ten mini-batches that scatter by 3 %. When the job has settled a gang of three GPUs
comes at a random instant; it has them when the job's mini-batch is over and its state parked, which takes what a
suspension does: measured live on this code (docs/measurements/figures.md, 41 ms), and Gandiva's 0.1 and 1 s beside it.
A gang that comes while the job changes its size waits until that is done, too.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.claims import make_claim
from ganger.cluster.resources import Claim, GangShape, Locality, LocalityLevel, NodeRow, Role, TaskShape
from ganger.cluster.topology import parse_topology
from ganger.cluster.view import LoadMode, View
from ganger_master.policies.elastic_growth import IDLE_S, Elastic, grow, shrink, verdict
from ganger_master.policies.trials import TrialRates, TrialVerdict
from ganger_master.simulator.report.figures import interval

from experiments.experiment import CoreUse, Experiment, MeasuredRows, Row, Setting

_THROUGHPUT, _OVERHEADS = "profile_ef_throughput_a100.csv", "profile_ef_overheads.csv"
_MODEL, _BATCH, _GPUS = "resnet50", "256", 4
_ARRIVALS = 200
_SUSPENSIONS_S = {"measured": 0.041, "gandiva-least": 0.1, "gandiva-most": 1.0}
# Mini-batches of a window, and how rates scatter.
_WINDOW, _SCATTER = 10, 0.03
_HORIZON_S = 1800.0


def parts(setting: Setting) -> Sequence[Row]:
    return [{"seed": seed} for seed in setting.seeds(5)]


def measure(setting: Setting, part: Row) -> Sequence[Row]:
    random = np.random.default_rng(part["seed"])
    rates = _rates(setting)
    changes = _grown(rates, _resize_s(setting), random)
    settled = changes[-1]
    view, held = _server(settled.gpus)
    job = Elastic(0, tuple(sorted(rates)), ((held.node, held.device_mask),), {settled.gpus: rates[settled.gpus]})
    left = shrink([job], CapacityIndex(view), _gang(_GPUS - 1), {0: (held,)}).get(0, settled.gpus)
    ends = [*(change.at_s for change in changes[1:]), _HORIZON_S]
    trained = sum((end - now.ready_s) * rates[now.gpus] for now, end in zip(changes, ends, strict=True))
    batch_s = 1.0 / rates[settled.gpus]
    rows: list[Row] = []
    for name, suspension_s in _SUSPENSIONS_S.items():
        waits = batch_s - random.uniform(0.0, batch_s, _ARRIVALS) + suspension_s
        growing = max((change.ready_s - change.at_s for change in changes[1:]), default=0.0) + suspension_s
        rows.append(
            {
                "suspension": name,
                "grown_to": settled.gpus,
                "shrunk_to": left,
                "settled_s": settled.ready_s,
                "gain": trained / (_HORIZON_S * rates[1]),
                "longest_s": float(waits.max()),
                "over": float(waits.max()) / (batch_s + suspension_s),
                "while_growing_s": growing,
            }
        )
    return rows


def conclude(rows: Sequence[Row]) -> MeasuredRows:
    measured = [row for row in rows if row["suspension"] == "measured"]
    slow = [row for row in rows if row["suspension"] == "gandiva-most"]
    return MeasuredRows(
        {
            "shrink_over_batch_and_suspension": max(row["over"] for row in rows),
            "shrink_seconds": max(row["longest_s"] for row in measured),
            "shrink_seconds_at_1_s": max(row["longest_s"] for row in slow),
            "shrink_seconds_while_growing": max(row["while_growing_s"] for row in measured),
            "grown_to": interval([row["grown_to"] for row in measured]),
            "shrunk_to": interval([row["shrunk_to"] for row in measured]),
            "settled_after_seconds": interval([row["settled_s"] for row in measured]),
            "trained_against_one_gpu": interval([row["gain"] for row in measured]),
        },
        seeds=len(measured),
        why="boundary and suspension are what the simulator is told they take: that decisions add nothing to them is "
        "what is shown; a gang that comes while the job changes its size waits for that, too",
    )


@dataclass(frozen=True)
class _Size:
    """From `at_s` on the job stands still for its new size, from `ready_s` on it has it."""

    gpus: int
    at_s: float
    ready_s: float


def _grown(rates: Mapping[int, float], resize_s: float, random: np.random.Generator) -> list[_Size]:
    """The sizes that the job has, one after the other, until nothing more is to be gained."""
    sizes = [_Size(1, 0.0, 0.0)]
    known: dict[int, float] = {}
    ceiling = _GPUS + 1
    while True:
        now = sizes[-1]
        known[now.gpus] = rates[now.gpus]
        view, held = _server(now.gpus)
        job = Elastic(0, tuple(sorted(rates)), ((held.node, held.device_mask),), dict(known), ceiling=ceiling)
        growth = grow([job], view, IDLE_S)
        if growth is None:
            return sizes
        begins = now.ready_s + IDLE_S
        sizes.append(_Size(growth.gpus, begins, begins + resize_s))
        before, after = _windows(rates[now.gpus], 16, random), _windows(rates[growth.gpus], 64, random)
        windows, found = 0, TrialVerdict.MEASURE
        while found is TrialVerdict.MEASURE:
            windows += 1
            found = verdict(now.gpus, growth.gpus, TrialRates(before, after[:windows])).verdict
        judged = sizes[-1].ready_s + windows * _WINDOW / rates[growth.gpus]
        if found is TrialVerdict.UNDO:
            ceiling = growth.gpus
            sizes.append(_Size(now.gpus, judged, judged + resize_s))


def _windows(rate: float, count: int, random: np.random.Generator) -> tuple[float, ...]:
    values: list[float] = (rate * (1.0 + _SCATTER * random.standard_normal(count))).tolist()
    return tuple(values)


def _server(gpus: int) -> tuple[View, Claim]:
    """With the job on so many of its devices."""
    of = parse_topology("1x4", name="a100", device_type="a100", millicores=32_000, memory_bytes=512 * 10**9)
    view = View([of])
    view.put(NodeRow("node", of.name, (1 << _GPUS) - 1, tuple(s.millicores for s in of.sockets), of.memory_bytes))
    claim = make_claim(view, 0, _gang(gpus), (gpus,), LoadMode.PACK)
    assert claim is not None
    view.take(claim, gpus)
    return view, claim


def _gang(gpus: int) -> GangShape:
    return GangShape((Role("worker", gpus, TaskShape(1)),), locality=Locality(LocalityLevel.NODE))


def _rates(setting: Setting) -> dict[int, float]:
    """Mini-batches per second by number of GPUs."""
    with (setting.traces / _THROUGHPUT).open(newline="") as file:
        return {
            int(row["gpus"]): float(row["iterations_per_s"])
            for row in csv.DictReader(file)
            if (row["model"], row["global_batch_size"]) == (_MODEL, _BATCH) and int(row["gpus"]) <= _GPUS
        }


def _resize_s(setting: Setting) -> float:
    with (setting.traces / _OVERHEADS).open(newline="") as file:
        return next(
            float(row["overhead_s"])
            for row in csv.DictReader(file)
            if (row["model"], row["transition"]) == (_MODEL, "1GPU->2GPU")
        )


ELASTIC_JOB = Experiment(
    "B7", parts, measure, conclude, core=CoreUse.ARITHMETIC, needs=(("traces", _THROUGHPUT), ("traces", _OVERHEADS))
)
