"""`ganger bench day`: its jobs, their trace for the simulator, and a short run under the default."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.day import LOAD, PLAIN, SPAN_S, _paces, _rows, _speeds, main, quantum_of
from benchmarks.day_jobs import (
    BATCH,
    GPUS,
    LARGEST_GANG,
    LEAST_S,
    MOST_S,
    DayJob,
    DayRun,
    TraceRow,
    day_of,
    plan_of,
    simulator_trace,
)

JOB = DayJob("job08", 9.0, 2, 4, 12.0, "resnet50")


def test_the_day_has_jobs_of_all_kinds_and_offers_the_wanted_load() -> None:
    jobs = day_of(_rows(), SPAN_S, LOAD)
    assert len(jobs) >= 40
    assert {job.gpus for job in jobs} == {1, 2, 4}
    assert {job.is_data_bound for job in jobs} == {job.is_elastic for job in jobs} == {True, False}
    assert sum(job.gpus * job.duration_s for job in jobs) == pytest.approx(LOAD * GPUS * SPAN_S, rel=1e-3)
    assert all(LEAST_S <= job.duration_s <= MOST_S for job in jobs)
    assert (jobs[0].at_s, jobs[-1].at_s) == (0.0, SPAN_S)


def test_longer_jobs_of_the_trace_are_longer_in_the_day_and_gangs_are_half_as_large() -> None:
    rows = [TraceRow(100.0, 1, 50.0), TraceRow(200.0, 4, 500.0), TraceRow(500.0, 16, 5000.0)]
    jobs = day_of(rows, 40.0, 0.5)
    assert [job.gpus for job in jobs] == [1, 2, LARGEST_GANG]
    assert [job.at_s for job in jobs] == [0.0, 10.0, 40.0]
    assert jobs[0].duration_s < jobs[1].duration_s < jobs[2].duration_s


def test_an_elastic_job_is_as_much_faster_on_more_gpus_as_the_simulator_has_it() -> None:
    speeds = _speeds(JOB)
    assert list(speeds) == [2, 3, 4]
    assert speeds[2] == 1.0 < speeds[3] < speeds[4] < 2.0
    assert _speeds(replace(JOB, most_gpus=2)) == {2: 1.0}


def test_every_number_of_gpus_divides_a_batch() -> None:
    assert all(BATCH % gpus == 0 for gpus in range(1, LARGEST_GANG + 1))


def test_a_job_waits_in_each_step_and_makes_as_many_as_it_lasts() -> None:
    plan = plan_of(JOB, {2: 1.0}, "/where")
    assert (plan["steps"], plan["step_s"], plan["cpu_s"]) == (120, 0.1, 0.0)
    assert plan["result"] == "/where/job08.result"


def test_the_trace_for_the_simulator_has_sizes_models_and_the_time_alone() -> None:
    trace = simulator_trace(
        [JOB, replace(JOB, name="job09", most_gpus=2, model="vae")],
        {"job08": 1.5, "job09": 2.0},
        {
            "job08": 13.25,
            "job09": 9.0,
        },
    )
    first, second = csv.DictReader(io.StringIO(trace))
    assert (first["submit_time_s"], first["gpus"], first["duration_s"]) == ("1.500", "2", "13.250")
    assert (first["memory_mib"], second["memory_mib"]) == ("1024", "1024")
    assert (first["model"], first["batch_size"], first["min_gpus"], first["max_gpus"]) == ("resnet50", "256", "2", "4")
    assert (second["model"], second["batch_size"], second["min_gpus"], second["max_gpus"]) == ("vae", "", "", "")


def test_only_the_plain_policy_has_a_time_after_which_room_is_kept() -> None:
    assert "--keep-place-after" in _paces(PLAIN, 0.0)
    assert not {"--keep-place-after", "--quantum"} & {*_paces("ganger", 0.0)}
    assert _paces("gandiva", 6.0)[-2:] == ("--quantum", "6.000s")


def test_the_time_alone_has_no_pause_in_it() -> None:
    run = DayRun("job08", 1.0, 99.0, 0.125, 0.75, 101, 2, 1, 0, "digest")
    assert run.alone_s == 13.25


def test_the_quantum_is_the_mean_of_what_was_planned() -> None:
    planned = [{"kind": "rows_changed", "figures": {"quantum_seconds": text}} for text in ("3", "7.5")]
    assert quantum_of([*planned, {"kind": "gang_running", "figures": {}}]) == 5.25
    assert quantum_of([]) == 0.0


def test_a_policy_that_the_day_does_not_have_is_refused_with_those_that_it_has() -> None:
    with pytest.raises(ValueError, match="fifo-backfill"):
        main(only="srtf")


@pytest.mark.torch
@pytest.mark.system
def test_a_short_day_loses_no_job_and_every_result_is_that_of_the_job_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    figures = main(quick=True)["figures"]
    assert isinstance(figures, dict)
    assert figures["ganger_jobs"] == 6
    assert (figures["ganger_jobs_lost"], figures["ganger_results_unlike_alone"]) == (0, 0)
    assert figures["ganger_predicted_jct_s"] > 0
    assert len((tmp_path / "build/bench/day.jsonl").read_text().splitlines()) == 12
