"""Rates by windows, what they tell of one job, which probe comes next, and what a trial has shown."""

from __future__ import annotations

import math

import numpy as np
import pytest
from ganger_master.estimators.cpu import CpuPoint, fit_cpu
from ganger_master.planner.core_profiles import CoreProfile, CoresTrial, next_cores, shown
from ganger_master.planner.windows import ProgressSample, RateWindows
from ganger_master.policies.tunings import TuningNodes
from ganger_master.policies.tunings.demand import Known, known_gangs
from ganger_master.policies.tunings.predictor import predicted
from ganger_master.policies.tunings.synergy_greedy import SYNERGY_GREEDY
from hypothesis import given
from hypothesis import strategies as st


def points(*pairs: tuple[float, float]) -> tuple[CpuPoint, ...]:
    return tuple([CpuPoint(cores, rate) for cores, rate in pairs])


def naive_rates(looks: list[ProgressSample], least_s: float, least_steps: int) -> list[float]:
    rates, began = [], looks[0]
    for look in looks[1:]:
        if look.step < began.step:
            began = look
        elif look.time_s - began.time_s >= least_s and look.step - began.step >= least_steps:
            rates.append((look.step - began.step) / (look.time_s - began.time_s))
            began = look
    return rates[-64:]


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(-20, 9)), min_size=1, max_size=150), st.integers(1, 6))
def test_windows_are_long_enough_and_of_enough_steps(moves: list[tuple[int, int]], least: int) -> None:
    looks, time_s, step = [], 0.0, 30
    for seconds, steps in moves:
        time_s, step = time_s + seconds, max(0, step + steps)
        looks.append(ProgressSample(time_s, step))
    windows = RateWindows()
    for look in looks:
        windows = windows.after(look, float(least), 7 - least)
    assert list(windows.rates) == naive_rates(looks, float(least), 7 - least)


def test_a_clock_that_is_set_back_costs_no_more_than_the_open_window() -> None:
    windows = RateWindows()
    for at in range(8):
        windows = windows.after(ProgressSample(10_000.0 + at, 10 * at), 2.0, 5)
    for at in range(8, 16):
        windows = windows.after(ProgressSample(10_000.0 + at - 3_600.0, 10 * at), 2.0, 5)
    assert windows.rates == (10.0,) * 6


def test_an_evaluation_in_one_window_does_not_change_the_usual_rate() -> None:
    assert RateWindows(rates=(10.0, 10.2, 0.4, 10.1, 9.9)).rate == 10.0
    assert math.isnan(RateWindows().rate)


def test_a_curve_of_another_job_is_brought_to_the_height_of_this_one_and_replaced_point_by_point() -> None:
    profile = CoreProfile(inherited=points((1, 10), (2, 20), (4, 40)))
    assert profile.model is not None
    assert profile.model.rate(2) == pytest.approx(20, rel=0.02)
    profile = profile.measured(CpuPoint(2, 60.0))
    assert {(point.cores, round(point.rate)) for point in profile.points} == {(1, 30), (2, 60), (4, 120)}
    profile = profile.measured(CpuPoint(4, 110.0))
    assert profile.at(4) == 110.0
    assert profile.inherited
    # Another one, after all.
    assert profile.measured(CpuPoint(1, 60.0)) == CoreProfile(points((2, 60), (4, 110), (1, 60)))


def test_a_rate_that_is_no_surprise_changes_nothing_and_one_that_is_makes_all_void() -> None:
    profile = CoreProfile(points((1, 10), (4, 40)))
    assert profile.measured(CpuPoint(4, 34.0)) == profile
    assert profile.measured(CpuPoint(4, 20.0)) == CoreProfile(points((4, 20)))


def test_of_one_point_nobody_knows_whether_more_cores_help() -> None:
    assert CoreProfile(points((2, 20))).model is None


