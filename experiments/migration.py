"""B8. What a migration costs the job, and what it is good for (Gandiva, OSDI 2018, figures 8, 12 and 13: a destination
that is warmed up ahead hides 98 % of the 35 s that a migration of TensorFlow takes; what is left is a second or two,
nearly whatever the number of GPUs).

Set-up, costs: real programs on this machine, as it is while the experiment runs. A master and two daemons move a
training with 1 GB of state there and back, as `ganger bench move` does; the job itself notes when its steps begin and
end. The pause is from the end of the source's last step to the end of the destination's first, and the longest one
counts. Processors stand in for GPUs, and both daemons are on one machine, so no network is in between. 35 s stand
beside as what is hidden.

Set-up, use: a cluster of four nodes of four GPUs, as in figure 8, through the production core and the planner's loop in
virtual time (first-fit, `+defrag`). Sixteen jobs of one GPU fill it; one on each node ends soon, the others go on for
hours (drawn). Then a gang of four comes, which wants one node. What it waits, with migrations at Gandiva's 2 s and at
the 35 s of a naive one, beside a cluster without moves. The same for 250 jobs of Synergy's generator (gangs of 1, 2, 4
and 8) on 16 nodes of four at load 1.2, backfilled: below 1 hardly any job waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from ganger_master.simulator.inputs import ReplayOptions, SwitchCosts
from ganger_master.simulator.report.figures import Interval, interval, paired_ratio
from ganger_master.simulator.run import simulate
from ganger_master.simulator.traces.servers import servers_from_flags
from ganger_master.simulator.traces.workload import scaled_to_load, synthetic, workload

from benchmarks.bench_cluster import BenchCluster
from benchmarks.move import JOB, MoveSample, measure_moves
from benchmarks.report import BenchReport
from experiments.experiment import CoreUse, Experiment, MeasuredRows, Row, Setting

_STATE_BYTES, _MOVES = 10**9, 3
_NAIVE_S, _GANDIVA_S = 35.0, 2.0
_FOUR = 4
_COMES_S, _LONGEST_S = 600.0, 6 * 3600.0
_JOBS, _NODES, _LOAD = 250, 16, 1.2
# By name: what goes behind the policy, and the seconds that a move takes.
_WAYS: Mapping[str, tuple[str, float]] = {
    "still": ("", _GANDIVA_S),
    "moved": ("+defrag", _GANDIVA_S),
    "naive": ("+defrag", _NAIVE_S),
}


def parts(setting: Setting) -> Sequence[Row]:
    seeds = setting.seeds(5)
    return [
        {"kind": "live"},
        *({"kind": "gang", "seed": seed} for seed in seeds),
        *({"kind": "cluster", "seed": seed} for seed in (seeds[:1] if setting.is_quick else seeds)),
    ]


def measure(setting: Setting, part: Row) -> Sequence[Row]:
    if part["kind"] == "live":
        return [
            {"pause_s": move.pause, "copy_s": move.copy, "raw_bytes_per_s": move.raw_bytes_per_second}
            for move in _moved_live()
        ]
    random = np.random.default_rng(part["seed"])
    return _gang(random) if part["kind"] == "gang" else _cluster(part["seed"])


def _moved_live() -> list[MoveSample]:
    with BenchCluster(nodes=2, gpus=1, cores=2) as cluster:
        script = cluster.directory / "heavy.py"
        script.write_text(JOB)
        report = BenchReport("move", cluster.directory)
        return measure_moves(cluster, _STATE_BYTES, _MOVES, report, (str(script),))


def _options(move_s: float) -> ReplayOptions:
    return ReplayOptions(costs=replace(SwitchCosts(), move_s=move_s))


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
    for name, (suffix, move_s) in _WAYS.items():
        found = simulate(jobs, servers, f"fifo-backfill+first-fit{suffix}", _options(move_s)).outcomes
        rows.append(
            {
                "way": name,
                "wait_s": float(found.start_delay_s[-1]),
                "moves": int(found.migrations.sum()),
                "stopped": int(found.preemptions.sum()),
            }
        )
    return rows


def _cluster(seed: int) -> list[Row]:
    servers = servers_from_flags(nodes=_NODES, gpus_per_node=_FOUR)
    drawn = scaled_to_load(synthetic(_JOBS, 1.0, seed), servers.gpus, _LOAD)
    rows: list[Row] = []
    for name, (suffix, move_s) in _WAYS.items():
        found = simulate(drawn, servers, f"fifo-backfill+first-fit{suffix}", _options(move_s)).outcomes
        is_large = found.gpus >= _FOUR
        rows.append(
            {
                "way": name,
                "jct_s": float(found.jct_s.mean()),
                "large_wait_s": float(found.waiting_s[is_large].mean()),
                "moves": int(found.migrations.sum()),
            }
        )
    return rows


def conclude(rows: Sequence[Row]) -> MeasuredRows:
    live = [row for row in rows if row["kind"] == "live"]
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

    pauses = [row["pause_s"] for row in live]
    ours: dict[str, float | Interval] = {
        "downtime_seconds": max(pauses),
        "downtime_seconds_median": float(np.median(pauses)),
        "hidden_share": 1.0 - max(pauses) / _NAIVE_S,
        "raw_stream_bytes_per_second": float(np.median([row["raw_bytes_per_s"] for row in live])),
    }
    for way in _WAYS:
        ours[f"gang_waits_seconds_{way}"] = interval(of("wait_s", way))
    ours["moves_for_a_gang"] = interval(of("moves", "moved"))
    ours["stopped_for_a_gang"] = max(of("stopped", "moved"))
    for way in ("moved", "naive"):
        ours[f"cluster_jct_{way}"] = against("jct_s", way)
        ours[f"cluster_large_wait_{way}"] = against("large_wait_s", way)
    ours["cluster_moves"] = interval([cluster["moved", seed]["moves"] for seed in of_cluster])
    return MeasuredRows(
        ours,
        len(seeds),
        load={"four nodes, with the gang": 1.0, "cluster": _LOAD},
        why=f"the longest of {len(pauses)} real moves of 1 GB, beside the other experiments of the run on the same "
        f"processors; {max(row['copy_s'] for row in live):.1f} s of it are the copy, at most. A gang that wants a node "
        f"waits {np.mean(of('wait_s', 'moved')):.0f} s instead of {np.mean(of('wait_s', 'still')) / 3600.0:.1f} h, and "
        f"at load {_LOAD:g} gangs of four and more wait {against('large_wait_s', 'moved').mean:.0%} as long as without "
        "migrations",
    )


MIGRATION = Experiment("B8", parts, measure, conclude, core=CoreUse.WHOLE)
