"""Tetris's own pass, machine by machine: which task to put on it next (Grandl et al., SIGCOMM 2014, section 3).

Jobs are made of equal tasks that start one by one as there is room; a gang is a job of one task. What a task takes is
its peak, so nothing is over-committed. The pass knows no duration but through the remaining work that it is told.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ganger_master.policies.job_facts import Floats, Integers
from ganger_master.policies.placements.alignment import Alignment, aligned, scores, within_fairness

# Shares of machines are sums of floats: a task that fits to a millionth of a machine fits.
_SLACK = 1e-9
# Scores that differ by less than a billionth are a tie.
DIGITS: Final = 9


@dataclass(frozen=True, slots=True)
class Knobs:
    """With the paper's defaults: the SRTF weight m, the fairness f, what reading remote input costs."""

    srtf_weight: float = 1.0
    fairness: float = 0.25
    remote_penalty: float = 0.1
    alignment: Alignment = Alignment.DOT


_DEFAULT = Knobs()


def tetris_pass(
    demands: Floats,
    pending: Integers,
    remaining_work: Floats,
    available: Floats,
    shares: Floats,
    *,
    knobs: Knobs = _DEFAULT,
    is_remote: NDArray[np.bool_] | None = None,
) -> Integers:
    """How many tasks of each job each machine starts now: (jobs x machines).

    `demands` (jobs x resources) of one task and `available` (machines x resources) are in shares of a machine;
    `pending` tasks wait; `remaining_work` and `is_remote` as in `scores`; `shares`: what each job holds of its fair
    share, by which the fairness knob chooses once, before the pass. Each machine in turn takes the best task that fits
    until none does; ties go to the job that came first.
    """
    jobs, machines = len(demands), len(available)
    placed = np.zeros((jobs, machines), np.int64)
    waiting = np.array(pending, np.int64)
    allowed = within_fairness(shares, waiting > 0, knobs.fairness)
    left = np.array(available, np.float64)
    for machine in range(machines):
        remote = None if is_remote is None else is_remote[:, machine, None]
        while True:
            fits = allowed & (waiting > 0) & (demands <= left[machine] + _SLACK).all(axis=1)
            if not fits.any():
                break
            here = scores(
                aligned(demands, left[machine, None], knobs.alignment),
                remaining_work,
                srtf_weight=knobs.srtf_weight,
                is_remote=remote,
                remote_penalty=knobs.remote_penalty,
                eligible=fits[:, None],
            )
            job = int(np.argmax(np.round(here[:, 0], DIGITS)))
            placed[job, machine] += 1
            waiting[job] -= 1
            left[machine] -= demands[job]
    return placed
