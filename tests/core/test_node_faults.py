"""Faults of nodes: the node leaves service with a reason, and no job pays for it."""

from __future__ import annotations

import pytest
from core.drive import Drive, job_of
from ganger.job_state import JobState
from ganger_master.core.commands import CordonNode, DrainNode, Observe, ProposePlan, ReserveNodes, UncordonNode
from ganger_master.core.explain import explain
from ganger_master.core.gang_model import ObservedPhase, Outcome, OutcomeKind
from ganger_master.core.node_faults import faults_of, leave_cause, service_reason
from ganger_master.core.node_model import NodeState, Reservation
from ganger_master.core.plan_changes import StartChange
from ganger_master.core.settings import CoreSettings
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
    assert [row.kind for row in drive.history if row.subject == f"nodes/{node}"][-1] == "node_cordoned"
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


CHECK = {"health_check": "health check exited with code 1: no InfiniBand"}


def reports(
    drive: Drive,
    node: str,
    faults: dict[str, str],
    devices: dict[int, str] | None = None,
    phase: ObservedPhase = ObservedPhase.RUNNING,
) -> None:
    """The node reports these faults of its own and of its devices, and its gangs in a phase."""
    drive.observations += 1
    gangs = tuple(
        drive.report(drive.state.gangs[epoch], phase) for epoch in sorted(drive.state.gangs.places_on.get(node, ()))
    )
    version = drive.state.desired.of(node).version
    report = Observe(node, drive.sessions[node], drive.observations, version, gangs, storage_proved=True)
    drive.step(replace(report, node_faults=faults, device_faults=devices or {}))


def kinds(drive: Drive, node: str) -> list[tuple[str, str]]:
    return [
        (row.kind, row.message)
        for row in drive.history
        if row.subject == f"nodes/{node}" and row.kind in ("node_unhealthy", "node_healthy")
    ]


def test_a_node_with_a_fault_of_its_own_is_emptied_and_returns_when_its_daemon_reports_none() -> None:
    drive = Drive(nodes=2)
    number = drive.submit(job_of(4))
    drive.start(number)
    drive.runs(number)
    node = drive.state.gangs[drive.job(number).epoch].nodes[0]
    reports(drive, node, CHECK)
    assert drive.state.nodes[node].state is NodeState.DRAINING
    assert drive.job(number).next_epoch, "the job moves off"
    reports(drive, node, {})
    assert drive.state.nodes[node].state is NodeState.READY
    assert kinds(drive, node) == [("node_unhealthy", CHECK["health_check"]), ("node_healthy", CHECK["health_check"])]


@pytest.mark.parametrize("mark", [CordonNode, DrainNode])
def test_a_node_that_an_operator_has_marked_too_stays_out_of_service(mark: type[CordonNode] | type[DrainNode]) -> None:
    drive = Drive()
    reports(drive, "n1", CHECK)
    drive.step(mark("n1", "new disks"))
    assert service_reason(drive.state.nodes["n1"]) == f"new disks; {CHECK['health_check']}"
    reports(drive, "n1", {})
    assert not drive.state.nodes["n1"].takes_gangs
    assert drive.state.nodes["n1"].state_reason == "new disks"


def test_an_operator_does_not_return_a_node_that_fails_its_check() -> None:
    drive = Drive()
    reports(drive, "n1", CHECK)
    drive.step(UncordonNode("n1"))
    assert drive.state.nodes["n1"].state is NodeState.DRAINING


def test_faults_of_devices_and_of_the_node_are_one_list_and_another_text_is_no_news() -> None:
    drive = Drive()
    reports(drive, "n1", CHECK, {2: "XID 79: fell off the bus"})
    reports(drive, "n1", {"health_check": "no disk"}, {2: "XID 79: fell off the bus"})
    assert [(fault.source, fault.text) for fault in faults_of(drive.state.nodes["n1"])] == [
        ("health_check", "no disk"),
        ("device", "device 2: XID 79: fell off the bus"),
    ]
    reports(drive, "n1", {}, {})
    assert kinds(drive, "n1") == [
        ("node_unhealthy", CHECK["health_check"]),
        ("node_unhealthy", "device 2: XID 79: fell off the bus"),
        ("node_healthy", "no disk"),
        ("node_healthy", "device 2: XID 79: fell off the bus"),
    ]


def test_a_job_moves_off_a_device_with_a_fault_and_the_others_of_the_node_stay() -> None:
    drive = Drive()
    numbers = [drive.submit(job_of(1)) for _ in range(2)]
    for number in numbers:
        drive.start(number)
        drive.runs(number)
    (faulty,) = [claim.device_mask.bit_length() - 1 for claim in drive.state.gangs[drive.job(1).epoch].claims]
    reports(drive, "n1", {}, {faulty: "XID 64: row remapping failed"})
    moved, stays = [drive.job(number) for number in numbers]
    assert moved.next_epoch
    (claim,) = drive.state.gangs[moved.next_epoch].claims
    assert not claim.device_mask >> faulty & 1
    assert not stays.next_epoch