@pytest.mark.parametrize(
    ("profile", "held", "free", "expected"),
    [
        (CoreProfile(), 2_000, 6_000, None),
        # All there are, and then one.
        (CoreProfile(points((2, 20))), 2_000, 6_000, 8),
        (CoreProfile(points((2, 20), (8, 80))), 2_000, 6_000, 1),
        # Nobody gives anything for a trial.
        (CoreProfile(points((2, 20))), 2_000, 0, 1),
        (CoreProfile(points((2, 20))), 2_000, 400, 1),
        # Less than a core, and nothing free.
        (CoreProfile(points((0.5, 5))), 500, 0, None),
        # A plateau was seen: what has become free beyond is not tried.
        (CoreProfile(points((4, 20), (1, 20))), 1_000, 60_000, None),
        # A quarter more is worth no trial of its own.
        (CoreProfile(points((4, 40), (1, 10), (2, 20))), 4_000, 1_000, 3),
        # What the one before showed is looked at once, as far away as can be.
        (CoreProfile(points((1, 30)), points((1, 10), (4, 10), (16, 10))), 1_000, 7_000, 4),
        (CoreProfile(points((1, 30)), points((1, 10), (4, 10), (16, 10))), 1_000, 15_000, 16),
        # What cannot be looked at does not keep from the rest.
        (CoreProfile(points((2, 30)), points((2, 10), (4, 10))), 2_000, 1_000, 1),
    ],
)
def test_which_probe_comes_next(profile: CoreProfile, held: int, free: int, expected: int | None) -> None:
    assert next_cores(profile, held, free) == expected


@given(
    st.lists(st.tuples(st.integers(1, 40), st.floats(0.1, 100.0)), min_size=1, max_size=6),
    st.integers(200, 40_000),
    st.integers(0, 40_000),
)
def test_a_probe_is_never_more_than_there_is_nor_what_it_has(
    measured: list[tuple[int, float]], held: int, free: int
) -> None:
    profile = CoreProfile(points(*{cores: (cores, rate) for cores, rate in measured}.values()))
    found = next_cores(profile, held, free)
    assert found is None or (1 <= found <= (held + free) // 1000 and found * 1000 != held)


def rates(mean: float, windows: int, seed: int = 1) -> tuple[float, ...]:
    return tuple((mean * (1 + 0.02 * np.random.default_rng(seed).standard_normal(windows))).tolist())


@pytest.mark.parametrize(
    ("tried", "after", "expected"),
    [
        (4_000, 20.0, 20.0),  # faster
        (4_000, 10.0, 10.0),  # no faster: the rate from before
        (4_000, 8.0, 10.0),  # slower by chance, for more cores slow nobody
        (1_000, 5.0, 5.0),  # slower
        (1_000, 10.0, 10.0),  # no slower
    ],
)
def test_a_gain_or_loss_that_is_not_to_be_seen_counts_as_none(tried: int, after: float, expected: float) -> None:
    trial = CoresTrial(tried, 2_000, rates(10.0, 64), 0.0)
    point = shown(trial, rates(after, 64, seed=2))
    assert point is not None
    assert (point.cores, point.rate) == (tried / 1000, pytest.approx(expected, rel=0.02))


def test_too_few_windows_show_nothing() -> None:
    trial = CoresTrial(4_000, 2_000, rates(10.0, 8), 0.0)
    assert shown(trial, rates(20.0, 3)) is None
    assert shown(trial, rates(20.0, 3), is_last=True) is None


@pytest.mark.parametrize(("tried", "expected"), [(4_000, 10.0), (1_000, 10.1)])
def test_what_is_open_when_time_is_up_is_no_gain_and_may_be_a_loss(tried: int, expected: float) -> None:
    trial = CoresTrial(tried, 2_000, (9.0, 10.0, 11.0, 10.0), 0.0)
    after = (9.1, 10.1, 11.1, 10.1)
    assert shown(trial, after) is None
    assert shown(trial, after, is_last=True) == CpuPoint(tried / 1000, expected)


def test_of_who_is_known_by_cores_alone_memory_is_its_share() -> None:
    model = fit_cpu(points((1, 10), (4, 10)))
    assert model is not None
    known = Known(predicted([model], 4), lambda numbers: np.zeros(len(numbers), np.int64), knows_memory=False)
    nodes = TuningNodes(np.array([4]), np.array([16.0]), np.array([64e9]))
    gangs = known_gangs(known, np.array([7]), np.array([2]), np.array([False]), nodes)
    placed = SYNERGY_GREEDY.place(gangs, nodes) if SYNERGY_GREEDY.place else None
    assert placed is not None
    assert (placed.cores.tolist(), placed.memory_bytes.tolist()) == ([2.0], [32e9])
