"""Ganger's own order: who most probably ends soonest for the GPUs it takes goes first, learned from jobs like it.

The key is Gittins's index per GPU (`models.service`), from the jobs of the same user and gang that were submitted next
to it. The index is one end by the seconds it takes; to those a job that waits adds what it costs to put it in the place
of another one: one is suspended, one started and resumed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ganger_master.policies.facts import Capacity, Facts
from ganger_master.policies.order import Order

# Seconds in which GPUs train nobody when one job takes the place of another.
SWITCH_S = 13.0
# Of the cluster, what jobs that have waited too long may take from those whose turn it is.
_OVERDUE_SHARE = 0.1


def keys(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    rate = facts.index * np.maximum(facts.gpus, 1)
    after_switch = facts.index / (1.0 + SWITCH_S * rate)
    return (-np.where(facts.is_running, facts.index, after_switch), ~facts.is_running)


GANGER = Order("ganger", keys, learns=True, overdue_share=_OVERDUE_SHARE)
