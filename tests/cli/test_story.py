"""The story of a job: who did what and why, how long it took, what it came to."""

from __future__ import annotations

from ganger.story import Happening, Totals, summary, tell


def happened(time: float, kind: str, cause: str = "daemon:n1", message: str = "", **figures: str) -> Happening:
    return Happening(1_000 + time, kind, cause, message, figures)


STORY = [
    happened(0.0, "job_submitted", "user:ann", gpus="2", tasks="2"),
    happened(30.0, "gang_approved", "scheduler:", "not enough free devices, free=1", waited_s="30.000", after="jobs/3",
             nodes="n1", epoch="4"),
    happened(31.5, "gang_running", epoch="4"),
    happened(41.5, "move_begun", "planner", nodes="n2", goal="HOLE", **{"for": "jobs/9"}, saved_gpu_seconds="120.0"),
    happened(44.5, "move_committed", step="100"),
    happened(44.75, "gang_running"),
    happened(44.75, "move_done", pause_ms="250.0", expected_pause_ms="300"),
    happened(50.0, "checkpoint_complete", "epoch:5", step="150"),
    happened(60.0, "checkpoint_complete", "epoch:5", step="250"),
    happened(64.75, "suspend_ordered", "user:ann", level="OFFLOAD"),
    happened(65.0, "gang_parked", level="OFFLOAD", step="300"),
    happened(75.0, "resume_ordered", "user:ann"),
    happened(75.5, "gang_approved", "scheduler:", waited_s="0.500", nodes="n2"),
    happened(75.75, "gang_running"),
    happened(80.0, "attempt_failed", message="rank 1 exited with code 3", exit_code="3"),
    happened(81.0, "job_pending", message="rank 1 exited with code 3"),
    happened(85.0, "cancel_ordered", "user:ann", "enough"),
    happened(85.0, "job_cancelled", "user:ann", "enough"),
]  # fmt: skip


def test_every_chapter_says_who_why_and_how_long() -> None:
    chapters, _ = tell(STORY)
    assert [chapter.text for chapter in chapters] == [
        "submitted by user:ann: 2 GPUs",
        "got its gang on n1 by scheduler, after it had waited 30.00 s, for: not enough free devices, free=1, "
        "free since jobs/3 left",
        "stepped after 1.50 s",
        "moves to n2 by planner, hole for jobs/9, to save 120.0 GPU-seconds",
        "handed over at step 100, 3.00 s after the order; it ran on until then",
        "stepped after 0.25 s",
        "moved: it stood still for 250 ms, 300 expected, and lost no step",
        "checkpoint 2 complete, at step 250",
        "told to rest at offload by user:ann",
        "rests at offload, step 300, 0.25 s after the order",
        "told to go on by user:ann after 10.00 s at rest",
        "got its gang on n2 by scheduler, after it had waited 0.50 s",
        "stepped after 0.25 s",
        "the attempt failed: rank 1 exited with code 3",
        "waits again: rank 1 exited with code 3",
        "told to end by user:ann: enough",
        "cancelled: enough",
    ]


def test_the_sums_are_those_of_the_chapters() -> None:
    _, totals = tell(STORY)
    assert totals == Totals(
        waited_s=34.0,
        ran_s=13.0 + 20.25 + 5.25,
        parked_s=10.0,
        starting_s=1.5 + 0.25 + 0.5 + 0.25,
        # Since the checkpoint of step 250.
        lost_s=20.0,
        moves=1,
        move_pauses_ms=250.0,
        suspensions=1,
        checkpoints=2,
        failures=1,
    )
    assert summary(totals) == (
        "waited 34.00 s; starting 2.50 s; ran 38.50 s; parked 10.00 s; lost 20.00 s; 1 move, 250 ms standing still for "
        "them; suspended once; 2 checkpoints; 1 failed attempt"
    )


def test_of_a_job_that_lives_the_sums_count_until_now() -> None:
    _, totals = tell(STORY[:3], now=1_040.0)
    assert (totals.waited_s, totals.starting_s, totals.ran_s) == (30.0, 1.5, 8.5)
    assert tell(STORY, now=9_999.0) == tell(STORY)


def test_a_kind_that_nobody_here_knows_is_told_as_it_stands() -> None:
    (chapter,), _ = tell([happened(1.0, "gang_packed", "planner", "with jobs/4", gain="1.3")])
    assert chapter.text == "gang packed by planner: with jobs/4; gain=1.3"


def test_the_story_of_an_array_is_that_of_its_members_ends() -> None:
    chapters, totals = tell(
        [
            happened(0.0, "array_submitted", "user:ann", members="2", gpus_each="1", at_once="1",
                     rule="halving by loss"),
            happened(9.0, "member_ended", "arrays/7", "halving: ...", member="7_0", job="jobs/8", state="stopped",
                     run_s="8.5", parameter_lr="0.1", loss="0.5"),
            happened(20.0, "array_ended", stopped="1", succeeded="1"),
        ]
    )  # fmt: skip
    assert [chapter.text for chapter in chapters] == [
        "submitted by user:ann: 2 jobs of 1 GPUs each, 1 at once, stop rule halving by loss",
        "7_0 (lr=0.1) stopped, ran 8.50 s; loss=0.5; halving: ...",
        "ended: 1 stopped, 1 succeeded",
    ]
    assert totals.ran_s == 8.5
