"""Tests of nodes that return to service: a job of the system's own that needs all free GPUs of the node.

A node is to be tested once a fault of it has gone (`note_faults`), where the settings have it, or when an operator
orders it. Until it has passed, it takes no gangs. Its test is a job like any other, and starts as soon as the node is
otherwise in service and has devices free, among them those that were at fault. Jobs that are still there stay.
"""

from __future__ import annotations

import shlex
from enum import Enum, auto
from typing import Final
from uuid import NAMESPACE_OID, uuid5

from ganger.cluster.claims import make_claim
from ganger.cluster.resources import Claim, Role, TaskShape
from ganger.cluster.view import LoadMode
from ganger.job_state import JobState
from ganger.node_test import FAILURES, TEST_USER
from msgspec.structs import replace

from ganger_master.core import attempts, ending
from ganger_master.core.approval import level_of
from ganger_master.core.events import GangApproved
from ganger_master.core.job_model import JobRecord
from ganger_master.core.job_spec import Agent, JobSpec
from ganger_master.core.node_model import Node, NodeTest
from ganger_master.core.state import State

_CAUSE: Final = "health"
_LIMIT_S: Final = 900.0
_MEMORY_BYTES: Final = 8 << 30
_MILLICORES: Final = 1_000
_LOWEST: Final = -1_000


class NodeTestStep(Enum):
    """WAIT: nothing is to be done. START: start the test. PASS, FAIL: it has ended so. REPEAT: its attempt has ended
    and shows nothing about the node, so that the test has to start anew."""

    WAIT = auto()
    START = auto()
    PASS = auto()
    FAIL = auto()
    REPEAT = auto()


def next_step(node: Node, job: JobRecord | None) -> NodeTestStep:
    """Return what is to be done for the test of a node. `job`: that of the test; None before it, or once forgotten."""
    test = node.test
    if test is None or test.failure:
        return NodeTestStep.WAIT
    if not test.job:
        is_reached = node.heard and not (node.lost or node.silent or node.unanswerable)
        return NodeTestStep.START if is_reached and not (node.cordoned or node.is_emptied) else NodeTestStep.WAIT
    if job is None:
        return NodeTestStep.REPEAT
    if job.state is JobState.SUCCEEDED:
        return NodeTestStep.PASS
    if job.state.is_finished:
        return NodeTestStep.FAIL
    if job.state is JobState.PENDING and job.ending is None:
        return NodeTestStep.FAIL if job.launch_failures else NodeTestStep.REPEAT
    return NodeTestStep.WAIT


def failure_text(job: JobRecord) -> str:
    """Return what the test has found, as its job ended."""
    if job.failure is not None and job.failure.exit_code in FAILURES:
        return f"{FAILURES[job.failure.exit_code]} (`ganger logs {job.number}` has the details)"
    return job.reason or job.state.value.lower()


def follow(state: State, now: float) -> None:
    """Start the tests that can start, and draw the consequences of those that have ended."""
    for name in list(state.nodes.tested):
        node = state.nodes[name]
        test = node.test
        assert test is not None
        job = state.jobs.get(test.job)
        match next_step(node, job):
            case NodeTestStep.START:
                _start(state, node, test, now)
            case NodeTestStep.PASS:
                state.put_node(replace(node, test=None))
                _note(state, name, test, "node_test_passed", now, test.reason)
            case NodeTestStep.FAIL if job is not None:
                failed = replace(test, failure=failure_text(job))
                state.put_node(replace(node, test=failed))
                _note(state, name, failed, "node_test_failed", now, failed.failure)
                _end(state, job, now, f"the test has failed: {failed.failure}")
            case NodeTestStep.REPEAT:
                state.put_node(replace(node, test=replace(test, job=0)))
                if job is not None:
                    _end(state, job, now, f"its attempt ended ({job.reason}), and the test begins anew")


def withdraw(state: State, node: Node, now: float) -> None:
    """End the test of a node that an operator has returned without one, or is to be tested anew."""
    job = state.jobs.get(node.test.job) if node.test is not None else None
    if job is not None:
        _end(state, job, now, "an operator has withdrawn the test")


def _start(state: State, node: Node, test: NodeTest, now: float) -> None:
    number = state.counters.next_job
    found = _place(state, node.name, test)
    if found is None:
        return
    spec, claim = found
    uid = str(uuid5(NAMESPACE_OID, f"{state.counters.store}:{state.counters.storage_token}:{number}:{now}"))
    state.counters.next_job += 1
    job = JobRecord(number, uid, TEST_USER, spec, now, pending_since=now)
    state.put_job(job)
    state.history(now, job, "job_submitted", _CAUSE, gpus=spec.gpus, tasks=1)
    started = replace(test, job=number)
    state.put_node(replace(node, test=started))
    _note(state, node.name, started, "node_test_started", now, test.reason)
    attempts.start(state, GangApproved(now, _CAUSE, number, (claim,), level_of(state, (claim,))))


def _place(state: State, name: str, test: NodeTest) -> tuple[JobSpec, Claim] | None:
    """Return the job that tests a node, and its claim of all free devices; None while it cannot have them."""
    view, slot = state.view, state.view.slots.get(name)
    if slot is None:
        return None
    topology, free = view.topologies[slot], view.free[slot]
    if (topology.devices and not free) or test.devices & topology.all_mask & ~free:
        return None
    gpus = free.bit_count()
    shape = TaskShape(gpus, _MILLICORES, min(_MEMORY_BYTES, int(view.memory[slot])))
    spec = JobSpec(
        command=(*shlex.split(state.settings.test_command), str(gpus)),
        roles=(Role("test", 1, shape),),
        display_name=f"test-{name}"[:63],
        priority=_LOWEST,
        time_limit_s=_LIMIT_S,
        agent=Agent.NONE,
    )
    claim = make_claim(view, slot, spec.shape(), (1,), LoadMode.PACK)
    return None if claim is None else (spec, claim)


def _end(state: State, job: JobRecord, now: float, reason: str) -> None:
    if not job.state.is_finished:
        ending.end(state, job.number, JobState.CANCELLED, now, reason)


def _note(state: State, name: str, test: NodeTest, kind: str, now: float, text: str) -> None:
    state.history(now, f"nodes/{name}", kind, _CAUSE, text, job=f"jobs/{test.job}")
