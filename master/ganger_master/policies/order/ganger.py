"""Ganger's own order: who most probably ends soonest for the GPUs it takes goes first, learned from jobs like it.

The key is Gittins's index per GPU (`models.service`), from the jobs of the same user and gang that were submitted next
to it. Who runs keeps its place unless another one's index is clearly higher: a switch costs both of them time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ganger_master.policies.facts import Capacity, Facts
from ganger_master.policies.order import Order

# How much higher the index must be of who takes another one's place.
_CLEARLY = 1.5
# Of the cluster, what jobs that have waited too long may take from those whose turn it is.
_OVERDUE_SHARE = 0.1


def keys(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    return (-facts.index * np.where(facts.is_running, _CLEARLY, 1.0),)


GANGER = Order("ganger", keys, learns=True, overdue_share=_OVERDUE_SHARE)
