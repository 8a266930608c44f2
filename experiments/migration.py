"""B8. What a migration costs a job, and what it is good for (Gandiva, OSDI 2018, figures 8, 12 and 13: a destination
that is warmed up ahead hides 98 % of the 35 s that a migration of TensorFlow takes; what is left is a second or two,
nearly whatever the number of GPUs).

Set-up, costs: not simulated but measured live on this code by `ganger bench move` (docs/measurements/figures.md): the
pause, from the source's last step to the destination's first, of states of 100 MB and 1 GB, on a
machine that is nearly idle and on one with six times as many programs as processors; between and beyond them, by the
line through both. The destination starts while the source trains, and the state goes from memory to memory. What is
moved are the states of DL2's models with SGD (weights and momentum) and Adam (weights and two moments), and 1 GB.
Between machines streams are sealed, which is 0.3 GB/s here; 35 s stand beside as what is hidden. A gang of several GPUs
sends the state of each of its ranks, all of a node over one stream: eight on one node send eight times as much, where
Gandiva sends one replica.

Set-up, use: a cluster of four nodes of four GPUs, as in figure 8, through the production core in virtual time
(first-fit, `+defrag`). Sixteen jobs of one GPU fill it; one on each node ends soon, the others go on for hours (drawn).
Then a gang of four comes, which wants one node. What it waits, and what those lose that are moved, with migrations at
the measured pause of 1 GB, at Gandiva's 2 s and at the 35 s of a naive one, beside a cluster without moves. The
same for 250 jobs of Synergy's generator (gangs of 1, 2, 4 and 8) on 16 nodes of four at load 1.2, backfilled: below 1
hardly any job waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from ganger_master.simulator.inputs import ReplayOptions, SwitchCosts
from ganger_master.simulator.report.figures import Interval, interval, paired_ratio
from ganger_master.simulator.report.outcomes import Outcomes
from ganger_master.simulator.run import simulate
from ganger_master.simulator.traces.servers import servers_from_flags
from ganger_master.simulator.traces.transform import scaled_to_load, synthetic
from ganger_master.simulator.traces.workload import workload

from experiments.experiment import CoreUse, Experiment, MeasuredRows, Row, Setting
from experiments.parameter_server_slots import MODELS

_GB = 1e9
# Of the pause of a move, by state: seconds at 100 MB and at 1 GB, and of these until the last byte is there.
_MEASURED: Mapping[str, tuple[tuple[float, float], tuple[float, float]]] = {
    "quiet": ((0.14, 0.61), (0.110, 0.485)),
    "crowded": ((0.20, 1.62), (0.153, 1.569)),
}
_SEALED_BYTES_PER_S = 0.3e9
_COPIES = {"sgd": 2, "adam": 3}
_NAIVE_S, _GANDIVA_S = 35.0, 2.0
_FOUR = 4
_COMES_S, _LONGEST_S = 600.0, 6 * 3600.0
_JOBS, _NODES, _LOAD = 250, 16, 1.2


def parts(setting: Setting) -> Sequence[Row]:
    seeds = setting.seeds(5)
    return [
        {"kind": "cost"},
        *({"kind": "gang", "seed": seed} for seed in seeds),
        *({"kind": "cluster", "seed": seed} for seed in (seeds[:1] if setting.is_quick else seeds)),
    ]


def measure(setting: Setting, part: Row) -> Sequence[Row]:
    if part["kind"] == "cost":
        return _costs()
    random = np.random.default_rng(part["seed"])
    return _gang(random) if part["kind"] == "gang" else _cluster(part["seed"])


def pause_s(state_bytes: float, machine: str) -> float:
    """Of a move of so much state, by the line through what was measured."""
    (small, large), _ = _MEASURED[machine]
    return small + (state_bytes - 0.1 * _GB) * (large - small) / (0.9 * _GB)


def _sealed_s(state_bytes: float) -> float:
    """Where the stream is sealed: what is no copying stays."""
    (_, large), (_, copying) = _MEASURED["quiet"]
    return large - copying + state_bytes / _SEALED_BYTES_PER_S


def _costs() -> list[Row]:
    states = {
        f"{model} {optimiser}": copies * MODELS[model].size * 1e6
        for model in MODELS
        for optimiser, copies in _COPIES.items()
    }
    rows: list[Row] = []
    for name, state in {**states, "1 GB": _GB}.items():
        for gpus in (1, _FOUR, 8):
            sent = gpus * state
            rows.append(
                {
                    "state": name,
                    "bytes": state,
                    "gpus": gpus,
                    **{f"{machine}_s": pause_s(sent, machine) for machine in _MEASURED},
                    "sealed_s": _sealed_s(sent),
                }
            )
    return rows


def _moving(pause: float) -> ReplayOptions:
    return ReplayOptions(costs=replace(SwitchCosts(), move_s=pause))


# By name: what goes behind the policy, and what a move takes.
_WAYS = {
    "still": ("", _moving(_GANDIVA_S)),
    "moved": ("+defrag", _moving(pause_s(_GB, "quiet"))),
    "gandiva": ("+defrag", _moving(_GANDIVA_S)),
    "naive": ("+defrag", _moving(_NAIVE_S)),
}


def _gang(random: np.random.Generator) -> list[Row]:
    count = _FOUR * _FOUR
    # The last of each node ends early.
    is_short = np.arange(count) % _FOUR == _FOUR - 1
    lasts = np.where(is_short, random.uniform(60.0, 300.0, count), random.uniform(3600.0, _LONGEST_S, count))
    jobs = workload(
        [*(f"small-{number}" for number in range(count)), "large"],
        [*map(float, range(count)), _COMES_S],
        [*([1] * count), _FOUR],
        [*lasts.tolist(), 3600.0],
    )
    servers = servers_from_flags(nodes=_FOUR, gpus_per_node=_FOUR)
    rows: list[Row] = []
    still: Outcomes | None = None
    for name, (suffix, options) in _WAYS.items():
        found = simulate(jobs, servers, f"fifo-backfill+first-fit{suffix}", options).outcomes
        still = still or found
        moved = found.migrations > 0
        pauses = (found.jct_s - still.jct_s) / np.maximum(found.migrations, 1)
        rows.append(
            {
                "way": name,
                "wait_s": float(found.start_delay_s[-1]),
                "moves": int(found.migrations.sum()),
                "longest_pause_s": float(pauses[moved].max(initial=0.0)),
                "told_s": options.costs.move_s,
                "stopped": int(found.preemptions.sum()),
            }
        )
    return rows


def _cluster(seed: int) -> list[Row]:
    servers = servers_from_flags(nodes=_NODES, gpus_per_node=_FOUR)
    drawn = scaled_to_load(synthetic(_JOBS, 1.0, seed), servers.gpus, _LOAD)
    rows: list[Row] = []
    for name, (suffix, options) in _WAYS.items():
        found = simulate(drawn, servers, f"fifo-backfill+first-fit{suffix}", options).outcomes
        is_large = found.gpus >= _FOUR
        rows.append(
            {
                "way": name,
                "jct_s": float(found.jct_s.mean()),
                "large_wait_s": float(found.waiting_s[is_large].mean()),
                "small_jct_s": float(found.jct_s[~is_large].mean()),
                "moves": int(found.migrations.sum()),
            }
        )
    return rows


def conclude(rows: Sequence[Row]) -> MeasuredRows:
    costs = {(row["state"], row["gpus"]): row for row in rows if row["kind"] == "cost"}
    gang = {(row["way"], row["seed"]): row for row in rows if row["kind"] == "gang"}
    cluster = {(row["way"], row["seed"]): row for row in rows if row["kind"] == "cluster"}
    seeds = sorted({seed for _, seed in gang})
    of_cluster = sorted({seed for _, seed in cluster})

    def of(figure: str, way: str) -> list[float]:
        return [gang[way, seed][figure] for seed in seeds]

    def against(figure: str, way: str) -> Interval:
        """Return the figure as a multiple of that without moves."""
        still, other = ([cluster[name, seed][figure] for seed in of_cluster] for name in ("still", way))
        return paired_ratio(other, still)

    downtime_s = max(of("longest_pause_s", "moved"))
    gb = costs["1 GB", 1]
    ours: dict[str, float | Interval] = {
        "downtime_seconds": downtime_s,
        "downtime_seconds_crowded": gb["crowded_s"],
        "downtime_seconds_sealed": gb["sealed_s"],
        "hidden_share": 1.0 - downtime_s / _NAIVE_S,
        "told_seconds": max(of("told_s", "moved")),
    }
    for model in MODELS:
        ours[f"seconds_{model}"] = costs[f"{model} sgd", 1]["quiet_s"]
    for gpus in (_FOUR, 8):
        ours[f"seconds_resnet-50_{gpus}_gpus"] = costs["resnet-50 sgd", gpus]["quiet_s"]
    for way in _WAYS:
        ours[f"gang_waits_seconds_{way}"] = interval(of("wait_s", way))
    ours["moves_for_a_gang"] = interval(of("moves", "moved"))
    ours["stopped_for_a_gang"] = max(of("stopped", "moved"))
    for way in ("moved", "gandiva", "naive"):
        ours[f"cluster_jct_{way}"] = against("jct_s", way)
        ours[f"cluster_large_wait_{way}"] = against("large_wait_s", way)
    ours["cluster_moves"] = interval([cluster["moved", seed]["moves"] for seed in of_cluster])
    return MeasuredRows(
        ours,
        len(seeds),
        load={"four nodes, with the gang": 1.0, "cluster": _LOAD},
        why="the pause is that of `ganger bench move` on a nearly idle machine, and decisions add nothing to it; a "
        f"crowded one takes {gb['crowded_s']:.1f} s, and a stream between machines, which is sealed, "
        f"{gb['sealed_s']:.1f} s for 1 GB; "
        f"of Gandiva's 35 s {1.0 - downtime_s / _NAIVE_S:.1%} are hidden. A gang that wants a node waits "
        f"{np.mean(of('wait_s', 'moved')):.0f} s instead of {np.mean(of('wait_s', 'still')) / 3600.0:.1f} h, and at "
        f"load {_LOAD:g} gangs of four and more wait {against('large_wait_s', 'moved').mean:.0%} as long as "
        "without migrations",
    )


MIGRATION = Experiment("B8", parts, measure, conclude, core=CoreUse.WHOLE)
