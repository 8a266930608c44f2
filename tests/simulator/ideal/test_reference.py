"""The reference gives the published figures of independent simulators, and what a person works out by hand."""

from __future__ import annotations

import csv
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit import ideal as reference
from kit.ideal import IdealJob, exact, id_order, ideal

TRACES = Path(__file__).resolve().parents[4] / "shared" / "traces" / "ideal"
# trace, GPUs, policy, round, average JCT, makespan. Tiresias by events; Synergy and Blox by rounds of 300 s.
PUBLISHED = [
    ("synth1k", "fifo", None, 34972.2, 265244),
    ("synth1k", "fifo-backfill", None, 20758.0, 220612),
    ("synth1k", "srtf", None, 8784.1, 229899),
    ("synth1k", "srsf", None, 7540.4, 243337),
    ("synth1k", "srtf", 300, 9437.9, 231300),
    ("synth1k", "las2d", 300, 10092.5, 222900),
    ("synth1k", "las", 300, 12822.5, 215700),
    ("synth1k_1gpu", "fifo", None, 12283.7, 168901),
    ("synth1k_1gpu", "fifo-backfill", None, 12283.7, 168901),
    ("synth1k_1gpu", "srtf", None, 6833.6, 153222),
    ("synth1k_1gpu", "srsf", None, 6833.6, 153222),
    ("synth1k_1gpu", "fifo", 300, 13458.9, 171000),
    ("synth1k_1gpu", "las", 300, 8030.1, 149700),
    ("synth1k_1gpu", "srtf", 300, 7273.5, 153600),
]


def read(name: str) -> list[IdealJob]:
    path = TRACES / f"{name}.csv"
    if not path.exists():
        pytest.skip(f"{path.name} is not beside the project")
    with path.open() as file:
        return [
            IdealJob(row["job_id"], exact(row["arrival_s"]), int(row["num_gpus"]), exact(row["duration_s"]))
            for row in csv.DictReader(file)
        ]


@pytest.mark.parametrize(("trace", "policy", "seconds", "average", "makespan"), PUBLISHED)
def test_published_figure_comes_out_to_a_tenth_of_a_second(
    trace: str, policy: str, seconds: int | None, average: float, makespan: float
) -> None:
    outcome = ideal(read(trace), 64, policy, seconds)
    assert outcome.average_jct == pytest.approx(average, abs=0.06)
    assert outcome.makespan == makespan


def test_rounds_of_fifo_with_the_last_id_first_are_what_synergy_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "id_order", lambda job_id: (False, -int(job_id), job_id))
    outcome = ideal(read("synth1k"), 64, "fifo-backfill", 300)
    assert (round(outcome.average_jct, 1), outcome.makespan) == (34985.0, 265800)


def job(name: str, arrival: int, gpus: int, duration: int) -> IdealJob:
    return IdealJob(name, arrival, gpus, duration)


# a holds one of two GPUs, b needs both, c would fit beside a.
BLOCKED = [job("a", 0, 1, 10), job("b", 1, 2, 5), job("c", 2, 1, 4)]


@pytest.mark.parametrize(
    ("policy", "ends"),
    [
        ("fifo", (10, 15, 19)),  # c waits behind b, though a GPU is free
        ("fifo-backfill", (10, 15, 6)),
        ("srtf", (15, 6, 10)),  # at 1 b has 5 left and a 9, so a stops; at 2 b and c have 4 left, b came first
        ("srsf", (10, 15, 6)),  # at 1 a has 9 GPU-seconds left and b 10
        ("las", (15, 10, 6)),  # at 1 b runs, having had nothing; at 2 c does, and a before b: both had a second
    ],
)
def test_one_blocked_gang_ends_as_worked_out_by_hand(policy: str, ends: tuple[int, ...]) -> None:
    assert ideal(BLOCKED, 2, policy).ends == ends


def test_an_end_inside_a_round_is_stamped_at_the_rounds_end_and_frees_nothing_before() -> None:
    outcome = ideal([job("a", 0, 1, 10), job("b", 0, 1, 301), job("c", 300, 1, 1)], 1, "srtf", 300)
    assert outcome.ends == (300, 1200, 600)
    assert outcome.first_starts == (0, 600, 300)


def test_equal_arrivals_go_by_the_number_in_the_id() -> None:
    assert ideal([job("10", 0, 1, 5), job("9", 0, 1, 5)], 1, "fifo").ends == (10, 5)
    assert sorted(["b", "10", "a", "9"], key=id_order) == ["9", "10", "a", "b"]


def test_decimals_stay_exact() -> None:
    assert exact("0.1") + exact("0.2") == Fraction(3, 10)
    assert ideal([IdealJob("a", exact("0.1"), 1, exact("0.2"))], 1, "srtf").ends == (Fraction(3, 10),)


jobs_of_small_traces = st.lists(
    st.tuples(st.integers(0, 20), st.integers(1, 4), st.integers(1, 12)), min_size=1, max_size=12
).map(lambda rows: [job(str(number), *row) for number, row in enumerate(rows)])


@given(jobs_of_small_traces, st.sampled_from(sorted(reference.ORDERS)), st.sampled_from([None, 1, 7]))
def test_every_job_gets_its_whole_duration_after_it_arrived(
    jobs: list[IdealJob], policy: str, seconds: int | None
) -> None:
    outcome = ideal(jobs, 4, policy, seconds)
    for one, start, end in zip(jobs, outcome.first_starts, outcome.ends, strict=True):
        assert one.arrival <= start
        assert end - start >= one.duration
    work = sum(one.gpus * one.duration for one in jobs)
    assert max(outcome.ends) >= Fraction(work, 4)
