"""What jobs a run gets: run times where a trace has none, loads, and what a seed draws."""

from __future__ import annotations

import io
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from ganger_master.simulator.inputs import Load, TraceSelection, jobs_at, material, with_drawn_run_times, with_run_times
from ganger_master.simulator.traces.reader import RowFilter
from ganger_master.simulator.traces.servers import servers_from_flags
from ganger_master.simulator.traces.workload import gavel_speeds, offered_load, synergy_profiles, workload

SERVERS = servers_from_flags(nodes=9, gpus_per_node=8)
TRACES = Path(__file__).resolve().parents[4] / "shared" / "traces"


def test_run_times_follow_from_iterations_and_the_published_pace_of_the_model() -> None:
    jobs = workload(
        "abcde",
        np.zeros(5),
        [1, 4, 1, 1, 1],
        [math.nan, math.nan, 77.0, math.nan, math.nan],
        numbers={"iterations": [100, 1000, 5, 100, 9], "batch_size": [math.nan, 128, 128, 128, math.nan]},
        labels={"model": ["gnmt", "ResNet-18", "gnmt", "unheard-of", "A3C"]},
    )
    timed, findings = with_run_times(jobs, draws=False)
    assert timed.job_ids == ("a", "b", "c", "e")
    # Of this one there is no batch size to name.
    of_game = gavel_speeds()["v100", True, "A3C", 1]
    of_four = gavel_speeds()["v100", True, "ResNet-18 (batch size 128)", 4]
    step = synergy_profiles()["gnmt"].step_s
    np.testing.assert_allclose(timed.duration_s, [100 * step, 1000 / of_four, 77.0, 9 / of_game])
    assert [(found.rows, found.what[:12]) for found in findings] == [(3, "run time wor"), (1, "no run time,")]


def test_run_times_are_drawn_only_where_asked_for_and_nothing_tells() -> None:
    jobs = workload("ab", [0.0, 0.0], [1, 1], [math.nan, 5.0])
    untimed, (finding,) = with_run_times(jobs, draws=True)
    assert (untimed, finding.rows, finding.what) == (jobs, 1, "run time drawn at random")
    one, again, other = (with_drawn_run_times(jobs, seed).duration_s for seed in (3, 3, 4))
    assert one[1] == other[1] == 5.0
    # Synergy's: 10^1.5 to 10^4 minutes.
    assert 60 * 10**1.5 <= one[0] <= 60 * 10**4
    assert one[0] == again[0] != other[0]


def test_a_run_time_that_one_row_lacks_follows_from_its_model_or_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    header = "job_id,submit_time_s,gpus,duration_s,model,iterations\n"
    path.write_text(f"{header}a,0,1,9,,\nb,0,1,,gnmt,100\nc,0,1,,,\n")
    assert material(str(path), SERVERS, TraceSelection()).jobs.job_ids == ("a", "b")
    jobs = jobs_at(material(str(path), SERVERS, TraceSelection(draws_durations=True)), Load(), 0)
    assert jobs.job_ids == ("a", "b", "c")
    assert jobs.duration_s[:2].tolist() == [9.0, 100 * synergy_profiles()["gnmt"].step_s]


def test_the_example_comes_with_the_package_and_offers_what_is_asked() -> None:
    source = material("example", SERVERS, TraceSelection())
    assert (source.rows, len(source.jobs), source.apart, source.findings) == (478, 478, 0, ())
    assert offered_load(jobs_at(source, Load(0.8), 0), SERVERS.gpus) == pytest.approx(0.8)
    assert str(Load()) == "as recorded"
    half_a_day = jobs_at(source, Load(phases=((6 * 3600, 0.2), (6 * 3600, 1.2))), 0)
    early = half_a_day.submit_s - half_a_day.submit_s[0] < 6 * 3600
    assert 0 < early.sum() < len(half_a_day) < 478


def test_a_file_called_example_is_meant_before_the_packaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "example").write_text("job_id,submit_time_s,gpus,duration_s\na,0,1,1\n")
    assert material("example", SERVERS, TraceSelection()).jobs.job_ids == ("a",)


def test_a_trace_may_come_through_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"job_id,submit_time_s,gpus,duration_s\na,0,1,1\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    assert material("-", SERVERS, TraceSelection()).trace == "standard input"


def test_how_much_was_read_is_told(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("job_id,submit_time_s,gpus,duration_s\n" + "".join(f"{job},0,1,1\n" for job in range(100_000)))
    told: list[tuple[int, int]] = []
    material(str(path), SERVERS, TraceSelection(), progress=lambda read, there: told.append((read, there)))
    size = path.stat().st_size
    assert told[-1] == (size, size)
    assert 3 <= len(told) == len(set(told))


def test_a_seed_decides_what_is_drawn_and_nothing_else() -> None:
    source = material("example", SERVERS, TraceSelection(drawn=50))
    assert (source.jobs_of_a_run, source.apart) == (50, 428)
    one, same, other = (jobs_at(source, Load(), seed) for seed in (1, 1, 2))
    assert one == same
    assert len(one) == len(other) == 50
    assert set(one.job_ids) != set(other.job_ids)
    whole = material("example", SERVERS, TraceSelection())
    first, second = (jobs_at(whole, Load(), seed) for seed in (1, 2))
    assert first.model != second.model
    assert first.with_columns(model=second.model, iterations=second.iterations) == second


@pytest.mark.parametrize("path", sorted(TRACES.glob("jobs_*.csv")), ids=lambda path: path.stem)
def test_every_trace_beside_the_project_can_be_run(path: Path) -> None:
    is_sia = path.stem == "jobs_sia_workloads"
    where = {"suite": "sia_philly", "workload": "1"} if is_sia else {}
    part = TraceSelection(RowFilter(where=where), first=100, draws_durations=is_sia)
    source = material(str(path), SERVERS, part)
    jobs = jobs_at(source, Load(0.7), 0)
    assert len(jobs) == min(100, len(source.jobs))
    assert np.isfinite(jobs.duration_s).all()
    assert all(jobs.model.names)
