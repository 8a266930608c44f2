"""Measurements others published, as the tests of the models read them.

Whole files come from the folder beside the project, where there is one (`needs`); a few rows stand here, as facts with
their source, so that the main figures are checked everywhere.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
from ganger_master.estimators.cores_and_memory import CpuPoint
from ganger_master.estimators.server_speed import ServerPoint
from ganger_master.estimators.speed import ColocationTrial, Pressure, StepPoint

SHARED = Path(__file__).resolve().parents[3] / "shared"
TRACES = SHARED / "traces"
DATA = SHARED / "papers" / "data"

# Synergy's profiles (msr-fiddle/synergy, MIT): V100, cores per GPU at full memory, rate against three cores.
GRID = (1, 2, 3, 4, 5, 6, 9, 12, 24)
SYNERGY = {
    "resnet50": (0.40, 0.74, 1.0, 1.15, 1.15, 1.15, 1.15, 1.15, 1.15),
    "mobilenet": (0.37, 0.72, 1.0, 1.3, 1.49, 1.55, 1.55, 1.55, 1.55),
    "resnet18": (0.37, 0.72, 1.0, 1.3, 1.53, 1.75, 2.4, 2.4, 2.4),
    "m5": (0.30, 0.66, 1.0, 1.2, 1.4, 2.5, 2.5, 2.5, 2.5),
    "alexnet": (0.30, 0.66, 1.0, 1.25, 1.53, 1.75, 2.0, 2.94, 2.94),
    "shufflenet": (0.30, 0.66, 1.0, 1.25, 1.53, 1.75, 2.0, 2.89, 2.89),
    "deepspeech": (0.30, 0.66, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0),
    "gnmt": (1.0,) * 9,
}
# Gandiva (OSDI 2018), Table 1: model, utilisation alone, mini-batches/s alone and packed, on a P40 with 24 GB.
GANDIVA = (
    ("VAE", 0.087, 81.8, 419.3),
    ("SuperRes", 0.141, 40.3, 145.2),
    ("RHN", 0.616, 10.1, 14.8),
    ("SCRNN", 0.668, 16.7, 23.3),
    ("MI-LSTM", 0.762, 22.2, 25.9),
    ("LSTM", 0.872, 63.8, 53.0),
    ("ResNet-50", 0.94, 10.3, 9.0),
    ("ResNeXt-50", 0.989, 83.6, 74.4),
)
# Chronus: (GPUs, servers) -> speed against one server.
CHRONUS = {
    "alexnet": {(2, 2): 0.745, (4, 2): 0.397, (4, 4): 0.325, (6, 2): 0.331, (8, 2): 0.509, (8, 4): 0.268},
    "vgg16": {(2, 2): 0.896, (4, 2): 0.576, (4, 4): 0.318, (6, 2): 0.657, (8, 2): 0.572, (8, 4): 0.261},
    "resnet101": {(2, 2): 0.991, (4, 2): 0.969, (4, 4): 0.954, (6, 2): 0.949, (8, 2): 0.948, (8, 4): 0.803},
    "mobilenet_v2": {(2, 2): 0.996, (4, 2): 0.972, (4, 4): 0.794, (6, 2): 0.958, (8, 2): 0.93, (8, 4): 0.627},
    "inception3": {(2, 2): 1.003, (4, 2): 0.983, (4, 4): 0.964, (6, 2): 0.951, (8, 2): 0.923, (8, 4): 0.879},
}


def needs(path: Path) -> Path:
    """The file, or the test is skipped: it is not part of the project."""
    if not path.exists():
        pytest.skip(f"{path.name} is not beside the project")
    return path


def rows(name: str) -> list[dict[str, str]]:
    with needs(TRACES / name).open(newline="") as file:
        return list(csv.DictReader(file))


def synergy_points(model: str) -> list[CpuPoint]:
    return [CpuPoint(cores, rate) for cores, rate in zip(GRID, SYNERGY[model], strict=True)]


def server_points() -> dict[str, tuple[float, list[ServerPoint]]]:
    """The testbed of Optimus and DL2: per model its global batch and steps/s (failed runs have speed 0)."""
    found: dict[str, tuple[float, list[ServerPoint]]] = {}
    for row in rows("profile_ps_speed_dl2.csv"):
        batch, points = found.setdefault(row["model"], (float(row["total_batch_size"]), []))
        points.append(ServerPoint(int(row["num_ps"]), int(row["num_workers"]), float(row["total_speed"]) / batch))
    return found


@cache
def step_points() -> dict[tuple[str, str], list[StepPoint]]:
    """Pollux's and Sia's measured steps, by application and GPU type."""
    found: dict[tuple[str, str], list[StepPoint]] = defaultdict(list)
    for row in rows("profile_sia_placements.csv"):
        found[row["app"], row["gpu_type"]].append(
            StepPoint(
                int(row["num_replicas"]), int(row["num_nodes"]), float(row["local_bsz"]), float(row["step_time_s"])
            )
        )
    return dict(found)


@cache
def lucid_trials() -> tuple[ColocationTrial, ...]:
    """Pairs of jobs on one GPU, measured alone and together."""
    alone = {
        (row["model"], row["dataset"], row["batchsize"], row["amp"]): Pressure(
            float(row["gpu_util_pct"]) / 100.0, float(row["gmem_mb"]) * 1e6
        )
        for row in rows("profile_lucid_single.csv")
    }
    return tuple(
        ColocationTrial(
            tuple(alone[row[f"model{i}"], row[f"dataset{i}"], row[f"batchsize{i}"], row[f"amp{i}"]] for i in (1, 2)),
            (float(row["speed1"]), float(row["speed2"])),
        )
        for row in rows("profile_lucid_colocation.csv")
    )
