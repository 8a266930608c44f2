"""What a job's line says."""

from __future__ import annotations

import math

import pytest
from ganger.cli import job_table
from ganger.cli.job_details import pairs
from ganger.cli.order_wait import obstacle
from ganger.console import bounded, cells, without_spare
from ganger.text import visible
from ganger.v1 import array_pb2, job_pb2, resources_pb2


def ended(**fields: object) -> job_pb2.Job:
    shape = resources_pb2.TaskShape(gpus=1)
    job = job_pb2.Job(state=job_pb2.Job.STATE_SUCCEEDED, **fields)  # type: ignore[arg-type]
    job.spec.roles.add(tasks=4, shape=shape)
    job.create_time.FromSeconds(1_000)
    job.end_time.FromSeconds(10_000)
    return job


def test_a_job_that_has_ended_says_what_became_of_its_time() -> None:
    job = ended(progress=job_pb2.Progress(step=72_000, data_wait_share=0.04))
    job.run_duration.FromSeconds(7_200)
    assert job_table.efficiency(job) == (
        "ran 2h of 2h 30m since its submission; 72000 steps, 10/s; waited for data 4% of the last attempt; 8 GPU-hours"
    )


def test_a_job_that_never_ran_or_still_runs_says_nothing_of_it() -> None:
    assert job_table.efficiency(ended()) == ""
    job = ended()
    job.run_duration.FromSeconds(7_200)
    job.state = job_pb2.Job.STATE_HOLDING
    assert job_table.efficiency(job) == ""


def test_what_keeps_a_job_from_getting_on_stands_beside_its_place() -> None:
    job = job_pb2.Job(state=job_pb2.Job.STATE_HOLDING, progress=job_pb2.Progress(stall_reason="no step for 5m"))
    job.gang.claims.add(node="nodes/n1", device_mask=3)
    assert job_table.note(job) == "n1[0-1] (no step for 5m)"


@pytest.mark.parametrize(
    ("state", "park_time", "refusal", "text"),
    [
        ("HOLDING", 0, "", "has not used its GPUs for 40m"),
        ("HOLDING", 9_000, "", "has not used its GPUs for 40m, will be suspended in 1h 50m"),
        (
            "HOLDING",
            0,
            "it may not be preempted",
            "has not used its GPUs for 40m, not suspended: it may not be preempted",
        ),
        ("SUSPENDED", 2_400, "", "suspended because it did not use its GPUs, from "),
        ("PENDING", 2_400, "", ""),
        ("SUCCEEDED", 0, "", ""),
    ],
)
def test_a_job_that_does_not_use_its_gpus_shows_since_when_and_what_follows(
    state: str, park_time: int, refusal: str, text: str
) -> None:
    job = job_pb2.Job(state=job_pb2.Job.State.Value(f"STATE_{state}"))
    assert job_table.idle_text(job) == ""
    job.gang.idle.since.FromSeconds(0)
    job.gang.idle.park_refusal = refusal
    if park_time:
        job.gang.idle.park_time.FromSeconds(park_time)
    found = job_table.idle_text(job, now=2_400.0)
    assert found.startswith(text)
    assert bool(found) == bool(text)


@pytest.mark.parametrize(
    ("metric", "resource", "progress", "state", "lacking"),
    [
        ("loss", "step", job_pb2.Progress(step=20, loss=math.nan), "HOLDING", "loss"),
        ("loss", "step", job_pb2.Progress(step=9, loss=math.nan), "HOLDING", ""),
        ("loss", "step", job_pb2.Progress(step=9, loss=math.nan), "SUCCEEDED", "loss"),
        ("loss", "step", job_pb2.Progress(step=20, loss=0.0), "HOLDING", ""),
        ("accuracy", "step", job_pb2.Progress(step=20, loss=0.5), "HOLDING", "accuracy"),
        ("loss", "epoch", job_pb2.Progress(step=20, loss=0.5), "HOLDING", "epoch"),
        ("loss", "epoch", job_pb2.Progress(step=20, loss=math.nan), "HOLDING", ""),
        ("", "", job_pb2.Progress(step=20, loss=math.nan), "HOLDING", ""),
    ],
)
def test_a_member_shows_what_its_stop_rule_lacks(
    metric: str, resource: str, progress: job_pb2.Progress, state: str, lacking: str
) -> None:
    job = job_pb2.Job(name="jobs/8", state=job_pb2.Job.State.Value(f"STATE_{state}"), progress=progress)
    job.start_time.FromSeconds(1_000)
    if metric:
        job.array.rule.metric, job.array.rule.resource, job.array.rule.first_rung = metric, resource, 10
    text = f"judges nothing, because no {lacking} was reported" if lacking else None
    assert (dict(pairs(job))["stop rule"] or None) == text
    assert job_table.unreported(job) == lacking
    job.array.rungs.append(0.5)
    assert job_table.unreported(job) == ""


