"""Elastic jobs on a real state, read from wire messages: trials of growth onto idle GPUs, and giving GPUs back."""

from __future__ import annotations

import math

from core.drive import job_of
from core.elastic_worlds import World, elastic
from ganger.cluster.capacity_index import CapacityIndex
from ganger.v1 import scheduling_pb2
from ganger_master.core.answers import PlanAnswer
from ganger_master.core.commands import CancelJob, ProposePlan
from ganger_master.core.gang_model import ObservedPhase
from ganger_master.core.job_model import SuspendLevel
from ganger_master.core.plan_changes import CoresChange, Goal, MoveChange, ResizeChange, StartChange, SuspendChange
from ganger_master.planner.context import PlanContext, PlanDraft, PlannerSettings, context_of
from ganger_master.planner.growth_stage import GrowthTrials, Sizes, plan_sizes
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.plan_pace import PlanPace
from ganger_master.planner.rate_registry import ProgressReport, RateRegistry
from ganger_master.policies import policy_named
from ganger_master.policies.trials import TrialPace
from ganger_master.rpc.planner_messages import live_job_from_wire, live_job_to_wire
from msgspec.structs import replace

IDLE_S = 60.0
WINDOW_S = 10.0


POLICY = policy_named("fifo+best-fit+elastic")


class Planned(World):
    """A state whose elastic jobs are resized by plans. `rates`: steps/s by number of GPUs."""

    def __init__(self, nodes: int = 1, rates: dict[int, float] | None = None) -> None:
        super().__init__(nodes)
        self.rates = rates or {1: 10.0, 2: 19.0, 3: 27.0, 4: 34.0}
        self.speeds = RateRegistry(TrialPace(settle_s=5.0, window_s=WINDOW_S, window_steps=2))
        self.growing = GrowthTrials()
        self.done: dict[int, float] = {}
        self.room = CapacityIndex(self.state.view.copy())

    def table(self) -> LiveTable:
        table = LiveTable()
        for job in self.state.jobs.values():
            message = scheduling_pb2.LiveJob()
            live_job_to_wire(job, self.state.gangs.get(job.epoch), message)
            job_read, gang = live_job_from_wire(scheduling_pb2.LiveJob.FromString(message.SerializeToString()))
            table.put(job_read, gang)
            self.speeds.put(job_read, gang, 0, self.now)
        return table

    def trains(self, seconds: float) -> None:
        """Let all running jobs step and report their steps."""
        self.table()
        until = self.now + seconds
        while self.now < until:
            self.now += 1.0
            for number, job in self.state.jobs.items():
                if job.running_since and job.spec.is_elastic:
                    devices = self.state.gangs[job.epoch].devices
                    # No two windows are quite alike.
                    wobble = 1.0 + 0.002 * math.sin(self.now * 7.0 + number)
                    self.done[number] = self.done.get(number, 0.0) + self.rates[devices] * wobble
                    report = ProgressReport(int(1000 * self.done[number]), self.now)
                    self.speeds.record(number, report, self.now)

    def context(self, room: CapacityIndex) -> PlanContext:
        settings = PlannerSettings(PlanPace(IDLE_S))
        return context_of(POLICY, self.table(), room, self.now, settings=settings, rates=self.speeds)

    def plan(self) -> Sizes:
        """Plan changes of size, and have the master approve them."""
        room = self.room
        # As in the live planner, the view is updated in place.
        for row in self.state.view.rows():
            room.view.put(row)
        before = [row.free_mask for row in room.view.rows()]
        found, growing = plan_sizes(self.context(room), self.growing)
        assert [row.free_mask for row in room.view.rows()] == before, "the capacity index is unchanged"
        if found.changes:
            answer = self.step(ProposePlan(found.changes))
            assert isinstance(answer, PlanAnswer)
            assert all(verdict.approved for verdict in answer.verdicts), answer
        self.growing = growing
        return found

    def finish_resize(self, number: int) -> None:
        """Let the daemons complete the job's change of size."""
        job = self.job(number)
        source, destination = job.epoch, job.next_epoch
        self.seen(number, destination, ObservedPhase.PREPARED)
        self.seen(number, source, ObservedPhase.PARKED, 40)
        self.seen(number, destination, ObservedPhase.READY, 40)
        self.runs(number)
        self.gone(number, source)

    def grows(self, number: int) -> int:
        """Let the job grow onto idle GPUs and step with them. Return its number of GPUs."""
        found = self.plan()
        if not found.changes:
            self.trains(IDLE_S + 100.0)
            found = self.plan()
        (change,) = found.changes
        assert (change.number, change.kind, change.purpose.goal) == (number, "RESIZE", Goal.GROW)
        self.finish_resize(number)
        self.trains(100.0)
        return self.job(number).gpus


def fully_grown() -> tuple[Planned, int]:
    """Return a node of four GPUs that one job has grown onto, and the number of the job."""
    drive = Planned()
    number = drive.running(elastic(1, 1, 4))
    assert [drive.grows(number) for _ in range(3)] == [2, 3, 4]
    drive.plan()
    return drive, number


def test_no_job_grows_onto_gpus_that_a_parked_job_may_need_to_resume() -> None:
    drive = Planned()
    number, parked = drive.running(elastic(1, 1, 4)), drive.running(job_of(3))
    drive.step(ProposePlan((SuspendChange(parked, drive.job(parked).revision, level=SuspendLevel.OFFLOAD),)))
    drive.seen(parked, drive.job(parked).epoch, ObservedPhase.PARKED, 5)
    drive.running(job_of(2))
    drive.plan()
    drive.trains(IDLE_S + 100.0)
    assert drive.plan().changes == ()
    drive.step(CancelJob(parked))
    drive.seen(parked, drive.job(parked).epoch, ObservedPhase.ENDED)
    assert drive.grows(number) == 2


