"""Slices of a matrix: shares of the time, gangs whole, no gang a quantum behind. (6 s)"""

from __future__ import annotations

from itertools import pairwise

import pytest
from ganger.cluster.topology import Topology
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.clusters import server
from msgspec import structs

from experiments.slice_model import (
    RotatedGang,
    SharedNode,
    TimeSlice,
    credited,
    entitled,
    next_row,
    seated,
)

QUANTUM = 60.0


def nodes(count: int = 1, topology: str = "2x2") -> list[SharedNode]:
    of = Topology(server(topology))
    return [SharedNode(f"s{index}", of, of.all_mask) for index in range(count)]


def singles(count: int) -> tuple[RotatedGang, ...]:
    return tuple(RotatedGang(number, 1, joined_s=number) for number in range(1, count + 1))


def run(
    sharers: tuple[RotatedGang, ...], on: list[SharedNode], rows: int, quantum: float = QUANTUM
) -> tuple[list[TimeSlice], list[tuple[RotatedGang, ...]]]:
    """Return the slices, and the gangs after each."""
    made, after = [], []
    for _ in range(rows):
        row = next_row(sharers, on, quantum)
        sharers = credited(seated(sharers, row), row.seats.keys(), quantum, quantum)
        made.append(row)
        after.append(sharers)
    return made, after


def jain(values: list[float]) -> float:
    return sum(values) ** 2 / (len(values) * sum(value**2 for value in values))


def assert_legal(row: TimeSlice, sharers: tuple[RotatedGang, ...], on: list[SharedNode]) -> None:
    held = {node.name: 0 for node in on}
    there = {node.name: node.mask for node in on}
    for number, seat in row.seats.items():
        (one,) = (sharer for sharer in sharers if sharer.number == number)
        assert sum(mask.bit_count() for _, mask in seat) == one.gpus
        for name, mask in seat:
            assert mask & ~there[name] == 0
            assert held[name] & mask == 0
            held[name] |= mask


def test_six_jobs_on_four_gpus_get_two_thirds_each() -> None:
    """Gandiva, figure 9."""
    rows, after = run(singles(6), nodes(), 60)
    received = [one.received_s / (60 * QUANTUM) for one in after[-1]]
    assert received == pytest.approx([4 / 6] * 6)
    assert jain(received) >= 0.99
    assert all(len(row.seats) == 4 for row in rows)
    # After every full rotation of three rows they are equal to the second.
    assert {one.received_s for one in after[2]} == {2 * QUANTUM}


def test_rows_follow_one_another_with_few_switches() -> None:
    rows, after = run(singles(6), nodes(), 30)
    for before, row in zip(after[2:], rows[3:], strict=False):
        assert len(row.entering(before)) == len(row.leaving(before)) <= 2
        # A gang that continues stays on its devices.
        assert not set(row.shifted(before)) & {one.number for one in before if one.runs}


gang_sizes = st.sampled_from([1, 2, 4])
weights = st.one_of(st.sampled_from([1.0, 1.0, 2.0, 3.0]), st.floats(0.1, 5.0))


@settings(max_examples=60)
@given(gang_sizes, st.lists(weights, min_size=1, max_size=12), st.integers(1, 3))
def test_gangs_of_one_size_are_about_a_quantum_from_their_share_at_most(
    gpus: int, some: list[float], count: int
) -> None:
    # Of equal weights it is a quantum. Of others, on several devices, deadlines are at times missed by a little (1.02
    # quanta were seen), as the order of deadlines is not the best one there.
    most = QUANTUM if len(set(some)) == 1 else 1.25 * QUANTUM
    # Each has run before: first turns of newcomers come beside their shares.
    sharers = tuple(RotatedGang(n, gpus, weight=weight, received_s=QUANTUM) for n, weight in enumerate(some))
    on = nodes(count)
    share_of = entitled(sharers, 4 * count)
    rows, after = run(sharers, on, 80)
    for number_of_rows, (row, now) in enumerate(zip(rows, after, strict=True), 1):
        assert_legal(row, now, on)
        for one in now:
            share = share_of[one.number] * number_of_rows * QUANTUM
            assert abs(one.received_s - QUANTUM - share) <= most * (1 + 1e-6)


sharers_of_all_kinds = st.lists(
    st.builds(
        RotatedGang,
        number=st.just(0),
        gpus=st.sampled_from([1, 1, 2, 3, 4, 6]),
        joined_s=st.integers(0, 3).map(float),
        weight=st.sampled_from([1.0, 2.0]),
        priority=st.sampled_from([0, 0, 0, 1]),
        is_bound=st.booleans(),
    ),
    min_size=1,
    max_size=10,
).map(lambda some: tuple(structs.replace(one, number=n) for n, one in enumerate(some)))


@settings(max_examples=100)
@given(sharers_of_all_kinds, st.integers(1, 3))
def test_rows_hold_whole_gangs_on_devices_of_their_own(sharers: tuple[RotatedGang, ...], count: int) -> None:
    on = nodes(count)
    rows, after = run(sharers, on, 25)
    for row, now in zip(rows, after, strict=True):
        assert_legal(row, now, on)
    for before, row, now in zip(after, rows[1:], after[1:], strict=False):
        for one, then in zip(before, now, strict=True):
            if one.seat and one.is_bound:
                assert then.seat == one.seat
        # The free devices are of no use to any unbound gang of the highest priority.
        top = max(one.priority for one in before)
        left = 4 * count - sum(mask.bit_count() for seat in row.seats.values() for _, mask in seat)
        idle = [one for one in before if one.number not in row.seats and one.priority == top and not one.is_bound]
        assert all(one.gpus > left for one in idle)


