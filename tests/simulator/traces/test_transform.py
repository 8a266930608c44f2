"""Traces made into others keep what they promise; statistics are those published beside the traces."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from ganger_master.simulator.admission import that_fit
from ganger_master.simulator.traces.reader import read_trace
from ganger_master.simulator.traces.rows import RowFindingKind
from ganger_master.simulator.traces.servers import servers_from_description
from ganger_master.simulator.traces.workload import (
    MULTI_GPU,
    SINGLE_GPU,
    Labels,
    Workload,
    id_order,
    offered_load,
    percentile,
    sample,
    scaled_to_load,
    size_class,
    synthetic,
    window,
    with_durations,
    with_loads,
    with_sizes,
    workload,
)
from hypothesis import given
from hypothesis import strategies as st

TRACES = Path(__file__).resolve().parents[4] / "shared" / "traces"


def jobs(count: int = 5, **numbers: object) -> Workload:
    return workload(
        [f"j{number}" for number in range(count)],
        np.arange(count) * 10.0 + 5,
        np.arange(count) % 3 + 1,
        np.arange(count) * 7.0 + 1,
        numbers=numbers,  # type: ignore[arg-type]
    )


workloads = st.lists(
    st.tuples(st.integers(0, 50), st.integers(1, 16), st.integers(1, 1000)), min_size=2, max_size=30
).map(lambda rows: workload([str(n) for n in range(len(rows))], *map(list, zip(*rows, strict=True))))


@given(
    st.lists(
        st.tuples(st.sampled_from(["1", "02", "2", "10", "a", "B", "é"]), st.integers(0, 2)), unique_by=lambda x: x[0]
    )
)
def test_order_of_submission_is_that_of_one_sort(rows: list[tuple[str, int]]) -> None:
    made = workload([row[0] for row in rows], [row[1] for row in rows], 1, [1.0] * len(rows))
    assert list(made.job_ids) == [row[0] for row in sorted(rows, key=lambda row: (row[1], id_order(row[0])))]


@given(workloads, st.floats(0.05, 20))
def test_scaled_trace_offers_the_load_and_keeps_the_work(made: Workload, load: float) -> None:
    if made.submit_s[0] == made.submit_s[-1]:
        with pytest.raises(ValueError, match="submitted at once"):
            scaled_to_load(made, 8, load)
        return
    scaled = scaled_to_load(made, 8, load)
    assert offered_load(scaled, 8) == pytest.approx(load)
    assert scaled.submit_s[0] == made.submit_s[0]
    assert scaled.gpu_seconds.tolist() == made.gpu_seconds.tolist()


def test_scaling_keeps_the_time_until_deadlines() -> None:
    made = jobs(deadline_s=[100.0, math.nan, 60, 70, 80])
    scaled = scaled_to_load(made, 4, 0.5)
    before, after = made.deadline_s - made.submit_s, scaled.deadline_s - scaled.submit_s
    assert after == pytest.approx(before, nan_ok=True)


@pytest.mark.parametrize("load", [0, -1, math.nan, math.inf, 1e-12, 1e-320])
def test_load_that_cannot_be_offered_is_refused(load: float) -> None:
    with pytest.raises(ValueError, match="cannot be offered"):
        scaled_to_load(jobs(), 4, load)


def test_load_of_unknown_durations_is_refused() -> None:
    with pytest.raises(ValueError, match="known durations"):
        offered_load(workload("ab", [0, 1], [1, 1]), 4)


def test_phases_offer_their_loads_one_after_the_other() -> None:
    made = synthetic(20_000, 60.0, seed=1, gangs=SINGLE_GPU)
    day = 86_400.0
    ramped = with_loads(made, 1000, [(2 * day, 0.2), (2 * day, 0.9), (2 * day, 0.2)])
    assert ramped.submit_s[-1] < 6 * day
    offered = [window(ramped, phase * 2 * day, (phase + 1) * 2 * day).gpu_seconds.sum() for phase in range(3)]
    # a day's work varies: the standard error of the mean of a few thousand such durations is some percent
    assert [work / (2 * day * 1000) for work in offered] == pytest.approx([0.2, 0.9, 0.2], rel=0.15)


def test_one_phase_of_the_load_there_is_changes_nothing() -> None:
    made = jobs(deadline_s=[10.0, 20, 30, 40, 50])
    load = offered_load(made, 4)
    same = with_loads(made, 4, [(39.0, load)])
    assert same.job_ids == made.job_ids[:4]
    assert same.submit_s == pytest.approx(made.submit_s[:4])
    assert same.deadline_s == pytest.approx(made.deadline_s[:4])
    with pytest.raises(ValueError, match="the trace spans 40 s"):
        with_loads(made, 4, [(41.0, load)])
    with pytest.raises(ValueError, match="above zero"):
        with_loads(made, 4, [(1.0, 0.0)])


def test_synthetic_jobs_have_the_published_distributions() -> None:
    made = synthetic(20_000, 9.0, seed=7)
    between = np.diff(made.submit_s)
    assert 3600 / between.mean() == pytest.approx(9.0, rel=0.03)
    assert between.std() / between.mean() == pytest.approx(1.0, rel=0.03)
    sizes = dict(zip(*map(np.ndarray.tolist, np.unique(made.gpus, return_counts=True)), strict=True))
    assert {size: count / 20_000 for size, count in sizes.items()} == pytest.approx(dict(MULTI_GPU), abs=0.015)
    minutes = made.duration_s / 60
    assert (minutes >= 10**1.5).all()
    assert (minutes <= 10**4).all()
    assert (minutes > 1000).mean() == pytest.approx(0.2, abs=0.015)
    # 0.8 (10^3 - 10^1.5) / (1.5 ln 10) + 0.2 (10^4 - 10^3) / ln 10 minutes: 16.8 h
    assert minutes.mean() / 60 == pytest.approx(16.77, rel=0.03)


def test_longer_synthetic_workload_begins_as_the_shorter() -> None:
    short, long = synthetic(50, 9.0, seed=7), synthetic(500, 9.0, seed=7)
    assert long.take(np.arange(50)) == short
    assert synthetic(50, 9.0, seed=8) != short
    assert len(synthetic(0, 9.0, seed=7)) == 0
    for bad in ((-1, 9.0, MULTI_GPU), (5, 0.0, MULTI_GPU), (5, 9.0, {}), (5, 9.0, {1: 0.0})):
        with pytest.raises(ValueError, match=r"no workload|above zero"):
            synthetic(bad[0], bad[1], 1, bad[2])


def test_window_takes_the_first_instant_and_not_the_last() -> None:
    assert window(jobs(), 15, 35).job_ids == ("j1", "j2")


def test_sample_follows_its_seed_and_nothing_else() -> None:
    made = jobs(40)
    assert sample(made, 10, seed=3) == sample(made, 10, seed=3)
    assert sample(made, 10, seed=3) != sample(made, 10, seed=4)
    assert sample(made, 40, seed=3) == made
    assert len(sample(made, 0, seed=3)) == 0
    with pytest.raises(ValueError, match="cannot sample 41 of 40 jobs"):
        sample(made, 41, seed=3)


def test_durations_are_filled_only_where_unknown() -> None:
    made = workload("ab", [0, 1], [1, 1], [math.nan, 5])
    assert with_durations(made, np.array([7.0, 9.0])).duration_s.tolist() == [7, 5]


def test_columns_that_break_a_promise_are_refused() -> None:
    made = jobs()
    for columns, what in (
        ({"submit_s": [5, 4, 3, 2, 1]}, "order of their submission"),
        ({"gpus": [0, 1, 1, 1, 1]}, "at least one GPU"),
        ({"duration_s": [0, 1, 1, 1, 1]}, "above zero"),
        ({"weight": [1.0]}, "1 entries of weight"),
        ({"job_ids": ("a", "a", "b", "c", "d")}, "given twice"),
    ):
        with pytest.raises(ValueError, match=what):
            made.with_columns(**columns)
    with pytest.raises(ValueError, match="no columns colour"):
        jobs(colour=[1] * 5)


def test_labels_taken_forget_names_that_no_job_has() -> None:
    labels = Labels.of(["b", "a", "b", ""])
    assert (labels.names, labels.texts()) == (("", "a", "b"), ["b", "a", "b", ""])
    assert labels.take(np.array([0, 2])) == Labels.of(["b", "b"])


CLUSTER = servers_from_description(
    {
        "servers": [
            {"nodes": 2, "gpus_per_node": 4, "gpu_type": "T4", "cores_per_node": 8, "memory_per_node": "100GB"},
            {"nodes": 1, "gpus_per_node": 8, "gpu_type": "V100", "cores_per_node": 40, "memory_per_node": "500GB"},
        ]
    }
)


def test_gangs_larger_than_the_cluster_are_left_out_with_their_lines() -> None:
    made = workload(
        "abcdefg",
        range(7),
        [16, 17, 8, 9, 8, 1, 1],
        [1.0] * 7,
        numbers={"lines": range(2, 9), "cpus": [math.nan] * 5 + [41, 1], "memory_bytes": [math.nan] * 6 + [8e11]},
        labels={"gpu_type": ["", "", "T4", "T4", "K80", "V100", "T4|V100"]},
    )
    kept, findings = that_fit(made, CLUSTER)
    assert kept.job_ids == ("a", "c")
    assert {finding.kind for finding in findings} == {RowFindingKind.SKIPPED}
    assert sorted(map(str, findings)) == [
        "line 3: needs more GPUs than the 16 of the cluster's servers",
        "line 5: needs more GPUs than the 8 of the cluster's servers of type T4",
        "line 6: needs GPUs of type K80, of which there are none",
        "line 7: needs more cores than the 40 of the cluster's servers of type V100",
        "line 8: needs more bytes of memory than the 700,000,000,000 of the cluster's servers of type T4|V100",
    ]


def test_workload_that_fits_whole_is_left_alone() -> None:
    made = jobs()
    assert that_fit(made, CLUSTER) == (made, ())


@pytest.mark.parametrize(
    ("gpus", "name"), [(1, "1"), (2, "2"), (3, "3-4"), (4, "3-4"), (5, "5-8"), (64, "33-64"), (65, "65-128")]
)
def test_sizes_are_named_in_powers_of_two(gpus: int, name: str) -> None:
    assert size_class(gpus) == name


@given(st.lists(st.integers(-9, 9), min_size=1, max_size=40), st.integers(0, 99))
def test_percentile_is_the_smallest_value_that_more_than_so_many_do_not_exceed(values: list[int], percent: int) -> None:
    naive = min(v for v in values if 100 * sum(other <= v for other in values) > percent * len(values))
    assert percentile(values, percent) == naive


def test_percentile_of_the_ends() -> None:
    assert math.isnan(percentile([], 50))
    assert percentile([3.0, 1.0, 2.0], 100) == 3


def manifest() -> list[dict[str, object]]:
    path = TRACES / "MANIFEST.json"
    found = json.loads(path.read_text())["files"] if path.exists() else []
    return [entry for entry in found if entry["kind"] == "jobs" and "sia_workloads" not in entry["file"]]


@pytest.mark.parametrize("entry", manifest(), ids=lambda entry: entry["file"])
def test_what_is_read_has_the_statistics_published_with_the_trace(entry: dict[str, object]) -> None:
    reading = read_trace(TRACES / str(entry["file"]))
    found = reading.workload
    if len(found) != entry["rows"]:
        assert reading.findings, "rows left out have reasons"
        return
    published: dict[str, object] = entry["stats"]  # type: ignore[assignment]
    span_s, between = float(np.ptp(found.submit_s)), np.diff(found.submit_s)
    pairs: list[tuple[float, object]] = [
        (len(found), published["jobs"]),
        (span_s / 86_400, published["span_days"]),
        (np.unique(found.submit_s // 3600, return_counts=True)[1].max(), published["jobs_per_hour_peak"]),
        (between.std() / between.mean(), published["interarrival_cv"]),
        (found.gpus.mean(), published["gpus_mean"]),
        (found.gpus.max(), published["gpus_max"]),
    ]
    known = found.duration_s[~np.isnan(found.duration_s)]
    if len(known):
        gpu_seconds = float(np.nansum(found.gpu_seconds))
        pairs += [
            (gpu_seconds / 3600, published["gpu_hours"]),
            (gpu_seconds / span_s, published["mean_gpu_demand"]),
        ]
        by_name: dict[str, float] = published["duration_s"]  # type: ignore[assignment]
        pairs += [(percentile(known, percent), by_name[f"p{percent}"]) for percent in (10, 25, 50, 75, 90, 99)]
        pairs += [(known.mean(), by_name["mean"]), (known.max(), by_name["max"])]
    shares: dict[str, float] = published["gpu_size_share"]  # type: ignore[assignment]
    classes = [size_class(gpus) for gpus in found.gpus.tolist()]
    ours = {name: classes.count(name) / len(classes) for name in set(classes)}
    pairs += [(share, shares[name]) for name, share in ours.items() if name in shares]
    pairs.append((sum(share for name, share in ours.items() if name not in shares), shares.get(">64", 0.0)))
    for one, other in pairs:
        assert one == pytest.approx(other, rel=1e-4, abs=1e-9)


def test_load_of_jobs_submitted_at_once_has_no_bound() -> None:
    assert math.isinf(offered_load(jobs(1), 1))


def test_jobs_of_one_size_become_elastic_and_the_others_stay() -> None:
    given_sizes = jobs(4, min_gpus=[1, 1, 3, 1], max_gpus=[1, 5, 3, 1])
    found = with_sizes(given_sizes, 4.0, 8)
    assert found.gpus.tolist() == [1, 2, 3, 1]
    assert list(zip(found.min_gpus.tolist(), found.max_gpus.tolist(), strict=True)) == [(1, 4), (1, 5), (1, 8), (1, 4)]
    assert with_sizes(given_sizes, 0.5, 8).max_gpus.tolist() == [1, 5, 3, 1]
