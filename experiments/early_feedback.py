"""B22. How much sooner a search over hyper-parameters finds its best configuration when all of its trials take turns
and report early (Gandiva, OSDI 2018: time slicing speeds up such searches by up to an order of magnitude).

Set-up: one node of four GPUs and a search of so many trials of one GPU, each of which trains for the stated time.
Without slicing trials run four at a time to their ends, in the order in which the search drew them. With slicing the
production code decides which trials run in each slice of a minute until every trial has shown a hundred mini-batches,
which take 10 to 60 s (uniform); then the search lets the four that look best run to their ends, then the next four. How
early results tell is declared: final accuracies are normal, and early ones are those with so many of their standard
deviations of noise. Compared is the time until the best trial has ended; its average over searches for each cell, of
which the largest is the paper's `up to`. Without slicing the best trial is as likely to stand in any round of four as
in any other, so the average is taken over all of them and not drawn. A slice that begins loses a switch: 0.1 s, which
is what Gandiva states of models of images, as its searches train (LeNet- and ResNet-like on CIFAR-10); beside it stands
1 s, its slowest, of large models of language.

For comparison, the gain of all jobs of a cluster: how much sooner jobs of the Philly trace have run for a minute on 100
GPUs when they take turns than under FIFO, mean over jobs.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from itertools import product

import numpy as np
from ganger.cluster.topology import Topology, parse_topology
from ganger_master.policies.fairness import QUANTUM_S
from ganger_master.policies.job_facts import Floats
from ganger_master.policies.order_registry import ORDERS
from ganger_master.simulator.report.figures import interval, paired_ratio
from ganger_master.simulator.traces.workload import scaled_to_load, workload

from experiments.counted_slices import in_turns
from experiments.experiment import CoreUse, Experiment, MeasuredRows, Row, Setting
from experiments.paper_claims import claims
from experiments.slice_model import RotatedGang, SharedNode, credited, next_row, seated

_GPUS = 4
# Seconds of a switch: compared, and beside it.
_SWITCHES_S = (0.1, 1.0)
# Trials fill whole rounds.
_TRIALS, _HOURS, _NOISE = (16, 40, 100), (0.5, 2.0), (0.0, 0.5, 1.0)
_SEARCHES = 20
_FIRST_S = 60.0
_PHILLY = "jobs_philly_2017-09-04_2017-10-15.csv"
_CLUSTER_GPUS, _CLUSTER_JOBS, _CLUSTER_LOADS = 100, 1000, (0.9, 1.3)


def parts(setting: Setting) -> Sequence[Row]:
    return [{"kind": kind, "seed": seed} for kind in ("search", "cluster") for seed in setting.seeds(5)]


def measure(setting: Setting, part: Row) -> Sequence[Row]:
    random = np.random.default_rng(part["seed"])
    return _cluster(setting, random) if part["kind"] == "cluster" else _searches(random)


def conclude(rows: Sequence[Row]) -> MeasuredRows:
    searches = [row for row in rows if row["kind"] == "search"]
    cells = list(dict.fromkeys((row["trials"], row["hours"], row["noise"]) for row in searches))
    compared_s, slowest_s = _SWITCHES_S
    seeds = sorted({row["seed"] for row in rows})

    def speed_up(cell: tuple[int, float, float], switch_s: float = compared_s) -> list[float]:
        """By seed: the mean time without slicing by the mean time with it."""
        wanted = (*cell, switch_s)
        of_cell = [row for row in searches if (row["trials"], row["hours"], row["noise"], row["switch_s"]) == wanted]
        return [
            float(
                np.mean([row["fifo_s"] for row in of_cell if row["seed"] == seed])
                / np.mean([row["sliced_s"] for row in of_cell if row["seed"] == seed])
            )
            for seed in seeds
        ]

    found = {cell: interval(speed_up(cell)) for cell in cells}
    largest = max(cells, key=lambda cell: found[cell].mean)
    at_slowest = {cell: interval(speed_up(cell, slowest_s)) for cell in cells}
    enough = claims()["B22"].holds["largest_speed_up"]["at_least"]
    ours = {
        "largest_speed_up": found[largest],
        f"largest_speed_up_at_{slowest_s:g}_s": max(at_slowest.values(), key=lambda value: value.mean),
    }
    for (trials, hours, noise), value in found.items():
        ours[f"speed_up_{trials}_trials_{hours:g}_h_noise_{noise:g}"] = value
    cluster = [row for row in rows if row["kind"] == "cluster"]
    for load in _CLUSTER_LOADS:
        of_load = {row["seed"]: row for row in cluster if row["load"] == load}
        ours[f"first_minute_sooner_at_{load:g}"] = paired_ratio(
            [of_load[seed]["fifo_s"] for seed in seeds], [of_load[seed]["turns_s"] for seed in seeds]
        )
    least = min(found.values(), key=lambda value: value.mean)
    return MeasuredRows(
        {
            **ours,
            "smallest_speed_up": least.mean,
            "share_of_cells": float(np.mean([value.mean >= enough for value in found.values()])),
        },
        len(seeds),
        load={"trials for each GPU": largest[0] / _GPUS},
        why="a search gains by how many trials it has for each GPU, how long they are, and how well early results "
        f"tell: the declared ones {least.mean:.1f} to {found[largest].mean:.1f} times, an order of magnitude in "
        f"{sum(value.mean >= enough for value in found.values())} of {len(found)}; with switches of {slowest_s:g} s "
        f"{max(value.mean for value in at_slowest.values()):.1f} times at most",
    )


def _searches(random: np.random.Generator) -> list[Row]:
    rows: list[Row] = []
    for trials in _TRIALS:
        for hours in _HOURS:
            for _ in range(_SEARCHES):
                final, doubt = random.standard_normal(trials), random.standard_normal(trials)
                first_s = random.uniform(10.0, 60.0, trials)
                best = int(np.argmax(final))
                told_s = {switch_s: feedback_s(first_s, switch_s) for switch_s in _SWITCHES_S}
                for switch_s, noise in product(_SWITCHES_S, _NOISE):
                    looks = np.argsort(-(final + noise * doubt), kind="stable")
                    # What a trial has trained before it was told apart is kept.
                    turn = int(np.flatnonzero(looks == best)[0]) // _GPUS
                    left_s = 3600.0 * hours * (turn + 1) - first_s[best]
                    rows.append(
                        {
                            "trials": trials,
                            "hours": hours,
                            "noise": noise,
                            "switch_s": switch_s,
                            "fifo_s": 3600.0 * hours * (trials // _GPUS + 1) / 2,
                            "sliced_s": told_s[switch_s] + left_s,
                        }
                    )
    return rows


def feedback_s(first_s: Floats, switch_s: float) -> float:
    """Seconds until each of these trials has trained for so long, in slices of one node."""
    four = parse_topology("1x4", name="p100", device_type="p100", millicores=12_000, memory_bytes=448 * 10**9)
    node = SharedNode("node", Topology(four), (1 << _GPUS) - 1)
    sharers: tuple[RotatedGang, ...] = tuple(RotatedGang(number, 1) for number in range(len(first_s)))
    trained, now = np.zeros(len(first_s)), 0.0
    last = 0.0
    while (trained < first_s).any():
        row = next_row(sharers, [node], QUANTUM_S)
        late = {*row.entering(sharers), *row.shifted(sharers)}
        for number in row.seats:
            lost = switch_s if number in late else 0.0
            if trained[number] < first_s[number] <= trained[number] + QUANTUM_S - lost:
                last = max(last, now + lost + float(first_s[number] - trained[number]))
            trained[number] += QUANTUM_S - lost
        sharers = credited(seated(sharers, row), row.seats.keys(), QUANTUM_S, QUANTUM_S)
        now += QUANTUM_S
    return last


def _cluster(setting: Setting, random: np.random.Generator) -> list[Row]:
    with (setting.traces / _PHILLY).open(newline="") as file:
        recorded = [(int(row["gpus"]), float(row["duration_s"])) for row in csv.DictReader(file)]
    usable = [(gpus, seconds) for gpus, seconds in recorded if gpus <= _CLUSTER_GPUS // 4 and seconds >= _FIRST_S]
    most = np.percentile([seconds for _, seconds in usable], 95)
    usable = [(gpus, seconds) for gpus, seconds in usable if seconds <= most]
    drawn = [usable[index] for index in random.integers(len(usable), size=_CLUSTER_JOBS).tolist()]
    arrivals = np.cumsum(random.exponential(1.0, _CLUSTER_JOBS))
    jobs = workload(map(str, range(_CLUSTER_JOBS)), arrivals, [g for g, _ in drawn], [s for _, s in drawn])
    rows: list[Row] = []
    for load in _CLUSTER_LOADS:
        offered = scaled_to_load(jobs, _CLUSTER_GPUS, load)
        fifo, turns = (
            in_turns(offered, _CLUSTER_GPUS, ORDERS[name], QUANTUM_S).started_s - offered.submit_s + _FIRST_S
            for name in ("fifo", "round-robin")
        )
        rows.append({"load": load, "fifo_s": float(fifo.mean()), "turns_s": float(turns.mean())})
    return rows


EARLY_FEEDBACK = Experiment("B22", parts, measure, conclude, core=CoreUse.ARITHMETIC, needs=(("traces", _PHILLY),))
