"""B15. Cores by a predictor against cores bound to GPUs (Xiao et al., SoCC 2018 poster: 19 % more utilisation, 34 %
shorter job completion times; neither its baseline nor the cluster nor the mix of jobs is stated).

Set-up: 8 servers of 4 GPUs and 24 cores, as the poster's Azure machines; jobs of one GPU that train the poster's eight
models, each as likely, which need the cores of its table for their best speed. Up to there a speed follows the
poster's law P0 log C + P1 C, with P0 / P1 drawn for each model of a seed from those that fit Synergy's published
models. 300 jobs, Poisson arrivals at stated loads (of what bound cores can serve), durations of Synergy's generator,
FIFO, rounds of 300 s. Baseline is the poster's `bind` (24 cores and 4 GPUs: 6 each). The predictor knows four
measurements of each model with 5 % noise, at 1, 6, 12 and 24 cores. Utilisation is a job's speed by its best one, over
the time it holds a GPU. Compared is load 1.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ganger_master.models.cpu import CpuModel, CpuPoint, fit_cpu
from ganger_master.policies.facts import Floats
from ganger_master.policies.order.fifo import FIFO
from ganger_master.policies.tune import Gangs, Nodes, Pieces, Profiles, Tuning, gangs
from ganger_master.policies.tune.predictor import PREDICTOR, predicted
from ganger_master.sim.report.seeds import interval
from ganger_master.sim.reproduce.experiment import Experiment, Found, Row, Setting
from ganger_master.sim.reproduce.rounds import FILLED, RoundJobs, fill, through_rounds
from ganger_master.sim.traces.synthetic import SINGLE_GPU, synthetic
from ganger_master.sim.traces.transform import scaled_to_load

# Cores for the best speed of one P100 (the poster's table).
CORES = {
    "Lenet": 20,
    "AlexNet": 19,
    "Overfeat": 22,
    "GoogleNet": 11,
    "LanguageModel": 1,
    "Bi-Att-Flow": 8,
    "DeepSpeech": 3,
    "WaveNet": 3,
}
# P0 / P1 of the fits to ResNet-50, MobileNet, ResNet-18, M5, AlexNet and DeepSpeech (dossier, section 2a).
_BENDS = (-0.145 / 0.401, -0.091 / 0.370, -0.115 / 0.360, 0.035 / 0.297, 0.055 / 0.296, 0.087 / 0.300)
_MOST, _JOBS, _SERVERS = 24, 300, 8
_LOADS = (0.7, 1.0, 1.3)
_PROBES, _NOISE = (1, 6, 12, 24), 0.05
_NODES = Nodes(np.full(_SERVERS, 4), np.full(_SERVERS, 24.0), np.full(_SERVERS, 448e9))


def parts(setting: Setting) -> Sequence[Row]:
    return [{"load": load, "seed": seed} for load in _LOADS for seed in setting.seeds(5)]


def measure(setting: Setting, part: Row) -> Sequence[Row]:
    random = np.random.default_rng(part["seed"])
    truth = curves(random.choice(_BENDS, len(CORES)))
    believed = predicted([_fitted(rates, random) for rates in truth.rates[:, :, 0]], _MOST)
    drawn = scaled_to_load(synthetic(_JOBS, 1.0, part["seed"], SINGLE_GPU), int(_NODES.gpus.sum()), part["load"])
    models = random.integers(len(CORES), size=_JOBS)
    jobs = RoundJobs(drawn.submit_s, drawn.duration_s, gangs(drawn.gpus, models, truth))
    bound = truth.at(models, np.full(_JOBS, 6.0), np.full(_JOBS, 112e9))
    rows: list[Row] = []
    for name, tuning in (("bind", FILLED), ("predictor", _by_predictor(believed))):
        found = through_rounds(jobs, _NODES, FIFO, tuning)
        # a duration is that with bound cores
        utilisation = float((drawn.duration_s * bound).sum() / found.held_s.sum())
        jct = float((found.end_s - drawn.submit_s).mean())
        rows.append({"tuning": name, "utilisation": utilisation, "jct_s": jct})
    return rows


def conclude(rows: Sequence[Row]) -> Found:
    table = {(row["load"], row["tuning"], row["seed"]): row for row in rows}
    seeds = sorted({row["seed"] for row in rows})

    def by(load: float, figure: str) -> list[float]:
        """The predictor's by bind's."""
        return [table[load, "predictor", seed][figure] / table[load, "bind", seed][figure] for seed in seeds]

    gains = {load: interval([ratio - 1.0 for ratio in by(load, "utilisation")]) for load in _LOADS}
    shorter = {load: interval([1.0 - ratio for ratio in by(load, "jct_s")]) for load in _LOADS}
    ours = {"utilisation_gain": gains[1.0], "jct_gain": shorter[1.0]}
    for load in (0.7, 1.3):
        ours[f"utilisation_gain_at_{load:g}"], ours[f"jct_gain_at_{load:g}"] = gains[load], shorter[load]
    ours["bind_utilisation"] = interval([table[1.0, "bind", seed]["utilisation"] for seed in seeds])
    return Found(
        ours,
        len(seeds),
        load={"compared": 1.0},
        why="these models want 11 cores for a GPU on average and there are 6, all a predictor can move around; "
        "the poster states neither its baseline nor its cluster nor its mix",
    )


def curves(bends: Floats) -> Profiles:
    """Of the eight models, on whole cores, the best speed being 1; memory makes no difference."""
    cores = np.arange(1.0, _MOST + 1.0)
    sweet = np.array(list(CORES.values()), float)[:, None]
    used = np.minimum(cores, sweet)
    speed = bends[:, None] * np.log(used) + used
    best = bends[:, None] * np.log(sweet) + sweet
    return Profiles(cores, np.ones(1), np.maximum.accumulate(speed / best, axis=1)[:, :, None])


def _fitted(rates: Floats, random: np.random.Generator) -> CpuModel:
    noise = 1.0 + _NOISE * random.standard_normal(len(_PROBES))
    points = [CpuPoint(cores, float(rates[cores - 1] * off)) for cores, off in zip(_PROBES, noise, strict=True)]
    model = fit_cpu(points)
    assert model is not None
    return model


def _by_predictor(believed: Profiles) -> Tuning:
    """Jobs lie where bound ones would; cores are shared out on each server by what is believed."""

    def place(run: Gangs, nodes: Nodes) -> Pieces:
        return PREDICTOR.tune(replace(run, profiles=believed), nodes, fill(run, nodes))

    return Tuning("predictor", PREDICTOR.tune, place)


CPU_POSTER = Experiment("B15", parts, measure, conclude)
