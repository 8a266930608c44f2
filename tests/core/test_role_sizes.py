"""Jobs whose roles have ranges: stopped with a checkpoint, they start from it with other numbers of tasks."""

from __future__ import annotations

import pytest
from core.drive import ALL_LEVELS, GIB, job_of
from core.elastic_worlds import World, elastic
from ganger.cluster.placement import candidates
from ganger.cluster.resources import Claim, Role, TaskShape, tasks_of
from ganger.injob.page_layout import EXIT_NO_STATE
from ganger.job_state import JobState
from ganger.v1 import scheduling_pb2
from ganger_master.core.answers import JobAnswer, PlanAnswer, Refused
from ganger_master.core.commands import ProposePlan, ResizeJob, ResumeJob, SubmitJob, SuspendJob
from ganger_master.core.elastic import why_not_tasks
from ganger_master.core.gang_model import GangIntent, ObservedPhase, Outcome, OutcomeKind
from ganger_master.core.job_model import Checkpoint, SuspendLevel
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.plan_changes import Goal, Purpose, StartChange, SuspendChange
from ganger_master.rpc.job_messages import job_to_wire
from ganger_master.rpc.planner_messages import live_job_from_wire, live_job_to_wire
from msgspec.structs import replace

RESHARDED = replace(ALL_LEVELS, reshard=True, role_divides=(0, 12))


