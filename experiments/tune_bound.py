"""B13. How much of what a cluster's cores and memory could give Synergy-Tune gives (OSDI 2022: within 10 % of OPT).

Set-up: 16 servers of Synergy's (8 V100, 24 cores, 500 GB), filled once with gangs of its published models, drawn in its
three splits over image, language and speech; a round, as each of its rounds is packed anew. A gang counts its rate
against that with its proportional share; the bound is the relaxed program of all gangs on one super-machine (LP-1),
which knows no servers. Compared are gangs of one GPU, where the bound can nearly be reached; gangs of 1, 2, 4 and 8
stand beside them, since servers they fill leave nothing to choose and no packing reaches the bound. `best` is our
exact choice on each server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from ganger_master.policies.tunings import Gangs, TuningNodes, gangs, profiles_of, proportionally, rates, runnable
from ganger_master.policies.tunings.catalogue import TUNINGS
from ganger_master.policies.tunings.synergy import upper_bound
from ganger_master.simulator.report.figures import interval
from ganger_master.simulator.traces.workload import MULTI_GPU, SINGLE_GPU, ModelClass, synergy_profiles, synthetic

from experiments.experiment import CoreUse, Experiment, MeasuredRows, Row, Setting
from experiments.model_split import models_by_split

_SERVERS = 16
# Over image, language and speech; the first is Synergy's default.
_SPLITS = {"20-70-10": (20.0, 70.0, 10.0), "33-33-33": (33.0, 33.0, 33.0), "50-0-50": (50.0, 0.0, 50.0)}
_CLASSES = (ModelClass.IMAGE, ModelClass.LANGUAGE, ModelClass.SPEECH)
_SIZES: Mapping[str, Mapping[int, float]] = {"single": SINGLE_GPU, "multi": MULTI_GPU}
_TUNINGS = ("synergy-tune", "synergy-opt", "exact")


def parts(setting: Setting) -> Sequence[Row]:
    return [
        {"split": split, "sizes": sizes, "seed": seed}
        for split in _SPLITS
        for sizes in _SIZES
        for seed in setting.seeds(5)
    ]


def measure(setting: Setting, part: Row) -> Sequence[Row]:
    nodes = TuningNodes(np.full(_SERVERS, 8), np.full(_SERVERS, 24.0), np.full(_SERVERS, 500e9))
    drawn = drawn_gangs(part["seed"], _SPLITS[part["split"]], _SIZES[part["sizes"]], nodes)
    bound = upper_bound(drawn, nodes)
    rows: list[Row] = [{"tuning": "proportional", "of_bound": len(drawn) / bound}]
    for name in _TUNINGS:
        place = TUNINGS[name].place
        assert place is not None
        placed = place(drawn, nodes)
        share = rates(drawn, proportionally(nodes, placed))
        runs = share > 0.0
        reached = float(np.sum(rates(drawn, placed)[runs] / share[runs]))
        rows.append({"tuning": name, "of_bound": reached / bound})
    return rows


def conclude(rows: Sequence[Row]) -> MeasuredRows:
    seeds = sorted({row["seed"] for row in rows})

    def of(tuning: str, sizes: str, seed: int) -> float:
        """Mean over splits."""
        wanted = (tuning, sizes, seed)
        return float(np.mean([r["of_bound"] for r in rows if (r["tuning"], r["sizes"], r["seed"]) == wanted]))

    def over_seeds(tuning: str, sizes: str = "single") -> list[float]:
        return [of(tuning, sizes, seed) for seed in seeds]

    tune, opt = over_seeds("synergy-tune"), over_seeds("synergy-opt")
    return MeasuredRows(
        {
            "tune_of_bound": interval(tune),
            "tune_of_opt": interval([one / other for one, other in zip(tune, opt, strict=True)]),
            "opt_of_bound": interval(opt),
            "best_of_bound": interval(over_seeds("exact")),
            "proportional_of_bound": interval(over_seeds("proportional")),
            "tune_of_bound_multi": interval(over_seeds("synergy-tune", "multi")),
            "best_of_bound_multi": interval(over_seeds("exact", "multi")),
        },
        len(seeds),
        load=1.0,
        why="the paper compares with OPT itself (tune_of_opt); the bound is above it, as it knows no servers",
    )


def drawn_gangs(seed: int, split: Sequence[float], sizes: Mapping[int, float], nodes: TuningNodes) -> Gangs:
    """Gangs that hold all GPUs of the nodes, or all but a few that no next gang fits."""
    gpus = int(nodes.gpus.sum())
    jobs = synthetic(4 * gpus, 1.0, seed, sizes)
    shares = {kind: share for kind, share in zip(_CLASSES, split, strict=True) if share > 0.0}
    known = synergy_profiles()
    models = models_by_split(len(jobs), seed, shares)
    position = {name: index for index, name in enumerate(known)}
    table = profiles_of([profile.matrix for profile in known.values()])
    every = gangs(jobs.gpus, [position[name] for name in models], table)
    return every.take(runnable(every, nodes))


TUNE_BOUND = Experiment("B13", parts, measure, conclude, core=CoreUse.ARITHMETIC)
