"""Inputs of a replay: jobs and servers read from files, offered load, and options; and all of them in words.

The functions that derive the jobs of one run from a load and a seed are pure.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
from ganger.text import counted

from ganger_master.core.tenancy import Partition, PartitionIndex, Team
from ganger_master.policies.fairness import QUANTUM_S
from ganger_master.simulator.admission import acceptable, strangers_among
from ganger_master.simulator.traces.reader import Reading, RowFilter, read_stream, read_trace
from ganger_master.simulator.traces.rows import (
    RowFinding,
    RowFindingCounts,
    RowFindingKind,
    TraceError,
    rows_of,
    shown,
)
from ganger_master.simulator.traces.servers import Servers
from ganger_master.simulator.traces.workload import (
    Floats,
    Workload,
    gavel_speeds,
    sample,
    scaled_to_load,
    synergy_profiles,
    synthetic,
    with_durations,
    with_iterations,
    with_loads,
    with_models,
    with_sizes,
)

# Names the trace that comes with Ganger, unless a file has this name.
EXAMPLE = "example"
STANDARD_INPUT = "-"
# Iterations are converted to run times with the step time on this type.
_REFERENCE_GPU = "v100"


@dataclass(frozen=True)
class TraceSelection:
    """Selects jobs of a trace: the rows that match `wanted`, of these the first `first`, or `drawn` at random.

    `draws_durations`: jobs without a known run time get a random one; otherwise they are left out. `is_ideal`: jobs
    need devices only. `elastic`: maximum size of a job as a multiple of the GPUs in the trace, for jobs with one size.
    `quotas`, `teams`, `partitions`: as in `ReplayOptions`.
    """

    wanted: RowFilter = field(default_factory=RowFilter)
    first: int | None = None
    drawn: int | None = None
    draws_durations: bool = False
    is_ideal: bool = False
    elastic: float | None = None
    quotas: Mapping[str, int] = field(default_factory=dict)
    teams: Mapping[str, Team] = field(default_factory=dict)
    partitions: Mapping[str, Partition] = field(default_factory=dict)


@dataclass(frozen=True)
class Material:
    """Jobs and servers of a simulation. Each run draws the run times of jobs that have none.

    Each of the `rows` read from the trace is a job here, is among the `apart` rows that were not selected, or is a
    skipped row in `findings`.
    """

    trace: str
    jobs: Workload
    servers: Servers
    rows: int
    apart: int
    findings: tuple[RowFinding, ...]
    ignored_columns: tuple[str, ...]
    part: TraceSelection

    @property
    def jobs_of_a_run(self) -> int:
        return len(self.jobs) if self.part.drawn is None else min(self.part.drawn, len(self.jobs))


@dataclass(frozen=True)
class Load:
    """Offered load, reached by scaling the times between submissions; without fields: as recorded.

    `offered`: one load for all. `phases`: (seconds, load) one after another.
    """

    offered: float | None = None
    phases: tuple[tuple[float, float], ...] = ()

    def __str__(self) -> str:
        if self.phases:
            return "phases " + " ".join(f"{seconds:g}s:{load:g}" for seconds, load in self.phases)
        return "as recorded" if self.offered is None else f"{self.offered:g}"


def material(
    trace: str, servers: Servers, part: TraceSelection, progress: Callable[[int, int], None] | None = None
) -> Material:
    """Read a trace and select its jobs.

    `trace`: a path, "-" for standard input, or "example". `progress` is called with the bytes read and the total.
    Raises TraceError, also if no job is left.
    """
    reading = _read(trace, part.wanted, progress)
    name = "standard input" if trace == STANDARD_INPUT else Path(trace).name
    if strangers := strangers_among(part.quotas, reading.workload, part.teams):
        raise TraceError(name, [strangers])
    partitions = PartitionIndex(part.partitions)
    taken, refused = acceptable(reading.workload, servers, part.is_ideal, part.quotas, part.teams, partitions)
    jobs, untimed = with_run_times(taken, part.draws_durations)
    findings = (*reading.findings, *refused, *untimed)
    if not len(jobs):
        hint = "" if part.draws_durations or not untimed else " (--draw-durations gives jobs run times at random)"
        left_out = [finding for finding in findings if finding.kind is RowFindingKind.SKIPPED]
        raise TraceError(
            name, [RowFinding(RowFindingKind.MISTAKE, f"no job to run is left{hint}", reading.rows), *left_out]
        )
    before = len(jobs)
    if part.first is not None:
        jobs = jobs.take(np.arange(min(part.first, before)))
    apart = before - (len(jobs) if part.drawn is None else min(part.drawn, before))
    return Material(name, jobs, servers, reading.rows, apart, findings, reading.ignored_columns, part)


def jobs_at(source: Material, load: Load, seed: int) -> Workload:
    """Return the jobs of one run.

    The seed decides which jobs are drawn, and draws missing run times and models. Raises ValueError if the jobs cannot
    offer the load.
    """
    jobs = with_drawn_run_times(source.jobs, seed)
    if source.part.drawn is not None:
        jobs = sample(jobs, source.part.drawn, seed)
    if load.phases:
        jobs = with_loads(jobs, source.servers.gpus, load.phases)
    elif load.offered is not None:
        jobs = scaled_to_load(jobs, source.servers.gpus, load.offered)
    if source.part.elastic is not None:
        jobs = with_sizes(jobs, source.part.elastic, source.servers.gpus)
    return with_iterations(with_models(jobs, seed))


def with_run_times(jobs: Workload, draws: bool) -> tuple[Workload, tuple[RowFinding, ...]]:
    """Derive missing run times from iterations and the published step time of the model.

    Jobs for which that is impossible are left out, or stay without a run time if each run `draws` it.
    """
    unknown = np.isnan(jobs.duration_s)
    if not unknown.any():
        return jobs, ()
    tally = RowFindingCounts()
    jobs = with_durations(jobs, jobs.iterations * _step_s(jobs))
    still = np.isnan(jobs.duration_s)
    tally.note(RowFindingKind.CHANGED, "run time worked out from iterations and model", jobs.lines[unknown & ~still])
    if draws:
        tally.note(RowFindingKind.CHANGED, "run time drawn at random", jobs.lines[still])
        return jobs, tally.findings()
    tally.note(RowFindingKind.SKIPPED, "no run time, and none follows from iterations and model", jobs.lines[still])
    return jobs.take(~still), tally.findings()


def with_drawn_run_times(jobs: Workload, seed: int) -> Workload:
    """Draw missing run times from the distribution of Synergy (OSDI 2022)."""
    if not np.isnan(jobs.duration_s).any():
        return jobs
    return with_durations(jobs, synthetic(len(jobs), 1.0, seed).duration_s)


def _step_s(jobs: Workload) -> Floats:
    """Return the step time of each job's model on the reference GPU in seconds; NaN without a profile."""
    batches = np.nan_to_num(jobs.batch_size).tolist()
    return np.array(list(map(_step_of, jobs.model.texts(), batches, jobs.gpus.tolist())), float)


