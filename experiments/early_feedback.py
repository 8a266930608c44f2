"""B22. How much sooner a search over hyper-parameters finds its best configuration when all of its trials take turns
and report early (Gandiva, OSDI 2018: time slicing speeds up such searches by up to an order of magnitude).

Set-up: one node of four GPUs and a search of so many trials of one GPU, each of which trains for the stated time.
Without slicing trials run four at a time to their ends, in the order in which the search drew them. With slicing they
run in turns until every trial has shown a hundred mini-batches, which take 10 to 59 s (uniform), so that a slice
suffices; then the search lets the four that look best run to their ends, then the next four. When each trial gets its
first slice is what the production core and the planner's loop decide in virtual time under `round-robin`, with plans
every minute. A switch takes 0.1 s, which is what Gandiva states of models of images, as its searches train (LeNet- and
ResNet-like on CIFAR-10); beside it stands 1 s, its slowest, of large models of language. The default policy, `ganger`,
stands beside, too: newcomers get their first minutes early, in plans at least five minutes apart. (That trials end
meanwhile is not counted.)

How early results tell is declared: final accuracies are normal, and early ones are those with so many of their standard
deviations of noise. Compared is the time until the best trial has ended; its average over searches for each cell, of
which the largest is the paper's `up to`. Without slicing the best trial is as likely to stand in any round of four as
in any other, so the average is taken over all of them and not drawn.

For comparison, the gain of all jobs of a cluster under the default: how much sooner jobs of the Philly trace have run
for a minute on 100 GPUs than under FIFO, mean over jobs.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from itertools import product

import numpy as np
from ganger_master.policies.fairness import QUANTUM_S
from ganger_master.policies.orders import Floats
from ganger_master.simulator.inputs import ReplayOptions, SwitchCosts
from ganger_master.simulator.report.figures import interval, paired_ratio
from ganger_master.simulator.run import simulate
from ganger_master.simulator.traces.servers import servers_from_flags
from ganger_master.simulator.traces.workload import scaled_to_load, workload

from experiments.experiment import CoreUse, Experiment, MeasuredRows, Row, Setting
from experiments.paper_claims import claims

_GPUS = 4
# Seconds of a switch: compared, and beside it.
_SWITCHES_S = (0.1, 1.0)
_TURNS, _DEFAULT = "round-robin", "ganger"
# Of a hundred mini-batches; the longest fit into a slice that began with the slowest switch.
_SHOWN_S = (10.0, QUANTUM_S - max(_SWITCHES_S))
# Trials fill whole rounds.
_TRIALS, _HOURS, _NOISE = (16, 40, 100), (0.5, 2.0), (0.0, 0.5, 1.0)
_SEARCHES = 20
_FIRST_S = 60.0
_PHILLY = "jobs_philly_2017-09-04_2017-10-15.csv"
_CLUSTER_NODES, _CLUSTER_JOBS, _CLUSTER_LOADS = 25, 1000, (0.9, 1.3)


def parts(setting: Setting) -> Sequence[Row]:
    return [{"kind": kind, "seed": seed} for kind in ("search", "cluster") for seed in setting.seeds(5)]


def measure(setting: Setting, part: Row) -> Sequence[Row]:
    random = np.random.default_rng(part["seed"])
    return _cluster(setting, random, part["seed"]) if part["kind"] == "cluster" else _searches(random)


def conclude(rows: Sequence[Row]) -> MeasuredRows:
    searches = [row for row in rows if row["kind"] == "search"]
    cells = list(dict.fromkeys((row["trials"], row["hours"], row["noise"]) for row in searches))
    compared_s, slowest_s = _SWITCHES_S
    seeds = sorted({row["seed"] for row in rows})

    def speed_up(cell: tuple[int, float, float], switch_s: float = compared_s, policy: str = _TURNS) -> list[float]:
        """By seed: the mean time without slicing by the mean time with it."""
        wanted = (*cell, switch_s, policy)
        names = ("trials", "hours", "noise", "switch_s", "policy")
        of_cell = [row for row in searches if tuple(row[name] for name in names) == wanted]
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
    by_default = {cell: interval(speed_up(cell, policy=_DEFAULT)) for cell in cells}
    enough = claims()["B22"].holds["largest_speed_up"]["at_least"]
    ours = {
        "largest_speed_up": found[largest],
        f"largest_speed_up_at_{slowest_s:g}_s": max(at_slowest.values(), key=lambda value: value.mean),
        f"largest_speed_up_{_DEFAULT}": max(by_default.values(), key=lambda value: value.mean),
    }
    for (trials, hours, noise), value in found.items():
        ours[f"speed_up_{trials}_trials_{hours:g}_h_noise_{noise:g}"] = value
    cluster = [row for row in rows if row["kind"] == "cluster"]
    for load in _CLUSTER_LOADS:
        of_load = {row["seed"]: row for row in cluster if row["load"] == load}
        ours[f"first_minute_sooner_at_{load:g}"] = paired_ratio(
            [of_load[seed]["fifo_s"] for seed in seeds], [of_load[seed]["default_s"] for seed in seeds]
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
        f"{max(value.mean for value in at_slowest.values()):.1f} times at most, and under the default policy "
        f"{max(value.mean for value in by_default.values()):.1f}, which gives a newcomer minutes instead of one",
    )


def _searches(random: np.random.Generator) -> list[Row]:
    rows: list[Row] = []
    for trials, hours in product(_TRIALS, _HOURS):
        first_slices = {
            (policy, switch_s): first_slice_s(policy, trials, hours, switch_s)
            for policy, switch_s in product((_TURNS, _DEFAULT), _SWITCHES_S)
        }
        for _ in range(_SEARCHES):
            final, doubt = random.standard_normal(trials), random.standard_normal(trials)
            shown_s = random.uniform(*_SHOWN_S, trials)
            best = int(np.argmax(final))
            for ((policy, switch_s), began_s), noise in product(first_slices.items(), _NOISE):
                looks = np.argsort(-(final + noise * doubt), kind="stable")
                # What a trial has trained before it was told apart is kept.
                turn = int(np.flatnonzero(looks == best)[0]) // _GPUS
                left_s = 3600.0 * hours * (turn + 1) - shown_s[best]
                rows.append(
                    {
                        "trials": trials,
                        "hours": hours,
                        "noise": noise,
                        "switch_s": switch_s,
                        "policy": policy,
                        "fifo_s": 3600.0 * hours * (trials // _GPUS + 1) / 2,
                        "sliced_s": float((began_s + shown_s).max()) + left_s,
                    }
                )
    return rows


def first_slice_s(policy: str, trials: int, hours: float, switch_s: float) -> Floats:
    """Return when each trial of a search begins to train, in seconds; all come at once to one node."""
    # Nothing that turns are decided by depends on how long trials last.
    lasts_s = 5 * QUANTUM_S if policy == _TURNS else 3600.0 * hours
    jobs = workload(
        map(str, range(trials)),
        [0.0] * trials,
        [1] * trials,
        [lasts_s] * trials,
        labels={"model": ["ResNet-50"] * trials},
    )
    half_s = switch_s / 2
    costs = SwitchCosts(half_s, half_s, 0.0, half_s, half_s)
    options = ReplayOptions(round_s=QUANTUM_S if policy == _TURNS else None, costs=costs)
    found = simulate(jobs, servers_from_flags(nodes=1, gpus_per_node=_GPUS), policy, options)
    return found.outcomes.first_start_s + half_s


def _cluster(setting: Setting, random: np.random.Generator, seed: int) -> list[Row]:
    servers = servers_from_flags(nodes=_CLUSTER_NODES, gpus_per_node=_GPUS)
    with (setting.traces / _PHILLY).open(newline="") as file:
        recorded = [(int(row["gpus"]), float(row["duration_s"])) for row in csv.DictReader(file)]
    usable = [(gpus, seconds) for gpus, seconds in recorded if gpus <= servers.gpus // 4 and seconds >= _FIRST_S]
    most = np.percentile([seconds for _, seconds in usable], 95)
    usable = [(gpus, seconds) for gpus, seconds in usable if seconds <= most]
    drawn = [usable[index] for index in random.integers(len(usable), size=_CLUSTER_JOBS).tolist()]
    arrivals = np.cumsum(random.exponential(1.0, _CLUSTER_JOBS))
    jobs = workload(map(str, range(_CLUSTER_JOBS)), arrivals, [g for g, _ in drawn], [s for _, s in drawn])
    rows: list[Row] = []
    for load in _CLUSTER_LOADS:
        offered = scaled_to_load(jobs, servers.gpus, load)
        fifo, default = (
            simulate(offered, servers, policy, ReplayOptions(seed=seed)).outcomes for policy in ("fifo", _DEFAULT)
        )
        rows.append(
            {
                "load": load,
                "fifo_s": float(fifo.start_delay_s.mean()) + _FIRST_S,
                "default_s": float(default.start_delay_s.mean()) + _FIRST_S,
            }
        )
    return rows


EARLY_FEEDBACK = Experiment("B22", parts, measure, conclude, core=CoreUse.WHOLE, needs=(("traces", _PHILLY),))
