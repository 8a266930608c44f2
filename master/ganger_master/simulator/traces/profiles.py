"""Published profiles of models: sensitivity to cores and memory, speed by GPU type; and random models for traces
without any.

The figures are Synergy's (OSDI 2022), Gavel's (OSDI 2020) and ElasticFlow's (ASPLOS 2023), from their public code; see
ATTRIBUTION.md beside them.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib import resources

import numpy as np

from ganger_master.estimators.cpu import SensitivityMatrix
from ganger_master.simulator.traces.workload import Labels, Workload


class ModelClass(Enum):
    """The field of a model: profiles of one class are similar."""

    IMAGE = "image"
    LANGUAGE = "language"
    SPEECH = "speech"
    RECOMMENDATION = "recommendation"


@dataclass(frozen=True)
class ModelProfile:
    """A model on one V100. `matrix` holds its rate by cores and memory for each GPU, against what it makes with its
    share of a server (3 cores, 62.5 GB), where a step takes `step_s` seconds."""

    model: str
    model_class: ModelClass
    batch_size: int
    step_s: float
    matrix: SensitivityMatrix


@cache
def synergy_profiles() -> Mapping[str, ModelProfile]:
    """Ten models by name, in the order image, language, speech."""
    rows: dict[str, list[dict[str, str]]] = {}
    for row in _rows("profiles_synergy.csv"):
        rows.setdefault(row["model"], []).append(row)
    return {model: _profile(model, of_model) for model, of_model in rows.items()}


@cache
def gavel_speeds() -> Mapping[tuple[str, bool, str, int], float]:
    """Steps a second by (GPU type, whether the GPUs are in one server, model, GPUs); 0 where a model does not fit."""
    return {
        (row["gpu_type"], row["placement"] == "together", row["model"], int(row["gpus"])): float(row["steps_per_s"])
        for row in _rows("speeds_gavel.csv")
    }


@cache
def elasticflow_speeds() -> Mapping[str, Mapping[int, Mapping[int, float]]]:
    """Steps a second by model, samples in a step of the whole job, and number of GPUs (A100, eight in a server)."""
    found: dict[str, dict[int, dict[int, float]]] = {}
    for row in _rows("speeds_elasticflow.csv"):
        of_batch = found.setdefault(row["model"], {}).setdefault(int(row["global_batch_size"]), {})
        of_batch[int(row["gpus"])] = float(row["steps_per_s"])
    return found


def with_models(jobs: Workload, seed: int) -> Workload:
    """Models for the jobs that name none, each equally likely; the others keep theirs."""
    names, texts = list(synergy_profiles()), jobs.model.texts()
    unnamed = [job for job, text in enumerate(texts) if not text]
    for job, index in zip(unnamed, np.random.default_rng(seed).integers(len(names), size=len(unnamed)), strict=True):
        texts[job] = names[index]
    return jobs.with_columns(model=Labels.of(texts))


def with_iterations(jobs: Workload) -> Workload:
    """Iterations where a trace gives run time and a profiled model, but not how many: run time by time of a step."""
    known = synergy_profiles()
    step_s = np.array([known[name].step_s if name in known else np.nan for name in jobs.model.names])
    from_time = jobs.duration_s / step_s[jobs.model.codes] if len(jobs) else jobs.duration_s
    return jobs.with_columns(iterations=np.where(np.isnan(jobs.iterations), from_time, jobs.iterations))


def _profile(model: str, rows: Sequence[Mapping[str, str]]) -> ModelProfile:
    cores = tuple(sorted({float(row["cores_per_gpu"]) for row in rows}))
    memory = tuple(sorted({float(row["memory_gb_per_gpu"]) for row in rows}))
    rates = {(float(row["cores_per_gpu"]), float(row["memory_gb_per_gpu"])): float(row["rate"]) for row in rows}
    first = rows[0]
    return ModelProfile(
        model,
        ModelClass(first["class"]),
        int(first["batch_size"]),
        float(first["step_s"]),
        SensitivityMatrix(
            cores,
            tuple(gigabytes * 1e9 for gigabytes in memory),
            tuple(tuple(rates[count, gigabytes] for gigabytes in memory) for count in cores),
        ),
    )


def _rows(name: str) -> list[dict[str, str]]:
    text = resources.files("ganger_master.simulator.traces").joinpath(name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))
