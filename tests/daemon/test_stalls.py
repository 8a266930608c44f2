"""Jobs that do not get on are told apart from those that only take their time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ganger.injob.page import PageProgress
from ganger.injob.page_layout import PagePhase
from ganger_daemon.devices.inventory import VIRTUAL_DRIVER
from ganger_daemon.gang.step_rate import IdleClock, IdleWatch, Watched, processor_s
from ganger_daemon.node.node_context import NodeContext
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


class UsedDevices:
    """A node with devices of this driver. `used`: what it reports on their use; `cpu_s`: of the gang's processes."""

    def __init__(self, driver: str = "550") -> None:
        self.used: bool | None = False
        self.cpu_s = 0.0
        self.inventory = SimpleNamespace(driver=driver)
        self.devices = SimpleNamespace(are_used=lambda pids, mask: self.used)
        self.cgroups = SimpleNamespace(pids=lambda group: (7,), cpu_s=lambda group: self.cpu_s)

    def watch(self, mask: int = 0b1, after_s: float = 10.0) -> IdleWatch:
        return IdleWatch(cast(NodeContext, self), "group", mask, after_s)


def looked_at(watch: IdleWatch, first: int, last: int, **counts: Any) -> bool:
    for now in range(first, last + 1):
        watch.follow([counters(counts.get("step", 0))._replace(evaluated=counts.get("evaluated", 0))], float(now))
    return watch.is_idle


def test_a_part_is_idle_after_its_time_without_a_step_and_without_use_of_its_devices() -> None:
    watch = UsedDevices().watch()
    assert not looked_at(watch, 0, 9)
    assert looked_at(watch, 10, 10)


@pytest.mark.parametrize("counts", [{"step": 1}, {"evaluated": 1}], ids=["a step", "an evaluated mini-batch"])
def test_progress_without_use_of_a_device_is_no_idleness(counts: dict[str, int]) -> None:
    watch = UsedDevices().watch()
    assert looked_at(watch, 0, 12)
    assert not looked_at(watch, 13, 13, **counts)
    assert not looked_at(watch, 14, 22, **counts)
    assert looked_at(watch, 23, 23, **counts)


@pytest.mark.parametrize("used", [True, None], ids=["in use", "not known"])
def test_a_device_that_is_used_or_whose_use_is_not_reported_is_not_idle(used: bool | None) -> None:
    node = UsedDevices()
    watch = node.watch()
    assert looked_at(watch, 0, 12)
    node.used = used
    assert not looked_at(watch, 13, 40)


def test_virtual_devices_are_used_while_the_processes_use_a_processor() -> None:
    node = UsedDevices(VIRTUAL_DRIVER)
    watch = node.watch()
    for now in range(60):
        node.cpu_s += 0.5
        assert not looked_at(watch, now, now)
    assert looked_at(watch, 60, 71)
    node.cpu_s += 5.0
    assert not looked_at(watch, 72, 72)


def test_time_in_which_a_part_may_not_run_does_not_count() -> None:
    watch = UsedDevices().watch()
    assert not looked_at(watch, 0, 6)
    watch.stand()
    assert not looked_at(watch, 100, 103)
    assert looked_at(watch, 104, 104), "six seconds before its rest, four after it"
    watch.begin_anew()
    assert not watch.is_idle
    assert not looked_at(watch, 200, 209)


@pytest.mark.parametrize("driver", ["550", VIRTUAL_DRIVER])
def test_the_next_daemon_goes_on_counting_where_the_former_one_was(driver: str) -> None:
    node = UsedDevices(driver)
    watch = node.watch()
    assert looked_at(watch, 0, 12)
    assert watch.is_news, "it has become idle"
    notes = json.loads(json.dumps(watch.journal()))
    assert not watch.is_news
    following = node.watch()
    following.recall(notes)
    assert following.is_idle
    assert looked_at(following, 100, 103)
    for counts in ({"step": 1}, {"evaluated": 1}):
        following = node.watch()
        following.recall(notes)
        assert not looked_at(following, 104, 105, **counts)
    unread = node.watch()
    unread.recall({})
    assert not unread.is_idle


@pytest.mark.parametrize(("mask", "after_s"), [(0, 10.0), (0b1, 0.0)], ids=["no device", "not to be watched"])
def test_what_is_not_watched_is_never_idle(mask: int, after_s: float) -> None:
    assert not looked_at(UsedDevices().watch(mask, after_s), 0, 100)


def test_other_times_of_the_master_hold_at_once() -> None:
    watch = UsedDevices().watch()
    assert not looked_at(watch, 0, 5)
    watch.after_s = 4.0
    assert watch.is_idle


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.floats(0.0, 5.0)), max_size=30))
def test_the_idle_time_is_that_since_the_last_use_or_step(looks: list[tuple[bool, bool, float]]) -> None:
    clock, now, step, since = IdleClock(), 0.0, 0, None
    for uses, steps, passed in looks:
        now, step = now + passed, step + steps
        clock.add((step,), lambda uses=uses: uses, now)  # type: ignore[misc]
        if uses or steps or since is None:
            since = now
        assert clock.idle_s == pytest.approx(now - since)
