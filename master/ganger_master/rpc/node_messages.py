"""Node sets, on which gangs take turns, as `ganger.v1` messages: rows of jobs, since users know no epochs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ganger.v1 import node_pb2
from ganger.wire import resource_names as names
from ganger.wire import times

from ganger_master.core.commands import ObservedRows
from ganger_master.core.model import Gang, NodeSet
from ganger_master.core.rows_now import running_row
from ganger_master.rpc.job_messages import level_to_wire


def node_set_to_wire(
    node_set: NodeSet, gangs: Mapping[int, Gang], seen: Mapping[tuple[int, str], ObservedRows]
) -> node_pb2.NodeSet:
    """The newest matrix. A gang that has gone meanwhile is left out, a row that has nobody any more too. `seen`: what
    nodes said of their rows."""
    matrix, running = node_set.newest, running_row(node_set, seen)
    rows = [[names.job_name(gangs[epoch].job) for epoch in row if epoch in gangs] for row in matrix.rows]
    return node_pb2.NodeSet(
        name=names.node_set_name(node_set.number),
        nodes=[names.node_name(node) for node in node_set.nodes],
        leader=names.node_name(node_set.leader),
        version=matrix.version,
        quantum=times.duration(matrix.quantum_seconds),
        level=level_to_wire(matrix.level),
        rows=[node_pb2.NodeSet.Row(jobs=row) for row in rows if row],
        changes=node_set.coming is not None,
        running_row=0 if running is None or running[0] != matrix.version else _shown(rows, running[1]),
    )


def _shown(rows: Sequence[Sequence[str]], row: int) -> int:
    """The place among rows that have somebody, from 1; zero if it has nobody."""
    return sum(1 for own in rows[: row + 1] if own) if rows[row] else 0
