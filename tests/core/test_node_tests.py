"""A node is tested before it takes jobs again: by a job of the system's own, on the GPUs that are free there."""

from __future__ import annotations

import pytest
from core.drive import Drive, job_of
from core.test_node_faults import CHECK, reports
from ganger.job_state import JobState
from ganger.node_test import TEST_USER, WRONG_MEMORY
from ganger_master.core.commands import CancelJob, CordonNode, DeclareLost, DrainNode, UncordonNode
from ganger_master.core.explain import explain
from ganger_master.core.gang_model import ObservedPhase, Outcome, OutcomeKind
from ganger_master.core.job_model import Failure, JobRecord
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.node_faults import service_reason
from ganger_master.core.node_model import Node, NodeState, NodeTest
from ganger_master.core.node_tests import NodeTestStep, failure_text, next_step
from ganger_master.core.settings import CoreSettings
from ganger_master.core.tenancy import Partition
from msgspec.structs import replace

TESTS = CoreSettings(test_nodes=True)
XID = {2: "XID 79: fell off the bus"}
NODE = Node("n1", "machine", "v4", heard=True, test=NodeTest("XID 79"))
JOB = JobRecord(7, "uid", TEST_USER, JobSpec(("test",), ()), 1.0)
STARTED = replace(NODE, test=NodeTest("XID 79", job=7))


@pytest.mark.parametrize(
    ("node", "job", "step"),
    [
        (replace(NODE, test=None), None, NodeTestStep.WAIT),
        (NODE, None, NodeTestStep.START),
        (replace(NODE, reserved_for=("ann",), reservation="course"), None, NodeTestStep.START),
        *[
            (replace(NODE, **{name: value}), None, NodeTestStep.WAIT)
            for name, value in [
                *[(name, True) for name in ("lost", "silent", "cordoned", "draining")],
                *[("heard", False), ("unanswerable", "no"), ("faults", CHECK), ("reservation", "disks")],
            ]
        ],
        (replace(NODE, test=NodeTest("XID 79", job=7, failure="wrong")), JOB, NodeTestStep.WAIT),
        (STARTED, None, NodeTestStep.REPEAT),
        (STARTED, JOB, NodeTestStep.REPEAT),
        (STARTED, replace(JOB, launch_failures=1), NodeTestStep.FAIL),
        (STARTED, replace(JOB, ending=JobState.PENDING), NodeTestStep.WAIT),
        (STARTED, replace(JOB, state=JobState.HOLDING), NodeTestStep.WAIT),
        (STARTED, replace(JOB, state=JobState.SUCCEEDED), NodeTestStep.PASS),
        (STARTED, replace(JOB, state=JobState.FAILED), NodeTestStep.FAIL),
        (STARTED, replace(JOB, state=JobState.CANCELLED), NodeTestStep.FAIL),
    ],
)
def test_what_is_done_next_for_a_test(node: Node, job: JobRecord | None, step: NodeTestStep) -> None:
    assert next_step(node, job) is step


def test_the_reason_of_a_failed_test_is_what_its_program_found() -> None:
    failed = replace(JOB, state=JobState.FAILED, reason="exit code 42", failure=Failure("EXIT", "", WRONG_MEMORY))
    assert failure_text(failed).startswith("memory did not keep what was written to it (`ganger logs 7`")
    assert failure_text(replace(failed, failure=Failure("TIME_LIMIT"), reason="time limit")) == "time limit"


def returned(settings: CoreSettings = TESTS) -> Drive:
    """A node whose fault has gone."""
    drive = Drive(settings=settings)
    reports(drive, "n1", {}, XID)
    reports(drive, "n1", {})
    return drive


def probe(drive: Drive) -> JobRecord:
    test = drive.state.nodes["n1"].test
    assert test is not None
    return drive.job(test.job)


def ends(drive: Drive, outcome: Outcome) -> None:
    gang = drive.state.gangs[probe(drive).epoch]
    drive.observe("n1", replace(drive.report(gang, ObservedPhase.ENDED), outcome=outcome))


def kinds(drive: Drive) -> list[str]:
    return [row.kind for row in drive.history if row.subject == "nodes/n1" and "test" in row.kind]


def test_a_node_whose_fault_has_gone_takes_jobs_once_its_test_has_passed() -> None:
    drive = returned()
    job, node = probe(drive), drive.state.nodes["n1"]
    assert (job.user, job.state, job.gpus) == (TEST_USER, JobState.HOLDING, 4)
    assert job.spec.command == ("python3", "-m", "ganger.node_test", "4")
    assert node.state is NodeState.CORDONED
    assert service_reason(node) == f"tested by {job.name} (device 2: {XID[2]}: this has gone)"
    number = drive.submit(job_of(1))
    assert drive.places(number) == ()
    assert f"tested by {job.name}" in explain(drive.state, number, drive.now).blockers[0].message
    ends(drive, Outcome(OutcomeKind.DONE))
    assert drive.state.nodes["n1"].state is NodeState.READY
    assert kinds(drive) == ["node_test_started", "node_test_passed"]
    drive.observe("n1")
    drive.start(number)


