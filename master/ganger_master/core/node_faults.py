"""Faults of a node and of its devices, as its daemon reports them: one list, each with its source and a reason. No gang
gets a device with a fault. A node with a fault of its own is emptied as a drained one, until its daemon reports that
the fault is gone. What an operator has marked stands beside it.

A node that could not launch a gang, by no fault of the command, is closed to that job until any gang has run there, its
daemon begins a new session or an operator uncordons it, so that one bad node does not use up all its attempts. A node
without which the job would find no place in the whole cluster stays open. Other jobs may use the node: one that can be
launched nowhere would close one node after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Final

from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.preferences import BEST_FIT
from ganger.cluster.search import PlacementRequest
from msgspec import Struct
from msgspec.structs import replace

from ganger_master.core.events import SlowNodeNoted
from ganger_master.core.gang_model import Gang, OutcomeKind
from ganger_master.core.job_model import JobRecord
from ganger_master.core.node_model import Node, NodeTest
from ganger_master.core.plan_changes import Goal, Purpose
from ganger_master.core.settings import SlowNodes
from ganger_master.core.state import State

_DEVICE = "device"


class NodeFault(Struct, frozen=True, gc=False):
    """A fault: what found it ("device", "health_check"), the reason as text, and the index of the device; None for a
    fault of the whole node."""

    source: str
    reason: str
    device: int | None = None

    @property
    def text(self) -> str:
        return self.reason if self.device is None else f"device {self.device}: {self.reason}"


def faults_of(node: Node) -> tuple[NodeFault, ...]:
    """Return all faults of a node, its own first."""
    own = [NodeFault(source, reason) for source, reason in node.faults.items()]
    return (*own, *(NodeFault(_DEVICE, reason, device) for device, reason in node.device_faults.items()))


_USERS_SHOWN: Final = 3


def service_reason(node: Node) -> str:
    """Return why a node is out of service, or is there for some users only, or slow: the operator's reason, its own
    faults, its test, and the reservation; empty for none of these."""
    more = ", ..." if len(node.reserved_for) > _USERS_SHOWN else ""
    users = f" for {', '.join(node.reserved_for[:_USERS_SHOWN])}{more}" if node.reserved_for else ""
    reserved = f"reserved{users}: {node.reservation}" if node.reservation else ""
    test = node.test.text if node.test is not None else ""
    return "; ".join(filter(None, (node.state_reason, *node.faults.values(), node.slow, test, reserved)))


def faults_under(node: Node, gang: Gang) -> list[int]:
    """Return the devices with a fault among those that a gang holds on a node."""
    piece = gang.piece(node.name)
    mask = piece.held.device_mask if piece is not None and piece.held is not None else 0
    return [device for device in node.device_faults if mask >> device & 1]


class LeaveReason(IntEnum):
    """Why a gang is to leave a node, the first one that holds: an operator drains it, it is at fault, a device of the
    gang there is at fault, or it is reserved."""

    DRAINED = 0
    UNHEALTHY = 1
    DEVICE_FAULT = 2
    RESERVED = 3


class LeaveCause(Struct, frozen=True, order=True, gc=False):
    """What a gang is to leave: a node, or its device `device`. `detail`: the operator's reason, the fault or the
    reservation's name."""

    reason: LeaveReason
    node: str
    detail: str
    device: int = 0

    @property
    def text(self) -> str:
        """ "its node n1 is drained (new fan)"."""
        device = f"device {self.device} of " if self.reason is LeaveReason.DEVICE_FAULT else ""
        return f"{device}its node {self.node} is {_LEFT[self.reason]}" + (f" ({self.detail})" if self.detail else "")


_LEFT: Final = {
    LeaveReason.DRAINED: "drained",
    LeaveReason.UNHEALTHY: "unhealthy",
    LeaveReason.DEVICE_FAULT: "out of service",
    LeaveReason.RESERVED: "reserved",
}


def leave_cause(node: Node, gang: Gang) -> LeaveCause | None:
    """Return why a gang is to leave a node; None if it may stay. A reservation's users may stay nevertheless."""
    if node.draining:
        return LeaveCause(LeaveReason.DRAINED, node.name, node.state_reason)
    if node.faults:
        return LeaveCause(LeaveReason.UNHEALTHY, node.name, "; ".join(node.faults.values()))
    if faults := faults_under(node, gang):
        return LeaveCause(LeaveReason.DEVICE_FAULT, node.name, node.device_faults[faults[0]], faults[0])
    return LeaveCause(LeaveReason.RESERVED, node.name, node.reservation) if node.reservation else None


def emptying_figures(state: State, gang: Gang, purpose: Purpose) -> dict[str, str]:
    """Return the figures of a change for the history; for one that empties a node with the cause: "its node n1 is
    drained (new fan)"."""
    known = [node for name in gang.nodes if (node := state.nodes.get(name)) is not None]
    causes = [cause for node in known if (cause := leave_cause(node, gang)) is not None]
    if purpose.goal is not Goal.DRAIN or not causes:
        return purpose.figures
    # A reservation comes last: the job may be one that could stay.
    return {**purpose.figures, "why": min(causes).text}


def cordon(state: State, name: str, reason: str, now: float, cause: str) -> None:
    """Cordon a node that is at fault, as its prolog, its epilog or several jobs have shown, until an operator returns
    it. A node that is cordoned already keeps its reason."""
    node = state.nodes[name]
    if not node.cordoned:
        state.put_node(replace(node, cordoned=True, state_reason=reason))
        state.history(now, f"nodes/{name}", "node_cordoned", cause, reason)


