"""Profiles are those published; jobs without a model get one by seed, and shares come out as asked."""

from __future__ import annotations

import collections
import csv
import json
import math
from pathlib import Path

import pytest
from ganger_master.simulator.traces.workload import (
    ModelClass,
    Workload,
    gavel_speeds,
    synergy_profiles,
    with_iterations,
    with_models,
    workload,
)

from experiments.model_split import SYNERGY_SPLIT, models_by_split

SHARED = Path(__file__).resolve().parents[4] / "shared"


def jobs(count: int, models: list[str] | None = None) -> Workload:
    labels = {} if models is None else {"model": models}
    return workload([str(n) for n in range(count)], range(count), [1] * count, [60.0] * count, labels=labels)


def test_profiles_hold_the_published_rates() -> None:
    profiles = synergy_profiles()
    assert len(profiles) == 10
    assert collections.Counter(p.model_class for p in profiles.values()) == {
        ModelClass.IMAGE: 5,
        ModelClass.LANGUAGE: 3,
        ModelClass.SPEECH: 2,
    }
    # Synergy's alexnet: 12 cores and 125 GB make 2.94 of the rate with its share, 62.5 GB only 2.
    alexnet = profiles["alexnet"]
    assert (alexnet.step_s, alexnet.batch_size) == (0.6, 512)
    assert alexnet.matrix.rate(3, 62.5e9) == 1.0
    assert alexnet.matrix.rate(12, 125e9) == 2.94
    assert alexnet.matrix.rate(12, 62.5e9) == 2.0
    assert all(p.matrix.rate(3, 62.5e9) == 1.0 for p in profiles.values())


def test_profiles_are_those_of_the_data_they_were_made_from() -> None:
    path = SHARED / "papers" / "data" / "synergy_profiles.json"
    if not path.exists():
        pytest.skip("the data is not beside the project")
    published = json.loads(path.read_text())
    for name, profile in synergy_profiles().items():
        assert profile.matrix.rates == tuple(map(tuple, published[name]["tput_norm_to_proportional"]))
        assert profile.step_s == published[name]["iter_time_proportional_s"]


def test_speeds_are_those_of_the_data_they_were_made_from() -> None:
    path = SHARED / "papers" / "data" / "gavel_isolated.csv"
    if not path.exists():
        pytest.skip("the data is not beside the project")
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(gavel_speeds())
    for row in rows:
        kind, _, apart = row["gpu_type"].partition("_")
        key = (kind, not apart, row["model"], int(row["scale_factor"]))
        assert gavel_speeds()[key] == float(row["steps_per_s"])


def test_models_follow_the_seed_and_named_ones_stay() -> None:
    made = jobs(200, ["mine" if number % 4 == 0 else "" for number in range(200)])
    once = with_models(made, seed=1)
    assert once == with_models(made, seed=1)
    assert once != with_models(made, seed=2)
    assert [once.model[job] for job in range(0, 200, 4)] == ["mine"] * 50
    assert set(once.model.names) == {"mine", *synergy_profiles()}


def test_without_a_split_each_model_is_equally_likely() -> None:
    counts = collections.Counter(with_models(jobs(20_000), seed=5).model.texts())
    assert len(counts) == 10
    # four standard deviations of a binomial
    assert all(abs(count - 2000) < 4 * math.sqrt(2000 * 0.9) for count in counts.values())


def test_split_of_synergy_is_never_further_off_than_one_job_and_models_take_turns() -> None:
    profiles = synergy_profiles()
    models = models_by_split(1000, seed=3)
    given: collections.Counter[ModelClass] = collections.Counter()
    for number, model in enumerate(models, 1):
        given[profiles[model].model_class] += 1
        for kind, share in SYNERGY_SPLIT.items():
            assert abs(given[kind] - share / 100 * number) <= 1.0
    assert [given[kind] for kind in SYNERGY_SPLIT] == [200, 700, 100]
    counts = collections.Counter(models)
    for kind in SYNERGY_SPLIT:
        of_kind = [counts[name] for name, profile in profiles.items() if profile.model_class is kind]
        assert max(of_kind) - min(of_kind) <= 1


def test_seed_changes_the_model_of_each_job_but_not_the_split() -> None:
    one, other = (models_by_split(100, seed) for seed in (1, 2))
    kinds = [[synergy_profiles()[text].model_class for text in made] for made in (one, other)]
    assert kinds[0] == kinds[1]
    assert one != other


@pytest.mark.parametrize(
    ("split", "what"),
    [
        ({ModelClass.IMAGE: 0.0}, "no split of jobs"),
        ({ModelClass.IMAGE: 2.0, ModelClass.SPEECH: -1.0}, "no split of jobs"),
        ({ModelClass.RECOMMENDATION: 1.0}, "no profile of a recommendation model"),
    ],
)
def test_split_that_cannot_be_is_refused(split: dict[ModelClass, float], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        models_by_split(3, 1, split)


def test_iterations_follow_from_run_time_where_the_trace_has_none() -> None:
    made = jobs(3, ["alexnet", "unheard", "gnmt"]).with_columns(iterations=[math.nan, math.nan, 7])
    iterations = with_iterations(made).iterations
    assert iterations[0] == 60 / 0.6
    assert math.isnan(iterations[1])
    assert iterations[2] == 7
