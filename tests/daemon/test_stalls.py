"""Jobs that do not get on are told apart from those that only take their time."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from ganger.injob.page import PageProgress
from ganger.injob.page_layout import PagePhase
from ganger_daemon.gang.step_rate import Watched, processor_s
from hypothesis import given
from hypothesis import strategies as st


def counters(step: int, phase: int = PagePhase.TRAINING, data_wait_s: float = 0.0) -> PageProgress:
    nothing = PageProgress(*[0] * len(PageProgress._fields))
    return nothing._replace(step=step, phase=phase, data_wait_ns=round(data_wait_s * 1e9))


def trained(seconds: int, *, pace: float = 10.0, ranks: int = 2, every: float = 1.0) -> Watched:
    """Ranks that step together, looked at every second."""
    watched = Watched(0.0)
    for look in range(1, int(seconds / every) + 1):
        now = look * every
        watched.add({rank: counters(int(now * pace)) for rank in range(ranks)}, now)
    return watched


def stands_still(watched: Watched, until: float, phase: int = PagePhase.TRAINING, **steps: int) -> str:
    """`steps`: other ones of some ranks ("rank1=7")."""
    ranks = {rank: counters(steps.get(f"rank{rank}", progress.step), phase) for rank, progress in watched.ranks.items()}
    watched.add(ranks, until)
    return watched.stall_reason(until)


def test_a_job_that_steps_is_no_concern() -> None:
    for pace in (0.02, 1.0, 50.0):
        assert trained(300, pace=pace).stall_reason(300.0) == ""


def test_no_step_for_a_minute_is_a_hang() -> None:
    watched = trained(100)
    assert stands_still(watched, 159.0) == ""
    assert stands_still(watched, 161.0) == "no step for 1m 1s, step 1000 is the last"


def test_the_ranks_that_are_behind_are_named() -> None:
    watched = trained(100, ranks=3)
    said = stands_still(watched, 200.0, rank0=1001, rank2=1001)
    assert said == "no step for 1m 40s, step 1000 is the last; rank 1 is behind the others"
    said = stands_still(trained(100, ranks=8), 200.0, rank7=1001, rank6=1001)
    assert said.endswith("ranks 0, 1, 2, 3, ... are behind the others")


def test_a_job_that_has_made_long_pauses_may_make_them_again() -> None:
    """Steps of half a minute, evaluations of two minutes between epochs."""
    assert stands_still(trained(300, pace=1 / 30), 300.0 + 290.0) == ""
    assert "no step" in stands_still(trained(300, pace=1 / 30), 300.0 + 310.0)


@pytest.mark.parametrize("phase", [PagePhase.EVALUATION, PagePhase.COMPILATION])
def test_phases_without_boundaries_take_longer(phase: PagePhase) -> None:
    assert stands_still(trained(100), 690.0, phase) == ""
    assert "no step" in stands_still(trained(100), 710.0, phase)


def test_a_job_that_is_done_does_not_hang() -> None:
    assert stands_still(trained(100), 10_000.0, PagePhase.DONE) == ""


def test_a_job_without_a_first_step_is_a_concern_after_ten_minutes() -> None:
    watched = Watched(0.0)
    watched.add({0: counters(0, PagePhase.START)}, 1.0)
    assert watched.stall_reason(599.0) == ""
    assert watched.stall_reason(660.0) == "no step in the 11m that it has been running"


def test_a_job_without_boundaries_is_judged_by_its_processor_time() -> None:
    watched = Watched(0.0)
    watched.add({0: counters(0)}, 1.0)
    for minute in range(30):
        watched.add_processor_time(3.0 * minute, 60.0 * minute)
    assert watched.stall_reason(1_800.0) == ""
    for minute in range(30, 45):
        watched.add_processor_time(90.0 + 0.001 * minute, 60.0 * minute)
    assert watched.stall_reason(60.0 * 44) == "its processes have used less than 1 % of a processor for 14m"


def test_a_rank_that_waits_for_data_holds_back_the_others() -> None:
    watched = Watched(0.0)
    for now in range(1, 40):
        waits = {0: 0.05, 1: 0.6, 2: 0.1}
        watched.add({rank: counters(now * 10, 1, share * now) for rank, share in waits.items()}, float(now))
    assert watched.stall_reason(39.0) == "rank 1 waits for data 60% of the time, the others 8%: it holds them back"
    for now in range(40, 80):
        even = {rank: counters(now * 10, 1, progress.data_wait_ns / 1e9) for rank, progress in watched.ranks.items()}
        watched.add(even, float(now))
    assert watched.stall_reason(79.0) == ""


def test_a_rank_that_makes_few_steps_is_named() -> None:
    watched = Watched(0.0)
    for now in range(1, 40):
        watched.add({0: counters(now * 10), 1: counters(now * 5), 2: counters(now * 10)}, float(now))
    assert watched.stall_reason(39.0) == "rank 1 makes 150 steps while the others make 300"


@given(
    st.lists(st.tuples(st.floats(0.1, 30.0), st.integers(0, 3), st.floats(0.0, 5.0)), max_size=30),
    st.integers(1, 4),
)
def test_whatever_the_counters_say_a_step_within_the_minute_is_no_hang(
    looks: list[tuple[float, int, float]], ranks: int
) -> None:
    watched, now, stepped = Watched(0.0), 0.0, None
    step, waited = 0, 0.0
    for pause, steps, wait in looks:
        now += pause
        step += steps
        waited += wait
        stepped = now if steps else stepped
        watched.add({rank: counters(step, 1, waited) for rank in range(ranks)}, now)
        if stepped is not None and now - stepped < 60.0:
            assert "no step" not in watched.stall_reason(now)


def test_processor_time_is_that_of_all_processes_below() -> None:
    script = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'sum(range(5_000_000))'])\n"
        "print(flush=True); input()"
    )
    busy = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert busy.stdout is not None
    busy.stdout.readline()
    seconds = processor_s([busy.pid])
    busy.communicate(b"\n")
    assert seconds > 0.02
    assert processor_s([busy.pid]) == 0.0
    assert processor_s([os.getpid()]) > 0.0
