"""What is to be simulated: the jobs of a trace that a cluster can hold, and what had to be left out, added or changed.

Files are read here; what a load and a seed make of the jobs is decided by pure functions.

How a trace is replayed: what switching costs, when plans are made, what is idealised.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np

from ganger_master.simulator.admission import acceptable, strangers_among
from ganger_master.simulator.traces.profiles import gavel_speeds, synergy_profiles, with_iterations, with_models
from ganger_master.simulator.traces.reader import Reading, RowFilter, read_stream, read_trace
from ganger_master.simulator.traces.row_findings import RowFinding, RowFindingCounts, RowFindingKind, TraceError
from ganger_master.simulator.traces.servers import Servers
from ganger_master.simulator.traces.transform import (
    sample,
    scaled_to_load,
    synthetic,
    with_durations,
    with_loads,
    with_sizes,
)
from ganger_master.simulator.traces.workload import Floats, Workload

# A trace of this name, where there is no such file, is the one that comes with Ganger.
EXAMPLE = "example"
STANDARD_INPUT = "-"
# Recorded steps are counted at this type's pace.
_REFERENCE_GPU = "v100"


@dataclass(frozen=True)
class TraceSelection:
    """Which jobs of a trace: those that `wanted` names, then the first `first` of them, or `drawn` of them at random.

    `draws_durations`: jobs whose run time nothing tells get one at random; otherwise they are left out.
    `is_ideal`: whether they run on devices only. `elastic`: up to how many times its GPUs a job may have that the trace
    gives one size. `quotas`: as `replay.options.Options` has them.
    """

    wanted: RowFilter = field(default_factory=RowFilter)
    first: int | None = None
    drawn: int | None = None
    draws_durations: bool = False
    is_ideal: bool = False
    elastic: float | None = None
    quotas: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Material:
    """Jobs on the servers they are to run on; of whom no run time is known, each run draws one. `rows` were read of
    the trace, and each is a job here, is `apart` by choice, or is among the skipped rows of `findings`."""

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
    """`offered`: the jobs come closer together or further apart until they offer it. `phases` of (seconds, load): the
    same, one after another. Neither: as recorded."""

    offered: float | None = None
    phases: tuple[tuple[float, float], ...] = ()

    def __str__(self) -> str:
        if self.phases:
            return "phases " + " ".join(f"{seconds:g}s:{load:g}" for seconds, load in self.phases)
        return "as recorded" if self.offered is None else f"{self.offered:g}"


def material(
    trace: str, servers: Servers, part: TraceSelection, progress: Callable[[int, int], None] | None = None
) -> Material:
    """Reads the trace (a path, "-" for standard input, or "example"); `progress` gets the bytes read and the bytes
    there are. TraceError, also where no job is left."""
    reading = _read(trace, part.wanted, progress)
    name = "standard input" if trace == STANDARD_INPUT else Path(trace).name
    if strangers := strangers_among(part.quotas, reading.workload):
        raise TraceError(name, [strangers])
    taken, refused = acceptable(reading.workload, servers, part.is_ideal, part.quotas)
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
    """The jobs of one run. The seed decides which are drawn, how long those run of which nothing tells, and what models
    those train that name none. ValueError where the load cannot be offered."""
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
    """Run times for jobs that have none recorded: iterations by the published pace of their model, where both are
    known. The others are left out, or stay without one if each run `draws` it."""
    unknown = np.isnan(jobs.duration_s)
    if not unknown.any():
        return jobs, ()
    tally = RowFindingCounts()
    jobs = with_durations(jobs, jobs.iterations * _step_seconds(jobs))
    still = np.isnan(jobs.duration_s)
    tally.note(RowFindingKind.CHANGED, "run time worked out from iterations and model", jobs.lines[unknown & ~still])
    if draws:
        tally.note(RowFindingKind.CHANGED, "run time drawn at random", jobs.lines[still])
        return jobs, tally.findings()
    tally.note(RowFindingKind.SKIPPED, "no run time, and none follows from iterations and model", jobs.lines[still])
    return jobs.take(~still), tally.findings()


def with_drawn_run_times(jobs: Workload, seed: int) -> Workload:
    """Run times as Synergy draws them for the jobs that have none."""
    if not np.isnan(jobs.duration_s).any():
        return jobs
    return with_durations(jobs, synthetic(len(jobs), 1.0, seed).duration_s)


def _step_seconds(jobs: Workload) -> Floats:
    """Of one step of each job's model on the reference GPU; NaN where no profile tells."""
    batches = np.nan_to_num(jobs.batch_size).tolist()
    return np.array(list(map(_step_of, jobs.model.texts(), batches, jobs.gpus.tolist())), float)


@cache
def _step_of(model: str, batch_size: float, gpus: int) -> float:
    profile = synergy_profiles().get(model)
    if profile is not None:
        return profile.step_s
    # Gavel names models with their batch size, but for those that have only one.
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
    """Seconds in which a gang holds its devices and does not train.

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
    """`ideal`: any free GPUs serve, nothing costs time, and plans are made at every event. `round_s`: plans only at
    multiples of so many seconds, at which gangs that ended meanwhile also give their devices back. `plan_every_s`: not
    ideal, the least time between two plans that stop somebody. What a round's plan stops has `costs.suspend_s` to go,
    and who takes its place starts then.

    `rates`: "recorded", every job at the pace of its trace wherever it runs; "profiles", as fast as its model goes with
    the cores and memory, at the distance and on the GPUs that its gang has (`replay.rates`); who names no model gets
    one of the published. `profile_s`: how long it takes after a job's submission until a policy that tunes knows its
    profile, measured beside the queue: Synergy's eight points take about a minute each. `moves_per_hour`: of a node,
    where jobs are moved; None: as many as the planner finds right. `quotas`: GPUs that a user may hold at once; "*" is
    each who is not named. Jobs that name no user are one who is not."""

    ideal: bool = False
    round_s: float | None = None
    costs: SwitchCosts = SwitchCosts()
    seed: int = 0
    plan_every_s: float = 300.0
    rates: Literal["recorded", "profiles"] = "recorded"
    profile_s: float = 480.0
    moves_per_hour: float | None = None
    quotas: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.ideal and self.rates != "recorded":
            raise ValueError("an ideal cluster has nothing but GPUs: every job runs at its recorded pace")