def note_faults(state: State, before: Node, node: Node, now: float, cause: str) -> None:
    """Record in the history which faults of a node have come and gone. Another text of the same fault is no news. Where
    the settings have it, a node is to be tested once a fault has gone."""
    old = {(fault.source, fault.device): fault for fault in faults_of(before)}
    new = {(fault.source, fault.device): fault for fault in faults_of(node)}
    for which, fault in new.items():
        if which not in old:
            state.history(now, f"nodes/{node.name}", "node_unhealthy", cause, fault.text, source=fault.source)
    for which, fault in old.items():
        if which not in new:
            state.history(now, f"nodes/{node.name}", "node_healthy", cause, fault.text, source=fault.source)
    gone = [fault for which, fault in old.items() if which not in new]
    if gone and state.settings.test_nodes and (node.test is None or not node.test.failure):
        test = node.test or NodeTest(f"{gone[0].text}: this has gone")
        mask = sum({1 << fault.device for fault in gone if fault.device is not None})
        state.put_node(replace(node, test=replace(test, devices=test.devices | mask)))


def note_slow(state: State, event: SlowNodeNoted) -> None:
    """Record that a node is slow, or no longer. Where the settings have it, a slow one is drained until an operator
    returns it."""
    node, subject = state.nodes[event.node], f"nodes/{event.node}"
    drains = bool(event.reason) and state.settings.slow_nodes is SlowNodes.DRAIN and not node.draining
    if drains:
        node = replace(node, draining=True, cordoned=True, state_reason=node.state_reason or "drained for its slowness")
    state.put_node(replace(node, slow=event.reason))
    state.history(event.time, subject, "node_slow" if event.reason else "node_slow_ended", event.cause, event.reason)
    if drains:
        state.history(event.time, subject, "node_draining", event.cause, event.reason)


# -- failed launches ---------------------------------------------------------------------------------------------------

# Nodes of a job that are remembered; a gang may be as wide as the cluster.
_MOST_NODES: Final = 64


def note_failed_launch(state: State, job: JobRecord, gang: Gang) -> JobRecord:
    """Record a failed launch at the nodes that could not launch their part, and those nodes at the job."""
    failed = [
        piece
        for piece in gang.pieces
        if piece.outcome.kind is OutcomeKind.LAUNCH_FAILED and not (piece.outcome.exit_code or piece.outcome.node_fault)
    ]
    if not failed:
        return job
    for piece in failed:
        node = state.nodes.get(piece.claim.node)
        if node is not None:
            failure = f"{job.name}: {piece.outcome.message}"
            state.put_node(replace(node, launch_failures=node.launch_failures + 1, launch_failure=failure))
    nodes = dict.fromkeys([*job.launch_failed_on, *(piece.claim.node for piece in failed)])
    return replace(job, launch_failed_on=tuple(nodes)[-_MOST_NODES:])


def note_launched(state: State, gang: Gang) -> None:
    """Record that the nodes of a gang can launch: it stepped, or its command ended by itself."""
    for name in gang.nodes:
        node = state.nodes.get(name)
        if node is not None and node.launch_failures:
            state.put_node(replace(node, launch_failures=0, launch_failure="", started_elsewhere=()))


# Jobs that show that a node is at fault.
_SHOW_A_FAULT: Final = 2


def note_started_elsewhere(state: State, job: JobRecord, gang: Gang, now: float, cause: str) -> None:
    """Record at the nodes that could not launch a job that it has started on others; cordon a node that two jobs have
    shown to be at fault. A job that starts nowhere shows nothing of a node."""
    for name in failed_on(state, job):
        node = state.nodes[name]
        if name in gang.nodes or job.number in node.started_elsewhere:
            continue
        jobs = (*node.started_elsewhere, job.number)[-_SHOW_A_FAULT:]
        state.put_node(replace(node, started_elsewhere=jobs))
        if len(jobs) == _SHOW_A_FAULT:
            names = " and ".join(f"jobs/{number}" for number in jobs)
            cordon(state, name, f"{names} could not be launched here, and started on other nodes", now, cause)


def visible_to(jobs: Mapping[int, JobRecord], failure: str, user: str) -> str:
    """Return the part of a launch failure ("jobs/7: ...") that a user may read: of another user's job only the name,
    for the rest names that user's files."""
    name, _, _ = failure.partition(":")
    number = name.removeprefix("jobs/")
    job = jobs.get(int(number)) if number.isdecimal() else None
    is_own = job is not None and job.user == user
    return failure if is_own or not failure else f"{name}: its user and operators see why"


def failed_on(state: State, job: JobRecord) -> list[str]:
    """Return the nodes on which the job could not be launched, and no other job has been since."""
    return [name for name in job.launch_failed_on if (node := state.nodes.get(name)) and node.launch_failures]


def could_go_elsewhere(state: State, job: JobRecord, closed: Sequence[str]) -> bool:
    """Return whether the available nodes, without the closed ones, could hold the job if they were empty."""
    shape = job.shape
    shape = replace(shape, locality=replace(shape.locality, wish=None), arena_bytes_per_device=0)
    return bool(BEST_FIT.place(CapacityIndex.of(state.view.vacant()), PlacementRequest(shape, avoid=frozenset(closed))))
