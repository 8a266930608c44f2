"""One model per job: what it believes at first, how observed rates change it, and how sure it is."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from ganger.resources.values import Level
from ganger_master.models.classes import ModelClass, Number, belief_of
from ganger_master.models.throughput import MOST_OBSERVED, Configuration, ThroughputModel, log_rate
from hypothesis import given, settings
from hypothesis import strategies as st
from models.published import GRID, SYNERGY, step_points

ALONE = Configuration()


def at(gpus: int, nodes: int = 1, **more: float) -> Configuration:
    return Configuration(gpus, nodes, Level.NODE if nodes < 2 else Level.RACK, **more)  # type: ignore[arg-type]


configurations = st.builds(
    lambda gpus, nodes, level, cores, memory, sharers, switch: Configuration(
        gpus, min(gpus, nodes), level, cores, memory, 1.0, sharers, switch
    ),
    st.integers(1, 64),
    st.integers(1, 16),
    st.sampled_from(list(Level)),
    st.floats(0.5, 64.0),
    st.floats(1e9, 1e12),
    st.lists(st.floats(0.0, 1.0), max_size=3).map(tuple),
    st.integers(0, 3),
)


def test_before_anything_is_seen_only_ratios_mean_something() -> None:
    model = ThroughputModel()
    assert model.predict(ALONE).deviation > 3.0
    assert model.speed_up(at(4), ALONE).deviation < 0.5
    assert 0.5 < model.speed_up(at(4), ALONE).rate < 1.0


def test_one_rate_sets_the_scale_and_leaves_the_shape() -> None:
    fresh = ThroughputModel()
    model = fresh.observe(ALONE, 7.0)
    assert model.predict(ALONE).rate == pytest.approx(7.0)
    assert model.predict(ALONE).deviation < 0.06
    assert model.rate(at(8, 2)) / 7.0 == pytest.approx(fresh.speed_up(at(8, 2), ALONE).rate)
    assert model.predict(at(8, 2)).deviation > 4 * model.predict(ALONE).deviation


def test_predictions_meet_what_was_measured_and_are_sure_of_it() -> None:
    model = ThroughputModel()
    seen = {ALONE: 2.0, at(4): 1.1, at(8, 2): 0.9, at(4, cores=1.0): 0.4}
    for configuration, rate in seen.items():
        model = model.observe(configuration, rate, windows=10)
    for configuration, rate in seen.items():
        assert model.rate(configuration) == pytest.approx(rate, rel=0.03)
        assert model.predict(configuration).deviation < 0.03


def test_more_windows_make_it_surer_and_old_ones_fade() -> None:
    one, many = ThroughputModel().observe(ALONE, 2.0), ThroughputModel()
    for _ in range(200):
        many = many.observe(ALONE, 2.0)
    assert many.predict(ALONE).deviation < one.predict(ALONE).deviation
    for _ in range(60):
        many = many.observe(ALONE, 4.0)
    assert many.rate(ALONE) == pytest.approx(4.0, rel=0.05)


def test_published_all_reduce_profiles_are_predicted_from_four_placements() -> None:
    errors, held = [], []
    for points in step_points().values():
        batches = sorted({point.samples for point in points})
        places = [point for point in points if point.samples == batches[len(batches) // 2]]
        first = {(point.gpus, point.nodes): point for point in reversed(places)}
        model = ThroughputModel()
        for pair in ((1, 1), (2, 1), (4, 1), (4, 2)):
            model = model.observe(at(*pair), 1.0 / first[pair].seconds, windows=5)
        found = {pair: model.predict(at(*pair)) for pair in first}
        for point in places:
            prediction = found[point.gpus, point.nodes]
            errors.append(abs(prediction.rate * point.seconds - 1.0))
            held.append(prediction.low <= 1.0 / point.seconds <= prediction.high)
    assert float(np.mean(errors)) < 0.13
    assert float(np.mean(held)) > 0.7


@pytest.mark.parametrize("model_class", [ModelClass.UNKNOWN, ModelClass.IMAGE])
def test_published_cpu_curves_are_learned_from_four_points(model_class: ModelClass) -> None:
    errors = []
    for name in ("resnet50", "mobilenet", "resnet18", "alexnet", "deepspeech", "gnmt"):
        model = ThroughputModel(belief_of(model_class))
        for cores in (3, 24, 1, 6):
            model = model.observe(Configuration(cores=cores), SYNERGY[name][GRID.index(cores)], windows=5)
        errors += [
            abs(model.rate(Configuration(cores=cores)) / rate - 1.0)
            for cores, rate in zip(GRID, SYNERGY[name], strict=True)
        ]
    assert float(np.mean(errors)) < 0.05


def test_class_tells_before_the_first_probe_who_needs_cores() -> None:
    def loss(model_class: ModelClass) -> float:
        model = ThroughputModel(belief_of(model_class))
        return model.speed_up(Configuration(cores=1.0), Configuration(cores=24.0)).rate

    assert loss(ModelClass.IMAGE) < 0.3
    assert loss(ModelClass.LANGUAGE) > 0.9


@settings(max_examples=60)
@given(configurations)
def test_better_places_are_believed_no_slower(at_first: Configuration) -> None:
    numbers = belief_of().mean.tolist()
    here = log_rate(numbers, at_first, 0.5)
    better = [
        Configuration(at_first.gpus, at_first.nodes, at_first.level, 2 * at_first.cores, at_first.memory_bytes),
        Configuration(at_first.gpus, at_first.nodes, at_first.level, at_first.cores, 2 * at_first.memory_bytes),
        Configuration(at_first.gpus, 1, Level.NVLINK, at_first.cores, at_first.memory_bytes),
        Configuration(at_first.gpus, at_first.nodes, at_first.level, at_first.cores, at_first.memory_bytes),
    ]
    assert all(log_rate(numbers, place, 0.5) >= here - 1e-9 for place in better)


@settings(max_examples=30)
@given(st.lists(st.tuples(configurations, st.floats(1e-3, 1e3)), max_size=5), configurations)
def test_any_observations_give_finite_predictions(
    seen: list[tuple[Configuration, float]], somewhere: Configuration
) -> None:
    model = ThroughputModel()
    for configuration, rate in seen:
        model = model.observe(configuration, rate)
    prediction = model.predict(somewhere)
    assert 0.0 < prediction.rate < math.inf
    assert 0.0 <= prediction.deviation < 5.0
    assert prediction.low <= prediction.rate <= prediction.high


def test_sharers_and_neighbours_cost_speed() -> None:
    model = ThroughputModel(utilisation=0.9).observe(ALONE, 1.0)
    packed = [model.rate(Configuration(sharers=(0.9,) * count)) for count in range(4)]
    assert all(more < fewer for fewer, more in pairwise(packed))
    assert packed[1] < 0.65
    assert model.rate(Configuration(switch_neighbours=1)) < model.rate(Configuration(socket_neighbours=1)) < 1.0


def test_half_the_batch_on_a_faster_device_is_faster() -> None:
    model = ThroughputModel().observe(ALONE, 1.0)
    assert model.rate(Configuration(batch=0.5)) > 1.2
    assert model.rate(Configuration(device_speed=2.0)) == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_stalls_and_broken_rates_change_nothing(bad: float) -> None:
    model = ThroughputModel().observe(ALONE, 1.0)
    assert model.observe(ALONE, bad) is model
    assert model.observe(ALONE, 1.0, windows=bad) is model


@pytest.mark.parametrize(
    "wrong",
    [
        {"gpus": 0},
        {"gpus": 2, "nodes": 3},
        {"cores": 0.0},
        {"cores": math.nan},
        {"memory_bytes": -1.0},
        {"batch": math.nan},
    ],
)
def test_places_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"GPUs on|above zero"):
        Configuration(**wrong)  # type: ignore[arg-type]


def test_only_so_many_configurations_are_remembered_the_latest_ones() -> None:
    model = ThroughputModel()
    for gpus in range(1, MOST_OBSERVED + 6):
        model = model.observe(at(gpus), 1.0)
    assert [known.configuration.gpus for known in model.observations] == list(range(6, MOST_OBSERVED + 6))


def test_order_of_observations_does_not_change_the_belief() -> None:
    seen = [(ALONE, 2.0), (at(4), 1.1), (at(8, 2), 0.9)]
    one, other = ThroughputModel(), ThroughputModel()
    for configuration, rate in seen:
        one = one.observe(configuration, rate)
    for configuration, rate in reversed(seen):
        other = other.observe(configuration, rate)
    assert one.rate(at(16, 4)) == pytest.approx(other.rate(at(16, 4)), rel=1e-4)


def test_law_is_the_slowest_of_its_parts() -> None:
    numbers = belief_of().mean.tolist()
    numbers[Number.CORES], numbers[Number.BEND] = math.log(8.0), 0.0
    # one core of the eight a GPU needs: an eighth of the speed, to the rounding of the corner
    assert math.exp(log_rate(numbers, Configuration(cores=1.0), 0.5)) == pytest.approx(1 / 8, rel=1e-6)
    assert math.exp(log_rate(numbers, Configuration(cores=64.0), 0.5)) == pytest.approx(1.0, rel=1e-6)
    assert math.exp(log_rate(numbers, Configuration(cores=8.0), 0.5)) == pytest.approx(2 ** (-1 / 12), rel=1e-6)
