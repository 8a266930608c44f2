"""GPU-seconds are charged from the first step of a gang until its GPUs are free, and for nothing else."""

from __future__ import annotations

import math

import pytest
from core.drive import ALL_LEVELS, Drive, job_of
from core.test_colocation import Packing
from ganger_master.core.accounting import DAY_S, DAYS_KEPT, UserUsage, decayed_at, gpu_s_since, mean_gpus, used_until
from ganger_master.core.commands import CancelJob, ProposePlan, ResumeJob, SuspendJob, Tick
from ganger_master.core.gang_model import ObservedPhase
from ganger_master.core.job_model import SuspendLevel
from ganger_master.core.plan_changes import StartChange
from ganger_master.core.settings import CoreSettings
from ganger_master.core.state_image import image_of, restored, state_of
from ganger_master.core.tenancy import Team
from ganger_master.core.usage import report, standing
from hypothesis import given
from hypothesis import strategies as some
from msgspec.structs import replace

HALF_LIFE_S = 1_000.0
SETTINGS = CoreSettings(usage_half_life_s=HALF_LIFE_S, lost_after_s=None, silent_margin_s=None)


def gpu_s(drive: Drive, user: str = "ann") -> float:
    usage = drive.state.usage.get(user)
    return 0.0 if usage is None else gpu_s_since(used_until(usage, drive.now, HALF_LIFE_S), 0)


def running(drive: Drive, gpus: int, user: str = "ann") -> int:
    number = drive.submit(job_of(gpus), user)
    if drive.state.is_planned:
        drive.step(ProposePlan((StartChange(number, drive.job(number).revision, drive.places(number)[0]),)))
    else:
        drive.start(number)
    drive.runs(number)
    return number


def end(drive: Drive, number: int) -> None:
    """A job is cancelled, and its GPUs are free at once."""
    epoch = drive.job(number).epoch
    drive.step(CancelJob(number, "", drive.job(number).user))
    drive.seen(number, epoch, ObservedPhase.ENDED)


def test_a_waiting_job_and_one_that_starts_cost_nothing_and_a_running_one_its_gpus() -> None:
    drive = Drive(settings=SETTINGS)
    number = drive.submit(job_of(3), "ann")
    drive.now += 500.0
    drive.step(Tick())
    drive.start(number)
    drive.now += 500.0
    assert gpu_s(drive) == 0.0
    drive.runs(number)
    drive.now += 100.0
    assert gpu_s(drive) == pytest.approx(300.0)
    drive.step(CancelJob(number, "", "ann"))
    drive.now += 100.0
    assert gpu_s(drive) == pytest.approx(600.0, abs=0.1), "it has a grace to end in"
    drive.seen(number, drive.job(number).epoch, ObservedPhase.ENDED)
    drive.now += 100.0
    assert gpu_s(drive) == pytest.approx(600.0, abs=0.1)


def test_a_suspended_job_costs_its_gpus_until_they_are_free() -> None:
    drive = Drive(settings=SETTINGS)
    number = running(drive, 2)
    drive.state.put_job(replace(drive.job(number), capabilities=ALL_LEVELS))
    drive.now += 10.0
    drive.step(SuspendJob(number, SuspendLevel.OFFLOAD))
    # As long as it takes to stop.
    drive.now += 1_000.0
    drive.seen(number, drive.job(number).epoch, ObservedPhase.PARKED, 7)
    rested = gpu_s(drive)
    assert rested == pytest.approx(2_020.0, abs=0.1)
    drive.now += 1_000.0
    assert gpu_s(drive) == rested
    drive.step(ResumeJob(number))
    drive.start(number)
    drive.now += 10.0
    assert gpu_s(drive) == pytest.approx(rested + 20.0, abs=0.1)


def test_a_paused_job_costs_the_gpus_that_it_keeps() -> None:
    drive = Drive(settings=SETTINGS)
    number = running(drive, 2)
    drive.state.put_job(replace(drive.job(number), capabilities=ALL_LEVELS))
    drive.step(SuspendJob(number, SuspendLevel.PAUSE))
    drive.seen(number, drive.job(number).epoch, ObservedPhase.PARKED, 7)
    before = gpu_s(drive)
    drive.now += 100.0
    assert gpu_s(drive) == pytest.approx(before + 200.0)