@cache
def _step_of(model: str, batch_size: float, gpus: int) -> float:
    profile = synergy_profiles().get(model)
    if profile is not None:
        return profile.step_s
    # Gavel names models with their batch size, except models with a single one.
    named = (model, f"{model} (batch size {batch_size:.0f})")
    pace = max(gavel_speeds().get((_REFERENCE_GPU, *key, gpus), 0.0) for key in product((True, False), named))
    return 1.0 / pace if pace > 0 else np.nan


def _read(trace: str, wanted: RowFilter, progress: Callable[[int, int], None] | None) -> Reading:
    if trace == STANDARD_INPUT:
        return read_stream(sys.stdin.buffer, "standard input", wanted)
    path = Path(trace)
    if trace == EXAMPLE and not path.exists():
        with resources.as_file(resources.files("ganger_master.simulator.traces") / "example.csv") as packaged:
            return read_trace(packaged, wanted, progress)
    return read_trace(path, wanted, progress)


@dataclass(frozen=True, slots=True)
class SwitchCosts:
    """Times in seconds during which a gang holds its devices and does not train.

    Defaults: a start is a process of the pre-imported launcher with its first batches (0.03 s measured here) and a data
    loader to fill; a suspension waits for a boundary, then writes a checkpoint of a few gigabytes; a restart reads it
    again. Ours, measured: 0.55 s for the pause of a move of 1 GB, 2.1 GB/s; published: 0.1-1 s for a suspension and
    1-2 s for a warm migration (Gandiva, OSDI 2018), which are those of slices and moves here; 25-250 s for restarts
    that fill data loaders anew (Sia, SOSP 2023).
    """

    # From approval to the first step.
    start_s: float = 5.0
    # From the order to the last rank gone, its checkpoint complete.
    suspend_s: float = 3.0
    # On top of `start_s`, to the first step after the restored one.
    resume_s: float = 5.0
    # From the order to the devices free and the state in host memory, and from there to the next step.
    offload_s: float = 0.5
    restore_s: float = 0.5
    # From the source's last step to the destination's first one.
    move_s: float = 2.0


