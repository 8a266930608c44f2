"""Everything the core knows of a job that users may see arrives in its message."""

from __future__ import annotations

import dataclasses
import math

import msgspec
import pytest
from ganger.cluster.refusals import Reason, Refusal
from ganger.cluster.resources import Claim, Locality, LocalityLevel, Role, TaskShape
from ganger.job_state import JobState
from ganger.protocol.gang_orders import Mechanism
from ganger.v1 import job_pb2
from ganger_master.core.array_model import Membership, RuleKind, StopRule
from ganger_master.core.gang_model import Gang, GangIntent, GangPhase, GangRole, Idleness, Piece, Restore
from ganger_master.core.job_model import (
    Capabilities,
    Checkpoint,
    Failure,
    JobMetric,
    JobProgress,
    JobRecord,
    RefusedMechanism,
    SuspendLevel,
)
from ganger_master.core.job_spec import Agent, Condition, Dependency, JobSpec, RoleProgram
from ganger_master.core.tenancy import PartitionTerms
from ganger_master.rpc.job_messages import (
    capabilities_from_wire,
    capabilities_to_wire,
    job_to_wire,
    progress_from_wire,
    spec_from_wire,
    spec_to_wire,
)
from ganger_master.runtime.publication import Sample
from google.protobuf.message import Message
from msgspec.structs import replace

SPEC = JobSpec(
    command=("python", "train.py"),
    roles=(Role("worker", 2, TaskShape(1, 1000, 1 << 30), 1, 4),),
    display_name="a name",
    working_directory="/work",
    environment={"SEED": "1"},
    device_type="virtual",
    partition="gpu",
    locality=Locality(LocalityLevel.NODE, LocalityLevel.SOCKET, 5.0),
    nodes=1,
    priority=-3,
    time_limit_s=60.0,
    gpu_memory_bytes=1 << 20,
    max_failures=2,
    scheduler="module:Class",
    preemptible=True,
    gpus_min=1,
    gpus_max=4,
    checkpoint_interval_s=30.0,
    labels={"array": "a"},
    agent=Agent.NONE,
    deadline=1e9,
    movable=False,
    weight=2.5,
    least_decrease=0.02,
    converged_passes=3,
    distributed=True,
    mechanism=Mechanism.SIGNAL,
    is_move_required=True,
    closes_connections=True,
    is_scheduled_at_epochs=True,
    stop_signal="USR1",
    stop_grace_s=300.0,
    checkpoint_copies=2,
    role_programs=(RoleProgram("worker", ("sh", "run"), {"A": "b"}),),
    dependencies=(Dependency(Condition.FAILED, 3),),
)
CLAIM = Claim("n1", 0b11, (2000,), 1 << 31, tasks=(2,))
GANG = Gang(
    5,
    7,
    GangRole.ACTIVE,
    GangPhase.PARKED,
    (Piece(CLAIM, CLAIM, pids=(11, 12), cores=("0-1", "2-3")),),
    LocalityLevel.NODE,
    1.0,
    park_level=SuspendLevel.OFFLOAD,
    stop_step=40,
    idle=Idleness(1.5, 2.5, "why"),
)
JOB = JobRecord(
    7,
    "uid",
    "carol",
    replace(SPEC, array=Membership(6, 0, 3, 4, {"lr": "0.1"}, 2, StopRule(RuleKind.ASHA, first=5))),
    1.0,
    state=JobState.SUSPENDED,
    revision=3,
    start_time=2.0,
    end_time=3.0,
    run_s=0.5,
    running_since=2.5,
    failures=1,
    preemptions=2,
    checkpoint=Checkpoint(30, 4, "checkpoints/30-4", 1 << 20, 2.5, ("n1",)),
    capabilities=Capabilities(
        pause=True,
        offload=True,
        checkpoint=False,
        missing={"CHECKPOINT": "why"},
        known=True,
        role_divides=(0, 60),
        mechanism=Mechanism.REPLAY,
        refused_mechanisms=(RefusedMechanism(Mechanism.IMAGE, "no CRIU"),),
    ),
    suspended_level=SuspendLevel.OFFLOAD,
    failure=Failure("EXIT", "rank 1 exited with code 3", 3, 1, 4),
    trouble="STORAGE_FULL: no room",
    held=True,
    rungs=(0.5, None),
)


