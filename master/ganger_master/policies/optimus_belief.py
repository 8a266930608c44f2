"""What Optimus believes of a job: how many steps it has left, from its losses, and how fast it would go with how many
GPUs, from measured steps (EuroSys 2018, sections 3.1 and 3.2; the law is Pollux's, for all-reduce)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ganger_master.models.allreduce import AllReduceModel
from ganger_master.models.convergence import ConvergenceModel, remaining, steps_to_convergence

# Epochs that a job is taken to need still as long as its losses say nothing (Optimus's public code).
UNKNOWN_EPOCHS = 20.0


@dataclass(frozen=True, slots=True)
class Belief:
    """`steps_left` is NaN where nothing is known of the job's speed; `is_young`: its steps are not well predicted."""

    steps_left: float = math.nan
    is_young: bool = True
    speed: AllReduceModel | None = None


NOTHING = Belief()


def steps_left(
    losses: ConvergenceModel | None, steps_done: float, epoch_steps: float, least_fall: float
) -> tuple[float, bool]:
    """Steps that are left by the fitted losses, and whether that is a guess. Converged is who falls by less than
    `least_fall` (of the largest loss) in an epoch; who goes on nevertheless has an epoch left."""
    if losses is None:
        return UNKNOWN_EPOCHS * epoch_steps, True
    found = steps_to_convergence(losses, least_fall, epoch_steps)
    if not math.isfinite(found.value):
        return UNKNOWN_EPOCHS * epoch_steps, True
    return max(epoch_steps, remaining(found, steps_done).value), not found.is_known


def first_sizes(least: int, most: int, each: int = 1, count: int = 8) -> Sequence[int]:
    """The numbers of GPUs with which a new job is tried: from its least to its most, each next one larger by about the
    same factor, whole tasks of `each`."""
    if least >= most:
        return (least,)
    factor = (most / least) ** (1.0 / (count - 1))
    return sorted({min(most, max(least, round(least * factor**place / each) * each)) for place in range(count)})
