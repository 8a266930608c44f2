"""Every order by name, with its keys; dominant resource fairness is in `fairness`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ganger_master.policies.fairness import DRF
from ganger_master.policies.orders import (
    NO_HISTORY,
    SLACK_S,
    Capacity,
    Facts,
    Floats,
    Integers,
    JobOrder,
    ServiceHistory,
    as_decimals,
)

# Seconds in which GPUs are idle when one job replaces another.
SWITCH_S = 13.0
# Seconds that a job runs before estimates count, where plans that may preempt are as far apart as by default.
FIRST_S = 300.0
# Logarithms that differ by less are ties: the estimates are not more exact.
_ALIKE = math.log(1.01)
# Part of the cluster that overdue jobs may take at once.
_OVERDUE_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class GangerRank:
    """Ganger's own order. `first_s`: seconds that a job runs before estimates count.

    Assume that the queue lasts for H more seconds, exponentially distributed. Serving a job that ends after R seconds
    saves up to H seconds of waiting and costs at most GPUs x H (1 - exp(-R / H)) GPU-seconds. The saving per GPU-second
    is (1 / H + G) / GPUs, in units of 1 / H, with G = 1 / R: Gittins's index (`estimators.run_time`). H is the mean of
    the waits, each weighted by its length (Lindy's law), so that a job preempted just now does not shorten it.

    A pending job's index counts the seconds of a switch; a running job that ends before a switch is done keeps its
    place. The first minutes of every job go before all that, in order of arrival, since failing jobs fail early
    (Gandiva, section 2). Ties, to one part in a hundred, go to running jobs, of which the one that has run longest goes
    last: a pause is the smallest part of its time.
    """

    first_s: float = FIRST_S

    def keys(self, facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
        """Ganger's own order: the most waiting time saved per GPU-second first, by estimates from similar jobs."""
        gpus = np.maximum(facts.gpus, 1)
        end_rate = facts.index * gpus
        rate = end_rate + 1.0 / _queue_lasts_s(facts)
        after_switch = rate / (1.0 + SWITCH_S * rate)
        in_place = np.where(end_rate * SWITCH_S >= 1.0, np.inf, rate)
        saved = np.where(facts.is_running, in_place, after_switch) / gpus
        return (
            np.where(facts.attained_s < self.first_s, facts.arrival_s, np.inf),
            -np.floor(np.log(saved) / _ALIKE),
            # Running jobs before pending ones.
            np.where(facts.is_running, facts.attained_s, np.inf),
        )


def _queue_lasts_s(facts: Facts) -> float:
    waits_s = facts.waited_s[~facts.is_running]
    # The exact sum does not depend on the order of the rows.
    return max(SWITCH_S, math.fsum(waits_s * waits_s) / max(1.0, math.fsum(waits_s)))


def ganger_alone(first_s: float = FIRST_S) -> JobOrder:
    """Return Ganger's own order, in which jobs go by arrival until they have run for `first_s` seconds."""
    return JobOrder(
        "ganger-alone",
        GangerRank(first_s).keys,
        learns=True,
        overdue_share=_OVERDUE_SHARE,
        regroups=True,
        rests=True,
        placement="best-fit",
        with_interval=ganger_alone,
    )


GANGER_ALONE = ganger_alone()


# GPU-seconds; three queues, as in the authors' simulator (Pollux's port has one threshold, 57,600).
THRESHOLDS = (3250.0, 7200.0)


@dataclass(frozen=True, slots=True)
class Queues:
    """Tiresias's queues by attained GPU-seconds (Gu et al., NSDI 2019, section 3.3). `thresholds`: ascending, in
    GPU-seconds, one less than there are queues. A demotion comes after (threshold / GPUs - executed) seconds of
    running, in the authors' simulator after (threshold - executed) / GPUs."""

    thresholds: tuple[float, ...] = THRESHOLDS

    def __post_init__(self) -> None:
        assert all(a < b for a, b in zip((0.0, *self.thresholds), self.thresholds, strict=False)), self.thresholds

    def keys(self, facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
        """Tiresias without a history (2D-LAS): few attained GPU-seconds first, in queues, to limit preemptions."""
        return (self.queue(facts), ~facts.is_running, facts.started_s)

    def queue(self, facts: Facts) -> Integers:
        """Return the queue of each job; 0 goes first."""
        return np.searchsorted(self.thresholds, (facts.attained_s + SLACK_S) * facts.gpus, side="right")

    def until_demotion(self, facts: Facts) -> Floats:
        """Return the GPU-seconds until the next queue; infinite in the last."""
        limits = np.array((*self.thresholds, np.inf))
        return np.asarray(limits[self.queue(facts)] - facts.service, float)

    def next_change(self, facts: Facts, now: float) -> float:
        """Return when the first running job is demoted."""
        is_held = facts.is_running & (facts.gpus > 0)
        delays_s = self.until_demotion(facts)[is_held] / facts.gpus[is_held]
        return now + float(delays_s.min(initial=np.inf))


def tiresias(thresholds: tuple[float, ...] = THRESHOLDS) -> JobOrder:
    """Return the 2D-LAS order with these queues."""
    queues = Queues(thresholds)
    return JobOrder("tiresias", queues.keys, next_change=queues.next_change)


TIRESIAS = tiresias()


@dataclass(frozen=True, slots=True, eq=False)
class GittinsQueues:
    """Tiresias's queues, each sorted by Gittins's index.

    With S the GPU-seconds of ended jobs, a those that a job has attained and D those until it drops into the next queue
    (no limit in the last), the index is (Gittins 1989; the authors' simulator takes the expectation of S)

        G(a, D) = P(S - a <= D | S > a) / E[min(S - a, D) | S > a].

    A job that has outlived the whole history has index 0. Ties rank as in `tiresias`.
    """

    queues: Queues
    history: ServiceHistory

    def keys(self, facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
        """Tiresias with a history (2D-Gittins): as `tiresias`; in a queue the job likeliest to end soon goes first."""
        index = self.history.index(facts.service, self.queues.until_demotion(facts))
        return (self.queues.queue(facts), -index, ~facts.is_running, facts.started_s)


def tiresias_gittins(history: ServiceHistory, thresholds: tuple[float, ...] = THRESHOLDS) -> JobOrder:
    """Return the 2D-Gittins order with these queues and this history."""
    queues = Queues(thresholds)
    return JobOrder(
        "tiresias-gittins",
        GittinsQueues(queues, history).keys,
        next_change=queues.next_change,
        with_history=partial(tiresias_gittins, thresholds=thresholds),
    )


def las_keys(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    """Least attained service first, counted in seconds (Nuyens and Wierman 2008 call it foreground-background)."""
    return (as_decimals(facts.attained_s),)


def las2d_keys(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    """Least attained service first, counted in GPU-seconds: continuous, as in Synergy's simulator.

    Tiresias's two-dimensional LAS (NSDI 2019, section 4) sorts jobs into queues instead, so that two jobs do not
    preempt each other for ever: see `tiresias`.
    """
    return (as_decimals(facts.service),)


def round_robin_keys(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    """Round robin: the job with the longest wait since it last ran first, the one with the longest stretch last.

    Time slicing as in Gandiva (Xiao et al., OSDI 2018, section 3.1), over the whole cluster: a slice lasts from one
    plan to the next. The order uses no estimate, so short jobs end late. It is the baseline of Tiresias's study (NSDI
    2019, section 5).
    """
    return (-facts.waited_s, facts.stretch_s)


LAS = JobOrder("las", las_keys)
# For ideal runs of the simulator only: the policy `las2d` is `tiresias`.
LAS2D = JobOrder("las2d", las2d_keys)
ROUND_ROBIN = JobOrder("round-robin", round_robin_keys)


# Groups of `edf` in their order: deadline ahead, deadline missed, no deadline.
AHEAD, MISSED, NONE = 0, 1, 2


def edf_keys(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    """Earliest deadline first; then jobs whose deadline has passed; then jobs without a deadline.

    The rule of Liu and Layland (1973, section 7). Under overload the plain rule makes one job after another late, so
    jobs whose deadline has passed form a second group, and `planner/job_forecasts.py` warns at submission.
    """
    return (deadline_groups(facts.deadline_s, now), facts.deadline_s)


def deadline_groups(deadline_s: Floats, now: float) -> Integers:
    """Return the group of each deadline: AHEAD, MISSED or NONE."""
    return np.where(np.isinf(deadline_s), NONE, np.where(deadline_s <= now + SLACK_S, MISSED, AHEAD))


def next_deadline_s(facts: Facts, now: float) -> float:
    """Return when the next deadline passes."""
    ahead = facts.deadline_s[facts.deadline_s > now + SLACK_S]
    return float(ahead.min(initial=np.inf))


EDF = JobOrder("edf", edf_keys, next_change=next_deadline_s)


def fifo_keys(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    """Order by arrival; no job passes another, and no running job is preempted (Tiresias's `fifo`)."""
    return ()


def backfill_keys(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    """Order by arrival, skipping jobs that do not fit; no running job is preempted (Tiresias's `fjf`)."""
    return ()


FIFO = JobOrder("fifo", fifo_keys, preempts=False, is_strict=True, by_arrival=True)
FIFO_BACKFILL = JobOrder("fifo-backfill", backfill_keys, preempts=False, by_arrival=True)


# A lower bound of the remaining time of any job.
LEAST_REMAINING_S = 60.0


def ftf_keys(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    """Finish-time fairness: the job that sharing delays most first, by an estimate of its remaining time."""
    return (-finish_time_fairness(facts, expected_s(facts), now, capacity),)


def expected_s(facts: Facts) -> Floats:
    """Return the expected remaining seconds of each job, at least a minute, so that a young job has a rho.

    Where there is no expectation it equals the attained time: for lifetimes with P(S > s) ~ 1/s that is the median of
    the rest at any age. The estimates of `estimators.run_time` are not used. They shorten the average JCT, but set back
    a job whose estimate is too long, and this order exists to keep the largest rho small (with them it rises from 1.23
    to 1.51 on 120 jobs of Shockwave's trace).
    """
    known = facts.expected_remaining_s
    return np.maximum(np.where(np.isnan(known), facts.attained_s, known), LEAST_REMAINING_S)


def finish_time_fairness(facts: Facts, remaining_s: Floats, now: float, capacity: Capacity) -> Floats:
    """Return rho of each job if it ran from now on; above 1 is worse than an equal part of the cluster of its own.

    Themis (Mahajan et al., NSDI 2020, section 3): rho = T_shared / T_independent, descending.

    * T_shared: seconds since the arrival plus the remaining seconds at the rate of the whole gang.
    * T_independent: the whole job on its part of the cluster, which is its weight over that of all live jobs. A gang
      larger than that part is time-sliced there, as in Gavel's isolated share (OSDI 2020, section 4.2).

    Differences: contention is the present one, where Themis takes the mean over the job's life; sorting replaces the
    auction. Synergy's simulator sorts ascending, which favours the best-off jobs.

    `remaining_s`: >= 0, and above 0 for a job that has attained nothing.
    """
    contention = facts.weight.sum() / facts.weight
    slices = np.maximum(1.0, facts.gpus * contention / max(capacity.gpus, 1))
    return np.asarray((now - facts.arrival_s + remaining_s) / ((facts.attained_s + remaining_s) * slices), float)


FTF = JobOrder("ftf", ftf_keys)


def srtf_keys(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    """Shortest remaining time first, by an oracle: the usual bound for average JCT, though not for gangs (see srsf)."""
    return (as_decimals(facts.remaining_s),)


def srsf_keys(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    """Shortest remaining service first, by an oracle: remaining time x GPUs (Tiresias's `shortest-gpu`, NSDI 2019)."""
    return (as_decimals(facts.remaining_s * facts.gpus),)


def lrtf_keys(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    """Longest remaining time first, by an oracle: minimises the makespan alone (Graham's LPT rule, 1969)."""
    return (as_decimals(-facts.remaining_s),)


def ftf_oracle_keys(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    """Finish-time fairness with an oracle's remaining times, for comparison with `ftf`."""
    return (-finish_time_fairness(facts, facts.remaining_s, now, capacity),)


SRTF = JobOrder("srtf", srtf_keys, knows_durations=True)
SRSF = JobOrder("srsf", srsf_keys, knows_durations=True)
LRTF = JobOrder("lrtf", lrtf_keys, knows_durations=True)
FTF_ORACLE = JobOrder("ftf-oracle", ftf_oracle_keys, knows_durations=True)


# Orders that learn from ended jobs have an empty history here.
ORDERS = {
    order.name: order
    for order in (
        FIFO,
        FIFO_BACKFILL,
        SRTF,
        SRSF,
        LRTF,
        LAS,
        LAS2D,
        ROUND_ROBIN,
        TIRESIAS,
        tiresias_gittins(NO_HISTORY),
        DRF,
        FTF,
        FTF_ORACLE,
        EDF,
        GANGER_ALONE,
    )
}


def summary(name: str) -> str:
    """Return one line that describes the order: the first of the docstring of its `keys`."""
    text = ORDERS[name].keys.__doc__
    assert text, f"the keys of the order {name} have no docstring"
    return text.splitlines()[0]
