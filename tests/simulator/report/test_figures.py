"""Figures follow from outcomes: of known runs as published, of small ones as worked out by hand or one by one."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
from ganger.cluster.feasibility import GangMix, fragmented_gpus
from ganger_master.simulator.report.figures import (
    details,
    figures,
    finish_time_fairness,
    interval,
    mean_contention,
    paired_ratio,
    waiting_by_size,
)
from ganger_master.simulator.report.files import as_json, job_rows, series_rows
from ganger_master.simulator.report.outcomes import Outcomes, Run, StepSeries, demand_of, outcomes
from ganger_master.simulator.traces.reader import read_trace
from ganger_master.simulator.traces.workload import Workload, workload
from hypothesis import given
from hypothesis import strategies as st
from kit.ideal import IdealJob, ideal

IDEAL = Path(__file__).resolve().parents[4] / "shared" / "traces" / "ideal"
NAN = math.nan


def three() -> tuple[Workload, Outcomes]:
    """a runs at once and alone, b waits 5 and is stopped for 5, c never starts."""
    jobs = workload("abc", [0, 5, 6], [2, 4, 8], [10.0, 20, 30], numbers={"deadline_s": [10.0, 30, 40]})
    return jobs, outcomes(
        jobs,
        [0, 10, NAN],
        [10, 37, NAN],
        [10, 22, 0],
        overhead_s=[0, 2, 0],
        core_seconds=[30, 176, 0],
        preemptions=[0, 1, 0],
        migrations=[0, 2, 0],
    )


def run_of(made: Outcomes, **more: object) -> Run:
    return Run("fifo", made, gpus=8, cores=24, start_s=0, end_s=40, **more)  # type: ignore[arg-type]


def test_figures_of_a_small_run_are_those_worked_out_by_hand() -> None:
    series = {"fragmented_gpus": StepSeries.of([0, 20], [1, 3], 40)}
    found = figures(run_of(three()[1], series=series, wall_s=2.0, events=10))
    assert (found.jobs, found.unfinished) == (3, 1)
    assert (found.avg_jct_s, found.median_jct_s, found.p95_jct_s) == (21, 21, 32)
    assert math.isnan(found.makespan_s)
    assert (found.avg_start_delay_s, found.avg_waiting_s, found.p95_waiting_s) == (2.5, 5, 10)
    assert found.gpu_utilization == pytest.approx((2 * 10 + 4 * 22) / (8 * 40))
    assert found.core_utilization == pytest.approx((30 + 176) / (24 * 40))
    assert found.fragmented_gpus == 2
    assert found.fragmentation == pytest.approx(2 / (8 - 108 / 40))
    assert (found.deadlines, found.deadline_hits) == (3, 1)
    assert (found.preemptions, found.migrations, found.overhead_s) == (1, 2, 2)
    assert found.overhead_share == pytest.approx(8 / 108)
    assert found.events_per_s == 5
    assert {name: size.jobs for name, size in found.by_gang_size.items()} == {"2": 1, "3-4": 1, "5-8": 1}
    assert found.by_gang_size["3-4"].mean_waiting_s == 10
    assert math.isnan(found.by_gang_size["5-8"].mean_start_delay_s)


def test_fairness_of_a_small_run_is_that_worked_out_by_hand() -> None:
    jobs, made = three()
    rho = finish_time_fairness(jobs.submit_s, made.end_s, jobs.gpus, jobs.duration_s, 8, 40)
    # a: alone for 5 s, with b for 1, with b and c for 4: N = 1.9; 2 GPUs of 8 / 1.9 are its own, so alone takes 10
    assert rho[0] == pytest.approx(1.0)
    # b: from 5 to 37 two live at first (1 s), then three (4 s), then two (27 s): N = 68/32; its 4 GPUs are more than
    # its part, 8 / N, so alone takes 20 x 4 x N / 8
    assert rho[1] == pytest.approx(32 / (20 * max(1, 4 * (68 / 32) / 8)))
    assert math.isnan(rho[2])


def test_a_millisecond_of_rounding_makes_no_job_late_and_no_job_worse_off() -> None:
    # Times of a replay are sums of seconds after an epoch of a million.
    ends = [np.nextafter(10.0, 11.0), 10.0004, 10.1]
    alone = [workload("a", [0], [1], [10.0], numbers={"deadline_s": [10.0]}) for _ in ends]
    made = [figures(run_of(outcomes(jobs, [0], [end], [end]))) for jobs, end in zip(alone, ends, strict=True)]
    assert [found.deadline_hits for found in made] == [1, 1, 0]
    assert [found.share_rho_above_1 for found in made] == [0, 0, 1]


def test_cores_that_were_not_recorded_are_not_reported_as_idle() -> None:
    jobs, _ = three()
    assert math.isnan(figures(run_of(outcomes(jobs, [0, 10, NAN], [10, 37, NAN], [10, 22, 0]))).core_utilization)


def test_run_without_jobs_has_no_figures_but_fails_nothing() -> None:
    found = figures(run_of(outcomes(workload([], [], []), [], [], [])))
    assert found.jobs == 0
    assert math.isnan(found.avg_jct_s)
    assert math.isnan(found.max_rho)
    assert as_json(found)["makespan_s"] is None


@pytest.mark.parametrize(
    ("policy", "seconds", "average", "makespan"),
    [("fifo", None, 34972.2, 265244), ("srsf", None, 7540.4, 243337), ("las2d", 300, 10092.5, 222900)],
)
def test_published_runs_are_reported_with_their_published_figures(
    policy: str, seconds: int | None, average: float, makespan: float
) -> None:
    path = IDEAL / "synth1k.csv"
    if not path.exists():
        pytest.skip("the traces are not beside the project")
    jobs = read_trace(path).workload
    given = [
        IdealJob(job_id, int(submit), int(gpus), int(duration))
        for job_id, submit, gpus, duration in zip(jobs.job_ids, jobs.submit_s, jobs.gpus, jobs.duration_s, strict=True)
    ]
    ran = ideal(given, 64, policy, seconds)
    made = outcomes(jobs, list(map(float, ran.first_starts)), list(map(float, ran.ends)), jobs.duration_s)
    found = as_json(figures(Run(policy, made, 64, 192, 0, float(max(ran.ends)), wall_s=1.0, events=2000)))
    assert found["avg_jct_s"] == pytest.approx(average, abs=0.06)
    assert found["makespan_s"] == makespan
    assert found["jobs"] == 1000
    assert found["gpu_utilization"] == pytest.approx(jobs.gpu_seconds.sum() / (64 * makespan))
    assert {"p95_jct_s", "wall_s", "events"} <= found.keys()
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    ("start", "end", "service", "overhead", "what"),
    [
        (0, 10, 1, 0, "started before it was submitted"),
        (NAN, 10, 1, 0, "ended that never started"),
        (7, 6, 0, 0, "ended before it started"),
        (5, 9, 5, 0, "served longer than it ran"),
        (5, 9, 3, 4, "paid more overhead than it was served"),
    ],
)
def test_what_cannot_have_happened_is_our_mistake(
    start: float, end: float, service: float, overhead: float, what: str
) -> None:
    jobs = workload("a", [5], [1], [4.0])
    with pytest.raises(AssertionError, match=what):
        outcomes(jobs, [start], [end], [service], overhead_s=[overhead])


lives = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30)), min_size=1, max_size=15)


@given(lives)
def test_contention_is_that_counted_second_by_second(rows: list[tuple[int, int]]) -> None:
    submit = np.array([float(begin) for begin, _ in rows])
    end = np.array([float(begin + life) for begin, life in rows])
    naive = [
        np.mean([sum(b <= second < b + life for b, life in rows) for second in range(begin, begin + length)])
        for begin, length in rows
    ]
    assert mean_contention(submit, end) == pytest.approx(naive)


def naive_fragments(demand: GangMix, node: tuple[int, int, int, int, int]) -> float:
    """FGD's definition, kind by kind."""
    free, millicores, memory, devices, kind_of_gpu = node
    expected = 0.0
    for kind, share in enumerate(demand.shares):
        needed = min(int(demand.gpus[kind]), devices)
        fits = (
            needed <= free
            and needed * demand.millicores[kind] <= millicores
            and needed * demand.memory_bytes[kind] <= memory
            and demand.accepts[kind][kind_of_gpu]
        )
        expected += share * (0 if fits else free)
    return expected