def test_a_job_grows_onto_idle_gpus_one_at_a_time_as_long_as_it_gains() -> None:
    drive = Planned()
    number = drive.running(elastic(1, 1, 4))
    drive.trains(100.0)
    assert drive.plan().changes == (), "the GPUs have not been idle for long enough"
    drive.trains(IDLE_S / 2)
    assert drive.plan().changes == ()
    drive.trains(IDLE_S)
    (change,) = drive.plan().changes
    assert "to be measured with 2" in change.reason
    drive.finish_resize(number)
    assert drive.plan() == Sizes(next_s=math.inf), "the trial has no windows yet"
    drive.trains(100.0)
    found = drive.plan()
    assert [(one.number, one.goal, one.kept) for one in found.findings] == [(number, Goal.GROW, True)]
    assert 1.85 < found.findings[0].gain < 1.95
    # The other GPUs have been idle all the time.
    assert [change.kind for change in found.changes] == ["RESIZE"]


def test_a_growth_that_gains_too_little_is_reverted_and_not_tried_again() -> None:
    drive = Planned(rates={1: 10.0, 2: 12.0, 3: 13.0, 4: 14.0})
    number = drive.running(elastic(1, 1, 4))
    assert drive.grows(number) == 2
    found = drive.plan()
    assert [(one.kept, round(one.gain, 1)) for one in found.findings] == [(False, 1.2)]
    (change,) = found.changes
    assert (change.purpose.goal, sum(claim.tasks[0] for claim in change.claims)) == (Goal.GIVE_BACK, 1)
    assert "1.20 times as fast with 2 GPUs, 1 will do" in change.reason
    drive.finish_resize(number)
    for _ in range(5):
        drive.trains(IDLE_S)
        assert drive.plan().changes == ()


def test_a_pending_job_gets_gpus_at_once_and_no_more_than_it_needs() -> None:
    drive, number = fully_grown()
    pending = drive.submit(job_of(2))
    found = drive.plan()
    (change,) = found.changes
    assert (change.number, change.purpose.goal, change.purpose.job) == (number, Goal.GIVE_BACK, pending)
    assert sum(claim.tasks[0] for claim in change.claims) == 2
    assert found.is_giving
    again = drive.plan()
    assert (again.changes, again.is_giving) == ((), True), "the GPUs already being given back suffice"
    drive.finish_resize(number)
    drive.start(pending)
    drive.runs(pending)
    assert drive.plan() == Sizes(next_s=math.inf)
    assert drive.state.view.free[0] == 0


def test_while_many_jobs_are_pending_every_elastic_job_shrinks_to_its_least_size() -> None:
    drive, number = fully_grown()
    for _ in range(20):
        drive.submit(job_of(4))
    (change,) = drive.plan().changes
    assert (change.number, sum(claim.tasks[0] for claim in change.claims)) == (number, 1)


def test_no_job_shrinks_for_a_gang_that_would_not_fit_even_so() -> None:
    drive, _ = fully_grown()
    drive.submit(job_of(4))
    assert drive.plan().changes == ()


def test_a_rejected_growth_is_not_proposed_again_at_once() -> None:
    drive = Planned()
    number = drive.running(elastic(1, 1, 4))
    drive.plan()
    drive.trains(IDLE_S + 100.0)
    room = CapacityIndex(drive.state.view.copy())
    found, growing = plan_sizes(drive.context(room), drive.growing)
    assert [change.number for change in found.changes] == [number]
    drive.growing = growing.without([number], drive.now)
    assert drive.plan().changes == ()


def test_a_growth_that_failed_is_not_tried_again_at_once() -> None:
    drive = Planned()
    number = drive.running(elastic(1, 1, 4))
    drive.plan()
    drive.trains(IDLE_S + 100.0)
    assert drive.plan().changes
    drive.fails(number, drive.job(number).next_epoch)
    drive.runs(number)
    drive.trains(IDLE_S)
    assert drive.plan().changes == ()


def test_the_next_stage_does_not_change_a_job_whose_size_changes() -> None:
    sizes = PlanDraft((ResizeChange(1, 1, ()),), next_change_s=5.0)
    found = sizes.followed_by(PlanDraft((SuspendChange(1, 1), StartChange(2, 1, ()))))
    assert [(change.number, change.kind) for change in found.changes] == [(1, "RESIZE"), (2, "START")]
    assert found.next_change_s == 5.0


def test_the_next_stage_drops_an_atomic_group_with_a_job_whose_size_changes() -> None:
    sizes = PlanDraft((ResizeChange(1, 1, ()),))
    colocation = (CoresChange(1, 1, (), together=2), MoveChange(2, 1, (), together=2), MoveChange(3, 1, (), together=4))
    assert [change.number for change in sizes.followed_by(PlanDraft(colocation)).changes] == [1, 3]


def test_busy_time_sliced_and_partly_ended_jobs_keep_their_sizes() -> None:
    drive, number = fully_grown()
    drive.submit(job_of(2))
    context = drive.context(CapacityIndex(drive.state.view.copy()))
    assert [change.number for change in plan_sizes(context, drive.growing)[0].changes] == [number]
    busy = replace(context, on_trial=frozenset({number}))
    assert plan_sizes(busy, drive.growing)[0] == Sizes()
    job, gang = drive.job(number), drive.state.gangs[drive.job(number).epoch]
    context.jobs.put(job, replace(gang, node_set=1))
    assert plan_sizes(context, drive.growing)[0] == Sizes()
    context.jobs.put(job, replace(gang, pieces=(replace(gang.pieces[0], held=None),)))
    assert plan_sizes(context, drive.growing)[0] == Sizes()