# Where shares cannot be met all deficits end at their bound: the last gang waited for 140 rows here.
MIXED = tuple(
    RotatedGang(number, gpus, weight=weight)
    for number, (gpus, weight) in enumerate([(1, 1.0), (1, 1.0), (2, 2.0), (3, 2.0), (3, 2.0), (3, 2.0)])
)


@settings(max_examples=60)
@given(sharers_of_all_kinds)
@example(MIXED)
def test_every_gang_that_fits_the_group_runs_again_and_again(sharers: tuple[RotatedGang, ...]) -> None:
    sharers = tuple(structs.replace(one, priority=0, is_bound=False) for one in sharers if one.gpus <= 4)
    rows, _ = run(sharers, nodes(), 200)
    most = 6 * max(1, sum(one.gpus for one in sharers))
    for one in sharers:
        turns = [0, *(at for at, row in enumerate(rows, 1) if one.number in row.seats), len(rows)]
        assert max(later - earlier for earlier, later in pairwise(turns)) <= most


def test_newcomer_gets_its_first_mini_batches_in_the_next_row() -> None:
    _, after = run(singles(9), nodes(), 20)
    newcomer = RotatedGang(100, 1, joined_s=1000.0)
    assert 100 in next_row((*after[-1], newcomer), nodes(), QUANTUM).seats


def test_newcomer_is_owed_nothing_for_the_time_before_and_gets_its_share_from_then_on() -> None:
    _, after = run(singles(6), nodes(), 20)
    _, later = run((*after[-1], RotatedGang(100, 1, joined_s=1000.0)), nodes(), 70)
    newcomer = later[-1][-1]
    assert newcomer.received_s / (70 * QUANTUM) == pytest.approx(4 / 7, abs=1 / 70)


def test_newcomer_among_gangs_that_cannot_have_their_share_is_not_kept_waiting() -> None:
    """Two gangs of three and one of one on four devices: the small one runs always, the large ones every other row."""
    sharers = (RotatedGang(1, 3), RotatedGang(2, 3), RotatedGang(3, 1))
    _, after = run(sharers, nodes(), 2000)
    rows, _ = run((*after[-1], RotatedGang(4, 3, joined_s=1e6), RotatedGang(5, 1, joined_s=1e6)), nodes(), 30)
    for number in range(1, 6):
        assert sum(number in row.seats for row in rows) >= 7


def test_weights_divide_the_time_and_no_gang_gets_more_than_all_of_it() -> None:
    sharers = tuple(RotatedGang(n, 1, weight=weight) for n, weight in enumerate([10.0, 1.0, 1.0, 2.0]))
    assert entitled(sharers, 2) == {0: 1.0, 1: 0.25, 2: 0.25, 3: 0.5}
    assert entitled(sharers, 4) == dict.fromkeys(range(4), 1.0)
    assert entitled((), 4) == {}


def test_lower_priority_gets_what_is_left() -> None:
    sharers = (RotatedGang(1, 2, priority=1), RotatedGang(2, 2, priority=1), RotatedGang(3, 1), RotatedGang(4, 1))
    assert entitled(sharers, 4) == {1: 1.0, 2: 1.0, 3: 0.0, 4: 0.0}
    assert entitled(sharers, 5) == {1: 1.0, 2: 1.0, 3: 0.5, 4: 0.5}
    rows, _ = run(sharers, nodes(), 5)
    assert all(set(row.seats) == {1, 2} for row in rows)


def test_an_unpreemptible_gang_stays_and_the_others_share_the_rest() -> None:
    fixed = RotatedGang(1, 2, is_preemptible=False, runs=True, seat=(("s0", 0b11),))
    sharers = (fixed, RotatedGang(2, 2), RotatedGang(3, 2), RotatedGang(4, 2, priority=5))
    rows, _ = run(sharers, nodes(), 9)
    assert all(row.seats[1] == (("s0", 0b11),) for row in rows)
    assert all(set(row.seats) == {1, 4} for row in rows)
    rows, after = run(sharers[:3], nodes(), 10)
    assert [one.received_s / QUANTUM for one in after[-1]] == [10, 5, 5]


def test_bound_gangs_run_on_their_own_devices_only() -> None:
    sharers = (
        RotatedGang(1, 1, is_bound=True, seat=(("s0", 1),)),
        RotatedGang(2, 1, is_bound=True, seat=(("s0", 1),)),
        RotatedGang(3, 1, is_bound=True, seat=(("s0", 2),)),
    )
    rows, after = run(sharers, nodes(topology="2"), 20)
    assert all(dict(row.seats).get(3) == (("s0", 2),) for row in rows)
    assert [one.received_s / QUANTUM for one in after[-1]] == [10, 10, 20]


def test_gang_of_several_nodes_runs_on_all_of_them_at_once() -> None:
    sharers = (RotatedGang(1, 8), RotatedGang(2, 8), RotatedGang(3, 4))
    rows, after = run(sharers, nodes(2), 20)
    for row in rows:
        assert_legal(row, sharers, nodes(2))
        for number in (1, 2):
            assert dict(row.seats).get(number) in (None, (("s0", 0b1111), ("s1", 0b1111)))
    assert min(one.received_s for one in after[-1]) >= 5 * QUANTUM


def test_late_boundary_is_made_up_for() -> None:
    """A row that lasted half a quantum too long counts as what it was."""
    one, other = RotatedGang(1, 4), RotatedGang(2, 4)
    row = next_row((one, other), nodes(), QUANTUM)
    sharers = credited(seated((one, other), row), row.seats.keys(), 1.5 * QUANTUM, QUANTUM)
    for _ in range(41):
        row = next_row(sharers, nodes(), QUANTUM)
        sharers = credited(seated(sharers, row), row.seats.keys(), QUANTUM, QUANTUM)
    assert abs(sharers[0].received_s - sharers[1].received_s) <= QUANTUM
