"""Optimus's pass over a real state: which jobs stop for another size, and with how many GPUs jobs start."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from core.drive import ALL_LEVELS, GIB, Drive
from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.resources import Locality, LocalityLevel, Role, TaskShape
from ganger_master.core.answers import PlanAnswer
from ganger_master.core.commands import ObservedGang, ProposePlan
from ganger_master.core.gang_model import Gang, ObservedPhase
from ganger_master.core.job_model import Capabilities, JobRecord
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.plan_changes import claims_in
from ganger_master.estimators.convergence import StepsLeftEstimate
from ganger_master.estimators.speed import AllReduceModel
from ganger_master.planner.context import PlanDraft, PlannerSettings, context_of
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.optimus_stage import plan_optimus
from ganger_master.policies import policy_named
from ganger_master.policies.optimus_sizes import OptimusEstimate, first_sizes, steps_left
from msgspec.structs import replace

RESIZED = replace(ALL_LEVELS, resize=True)
POLICY = policy_named("optimus")
# A step is a second on one GPU, and half of that on two.
LINEAR = AllReduceModel(0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0)


def spec(gpus: int, least: int = 0, most: int = 0, per_task: int = 1) -> JobSpec:
    role = Role("worker", gpus // per_task, TaskShape(per_task, 1_000, GIB))
    return JobSpec(("train",), (role,), gpus_min=least, gpus_max=most, locality=Locality(LocalityLevel.NODE))


class Grown(Drive):
    """`left`: steps that each job is believed to have left."""

    def __init__(self, nodes: int = 1, capabilities: Capabilities = RESIZED) -> None:
        super().__init__(nodes)
        self.capabilities = capabilities
        self.left: dict[int, float] = {}

    def report(self, gang: Gang, phase: ObservedPhase, stop_step: int = 0) -> ObservedGang:
        return replace(super().report(gang, phase, stop_step), capabilities=self.capabilities)

    def believed(self, jobs: Sequence[tuple[JobRecord, Gang | None]]) -> list[OptimusEstimate]:
        return [OptimusEstimate(self.left.get(job.number, 1_000.0), is_young=False, speed=LINEAR) for job, _ in jobs]

    def found(self, may_stop: bool = True, resize_s: float = 0.0) -> PlanDraft:
        table = LiveTable()
        for job in self.state.jobs.values():
            table.put(job, self.state.gangs.get(job.epoch))
        view = self.state.view.copy()
        rows = list(view.rows())
        asked = [
            plan_optimus(
                context_of(
                    POLICY,
                    table,
                    CapacityIndex(view),
                    self.now,
                    settings=PlannerSettings(resize_s=resize_s),
                    order=POLICY.order,
                    rates=SimpleNamespace(believed=lambda gpus_per_node: self.believed, resize_s=None),
                    may_preempt=may_stop,
                )
            )
            for _ in range(2)
        ]
        assert [replace(row, version=0) for row in view.rows()] == [replace(row, version=0) for row in rows]
        assert asked[0].changes == asked[1].changes, "asked twice it says the same"
        return asked[0]

    def proposed(self, may_stop: bool = True, resize_s: float = 0.0) -> list[tuple[str, int, int]]:
        """What a pass proposes, all of which must be approved: kind, job, GPUs."""
        changes = self.found(may_stop, resize_s).changes
        answer = self.step(ProposePlan(changes))
        assert isinstance(answer, PlanAnswer)
        assert all(verdict.approved for verdict in answer.verdicts), answer
        return [(one.kind, one.number, sum(c.device_mask.bit_count() for c in claims_in(one))) for one in changes]

    def rests(self, number: int) -> None:
        """Its gang is gone, its checkpoint written."""
        epoch = self.job(number).epoch
        nodes = self.state.gangs[epoch].nodes
        self.seen(number, epoch, ObservedPhase.PARKED, stop_step=5)
        for node in nodes:
            self.seen_without(node, number)


def test_a_job_alone_gets_all_that_helps_it() -> None:
    drive = Grown()
    number = drive.submit(spec(1, 1, 8))
    assert drive.proposed() == [("START", number, 4)]
    drive.runs(number)
    assert drive.proposed() == []


def test_a_running_job_shrinks_for_a_new_one_and_both_start_with_their_sizes() -> None:
    drive = Grown()
    old = drive.submit(spec(1, 1, 8))
    drive.proposed()
    drive.runs(old)
    new = drive.submit(spec(1, 1, 8))
    assert drive.found(may_stop=False).changes == ()
    assert drive.proposed() == [("SUSPEND", old, 0)]
    assert drive.proposed() == [], "what is going is waited for"
    drive.rests(old)
    assert sorted(drive.proposed(may_stop=False)) == [("START", old, 2), ("START", new, 2)]


def test_the_job_with_most_steps_left_gets_most_gpus() -> None:
    drive = Grown()
    short, long = drive.submit(spec(1, 1, 4)), drive.submit(spec(1, 1, 4))
    drive.left = {short: 10.0, long: 1_000.0}
    assert sorted(drive.proposed()) == [("START", short, 1), ("START", long, 3)]


def test_whole_tasks_are_given() -> None:
    drive = Grown()
    number = drive.submit(spec(2, 2, 8, per_task=2))
    drive.submit(spec(1))
    assert ("START", number, 2) in drive.proposed()


def test_a_job_that_cannot_resume_with_another_size_keeps_its_own() -> None:
    drive = Grown(capabilities=ALL_LEVELS)
    number = drive.submit(spec(1, 1, 2))
    drive.proposed()
    drive.runs(number)
    waiting = drive.submit(spec(3))
    assert drive.proposed() == []
    assert drive.found().line.tolist() == [waiting]


def test_a_change_that_saves_less_than_it_takes_is_not_made() -> None:
    drive = Grown()
    number = drive.submit(spec(2, 1, 8))
    drive.left = {number: math.nan}
    assert drive.proposed() == [("START", number, 1)], "nothing is known yet"
    drive.runs(number)
    # 1,000 steps take 1,000 s with one GPU, 250 s with four.
    drive.left = {number: 1_000.0}
    assert drive.found(resize_s=800.0).changes == ()
    assert drive.proposed(resize_s=700.0) == [("SUSPEND", number, 0)]


def test_a_gang_that_fits_nowhere_takes_as_many_as_do() -> None:
    drive = Grown(2)
    small = [drive.submit(spec(1)), drive.submit(spec(3))]
    for number in small:
        drive.start(number)
        drive.runs(number)
    number = drive.submit(spec(1, 1, 4))
    free = [mask.bit_count() for mask in drive.state.view.free]
    assert drive.proposed(may_stop=False) == [("START", number, max(free))]
    drive.runs(number)
    assert drive.found().changes == (), "four would still fit nowhere"


def test_the_oldest_job_is_not_delayed_by_a_growing_one() -> None:
    drive = Grown()
    large = drive.submit(spec(4))
    grown = drive.submit(spec(1, 1, 4))
    assert drive.proposed() == [("START", large, 4)]
    assert drive.found().line.tolist() == [grown]


@pytest.mark.parametrize(("least", "most", "each"), [(1, 16, 1), (2, 2, 1), (4, 64, 4), (3, 5, 1)])
def test_new_jobs_are_tried_with_sizes_that_they_accept(least: int, most: int, each: int) -> None:
    sizes = first_sizes(least, most, each)
    assert (sizes[0], sizes[-1]) == (least, most)
    assert all(size % each == 0 for size in sizes)
    assert len(sizes) <= 8


def test_without_losses_a_job_is_taken_to_need_twenty_epochs() -> None:
    assert steps_left(None, 5.0, 10.0) == (200.0, True)
    assert steps_left(StepsLeftEstimate(math.inf, 30.0, math.inf), 5.0, 10.0) == (200.0, True)


def test_a_converged_job_that_continues_has_one_epoch_left() -> None:
    assert steps_left(StepsLeftEstimate(100.0, 90.0, 120.0), 40.0, 10.0) == (60.0, False)
    assert steps_left(StepsLeftEstimate(100.0, 90.0, 120.0), 95.0, 10.0) == (10.0, False)
    assert steps_left(StepsLeftEstimate(100.0, 20.0, 900.0), 40.0, 10.0) == (60.0, True)
