"""Elastic jobs start with any number of devices that their spec accepts, unless an earlier attempt fixes it."""

from __future__ import annotations

import pytest
from core.drive import ALL_LEVELS, GIB, Drive, job_of
from core.elastic_worlds import World
from ganger.cluster.placement import candidates
from ganger.cluster.refusals import Reason
from ganger.cluster.resources import Claim, Role, TaskShape
from ganger.job_state import JobState
from ganger_master.core.accounting import Owner
from ganger_master.core.answers import JobAnswer, PlanAnswer, Refused
from ganger_master.core.commands import ObservedGang, ProposePlan, ResizeJob, ResumeJob, SubmitJob, SuspendJob
from ganger_master.core.explain import explain
from ganger_master.core.gang_model import ObservedPhase, Outcome, OutcomeKind
from ganger_master.core.job_model import Capabilities, Checkpoint, SuspendLevel
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.plan_changes import StartChange, SuspendChange
from ganger_master.core.settings import CoreSettings
from hypothesis import given
from hypothesis import strategies as some
from msgspec.structs import replace

RESIZED = replace(ALL_LEVELS, resize=True)
RESHARDED = replace(ALL_LEVELS, reshard=True, resize_divides=8)


def elastic(gpus: int, least: int, most: int, per_task: int = 1) -> JobSpec:
    role = Role("worker", gpus // per_task, TaskShape(per_task, 1_000 * per_task, GIB * per_task))
    return replace(job_of(gpus), roles=(role,), gpus_min=least, gpus_max=most)


def place(drive: Drive, number: int, gpus: int) -> tuple[Claim, ...]:
    """Claims that add up for so many devices, whether the job accepts them or not."""
    spec = drive.job(number).spec
    role = spec.roles[0]
    roles = (replace(role, tasks=gpus // role.shape.gpus),)
    shape = replace(spec, roles=roles).shape(drive.job(number).arena_bytes_per_device)
    found = candidates(drive.state.view, shape, waited_s=1e9).candidates
    return found[0] if found else ()


def start(drive: Drive, number: int, gpus: int) -> tuple[Reason, str] | None:
    """Why a plan that starts it with so many devices is refused."""
    job = drive.job(number)
    answer = drive.step(ProposePlan((StartChange(number, job.revision, place(drive, number, gpus)),)))
    assert isinstance(answer, PlanAnswer)
    (verdict,) = answer.verdicts
    return None if verdict.approved else (verdict.refusals[0].reason, verdict.refusals[0].message)


def suspend(drive: Drive, number: int, level: SuspendLevel) -> None:
    answer = drive.step(ProposePlan((SuspendChange(number, drive.job(number).revision, level=level),)))
    assert isinstance(answer, PlanAnswer)
    assert answer.verdicts[0].approved


def rests_on_storage(drive: Drive, number: int, capabilities: Capabilities) -> None:
    """Its gang has gone, with a checkpoint."""
    job = drive.job(number)
    gang = drive.state.gangs[job.epoch]
    ended = ObservedGang(
        number,
        job.uid,
        gang.epoch,
        ObservedPhase.ENDED,
        gang.master_sequence,
        stop_sequence=gang.stop_sequence,
        outcome=Outcome(OutcomeKind.YIELDED),
        checkpoint=Checkpoint(gang.epoch, gang.epoch, f"epoch-{gang.epoch}"),
        capabilities=capabilities,
    )
    for node in gang.nodes:
        others = drive.others(node, gang.epoch)
        drive.observe(node, *others, ended)
    for node in gang.nodes:
        drive.observe(node, *drive.others(node, gang.epoch))
    assert drive.job(number).state is JobState.PENDING


def test_a_plan_starts_an_elastic_job_with_any_size_that_it_accepts() -> None:
    for gpus in (1, 2, 3, 4):
        drive = Drive()
        number = drive.submit(elastic(2, 1, 4))
        assert start(drive, number, gpus) is None
        job = drive.job(number)
        assert (job.gpus, drive.state.gangs[job.epoch].devices) == (gpus, gpus)
        (wanted,) = drive.state.desired.of("n1").gangs
        assert [member.ranks for member in wanted.members] == [tuple(range(gpus))]


@pytest.mark.parametrize(("gpus", "least", "most", "per_task", "asked"), [(2, 2, 3, 1, 1), (2, 1, 3, 1, 4)])
def test_a_size_outside_of_its_bounds_is_refused_with_them(
    gpus: int, least: int, most: int, per_task: int, asked: int
) -> None:
    drive = Drive()
    number = drive.submit(elastic(gpus, least, most, per_task))
    refused = start(drive, number, asked)
    assert refused is not None
    assert refused[0] is Reason.CLAIM_MISMATCH
    assert f"({asked} claimed, at least {least}, at most {most}, {per_task} for each task)" in refused[1]


def test_whole_tasks_are_given() -> None:
    drive = Drive()
    number = drive.submit(elastic(2, 2, 4, per_task=2))
    job = drive.job(number)
    (claim,) = place(drive, number, 4)
    three = replace(claim, device_mask=0b111)
    answer = drive.step(ProposePlan((StartChange(number, job.revision, (three,)),)))
    assert isinstance(answer, PlanAnswer)
    assert not answer.verdicts[0].approved
    assert start(drive, number, 4) is None


def test_a_job_that_is_not_elastic_has_one_size() -> None:
    drive = Drive()
    number = drive.submit(job_of(2))
    assert start(drive, number, 1) is not None
    assert start(drive, number, 2) is None


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        (elastic(2, 0, 4), "spec.gpus_min"),
        (elastic(2, 3, 4), "spec.gpus_min"),
        (elastic(2, 1, 0), "spec.gpus_max"),
        (elastic(2, 1, 1), "spec.gpus_max"),
        (elastic(4, 2, 7, per_task=2), "spec.gpus_max"),
        (elastic(4, 3, 8, per_task=2), "spec.gpus_min"),
        (replace(elastic(2, 1, 4), nodes=1), "spec.nodes"),
        (replace(elastic(2, 1, 4), roles=(*elastic(2, 1, 4).roles, Role("ps", 1, TaskShape(0)))), "spec.gpus_max"),
    ],
)
def test_bounds_that_make_no_sense_are_refused_at_submission(spec: JobSpec, path: str) -> None:
    answer = Drive().step(SubmitJob(spec, "uid"))
    assert isinstance(answer, Refused)
    assert [violation for violation, _ in answer.violations] == [path]


def test_a_resizable_job_continues_from_its_checkpoint_with_another_size() -> None:
    drive = Drive()
    number = drive.submit(elastic(2, 1, 4))
    assert start(drive, number, 4) is None
    drive.runs(number)
    suspend(drive, number, SuspendLevel.CHECKPOINT)
    rests_on_storage(drive, number, RESIZED)
    assert drive.job(number).gpus == 2
    assert start(drive, number, 1) is None
    gang = drive.state.gangs[drive.job(number).epoch]
    assert (gang.devices, gang.restore.checkpoint_path) == (1, "epoch-1")


def test_a_sharded_job_continues_from_its_checkpoint_with_a_size_that_divides_its_batch() -> None:
    drive = Drive()
    number = drive.submit(elastic(2, 1, 4))
    assert start(drive, number, 4) is None
    drive.runs(number)
    suspend(drive, number, SuspendLevel.CHECKPOINT)
    rests_on_storage(drive, number, RESHARDED)
    refused = start(drive, number, 3)
    assert refused is not None
    assert "so many ranks do not divide its global batch" in refused[1]
    assert start(drive, number, 2) is None


class _ShardedJobs(World):
    capabilities = RESHARDED


def test_a_sharded_job_is_not_resized_as_it_runs_and_keeps_its_size_while_it_is_parked_in_arenas() -> None:
    drive = _ShardedJobs()
    number = drive.running(elastic(4, 1, 4))
    refused = drive.step(ResizeJob(number, 2))
    assert isinstance(refused, Refused)
    assert refused.reason == "LEVEL_UNAVAILABLE"
    drive.step(SuspendJob(number, SuspendLevel.OFFLOAD))
    drive.seen(number, drive.job(number).epoch, ObservedPhase.PARKED, stop_step=7)
    drive.step(ResumeJob(number))
    unable = start(drive, number, 2)
    assert unable is not None
    assert "it rests on its devices" in unable[1]


@pytest.mark.parametrize(("capabilities", "gpus"), [(RESIZED, 3), (RESHARDED, 4)])
def test_a_job_that_rests_on_storage_starts_with_the_size_that_was_chosen_for_it(
    capabilities: Capabilities, gpus: int
) -> None:
    drive = Drive()
    number = drive.submit(elastic(2, 1, 4))
    assert start(drive, number, 1) is None
    drive.runs(number)
    suspend(drive, number, SuspendLevel.CHECKPOINT)
    rests_on_storage(drive, number, capabilities)
    assert drive.step(ResizeJob(number, gpus)) == JobAnswer(number)
    assert (drive.job(number).gpus, drive.job(number).shape.gpus) == (gpus, gpus)
    drive.start(number)
    assert drive.state.gangs[drive.job(number).epoch].devices == gpus


@pytest.mark.parametrize(
    ("capabilities", "gpus", "why"),
    [
        (RESHARDED, 3, "do not divide its global batch (8 samples)"),
        (RESHARDED, 5, "it accepts 1 to 4 GPUs, not 5"),
        (ALL_LEVELS, 3, "its checkpoint cannot be brought back with another number"),
    ],
)
def test_a_size_that_the_checkpoint_does_not_allow_is_not_chosen(
    capabilities: Capabilities, gpus: int, why: str
) -> None:
    drive = Drive()
    number = drive.submit(elastic(2, 1, 4))
    assert start(drive, number, 1) is None
    drive.runs(number)
    suspend(drive, number, SuspendLevel.CHECKPOINT)
    rests_on_storage(drive, number, capabilities)
    refused = drive.step(ResizeJob(number, gpus))
    assert isinstance(refused, Refused)
    assert refused.reason == "RESIZE_REFUSED"
    assert why in refused.message


def test_a_size_chosen_before_the_first_start_is_that_of_the_start() -> None:
    drive = Drive()
    number = drive.submit(elastic(2, 1, 4))
    drive.step(ResizeJob(number, 3))
    drive.start(number)
    assert (drive.job(number).gpus, drive.state.gangs[drive.job(number).epoch].devices) == (3, 3)


def test_a_job_that_is_not_resizable_keeps_the_size_of_its_checkpoint() -> None:
    drive = Drive()
    number = drive.submit(elastic(2, 1, 4))
    assert start(drive, number, 4) is None
    drive.runs(number)
    suspend(drive, number, SuspendLevel.CHECKPOINT)
    rests_on_storage(drive, number, ALL_LEVELS)
    assert drive.job(number).shape.gpus == 4
    for gpus in (1, 2, 3):
        refused = start(drive, number, gpus)
        assert refused is not None
        assert "its checkpoint cannot be brought back with another number" in refused[1]
    # Its own scheduler receives the size that it may have.
    drive.start(number)
    assert drive.state.gangs[drive.job(number).epoch].devices == 4


def test_a_job_parked_in_arenas_resumes_there_with_its_old_size() -> None:
    drive = Drive()
    number = drive.submit(elastic(2, 1, 4))
    assert start(drive, number, 3) is None
    drive.runs(number)
    drive.step(SuspendJob(number, SuspendLevel.OFFLOAD))
    drive.seen(number, drive.job(number).epoch, ObservedPhase.PARKED, stop_step=7)
    drive.step(ResumeJob(number))
    assert drive.job(number).shape.gpus == 3
    refused = start(drive, number, 2)
    assert refused is not None
    assert "it rests on its devices" in refused[1]
    assert start(drive, number, 3) is None
    assert drive.state.gangs[drive.job(number).epoch].devices == 3


def test_a_quota_counts_the_devices_that_it_has() -> None:
    drive = Drive(2, CoreSettings(quota_devices={"": 5}))
    first, second = (drive.submit(elastic(2, 1, 4), "ann") for _ in range(2))
    assert start(drive, first, 4) is None
    refused = start(drive, second, 2)
    assert refused is not None
    assert refused[0] is Reason.QUOTA
    assert explain(drive.state, second, drive.now).blockers[0].reason is Reason.QUOTA
    assert start(drive, second, 1) is None
    assert drive.state.jobs.charges.held == {Owner("ann"): 5}


def test_one_plan_does_not_exceed_a_quota_by_sizes() -> None:
    drive = Drive(2, CoreSettings(quota_devices={"": 5}))
    first, second = (drive.submit(elastic(2, 1, 4), "ann") for _ in range(2))
    at = [place(drive, first, 4), tuple(replace(claim, node="n2") for claim in place(drive, second, 2))]
    changes = [StartChange(n, drive.job(n).revision, claims) for n, claims in zip((first, second), at, strict=True)]
    answer = drive.step(ProposePlan(tuple(changes)))
    assert isinstance(answer, PlanAnswer)
    assert [verdict.approved for verdict in answer.verdicts] == [True, False]


@given(
    some.lists(
        some.tuples(
            some.integers(0, 3),
            some.sampled_from(["start", "stop", "runs", "choose"]),
            some.integers(1, 9),
            some.booleans(),
        ),
        max_size=30,
    )
)
def test_no_sequence_of_plans_over_commits_or_gives_a_size_outside_of_bounds(
    acts: list[tuple[int, str, int, bool]],
) -> None:
    """`Drive.step` looks at all invariants; here, besides, at what each gang really holds."""
    drive = Drive(2)
    specs = [elastic(2, 1, 4), elastic(4, 2, 8, per_task=2), elastic(3, 3, 6), job_of(2)]
    jobs = [drive.submit(spec) for spec in specs]
    for which, act, gpus, can_resize in acts:
        number = jobs[which]
        job = drive.job(number)
        gang = drive.state.gangs.get(job.epoch)
        # Claims are of whole tasks; of two devices each under the second spec.
        gpus = gpus // 2 * 2 if which == 1 else gpus
        if act == "start" and gang is None and gpus:
            bound = job.gpus if job.is_bound else None
            refused = start(drive, number, gpus)
            if refused is None:
                assert drive.job(number).spec.accepts(gpus)
                assert bound in (None, gpus)
        elif act == "choose" and gang is None and gpus:
            was_bound = job.is_bound
            if isinstance(drive.step(ResizeJob(number, gpus)), JobAnswer):
                assert not was_bound
                assert drive.job(number).gpus == gpus
        elif act == "runs" and gang is not None and gang.phase == "STARTING":
            drive.runs(number)
        elif act == "stop" and gang is not None and gang.phase == "RUNNING":
            suspend(drive, number, SuspendLevel.CHECKPOINT)
            rests_on_storage(drive, number, RESIZED if can_resize else ALL_LEVELS)
        used: dict[str, int] = {}
        for gang in drive.state.gangs.values():
            assert specs[jobs.index(gang.job)].accepts(gang.devices)
            for claim in gang.claims:
                assert not used.get(claim.node, 0) & claim.device_mask
                used[claim.node] = used.get(claim.node, 0) | claim.device_mask
