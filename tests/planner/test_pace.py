"""When the next plan is made: at once on news, by itself in time, never all the time."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from ganger_master.core.job_model import SuspendLevel
from ganger_master.core.plan_changes import Goal, MoveChange, Purpose, ResizeChange, StartChange, SuspendChange
from ganger_master.planner.context import PlanDraft
from ganger_master.planner.plan_pace import AnsweredPlan, PlanPace, is_stop
from msgspec.structs import replace

NOTHING = AnsweredPlan()
JOB_WAITS = AnsweredPlan(waits=True, took_s=0.001)


def test_the_first_plan_may_stop_and_waits_for_nothing_but_news() -> None:
    pace = PlanPace(300.0)
    assert pace.may_stop(0.0)
    assert pace.wait_s(0.0, is_news=True) == 0.0
    assert pace.wait_s(0.0, is_news=False) == inf


def test_the_changes_that_count_as_preemptions() -> None:
    stop = SuspendChange(7, 1, level=SuspendLevel.CHECKPOINT)
    unpacked = SuspendChange(7, 1, level=SuspendLevel.CHECKPOINT, purpose=Purpose(Goal.UNPACK))
    moments = [SuspendChange(7, 1, level=SuspendLevel.OFFLOAD), MoveChange(7, 1, ()), StartChange(7, 1, ())]
    resized = ResizeChange(7, 1, ())
    assert is_stop(stop, resizes=False)
    assert is_stop(resized, resizes=True)
    assert not any(is_stop(change, resizes=False) for change in (unpacked, resized, *moments))


def test_after_a_stop_others_start_at_once_and_are_stopped_only_when_it_is_time() -> None:
    pace = PlanPace(300.0).after(1000.0, replace(JOB_WAITS, preempts=True))
    assert not pace.may_stop(1299.9)
    assert pace.may_stop(1300.0)
    assert pace.wait_s(1001.0, is_news=True) == 0.0
    assert pace.wait_s(1001.0, is_news=False) == 299.0


@pytest.mark.parametrize(
    ("answered", "wait_s"),
    [
        (NOTHING, inf),
        # Pending jobs are ranked again even if no order reports a change.
        (JOB_WAITS, 300.0),
        (AnsweredPlan(due_s=1020.0), 20.0),
        (AnsweredPlan(due_s=1000.01), 0.5),
        (AnsweredPlan(waits=True, again_s=1005.0), 5.0),
    ],
)
def test_without_news_the_next_plan_comes_when_something_may_have_changed(
    answered: AnsweredPlan, wait_s: float
) -> None:
    pace = PlanPace(300.0).after(1000.0, answered)
    assert pace.wait_s(1000.0, is_news=False) == wait_s


def test_a_plan_that_starts_all_pending_jobs_leaves_none_waiting() -> None:
    starts, line = (StartChange(7, 1, ()),), np.array([7])
    assert not PlanDraft(starts, line=line).leaves_waiting
    assert PlanDraft(line=line).leaves_waiting
    assert PlanDraft(waits=True).leaves_waiting


def test_planning_leaves_most_of_a_core_to_others() -> None:
    pace = PlanPace(300.0).after(1000.0, AnsweredPlan(took_s=0.5))
    assert pace.wait_s(1000.0, is_news=True) == 1.5


def test_the_time_that_the_master_took_to_judge_a_plan_counts_as_rest() -> None:
    pace = PlanPace(300.0).after(1000.0, AnsweredPlan(took_s=0.5, judged_s=1.0))
    assert pace.wait_s(1000.0, is_news=True) == 0.5
    pace = PlanPace(300.0).after(1000.0, AnsweredPlan(took_s=0.5, judged_s=9.0))
    assert pace.wait_s(1000.0, is_news=True) == pytest.approx(0.005)


def test_refused_again_and_again_it_asks_less_and_less_often_and_then_as_before() -> None:
    pace, waits = PlanPace(300.0), []
    for _ in range(7):
        pace = pace.after(1000.0, replace(JOB_WAITS, is_refused=True))
        waits.append(round(pace.wait_s(1000.0, is_news=True), 3))
        assert pace.wait_s(1000.0, is_news=False) == pace.wait_s(1000.0, is_news=True)
    assert waits == [0.1, 0.3, 1.0, 3.0, 10.0, 10.0, 10.0]
    pace = pace.after(1000.0, JOB_WAITS)
    assert pace.wait_s(1000.0, is_news=True) == pytest.approx(0.005)
