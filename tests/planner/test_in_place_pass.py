"""Optimus's pass over a real state, fed by messages: jobs resize in place, and none is preempted for it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import ClassVar

from core.drive import job_of
from core.elastic_worlds import RESIZABLE, World, elastic
from ganger.cluster.capacity_index import CapacityIndex
from ganger.v1 import scheduling_pb2
from ganger_master.core.answers import PlanAnswer
from ganger_master.core.commands import ProposePlan, ResizeJob
from ganger_master.core.elastic import devices_of
from ganger_master.core.gang_model import Gang, ObservedPhase
from ganger_master.core.job_model import JobRecord
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.plan_changes import Goal, PlanChange
from ganger_master.estimators.speed import AllReduceModel
from ganger_master.planner.context import PlannerSettings, context_of
from ganger_master.planner.in_place_resize import NOTHING_UNDER_WAY, Resizing
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.optimus_stage import plan_optimus
from ganger_master.planner.plan_pace import NONE_EXCLUDED, ExcludedJobs
from ganger_master.planner.rate_registry import ProgressReport, RateRegistry
from ganger_master.policies import policy_named
from ganger_master.policies.optimus_sizes import OptimusEstimate
from ganger_master.policies.trials import TrialPace
from ganger_master.rpc.planner_messages import live_job_from_wire, live_job_to_wire
from msgspec.structs import replace

POLICY = policy_named("optimus")
# A step is a second on one GPU, and half of that on two.
LINEAR = AllReduceModel(0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0)


class Weighed(World):
    """`left`: steps that each job is believed to have left."""

    capabilities = replace(RESIZABLE, resize_divides=0)

    def __init__(self, nodes: int = 1) -> None:
        super().__init__(nodes)
        self.left: dict[int, float] = {}
        self.resizing = NOTHING_UNDER_WAY

    def believed(self, jobs: Sequence[tuple[JobRecord, Gang | None]]) -> list[OptimusEstimate]:
        return [OptimusEstimate(self.left.get(job.number, 1_000.0), is_young=False, speed=LINEAR) for job, _ in jobs]

    def changes(self, may_stop: bool = True, kept_out: ExcludedJobs = NONE_EXCLUDED) -> list[PlanChange]:
        """Of a pass, all of which must be approved."""
        table = LiveTable()
        for job in self.state.jobs.values():
            message = scheduling_pb2.LiveJob()
            live_job_to_wire(job, self.state.gangs.get(job.epoch), message)
            table.put(*live_job_from_wire(scheduling_pb2.LiveJob.FromString(message.SerializeToString())))
        view = self.state.view.copy()
        rows = list(view.rows())
        found = plan_optimus(
            context_of(
                POLICY,
                table,
                CapacityIndex(view),
                self.now,
                settings=PlannerSettings(resize_s=0.0),
                order=POLICY.order,
                rates=SimpleNamespace(believed=lambda gpus_per_node: self.believed, resize_s=None),
                may_preempt=may_stop,
                excluded=kept_out,
                resizing=self.resizing,
            )
        )
        assert [replace(row, version=0) for row in view.rows()] == [replace(row, version=0) for row in rows]
        answer = self.step(ProposePlan(found.changes))
        assert isinstance(answer, PlanAnswer)
        assert all(verdict.approved for verdict in answer.verdicts), answer
        assert found.resizing is not None
        self.resizing = found.resizing
        return list(found.changes)

    def proposed(self, may_stop: bool = True, kept_out: ExcludedJobs = NONE_EXCLUDED) -> list[tuple[str, int, int]]:
        return [(one.kind, one.number, devices_of(one.claims)) for one in self.changes(may_stop, kept_out)]

    def rests(self, number: int) -> None:
        """Its old world has seen its devices free."""
        self.seen(number, self.job(number).next_epoch, ObservedPhase.PREPARED)
        self.seen(number, self.job(number).epoch, ObservedPhase.PARKED, 40)

    def goes_on(self, number: int, rested: bool = False) -> None:
        """Its daemons have brought it into its next world."""
        job = self.job(number)
        source, destination = job.epoch, job.next_epoch
        if not rested:
            self.rests(number)
        self.seen(number, destination, ObservedPhase.READY, 40)
        self.runs(number)
        self.gone(number, source)

    def alone(self, most: int = 4) -> int:
        """A job that has got all it can use."""
        number = self.submit(elastic(1, 1, most))
        assert self.proposed() == [("START", number, most)]
        self.runs(number)
        return number


class Reporting(Weighed):
    """What is believed comes from what jobs report: they step as fast as their GPUs let them, and their losses halve in
    so many passes of a hundred steps."""

    rates: ClassVar[dict[int, float]] = {1: 10.0, 2: 19.0, 3: 27.0, 4: 34.0}

    def __init__(self) -> None:
        super().__init__()
        self.measured = RateRegistry(TrialPace(settle_s=5.0, window_s=2.0, window_steps=5))
        self.measured.weighs_sizes = True
        self.halves: dict[int, float] = {}
        self.done: dict[int, float] = {}

    def believed(self, jobs: Sequence[tuple[JobRecord, Gang | None]]) -> list[OptimusEstimate]:
        return list(self.measured.believed(4)(jobs))

    def trains(self, seconds: int) -> None:
        for job in self.state.jobs.values():
            self.measured.put(job, self.state.gangs.get(job.epoch), 0, self.now)
        for _ in range(seconds):
            self.now += 1.0
            for number, job in self.state.jobs.items():
                if job.running_since:
                    gpus = self.state.gangs[job.epoch].devices
                    done = self.done[number] = self.done.get(number, 0.0) + self.rates[gpus]
                    loss = 1.0 / (done / 100 / self.halves[number] + 1.0) + 0.2
                    report = ProgressReport(int(done), self.now, loss=loss, passes=int(done) // 100)
                    self.measured.record(number, report, self.now)


def small(least: int = 1, most: int = 4) -> JobSpec:
    return elastic(least, least, most)


def test_a_running_job_shrinks_in_place_and_the_new_job_starts_once_it_has() -> None:
    drive = Weighed()
    old = drive.alone()
    new = drive.submit(small())
    (change,) = drive.changes()
    assert (change.kind, change.number, devices_of(change.claims)) == ("RESIZE", old, 2)
    assert change.purpose.goal is Goal.GIVE_BACK
    assert change.reason == "from 4 GPUs to 2: 4 steps/s with 4, 2 with 2, 1000 foreseen left"
    assert drive.proposed() == [], "its devices are not free yet, and no job is preempted for them"
    drive.rests(old)
    assert drive.proposed(may_stop=False) == [("START", new, 2)]
    drive.goes_on(old, rested=True)
    drive.runs(new)
    assert drive.proposed() == []
    assert (drive.job(old).gpus, drive.job(new).gpus, drive.resizing) == (2, 2, Resizing())


def test_the_job_with_more_to_gain_grows_between_intervals_onto_devices_that_the_other_returned() -> None:
    drive = Weighed()
    one, other = drive.submit(small()), drive.submit(small())
    assert sorted(drive.proposed()) == [("START", one, 2), ("START", other, 2)]
    for number in (one, other):
        drive.runs(number)
    drive.left = {one: 1_000.0, other: 20.0}
    assert drive.proposed() == [("RESIZE", other, 1)]
    assert drive.proposed(may_stop=False) == [], "there is no room yet"
    drive.rests(other)
    (change,) = drive.changes(may_stop=False)
    assert (change.kind, change.number, devices_of(change.claims)) == ("RESIZE", one, 3)
    assert change.reason == "from 2 GPUs to 3: 2 steps/s with 2, 3 with 3, 1000 foreseen left"
    drive.goes_on(other, rested=True)
    drive.goes_on(one)
    assert drive.proposed() == []
    assert (drive.job(one).gpus, drive.job(other).gpus, drive.resizing) == (3, 1, Resizing())


def test_devices_kept_for_a_growing_job_go_to_no_new_job_before_the_next_interval() -> None:
    drive = Weighed()
    one, other = drive.submit(small()), drive.submit(small(2, 4))
    drive.left = {one: 20.0, other: 20.0}
    drive.proposed()
    for number in (one, other):
        drive.runs(number)
    drive.left = {one: 20.0, other: 1_000.0}
    assert drive.proposed() == [("RESIZE", one, 1)]
    drive.submit(small())
    drive.rests(one)
    assert drive.proposed(may_stop=False) == [("RESIZE", other, 3)]
    drive.goes_on(one, rested=True)
    drive.goes_on(other)
    assert drive.proposed() == [("RESIZE", other, 2)], "now it counts"


def test_a_job_grows_at_once_onto_free_devices() -> None:
    drive = Weighed()
    number = drive.running(elastic(1, 1, 4))
    (change,) = drive.changes()
    assert (change.kind, devices_of(change.claims), change.purpose.goal) == ("RESIZE", 4, Goal.GROW)
    assert drive.proposed() == [], "it is on its way"
    drive.goes_on(number)
    assert drive.proposed() == []


def test_a_number_of_ranks_that_does_not_divide_the_batch_is_passed_over() -> None:
    drive = Weighed(2)
    drive.capabilities = RESIZABLE
    drive.running(elastic(1, 1, 5))
    assert [gpus for _, _, gpus in drive.proposed()] == [4], "12 samples are not shared by five"


def test_a_job_that_is_not_elastic_keeps_its_size_and_an_elastic_one_grows_beside_it() -> None:
    drive = Weighed()
    fixed = drive.running(job_of(2))
    number = drive.running(elastic(1, 1, 4))
    assert drive.proposed() == [("RESIZE", number, 2)]
    assert drive.job(fixed).gpus == 2


def test_a_change_that_was_refused_is_not_waited_for() -> None:
    resizing = Resizing({1: 4, 2: 1}, frozenset({2}), {2: ()})
    assert resizing.without([2]) == Resizing({1: 4})
    assert resizing.without([1]) == Resizing({2: 1}, frozenset({2}), {2: ()})


def test_after_a_planner_was_lost_no_job_is_preempted_while_a_resize_is_under_way() -> None:
    drive = Weighed()
    old = drive.alone()
    new = drive.submit(small(2, 2))
    assert drive.proposed() == [("RESIZE", old, 2)]
    drive.resizing = NOTHING_UNDER_WAY
    assert drive.proposed() == [], "what it will leave is unknown"
    drive.rests(old)
    assert drive.proposed() == [("START", new, 2)]


def test_a_change_that_a_person_asked_for_is_let_be() -> None:
    drive = Weighed()
    number = drive.alone()
    drive.submit(small())
    drive.step(ResizeJob(number, 3))
    assert drive.proposed() == []


def test_a_change_that_came_to_nothing_is_weighed_anew_at_the_next_interval() -> None:
    drive = Weighed()
    number = drive.running(elastic(1, 1, 4))
    drive.proposed()
    drive.fails(number, drive.job(number).next_epoch)
    assert not drive.job(number).next_epoch
    assert drive.proposed(may_stop=False) == []
    assert drive.proposed() == [("RESIZE", number, 4)]


def test_by_reports_the_job_with_most_left_grows_and_a_new_job_has_its_least_until_it_is_measured() -> None:
    drive = Reporting()
    # A pass lowers the loss by less than that after five passes, and after eighty.
    soon = drive.submit(replace(small(), least_decrease=0.05))
    late = drive.submit(replace(small(), least_decrease=0.001))
    drive.halves = {soon: 2.0, late: 10.0}
    assert drive.proposed() == [("START", soon, 1), ("START", late, 1)], "nothing is known of them yet"
    for number in (soon, late):
        drive.runs(number)
    drive.trains(10)
    assert drive.proposed() == []
    drive.trains(35)
    (change,) = drive.changes()
    assert (change.kind, change.number, devices_of(change.claims)) == ("RESIZE", late, 3)
    assert change.reason.startswith("from 1 GPU to 3: 10 steps/s with 1, ")
    assert change.reason.endswith(" foreseen left")
    drive.goes_on(late)
    drive.trains(30)
    assert drive.measured.by_gpus(late) == {1: 10.0, 3: 27.0}
    new = drive.submit(replace(small(), least_decrease=0.02))
    assert drive.proposed() == [("RESIZE", late, 2)]
    drive.rests(late)
    assert drive.proposed(may_stop=False) == [("START", new, 1)]


def test_room_that_is_not_on_its_way_is_not_kept_from_newcomers() -> None:
    drive = Weighed()
    number = drive.running(elastic(1, 1, 4))
    drive.resizing = Resizing({number: 4})
    drive.running(job_of(2))
    new = drive.submit(small())
    assert drive.proposed(may_stop=False) == [("START", new, 1)]
    assert drive.resizing == Resizing()


def test_a_job_of_a_migration_plan_does_not_grow_meanwhile() -> None:
    drive = Weighed()
    drive.running(elastic(1, 1, 4))
    assert drive.proposed(kept_out=ExcludedJobs(not_stopped={1})) == []