@pytest.mark.parametrize(
    ("loss", "text"), [(math.nan, "step 5"), (0.0, "step 5 loss 0"), (0.25, "step 5 loss 0.25"), (math.inf, "step 5")]
)
def test_a_loss_is_shown_once_one_was_reported(loss: float, text: str) -> None:
    assert job_table.progress_text(job_pb2.Progress(step=5, loss=loss)) == text


@pytest.mark.parametrize(
    ("soonest", "latest", "text"),
    [
        (0.0, 57.0, "within 57s"),
        (0.4, 10_800.0, "within 3h"),
        (240.0, 960.0, "in 4m to 16m"),
        (7_200.2, 7_200.4, "in about 2h"),
    ],
)
def test_a_span_of_time_has_two_ends_only_where_both_tell_something(soonest: float, latest: float, text: str) -> None:
    assert job_table.span_text(soonest, latest) == text


def elastic(state: job_pb2.Job.State.ValueType) -> job_pb2.Job:
    job = job_pb2.Job(name="jobs/1", state=state)
    job.spec.roles.add(name="worker", tasks=2, shape=resources_pb2.TaskShape(gpus=1))
    job.spec.gpus_min, job.spec.gpus_max = 2, 8
    return job


def test_a_job_whose_roles_have_ranges_shows_them_beside_what_it_has() -> None:
    job = job_pb2.Job(name="jobs/1", state=job_pb2.Job.STATE_HOLDING)
    job.spec.roles.add(name="ps", tasks=2, tasks_min=1, tasks_max=3)
    job.spec.roles.add(name="worker", tasks=4, tasks_min=1, tasks_max=4, shape=resources_pb2.TaskShape(gpus=1))
    job.gang.claims.add(node="nodes/n1", device_mask=15, tasks=[2, 4])
    job.capabilities.can_reshard = True
    job.capabilities.role_divides.extend([0, 60])
    assert job_table.sizes_text(job) == (
        "ps 1 to 3, worker 1 to 4; numbers of worker that divide a batch of 60; changes them with a checkpoint, from"
        " which it starts again"
    )
    assert job_table.gpus_text(job) == "4 (1-4)"
    assert dict(pairs(job))["tasks"].splitlines()[0].startswith("2 (1 to 3) × ps: no GPU")


def test_an_elastic_job_says_what_is_known_of_whether_it_grows() -> None:
    job = elastic(job_pb2.Job.STATE_PENDING)
    assert job_table.sizes_text(job) == (
        "2 to 8 GPUs; reports after its first step whether it grows and shrinks as it runs"
    )
    assert ("tasks", "2 to 8 × worker: 1 GPU, cores by measurement, a share of memory") in pairs(job)
    assert "has waited" in dict(pairs(job))
    job = elastic(job_pb2.Job.STATE_HOLDING)
    job.gang.claims.add(node="nodes/n1", device_mask=3)
    assert job_table.sizes_text(job).endswith(
        "keeps the number that it has, for it has not reported that it can change it"
    )
    job.capabilities.missing["RESIZE"] = "it does not attach"
    assert job_table.sizes_text(job).endswith("keeps the number it was started with: it does not attach")
    job.capabilities.can_reshard = True
    assert job_table.sizes_text(job) == "2 to 8 GPUs; may have another number whenever it starts from a checkpoint"
    job.capabilities.can_resize = True
    assert job_table.sizes_text(job) == "2 to 8 GPUs; grows and shrinks as it runs"
    job.gang.slice_state = job_pb2.Gang.SLICE_STATE_ACTIVE
    assert job_table.sizes_text(job).endswith("grows and shrinks once it is no longer time-sliced")


@pytest.mark.parametrize(
    ("phase", "turn", "text"),
    [
        ("RUNNING", "ACTIVE", "running, in turn"),
        ("RUNNING", "INACTIVE", "waiting for its turn"),
        ("STARTING", "INACTIVE", "waiting for its turn"),
        ("STARTING", "ACTIVE", "starting"),
        ("RUNNING", "UNSPECIFIED", "running"),
        ("STOPPING", "INACTIVE", "stopping"),
    ],
)
def test_a_job_in_turns_says_whether_it_has_the_turn(phase: str, turn: str, text: str) -> None:
    job = job_pb2.Job(state=job_pb2.Job.STATE_HOLDING)
    job.gang.phase = job_pb2.Gang.Phase.Value(f"PHASE_{phase}")
    job.gang.slice_state = job_pb2.Gang.SliceState.Value(f"SLICE_STATE_{turn}")
    assert job_table.state_text(job) == text