def missing(message: Message) -> set[str]:
    return {field.name for field in message.DESCRIPTOR.fields} - {field.name for field, _ in message.ListFields()}


def test_no_field_of_a_job_is_left_out() -> None:
    message = job_to_wire(
        JOB,
        GANG,
        GANG,
        blockers=(Refusal(Reason.GPUS, {"needed": 2}),),
        queue_rank=4,
        sample=dataclasses.replace(
            Sample(5, 40, 160, 9.5, 0.5, 0.1, 3.0, "rank 1 hangs", 2.5, 2.25, 0.75),
            working_set_bytes=1 << 30,
            refault_bytes_per_s=4096.0,
            used_memory_bytes=2 << 30,
            least_memory_bytes=1 << 28,
            trial_memory_bytes=1 << 29,
            metrics=(JobMetric("accuracy", 0.9, 39),),
            training_epoch=2,
            training_epochs=9,
            evaluated=12,
            evaluated_in_row=3,
            evaluated_time=2.75,
        ),
        beside=(8,),
        has_turn=True,
        with_environment=True,
    )
    assert isinstance(message, job_pb2.Job)
    # Only of one that was cancelled or stopped, and of one that runs.
    message.end_reason, message.progress.steps_per_s = "enough", 9.5
    # It is kept beside the job.
    message.remaining_time.SetInParent()
    parts = (message, message.array, message.spec, message.gang, message.checkpoint, message.progress, message.failure)
    parts = (*parts, message.progress.evaluation, message.gang.idle)
    assert [missing(part) for part in parts] == [set()] * len(parts)
    assert message.trouble == JOB.trouble
    terms = PartitionTerms("default", 3, False, 90.0)
    shown = job_to_wire(replace(JOB, partition=terms, spec=replace(SPEC, time_limit_s=None)), None, None).spec
    assert (shown.partition, shown.preemptible, shown.time_limit.seconds) == ("default", False, 90)
    assert list(message.gang.cores) == ["0-1", "2-3"]


@pytest.mark.parametrize(
    ("sample", "state", "shown"),
    [
        (None, JobState.FAILED, (500, 0.0, 0.25)),
        # The last that was heard while it ran is behind its end.
        (Sample(5, 499, 0, 9.5, 0.5, 0.1, 3.0), JobState.FAILED, (500, 0.0, 0.25)),
        # A later attempt runs.
        (Sample(6, 20, 0, 9.5, 0.75, 0.1, 3.0), JobState.HOLDING, (20, 9.5, 0.75)),
    ],
)
def test_how_far_a_job_got_is_shown_until_a_later_attempt_tells_more(
    sample: Sample | None, state: JobState, shown: tuple[int, float, float]
) -> None:
    job = replace(JOB, state=state, progress=JobProgress(5, 500, 4_000, 0.25, 3.0))
    gang = replace(GANG, epoch=6, phase=GangPhase.RUNNING) if state is JobState.HOLDING else None
    progress = job_to_wire(job, gang, None, sample=sample).progress
    assert (progress.step, progress.steps_per_s, progress.loss) == shown


LAST_SEEN = Sample(4, 3_347, 26_776, 9.5, 0.5, 0.1, 3.0)


@pytest.mark.parametrize("has_gang", [False, True])
@pytest.mark.parametrize("checkpoint", [None, Checkpoint(468, 4, "checkpoints/468-4", 1 << 20, 2.5)])
def test_after_a_loss_a_job_is_shown_at_the_step_it_starts_from(has_gang: bool, checkpoint: Checkpoint | None) -> None:
    state = JobState.HOLDING if has_gang else JobState.PENDING
    job = replace(JOB, state=state, checkpoint=checkpoint, progress=None)
    step = 0 if checkpoint is None else checkpoint.step
    gang = replace(GANG, phase=GangPhase.STARTING, restore=Restore(step=step)) if has_gang else None
    progress = job_to_wire(job, gang, None, sample=LAST_SEEN).progress
    assert (progress.step, progress.steps_per_s, math.isnan(progress.loss)) == (step, 0.0, True)
    ended = job_to_wire(replace(job, state=JobState.CANCELLED), None, None, sample=LAST_SEEN).progress
    assert ended.step == 3_347


