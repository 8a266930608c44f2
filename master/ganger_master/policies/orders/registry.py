"""Every order by name, with its one-line summary."""

from __future__ import annotations

from ganger_master.policies.orders import JobOrder
from ganger_master.policies.orders.attained_service import LAS, LAS2D, ROUND_ROBIN
from ganger_master.policies.orders.drf import DRF
from ganger_master.policies.orders.earliest_deadline import EDF
from ganger_master.policies.orders.fifo import FIFO, FIFO_BACKFILL
from ganger_master.policies.orders.finish_time_fairness import FTF
from ganger_master.policies.orders.ganger import GANGER_ALONE
from ganger_master.policies.orders.oracles import FTF_ORACLE, LRTF, SRSF, SRTF
from ganger_master.policies.orders.tiresias import TIRESIAS, tiresias_gittins
from ganger_master.policies.service_history import NO_HISTORY, ServiceHistory

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
