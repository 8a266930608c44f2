"""Optimus's pass over jobs of parameter servers and workers: both numbers by marginal gain, one restart for both."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from core.drive import job_of
from core.test_role_sizes import ELASTIC, RESHARDED, RoleWorld, roles
from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.resources import tasks_of
from ganger_master.core.answers import PlanAnswer
from ganger_master.core.commands import ProposePlan
from ganger_master.core.gang_model import Gang
from ganger_master.core.job_model import JobRecord
from ganger_master.core.plan_changes import Goal, PlanChange, SuspendChange, claims_in
from ganger_master.estimators.server_speed import ServerSpeed, UpdateMode
from ganger_master.estimators.speed import AllReduceModel
from ganger_master.planner.context import PlannerSettings, context_of
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.optimus_stage import plan_optimus
from ganger_master.planner.rate_registry import RateRegistry
from ganger_master.planner.size_trials import TriedJob, pinned_tasks
from ganger_master.policies import policy_named
from ganger_master.policies.optimus_sizes import NOTHING, OptimusEstimate
from msgspec.structs import replace

POLICY = policy_named("optimus")
# Half of a step is computed, half of it transferred: workers and servers help alike.
BOTH = ServerSpeed(UpdateMode.SYNCHRONOUS, (0.5, 0.0, 0.5, 0.0, 0.0, 0.0))
# Servers make no difference.
COMPUTED = ServerSpeed(UpdateMode.SYNCHRONOUS, (1.0, 0.01, 0.0, 0.0, 0.0, 0.0))
# More tasks of either kind only slow it.
SLOWED = ServerSpeed(UpdateMode.SYNCHRONOUS, (0.0, 0.5, 0.0, 0.5, 0.5, 0.0))
LINEAR = AllReduceModel(0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0)


class Sized(RoleWorld):
    """`speeds`: of jobs, by number; without one nothing is believed of a job. `tried`: measured sizes of all."""

    capabilities = replace(RESHARDED, role_divides=(0, 12))

    def __init__(self, nodes: int = 1) -> None:
        super().__init__(nodes)
        self.speeds: dict[int, ServerSpeed | AllReduceModel] = {}
        self.left = 1_000.0
        self.tried: tuple[tuple[int, int], ...] | None = None

    def believed(self, jobs: Sequence[tuple[JobRecord, Gang | None]]) -> list[OptimusEstimate]:
        return [
            NOTHING
            if (speed := self.speeds.get(job.number)) is None
            else OptimusEstimate(self.left, is_young=False, speed=speed, tried=self.tried)
            for job, _ in jobs
        ]

    def changes(self, may_stop: bool = True, resize_s: float = 5.0) -> tuple[PlanChange, ...]:
        table = LiveTable()
        for job in self.state.jobs.values():
            table.put(job, self.state.gangs.get(job.epoch))
        rates = SimpleNamespace(believed=lambda gpus_per_node: self.believed, resize_s=None)
        settings = PlannerSettings(resize_s=resize_s)
        context = context_of(
            POLICY, table, CapacityIndex(self.state.view.copy()), self.now,
            settings=settings, order=POLICY.order, rates=rates, may_preempt=may_stop,
        )  # fmt: skip
        return plan_optimus(context).changes

    def proposed(self, may_stop: bool = True, resize_s: float = 5.0) -> list[tuple[str, int, tuple[int, ...]]]:
        """What a pass proposes, all of which must be approved: kind, job, tasks by role."""
        changes = self.changes(may_stop, resize_s)
        answer = self.step(ProposePlan(changes))
        assert isinstance(answer, PlanAnswer)
        assert all(verdict.approved for verdict in answer.verdicts), answer
        return [(one.kind, one.number, tasks_of(claims_in(one))) for one in changes]


def test_a_job_of_unknown_speed_starts_with_the_least_tasks() -> None:
    drive = Sized()
    number = drive.submit(roles((2, 1, 3), (2, 1, 4)))
    assert drive.proposed() == [("START", number, (1, 1))]


def test_servers_and_workers_grow_alike_where_both_help_and_by_one_restart() -> None:
    drive = Sized()
    number = drive.running(ELASTIC)
    drive.speeds[number] = BOTH
    (stop,) = drive.changes()
    assert isinstance(stop, SuspendChange)
    assert stop.purpose.goal is Goal.RESIZE
    assert stop.reason.startswith("from ps=1 worker=1 to ps=3 worker=2: 1 to ")
    assert drive.proposed() == [("SUSPEND", number, ())]
    assert drive.proposed() == [], "what is going is waited for"
    drive.rests(number)
    assert drive.proposed(may_stop=False) == [("START", number, (3, 2))]
    drive.runs(number)
    assert drive.proposed() == []
    assert drive.job(number).preemptions == 0


def test_only_workers_grow_where_servers_make_no_difference() -> None:
    drive = Sized()
    number = drive.submit(ELASTIC)
    drive.speeds[number] = COMPUTED
    assert drive.proposed() == [("START", number, (1, 4))]


def test_tasks_that_slow_a_job_are_taken_away_only_if_that_is_worth_the_restart() -> None:
    drive = Sized()
    number = drive.running(roles((3, 1, 3), (1, 1, 4)))
    drive.speeds[number] = SLOWED
    assert drive.changes(resize_s=1_100.0) == ()
    assert drive.proposed(resize_s=900.0) == [("SUSPEND", number, ())]
    drive.rests(number)
    assert drive.proposed(may_stop=False) == [("START", number, (1, 1))]


def test_a_growth_that_saves_less_than_a_restart_takes_is_not_made() -> None:
    drive = Sized()
    number = drive.running(ELASTIC)
    drive.speeds[number], drive.left = BOTH, 4.0
    assert drive.changes() == ()


def test_workers_that_do_not_divide_the_batch_are_left_out() -> None:
    drive = Sized()
    drive.capabilities = replace(RESHARDED, role_divides=(0, 2))
    number = drive.running(ELASTIC)
    drive.speeds[number] = COMPUTED
    drive.proposed()
    drive.rests(number)
    assert drive.proposed() == [("START", number, (1, 2))]


def test_a_job_whose_state_cannot_start_in_other_ranks_keeps_its_tasks() -> None:
    drive = Sized()
    drive.capabilities = replace(RESHARDED, reshard=False)
    number = drive.running(ELASTIC)
    drive.speeds[number] = BOTH
    assert drive.changes() == ()


def test_workers_of_a_running_job_make_room_for_a_newcomer_which_gets_its_least() -> None:
    drive = Sized()
    old = drive.running(roles((1, 1, 3), (4, 1, 4)))
    new = drive.submit(ELASTIC)
    drive.speeds[old] = COMPUTED
    assert drive.proposed() == [("SUSPEND", old, ())]
    drive.rests(old)
    started = {number: tasks for _, number, tasks in drive.proposed(may_stop=False)}
    assert started == {old: (1, 3), new: (1, 1)}


def test_gpus_go_to_the_job_that_gains_most_by_them_of_either_kind_of_training() -> None:
    drive = Sized()
    served = drive.submit(ELASTIC)
    reduced = drive.submit(replace(job_of(1), gpus_min=1, gpus_max=4))
    drive.speeds = {served: SLOWED, reduced: LINEAR}
    assert sorted(drive.proposed(), key=lambda one: one[1]) == [("START", served, (1, 1)), ("START", reduced, (3,))]


def test_a_gang_that_fits_nowhere_as_decided_starts_with_its_least() -> None:
    drive = Sized(nodes=2)
    for gpus in (3, 3):
        drive.running(job_of(gpus))
    spec = roles((1, 1, 1), (1, 1, 4))
    number = drive.submit(replace(spec, locality=replace(spec.locality, widest=spec.locality.widest.NODE)))
    drive.speeds[number] = COMPUTED
    assert drive.proposed() == [("START", number, (1, 1))]


def test_a_long_job_is_tried_with_other_tasks_before_its_size_is_decided() -> None:
    drive = Sized()
    number = drive.running(ELASTIC)
    drive.speeds[number], drive.left, drive.tried = SLOWED, 10_000.0, ((1, 1),)
    (stop,) = drive.changes()
    assert stop.reason.endswith(", a trial")
    drive.left = 10.0
    assert drive.changes() == (), "what is left is not worth it"
    drive.left, drive.tried = 10_000.0, ((1, 1), (4, 3), (2, 1))
    assert drive.changes() == (), "it has been tried enough"
    drive.tried = ((1, 1),)
    drive.submit(job_of(4))
    assert drive.changes() == (), "another job waits"


def test_a_job_keeps_its_tasks_until_it_has_a_speed_and_workers_that_no_job_wants() -> None:
    drive = Sized()
    number = drive.running(roles((2, 1, 3), (3, 1, 4)))
    assert drive.changes() == (), "nothing is known of it"
    # Two workers are as fast as three.
    drive.speeds[number] = ServerSpeed(UpdateMode.SYNCHRONOUS, (0.0, 1.0, 0.0, 0.0, 0.0, 0.0))
    assert drive.changes() == ()
    new = drive.submit(job_of(2))
    assert drive.proposed() == [("SUSPEND", number, ())]
    drive.rests(number)
    assert {one: tasks for _, one, tasks in drive.proposed(may_stop=False)} == {number: (1, 1), new: (2,)}


def test_the_pause_of_a_restart_is_measured_and_weighed_from_then_on() -> None:
    drive, registry = Sized(), RateRegistry()
    number = drive.running(ELASTIC)

    def put(at_s: float) -> None:
        job = drive.job(number)
        running_since = at_s if job.running_since else 0.0
        registry.put(replace(job, running_since=running_since), drive.state.gangs.get(job.epoch), 0, at_s)

    put(1.0)
    drive.speeds[number] = BOTH
    drive.proposed()
    put(100.0)
    assert registry.resize_s is None
    drive.rests(number)
    put(103.0)
    drive.proposed(may_stop=False)
    drive.runs(number)
    put(107.5)
    assert registry.resize_s == 7.5


ESTIMATE = OptimusEstimate(10_000.0, is_young=False, speed=LINEAR, tried=((1, 0),))


def tried(present: int = 1, stretch_s: float = 10.0, free: int = 7, **estimate: object) -> TriedJob:
    ranges = range(1, 9), (0,)
    own = OptimusEstimate(**{**{name: getattr(ESTIMATE, name) for name in ESTIMATE.__slots__}, **estimate})  # type: ignore[arg-type]
    return TriedJob(own, (present, 0), ranges, 5.0, stretch_s, 1.0, free)


def test_a_size_under_measurement_is_kept_until_it_is_measured_or_shows_no_rate() -> None:
    assert pinned_tasks({1: tried(), 2: tried(present=3)}) == {2: (3, 0)}
    assert pinned_tasks({1: tried(present=3, stretch_s=100.0)}) != {1: (3, 0)}


@pytest.mark.parametrize(("known", "expected"), [((1,), 8), ((1, 8), 3), ((1, 4), 2)])
def test_the_next_size_is_far_from_those_that_were_measured(known: tuple[int, ...], expected: int) -> None:
    assert tried(tried=tuple((gpus, 0) for gpus in known)).next_size == (expected, 0)


def test_trials_use_free_gpus_only_and_none_begins_without_any() -> None:
    assert tried(free=2).next_size == (3, 0)
    assert pinned_tasks({1: tried(free=0)}) == {}
