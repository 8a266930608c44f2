"""Every order by name, with the line that says what it is."""

from __future__ import annotations

import sys

from ganger_master.policies.orders import JobOrder
from ganger_master.policies.orders.attained_service import LAS
from ganger_master.policies.orders.drf import DRF
from ganger_master.policies.orders.earliest_deadline import EDF
from ganger_master.policies.orders.fifo import FIFO, FIFO_BACKFILL
from ganger_master.policies.orders.finish_time_fairness import FTF
from ganger_master.policies.orders.ganger import GANGER_ALONE
from ganger_master.policies.orders.las2d import LAS2D
from ganger_master.policies.orders.lrtf import LRTF
from ganger_master.policies.orders.oracles import FTF_ORACLE
from ganger_master.policies.orders.round_robin import ROUND_ROBIN
from ganger_master.policies.orders.srsf import SRSF
from ganger_master.policies.orders.srtf import SRTF
from ganger_master.policies.orders.tiresias import TIRESIAS
from ganger_master.policies.orders.tiresias_gittins import tiresias_gittins
from ganger_master.policies.service_history import NO_HISTORY, ServiceHistory

# Those that learn from ended jobs stand here as they are before the first.
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
    """With what is known of ended jobs. KeyError, naming the known ones, for an unknown name."""
    if name not in ORDERS:
        raise KeyError(f"there is no order {name!r}; there are {', '.join(sorted(ORDERS))}")
    return tiresias_gittins(history) if name == "tiresias-gittins" else ORDERS[name]


def summary(name: str) -> str:
    """One line: the first of what the order's columns, or else its file, say of themselves."""
    keys = ORDERS[name].keys
    text = keys.__doc__ or sys.modules[keys.__module__].__doc__
    assert text, f"the order {name} says nothing of itself"
    return text.splitlines()[0]
