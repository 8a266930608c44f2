"""The history of a job: actions, their causes, durations and outcomes."""

from __future__ import annotations

import pytest
from ganger.history import HistoryEvent, history_of, purpose, sentence, summary
from ganger.job_state import Totals
from ganger.v1.scheduling_pb2 import Purpose


def happened(time: float, kind: str, cause: str = "daemon:n1", message: str = "", **figures: str) -> HistoryEvent:
    return HistoryEvent(1_000 + time, kind, cause, message, figures)


STORY = [
    happened(0.0, "job_submitted", "user:ann", gpus="2", tasks="2"),
    happened(30.0, "gang_approved", "scheduler:", "not enough free devices (1 free)", waited_s="30.000", after="jobs/3",
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
    happened(70.0, "job_updated", "user:ann", "priority 0 -> 5, time limit 1h -> 2h"),
    happened(75.0, "resume_ordered", "user:ann"),
    happened(75.5, "gang_approved", "scheduler:", waited_s="0.500", nodes="n2"),
    happened(75.75, "gang_running"),
    happened(80.0, "attempt_failed", message="rank 1 exited with code 3", exit_code="3"),
    happened(81.0, "job_pending", message="rank 1 exited with code 3"),
    happened(85.0, "cancel_ordered", "user:ann", "enough"),
    happened(85.0, "job_cancelled", "user:ann", "enough"),
]  # fmt: skip


def test_every_entry_names_cause_reason_and_duration() -> None:
    chapters, _ = history_of(STORY)
    assert [chapter.text for chapter in chapters] == [
        "submitted by user:ann: 2 GPUs",
        "got its gang on n1 by scheduler, after it had waited 30.00 s, for: not enough free devices (1 free), "
        "free since jobs/3 left",
        "runs, after 1.50 s",
        "moves to n2 by planner, to make room for jobs/9, to save 120 GPU-seconds",
        "handed over at step 100, 3.00 s after the order; it ran on until then",
        "runs, after 0.25 s",
        "moved: it stood still for 250 ms, 300 ms expected, and lost no step",
        "checkpoint 2 complete, at step 250",
        "ordered to stop at offload by user:ann",
        "rests at offload, step 300, 0.25 s after the order",
        "updated by user:ann: priority 0 -> 5, time limit 1h -> 2h",
        "ordered to go on by user:ann after 10.00 s at rest",
        "got its gang on n2 by scheduler, after it had waited 0.50 s",
        "runs, after 0.25 s",
        "the attempt failed: rank 1 exited with code 3",
        "waits again: rank 1 exited with code 3",
        "ordered to end by user:ann: enough",
        "cancelled: enough",
    ]


def test_the_sums_are_those_of_the_chapters() -> None:
    _, totals = history_of(STORY)
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
        "it; suspended once; 2 checkpoints; 1 failed attempt"
    )


def test_a_resize_is_no_move() -> None:
    _, totals = history_of(
        [
            happened(1.0, "move_done", pause_ms="200.0"),
            happened(2.0, "resize_done", pause_ms="300.0"),
            happened(3.0, "resize_done", pause_ms="100.0"),
        ]
    )
    assert summary(totals) == "1 move, 200 ms standing still for it; 2 resizes, 400 ms standing still for them"


def test_of_a_job_that_lives_the_sums_count_until_now() -> None:
    _, totals = history_of(STORY[:3], now=1_040.0)
    assert (totals.waited_s, totals.starting_s, totals.ran_s) == (30.0, 1.5, 8.5)
    assert history_of(STORY, now=9_999.0) == history_of(STORY)


def test_an_unknown_kind_of_event_is_printed_as_it_is() -> None:
    (chapter,), _ = history_of([happened(1.0, "gang_packed", "planner", "with jobs/4", gain="1.3")])
    assert chapter.text == "gang packed by planner: with jobs/4; gain=1.3"