@pytest.mark.parametrize(
    ("phase", "runs", "step", "line"),
    [
        ("STARTING", False, 0, ("starting", "", "1m", "has waited")),
        ("STARTING", True, 0, ("running", "reports no steps", "20s", "time")),
        ("RUNNING", True, 0, ("running", "reports no steps", "20s", "time")),
        ("RUNNING", True, 7, ("running", "step 7", "20s", "time")),
        ("PARKED", False, 0, ("parked", "", "1m", "has waited")),
    ],
)
def test_a_job_without_boundaries_runs_once_its_processes_do(
    phase: str, runs: bool, step: int, line: tuple[str, str, str, str]
) -> None:
    job = job_pb2.Job(name="jobs/1", state=job_pb2.Job.STATE_HOLDING)
    job.gang.phase = job_pb2.Gang.Phase.Value(f"PHASE_{phase}")
    job.create_time.FromSeconds(1_000)
    job.progress.step, job.progress.loss = step, math.nan
    if runs:
        job.running_since_time.FromSeconds(1_040)
    state, progress, ran, name = line
    assert job_table.state_text(job) == state
    assert job_table.progress_column(job, 1_060.0) == progress
    assert job_table.elapsed(job, 1_060.0) == ran
    assert name in dict(pairs(job))
    assert job_table.progress_column(job, 1_045.0) == (f"step {step}" if step else "")


@pytest.mark.parametrize(
    ("reason", "figures", "rank", "told"),
    [
        ("GPUS", {"needed": 4, "free": 1}, 3, "(GPUS) 4 GPUs wanted, 1 free, 2 ahead"),
        ("GPUS", {"needed": 4, "free": 0, "draining": 4}, 1, "(GPUS) 4 GPUs wanted, 0 free, 4 on draining nodes"),
        ("GPUS", {"needed": 4, "free": 6, "largest_free": 3}, 1, "(GPUS) 4 GPUs wanted, 6 free of which 3 together"),
        ("RANKED", {"ahead": 2}, 3, "(RANKED) 2 ahead"),
        ("RANKED", {}, 1, "(RANKED) first in line"),
        ("QUOTA", {}, 0, "(QUOTA) as the master says"),
    ],
)
def test_the_cause_of_a_wait_comes_first_and_is_short(
    reason: str, figures: dict[str, int], rank: int, told: str
) -> None:
    job = job_pb2.Job(state=job_pb2.Job.STATE_PENDING, queue_rank=rank)
    job.blockers.add(reason=reason, message="as the master says", figures=figures)
    assert job_table.note(job) == told


def test_a_narrow_terminal_goes_without_user_and_place_before_the_reason_is_cut() -> None:
    headings = ("JOB", "USER", "PLACE", "REASON")
    rows = [("1", "annabella", "1", "(GPUS) 4 GPUs wanted, 1 free")]
    spare = ("USER", "PLACE")
    assert without_spare(headings, rows, spare, 80) == (headings, rows)
    assert without_spare(headings, rows, spare, 45)[0] == ("JOB", "PLACE", "REASON")
    assert without_spare(headings, rows, spare, 35) == (("JOB", "REASON"), [("1", rows[0][3])])
    assert without_spare(headings, rows, spare, 10)[0] == ("JOB", "REASON")


@pytest.mark.parametrize(("becomes", "state"), [(0b1111, "resizing"), (0b1100, "moving"), (0, "parked(offload)")])
def test_a_parked_gang_whose_next_place_is_being_prepared_is_not_shown_as_parked(becomes: int, state: str) -> None:
    job = job_pb2.Job(state=job_pb2.Job.STATE_HOLDING)
    job.gang.phase, job.gang.parked_level = job_pb2.Gang.PHASE_PARKED, job_pb2.SUSPEND_LEVEL_OFFLOAD
    job.gang.claims.add(node="nodes/n1", device_mask=0b11)
    if becomes:
        job.gang.move_claims.add(node="nodes/n2", device_mask=becomes)
    assert job_table.state_text(job) == state


@pytest.mark.parametrize("word", ["\x01" * 4_000, "\u2028\x01" * 2_000, "\u4e2d" * 4_000, "a\u0301" * 4_000])
@pytest.mark.parametrize("field", ["command", "display_name", "user"])
def test_a_name_that_a_user_gave_takes_at_most_63_columns_however_it_is_written_out(word: str, field: str) -> None:
    job = job_pb2.Job(user=word if field == "user" else "")
    job.spec.command.append(word if field == "command" else "train")
    job.spec.display_name = word if field == "display_name" else ""
    shown = job_table.column(job.user) if field == "user" else job_table.label(job)
    assert 0 < cells(visible(shown)) <= 63
    array = array_pb2.Array(name="arrays/1", display_name=word, user=word)
    assert max(cells(visible(text)) for text in job_table.array_row(array)) <= 63


