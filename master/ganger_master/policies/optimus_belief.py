"""What Optimus believes of a job: how many steps it has left, from its losses, and how fast it would go with how many
GPUs, from measured steps (EuroSys 2018, sections 3.1 and 3.2; the law is Pollux's, for all-reduce)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from ganger_master.core.model import Gang, JobRecord

# Fits need SciPy, for which nobody waits who believes nothing.
if TYPE_CHECKING:
    from ganger_master.estimators.convergence import StepsLeftEstimate
    from ganger_master.estimators.speed import AllReduceModel

# Epochs that a job is taken to need still as long as its losses say nothing (Optimus's public code).
UNKNOWN_EPOCHS = 20.0


@dataclass(frozen=True, slots=True)
class OptimusEstimate:
    """`steps_left` is NaN where nothing is known of the job's speed; `is_young`: its steps are not well predicted."""

    steps_left: float = math.nan
    is_young: bool = True
    speed: AllReduceModel | None = None


NOTHING = OptimusEstimate()
# Of elastic jobs, with the gangs they have: what is believed of each.
Believed: TypeAlias = Callable[[Sequence[tuple[JobRecord, Gang | None]]], Sequence[OptimusEstimate]]


def nothing_believed(jobs: Sequence[tuple[JobRecord, Gang | None]]) -> Sequence[OptimusEstimate]:
    """Where nobody measures."""
    return [NOTHING] * len(jobs)


def steps_left(whole: StepsLeftEstimate | None, steps_done: float, epoch_steps: float) -> tuple[float, bool]:
    """Steps that are left of those that the fitted losses let expect (none yet, or no end in sight: None, infinite),
    and whether that is a guess. Who goes on though it has converged has an epoch left."""
    if whole is None or not math.isfinite(whole.value):
        return UNKNOWN_EPOCHS * epoch_steps, True
    return max(epoch_steps, whole.value - steps_done), not whole.is_known


def first_sizes(least: int, most: int, each: int = 1, count: int = 8) -> Sequence[int]:
    """The numbers of GPUs with which a new job is tried: from its least to its most, each next one larger by about the
    same factor, whole tasks of `each`."""
    if least >= most:
        return (least,)
    factor = (most / least) ** (1.0 / (count - 1))
    return sorted({min(most, max(least, round(least * factor**place / each) * each)) for place in range(count)})
