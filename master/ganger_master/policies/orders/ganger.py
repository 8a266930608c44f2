"""Ganger's own order: the most waiting time saved per GPU-second first, by estimates from similar jobs.

**The key.** Assume that the queue lasts for H more seconds, exponentially distributed, until there is room for all
jobs. A job that is served does not wait until it ends or the queue is gone. Serving a job that ends after R seconds
saves up to H seconds of waiting and costs at most GPUs x H (1 - exp(-R / H)) GPU-seconds. The saving per GPU-second,
in units of 1 / H, is

    (1 / H + G) / GPUs,

exact where G = 1 / R and within a third otherwise. G is Gittins's index: the highest rate at which running is expected
to end a job, from the distribution of its remaining time (`estimators.run_time`: jobs of the same user and gang size
that were submitted next to it). With an endless queue the job goes first that most probably ends soonest for the GPUs
it takes. With a queue shorter than the jobs, small gangs go first, so that most jobs run.

**H** is estimated by Lindy's law: jobs wait for as long again as they have waited. It is the mean of the waits, each
weighted by its length. So a job preempted just now does not shorten H; otherwise the next plan would revert the
preemption.

**Switches cost time.** A pending job's index counts the seconds of a switch (suspend one job, start another, resume the
first). A running job that will end before a switch is done keeps its place, whatever its gang: its GPUs are free sooner
if it is left alone.

**The first five minutes** of every job go before all that, in order of arrival. Failing jobs fail early, users wait
for the first result, and the preempted job has run for longer (Gandiva, section 2, early feedback; least attained
service with one step). Estimates from similar jobs are too few to replace this.

**Ties**, to one part in a hundred, go to running jobs; among them the job that has run longest goes last. So the same
few jobs are preempted each time, for which a pause is the smallest part of their time.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ganger_master.policies.job_facts import Capacity, Facts
from ganger_master.policies.orders import JobOrder

# Seconds in which GPUs are idle when one job replaces another.
SWITCH_S = 13.0
# Seconds that a job runs before estimates count: the time between two plans that may preempt.
FIRST_S = 300.0
# Logarithms that differ by less are ties: the estimates are not more exact.
_ALIKE = math.log(1.01)
# Part of the cluster that overdue jobs may take at once.
_OVERDUE_SHARE = 0.1


def ganger_keys(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    """Ganger's own order: the most waiting time saved per GPU-second first, by estimates from similar jobs."""
    gpus = np.maximum(facts.gpus, 1)
    end_rate = facts.index * gpus
    rate = end_rate + 1.0 / _queue_lasts_s(facts)
    after_switch = rate / (1.0 + SWITCH_S * rate)
    in_place = np.where(end_rate * SWITCH_S >= 1.0, np.inf, rate)
    saved = np.where(facts.is_running, in_place, after_switch) / gpus
    return (
        np.where(facts.attained_s < FIRST_S, facts.arrival_s, np.inf),
        -np.floor(np.log(saved) / _ALIKE),
        # Running jobs before pending ones.
        np.where(facts.is_running, facts.attained_s, np.inf),
    )


def _queue_lasts_s(facts: Facts) -> float:
    """Estimate for how many more seconds jobs will wait."""
    waits_s = facts.waited_s[~facts.is_running]
    # The exact sum does not depend on the order of the rows.
    return max(SWITCH_S, math.fsum(waits_s * waits_s) / max(1.0, math.fsum(waits_s)))


GANGER_ALONE = JobOrder(
    "ganger-alone",
    ganger_keys,
    learns=True,
    overdue_share=_OVERDUE_SHARE,
    regroups=True,
    rests=True,
    placement="best-fit",
)