FREE = SwitchCosts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Options of a replay.

    `ideal`: any free GPUs serve, switches cost nothing, and every event leads to a plan.
    `round_s`: plan only at multiples of this; gangs that end within a round release their devices at its end. A job
    that the plan of a round preempts takes `costs.suspend_s` to release its devices; its successor starts then.
    `plan_every_s`: minimum time between two plans that preempt, unless `ideal`.
    `keep_place_after_s`: where no planner ranks, the wait of a gang after which room is kept for it.
    `quantum_s`: seconds of a time slice, where switches take no more than a fiftieth of it.
    `rates`: "recorded": every job runs at its recorded rate everywhere. "profiles": the rate follows from the model
    and the cores, memory, locality and GPU type of the gang (`TrueRates`); jobs without a model draw a published one.
    `profile_s`: time from submission until a tuning policy has a job's profile, measured outside the queue. Synergy's
    eight points take about a minute each.
    `speed_error`: relative standard deviation of measured speeds. `steps_error`: Optimus's remaining steps are the true
    ones, off by up to this share at the beginning of a job; None: they are fitted to reported losses.
    `moves_per_hour`: opportunistic migrations per node; None: the planner decides.
    `quotas`: GPUs that a user may hold at once; "*": each user without an entry. Jobs without a user count as one such
    user together.
    `teams`: by name, as in the settings of a master; the use of each user begins at zero.
    `usage_half_life_s`: age at which a GPU-second of use counts half.
    `partitions`: by name, as in the settings of a master. A job that the trace gives no partition is in the default.
    """

    ideal: bool = False
    round_s: float | None = None
    costs: SwitchCosts = SwitchCosts()
    seed: int = 0
    plan_every_s: float = 300.0
    keep_place_after_s: float = 120.0
    quantum_s: float = QUANTUM_S
    rates: Literal["recorded", "profiles"] = "recorded"
    profile_s: float = 480.0
    speed_error: float = 0.05
    steps_error: float | None = None
    moves_per_hour: float | None = None
    quotas: Mapping[str, int] = field(default_factory=dict)
    teams: Mapping[str, Team] = field(default_factory=dict)
    usage_half_life_s: float = 7 * 86_400.0
    partitions: Mapping[str, Partition] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.ideal and self.partitions:
            raise ValueError("an ideal cluster has GPUs and no nodes, so it has no partitions")
        if self.ideal and self.rates != "recorded":
            raise ValueError("an ideal cluster has nothing but GPUs: every job runs at its recorded pace")


# -- in words and for JSON ---------------------------------------------------------------------------------------------


def notes(source: Material, is_ideal: bool) -> list[str]:
    """Return lines on rows that were left out or changed; empty if every row became a job unchanged."""
    lines = []
    left_out = rows_of(source.findings, RowFindingKind.SKIPPED)
    if left_out or source.apart:
        kept = counted(source.rows - left_out - source.apart, "job", ",")
        chosen = f", {source.apart:,} not asked for" if source.apart else ""
        lines.append(f"{counted(source.rows, 'row', ',')}: {kept}, {left_out:,} left out{chosen}")
    words = {RowFindingKind.SKIPPED: "left out", RowFindingKind.CHANGED: "changed", RowFindingKind.MISTAKE: "mistake"}
    lines += [f"{words[finding.kind]}: {finding}" for finding in source.findings]
    if source.ignored_columns:
        lines.append(f"columns that were not read: {shown(', '.join(source.ignored_columns))}")
    unnamed = sum(not model for model in source.jobs.model.texts())
    # Ideal replays do not depend on models.
    if unnamed and not is_ideal:
        lines.append(f"changed: models are drawn for {counted(unnamed, 'job', ',')} of unknown model")
    return [f"{source.trace}: {line}" for line in lines]


def cluster_in_words(servers: Servers) -> str:
    kinds = sorted({group.configuration_set.device_type for group in servers.groups if group.configuration_set.devices})
    types = "" if kinds == ["gpu"] else f" ({', '.join(kinds)})"
    parts = (
        counted(servers.nodes, "node", ","),
        counted(servers.gpus, "GPU", ",") + types,
        counted(servers.millicores // 1000, "core", ","),
    )
    return ", ".join(parts)


def options_in_words(options: ReplayOptions) -> str:
    if options.ideal:
        words = "ideal: any free GPUs serve, nothing costs time"
    else:
        costs = ", ".join(f"{name.removesuffix('_s')} {seconds:g}s" for name, seconds in asdict(options.costs).items())
        words = f"costs: {costs}; stops at most every {options.plan_every_s:g}s"
    if options.moves_per_hour is not None:
        words += (
            f"; at most {counted(options.moves_per_hour, 'move', 'g')} of a node in an hour that no pending job needs"
        )
    if options.rates == "profiles":
        words += f"; rates by published profiles, known {options.profile_s:g}s after submission"
    return words if options.round_s is None else f"{words}; rounds of {options.round_s:g}s"


def limits_if_any(options: ReplayOptions) -> list[tuple[str, str]]:
    """Return the rows of the quotas and of the teams, if there are any."""
    rows = []
    if options.quotas:
        rows.append(("quotas", ", ".join(f"{user}={gpus}" for user, gpus in options.quotas.items())))
    if options.teams:
        limits = {name: f", {counted(team.gpus or 0, 'GPU')}" for name, team in options.teams.items()}
        teams = [
            f"{name} (weight {team.weight:g}{'' if team.gpus is None else limits[name]})"
            for name, team in options.teams.items()
        ]
        rows.append(("teams", f"{', '.join(teams)}; half-life {options.usage_half_life_s:g}s"))
    if options.partitions:
        rows.append(("partitions", ", ".join(options.partitions)))
    return rows


def about(source: Material, options: ReplayOptions) -> dict[str, Any]:
    """Return trace, cluster and options of a run for JSON."""
    return {
        "trace": {
            "name": source.trace,
            "rows": source.rows,
            "jobs": source.jobs_of_a_run,
            "not_asked_for": source.apart,
            "left_out": [_finding(each) for each in source.findings if each.kind is RowFindingKind.SKIPPED],
            "changed": [_finding(each) for each in source.findings if each.kind is RowFindingKind.CHANGED],
            "ignored_columns": list(source.ignored_columns),
        },
        "cluster": {
            "nodes": source.servers.nodes,
            "gpus": source.servers.gpus,
            "cores": source.servers.millicores / 1000,
            "memory_bytes": source.servers.memory_bytes,
        },
        "options": {name: value for name, value in asdict(options).items() if name != "seed"},
    }


def load_asked(load: Load) -> float | list[dict[str, float]] | None:
    """Return the load for JSON; None: as recorded."""
    if load.phases:
        return [{"seconds": seconds, "load": offered} for seconds, offered in load.phases]
    return load.offered


def _finding(finding: RowFinding) -> dict[str, Any]:
    return {"what": finding.what, "rows": finding.rows, "first_lines": list(finding.lines)}