def test_two_gangs_that_share_devices_cost_what_the_devices_cost() -> None:
    drive = Packing()
    spec = replace(job_of(2), gpu_memory_bytes=4 << 26)
    host = drive.submit(spec, "ann")
    drive.start(host)
    drive.runs(host)
    guest = drive.submit(spec, "bob")
    assert drive.propose(StartChange(guest, drive.job(guest).revision, drive.beside(guest, host))) == [None]
    assert [drive.state.usage.gpus_of(user) for user in ("ann", "bob")] == [2.0, 0.0]
    drive.runs(guest)
    assert [drive.state.usage.gpus_of(user) for user in ("ann", "bob")] == [1.0, 1.0]
    end(drive, guest)
    assert [drive.state.usage.gpus_of(user) for user in ("ann", "bob")] == [2.0, 0.0]


def test_use_survives_a_restart_and_goes_on_while_the_master_is_away() -> None:
    drive = Drive(settings=SETTINGS)
    ended = running(drive, 1)
    drive.now += 50.0
    end(drive, ended)
    running(drive, 2)
    drive.now += 50.0
    elements = list(drive.state.take_changes().puts.values())
    usage = restored(SETTINGS, elements, drive.now + 100.0).usage["ann"]
    assert usage == drive.state.usage["ann"]
    assert gpu_s_since(used_until(usage, drive.now + 100.0, HALF_LIFE_S), 0) == pytest.approx(50.0 + 300.0, abs=0.5)


def test_a_database_without_use_counts_from_the_restart_on_and_stores_that() -> None:
    drive = Drive(settings=SETTINGS)
    running(drive, 2)
    elements = [one for one in drive.state.take_changes().puts.values() if not isinstance(one, UserUsage)]
    again = restored(SETTINGS, elements, 900.0)
    assert again.usage["ann"] == UserUsage("ann", 900.0, 2.0)
    assert again.take_changes().puts["user_usage", "ann"] == again.usage["ann"]


def test_a_recorded_state_has_the_same_use() -> None:
    drive = Drive(settings=SETTINGS)
    running(drive, 2)
    drive.state.take_changes()
    again = state_of(image_of(drive.state))
    assert again.usage == drive.state.usage
    assert again.usage.gpus_of("ann") == 2.0
    assert not again.take_changes()


@pytest.mark.parametrize("set_by", [3_600.0, -3_600.0])
def test_a_clock_that_is_set_charges_nothing_and_forgives_nothing(set_by: float) -> None:
    drive = Drive(settings=SETTINGS)
    drive.now = 2 * DAY_S
    running(drive, 2)
    drive.now += 100.0 + set_by
    drive.step(Tick(set_by=set_by))
    assert gpu_s(drive) == pytest.approx(200.0, abs=0.1)


def test_a_change_of_a_job_writes_at_most_the_row_of_its_user() -> None:
    drive = Drive(settings=SETTINGS)
    running(drive, 1, "bob")
    number = drive.submit(job_of(1), "ann")
    drive.start(number)
    drive.state.take_changes()
    drive.runs(number)
    assert [key for kind, key in drive.state.take_changes().puts if kind == "user_usage"] == ["ann"]
    drive.now += 100.0
    drive.runs(number)
    drive.step(Tick())
    assert not [key for kind, key in drive.state.take_changes().puts if kind == "user_usage"]


def test_users_of_whose_use_nothing_is_left_are_forgotten_when_another_comes() -> None:
    drive = Drive(settings=SETTINGS)
    end(drive, running(drive, 1))
    drive.now += (DAYS_KEPT + 1.0) * DAY_S
    running(drive, 1, "bob")
    assert set(drive.state.usage) == {"bob"}
    assert ("user_usage", "ann") not in drive.state.take_changes().puts


times = some.floats(0.0, 40.0 * DAY_S, allow_nan=False)


