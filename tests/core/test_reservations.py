"""Reservations: what a node is reserved for, which jobs may start before, and how nodes are emptied and return."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeAlias

import pytest
from core.drive import GIB, Drive, job_of
from faultsim.fault_cluster import FaultCluster
from faultsim.test_stories import SERVER, gang, phase, started
from ganger.cluster.refusals import Reason
from ganger.cluster.resources import Claim
from ganger.protocol.gang_orders import Mechanism
from ganger_master.core.answers import Done, Refused, Rejected
from ganger_master.core.approval import find_place, has_place
from ganger_master.core.commands import (
    CancelJob,
    CordonNode,
    DeleteReservation,
    KeepPlace,
    ProposePlan,
    ReserveNodes,
    Tick,
    UncordonNode,
    UpdateJob,
    UpdateReservation,
)
from ganger_master.core.explain import explain, reported_blockers
from ganger_master.core.gang_model import GangPhase, ObservedPhase
from ganger_master.core.job_model import Capabilities, JobRecord, SuspendLevel
from ganger_master.core.job_spec import Agent, JobSpec, Update
from ganger_master.core.kept_places import kept_places_of
from ganger_master.core.machine import next_wake
from ganger_master.core.node_closures import can_leave
from ganger_master.core.node_faults import service_reason
from ganger_master.core.node_model import ListChange, NodeState, Reservation
from ganger_master.core.plan_changes import Goal, Purpose, SuspendChange
from ganger_master.core.reservations import ReservationPhase, hold_of, phase_of
from ganger_master.core.settings import CoreSettings
from ganger_master.core.state_image import restored
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

Hold: TypeAlias = tuple[str, tuple[str, ...]]
UPGRADE = Reservation("upgrade", ("n1",), 1_000.0, 2_000.0, lead_s=100.0)
COURSE = replace(UPGRADE, name="course", users=("ann", "bob"))
OPAQUE = Agent.NONE
NEVER_SILENT = CoreSettings(lost_after_s=None, silent_margin_s=None)


def at(drive: Drive, now: float) -> None:
    drive.now = now
    drive.step(Tick())


def reserved(reservation: Reservation, nodes: int = 2) -> Drive:
    drive = Drive(nodes, NEVER_SILENT)
    assert isinstance(drive.step(ReserveNodes(reservation, "olga")), Done)
    return drive


# -- times -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "expected", "maintenance", "course"),
    [
        (899.9, ReservationPhase.AHEAD, ("", ()), ("", ())),
        (900.0, ReservationPhase.EMPTYING, ("upgrade", ()), ("course", ())),
        (999.9, ReservationPhase.EMPTYING, ("upgrade", ()), ("course", ())),
        (1_000.0, ReservationPhase.ACTIVE, ("upgrade", ()), ("course", ("ann", "bob"))),
        (1_999.9, ReservationPhase.ACTIVE, ("upgrade", ()), ("course", ("ann", "bob"))),
        (2_000.0, ReservationPhase.OVER, ("", ()), ("", ())),
    ],
)
def test_a_node_is_emptied_before_a_reservation_and_kept_while_it_lasts(
    now: float,
    expected: ReservationPhase,
    maintenance: tuple[str, tuple[str, ...]],
    course: tuple[str, tuple[str, ...]],
) -> None:
    assert phase_of(UPGRADE, now) is expected
    assert hold_of([UPGRADE], "n1", now) == maintenance
    assert hold_of([COURSE], "n1", now) == course
    assert hold_of([UPGRADE], "n2", now) == ("", ())


@pytest.mark.parametrize(
    ("changes", "reason", "told"),
    [
        ({"name": ""}, "RESERVATION_INVALID", "name: letters"),
        ({"nodes": ()}, "RESERVATION_INVALID", "nodes: at least one"),
        ({"end": 1_000.0}, "RESERVATION_INVALID", "end_time: after the start"),
        ({"end": math.nan}, "RESERVATION_INVALID", "end_time: after the start"),
        ({"start": -1.0}, "RESERVATION_INVALID", "start_time: a time up to"),
        ({"start": 253_402_300_000.0, "end": 253_402_300_800.0}, "RESERVATION_INVALID", "end_time: a time up to"),
        ({"start": 0.1, "end": 0.2}, "RESERVATION_INVALID", "end_time: has passed"),
        ({"lead_s": -1.0}, "RESERVATION_INVALID", "lead: from 0"),
        ({"users": ("",)}, "RESERVATION_INVALID", "users: at most"),
        ({"name": "b", "nodes": ("n9",)}, "NODE_NOT_FOUND", "nodes/n9 is unknown"),
        ({"reason": "other"}, "RESERVATION_EXISTS", "there is a reservation 'upgrade' already"),
        ({"name": "b"}, "RESERVATION_CONFLICT", "nodes/n1 is reserved by 'upgrade' at that time"),
        ({"name": "b", "start": 2_050.0, "end": 2_100.0}, "RESERVATION_CONFLICT", "nodes/n1 is reserved"),
        ({"name": "b", "start": 2_100.0, "end": 2_200.0}, None, ""),
        ({"name": "b", "nodes": ("n2",)}, None, ""),
        ({}, None, ""),
    ],
)
def test_a_reservation_that_cannot_be_is_refused_with_the_reason(
    changes: dict[str, Any], reason: str | None, told: str
) -> None:
    answer = reserved(UPGRADE).step(ReserveNodes(replace(UPGRADE, **changes), "olga"))
    assert (answer.reason if isinstance(answer, Refused) else None) == reason
    assert not isinstance(answer, Refused) or told in answer.message


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"start": 3_000.0}, {"start": 3_000.0, "end": 4_000.0}),
        ({"duration_s": 500.0}, {"end": 1_500.0}),
        ({"start": 500.0, "duration_s": 100.0}, {"start": 500.0, "end": 600.0}),
        ({"nodes": ("n1", "n2")}, {"nodes": ("n1", "n2")}),
        ({"users": ("ann",), "reason": "", "lead_s": 0.0}, {"users": ("ann",), "reason": "", "lead_s": 0.0}),
        ({"nodes": ("n2", "n1"), "nodes_change": ListChange.ADD}, {"nodes": ("n1", "n2")}),
        ({"users": ("ann",), "users_change": ListChange.ADD}, {"users": ("ann",)}),
    ],
)
def test_an_update_changes_what_it_names(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    drive = reserved(replace(UPGRADE, reason="disks"))
    before = drive.state.reservations["upgrade"]
    assert isinstance(drive.step(UpdateReservation("upgrade", **changes, user="eve")), Done)
    assert drive.state.reservations == {"upgrade": replace(before, **expected)}
    assert drive.history[-1].kind == "reservation_updated"
    rows = len(drive.history)
    assert isinstance(drive.step(UpdateReservation("upgrade", **changes, user="eve")), Done)
    assert len(drive.history) == rows, "it is so already"


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("upgrade", {"duration_s": 0.0}, "RESERVATION_INVALID"),
        ("upgrade", {"start": 0.0, "duration_s": 0.5}, "RESERVATION_INVALID"),
        ("upgrade", {"nodes": ("n9",)}, "NODE_NOT_FOUND"),
        ("upgrade", {"nodes": ("n1", "n2")}, "RESERVATION_CONFLICT"),
        ("upgrade", {"duration_s": 1_500.0}, None),
        ("other", {"duration_s": 1.0}, "RESERVATION_NOT_FOUND"),
    ],
)
def test_an_update_that_cannot_be_is_refused_and_changes_nothing(
    name: str, changes: dict[str, Any], reason: str | None
) -> None:
    drive = reserved(UPGRADE)
    drive.step(ReserveNodes(replace(UPGRADE, name="beside", nodes=("n2",)), "olga"))
    before = dict(drive.state.reservations)
    answer = drive.step(UpdateReservation(name, **changes))
    assert getattr(answer, "reason", None) == reason
    assert (drive.state.reservations == before) is (reason is not None)


def test_an_update_adds_and_removes_users_and_leaves_none_only_for_maintenance() -> None:
    drive = reserved(COURSE)

    def users(*named: str, change: ListChange = ListChange.REPLACE) -> object:
        answer = drive.step(UpdateReservation("course", users=named, users_change=change))
        return getattr(answer, "message", drive.state.reservations["course"].users)

    assert users("cat", "ann", change=ListChange.ADD) == ("ann", "bob", "cat")
    assert users("ann", "zoe", change=ListChange.REMOVE) == ("bob", "cat")
    assert "would have none left" in str(users("bob", "cat", change=ListChange.REMOVE))
    assert users() == ()
    assert drive.history[-1].kind == "reservation_updated"
    assert users("ann", change=ListChange.REMOVE) == ()


def test_an_update_that_removes_every_node_is_refused() -> None:
    drive = reserved(UPGRADE)
    answer = drive.step(UpdateReservation("upgrade", nodes=("n1",), nodes_change=ListChange.REMOVE))
    assert isinstance(answer, Refused)
    assert "nodes: at least one" in answer.message


def test_an_update_of_one_that_lasts_frees_nodes_and_lets_users_in_at_once() -> None:
    drive = reserved(replace(COURSE, nodes=("n1", "n2")))
    at(drive, 1_500.0)
    number = drive.submit(job_of(1), "cat")
    assert isinstance(drive.request(number, *drive.places(number)), Rejected)
    drive.step(UpdateReservation("course", nodes=("n1",)))
    assert [drive.state.nodes[name].reserved_for for name in ("n1", "n2")] == [("ann", "bob"), ()]
    drive.step(UpdateReservation("course", users=("cat",)))
    assert drive.state.nodes["n1"].reserved_for == ("cat",)
    drive.start(number)
    drive.step(UpdateReservation("course", start=3_000.0))
    assert not drive.state.nodes.reserved
    at(drive, 2_950.0)
    assert list(drive.state.nodes.reserved) == ["n1"]
    at(drive, 4_000.0)
    assert not drive.state.reservations


def test_an_unknown_reservation_cannot_be_deleted() -> None:
    answer = reserved(UPGRADE).step(DeleteReservation("b", "olga"))
    assert isinstance(answer, Refused)
    assert (answer.reason, "there are upgrade" in answer.message) == ("RESERVATION_NOT_FOUND", True)


def test_the_core_wakes_for_each_phase_and_forgets_what_is_over() -> None:
    drive = reserved(UPGRADE)
    for expected in (900.0, 1_000.0, 2_000.0):
        wake = next_wake(drive.state, drive.now)
        assert wake is not None
        # Before that, a silent node is looked at.
        drive.state.nodes.next_silence_check = None
        assert next_wake(drive.state, drive.now) == expected
        at(drive, expected)
    assert not drive.state.reservations
    assert not drive.state.nodes.reserved


# -- nodes -------------------------------------------------------------------------------------------------------------


def test_in_maintenance_a_node_takes_no_job_and_then_it_is_as_before() -> None:
    drive = reserved(UPGRADE, 1)
    at(drive, 950.0)
    node = drive.state.nodes["n1"]
    assert (node.state, service_reason(node), node.takes_gangs) == (NodeState.DRAINING, "reserved: upgrade", False)
    number = drive.submit(job_of(1), "ann")
    (blocker,) = explain(drive.state, number, drive.now).blockers
    assert (blocker.reason, "reserved: upgrade" in blocker.message) == (Reason.NODE_UNAVAILABLE, True)
    at(drive, 1_500.0)
    assert not drive.state.nodes["n1"].takes_gangs
    at(drive, 2_000.0)
    assert drive.state.nodes["n1"].state is NodeState.READY
    drive.start(number)


def test_while_a_reservation_of_users_lasts_a_node_takes_their_jobs_only() -> None:
    drive = reserved(COURSE, 1)
    at(drive, 1_000.0)
    other = drive.submit(job_of(1), "cat")
    answer = drive.request(other, *drive.places(other))
    assert isinstance(answer, Rejected)
    assert answer.refusals[0].message.startswith("the node is reserved for other users (course)")
    assert service_reason(drive.state.nodes["n1"]) == "reserved for ann, bob: course"
    (blocker, *_) = explain(drive.state, other, drive.now).blockers
    assert blocker.message == "the node is reserved for other users (course) for another 16m 40s, on n1"
    drive.start(drive.submit(job_of(1), "ann"))


def test_a_drain_and_a_reservation_do_not_end_each_other() -> None:
    drive = reserved(UPGRADE, 1)
    at(drive, 1_000.0)
    drive.step(UncordonNode("n1", "olga"))
    assert not drive.state.nodes["n1"].takes_gangs
    drive.step(DeleteReservation("upgrade", "olga"))
    assert drive.state.nodes["n1"].takes_gangs


def test_a_node_that_joins_during_a_reservation_is_reserved_and_a_restart_keeps_all() -> None:
    drive = reserved(UPGRADE, 1)
    at(drive, 1_500.0)
    elements = [
        *drive.state.nodes.configuration_sets.values(),
        drive.state.counters,
        *drive.state.reservations.values(),
    ]
    state = restored(drive.state.settings, [*elements, *drive.state.nodes.values()], drive.now)
    assert (state.reservations, state.nodes["n1"].reservation) == (drive.state.reservations, "upgrade")
    assert not drive.state.take_changes().removes
    drive.join("n1")
    assert drive.state.nodes["n1"].reservation == "upgrade"


# -- jobs --------------------------------------------------------------------------------------------------------------


def opaque_job(time_s: float | None = None, **changes: Any) -> JobSpec:
    return replace(job_of(1), agent=OPAQUE, time_limit_s=time_s, **changes)


@pytest.mark.parametrize(
    ("spec", "user", "starts"),
    [
        # Its agent can stop it.
        (job_of(1), "cat", True),
        (opaque_job(), "cat", False),
        (opaque_job(899.0), "cat", True),
        (opaque_job(902.0), "cat", False),
        (opaque_job(stop_signal="TERM"), "cat", True),
        (opaque_job(mechanism=Mechanism.IMAGE), "cat", True),
        # The node is kept for it.
        (opaque_job(), "ann", True),
    ],
)
def test_before_a_reservation_a_job_starts_there_if_it_ends_in_time_or_can_leave(
    spec: JobSpec, user: str, starts: bool
) -> None:
    drive = reserved(COURSE, 1)
    drive.now = 100.0
    number = drive.submit(spec, user)
    answer = drive.request(number, *drive.places(number))
    assert isinstance(answer, Rejected) is not starts
    if isinstance(answer, Rejected):
        assert answer.refusals[0].reason is Reason.NODE_RESERVED
        assert "give it a --time that ends before" in answer.refusals[0].message


@pytest.mark.parametrize(
    ("old", "new", "is_accepted"),
    # 0.0 is no limit.
    [(600.0, 0.0, False), (600.0, 2_000.0, False), (600.0, 700.0, True), (600.0, 60.0, True)],
)
@pytest.mark.parametrize("can_leave", [False, True])
def test_an_update_gives_a_running_job_no_time_that_reaches_a_reservation_unless_it_can_leave(
    old: float, new: float, is_accepted: bool, can_leave: bool
) -> None:
    drive = reserved(UPGRADE, 1)
    number = drive.submit(opaque_job(old), "cat")
    drive.start(number)
    drive.runs(number)
    drive.state.put_job(replace(drive.job(number), capabilities=Capabilities(known=True, checkpoint=can_leave)))
    answer = drive.step(UpdateJob(number, Update(time_limit_s=new), "", "cat"))
    assert isinstance(answer, Refused) is not (is_accepted or can_leave)
    if isinstance(answer, Refused):
        assert answer.reason == "UPDATE_REFUSED"
        assert "the node is reserved in" in answer.message
        assert drive.job(number).time_limit_s == old


@pytest.mark.parametrize("policy", ["fifo", "las"])
def test_why_names_a_reservation_that_lies_ahead_and_its_end(policy: str) -> None:
    drive = Drive(1, dataclasses.replace(NEVER_SILENT, policy=policy))
    drive.step(ReserveNodes(COURSE, "olga"))
    late, early = drive.submit(opaque_job(), "cat"), drive.submit(opaque_job(60.0), "cat")
    found = explain(drive.state, late, drive.now)
    assert (found.blockers[0].reason, found.is_ranked) == (Reason.NODE_RESERVED, False)
    assert found.start_before_s == pytest.approx(COURSE.end - drive.now)
    assert found.assumption == (
        "jobs run to their time limits, reservations to their ends, reservation course being the last needed, and no"
        " job is ahead"
    )
    assert Reason.NODE_RESERVED not in [one.reason for one in explain(drive.state, early, drive.now).blockers]
    drive.join("n2")
    reasons = [one.reason for one in explain(drive.state, late, drive.now).blockers]
    assert Reason.NODE_RESERVED not in reasons, "there is room on another node"


@pytest.mark.parametrize(
    ("capabilities", "can"),
    [
        (Capabilities(known=True), False),
        (Capabilities(known=True, checkpoint=True), True),
        (Capabilities(known=True, offload=True), True),
        (Capabilities(known=True, offload=True, missing={"MOVE": "why"}), False),
        (Capabilities(known=True, checkpoint=True, missing={"MOVE": "why"}), True),
    ],
)
def test_a_job_can_leave_that_can_be_moved_or_saved(capabilities: Capabilities, can: bool) -> None:
    assert can_leave(JobRecord(1, "", "", job_of(1), 0.0, capabilities=capabilities)) is can


def test_a_job_that_turns_out_to_be_tied_to_its_node_stays_through_the_maintenance_and_why_reports_it() -> None:
    drive = reserved(UPGRADE, 2)
    number = drive.submit(job_of(1))
    assert not drive.job(number).capabilities.known
    held = drive.state.gangs[drive.start(number)]
    (here,) = held.nodes
    assert here == "n1", "what it can is not known before it runs"
    report = replace(drive.report(held, ObservedPhase.RUNNING), capabilities=Capabilities(known=True))
    drive.observe(here, report)
    at(drive, 1_500.0)
    (blocker,) = explain(drive.state, number, drive.now).blockers
    assert "it stays until it ends, for it can neither be moved nor saved" in blocker.message
    assert drive.state.gangs[drive.job(number).epoch].nodes == ("n1",)


@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(1, 50), st.integers(0, 20)), max_size=6),
    st.lists(st.floats(1.0, 200.0), min_size=1, max_size=20),
)
def test_at_any_time_a_node_says_what_its_reservations_say(
    windows: list[tuple[int, int, int]], times: list[float]
) -> None:
    drive = Drive(1, NEVER_SILENT)
    for place, (start, length, lead) in enumerate(windows):
        users = ("ann",) if place % 2 else ()
        reservation = Reservation(f"b{place}", ("n1",), float(start), float(start + length), users, lead_s=float(lead))
        drive.step(ReserveNodes(reservation, "olga"))
    kept = dict(drive.state.reservations)
    for now in sorted(times):
        at(drive, max(now, drive.now))
        node = drive.state.nodes["n1"]
        name, users = hold_of(kept.values(), "n1", drive.now)
        assert (node.reservation, node.reserved_for) == (name, users)
        assert node.takes_gangs is (not name or bool(users))


@pytest.mark.parametrize(
    ("now", "spec", "user", "may"),
    [
        (1_500.0, job_of(1), "cat", False),
        (1_500.0, job_of(1), "ann", True),
        (500.0, opaque_job(), "cat", False),
        (500.0, opaque_job(300.0), "cat", True),
        (2_500.0, opaque_job(), "cat", True),
    ],
)
def test_no_job_is_stopped_and_no_place_is_kept_for_a_job_that_a_reservation_keeps_out(
    now: float, spec: JobSpec, user: str, may: bool
) -> None:
    drive = reserved(COURSE, 1)
    victim = drive.submit(job_of(4), "ann")
    drive.start(victim)
    drive.runs(victim)
    at(drive, now)
    number = drive.submit(spec, user)
    held = drive.state.gangs[drive.job(victim).epoch].claims
    drive.step(ProposePlan((), kept_places=(KeepPlace(number, held),)))
    assert list(drive.state.queue.kept_by_plan) == [number] * may
    purpose = Purpose(Goal.HOLE, number)
    suspend = SuspendChange(victim, drive.job(victim).revision, level=SuspendLevel.CHECKPOINT, purpose=purpose)
    answer: Any = drive.step(ProposePlan((suspend,)))
    (verdict,) = answer.verdicts
    assert [(one.reason, one.job) for one in verdict.refusals] == [(Reason.NODE_RESERVED, f"jobs/{number}")] * (not may)


def test_without_a_planner_the_place_that_is_kept_for_a_job_is_not_on_a_node_that_is_closed_to_it() -> None:
    drive = Drive(2, dataclasses.replace(NEVER_SILENT, policy="fifo-backfill"))
    first = drive.submit(job_of(1))
    drive.start(first)
    (here,) = drive.state.gangs[1].nodes
    (there,) = {"n1", "n2"} - {here}
    drive.step(ReserveNodes(replace(UPGRADE, nodes=(there,), start=9_000.0, end=9_900.0), "olga"))
    wide = drive.submit(replace(job_of(4), agent=OPAQUE))
    four = Claim(here, 0b1111, (4_000, 4_000), 16 * GIB, tasks=(4,))
    assert isinstance(drive.request(wide, (four,)), Rejected)
    at(drive, 1_000.0)
    (kept,) = kept_places_of(drive.state, [drive.job(wide)], drive.now)
    assert kept.nodes == (here,)


# -- a cluster ---------------------------------------------------------------------------------------------------------


def test_a_node_is_emptied_by_moves_stays_empty_and_returns_though_the_master_dies_meanwhile() -> None:
    cluster = FaultCluster(1, [("n1", SERVER), ("n2", SERVER)])
    cluster.run_for(5.0)
    number = started(cluster, replace(job_of(2), command=("train", "2000")))
    held = gang(cluster, number)
    assert held is not None
    (here,) = held.nodes
    now = cluster.master.now()
    reservation = Reservation("upgrade", (here,), now + 200.0, now + 300.0, lead_s=60.0)
    assert isinstance(cluster.ask(ReserveNodes(reservation, "olga")), Done)
    cluster.run_for(100.0)
    assert gang(cluster, number).nodes == (here,), "it is not yet emptied"  # type: ignore[union-attr]
    cluster.run_for(80.0)
    cluster.master.crash(5.0)
    cluster.run_for(30.0)
    moved = gang(cluster, number)
    assert moved is not None
    assert here not in moved.nodes, "the job has been moved"
    assert phase(cluster, number) is GangPhase.RUNNING
    cluster.run_for(60.0)
    assert not cluster.state.gangs.places_on[here]
    assert not cluster.state.nodes[here].takes_gangs
    assert cluster.run_until(lambda: cluster.state.nodes[here].takes_gangs, 60.0)
    assert not cluster.state.reservations
    cluster.check()


def test_a_job_that_ends_in_time_stays_on_a_node_that_is_emptied() -> None:
    cluster = FaultCluster(1, [("n1", SERVER), ("n2", SERVER)])
    cluster.run_for(5.0)
    number = started(cluster, replace(job_of(1), command=("train", "2000"), time_limit_s=60.0))
    held = gang(cluster, number)
    assert held is not None
    now = cluster.master.now()
    cluster.ask(ReserveNodes(Reservation("upgrade", held.nodes, now + 100.0, now + 300.0, lead_s=100.0), "olga"))
    cluster.run_for(20.0)
    assert gang(cluster, number) is not None
    assert gang(cluster, number).epoch == held.epoch  # type: ignore[union-attr]
    assert not cluster.state.nodes[held.nodes[0]].takes_gangs


@pytest.mark.parametrize(("user", "stays"), [("zoe", True), ("ann", False)])
def test_jobs_of_other_users_leave_a_node_whose_reservation_begins_at_once(user: str, stays: bool) -> None:
    cluster = FaultCluster(1, [("n1", SERVER), ("n2", SERVER)])
    cluster.run_for(5.0)
    number = started(cluster, replace(job_of(2), command=("train", "2000")), user)
    held = gang(cluster, number)
    assert held is not None
    now = cluster.master.now()
    cluster.ask(ReserveNodes(Reservation("course", held.nodes, now, now + 600.0, ("zoe",), lead_s=0.0), "olga"))
    cluster.run_for(60.0)
    later = gang(cluster, number)
    assert later is not None
    assert (later.nodes == held.nodes) is stays
    assert phase(cluster, number) is GangPhase.RUNNING
    cluster.check()


def test_a_job_leaves_a_node_for_the_only_one_that_is_not_reserved_for_others() -> None:
    nodes = [f"n{number}" for number in range(1, 9)]
    cluster = FaultCluster(1, [(name, SERVER) for name in nodes])
    cluster.run_for(5.0)
    number = started(cluster, replace(job_of(2), command=("train", "2000")))
    (here,) = gang(cluster, number).nodes  # type: ignore[union-attr]
    *others, free = [name for name in nodes if name != here]
    now = cluster.master.now()
    cluster.ask(ReserveNodes(Reservation("course", tuple(others), now, now + 600.0, ("zoe",), lead_s=0.0), "olga"))
    found = find_place(cluster.state, cluster.state.jobs[number], frozenset({here}))
    assert found is not None
    assert [claim.node for claim in found[0]] == [free]
    waiting = Drive(8, NEVER_SILENT)
    waiting.step(ReserveNodes(replace(COURSE, nodes=tuple(nodes[:-1]), start=10.0), "olga"))
    at(waiting, 20.0)
    assert has_place(waiting.state, waiting.job(waiting.submit(job_of(2), "cat")), waiting.now)


def test_the_history_has_when_a_reservation_begins_and_how_long_it_is() -> None:
    drive = reserved(replace(UPGRADE, reason="disks"))
    began = next(row for row in drive.history if row.kind == "nodes_reserved")
    assert began.message == "upgrade: 1 node for maintenance (disks), in 16m 39s for 16m 40s"
    at(drive, 1_400.0)
    drive.step(UpdateReservation("upgrade", duration_s=700.0, user="eve"))
    changed = next(row for row in reversed(drive.history) if row.kind == "reservation_updated")
    assert changed.message == "upgrade: 1 node for maintenance (disks), for another 5m"


def test_the_queue_names_the_reservation_that_keeps_a_job_out_as_why_does() -> None:
    drive = Drive(2, dataclasses.replace(NEVER_SILENT, policy="las"))
    drive.step(ReserveNodes(replace(COURSE, start=0.0, end=5_000.0, lead_s=0.0), "olga"))
    waits, enters, fits = drive.submit(job_of(6), "eve"), drive.submit(job_of(6), "ann"), drive.submit(job_of(4), "eve")
    drive.state.queue.ranks = {waits: 1, enters: 2, fits: 3}
    firsts = [
        (reported_blockers(drive.state, job, drive.now)[0], explain(drive.state, job.number, drive.now).blockers[0])
        for job in map(drive.job, (waits, enters, fits))
    ]
    assert firsts[0][0] == firsts[0][1]
    assert firsts[0][0].message == "the node is reserved for other users (course) for another 1h 23m, on n1"
    assert [one.reason for one, _ in firsts] == [Reason.NODE_RESERVED, Reason.RANKED, Reason.RANKED]
    number = drive.submit(opaque_job(), "eve")
    drive.step(DeleteReservation("course"))
    drive.step(ReserveNodes(replace(UPGRADE, nodes=("n1", "n2"), start=4_000.0, end=5_000.0), "olga"))
    (listed, *_), (why, *_) = (
        reported_blockers(drive.state, drive.job(number), drive.now),
        explain(drive.state, number, drive.now).blockers,
    )
    assert listed == why
    assert "neither moved nor stopped" in listed.message


def test_a_job_that_starts_because_a_reservation_was_deleted_has_not_waited_for_the_job_that_left_before() -> None:
    drive = reserved(replace(COURSE, start=0.0, end=5_000.0, lead_s=0.0), nodes=1)
    first = drive.submit(job_of(4), "ann")
    drive.start(first)
    drive.runs(first)
    waits = drive.submit(job_of(4), "eve")
    drive.seen(first, drive.job(first).epoch, ObservedPhase.ENDED)
    drive.observe("n1")
    drive.step(CancelJob(first))
    assert drive.state.jobs.left_by["n1"][0] == first
    drive.step(DeleteReservation("course"))
    drive.start(waits)
    (approved,) = [row for row in drive.history if row.kind == "gang_approved" and row.subject == f"jobs/{waits}"]
    assert "after" not in approved.figures


@pytest.mark.parametrize("policy", ["fifo", "las"])
@pytest.mark.parametrize("users", [("ann",), ()], ids=["for others", "for maintenance"])
def test_why_estimates_that_a_job_starts_once_the_reservations_that_it_needs_have_ended(
    policy: str, users: tuple[str, ...]
) -> None:
    drive = Drive(3, dataclasses.replace(NEVER_SILENT, policy=policy))
    for number, name in enumerate(("n1", "n2", "n3"), 1):
        one = replace(COURSE, name=f"of-{name}", nodes=(name,), start=0.0, end=1_000.0 * number, users=users)
        drive.step(ReserveNodes(replace(one, lead_s=0.0), "olga"))
    waits = [drive.submit(job_of(gpus), "eve") for gpus in (3, 8, 12)]
    found = [explain(drive.state, number, drive.now) for number in waits]
    assert [one.start_before_s for one in found] == [pytest.approx(1_000.0 * n - drive.now) for n in (1, 2, 3)]
    assert "reservation of-n2 being the last needed" in found[1].assumption
    # A node that an operator has closed, too, does not open with the end of its reservation.
    drive.step(CordonNode("n1", "new fan", "olga"))
    again = explain(drive.state, waits[0], drive.now)
    assert again.start_before_s == pytest.approx(2_000.0 - drive.now)
    assert explain(drive.state, waits[2], drive.now).start_before_s == 0.0
