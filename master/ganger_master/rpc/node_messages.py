"""Node sets, on which gangs take turns, as `ganger.v1` messages: rows of jobs, since users know no epochs.

Quarantined gangs as operators see them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ganger.v1 import node_pb2
from ganger.wire import resource_names as names
from ganger.wire import times

from ganger_master.core import quarantine
from ganger_master.core.commands import ObservedRows
from ganger_master.core.gang_model import Gang, NodeSet
from ganger_master.core.node_model import Stray
from ganger_master.core.state import State
from ganger_master.core.timeslice_groups import running_row
from ganger_master.rpc.job_messages import level_to_wire


def node_set_to_wire(
    node_set: NodeSet, gangs: Mapping[int, Gang], seen: Mapping[tuple[int, str], ObservedRows]
) -> node_pb2.NodeSet:
    """Return the newest slice matrix, without gangs that are gone and rows that are empty.

    `seen`: the slices that nodes reported, as `running_row` takes them.
    """
    matrix, running = node_set.newest, running_row(node_set, seen)
    rows = [[names.job_name(gangs[epoch].job) for epoch in row if epoch in gangs] for row in matrix.rows]
    return node_pb2.NodeSet(
        name=names.node_set_name(node_set.number),
        nodes=[names.node_name(node) for node in node_set.nodes],
        leader=names.node_name(node_set.leader),
        version=matrix.version,
        quantum=times.duration(matrix.quantum_seconds),
        level=level_to_wire(matrix.level),
        slices=[node_pb2.NodeSet.Slice(jobs=row) for row in rows if row],
        is_changing=node_set.coming is not None,
        active_slice=0 if running is None or running[0] != matrix.version else _shown(rows, running[1]),
    )


def _shown(rows: Sequence[Sequence[str]], row: int) -> int:
    """Return the position of a slice among the slices with jobs, from 1; zero for an empty slice."""
    return sum(1 for own in rows[: row + 1] if own) if rows[row] else 0


# Words of a command, and characters of a word, so that a list of many gangs fits into one message.
_WORDS_MOST = 32
_CHARACTERS_MOST = 200


def gangs_to_wire(state: State) -> Iterator[node_pb2.QuarantinedGang]:
    """Yield all quarantined gangs, by job and epoch."""
    parts: dict[tuple[int, str, int], dict[str, Stray]] = {}
    for uid in state.nodes.strays_of:
        for name in sorted(state.nodes.strays_of[uid]):
            for stray in state.nodes[name].strays:
                if stray.uid == uid and stray.quarantined:
                    parts.setdefault((stray.job, uid, stray.epoch), {})[name] = stray
    for key in sorted(parts):
        yield _gang_to_wire(state, parts[key])


def _gang_to_wire(state: State, parts: dict[str, Stray]) -> node_pb2.QuarantinedGang:
    first = next(iter(parts.values()))
    job = state.jobs.get(first.job)
    message = node_pb2.QuarantinedGang(
        name=names.quarantined_gang_name(first.uid, first.epoch),
        job=names.job_name(first.job) if first.job else "",
        job_uid=first.uid,
        job_known=job is not None and job.uid == first.uid,
        epoch=first.epoch,
        reason=first.note,
        adoption_refusal=quarantine.adoption_refusal(state, parts),
    )
    for name, stray in parts.items():
        message.parts.add(node=names.node_name(name), device_mask=stray.device_mask, phase=stray.phase.value)
    told = next((part.told for part in parts.values() if part.told is not None), None)
    if told is not None:
        message.user = told.user
        if told.spec is not None:
            message.display_name = told.spec.display_name
            message.command.extend([word[:_CHARACTERS_MOST] for word in told.spec.command[:_WORDS_MOST]])
    return message
