"""Ideal runs agree with the oracle, and with what other simulators published for the same file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from ganger_master.policies.orders import Floats
from ganger_master.simulator.inputs import FREE, ReplayOptions
from ganger_master.simulator.run import simulate
from ganger_master.simulator.traces.reader import read_trace
from ganger_master.simulator.traces.servers import servers_from_flags
from ganger_master.simulator.traces.workload import Workload, workload
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.ideal import ORDERS, IdealJob, ideal

TRACE = Path(__file__).resolve().parents[4] / "shared" / "traces" / "ideal" / "synth1k.csv"
# Average JCT and makespan in seconds, as Tiresias (events) and Synergy (rounds) give them.
PUBLISHED = [
    ("fifo", None, 34972.2, 265244),
    ("fifo-backfill", None, 20758.0, 220612),
    ("srtf", None, 8784.1, 229899),
    ("srsf", None, 7540.4, 243337),
    ("srtf", 300.0, 9437.9, 231300),
    ("las2d", 300.0, 10092.5, 222900),
    ("las", 300.0, 12822.5, 215700),
]


@pytest.mark.parametrize(("policy", "round_s", "jct", "makespan"), PUBLISHED)
def test_runs_of_the_published_file_give_the_published_figures(
    policy: str, round_s: float | None, jct: float, makespan: float
) -> None:
    jobs = read_trace(TRACE).workload
    run = simulate(
        jobs, servers_from_flags(nodes=8, gpus_per_node=8), policy, ReplayOptions(ideal=True, round_s=round_s)
    )
    assert round(float(run.outcomes.jct_s.mean()), 1) == jct
    assert float(run.outcomes.end_s.max() - jobs.submit_s.min()) == makespan


ROWS = st.lists(
    st.tuples(st.integers(0, 50), st.sampled_from([1, 1, 2, 3, 4, 8]), st.integers(1, 60)), min_size=1, max_size=12
)


@settings(max_examples=60, deadline=None)
@given(policy=st.sampled_from(sorted(ORDERS)), round_s=st.sampled_from([None, 1, 7, 300]), rows=ROWS)
def test_every_order_does_what_the_oracle_does(
    policy: str, round_s: int | None, rows: list[tuple[int, int, int]]
) -> None:
    starts, ends = _as_the_oracle(policy, round_s, rows)
    run = simulate(_workload(rows), servers_from_flags(nodes=2, gpus_per_node=4), policy, _options(round_s))
    assert _by_number(run.outcomes.job_ids, run.outcomes.first_start_s) == starts
    assert _by_number(run.outcomes.job_ids, run.outcomes.end_s) == ends


@settings(max_examples=60, deadline=None)
@given(policy=st.sampled_from(sorted(ORDERS)), round_s=st.sampled_from([None, 3, 7, 33]), rows=ROWS)
def test_in_tenths_of_a_second_it_is_the_same(
    policy: str, round_s: int | None, rows: list[tuple[int, int, int]]
) -> None:
    """Where sums of decimals are not exact what is tied still is, and rounds begin when they should."""
    starts, ends = _as_the_oracle(policy, round_s, rows)
    tenths = [(arrival / 10, gpus, duration / 10) for arrival, gpus, duration in rows]
    options = _options(None if round_s is None else round_s / 10)
    run = simulate(_workload(tenths), servers_from_flags(nodes=2, gpus_per_node=4), policy, options)
    assert [round(10 * start, 4) for start in _by_number(run.outcomes.job_ids, run.outcomes.first_start_s)] == starts
    assert [round(10 * end, 4) for end in _by_number(run.outcomes.job_ids, run.outcomes.end_s)] == ends


def _as_the_oracle(
    policy: str, round_s: int | None, rows: list[tuple[int, int, int]]
) -> tuple[list[float], list[float]]:
    expected = ideal([IdealJob(str(number), *row) for number, row in enumerate(rows)], 8, policy, round_s)
    return [float(start) for start in expected.first_starts], [float(end) for end in expected.ends]


def _by_number(names: Sequence[str], times: Floats) -> list[float]:
    of = dict(zip(names, times.tolist(), strict=True))
    return [of[str(number)] for number in range(len(of))]


def _workload(rows: Sequence[tuple[float, int, float]]) -> Workload:
    arrivals, gpus, durations = zip(*rows, strict=True)
    return workload([str(number) for number in range(len(rows))], arrivals, gpus, durations)


def _options(round_s: float | None) -> ReplayOptions:
    return ReplayOptions(ideal=True, round_s=None if round_s is None else float(round_s))


@pytest.mark.parametrize("policy", ["fifo", "fifo-backfill", "las2d"])
def test_on_real_servers_too_no_job_starts_or_ends_within_a_round(policy: str) -> None:
    """Neither where each job looks for its own place otherwise."""
    rows = [(7 * number, 1 + number % 4, 45 + number) for number in range(20)]
    options = ReplayOptions(round_s=30.0, costs=FREE)
    run = simulate(_workload(rows), servers_from_flags(nodes=2, gpus_per_node=4), policy, options)
    assert not (run.outcomes.first_start_s % 30).any()
    assert not (run.outcomes.end_s % 30).any()


@pytest.mark.parametrize("policy", ["fifo-backfill", "las2d", "ganger", "gandiva", "tetris", "srtf+synergy-tune"])
def test_a_job_that_comes_just_after_a_round_has_begun_waits_for_the_next_one(policy: str) -> None:
    """Jobs for which the round preempted others still start within it, once the devices are free."""
    rows = [(0, 1, 100), (61, 1, 50), (62, 2, 50)]
    run = simulate(_workload(rows), servers_from_flags(nodes=2, gpus_per_node=4), policy, ReplayOptions(round_s=60.0))
    assert run.outcomes.first_start_s.tolist() == [0.0, 120.0, 120.0]


def test_more_jobs_may_end_at_once_than_are_kept() -> None:
    rows = [(0, 1, 10)] * 1_010 + [(20, 1_020, 10)]
    run = simulate(_workload(rows), servers_from_flags(nodes=16, gpus_per_node=64), "srtf", ReplayOptions(ideal=True))
    assert run.outcomes.end_s.tolist() == [10.0] * 1_010 + [30.0]
