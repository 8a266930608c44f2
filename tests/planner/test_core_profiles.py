"""Rate windows, the core profile of one job, the choice of the next probe, and the conclusion of a trial."""

from __future__ import annotations

import math

import numpy as np
import pytest
from ganger_master.estimators.cores_and_memory import CpuPoint, fit_cpu
from ganger_master.planner.core_profiles import CoreProfile
from ganger_master.planner.resource_trials import ResourceTrial, conclude, next_cores
from ganger_master.policies.trials import ProgressSample, RateWindows, TrialPace
from ganger_master.policies.tunings import Known, TuningNodes, known_gangs
from ganger_master.policies.tunings.catalogue import predicted
from ganger_master.policies.tunings.synergy import SYNERGY_GREEDY
from hypothesis import given
from hypothesis import strategies as st


def points(*pairs: tuple[float, float]) -> tuple[CpuPoint, ...]:
    return tuple([CpuPoint(cores, rate) for cores, rate in pairs])


def naive_rates(samples: list[ProgressSample], least_s: float, least_steps: int) -> list[float]:
    rates, began = [], samples[0]
    for sample in samples[1:]:
        if sample.step < began.step:
            began = sample
        elif sample.time_s - began.time_s >= least_s and sample.step - began.step >= least_steps:
            rates.append((sample.step - began.step) / (sample.time_s - began.time_s))
            began = sample
    return rates[-64:]


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(-20, 9)), min_size=1, max_size=150), st.integers(1, 6))
def test_every_window_has_the_least_length_and_the_least_number_of_steps(
    moves: list[tuple[int, int]], least: int
) -> None:
    samples, time_s, step = [], 0.0, 30
    for seconds, steps in moves:
        time_s, step = time_s + seconds, max(0, step + steps)
        samples.append(ProgressSample(time_s, step))
    windows, pace = RateWindows(since_s=0.0), TrialPace(window_s=float(least), window_steps=7 - least)
    for sample in samples:
        windows = windows.after(sample, 1.0, pace)
    assert list(windows.rates) == naive_rates(samples, float(least), 7 - least)


def test_setting_a_clock_back_costs_only_the_open_window() -> None:
    windows, pace = RateWindows(since_s=0.0), TrialPace(window_s=2.0, window_steps=5)
    for at in range(8):
        windows = windows.after(ProgressSample(10_000.0 + at, 10 * at), 1.0, pace)
    for at in range(8, 16):
        windows = windows.after(ProgressSample(10_000.0 + at - 3_600.0, 10 * at), 1.0, pace)
    assert windows.rates == (10.0,) * 6


def test_an_evaluation_in_one_window_does_not_change_the_median_rate() -> None:
    assert RateWindows(rates=(10.0, 10.2, 0.4, 10.1, 9.9)).rate == 10.0
    assert math.isnan(RateWindows().rate)


def test_an_inherited_curve_is_scaled_to_the_rates_of_the_job_and_replaced_point_by_point() -> None:
    profile = CoreProfile(inherited=points((1, 10), (2, 20), (4, 40)))
    assert profile.model is not None
    assert profile.model.rate(2) == pytest.approx(20, rel=0.02)
    profile = profile.with_point(CpuPoint(2, 60.0))
    assert {(point.cores, round(point.rate)) for point in profile.points} == {(1, 30), (2, 60), (4, 120)}
    profile = profile.with_point(CpuPoint(4, 110.0))
    assert profile.at(4) == 110.0
    assert profile.inherited
    # A surprising rate drops the inherited points.
    assert profile.with_point(CpuPoint(1, 60.0)) == CoreProfile(points((2, 60), (4, 110), (1, 60)))


def test_an_expected_rate_changes_nothing_and_a_surprising_rate_voids_all_points() -> None:
    profile = CoreProfile(points((1, 10), (4, 40)))
    assert profile.with_point(CpuPoint(4, 34.0)) == profile
    assert profile.with_point(CpuPoint(4, 20.0)) == CoreProfile(points((4, 20)))


def test_one_point_is_not_enough_for_a_curve() -> None:
    assert CoreProfile(points((2, 20))).model is None


