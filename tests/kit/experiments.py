"""Experiments whose outcome is known, to be run in other processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from ganger_master.simulator.report.figures import interval

from experiments.experiment import CoreUse, Experiment, MeasuredRows, Row, Setting


def by_seed(setting: Setting) -> Sequence[Row]:
    return [{"seed": seed} for seed in setting.seeds(2, 1)]


def more_with_the_seed(setting: Setting, part: Row) -> Sequence[Row]:
    return [{"figure": 3.0 + 2.0 * part["seed"]}]


def dies_at_seed_one(setting: Setting, part: Row) -> Sequence[Row]:
    if part["seed"] == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return more_with_the_seed(setting, part)


def fails(setting: Setting, part: Row) -> Sequence[Row]:
    raise RuntimeError(f"seed {part['seed']} is no good")


def fails_at_seed_zero(setting: Setting, part: Row) -> Sequence[Row]:
    if part["seed"] == 0:
        raise RuntimeError("it was measured before")
    return more_with_the_seed(setting, part)


def mean_figure(rows: Sequence[Row]) -> MeasuredRows:
    return MeasuredRows({"figure": interval([row["figure"] for row in rows])}, len(rows), load=0.9)


GOOD = Experiment("good", by_seed, more_with_the_seed, mean_figure, core=CoreUse.WHOLE)
DIES = Experiment("dies", by_seed, dies_at_seed_one, mean_figure, core=CoreUse.WHOLE)
FAILS = Experiment("fails", by_seed, fails, mean_figure, core=CoreUse.WHOLE)
NEEDS = Experiment(
    "needs", by_seed, more_with_the_seed, mean_figure, core=CoreUse.ARITHMETIC, needs=(("traces", "no_such_trace.csv"),)
)