@pytest.mark.parametrize(
    ("phase", "has_turn", "rate"),
    [
        (GangPhase.PARKED, None, 0.0),
        (GangPhase.STARTING, None, 0.0),
        (GangPhase.RUNNING, None, 9.5),
        (GangPhase.RUNNING, True, 9.5),
        (GangPhase.RUNNING, False, 0.0),
    ],
)
def test_a_job_that_does_not_run_now_has_no_rate(phase: GangPhase, has_turn: bool | None, rate: float) -> None:
    job = replace(JOB, state=JobState.HOLDING, progress=None)
    sample = Sample(5, 40, 160, 9.5, 0.5, 0.1, 3.0)
    progress = job_to_wire(job, replace(GANG, phase=phase), None, sample=sample, has_turn=has_turn).progress
    assert (progress.step, progress.steps_per_s) == (40, rate)


@pytest.mark.parametrize("epoch", [4, 5])
@pytest.mark.parametrize("phase", [GangPhase.PARKED, GangPhase.STARTING, GangPhase.RUNNING])
def test_the_step_at_which_a_job_rested_is_shown_until_a_later_one_is_reported(phase: GangPhase, epoch: int) -> None:
    job = replace(JOB, state=JobState.HOLDING, progress=JobProgress(5, 1_468, 11_744, 0.25, 4.0))
    gang = replace(GANG, phase=phase, stop_step=0)
    sample = Sample(epoch, 1_222, 9_776, 9.5, 0.5, 0.1, 3.0, "rank 1 hangs")
    progress = job_to_wire(job, gang, None, sample=sample).progress
    assert (progress.step, progress.steps_per_s, progress.stall_reason) == (1_468, 0.0, "rank 1 hangs")
    later = Sample(5, 1_470, 11_760, 9.5, 0.5, 0.1, 4.5)
    assert job_to_wire(job, gang, None, sample=later).progress.step == 1_470


@pytest.mark.parametrize(
    ("phase", "launched", "acknowledged", "running_since", "since"),
    [
        (GangPhase.STARTING, 8.0, 2, 0.0, 8.0),
        (GangPhase.STARTING, 0.0, 2, 0.0, 0.0),
        # Its daemon has not acknowledged the order to go on.
        (GangPhase.STARTING, 8.0, 1, 0.0, 0.0),
        (GangPhase.RUNNING, 8.0, 2, 9.0, 9.0),
    ],
)
def test_a_job_runs_from_when_its_processes_do_until_its_first_step_counts(
    phase: GangPhase, launched: float, acknowledged: int, running_since: float, since: float
) -> None:
    job = replace(JOB, state=JobState.HOLDING, running_since=running_since)
    pieces = tuple(replace(piece, launch_time=launched, master_sequence=acknowledged) for piece in GANG.pieces)
    gang = replace(GANG, phase=phase, intent=GangIntent.RUN, master_sequence=2, since=3.0, pieces=pieces)
    message = job_to_wire(job, gang, None)
    assert message.HasField("running_since_time") == bool(since)
    assert message.running_since_time.ToSeconds() == since


def test_a_loss_that_is_no_number_is_kept_as_none() -> None:
    kept = progress_from_wire(5, job_pb2.Progress(step=500, loss=math.nan))
    assert kept == JobProgress(5, 500)
    # As a store would.
    assert msgspec.json.decode(msgspec.json.encode(kept), type=JobProgress) == kept
    assert math.isnan(job_to_wire(replace(JOB, progress=kept), None, None).progress.loss)


def test_a_description_comes_back_as_it_went() -> None:
    assert spec_from_wire(spec_to_wire(SPEC, with_environment=True)) == SPEC


def test_capabilities_come_back_from_the_wire_as_they_were() -> None:
    assert capabilities_from_wire(capabilities_to_wire(JOB.capabilities)) == JOB.capabilities
