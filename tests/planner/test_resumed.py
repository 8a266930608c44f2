"""A job that its user resumes is served like any other of its rank, under every policy and from every level.

The bound: once devices for it are free, and no job ranks before it, one pass starts it. Under `gandiva` no devices need
be free (tests of the matrices). Where an order goes on to prefer others, a job that has waited for a week goes first
(`order.aging`).
"""

from __future__ import annotations

import pytest
from core.drive import GIB, Drive, job_of
from ganger.cluster.capacity_index import CapacityIndex
from ganger_master.core.answers import JobAnswer, PlanAnswer
from ganger_master.core.commands import CancelJob, ProposePlan, ResumeJob, SuspendJob, Tick
from ganger_master.core.gang_model import GangIntent, ObservedPhase
from ganger_master.core.job_model import SuspendLevel
from ganger_master.core.settings import CoreSettings
from ganger_master.planner.context import PlannerSettings, context_of
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.order_stage import plan_by
from ganger_master.policies import NAMES, ShareByTimeSlices, live_policy_named, policy_named
from ganger_master.policies.orders import WEEK_S, Capacity

LIVE = [
    name
    for name in NAMES
    if not policy_named(name).order.knows_durations and not policy_named(name).has(ShareByTimeSlices)
]
LEVELS = [SuspendLevel.PAUSE, SuspendLevel.OFFLOAD, SuspendLevel.CHECKPOINT]


PASS_S = 20_000.0


class Planned(Drive):
    """One node, and a policy that is followed pass by pass, as the master's planner and job schedulers follow it."""

    def __init__(self, policy: str) -> None:
        super().__init__(1, CoreSettings(policy=policy, lost_after_s=None, silent_margin_s=None))
        self.policy = live_policy_named(policy)

    def go_on(self) -> None:
        self.now += PASS_S
        if not self.policy.is_planned:
            # leases without an answer are over, and are given anew
            self.step(Tick())
            for number in sorted(self.state.leases.turn_of):
                self.request(number, *self.places(number))
        else:
            self._propose()
        for job in list(self.state.jobs.values()):
            if job.epoch and self.state.gangs[job.epoch].intent is GangIntent.RUN:
                self.runs(job.number)

    def _propose(self) -> None:
        table = LiveTable()
        for job in self.state.jobs.values():
            table.put(job, self.state.gangs.get(job.epoch))
        capacity = Capacity(self.state.nodes.devices, 16.0, 64.0 * GIB, 4)
        room = CapacityIndex(self.state.view.copy())
        settings = PlannerSettings(capacity=capacity)
        found = plan_by(context_of(self.policy, table, room, self.now, settings=settings))
        answer = self.step(ProposePlan(found.changes))
        assert isinstance(answer, PlanAnswer)
        for change in found.changes:
            if change.kind == "SUSPEND":
                self._comes_to_rest(change.number)

    def _comes_to_rest(self, number: int) -> None:
        gang = self.state.gangs[self.job(number).epoch]
        self.seen(number, gang.epoch, ObservedPhase.PARKED, 5)
        if gang.park_level is SuspendLevel.CHECKPOINT:
            self.seen_without("n1", number)

    def suspend(self, number: int, level: SuspendLevel) -> None:
        assert self.step(SuspendJob(number, level)) == JobAnswer(number)
        self._comes_to_rest(number)
        assert self.job(number).suspended_level is level

    def is_running(self, number: int) -> bool:
        job = self.job(number)
        return bool(job.epoch) and self.state.gangs[job.epoch].intent is GangIntent.RUN


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("policy", LIVE)
def test_a_resumed_job_starts_in_the_pass_after_its_devices_are_free(policy: str, level: SuspendLevel) -> None:
    drive = Planned(policy)
    one = drive.submit(job_of(4, GIB))
    drive.go_on()
    assert drive.is_running(one)
    drive.suspend(one, level)
    other = drive.submit(job_of(4, GIB))
    drive.go_on()
    assert drive.is_running(other) is (level is not SuspendLevel.PAUSE)
    drive.step(ResumeJob(one))
    drive.go_on()
    if drive.is_running(one):
        return
    drive.step(CancelJob(other))
    drive.seen_without("n1", other)
    drive.go_on()
    assert drive.is_running(one), drive.state.blockers_of(one)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("policy", LIVE)
def test_a_resumed_job_is_not_passed_for_ever_by_jobs_that_keep_coming(policy: str, level: SuspendLevel) -> None:
    drive = Planned(policy)
    one = drive.submit(job_of(4, GIB))
    drive.go_on()
    drive.suspend(one, level)
    coming = [drive.submit(job_of(4, GIB)) for _ in range(2)]
    drive.go_on()
    drive.step(ResumeJob(one))
    for _ in range(int(WEEK_S / PASS_S) + 3):
        drive.go_on()
        if drive.is_running(one):
            return
        for number in [number for number in coming if drive.is_running(number)]:
            drive.step(CancelJob(number))
            drive.seen_without("n1", number)
            coming.remove(number)
            coming.append(drive.submit(job_of(4, GIB)))
    raise AssertionError(f"jobs/{one} was passed for more than a week: {drive.state.blockers_of(one)}")
