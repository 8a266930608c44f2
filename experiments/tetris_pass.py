"""Tetris's own pass, machine by machine (Grandl et al., SIGCOMM 2014, section 3): which task to put on it next.

Jobs are made of equal tasks that start one by one as there is room. What a task takes is its peak, so nothing is
over-committed. Demands and what is available are in shares of the machine.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from ganger_master.policies.orders import Floats
from ganger_master.policies.tetris import Alignment
from numpy.typing import NDArray

# Share of the alignment that a task loses where it would read remote input: the paper's default.
REMOTE_PENALTY: Final = 0.1


def aligned(demands: Floats, available: Floats, kind: Alignment = Alignment.DOT) -> Floats:
    """Return alignments (jobs x machines) from demands (jobs x resources) and what is available (machines x resources).

    The alignment is 0 for a machine without anything left and for a job that needs nothing.
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
    remote_penalty: float = REMOTE_PENALTY,
    eligible: NDArray[Any] | None = None,
) -> Floats:
    """Return scores (jobs x machines), larger is better: alignment, less eps times the job's remaining work.

    `remaining_work`: of each job, in the same normalised unit for all: demand summed over resources, times duration,
    summed over its remaining tasks. eps = `srtf_weight` x mean alignment / mean work, both over `eligible` (jobs x
    machines; default: all), so that the two terms weigh alike at 1, the paper's default. A task that would read
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