@given(some.floats(0.0, 64.0), times, some.lists(times, max_size=6))
def test_use_does_not_depend_on_when_it_is_looked_at(gpus: float, begin: float, looks: list[float]) -> None:
    usage = stepwise = UserUsage("ann", begin, gpus, 77.0)
    end = max([begin, *looks])
    for time in sorted(time for time in looks if time >= begin):
        stepwise = used_until(stepwise, time, HALF_LIFE_S)
    whole, parts = used_until(usage, end, HALF_LIFE_S), used_until(stepwise, end, HALF_LIFE_S)
    assert parts.decayed_gpu_s == pytest.approx(whole.decayed_gpu_s, rel=1e-9)
    assert gpu_s_since(parts, 0) == pytest.approx(gpu_s_since(whole, 0), abs=0.1)
    assert gpu_s_since(whole, 0) == pytest.approx(gpus * (end - begin), abs=0.1)


def test_the_decayed_sum_halves_with_each_half_life_and_tends_to_the_running_gpus() -> None:
    idle = UserUsage("ann", 0.0, 0.0, 100.0)
    assert decayed_at(idle, HALF_LIFE_S, HALF_LIFE_S) == pytest.approx(50.0)
    busy = UserUsage("ann", 0.0, 4.0)
    assert mean_gpus(decayed_at(busy, HALF_LIFE_S, HALF_LIFE_S), HALF_LIFE_S) == pytest.approx(2.0)
    assert mean_gpus(decayed_at(busy, 40 * HALF_LIFE_S, HALF_LIFE_S), HALF_LIFE_S) == pytest.approx(4.0)
    assert math.isclose(decayed_at(busy, -5.0, HALF_LIFE_S), 0.0)


def test_days_are_kept_apart_and_old_ones_go() -> None:
    usage = used_until(UserUsage("ann", 0.5 * DAY_S, 2.0), 2.25 * DAY_S, HALF_LIFE_S)
    assert (usage.first_day, usage.days) == (0, (1.0 * DAY_S, 2.0 * DAY_S, 0.5 * DAY_S))
    assert gpu_s_since(usage, 1) == 2.5 * DAY_S
    later = used_until(replace(usage, gpus=0.0), (DAYS_KEPT + 1.0) * DAY_S, HALF_LIFE_S)
    assert (later.first_day, later.days) == (2, (0.5 * DAY_S,))
    assert not used_until(replace(usage, gpus=0.0), (DAYS_KEPT + 3.0) * DAY_S, HALF_LIFE_S).days


def test_the_report_sums_users_by_team_and_names_users_without_use() -> None:
    teams = {"vision": Team(("ann", "eve"), 3.0, 8), "text": Team(("bob",))}
    drive = Drive(2, replace_settings(teams))
    for user, gpus in (("ann", 3), ("bob", 1), ("cat", 2)):
        running(drive, gpus, user)
    drive.now += 100.0
    vision, text, others = report(drive.state, drive.state.usage.values(), 0.0, drive.now)
    assert [one.team for one in (vision, text, others)] == ["vision", "text", ""]
    assert [one.share for one in (vision, text, others)] == [0.6, 0.2, 0.2]
    assert (vision.limit, text.limit, others.limit) == (8, None, None)
    assert [(user.user, user.running) for user in vision.users] == [("ann", 3.0), ("eve", 0.0)]
    assert vision.users[0].gpu_s == pytest.approx(300.0, abs=1.0)
    assert sum(one.used for one in (vision, text, others)) == pytest.approx(1.0)
    assert vision.used == pytest.approx(0.5, abs=0.01)


def test_the_standing_of_a_user_is_told_with_the_use_and_share_of_its_team() -> None:
    drive = Drive(2, replace_settings({"vision": Team(("ann", "eve"), 3.0), "text": Team(("bob",))}))
    for user, gpus in (("ann", 3), ("bob", 1)):
        running(drive, gpus, user)
    drive.now += 500.0
    told = standing(drive.state, "eve", drive.now)
    assert told == "team 'vision' has 75% of the use of late, of which 0% is user 'eve''s, and a share of 75%"
    assert standing(drive.state, "bob", drive.now) == "team 'text' has 25% of the use of late, and a share of 25%"
    assert standing(drive.state, "cat", drive.now) == "users of no team have used nothing of late"
    assert standing(Drive().state, "ann", 1.0) == ""


def replace_settings(teams: dict[str, Team]) -> CoreSettings:
    return CoreSettings(teams=teams, usage_half_life_s=HALF_LIFE_S)
