"""A gang that was to stop, and is to run after all. Where it takes turns over several nodes, by a matrix of its own.

Some of its parts may rest by then, and hear of it before a switch of rows that ends their turn, others after it: those
would go on and these not, and neither come to a boundary. The next matrix, with the same rows, is told with the order,
and made active once all nodes know both; whoever rests by a stop of the master waits for it.
"""

from __future__ import annotations

from msgspec.structs import replace

from ganger_master.core import gang_orders as orders
from ganger_master.core.model import Gang
from ganger_master.core.state import State


def run_after_all(state: State, gang: Gang, now: float) -> None:
    state.put_gang(orders.run(gang, now))
    node_set = state.sets.get(state.set_of.get(gang.epoch, 0))
    if node_set is None or len(gang.pieces) == 1 or gang.epoch not in node_set.newest.epochs:
        return
    newest = node_set.newest
    state.put_set(replace(node_set, coming=replace(newest, version=newest.version + 1)))
