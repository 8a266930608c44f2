"""A live run and its simulation: what is measured of the run, and that the simulator is told all of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.twin import MOVES, _simulated, main
from benchmarks.twin_comparison import Costs, JobEvent, Ran, TwinError, compared, costs_of, step_s, trace_of

EVENTS = [
    JobEvent(10.0, "jobs/1", "gang_approved"),
    JobEvent(11.0, "jobs/1", "gang_running"),
    JobEvent(20.0, "jobs/2", "gang_approved"),
    JobEvent(22.0, "jobs/2", "gang_running"),
    JobEvent(30.0, "jobs/1", "suspend_ordered", level="CHECKPOINT"),
    JobEvent(30.4, "jobs/1", "gang_parked", level="CHECKPOINT"),
    JobEvent(30.5, "jobs/1", "job_pending"),
    JobEvent(40.0, "jobs/1", "gang_approved"),
    JobEvent(42.0, "jobs/1", "gang_running"),
    JobEvent(50.0, "jobs/1", "job_succeeded"),
    JobEvent(60.0, "jobs/2", "job_succeeded"),
]
COSTS = Costs(start_s=1.5, suspend_s=0.5, resume_s=0.5, end_s=0.25, starts=2, suspends=1, resumes=1)
FIRST = Ran("first", 4, 101, 0.1, 0.0, None, 25.0, 1)
URGENT = Ran("urgent", 4, 51, 0.1, 4.0, 60.0, 7.6, 0)


def test_costs_are_what_the_events_of_the_run_say() -> None:
    assert costs_of(EVENTS, {"jobs/1": 49.8, "jobs/2": 59.7}) == COSTS


def test_a_run_without_suspensions_yields_no_costs() -> None:
    with pytest.raises(TwinError, match="2 starts, 0 suspensions, 0 resumes, 0 moves"):
        costs_of(EVENTS[:4], {})


MOVED = [
    JobEvent(10.0, "jobs/1", "gang_approved"),
    JobEvent(11.0, "jobs/1", "gang_running"),
    JobEvent(30.0, "jobs/1", "move_begun"),
    JobEvent(31.4, "jobs/1", "gang_running"),
    JobEvent(31.5, "jobs/1", "move_done", pause_ms=300.0),
    JobEvent(50.0, "jobs/1", "job_succeeded"),
]


def test_what_a_move_takes_is_its_pause_and_what_its_preparation_takes_beyond_a_start() -> None:
    costs = costs_of(MOVED, {"jobs/1": 49.8}, ("moves",))
    assert (costs.starts, costs.moves, costs.suspends) == (1, 1, 0)
    assert (costs.start_s, costs.move_s) == (1.0, 0.3)
    assert (costs.offload_s, costs.end_s) == pytest.approx((0.2, 0.2))
    with pytest.raises(TwinError, match="moves are needed"):
        costs_of(EVENTS, {"jobs/1": 49.8, "jobs/2": 59.7}, ("moves",))


def test_the_time_of_a_step_is_a_median_that_a_pause_does_not_change() -> None:
    assert step_s([(10, 1.0), (20, 2.0), (30, 60.0), (40, 61.0)]) == pytest.approx(0.1)
    with pytest.raises(TwinError):
        step_s([(10, 1.0)])


def test_the_trace_has_what_a_simulation_needs_and_no_time_that_the_run_took() -> None:
    assert trace_of([FIRST, URGENT], COSTS) == (
        "job_id,submit_time_s,gpus,duration_s,deadline_s\nfirst,0.000,4,10.250,\nurgent,4.000,4,5.250,64.000\n"
    )


def test_the_simulator_suspends_the_same_jobs_and_every_job_takes_as_long(tmp_path: Path) -> None:
    # On one node of four: first runs from 1.5 on, is stopped at 4 and free at 4.5; urgent steps from 6 to 11.25; then
    # first goes on after 1.5 + 0.5, and has 10.25 - 2.5 left, or half a second less: the simulator has a job train
    # until it is gone.
    trace = tmp_path / "twin.csv"
    trace.write_text(trace_of([FIRST, URGENT], COSTS))
    found = _simulated(trace, COSTS, tmp_path / "twin", "edf", nodes=1)
    assert found["urgent"] == pytest.approx((7.25, 0, 0), abs=0.01)
    assert found["first"] == pytest.approx((20.75, 1, 0), abs=0.26)
    rows = compared([FIRST, URGENT], found)
    assert [row["error"] for row in rows] == pytest.approx([-0.17, -0.046], abs=0.011)


def test_the_simulator_moves_jobs_that_make_room_at_the_given_cost(tmp_path: Path) -> None:
    # Steps of a tenth of a second from 1.0 on; the wide ones end at 27.1 and 31.1, and then one is moved: prepared in
    # 1.0, at rest after 0.2, and on after 0.3.
    costs = Costs(1.0, 0.0, 0.0, 0.0, 5, 0, 0, 0.3, 0.2, 1)
    jobs = [Ran(one.name, one.gpus, round(one.length * 10) + 1, 0.1, one.at, None, 0.0, 0) for one in MOVES]
    trace = tmp_path / "twin.csv"
    trace.write_text(trace_of(jobs, costs))
    found = _simulated(trace, costs, tmp_path / "twin", "fifo-backfill+first-fit+defrag")
    assert sum(moves for _, _, moves in found.values()) == 1
    assert [found[name][0] for name in ("leaves", "goes")] == pytest.approx([26.0, 26.0], abs=0.01)
    assert sorted(found[name][0] for name in ("left", "right")) == pytest.approx([71.0, 71.3], abs=0.05)
    # The second wide one is gone at 32.0; a move, and a start.
    assert found["node"][0] == pytest.approx(20.0 + 1.5 + 31.0, abs=1.5)


@pytest.mark.chaos
def test_a_real_run_goes_through(tmp_path: Path) -> None:
    result = main(quick=True, directory=tmp_path)
    told = json.loads((tmp_path / "twin.json").read_text())
    suspended, moved = told["cases"]
    assert suspended["costs"]["suspends"] >= 1
    assert moved["costs"]["moves"] >= 1
    assert len(suspended["jobs"]) == result["figures"]["jobs"] == 6  # type: ignore[index]