@pytest.mark.parametrize(
    ("cause", "why"),
    [
        ("drain", "its node n1 is drained (new disks)"),
        ("reservation", "its node n1 is reserved (upgrade)"),
        ("check", f"its node n1 is unhealthy ({CHECK['health_check']})"),
        ("device", "device 0 of its node n1 is out of service (XID 64)"),
    ],
)
@pytest.mark.parametrize("nodes", [2, 1], ids=["moved", "suspended"])
def test_the_history_names_why_a_job_leaves_its_node(nodes: int, cause: str, why: str) -> None:
    drive = Drive(1, CoreSettings(policy="las"))
    number = drive.submit(job_of(4))
    drive.step(ProposePlan((StartChange(number, drive.job(number).revision, drive.places(number)[0]),)))
    drive.runs(number)
    for name in ["n2"][: nodes - 1]:
        drive.join(name)
    match cause:
        case "drain":
            drive.step(DrainNode("n1", "new disks"))
        case "reservation":
            drive.step(ReserveNodes(Reservation("upgrade", ("n1",), drive.now, drive.now + 60.0), "olga"))
        case "check":
            reports(drive, "n1", CHECK)
        case _:
            reports(drive, "n1", {}, {0: "XID 64"})
    told = [
        (row.kind, row.figures.get("why")) for row in drive.history if row.kind in ("move_begun", "suspend_ordered")
    ]
    assert told == [("move_begun" if nodes == 2 else "suspend_ordered", why)]


def test_why_names_the_device_that_a_job_cannot_leave() -> None:
    drive = Drive()
    number = drive.submit(job_of(1))
    drive.start(number)
    reports(drive, "n1", {}, dict.fromkeys(range(4), "XID 64: row remapping failed"), ObservedPhase.STARTING)
    (blocker,) = explain(drive.state, number, drive.now).blockers
    cause = "device 0 of its node n1 is out of service (XID 64: row remapping failed)"
    assert blocker.message == f"{cause}: it goes once it steps"


def test_why_of_a_job_on_an_unhealthy_or_a_reserved_node_says_which_and_not_that_it_is_drained() -> None:
    drive = Drive()
    number = drive.submit(job_of(1))
    drive.start(number)
    node, gang = drive.state.nodes["n1"], drive.state.gangs[drive.job(number).epoch]
    causes = [
        leave_cause(replace(node, faults=CHECK), gang),
        leave_cause(replace(node, reservation="upgrade"), gang),
        leave_cause(replace(node, draining=True, state_reason="new fan", faults=CHECK), gang),
        leave_cause(node, gang),
    ]
    assert [cause and cause.text for cause in causes] == [
        f"its node n1 is unhealthy ({CHECK['health_check']})",
        "its node n1 is reserved (upgrade)",
        "its node n1 is drained (new fan)",
        None,
    ]


def fails_to_launch(drive: Drive, number: int, node: str) -> None:
    """The job gets the node, and cannot be launched there."""
    (place,) = [claims for claims in drive.places(number) if claims[0].node == node]
    drive.request(number, place)
    gang = drive.state.gangs[drive.job(number).epoch]
    outcome = Outcome(OutcomeKind.LAUNCH_FAILED, message="No space left on device")
    drive.observe(node, replace(drive.report(gang, ObservedPhase.ENDED), outcome=outcome))
    drive.observe(node)


def starts_on(drive: Drive, number: int, node: str) -> None:
    (place,) = [claims for claims in drive.places(number) if claims[0].node == node]
    drive.request(number, place)
    drive.runs(number)


def test_two_jobs_that_start_elsewhere_show_that_a_node_is_at_fault() -> None:
    drive = Drive(nodes=2)
    first, second = drive.submit(job_of(1)), drive.submit(job_of(1))
    fails_to_launch(drive, first, "n1")
    starts_on(drive, first, "n2")
    assert drive.state.nodes["n1"].takes_gangs, "one job alone may be to blame"
    fails_to_launch(drive, second, "n1")
    starts_on(drive, second, "n2")
    node = drive.state.nodes["n1"]
    assert node.state is NodeState.CORDONED
    assert node.state_reason == "jobs/1 and jobs/2 could not be launched here, and started on other nodes"
    drive.step(UncordonNode("n1"))
    assert drive.state.nodes["n1"].started_elsewhere == ()


def test_jobs_that_start_nowhere_show_nothing_of_a_node() -> None:
    drive = Drive(nodes=2)
    for number in [drive.submit(job_of(1)) for _ in range(3)]:
        fails_to_launch(drive, number, "n1")
        fails_to_launch(drive, number, "n2")
    assert all(node.takes_gangs for node in drive.state.nodes.values())


def test_a_start_between_them_clears_the_node() -> None:
    drive = Drive(nodes=2)
    first, second, third = [drive.submit(job_of(1)) for _ in range(3)]
    fails_to_launch(drive, first, "n1")
    starts_on(drive, first, "n2")
    starts_on(drive, second, "n1")
    fails_to_launch(drive, third, "n1")
    starts_on(drive, third, "n2")
    assert drive.state.nodes["n1"].takes_gangs


def test_a_device_that_is_slowed_down_takes_jobs_and_is_shown_until_it_is_not() -> None:
    drive = Drive()
    for warnings in ({2: "too hot"}, {}):
        drive.observations += 1
        drive.step(Observe("n1", drive.sessions["n1"], drive.observations, 0, device_warnings=warnings))
        assert drive.state.nodes["n1"].device_warnings == warnings
        assert drive.state.nodes["n1"].takes_gangs
        assert drive.state.view.row("n1").free_mask == 0b1111