TURNS = {"node_set": "1", "of_rows": "2", "quantum_seconds": "10", "rows": "0"}
FAIR = {"goal": "FAIRNESS", "for": "jobs/5", "detail": "it is 31.0 s behind jobs/4"}
IN_TURNS = [
    happened(0.0, "gang_approved", "planner", nodes="n1", epoch="1"),
    happened(1.0, "gang_running"),
    happened(11.0, "rows_changed", "planner", version="1", **TURNS),
    happened(15.0, "rows_changed", "planner", version="2", **TURNS),
    happened(31.0, "move_begun", "planner", nodes="n2", **FAIR),
    happened(31.0, "rows_changed", "planner", **(TURNS | {"node_set": "2", "of_rows": "3"})),
    happened(40.0, "gang_parked", level="OFFLOAD", step="100"),
    happened(41.0, "move_committed", step="100"),
    happened(42.0, "gang_running"),
    happened(42.0, "move_done", pause_ms="1500.0", **FAIR),
    happened(52.0, "turns_ended"),
]  # fmt: skip


def test_a_time_sliced_job_is_not_reported_as_running_until_its_move() -> None:
    chapters, _ = history_of(IN_TURNS)
    assert [chapter.text for chapter in chapters][2:] == [
        "time-sliced with other jobs on its GPUs, 1 of 2 time slices of 10 s in nodeSets/1 by planner",
        "other jobs joined or left its time-slice group; it keeps 1 of 2 time slices of 10 s in nodeSets/1",
        "moves to n2 by planner, so that jobs/5 gets as much time as others (it is 31.0 s behind jobs/4)",
        "will be time-sliced there with other jobs, 1 of 3 time slices of 10 s in nodeSets/2",
        "rests at offload for its move, step 100",
        "handed over at step 100, 10.00 s after the order",
        "runs, after 1.00 s",
        "moved: it stood still for 1.50 s, and lost no step",
        "has its GPUs to itself again, without time slices",
    ]


def test_time_in_turns_is_not_told_as_time_that_it_ran() -> None:
    _, totals = history_of(IN_TURNS, now=1_060.0)
    assert (totals.ran_s, totals.turns_s, totals.parked_s) == (10.0 + 8.0, 29.0 + 10.0, 1.0)
    assert "ran 18.00 s; time-sliced 39.00 s" in summary(totals)
    assert totals.suspensions == 0, "no user suspended it"
    # A job that a user suspends leaves its time-slice group.
    rested = [happened(45.0, "gang_parked", level="OFFLOAD", step="1"), happened(46.0, "gang_running")]
    assert history_of([*IN_TURNS[:-1], *rested], now=1_048.0)[1].ran_s == 10.0 + 2.0