nodes = st.lists(
    st.tuples(st.integers(0, 8), st.integers(0, 9000), st.integers(0, 9), st.just(8), st.integers(0, 1)), max_size=9
)
asks = st.lists(
    st.tuples(
        st.integers(1, 20),
        st.sampled_from([NAN, 1.0, 8.0]),
        st.sampled_from([NAN, 4.0]),
        st.sampled_from(["", "A", "A|B"]),
    ),
    min_size=1,
    max_size=9,
)


@given(asks, nodes)
def test_fragments_are_those_counted_one_by_one(
    rows: list[tuple[int, float, float, str]], cluster: list[tuple[int, int, int, int, int]]
) -> None:
    gpus, cpus, memory, types = map(list, zip(*rows, strict=True))
    jobs = workload(
        [str(n) for n in range(len(rows))],
        range(len(rows)),
        gpus,
        numbers={"cpus": cpus, "memory_bytes": memory},
        labels={"gpu_type": types},
    )
    demand = demand_of(jobs, ("A", "B"))
    assert demand.shares.sum() == pytest.approx(1.0)
    columns = np.array(cluster, np.int64).reshape(-1, 5).T
    found = fragmented_gpus(demand, *columns)
    assert found == pytest.approx([naive_fragments(demand, node) for node in cluster])


