"""Every order by name, with its keys; dominant resource fairness is in `fairness`.

**Ganger's own order**: the most waiting time saved per GPU-second first, by estimates from similar jobs.

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

**The first five minutes** of every job go before all that, in order of arrival: the minimum time between two plans that
preempt, so it follows `--plan-every`. Failing jobs fail early, users wait
for the first result, and the preempted job has run for longer (Gandiva, section 2, early feedback; least attained
service with one step). Estimates from similar jobs are too few to replace this.

**Ties**, to one part in a hundred, go to running jobs; among them the job that has run longest goes last. So the same
few jobs are preempted each time, for which a pause is the smallest part of their time.

**Tiresias** (Gu et al., NSDI 2019, section 3.3): queues by attained GPU-seconds, without a history (2D-LAS) and with
one (2D-Gittins).

A job starts in the first queue and drops into the next as its GPU-seconds reach each threshold. Earlier queues go
first. Inside a queue running jobs keep their places; then the earlier start goes first, then the earlier arrival.
With a promote knob a job returns to the first queue once it has waited `knob` x as long as it had run.

Differences from the authors' simulator (`dlas-gpu`, `gittins`):

* A demotion comes after (threshold / GPUs - executed) seconds of running, not after (threshold - executed) / GPUs.
* A promotion does not reset attained service. It lasts for the stretch that it starts: queues count from the beginning
  of that stretch, and all attained service counts again afterwards.
* The expectation in Gittins's index is of S - a, not of S, which would make long-served jobs look worse than they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ganger_master.policies.fairness import DRF
from ganger_master.policies.job_facts import NO_HISTORY, Capacity, Facts, Flags, Floats, Integers, ServiceHistory
from ganger_master.policies.orders import SLACK_S, JobOrder, as_decimals

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
    """Ganger's own order. `first_s`: seconds that a job runs before estimates count."""

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
    """Estimate for how many more seconds jobs will wait."""
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
    """Tiresias's queues. `thresholds`: ascending, in GPU-seconds, one less than there are queues. `promote_knob`: None
    promotes no job."""

    thresholds: tuple[float, ...] = THRESHOLDS
    promote_knob: float | None = None

    def __post_init__(self) -> None:
        assert all(a < b for a, b in zip((0.0, *self.thresholds), self.thresholds, strict=False)), self.thresholds
        assert self.promote_knob is None or self.promote_knob > 0, self.promote_knob

    def keys(self, facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
        """Tiresias without a history (2D-LAS): few attained GPU-seconds first, in queues, to limit preemptions."""
        return (self.queue(facts), ~facts.is_running, facts.started_s)

    def queue(self, facts: Facts) -> Integers:
        """Return the queue of each job; 0 goes first."""
        return self._queue(self.counted_s(facts), facts.gpus)

    def counted_s(self, facts: Facts) -> Floats:
        """Return the seconds of running that count for the queue."""
        counted: Floats = np.where(self._is_promoted(facts), facts.stretch_s, facts.attained_s)
        return counted

    def until_demotion(self, facts: Facts) -> Floats:
        """Return the GPU-seconds until the next queue; infinite in the last."""
        counted_s = self.counted_s(facts)
        limits = np.array((*self.thresholds, np.inf))
        rest: Floats = limits[self._queue(counted_s, facts.gpus)] - counted_s * facts.gpus
        return rest

    def next_change(self, facts: Facts, now: float) -> float:
        """Return when the first running job is demoted or the first pending one promoted."""
        is_held = facts.is_running & (facts.gpus > 0)
        delays_s = self.until_demotion(facts)[is_held] / facts.gpus[is_held]
        soonest_s = float(delays_s.min(initial=np.inf))
        if self.promote_knob is not None:
            can_rise = ~facts.is_running & (self._queue(facts.attained_s, facts.gpus) > 0) & ~self._is_promoted(facts)
            delays_s = self.promote_knob * facts.attained_s[can_rise] - facts.waited_s[can_rise]
            soonest_s = min(soonest_s, float(delays_s.min(initial=np.inf)))
        return now + soonest_s

    def _is_promoted(self, facts: Facts) -> Flags:
        """Return which jobs are promoted by their present wait, or by the wait before their present stretch."""
        if self.promote_knob is None:
            return np.zeros(len(facts), bool)
        before_s = facts.attained_s - facts.stretch_s
        wait_s = np.where(facts.is_running, facts.waited_before_s, facts.waited_s)
        promoted: Flags = (self._queue(before_s, facts.gpus) > 0) & (wait_s + SLACK_S >= self.promote_knob * before_s)
        return promoted

    def _queue(self, seconds: Floats, gpus: Integers) -> Integers:
        return np.searchsorted(self.thresholds, (seconds + SLACK_S) * gpus, side="right")


def tiresias(thresholds: tuple[float, ...] = THRESHOLDS, promote_knob: float | None = None) -> JobOrder:
    """Return the 2D-LAS order with these queues."""
    queues = Queues(thresholds, promote_knob)
    return JobOrder("tiresias", queues.keys, next_change=queues.next_change)


TIRESIAS = tiresias()


@dataclass(frozen=True, slots=True, eq=False)
class GittinsQueues:
    """Tiresias's queues, each sorted by Gittins's index.

    With S the GPU-seconds of ended jobs, a those that a job has attained and D those until it drops into the next queue
    (no limit in the last), the index is (Gittins 1989)

        G(a, D) = P(S - a <= D | S > a) / E[min(S - a, D) | S > a].

    A job that has outlived the whole history has index 0. Ties rank as in `tiresias`.
    """

    queues: Queues
    history: ServiceHistory

    def keys(self, facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
        """Tiresias with a history (2D-Gittins): as `tiresias`; in a queue the job likeliest to end soon goes first."""
        index = self.history.index(facts.service, self.queues.until_demotion(facts))
        return (self.queues.queue(facts), -index, ~facts.is_running, facts.started_s)


def tiresias_gittins(
    history: ServiceHistory, thresholds: tuple[float, ...] = THRESHOLDS, promote_knob: float | None = None
) -> JobOrder:
    """Return the 2D-Gittins order with these queues and this history."""
    queues = Queues(thresholds, promote_knob)
    return JobOrder(
        "tiresias-gittins",
        GittinsQueues(queues, history).keys,
        next_change=queues.next_change,
        with_history=partial(tiresias_gittins, thresholds=thresholds, promote_knob=promote_knob),
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


LAS = JobOrder("las", las_keys, is_steady=True)
LAS2D = JobOrder("las2d", las2d_keys, is_steady=True)
ROUND_ROBIN = JobOrder("round-robin", round_robin_keys)


# Groups of `edf` in their order: deadline ahead, deadline missed, no deadline.
AHEAD, MISSED, NONE = 0, 1, 2


def edf_keys(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    """Earliest deadline first; then jobs whose deadline has passed; then jobs without a deadline.

    The rule of Liu and Layland (1973, section 7). Under overload the plain rule makes one job after another late, so
    jobs whose deadline has passed form a second group, and `planner/deadline_advice.py` warns at submission.
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


def summary(name: str) -> str:
    """Return one line that describes the order: the first of the docstring of its `keys`."""
    text = ORDERS[name].keys.__doc__
    assert text, f"the keys of the order {name} have no docstring"
    return text.splitlines()[0]