@pytest.mark.parametrize(
    ("kind", "figures", "text"),
    [
        ("move_begun", {"nodes": "n2", "goal": "DRAIN", "saved_gpu_seconds": "0.0", "expected_pause_ms": "0"},
         "moves to n2 by planner, because its node is emptied"),
        ("move_begun", {"nodes": "n2", "goal": "DRAIN", "why": "its node n1 is reserved (upgrade)"},
         "moves to n2 by planner, because its node n1 is reserved (upgrade)"),
        ("move_begun", {"nodes": "n2", "goal": "LOCALITY", "saved_gpu_seconds": "64.5", "expected_pause_ms": "310"},
         "moves to n2 by planner, to have its GPUs closer together, to save 64 GPU-seconds for a pause of 0.31 s"),
        ("move_begun", {"nodes": "n2", "goal": "WARMTH"}, "moves to n2 by planner, goal WARMTH"),
        ("move_done", {"goal": "DRAIN", "pause_ms": "250.0", "expected_pause_ms": "0"},
         "moved: it stood still for 250 ms, and lost no step"),
        ("resize_begun", {"devices": "4", "becomes": "2", "goal": "GIVE_BACK", "for": "jobs/7"},
         "goes from 4 GPUs to 2 by planner, to give GPUs to jobs/7"),
        ("size_chosen", {"tasks": "ps=1 worker=2", "becomes": "ps=3 worker=2"},
         "is to start with ps=3 worker=2, not ps=1 worker=2 by planner"),
        ("suspend_ordered", {"level": "CHECKPOINT", "goal": "RESIZE", "detail": "ps=3 worker=2"},
         "ordered to stop at checkpoint by planner, to start with other numbers of tasks (ps=3 worker=2)"),
        ("change_kept", {"goal": "HOLE", "gain": "1.021", "gain_deviation": "0.030"},
         "the move to make room for a pending gang was kept: its rate was 1.02 (± 0.03) times that of "
         "before"),
        ("change_undone", {"goal": "PACK", "gain": "0.910", "detail": "jobs/1 at 0.40"},
         "sharing its GPUs at once was not seen to pay: together they made 0.91 of what one does alone: jobs/1 at "
         "0.40"),
        ("change_undone", {"goal": "GROW", "gain": "1.1"},
         "its growth onto idle GPUs was not seen to pay: its rate was 1.10 times that of before"),
        ("gang_joined", {"epoch": "3", "node": "n1"},
         "another gang comes to its GPUs on n1, to share them at once by planner"),
        ("mode_changed", {"mode": "PACK", "held": "3", "of": "4"}, "gangs are packed: 3 of 4 GPUs are held"),
        ("mode_changed", {"mode": "SPREAD", "held": "0", "of": "0"}, "gangs are packed: there is no GPU now"),
    ],
)  # fmt: skip
def test_a_change_says_in_words_what_it_is_for_and_what_it_gained(
    kind: str, figures: dict[str, str], text: str
) -> None:
    message = "gangs are packed" if kind == "mode_changed" else ""
    assert sentence(HistoryEvent(0.0, kind, "planner", message, figures)) == text


def test_a_move_off_an_emptied_node_names_no_drain_as_its_cause() -> None:
    figures = {"nodes": "n2", "goal": "DRAIN", "why": "its node n1 is reserved (upgrade)"}
    event = HistoryEvent(0.0, "move_begun", "drain:n1", "", figures)
    assert sentence(event) == "moves to n2, because its node n1 is reserved (upgrade)"


def test_every_goal_of_a_plan_has_words() -> None:
    goals = [value.name for value in Purpose.DESCRIPTOR.enum_types_by_name["Goal"].values if value.number]
    for goal in [goal.removeprefix("GOAL_") for goal in goals]:
        assert goal not in purpose({"goal": goal}), goal


def test_the_story_of_an_array_is_that_of_its_members_ends() -> None:
    chapters, totals = history_of(
        [
            happened(0.0, "array_submitted", "user:ann", members="2", gpus_each="1", at_once="1",
                     rule="halving by loss"),
            happened(9.0, "member_ended", "arrays/7", "halving: ...", member="7_0", job="jobs/8", state="stopped",
                     run_s="8.5", parameter_lr="0.1", loss="0.5"),
            happened(10.0, "member_ended", "", "", member="7_1", job="jobs/9", state="succeeded"),
            # As masters of before sent it.
            happened(11.0, "member_ended", "", "no file", member="7_2", job="jobs/10", state="failed", run_s="0.0"),
            happened(20.0, "array_ended", stopped="1", succeeded="1"),
        ]
    )  # fmt: skip
    assert [chapter.text for chapter in chapters] == [
        "submitted by user:ann: 2 jobs of 1 GPU each, 1 at once, stop rule halving by loss",
        "7_0 (lr=0.1) stopped, ran 8.50 s; loss=0.5; halving: ...",
        "7_1 succeeded before its first step",
        "7_2 failed before its first step; no file",
        "ended: 1 stopped, 1 succeeded",
    ]
    assert totals.ran_s == 8.5
