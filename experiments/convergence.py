"""B2. How early the end of a training is known from its loss (Optimus, EuroSys 2018, section 3.1: the error falls with
progress; the dossier's own fit is off by 3-5 % from half way on).

Set-up: the loss l(k) = 1/(0.08 k + 0.5) + 0.25 of epoch k with noise of 1 and 3 % and one point half as high again, cut
off at 10, 25, 30, 50, 70 and 90 % of the epochs until it falls by less than 0.1 % of its beginning an epoch. The error
is that of the estimated number of epochs, mean of 20 losses a seed. Beside it, compared with nothing: validation errors
of real trainings (Sia's artifact; imagenet 100 - accuracy, deepspeech2 word error rate) at every batch size measured;
from the first half of each the error at its end is foretold, as a share of what is true, median of the curves.

From the first 10, 25 and 50 % of these, of cifar10 (1 - accuracy) and yolov3 (loss), the epochs are estimated, until
the error falls by less than 0.2 % of its beginning an epoch. The error is that against the fit to the whole curve, 1 at
most; beside it how often that lies in the range of the estimate. Curves that by the whole end within 30 epochs, or
never, are left out: ImageNet's error falls in a few steps.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence

import numpy as np
from ganger_master.estimators.convergence import (
    Curve,
    LossPoint,
    StepsLeftEstimate,
    fit_convergence,
    steps_to_convergence,
)
from ganger_master.simulator.report.figures import Interval, interval

from experiments.experiment import CoreUse, Experiment, MeasuredRows, Row, Setting

_FILE = "profile_sia_validation.csv"
_TRUTH = Curve(0.08, 0.5, 0.25)
# Of the first loss, an epoch: less than that and the training has converged.
_LEAST_FALL = 0.001
# The last one came later: the losses drawn for the others are as before.
_PROGRESS = (0.1, 0.3, 0.5, 0.7, 0.9, 0.25)
_REAL_PROGRESS = (0.1, 0.25, 0.5)
_REAL_FALL = 0.002
# A shorter training leaves too few points in its tenth part.
_LEAST_EPOCHS = 30.0
_NOISE = (0.01, 0.03)
_LOSSES = 20
# What a metric counts down to zero.
_ERROR_OF = {"imagenet": lambda metric: 100.0 - metric, "deepspeech2": lambda metric: metric}
# For the epochs to come also those whose accuracy is a share, and a loss.
_EPOCHS_OF = {**_ERROR_OF, "cifar10": lambda metric: 1.0 - metric, "yolov3": lambda metric: metric}


def parts(setting: Setting) -> Sequence[Row]:
    return [{"kind": "synthetic", "seed": seed} for seed in setting.seeds(5)] + [{"kind": "real"}]


def measure(setting: Setting, part: Row) -> Sequence[Row]:
    return _real(setting) if part["kind"] == "real" else _synthetic(part["seed"])


def conclude(rows: Sequence[Row]) -> MeasuredRows:
    synthetic = [row for row in rows if row["kind"] == "synthetic"]
    seeds = sorted({row["seed"] for row in synthetic})

    def of(seed: int, progress: float) -> float:
        return float(np.mean([row["error"] for row in synthetic if (row["seed"], row["progress"]) == (seed, progress)]))

    ours: dict[str, float | Interval] = {
        f"error_at_{100 * at:.0f}": interval([of(seed, at) for seed in seeds]) for at in _PROGRESS
    }
    real = [row["error"] for row in rows if row["kind"] == "real" and "error" in row]
    for progress in _REAL_PROGRESS:
        ends = [row for row in rows if row.get("progress") == progress and "off_by" in row]
        ours[f"real_epochs_at_{100 * progress:.0f}"] = float(np.median([row["off_by"] for row in ends]))
        ours[f"real_epochs_in_range_at_{100 * progress:.0f}"] = float(np.mean([row["in_range"] for row in ends]))
    return MeasuredRows(
        {**ours, "real_curves_at_50": float(np.median(real))},
        len(seeds),
        why="the paper publishes no losses: its figure is read off a plot of its own trainings",
    )


def _synthetic(seed: int) -> list[Row]:
    random = np.random.default_rng(seed)
    end = _TRUTH.slow_from(_LEAST_FALL * _TRUTH.loss(0.0), 1.0) + 1.0
    rows: list[Row] = []
    for progress in _PROGRESS:
        for noise in _NOISE:
            for number in range(_LOSSES):
                steps = np.arange(int(end * progress), dtype=float)
                losses = np.array([_TRUTH.loss(step) for step in steps.tolist()])
                losses *= 1.0 + noise * random.standard_normal(len(steps))
                losses[len(steps) // 2] *= 1.5
                model = fit_convergence(map(LossPoint, steps.tolist(), losses.tolist()))
                assert model is not None
                # the same fall in the units of the largest loss seen, which noise and the outlier move
                threshold = _LEAST_FALL * _TRUTH.loss(0.0) / model.largest_loss
                found = steps_to_convergence(model, threshold, 1.0).value
                rows.append({"progress": progress, "noise": noise, "number": number, "error": abs(found / end - 1.0)})
    return rows


def _real(setting: Setting) -> list[Row]:
    curves: dict[tuple[str, int], list[tuple[float, float]]] = {}
    with (setting.traces / _FILE).open(newline="") as file:
        for row in csv.DictReader(file):
            if row["app"] in _EPOCHS_OF:
                of_curve = curves.setdefault((row["app"], int(row["batch_size"])), [])
                of_curve.append((float(row["iteration"]), _EPOCHS_OF[row["app"]](float(row["metric"]))))
    rows: list[Row] = []
    for (app, batch), points in sorted(curves.items()):
        rows += [{"app": app, "batch": batch, **row} for row in _epochs_of(points)]
        if app not in _ERROR_OF:
            continue
        model = fit_convergence(LossPoint(*point) for point in points[: len(points) // 2])
        assert model is not None
        last, truth = points[-1]
        rows.append({"app": app, "batch": batch, "error": abs(model.best.loss(last) / truth - 1.0)})
    return rows


def _epochs_of(points: Sequence[tuple[float, float]]) -> list[Row]:
    """Return how far the estimated end is off after parts of a real curve; nothing without an end by the whole."""
    epoch = (points[-1][0] - points[0][0]) / (len(points) - 1)
    fall = _REAL_FALL * points[0][1]

    def end(count: int) -> StepsLeftEstimate | None:
        model = fit_convergence(LossPoint(*point) for point in points[:count])
        return None if model is None else steps_to_convergence(model, fall / model.largest_loss, epoch)

    whole = end(len(points))
    if whole is None or not _LEAST_EPOCHS * epoch <= whole.value < math.inf:
        return []
    rows: list[Row] = []
    for progress in _REAL_PROGRESS:
        found = end(max(4, round(progress * whole.value / epoch)))
        if found is not None:
            off_by = min(1.0, abs(found.value / whole.value - 1.0))
            is_in_range = found.low <= whole.value <= found.high
            rows.append(
                {"progress": progress, "off_by": off_by, "in_range": is_in_range, "points": whole.value / epoch}
            )
    return rows


CONVERGENCE = Experiment("B2", parts, measure, conclude, core=CoreUse.ARITHMETIC, needs=(("traces", _FILE),))
