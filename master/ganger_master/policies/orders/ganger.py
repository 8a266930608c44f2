"""Ganger's own order: who saves most waiting for the GPUs it takes goes first, learned from jobs like it.

Let jobs have to wait for H more seconds, exponentially distributed, until there is room for all. One that is served
does not wait until it ends or that time is over, and has not to wait once it has ended. So to serve one whose end is R
away saves H of waiting for at most GPUs x H (1 - exp(-R / H)) GPU-seconds. What is saved by a GPU-second, by 1 / H, is

    (1 / H + G) / GPUs,

where 1 / R is G, and within a third of that if not: the key is this. G is Gittins's index (`estimators.run_time`,
from the
jobs of the same user and gang that were submitted next to it), the best rate at which running ends a job of which one
knows only what is likely. In a crowd without end who most probably ends soonest for the GPUs it takes goes first; in
one that will be gone before long jobs have ended, those who take few GPUs: most can run then.

How long jobs will have to wait is not known; by Lindy's law as long again as they have, so H is the mean of the waits,
each counted for as long as it has lasted. Who was stopped just now does not shorten it: for whom that was done would
not be worth it any more, and the next plan would take it back.

An index is one end by the seconds it takes; to those a job that waits adds what it costs to put it in the place of
another one: one is suspended, one started and resumed. Who runs and will have ended before that is done stays,
however large its gang: its place is free sooner if one waits for it.

Before all that everybody has its first five minutes, in order of arrival. What is likely of a job is told by others,
and they are seldom enough: a job that fails does so soon, its user waits for a first sign, and who is stopped for it
has run for longer (Gandiva, section 2, early feedback; least-attained-service, with one step). And where two are worth
the same to one part in a hundred, who runs stays; of those that run, who has run for longer makes way: the same few do
so each time, to whom a pause is the least of their time.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ganger_master.policies.job_facts import Capacity, Facts
from ganger_master.policies.orders import JobOrder

# Seconds in which GPUs train nobody when one job takes the place of another.
SWITCH_S = 13.0
# So long a job runs before what is likely of it counts: the time between two plans that may stop somebody.
FIRST_S = 300.0
# Logarithms that differ by less are alike: what is known of jobs is not known any better.
_ALIKE = math.log(1.01)
# Of the cluster, what jobs that have waited too long may take from those whose turn it is.
_OVERDUE_SHARE = 0.1


def keys(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    gpus = np.maximum(facts.gpus, 1)
    ends = facts.index * gpus
    rate = ends + 1.0 / _crowded_s(facts)
    after_switch = rate / (1.0 + SWITCH_S * rate)
    stays = np.where(ends * SWITCH_S >= 1.0, np.inf, rate)
    saved = np.where(facts.is_running, stays, after_switch) / gpus
    return (
        # Whose turn comes by arrival, then all others.
        np.where(facts.attained_s < FIRST_S, facts.arrival_s, np.inf),
        -np.floor(np.log(saved) / _ALIKE),
        # Who runs, then who waits.
        np.where(facts.is_running, facts.attained_s, np.inf),
    )


def _crowded_s(facts: Facts) -> float:
    """For how long jobs will go on waiting."""
    waits_s = facts.waited_s[~facts.is_running]
    # Exact, so that it does not depend on the order of the rows.
    return max(SWITCH_S, math.fsum(waits_s * waits_s) / max(1.0, math.fsum(waits_s)))


GANGER_ALONE = JobOrder(
    "ganger-alone",
    keys,
    learns=True,
    overdue_share=_OVERDUE_SHARE,
    regroups=True,
    rests=True,
    placement="best-fit",
)
