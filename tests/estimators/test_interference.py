"""Jobs on one GPU: measured pairs, Gandiva's Table 1, and what trials teach."""

from __future__ import annotations

import math

import numpy as np
import pytest
from estimators.published import GANDIVA, lucid_trials, rows
from ganger_master.estimators.speed import (
    UNKNOWN_DEVICE,
    ColocationTrial,
    Contention,
    Pressure,
    forecast,
    learn,
    shared_speeds,
)
from hypothesis import given
from hypothesis import strategies as st

GB = 1e9
pressures = st.lists(st.builds(Pressure, st.floats(0.0, 1.0), st.floats(0.0, 10 * GB)), max_size=5)


def mean_error(contention: Contention, trials: tuple[ColocationTrial, ...]) -> float:
    return float(
        np.mean(
            [
                abs(speed - measured)
                for trial in trials
                for speed, measured in zip(shared_speeds(trial.pressures, contention), trial.speeds, strict=True)
            ]
        )
    )


def table_1(utilisation: float, alone: float, packed: float) -> ColocationTrial:
    """The copies are not published; the fewest that could give the gain are taken."""
    gain = packed / alone
    copies = max(2, math.ceil(gain))
    return ColocationTrial((Pressure(utilisation),) * copies, (gain / copies,) * copies)


def test_a_few_measured_pairs_make_the_model_as_good_as_the_dossiers_fit_to_all() -> None:
    """Dossier 9.2: MAE 0.071 (RTX 3090, Lucid)."""
    trials = lucid_trials()
    random = np.random.default_rng(0)
    some = learn(UNKNOWN_DEVICE, [trials[i] for i in random.choice(len(trials), 20, replace=False)])
    all_of_them = learn(UNKNOWN_DEVICE, trials)
    assert mean_error(UNKNOWN_DEVICE, trials) < 0.1
    assert mean_error(some, trials) < 0.073
    assert mean_error(all_of_them, trials) < 0.071


def test_the_range_of_a_forecast_holds_about_four_fifths_of_measured_gains() -> None:
    trials = lucid_trials()
    learned = learn(UNKNOWN_DEVICE, trials[::2])
    held = [
        (found := forecast(trial.pressures, 24 * GB, learned)).low <= sum(trial.speeds) <= found.high
        for trial in trials[1::2]
    ]
    assert 0.7 < float(np.mean(held)) < 0.9


def test_sign_of_table_1_is_predicted_for_seven_of_eight_from_the_other_models() -> None:
    """B6: whether packing pays, before the trial, from trials of the seven others."""
    right = 0
    for name, utilisation, alone, packed in GANDIVA:
        others = [table_1(u, a, p) for other, u, a, p in GANDIVA if other != name]
        trial = table_1(utilisation, alone, packed)
        right += (forecast(trial.pressures, 24 * GB, learn(UNKNOWN_DEVICE, others)).gain > 1.0) == (packed > alone)
    assert right >= 7


def test_sign_of_table_1_is_predicted_for_seven_of_eight_in_gandivas_order() -> None:
    """Lowest utilisation first, every trial teaching the next."""
    learned, right = UNKNOWN_DEVICE, 0
    for _, utilisation, alone, packed in GANDIVA:
        trial = table_1(utilisation, alone, packed)
        right += (forecast(trial.pressures, 24 * GB, learned).gain > 1.0) == (packed > alone)
        learned = learn(learned, [trial])
    assert right >= 7
    assert learned.trials == 8


def test_shared_gpu_of_fine_tuning_jobs_is_learned_from_trials() -> None:
    """Titan, V100: two trainings of one model; utilisation is not published, a transformer fills the GPU."""
    alone = {
        (row["app"], row["local_bsz"]): float(row["step_time_s"])
        for row in rows("profile_titan_placements.csv")
        if row["gpu_type"] == "V100" and row["placement"] == "1"
    }
    trials = []
    for row in rows("profile_titan_sharing.csv"):
        left, right = (row["app"], row["left_bsz"]), (row["app"], row["right_bsz"])
        if row["app"] == "roberta-base" and left in alone and right in alone:
            speeds = (alone[left] / float(row["left_step_time_s"]), alone[right] / float(row["right_step_time_s"]))
            trials.append(ColocationTrial((Pressure(1.0), Pressure(1.0)), speeds))
    assert len(trials) >= 5
    learned = learn(UNKNOWN_DEVICE, trials[::2])
    assert mean_error(learned, tuple(trials[1::2])) < 0.08


@given(pressures)
def test_no_gang_gains_speed_and_together_they_gain_at_most_their_number(some: list[Pressure]) -> None:
    speeds = shared_speeds(some)
    assert all(0.0 <= speed <= 1.0 for speed in speeds)
    found = forecast(some, 24 * GB)
    assert found.low <= found.gain <= found.high
    assert found.gain <= len(some)
    assert found.fits == (sum(p.memory_bytes for p in some) <= 0.95 * 24 * GB)


@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_a_busier_neighbour_never_helps(mine: float, one: float, other: float) -> None:
    quiet, busy = sorted((one, other))
    assert shared_speeds([Pressure(mine), Pressure(quiet)])[0] >= shared_speeds([Pressure(mine), Pressure(busy)])[0]


def test_one_resident_runs_alone_and_none_gains_nothing() -> None:
    assert shared_speeds([Pressure(1.0)]) == (1.0,)
    single = forecast([Pressure(1.0)], 24 * GB)
    assert (single.gain, single.low, single.high) == (1.0, 1.0, 1.0)
    assert forecast([], 24 * GB).gain == 0.0


def test_memory_that_does_not_fit_is_never_promising() -> None:
    found = forecast([Pressure(0.1, 15 * GB), Pressure(0.1, 15 * GB)], 24 * GB)
    assert not found.fits
    assert found.gain == 2.0


def test_trials_that_say_nothing_teach_nothing() -> None:
    nothing = [
        ColocationTrial((Pressure(0.5),), (1.0,)),
        ColocationTrial((Pressure(0.5), Pressure(0.5)), (math.nan, 1.0)),
        ColocationTrial((Pressure(0.5), Pressure(0.5)), (0.0, 1.0)),
        ColocationTrial((Pressure(0.0), Pressure(0.5)), (1.0, 1.0)),
        ColocationTrial((Pressure(0.5), Pressure(0.5)), (1.0,)),
    ]
    assert learn(UNKNOWN_DEVICE, nothing) is UNKNOWN_DEVICE
    assert learn(UNKNOWN_DEVICE, []) is UNKNOWN_DEVICE


def test_slow_packs_raise_the_multiplier_and_free_ones_leave_it() -> None:
    slow = learn(UNKNOWN_DEVICE, [ColocationTrial((Pressure(0.9), Pressure(0.9)), (0.4, 0.4))] * 5)
    free = learn(UNKNOWN_DEVICE, [ColocationTrial((Pressure(0.2), Pressure(0.2)), (1.0, 1.0))] * 5)
    assert slow.multiplier > 1.1
    assert free.multiplier == pytest.approx(1.0, abs=0.05)
    assert forecast([Pressure(0.9)] * 2, 24 * GB, slow).gain < 1.0
