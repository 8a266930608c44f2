"""What follows from launches that fail by no fault of the command: a full disk, a launcher that does not start, a
directory that is not there.

The node is closed to the job from then on, so that one bad node does not use up all its attempts, until a gang of
whomever has run there, its daemon begins a new session or an operator uncordons it; a node without which the job would
find no place in the whole cluster stays open to it. Other jobs are not kept from the node: one that can be launched
nowhere would close one node after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from ganger.cluster.placement import places
from ganger.cluster.view import LoadMode
from msgspec.structs import replace

from ganger_master.core.model import Gang, JobRecord, OutcomeKind, Piece
from ganger_master.core.state import State

# Nodes of a job that are remembered; a gang may be as wide as the cluster.
_MOST_NODES: Final = 64


def note_failure(state: State, job: JobRecord, gang: Gang) -> JobRecord:
    """Has the nodes that could not launch their part of the gang count it, and the job remember them."""
    failed = _failed(gang)
    if not failed:
        return job
    for piece in failed:
        node = state.nodes.get(piece.claim.node)
        if node is not None:
            said = f"{job.name}: {piece.outcome.message}"
            state.put_node(replace(node, launch_failures=node.launch_failures + 1, launch_failure=said))
    nodes = dict.fromkeys([*job.launch_failed_on, *(piece.claim.node for piece in failed)])
    return replace(job, launch_failed_on=tuple(nodes)[-_MOST_NODES:])


def note_success(state: State, gang: Gang) -> None:
    """The gang stepped, or its command ended by itself: its nodes can launch."""
    for name in gang.nodes:
        node = state.nodes.get(name)
        if node is not None and node.launch_failures:
            state.put_node(replace(node, launch_failures=0, launch_failure=""))


def visible_to(jobs: Mapping[int, JobRecord], said: str, user: str) -> str:
    """Return the part of a launch failure ("jobs/7: ...") that a user may read: of another user's job only the name,
    for the rest names that user's files."""
    name, _, _ = said.partition(":")
    number = name.removeprefix("jobs/")
    job = jobs.get(int(number)) if number.isdecimal() else None
    is_own = job is not None and job.user == user
    return said if is_own or not said else f"{name}: its user and operators see why"


def failed_on(state: State, job: JobRecord) -> list[str]:
    """Return the nodes on which the job could not be launched, and no other job has been since."""
    return [name for name in job.launch_failed_on if (node := state.nodes.get(name)) and node.launch_failures]


def could_go_elsewhere(state: State, job: JobRecord, closed: Sequence[str]) -> bool:
    """Whether the nodes that serve, but for the closed ones, could hold the job if nothing else were there."""
    shape = job.shape
    shape = replace(shape, locality=replace(shape.locality, wish=None), arena_bytes_per_device=0)
    return bool(places(state.view.vacant(), shape, mode=LoadMode.PACK, limit=1, affinity=False, avoid=closed))


def _failed(gang: Gang) -> list[Piece]:
    return [
        piece
        for piece in gang.pieces
        if piece.outcome.kind is OutcomeKind.LAUNCH_FAILED and not piece.outcome.exit_code
    ]