def test_a_node_that_fails_its_test_stays_closed_with_the_reason_until_an_operator_returns_it() -> None:
    drive = returned()
    ends(drive, Outcome(OutcomeKind.FAILED, exit_code=WRONG_MEMORY, message="exit code 42"))
    node = drive.state.nodes["n1"]
    assert not node.takes_gangs
    assert service_reason(node).startswith("its test failed (jobs/1): memory did not keep")
    reports(drive, "n1", CHECK)
    reports(drive, "n1", {})
    assert not drive.state.nodes["n1"].takes_gangs, "another fault that goes tests it not anew"
    assert len(drive.state.jobs) == 1
    drive.step(UncordonNode("n1"))
    assert drive.state.nodes["n1"].takes_gangs


def test_without_the_setting_a_node_returns_at_once() -> None:
    assert returned(CoreSettings()).state.nodes["n1"].takes_gangs


def test_an_operator_orders_a_test_of_a_node_that_was_drained() -> None:
    drive = Drive()
    drive.step(DrainNode("n1", "new GPU"))
    drive.step(UncordonNode("n1", tested=True))
    assert service_reason(drive.state.nodes["n1"]) == "tested by jobs/1 (an operator ordered it)"
    drive.step(UncordonNode("n1", tested=True))
    assert len(drive.state.jobs) == 1, "the same order again changes nothing"
    ends(drive, Outcome(OutcomeKind.DONE))
    assert drive.state.nodes["n1"].takes_gangs


def test_an_operator_that_returns_the_node_ends_its_test() -> None:
    drive = returned()
    job = probe(drive)
    drive.step(UncordonNode("n1"))
    assert drive.state.nodes["n1"].takes_gangs
    assert drive.job(job.number).ending is JobState.CANCELLED


def test_a_test_takes_the_free_gpus_and_waits_for_the_one_that_was_at_fault() -> None:
    drive = Drive(settings=TESTS)
    number = drive.submit(job_of(2))
    drive.start(number)
    drive.runs(number)
    (claim,) = drive.state.gangs[drive.job(number).epoch].claims
    held = claim.device_mask.bit_length() - 1
    reports(drive, "n1", {}, {held: "XID 64"}, ObservedPhase.STARTING)
    reports(drive, "n1", {}, {}, ObservedPhase.STARTING)
    test = drive.state.nodes["n1"].test
    assert test is not None
    assert not test.job
    drive.step(CancelJob(number))
    drive.observe("n1")
    assert probe(drive).gpus == 4


def test_a_test_on_a_node_with_a_job_takes_what_is_free_and_the_job_stays() -> None:
    drive = Drive(settings=TESTS)
    number = drive.submit(job_of(3))
    drive.start(number)
    drive.runs(number)
    drive.step(UncordonNode("n1", tested=True))
    assert probe(drive).gpus == 1
    assert drive.job(number).state is JobState.HOLDING


def test_a_lost_node_is_tested_anew_when_it_returns_and_no_test_runs_elsewhere() -> None:
    drive = returned()
    first = probe(drive).number
    drive.join("n2")
    drive.now += 60.0
    drive.step(DeclareLost("n1"))
    assert drive.job(first).state is JobState.CANCELLED
    drive.join("n1")
    drive.observe("n1")
    assert probe(drive).number != first
    assert not any(gang.nodes == ("n2",) for gang in drive.state.gangs.values())


def test_a_cordoned_node_is_not_tested_before_an_operator_returns_it() -> None:
    drive = Drive(settings=TESTS)
    reports(drive, "n1", CHECK)
    drive.step(CordonNode("n1", "new disks"))
    reports(drive, "n1", {})
    assert not drive.state.jobs
    drive.step(UncordonNode("n1", tested=True))
    assert probe(drive).state is JobState.HOLDING


def test_a_test_counts_for_no_limit_no_use_and_no_partition() -> None:
    partitions = {"gpu": Partition(gpus=1, default=True)}
    settings = CoreSettings(test_nodes=True, quota_devices={"": 1}, partitions=partitions)
    drive = returned(settings)
    job = probe(drive)
    drive.observe("n1", drive.report(drive.state.gangs[job.epoch], ObservedPhase.RUNNING))
    assert not drive.state.owners(job)
    assert not drive.state.usage
    assert job.partition.name == ""
