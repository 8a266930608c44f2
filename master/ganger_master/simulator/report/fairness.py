"""Whether a shared cluster served each job at least as well as an equal part of it, all its own, would have.

Themis (Mahajan et al., NSDI 2020, section 3): finish-time fairness rho = T_shared / T_independent, where the
independent cluster has 1/N of the GPUs, N being the jobs that contend. rho <= 1 is the promise of sharing.
"""

from __future__ import annotations

import numpy as np

from ganger_master.simulator.report.series import StepSeries
from ganger_master.simulator.traces.workload import Floats, Integers


def finish_time_fairness(
    submit_s: Floats, end_s: Floats, gpus: Integers, duration_s: Floats, cluster_gpus: int, now_s: float | None = None
) -> Floats:
    """rho of each job: JCT / (duration x max(1, gang x N / GPUs of the cluster)); NaN for jobs that have not ended or
    whose duration is unknown.

    N is the time-weighted mean of the jobs that were live (submitted, not ended) between the job's submission and its
    end. A gang larger than its part of the cluster takes turns there, as in Gavel's isolated share (OSDI 2020, section
    4.2): it takes gang / part times as long. A job without `end_s` counts as live until `now_s`, the end of the run.
    """
    if not len(submit_s):
        return np.empty(0)
    last = np.nanmax(np.append(end_s, submit_s.max())) if now_s is None else now_s
    ends = np.where(np.isnan(end_s), last, end_s)
    contention = mean_contention(submit_s, ends)
    alone = duration_s * np.maximum(1.0, gpus * contention / cluster_gpus)
    return np.asarray((end_s - submit_s) / alone)


def mean_contention(submit_s: Floats, end_s: Floats) -> Floats:
    """Mean number of live jobs, itself among them, over each job's life; 1 for a life without length."""
    live = live_jobs(submit_s, end_s)
    life = end_s - submit_s
    area = live.integral_to(end_s) - live.integral_to(submit_s)
    return np.divide(area, life, out=np.ones(len(life)), where=life > 0)


def live_jobs(submit_s: Floats, end_s: Floats) -> StepSeries:
    """Jobs submitted and not ended, over time; of at least one job."""
    moments = np.concatenate((submit_s, end_s))
    changes = np.concatenate((np.ones(len(submit_s)), -np.ones(len(end_s))))
    times, position = np.unique(moments, return_inverse=True)
    return StepSeries.of(times, np.cumsum(np.bincount(position, changes, len(times))), float(times[-1]))