def test_a_sign_that_is_written_out_is_shown_whole_or_not_at_all() -> None:
    assert bounded("ab\x01c", 6) == "ab\\x01"
    assert bounded("ab\x01c", 5) == "ab"
    assert bounded("train.py", 63) == "train.py"


def test_the_mechanism_is_named_with_why_stronger_ones_do_not_apply() -> None:
    job = job_pb2.Job(name="jobs/1", state=job_pb2.Job.STATE_HOLDING)
    assert dict(pairs(job))["mechanism"] == ""
    can = job.capabilities
    can.can_pause = can.can_checkpoint = can.can_move = True
    assert dict(pairs(job))["mechanism"] == "not known yet"
    can.mechanism = job_pb2.MECHANISM_REPLAY
    can.refused_mechanisms.add(mechanism=job_pb2.MECHANISM_IMAGE, reason="there is no CRIU")
    assert dict(pairs(job))["mechanism"] == "replay\nnot image: there is no CRIU"
    assert dict(pairs(job))["offers"] == "pause, checkpoint, move"


def test_a_job_that_has_ended_offers_nothing_and_one_that_is_never_time_sliced_says_why() -> None:
    job = job_pb2.Job(name="jobs/1", state=job_pb2.Job.STATE_HOLDING)
    job.capabilities.can_pause = True
    job.capabilities.missing["TURNS"] = "no agent"
    assert dict(pairs(job))["offers"] == "pause\nnot time slices: no agent"
    job.state = job_pb2.Job.STATE_SUCCEEDED
    assert dict(pairs(job))["offers"] == ""


def test_a_wait_for_an_image_names_it() -> None:
    job = job_pb2.Job(name="jobs/1", state=job_pb2.Job.STATE_SUSPENDED)
    job.gang.phase, job.gang.parked_level = job_pb2.Gang.PHASE_STOPPING, job_pb2.SUSPEND_LEVEL_CHECKPOINT
    job.capabilities.mechanism, job.progress.step = job_pb2.MECHANISM_IMAGE, 61
    assert obstacle(job) == "job 1 is stopping at its next boundary, where an image of it is written; step 61"


def test_a_mechanism_that_was_asked_for_is_marked_and_its_signal_named() -> None:
    job = job_pb2.Job(name="jobs/1", state=job_pb2.Job.STATE_HOLDING)
    job.spec.mechanism = job.capabilities.mechanism = job_pb2.MECHANISM_SIGNAL
    job.spec.stop_signal = "USR1"
    job.spec.stop_grace.FromSeconds(300)
    assert dict(pairs(job))["mechanism"] == "signal: SIGUSR1, then at most 5m to exit (--mechanism)"
    job.spec.mechanism = job_pb2.MECHANISM_IMAGE
    job.capabilities.mechanism = job_pb2.MECHANISM_NONE
    assert dict(pairs(job))["mechanism"] == "none (image was asked for)"


def test_a_wait_for_a_script_that_saves_itself_names_its_signal_and_grace() -> None:
    job = job_pb2.Job(name="jobs/1", state=job_pb2.Job.STATE_SUSPENDED)
    job.gang.phase, job.gang.parked_level = job_pb2.Gang.PHASE_STOPPING, job_pb2.SUSPEND_LEVEL_CHECKPOINT
    job.capabilities.mechanism, job.spec.stop_signal = job_pb2.MECHANISM_SIGNAL, "TERM"
    job.spec.stop_grace.FromSeconds(300)
    assert obstacle(job) == "job 1 is stopping: its script saves itself since SIGTERM, for at most 5m"


def remaining(is_guess: bool = False, high: float | None = 900.0, judged: int = 0) -> str:
    job = job_pb2.Job(state=job_pb2.Job.STATE_HOLDING)
    found = job.remaining_time
    found.expected.FromSeconds(720)
    found.low.FromSeconds(600)
    if high is not None:
        found.high.FromSeconds(int(high))
    found.is_guess, found.judged_ranges, found.held_ranges = is_guess, judged, judged * 9 // 10
    return dict(pairs(job))["remaining"]


def test_the_remaining_time_has_a_range_and_the_record_of_such_ranges() -> None:
    assert remaining() == "about 12m with what it has (10m to 15m)"
    assert remaining(judged=30) == "about 12m with what it has (10m to 15m; 27 of 30 such ranges held)"
    assert remaining(high=None) == "about 12m with what it has (at least 10m)"
    assert "a guess" in remaining(is_guess=True)
    assert dict(pairs(job_pb2.Job()))["remaining"] == ""