@pytest.mark.parametrize(
    ("profile", "held", "free", "expected"),
    [
        (CoreProfile(), 2_000, 6_000, None),
        # The first probe takes all cores, the next one core.
        (CoreProfile(points((2, 20))), 2_000, 6_000, 8),
        (CoreProfile(points((2, 20), (8, 80))), 2_000, 6_000, 1),
        # No other job gives up cores for a trial.
        (CoreProfile(points((2, 20))), 2_000, 0, 1),
        (CoreProfile(points((2, 20))), 2_000, 400, 1),
        # The job has less than one core, and none is free.
        (CoreProfile(points((0.5, 5))), 500, 0, None),
        # Beyond a measured plateau free cores are not tried.
        (CoreProfile(points((4, 20), (1, 20))), 1_000, 60_000, None),
        # A quarter more cores than measured is not worth a trial.
        (CoreProfile(points((4, 40), (1, 10), (2, 20))), 4_000, 1_000, 3),
        # The inherited curve is checked once, at the farthest point within reach.
        (CoreProfile(points((1, 30)), points((1, 10), (4, 10), (16, 10))), 1_000, 7_000, 4),
        (CoreProfile(points((1, 30)), points((1, 10), (4, 10), (16, 10))), 1_000, 15_000, 16),
        # Where that check is impossible, other probes follow.
        (CoreProfile(points((2, 30)), points((2, 10), (4, 10))), 2_000, 1_000, 1),
    ],
)
def test_the_next_probe_is_the_most_informative_within_reach(
    profile: CoreProfile, held: int, free: int, expected: int | None
) -> None:
    assert next_cores(profile, held, free) == expected


@given(
    st.lists(st.tuples(st.integers(1, 40), st.floats(0.1, 100.0)), min_size=1, max_size=6),
    st.integers(200, 40_000),
    st.integers(0, 40_000),
)
def test_a_probe_never_exceeds_the_available_cores_or_equals_the_held_ones(
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
        (4_000, 10.0, 10.0),  # no faster: the rate before counts
        (4_000, 8.0, 10.0),  # slower by chance, since more cores slow no job down
        (1_000, 5.0, 5.0),  # slower
        (1_000, 10.0, 10.0),  # no slower
    ],
)
def test_a_gain_or_loss_below_significance_counts_as_none(tried: int, after: float, expected: float) -> None:
    trial = ResourceTrial(tried, 2_000, rates(10.0, 64), 0.0)
    point = conclude(trial, rates(after, 64, seed=2))
    assert point is not None
    assert (point.cores, point.rate) == (tried / 1000, pytest.approx(expected, rel=0.02))


def test_too_few_windows_conclude_nothing() -> None:
    trial = ResourceTrial(4_000, 2_000, rates(10.0, 8), 0.0)
    assert conclude(trial, rates(20.0, 3)) is None
    assert conclude(trial, rates(20.0, 3), is_last=True) is None


@pytest.mark.parametrize(("tried", "expected"), [(4_000, 10.0), (1_000, 10.1)])
def test_a_trial_that_ends_inconclusive_shows_no_gain_but_may_show_a_loss(tried: int, expected: float) -> None:
    trial = ResourceTrial(tried, 2_000, (9.0, 10.0, 11.0, 10.0), 0.0)
    after = (9.1, 10.1, 11.1, 10.1)
    assert conclude(trial, after) is None
    assert conclude(trial, after, is_last=True) == CpuPoint(tried / 1000, expected)


def test_a_job_with_a_profile_of_cores_alone_gets_its_share_of_memory() -> None:
    model = fit_cpu(points((1, 10), (4, 10)))
    assert model is not None
    known = Known(predicted([model], 4), lambda numbers: np.zeros(len(numbers), np.int64), knows_memory=False)
    nodes = TuningNodes(np.array([4]), np.array([16.0]), np.array([64e9]))
    gangs = known_gangs(known, np.array([7]), np.array([2]), np.array([False]), nodes)
    placed = SYNERGY_GREEDY.place(gangs, nodes) if SYNERGY_GREEDY.place else None
    assert placed is not None
    assert (placed.cores.tolist(), placed.memory_bytes.tolist()) == ([2.0], [32e9])
