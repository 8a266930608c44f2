"""Curves by cores as the planner reports them, and why a job has its cores, in the words of the master."""

from __future__ import annotations

import pytest
from core.drive import job_of
from ganger.cluster.resources import Role, TaskShape
from ganger.v1 import scheduling_pb2
from ganger_master.core.answers import ChangeAnswer
from ganger_master.core.commands import ProposePlan
from ganger_master.core.job_model import Capabilities
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.plan_changes import CoresCurve
from ganger_master.planner.context import ClusterChange, Plan, PlanVerdict, parts_of
from ganger_master.planner.cores_curves import explain_cores
from ganger_master.planner.loop import live_loop
from ganger_master.rpc.planner_messages import curve_to_wire, plan_from_wire
from msgspec import structs
from planner.test_resource_trials import Profiled, needs


def unasked() -> JobSpec:
    """Return a job of one GPU that names no cores."""
    (role,) = job_of(1).roles
    return structs.replace(job_of(1), roles=(structs.replace(role, shape=structs.replace(role.shape, millicores=0)),))


def reported(drive: Profiled, is_all: bool = False) -> dict[int, CoresCurve]:
    """Report the planner's curves to the master, and return them by job."""
    curves = drive.measured.curve_news(is_all)
    drive.step(ProposePlan((), curves=curves))
    return {curve.number: curve for curve in curves}


def test_a_curve_is_reported_once_it_changes_and_all_of_them_to_a_master_that_was_restarted() -> None:
    drive = Profiled()
    number = drive.add(needs(4))
    assert reported(drive) == {}, "nothing was measured yet"
    drive.spend(400)
    curve = reported(drive)[number]
    assert [point.cores for point in curve.points] == sorted(point.cores for point in curve.points)
    assert curve.sweet_low <= curve.sweet_point <= curve.sweet_high
    assert curve.sweet_low <= 4.0 <= curve.sweet_high
    assert curve.enough_millicores == pytest.approx(4_000, abs=1_000)
    assert curve.tried_s > 0.0
    assert reported(drive) == {}
    assert reported(drive, is_all=True) == {number: curve}


def test_a_trial_with_fewer_cores_costs_what_the_job_was_slower_for_and_one_with_more_costs_nothing() -> None:
    drive = Profiled(noise=0.0)
    steady, slowed = drive.add(needs(1)), drive.add(needs(12))
    drive.spend(400)
    curves = reported(drive)
    assert curves[steady].lost_s == pytest.approx(0.0, abs=0.5)
    assert 0.0 < curves[slowed].lost_s < curves[slowed].tried_s


def test_the_reason_names_the_share_then_the_trial_then_the_measurement() -> None:
    drive = Profiled()
    number = drive.add(needs(2))
    assert (
        "that is the share of its GPUs: it was not measured yet".lower() in explain_cores(drive.state, number).lower()
    )
    for _ in range(100):
        drive.spend(1)
        reported(drive)
        if number in drive.measured.trials:
            break
    assert "for each GPU are under trial now: a point that the curve lacks" in explain_cores(drive.state, number)
    drive.spend(400)
    reported(drive)
    text = explain_cores(drive.state, number)
    assert text.startswith(f"Job {number} has 2 cores for its GPU on n1")
    assert "That is the fewest with 99% of its best rate: more gain it nothing, and fewer lose." in text
    assert "The curve is flat from" in text
    assert "with 95 % confidence" in text
    assert "Trials took" in text


def test_what_keeps_a_job_from_cores_that_it_could_use_is_named() -> None:
    drive = Profiled()
    first = drive.add(needs(12))
    drive.spend(400)
    assert drive.cores(first) == 12
    others = [drive.add(needs(12)) for _ in range(3)]
    drive.spend(400)
    reported(drive)
    assert drive.cores(first) < 12
    assert "12 cores for each GPU would be enough: other jobs on its node gain" in explain_cores(drive.state, first)
    text = explain_cores(drive.state, others[0])
    assert "Its rate rises up to the most cores that it was measured with, and no more are free on its node" in text
    assert "and more than was tried with 95 % confidence" in text


def test_a_request_a_job_without_an_agent_and_a_policy_without_a_tuning_are_reasons_of_their_own() -> None:
    drive = Profiled("ganger")
    asked, plain = drive.add(needs(4)), drive.add(needs(4), unasked())
    assert "Its user asked for 2 cores for each task" in explain_cores(drive.state, asked)
    job = structs.replace(drive.job(plain), capabilities=Capabilities())
    drive.state.put_job(job)
    assert "without an agent in its processes" in explain_cores(drive.state, plain)
    drive = Profiled("las")
    number = drive.add(needs(4), unasked())
    assert "No cores are tuned under policy las" in explain_cores(drive.state, number)


def test_the_reason_says_how_cores_are_divided_by_role_and_rank() -> None:
    drive = Profiled("ganger")
    servers, workers = Role("ps", 1, TaskShape(0, 6_000, 1 << 30)), Role("worker", 2, TaskShape(1, 1_000, 1 << 30))
    both = drive.add(needs(4), structs.replace(job_of(1), roles=(servers, workers)))
    text = explain_cores(drive.state, both)
    assert "Job 1 has 8 cores for 2 GPUs" in text
    assert "On a node each role has cores of its own, in proportion to what its tasks request" in text
    assert "Ranks of one role share theirs" in text
    assert "Its user asked for 6 cores for each ps and 1 core for each worker" in text
    alike = drive.add(needs(4), structs.replace(job_of(1), roles=(workers,)))
    assert "Ranks on one node share theirs: one uses what others leave" in explain_cores(drive.state, alike)
    drive = Profiled("ganger")
    assert "share theirs" not in explain_cores(drive.state, drive.add(needs(4)))


def test_a_curve_is_the_same_on_the_other_side_of_the_wire() -> None:
    drive = Profiled()
    number = drive.add(needs(9))
    drive.spend(400)
    (measured,) = drive.measured.curve_news()
    # Times have whole nanoseconds there.
    curve = structs.replace(measured, tried_s=72.25, lost_s=3.5, sweet_high=9.5)
    open_ended = structs.replace(curve, sweet_high=0.0)
    message = scheduling_pb2.Plan(cores_curves=[curve_to_wire(curve), curve_to_wire(open_ended)])
    assert plan_from_wire(message).curves == (curve, open_ended)
    assert curve.number == number
    (part,) = parts_of(Plan(curves=(curve,)))
    assert part.curves == (curve,)


def test_the_planner_repeats_all_curves_after_each_connection() -> None:
    drive = Profiled()
    number = drive.add(needs(4))
    drive.spend(100)
    loop = live_loop(drive.policy, 60.0, drive.measured, None)

    def reported(is_whole: bool) -> list[int]:
        jobs = [(drive.job(number), drive.state.gangs[drive.job(number).epoch], 0)]
        loop.observe(ClusterChange(drive.state.view, jobs, is_whole=is_whole), drive.now)
        plan, _ = loop.step(drive.now)
        assert plan is not None
        loop.observe(PlanVerdict([ChangeAnswer(one.number, True, 0) for one in plan.changes], 0.0), drive.now)
        drive.now += 10.0
        return [curve.number for curve in plan.curves]

    assert [reported(is_whole) for is_whole in (True, False, False, True)] == [[number], [], [], [number]]
