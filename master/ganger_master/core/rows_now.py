"""Which row of a node set runs at this moment: what the daemon that leads it said last.

It changes with every quantum, so it is no part of what is stored, and nothing is decided by it.
"""

from __future__ import annotations

from collections.abc import Mapping

from ganger_master.core.commands import ObservedRows
from ganger_master.core.model import NodeSet


def running_row(node_set: NodeSet, seen: Mapping[tuple[int, str], ObservedRows]) -> tuple[int, int] | None:
    """Version of the matrix, and row from 0; None if nobody has said it of a matrix that stands."""
    said = seen.get((node_set.number, node_set.leader))
    for matrix in (node_set.active, node_set.coming):
        if said is not None and matrix is not None and matrix.version == said.version and said.row < len(matrix.rows):
            return matrix.version, said.row
    return None


def has_turn(node_set: NodeSet, seen: Mapping[tuple[int, str], ObservedRows], epoch: int) -> bool | None:
    """Whether the row that runs has the gang; None if nobody has said which one runs."""
    running = running_row(node_set, seen)
    if running is None:
        return None
    version, row = running
    matrix = node_set.active if node_set.active.version == version else node_set.newest
    return epoch in matrix.rows[row]
