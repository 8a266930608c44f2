"""B9. What packing gives a cluster in which jobs wait and many use little of their GPU (Gandiva, OSDI 2018, figure 15:
26 % more throughput than with a GPU for each).

Set-up: 32 GPUs of 24 GB (RTX 3090, as Lucid measured) and a queue that never ends of one-GPU jobs, each drawn from
Lucid's 66 profiled models with its utilisation and memory, and with a duration of Synergy's generator; 24 hours, after
a first one that is not counted. Two jobs that share a GPU run at the speeds Lucid measured for that pair, and at those
of the dossier's law min(1, 1 / (0.9 (u1 + u2))) where the pair was not measured. Every minute the production proposes
packs among GPUs with one job, tries them for a minute in windows that scatter by 5 %, keeps or undoes them, and
learns; a GPU that a pack leaves free takes the next of the queue. Work is counted against that of a GPU for each,
first come first served, which with a queue is one GPU-second for a GPU-second. The mix of models decides how much
there is to gain, so what the cluster gains with only the models above 50 % of utilisation stands beside it.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ganger_master.estimators.slowdown import UNKNOWN_DEVICE, Pressure, learn
from ganger_master.policies.colocation_choice import (
    Berth,
    ColocationProposal,
    Pair,
    Resident,
    lesson,
    proposals,
    verdict,
)
from ganger_master.policies.trials import FailedTrials, TrialRates, TrialVerdict
from ganger_master.simulator.report.figures import interval
from ganger_master.simulator.traces.workload import SINGLE_GPU, synthetic

from experiments.experiment import CoreUse, Experiment, MeasuredRows, Row, Setting

_ALONE, _PAIRS = "profile_lucid_single.csv", "profile_lucid_colocation.csv"
_GPUS, _STEP_S, _STEPS, _WARM_UP = 32, 60.0, 25 * 60, 60
_DEVICE_BYTES = int(24e9)
_TRIALS_AT_ONCE, _WINDOWS, _SCATTER = 4, 16, 0.05
_MIXES = {"all": 0.0, "busy": 0.5}


@dataclass(frozen=True)
class _Model:
    name: str
    pressure: Pressure


@dataclass
class _Job:
    model: _Model
    left_s: float


def parts(setting: Setting) -> Sequence[Row]:
    return [{"mix": mix, "seed": seed} for mix in _MIXES for seed in setting.seeds(5)]


def measure(setting: Setting, part: Row) -> Sequence[Row]:
    models, measured = _published(setting)
    busy = [model for model in models if model.pressure.utilisation >= _MIXES[part["mix"]]]
    median = float(np.median([model.pressure.utilisation for model in busy]))
    return [{**_Cluster(busy, measured, part["seed"]).run(), "median_utilisation": median}]


def conclude(rows: Sequence[Row]) -> MeasuredRows:
    def of(figure: str, mix: str) -> list[float]:
        return [row[figure] for row in rows if row["mix"] == mix]

    return MeasuredRows(
        {
            "throughput_gain": interval(of("gain", "all")),
            "slowest_job": min(of("slowest_kept", "all")),
            "kept_share": interval(of("kept_share", "all")),
            "throughput_gain_busy_models": interval(of("gain", "busy")),
            "slowest_job_busy_models": min(of("slowest_kept", "busy")),
        },
        len(of("gain", "all")),
        load={"waiting for every GPU, all at once, jobs": float(np.mean(of("offered", "all")))},
        why="the gain is that of the mix, and Gandiva's is not published: the median of these models uses "
        f"{of('median_utilisation', 'all')[0]:.0%} of its GPU when alone; the slowest is the worst of "
        f"{sum(of('tried', 'all')):.0f} trials, each of which lets a pair below 0.6 of the speed alone pass with a "
        "probability of at most 5 %",
    )


class _Cluster:
    """GPUs by number, each with one or two jobs by number."""

    def __init__(self, models: Sequence[_Model], measured: dict[tuple[str, str], float], seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._models = models
        self._measured = measured
        # more than they can do in the time
        self._durations = synthetic(_GPUS * 40, 1.0, seed, SINGLE_GPU).duration_s
        self._jobs: list[_Job] = []
        self._gpus: list[list[int]] = [[self._next()] for _ in range(_GPUS)]
        self._failed: FailedTrials[Pair] = FailedTrials()
        self._contention = {"gpu": UNKNOWN_DEVICE}

    def run(self) -> Row:
        work = 0.0
        slowest, kept, tried = 1.0, 0, 0
        for step in range(_STEPS):
            now = step * _STEP_S
            trials = self._proposals(now)
            for trial in trials:
                self._move(trial)
            done = self._advance()
            work += done if step >= _WARM_UP else 0.0
            for trial in trials:
                tried += 1
                if self._decide(trial, now):
                    kept += 1
                    slowest = min(slowest, *self._speeds([one.number for one in trial.residents]))
                else:
                    self._undo(trial)
            self._refill()
        counted = (_STEPS - _WARM_UP) * _STEP_S * _GPUS
        return {
            "gain": work / counted - 1.0,
            "slowest_kept": slowest,
            "kept_share": kept / max(tried, 1),
            "tried": tried,
            "jobs": len(self._jobs),
            "offered": len(self._durations) / _GPUS,
        }

    def _next(self) -> int:
        model = self._models[int(self._random.integers(len(self._models)))]
        self._jobs.append(_Job(model, float(self._durations[len(self._jobs)])))
        return len(self._jobs) - 1

    def _speeds(self, on: Sequence[int]) -> list[float]:
        if len(on) < 2:
            return [1.0] * len(on)
        one, other = (self._jobs[job].model for job in on)
        found = [self._measured.get((a.name, b.name)) for a, b in ((one, other), (other, one))]
        law = min(1.0, 1.0 / max(0.9 * (one.pressure.utilisation + other.pressure.utilisation), 1e-9))
        return [law if speed is None else speed for speed in found]

    def _advance(self) -> float:
        """Work of a step, in GPU-seconds of jobs alone."""
        work = 0.0
        for on in self._gpus:
            for job, speed in zip(on, self._speeds(on), strict=True):
                seconds = min(_STEP_S, self._jobs[job].left_s / speed)
                self._jobs[job].left_s -= seconds * speed
                work += seconds * speed
        return work

    def _refill(self) -> None:
        for on in self._gpus:
            on[:] = [job for job in on if self._jobs[job].left_s > 1e-6]
            if not on:
                on.append(self._next())

    def _proposals(self, now: float) -> list[ColocationProposal]:
        berths = [
            Berth(((f"gpu-{number:02}", 1),), "gpu", _DEVICE_BYTES, (Resident(on[0], model.name, model.pressure),))
            for number, on in enumerate(self._gpus)
            if len(on) == 1 and (model := self._jobs[on[0]].model)
        ]
        return proposals(berths, self._failed, now, self._contention, _TRIALS_AT_ONCE)

    def _move(self, trial: ColocationProposal) -> None:
        guest, host = (self._gpus[int(berth.seat[0][0][4:])] for berth in (trial.guest, trial.host))
        host += guest
        guest.clear()

    def _undo(self, trial: ColocationProposal) -> None:
        guest, host = (self._gpus[int(berth.seat[0][0][4:])] for berth in (trial.guest, trial.host))
        for one in trial.guest.residents:
            host.remove(one.number)
            guest.append(one.number)

    def _decide(self, trial: ColocationProposal, now: float) -> bool:
        speeds = self._speeds([one.number for one in trial.residents])
        rates = {
            one.number: TrialRates(self._windows(1.0), self._windows(speed))
            for one, speed in zip(trial.residents, speeds, strict=True)
        }
        learned = learn(self._contention["gpu"], [lesson(trial, rates)])
        self._contention = {"gpu": learned}
        if verdict(trial, rates).verdict is TrialVerdict.KEEP:
            self._failed = self._failed.forgotten(trial.pair)
            return True
        self._failed = self._failed.noted(trial.pair, now)
        return False

    def _windows(self, speed: float) -> tuple[float, ...]:
        return tuple((speed * (1.0 + _SCATTER * self._random.standard_normal(_WINDOWS)).clip(0.1)).tolist())


def _published(setting: Setting) -> tuple[list[_Model], dict[tuple[str, str], float]]:
    """The models alone, and the speed of the first of two beside the second, by name."""
    with (setting.traces / _ALONE).open(newline="") as file:
        models = [
            _Model(
                "/".join(row[name] for name in ("model", "dataset", "batchsize", "amp")),
                Pressure(float(row["gpu_util_pct"]) / 100.0, float(row["gmem_mb"]) * 1e6),
            )
            for row in csv.DictReader(file)
        ]
    measured: dict[tuple[str, str], float] = {}
    with (setting.traces / _PAIRS).open(newline="") as file:
        for row in csv.DictReader(file):
            one, other = (
                "/".join(row[f"{name}{i}"] for name in ("model", "dataset", "batchsize", "amp")) for i in "12"
            )
            measured[one, other], measured[other, one] = float(row["speed1"]), float(row["speed2"])
    return models, measured


PACKED_CLUSTER = Experiment(
    "B9", parts, measure, conclude, core=CoreUse.ARITHMETIC, needs=(("traces", _ALONE), ("traces", _PAIRS))
)
