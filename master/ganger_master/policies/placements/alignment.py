"""Tetris's scores (Grandl et al., "Multi-resource Packing for Cluster Schedulers", SIGCOMM 2014, sections 3.2 and 3.3):
how well a task's demand lies along what a machine has left, and how little work its job has left.

Demands and what is available are in shares of the machine, columns of one entry a resource. The form with the cosine is
that of Yu's report (Virginia, 2021); it ignores magnitudes, so a tiny task may go to the emptiest machine.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ganger_master.policies.job_facts import Floats


class Alignment(Enum):
    """DOT: the weighted dot product of the paper. COSINE: of the angle alone."""

    DOT = "dot"
    COSINE = "cosine"


def aligned(demands: Floats, available: Floats, kind: Alignment = Alignment.DOT) -> Floats:
    """(jobs x machines) from demands (jobs x resources) and what is available (machines x resources).

    A machine without anything left, or a job that needs nothing, is aligned with nobody: 0.
    """
    dot = np.asarray(demands @ available.T, np.float64)
    if kind is Alignment.DOT:
        return dot
    lengths = np.linalg.norm(demands, axis=1)[:, None] * np.linalg.norm(available, axis=1)[None, :]
    cosine: Floats = np.divide(dot, lengths, out=np.zeros_like(dot), where=lengths > 0)
    return cosine


def scores(
    alignment: Floats,
    remaining_work: Floats,
    *,
    srtf_weight: float = 1.0,
    is_remote: NDArray[Any] | None = None,
    remote_penalty: float = 0.1,
    eligible: NDArray[Any] | None = None,
) -> Floats:
    """(jobs x machines), larger is better: alignment, less eps times the job's remaining work.

    `remaining_work`: of each job, in the same normalised unit for all: demand summed over resources, times duration,
    summed over its remaining tasks. eps = `srtf_weight` x mean alignment / mean work, both over `eligible` (jobs x
    machines; all if not told), so that the two terms weigh alike at 1, the paper's default. A task that would read
    remote input there (`is_remote`, jobs x machines) has `remote_penalty` taken off its alignment. What is not eligible
    scores minus infinity.
    """
    if is_remote is not None:
        alignment = np.where(is_remote, alignment * (1.0 - remote_penalty), alignment)
    if eligible is None:
        eligible = np.ones(alignment.shape, np.bool_)
    some = eligible.any(axis=1)
    if not some.any():
        return np.full(alignment.shape, -np.inf)
    work = float(remaining_work[some].mean())
    epsilon = srtf_weight * float(alignment[eligible].mean()) / work if work > 0 else 0.0
    return np.where(eligible, alignment - epsilon * remaining_work[:, None], -np.inf)


def within_fairness(shares: Floats, waiting: NDArray[Any], fairness: float) -> NDArray[np.bool_]:
    """Jobs that may be served: the ceil((1 - fairness) x J) of the J waiting ones that are furthest below their fair
    share. `shares`: what a job has of what it ought to have; ties go to the one that came first.

    0: all, for efficiency alone; near 1: the poorest alone.
    """
    assert 0.0 <= fairness < 1.0, f"the fairness knob is at {fairness}: it goes from 0 to below 1"
    candidates = np.flatnonzero(waiting)
    # Less a rounding error, so that 0.25 of 4 are 3 and not 4.
    count = int(np.ceil((1.0 - fairness) * len(candidates) - 1e-9))
    poorest = candidates[np.argsort(shares[candidates], kind="stable")][:count]
    allowed = np.zeros(len(shares), np.bool_)
    allowed[poorest] = True
    return allowed
