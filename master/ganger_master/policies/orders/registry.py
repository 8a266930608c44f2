"""Every order by name. Arrival, attained service, deadlines, fairness and oracles have their keys here."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ganger_master.policies.job_facts import Capacity, Facts, Floats, Integers
from ganger_master.policies.orders import SLACK_S, JobOrder, as_decimals
from ganger_master.policies.orders.drf import DRF
from ganger_master.policies.orders.ganger import GANGER_ALONE
from ganger_master.policies.orders.tiresias import TIRESIAS, tiresias_gittins
from ganger_master.policies.service_history import NO_HISTORY, ServiceHistory


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


LAS = JobOrder("las", las_keys, is_steady=True)
LAS2D = JobOrder("las2d", las2d_keys, is_steady=True)
ROUND_ROBIN = JobOrder("round-robin", round_robin_keys)


# Groups of `edf` in their order: deadline ahead, deadline missed, no deadline.
AHEAD, MISSED, NONE = 0, 1, 2


def edf_keys(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    """Earliest deadline first; then jobs whose deadline has passed; then jobs without a deadline.

    The rule of Liu and Layland (1973, section 7). Under overload the plain rule makes one job after another late, so
    jobs whose deadline has passed form a second group, and `policies/deadlines.py` warns at submission.
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
    """By arrival; no job passes another, and no running job is preempted (Tiresias's `fifo`)."""
    return ()


def backfill_keys(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    """By arrival, skipping jobs that do not fit; no running job is preempted (Tiresias's `fjf`)."""
    return ()


FIFO = JobOrder("fifo", fifo_keys, preempts=False, is_strict=True, is_steady=True, by_arrival=True)
FIFO_BACKFILL = JobOrder("fifo-backfill", backfill_keys, preempts=False, is_steady=True, by_arrival=True)


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
    rho: Floats = (now - facts.arrival_s + remaining_s) / ((facts.attained_s + remaining_s) * slices)
    return rho


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


SRTF = JobOrder("srtf", srtf_keys, knows_durations=True, is_steady=True)
SRSF = JobOrder("srsf", srsf_keys, knows_durations=True, is_steady=True)
LRTF = JobOrder("lrtf", lrtf_keys, knows_durations=True, is_steady=True)
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


def order_named(name: str, history: ServiceHistory = NO_HISTORY) -> JobOrder:
    """Return the order of this name, with the history of ended jobs; KeyError, naming all orders, if there is none."""
    if name not in ORDERS:
        raise KeyError(f"there is no order {name!r}; there are {', '.join(sorted(ORDERS))}")
    return tiresias_gittins(history) if name == "tiresias-gittins" else ORDERS[name]


def summary(name: str) -> str:
    """Return one line that describes the order: the first of the docstring of its `keys`."""
    text = ORDERS[name].keys.__doc__
    assert text, f"the keys of the order {name} have no docstring"
    return text.splitlines()[0]