def test_free_gpus_are_whole_where_every_gang_fits_and_lost_where_none_does() -> None:
    demand = demand_of(workload("ab", [0, 1], [4, 16]), ("",))
    count = np.array
    free = count([8, 4, 3, 0])
    found = fragmented_gpus(demand, free, count([0] * 4), count([0] * 4), count([8] * 4), count([0] * 4))
    assert found.tolist() == [0, 2, 3, 0]


def test_rarest_kinds_are_left_out_of_the_demand() -> None:
    sizes = [number for number in range(1, 201) for _ in range(2 if number <= 100 else 1)]
    jobs = workload([str(n) for n in range(len(sizes))], range(len(sizes)), sizes)
    demand = demand_of(jobs, ("",))
    assert len(demand.gpus) == 128
    assert set(range(1, 101)) <= set(demand.gpus.tolist())
    assert demand.shares.sum() == pytest.approx(1.0)


def test_jobs_are_written_one_a_row_and_unknown_times_are_blank() -> None:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(job_rows(three()[1]))
    rows = list(csv.DictReader(io.StringIO(file.getvalue())))
    assert [row["job_id"] for row in rows] == ["a", "b", "c"]
    assert (rows[1]["jct_s"], rows[1]["waiting_s"], rows[1]["service_s"]) == ("32", "10", "22")
    assert (rows[2]["end_s"], rows[2]["jct_s"], rows[2]["preemptions"]) == ("", "", "0")


def test_written_jobs_are_a_trace_again() -> None:
    from ganger_master.simulator.traces.reader import read_stream

    jobs, made = three()
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(job_rows(made))
    again = read_stream(io.BytesIO(file.getvalue().encode()), "jobs.csv").workload
    assert again.with_columns(lines=[0, 0, 0]) == jobs


def test_series_are_written_step_by_step() -> None:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(series_rows({"used_gpus": StepSeries.of([0, 2.5], [1, 0.125], 4)}))
    assert file.getvalue().splitlines() == [
        "series,time_s,value",
        "used_gpus,0,1",
        "used_gpus,2.5,0.125",
        "used_gpus,4,",
    ]


def test_one_run_reads_as_names_and_values() -> None:
    pairs = dict(details(figures(run_of(three()[1], peak_memory_bytes=3 << 20))))
    assert pairs["jobs"] == "3, 1 unfinished"
    assert pairs["deadlines met"] == "1 of 3"
    assert pairs["peak memory"] == "3M"
    assert "makespan" not in pairs
    headings, rows = waiting_by_size(figures(run_of(three()[1])))
    assert (headings[0], [row[0] for row in rows]) == ("GPUs", ["2", "3-4", "5-8"])
    assert rows[2][2:] == ["-"] * 4


def test_interval_of_five_seeds_is_students() -> None:
    found = interval([1, 2, 3, 4, 5])
    # t(0.975, 4) = 2.776; standard error sqrt(2.5 / 5)
    assert (found.mean, found.runs) == (3, 5)
    assert found.half_width == pytest.approx(2.776445 * math.sqrt(0.5), rel=1e-6)
    assert str(found) == "3 ± 2"
    assert math.isnan(interval([7]).half_width)


def test_ratio_is_taken_seed_by_seed() -> None:
    found = paired_ratio([2, 20, 200], [1, 10, 100])
    assert (found.mean, found.half_width) == (2, 0)
    for ours, theirs in (([1], [1, 2]), ([1], [0]), ([], []), ([NAN], [1])):
        with pytest.raises(ValueError, match=r"ratios need|are known"):
            paired_ratio(ours, theirs)
