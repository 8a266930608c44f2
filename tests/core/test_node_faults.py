"""Faults of nodes: the node leaves service with a reason, and no job pays for it."""

from __future__ import annotations

import pytest
from core.drive import Drive, job_of
from ganger.job_state import JobState
from ganger_master.core.commands import CordonNode, DrainNode, UncordonNode
from ganger_master.core.gang_model import ObservedPhase, Outcome, OutcomeKind
from ganger_master.core.node_model import NodeState
from msgspec.structs import replace

FAULT = "prolog exited with code 3: no scratch disk"


def ends(drive: Drive, number: int, kind: OutcomeKind, fault: str) -> str:
    """The job's gang ends, and its node's hook has failed. Returns the node."""
    gang = drive.state.gangs[drive.job(number).epoch]
    outcome = Outcome(kind, message=fault, node_fault=fault)
    drive.observe(gang.nodes[0], replace(drive.report(gang, ObservedPhase.ENDED), outcome=outcome))
    return gang.nodes[0]


def test_a_node_whose_prolog_fails_is_cordoned_with_the_reason_and_the_job_goes_elsewhere() -> None:
    drive = Drive(nodes=2)
    number = drive.submit(job_of(4))
    drive.start(number)
    node = ends(drive, number, OutcomeKind.LAUNCH_FAILED, FAULT)
    assert drive.state.nodes[node].state is NodeState.CORDONED
    assert drive.state.nodes[node].state_reason == f"{FAULT} (jobs/1)"
    assert [row.kind for row in drive.told if row.subject == f"nodes/{node}"][-1] == "node_cordoned"
    job = drive.job(number)
    assert (job.state, job.failures, job.launch_failures, job.launch_failed_on) == (JobState.PENDING, 0, 0, ())
    assert [claim.node for (claim,) in drive.places(number)] == [{"n1": "n2", "n2": "n1"}[node]]


def test_a_prolog_that_fails_on_every_node_fails_no_job() -> None:
    drive = Drive(nodes=8)
    number = drive.submit(job_of(4))
    for _ in range(8):
        drive.start(number)
        ends(drive, number, OutcomeKind.LAUNCH_FAILED, FAULT)
        for node in drive.state.nodes:
            drive.observe(node)
    assert drive.job(number).state is JobState.PENDING
    assert not any(node.takes_gangs for node in drive.state.nodes.values())


def test_an_epilog_that_fails_cordons_the_node_and_the_job_has_succeeded() -> None:
    drive = Drive()
    number = drive.submit(job_of(4))
    drive.start(number)
    drive.runs(number)
    ends(drive, number, OutcomeKind.DONE, "epilog exited with code 1")
    assert drive.job(number).state is JobState.SUCCEEDED
    assert drive.state.nodes["n1"].state is NodeState.CORDONED


def test_an_operator_returns_the_node() -> None:
    drive = Drive()
    number = drive.submit(job_of(4))
    drive.start(number)
    ends(drive, number, OutcomeKind.LAUNCH_FAILED, FAULT)
    drive.observe("n1")
    drive.step(UncordonNode("n1"))
    assert drive.state.nodes["n1"].takes_gangs


@pytest.mark.parametrize("mark", [CordonNode, DrainNode])
def test_an_operators_own_reason_stands(mark: type[CordonNode] | type[DrainNode]) -> None:
    drive = Drive()
    number = drive.submit(job_of(4))
    drive.start(number)
    drive.step(mark("n1", "new disks"))
    ends(drive, number, OutcomeKind.LAUNCH_FAILED, FAULT)
    assert drive.state.nodes["n1"].state_reason == "new disks"