def roles(servers: tuple[int, int, int], workers: tuple[int, int, int]) -> JobSpec:
    """Each role: its tasks, and the range that they may have."""
    (count, least, most), (others, fewest, largest) = servers, workers
    ps = Role("ps", count, TaskShape(0, 1_000, GIB), least, most)
    worker = Role("worker", others, TaskShape(1, 2_000, GIB), fewest, largest)
    return replace(job_of(1), roles=(ps, worker), gpu_memory_bytes=GIB // 8)


ELASTIC = roles((1, 1, 3), (1, 1, 4))


class RoleWorld(World):
    capabilities = RESHARDED

    def tasks(self, number: int) -> tuple[int, ...]:
        return tasks_of(self.state.gangs[self.job(number).epoch].claims)

    def rests(self, number: int) -> None:
        """Its ranks wrote a checkpoint and ended, and its nodes report nothing of them any more."""
        job = self.job(number)
        gang = self.state.gangs[job.epoch]
        ended = replace(
            self.report(gang, ObservedPhase.ENDED),
            outcome=Outcome(OutcomeKind.YIELDED),
            checkpoint=Checkpoint(7, gang.epoch, f"epoch-{gang.epoch}"),
        )
        for node in gang.nodes:
            self.observe(node, *self.others(node, gang.epoch), ended)
        for node in gang.nodes:
            self.observe(node, *self.others(node, gang.epoch))

    def claims_for(self, number: int, tasks: tuple[int, ...]) -> tuple[Claim, ...]:
        shape = replace(self.job(number).shape, roles=self.job(number).spec.with_tasks(tasks).roles)
        return candidates(self.state.view, shape, waited_s=1e9).candidates[0]

    def refusal(self, number: int, **tasks: int) -> str:
        refused = self.step(ResizeJob(number, 0, tasks=tuple(tasks.items())))
        assert isinstance(refused, Refused)
        return refused.message


def test_a_running_job_stops_with_a_checkpoint_and_starts_with_the_tasks_that_it_was_given() -> None:
    drive = RoleWorld()
    number = drive.running(ELASTIC)
    assert drive.step(ResizeJob(number, 0, "", (("ps", 3), ("worker", 3)))) == JobAnswer(number)
    gang = drive.state.gangs[drive.job(number).epoch]
    assert (gang.intent, gang.park_level) == (GangIntent.PARK, SuspendLevel.CHECKPOINT)
    drive.rests(number)
    assert (drive.job(number).state, drive.job(number).gpus) == (JobState.PENDING, 3)
    # It was not preempted, and its user has not suspended it.
    assert drive.job(number).preemptions == 0
    drive.start(number)
    assert drive.tasks(number) == (3, 3)
    wanted = next(one for one in drive.state.desired.of("n1").gangs if one.job == number)
    assert [role.tasks for role in wanted.spec.roles] == [3, 3]
    assert [member.ranks for member in wanted.members] == [tuple(range(6))]
    assert wanted.restore.checkpoint_path == "epoch-1"
    kinds = [row.kind for row in drive.history]
    assert kinds.index("size_chosen") < kinds.index("suspend_ordered")


def test_a_role_that_is_not_named_keeps_its_tasks_and_a_second_resize_counts_from_the_first() -> None:
    drive = RoleWorld()
    number = drive.running(ELASTIC)
    drive.step(ResizeJob(number, 0, "", (("ps", 3),)))
    drive.rests(number)
    drive.step(ResizeJob(number, 0, "", (("worker", 4),)))
    drive.start(number)
    assert drive.tasks(number) == (3, 4)
    # After a crash it starts with as many.
    drive.runs(number)
    drive.fails(number, drive.job(number).epoch)
    assert drive.job(number).tasks_by_role == (3, 4)


def test_users_and_planners_see_the_tasks_that_it_has_with_their_ranges() -> None:
    drive = RoleWorld()
    number = drive.running(ELASTIC)
    drive.step(ResizeJob(number, 0, "", (("ps", 3), ("worker", 2))))
    seen = []
    for _ in range(2):
        job = drive.job(number)
        gang = drive.state.gangs.get(job.epoch)
        live = scheduling_pb2.LiveJob()
        live_job_to_wire(job, gang, live)
        planned, _ = live_job_from_wire(live)
        assert planned.spec.roles == job.spec_now.roles
        assert [(role.tasks_min, role.tasks_max) for role in planned.spec.roles] == [(1, 3), (1, 4)]
        seen.append((planned.tasks_by_role, [role.tasks for role in job_to_wire(job, gang, None).spec.roles]))
        if gang is not None:
            drive.rests(number)
    assert seen == [((1, 1), [1, 1]), ((3, 2), [3, 2])]
    assert why_not_tasks(planned, (3, 4)) == ""
    assert "role ps has 1 to 3 tasks" in why_not_tasks(planned, (4, 4))


@pytest.mark.parametrize(
    ("tasks", "why"),
    [
        ({"ps": 4}, "role ps has 1 to 3 tasks, not 4"),
        ({"worker": 0}, "role worker has 1 to 4 tasks, not 0"),
        ({"server": 2}, "it has no role 'server': its roles are ps, worker"),
        ({"ps": 1, "worker": 1}, "it has ps=1 worker=1"),
        ({}, "name the tasks of its roles: `ganger resize 1 ps=1 worker=1`"),
    ],
)
def test_numbers_that_it_cannot_have_are_refused_and_it_runs_on(tasks: dict[str, int], why: str) -> None:
    drive = RoleWorld()
    number = drive.running(ELASTIC)
    assert why in drive.refusal(number, **tasks)
    assert drive.state.gangs[drive.job(number).epoch].intent is GangIntent.RUN


def test_workers_that_do_not_divide_the_batch_are_refused_and_servers_need_not() -> None:
    drive = RoleWorld()
    drive.capabilities = replace(RESHARDED, role_divides=(0, 4))
    number = drive.running(ELASTIC)
    assert "3 tasks of role worker do not divide its global batch (4 samples)" in drive.refusal(number, worker=3)
    assert drive.step(ResizeJob(number, 0, "", (("ps", 3), ("worker", 4)))) == JobAnswer(number)


def test_a_job_is_not_stopped_where_its_new_size_has_no_room() -> None:
    drive = RoleWorld()
    number = drive.running(ELASTIC)
    drive.running(job_of(2))
    assert "there is no room for ps=1 worker=3" in drive.refusal(number, worker=3)
    # What it holds itself counts as free.
    assert drive.step(ResizeJob(number, 0, "", (("worker", 2),))) == JobAnswer(number)


def test_a_job_that_cannot_bring_its_state_back_in_other_ranks_keeps_them() -> None:
    drive = RoleWorld()
    drive.capabilities = replace(ALL_LEVELS, missing={"RESIZE": "its log says why"})
    number = drive.running(ELASTIC)
    assert "with other numbers of tasks: its log says why" in drive.refusal(number, ps=2)


def test_a_job_of_fixed_roles_and_one_that_is_suspended_in_memory_are_not_resized() -> None:
    drive = RoleWorld()
    fixed = drive.running(roles((1, 0, 0), (1, 0, 0)))
    assert "its roles have no ranges" in drive.refusal(fixed, ps=2)
    number = drive.running(ELASTIC)
    drive.step(SuspendJob(number, SuspendLevel.PAUSE))
    drive.seen(number, drive.job(number).epoch, ObservedPhase.PARKED, stop_step=7)
    assert "resume it first" in drive.refusal(number, ps=2)


def test_a_resize_whose_checkpoint_cannot_be_written_leaves_the_job_as_it_was() -> None:
    drive = RoleWorld()
    number = drive.running(ELASTIC)
    drive.step(ResizeJob(number, 0, "", (("ps", 3),)))
    gang = drive.state.gangs[drive.job(number).epoch]
    parked = replace(drive.report(gang, ObservedPhase.PARKED, 7), level=SuspendLevel.PAUSE, trouble="disk full")
    drive.observe("n1", parked)
    job = drive.job(number)
    assert (job.state, job.trouble, job.tasks_chosen) == (JobState.HOLDING, "disk full", ())
    assert drive.state.gangs[job.epoch].intent is GangIntent.RUN


def test_a_suspend_of_a_job_that_is_resized_takes_nothing_back() -> None:
    drive = RoleWorld()
    number = drive.running(ELASTIC)
    drive.step(ResizeJob(number, 0, "", (("ps", 3),)))
    drive.step(SuspendJob(number))
    gang = drive.state.gangs[drive.job(number).epoch]
    assert (drive.job(number).state, gang.park_level) == (JobState.SUSPENDED, SuspendLevel.CHECKPOINT)
    drive.rests(number)
    drive.step(ResumeJob(number))
    drive.start(number)
    assert drive.tasks(number) == (3, 1)


def test_a_job_that_is_suspended_while_it_is_resized_keeps_its_size_if_its_checkpoint_cannot_be_written() -> None:
    drive = RoleWorld()
    number = drive.running(ELASTIC)
    drive.step(ResizeJob(number, 0, "", (("ps", 3),)))
    drive.step(SuspendJob(number, SuspendLevel.CHECKPOINT))
    gang = drive.state.gangs[drive.job(number).epoch]
    drive.observe(
        "n1", replace(drive.report(gang, ObservedPhase.PARKED, 7), level=SuspendLevel.PAUSE, trouble="disk full")
    )
    job = drive.job(number)
    assert (job.state, job.trouble, job.tasks_chosen) == (JobState.HOLDING, "disk full", ())


def test_a_job_whose_daemons_know_no_ranges_of_roles_keeps_its_size() -> None:
    drive = RoleWorld()
    drive.capabilities = replace(RESHARDED, resize=True, role_divides=())
    number = drive.running(ELASTIC)
    assert "a daemon of its nodes is older than the master" in drive.refusal(number, ps=2)
    # Once they are upgraded.
    drive.capabilities = RESHARDED
    drive.seen(number, drive.job(number).epoch, ObservedPhase.RUNNING)
    assert drive.step(ResizeJob(number, 0, "", (("ps", 2),))) == JobAnswer(number)


def test_a_job_that_does_not_come_back_with_its_new_tasks_can_have_the_former_ones() -> None:
    drive = RoleWorld()
    number = drive.running(ELASTIC)
    drive.step(ResizeJob(number, 0, "", (("ps", 3), ("worker", 3))))
    drive.rests(number)
    drive.start(number)
    # It has made no loader yet.
    drive.capabilities = replace(ALL_LEVELS, missing={"RESIZE": "its log says why"})
    drive.seen(number, drive.job(number).epoch, ObservedPhase.STARTING)
    gang = drive.state.gangs[drive.job(number).epoch]
    outcome = Outcome(OutcomeKind.FAILED, EXIT_NO_STATE, message="cannot restore: it does not fit")
    drive.observe("n1", replace(drive.report(gang, ObservedPhase.ENDED), outcome=outcome))
    drive.observe("n1")
    assert drive.job(number).state is JobState.SUSPENDED
    assert drive.step(ResizeJob(number, 0, "", (("ps", 1), ("worker", 1)))) == JobAnswer(number)
    drive.step(ResumeJob(number))
    drive.start(number)
    assert drive.tasks(number) == (1, 1)
    # What counts from the first step on is what it reports then.
    drive.runs(number)
    assert "its log says why" in drive.refusal(number, ps=2)


def test_an_only_role_whose_range_is_one_of_gpus_is_resized_by_gpus() -> None:
    drive = RoleWorld()
    number = drive.running(elastic(2, 1, 4))
    assert "it has a range of GPUs: `ganger resize 1 GPUS`" in drive.refusal(number, worker=3)


def test_a_plan_resizes_by_a_suspend_and_a_start_with_claims_of_other_numbers() -> None:
    drive = RoleWorld()
    number = drive.running(ELASTIC)
    stop = SuspendChange(
        number, drive.job(number).revision, level=SuspendLevel.CHECKPOINT, purpose=Purpose(Goal.RESIZE)
    )
    drive.step(ProposePlan((stop,)))
    drive.rests(number)
    for tasks, approved in (((2, 5), False), ((3, 4), True)):
        claims = drive.claims_for(number, tasks) if approved else ()
        change = StartChange(number, drive.job(number).revision, claims)
        answer = drive.step(ProposePlan((change,)))
        assert isinstance(answer, PlanAnswer)
        assert answer.verdicts[0].approved is approved
    assert (drive.tasks(number), drive.job(number).preemptions) == ((3, 4), 0)


def test_a_plan_does_not_start_a_job_with_numbers_outside_of_its_ranges() -> None:
    drive = RoleWorld(nodes=2)
    number = drive.submit(ELASTIC)
    answer = drive.step(ProposePlan((StartChange(number, 1, drive.claims_for(number, (4, 4))),)))
    assert isinstance(answer, PlanAnswer)
    assert "role ps has 1 to 3 tasks, not 4" in answer.verdicts[0].refusals[0].message


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        (roles((1, 2, 3), (1, 0, 0)), "spec.roles[0].tasks_max"),
        (roles((1, 0, 3), (1, 0, 0)), "spec.roles[0].tasks_max"),
        (roles((4, 1, 3), (1, 0, 0)), "spec.roles[0].tasks_max"),
        (replace(ELASTIC, nodes=1), "spec.nodes"),
        (replace(ELASTIC, gpus_min=1, gpus_max=4), "spec.gpus_max"),
        (roles((1, 1, 20_000), (1, 0, 0)), "spec.roles[0].tasks_max"),
    ],
)
def test_ranges_that_make_no_sense_are_refused_at_submission(spec: JobSpec, path: str) -> None:
    answer = RoleWorld().step(SubmitJob(spec, "uid"))
    assert isinstance(answer, Refused)
    assert [violation for violation, _ in answer.violations] == [path]
