"""What a job's line says."""

from __future__ import annotations

import pytest
from ganger.cli import job_lines
from ganger.v1 import job_pb2, resources_pb2


def ended(**fields: object) -> job_pb2.Job:
    shape = resources_pb2.TaskShape(gpus=1)
    job = job_pb2.Job(state=job_pb2.Job.STATE_SUCCEEDED, **fields)  # type: ignore[arg-type]
    job.spec.roles.add(tasks=4, shape=shape)
    job.create_time.FromSeconds(1_000)
    job.end_time.FromSeconds(10_000)
    return job


def test_a_job_that_has_ended_says_what_became_of_its_time() -> None:
    job = ended(progress=job_pb2.Progress(step=72_000, data_wait_share=0.04))
    job.run.FromSeconds(7_200)
    assert job_lines.efficiency(job) == (
        "ran 2h of 2h 30m since its submission; 72000 steps, 10/s; waited for data 4% of the last attempt; 8 GPU-hours"
    )


def test_a_job_that_never_ran_or_still_runs_says_nothing_of_it() -> None:
    assert job_lines.efficiency(ended()) == ""
    job = ended()
    job.run.FromSeconds(7_200)
    job.state = job_pb2.Job.STATE_HOLDING
    assert job_lines.efficiency(job) == ""


def test_what_keeps_a_job_from_getting_on_stands_beside_its_place() -> None:
    job = job_pb2.Job(state=job_pb2.Job.STATE_HOLDING, progress=job_pb2.Progress(concern="no step for 5m"))
    job.gang.claims.add(node="nodes/n1", device_mask=3)
    assert job_lines.note(job) == "n1[0-1] (no step for 5m)"


@pytest.mark.parametrize(
    ("phase", "turn", "text"),
    [
        ("RUNNING", "RUNS", "running, in turn"),
        ("RUNNING", "WAITS", "waiting for its turn"),
        ("STARTING", "WAITS", "waiting for its turn"),
        ("STARTING", "RUNS", "starting"),
        ("RUNNING", "UNSPECIFIED", "running"),
        ("STOPPING", "WAITS", "stopping"),
    ],
)
def test_a_job_in_turns_says_whether_it_has_the_turn(phase: str, turn: str, text: str) -> None:
    job = job_pb2.Job(state=job_pb2.Job.STATE_HOLDING)
    job.gang.phase = job_pb2.Gang.Phase.Value(f"PHASE_{phase}")
    job.gang.turn = job_pb2.Gang.Turn.Value(f"TURN_{turn}")
    assert job_lines.state_text(job) == text
