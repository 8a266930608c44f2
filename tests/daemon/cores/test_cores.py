"""Which cores a gang gets: whole ones, near ones, and never more than there are."""

from __future__ import annotations

import pytest
from ganger_daemon.node.core_table import CORE, Core, CoreMap, CoreTable, declared_cores, format_ids, parse_ids
from hypothesis import given
from hypothesis import strategies as st


def server(cores_per_socket: int = 4, sockets: int = 2, housekeeping: frozenset[int] = frozenset()) -> CoreMap:
    """Two hardware threads per core, numbered as Linux does: siblings are a whole machine apart."""
    total = cores_per_socket * sockets
    return CoreMap(
        tuple(
            tuple(Core(i, s, (i, i + total)) for i in range(s * cores_per_socket, (s + 1) * cores_per_socket))
            for s in range(sockets)
        ),
        housekeeping,
    )


def taken(millicores: tuple[int, ...], near: frozenset[int] = frozenset(), of: CoreMap | None = None) -> CoreTable:
    """A table of which "a" has got that."""
    table = CoreTable(of or server())
    assert table.take("a", millicores, near) == ""
    return table


def test_a_claim_becomes_whole_cores_with_all_their_threads() -> None:
    table = taken((2000, 1000))
    assert table.held["a"] == ((0, 1000), (1, 1000), (4, 1000))
    assert table.cpus("a") == (0, 1, 4, 8, 9, 12)


def test_cores_near_the_devices_come_first() -> None:
    assert taken((2000, 0), near=frozenset({2, 3, 10, 11})).ids("a") == (2, 3)


def test_housekeeping_cores_are_never_given() -> None:
    table = taken((3000, 0), of=server(housekeeping=frozenset({0})))
    assert table.core_map.millicores() == (3000, 4000)
    assert 0 not in table.ids("a")
    assert table.take("a", (4000, 0)) == "socket 0 has 3000 millicores left, 4000 are needed"


def test_parts_of_cores_are_packed_together() -> None:
    table = taken((1500, 0))
    assert table.take("b", (1500, 0)) == ""
    assert set(table.ids("a")) & set(table.ids("b"))
    assert sum(left == CORE for left in table.free().values()) == 5


def test_a_part_of_a_core_is_worth_that_part_of_its_threads_and_whole_cores_need_no_quota() -> None:
    assert taken((2000, 1000)).quota("a") == 0.0
    assert taken((1250, 0)).quota("a") == 2.5
    assert taken((1250,), of=declared_cores(8, 1, (0, 1), housekeeping=0)).quota("a") == 0.0


def test_repinning_moves_to_other_cores_of_the_same_number() -> None:
    table = taken((2000, 0))
    before = table.ids("a")
    table.repin("a")
    assert table.millicores("a") == 2000
    assert not set(table.ids("a")) & set(before)


def test_repinning_declared_cores_looks_for_another_real_cpu() -> None:
    table = taken((1000,), of=declared_cores(8, 1, (0, 1), housekeeping=0))
    assert table.take("b", (1000,)) == ""
    assert table.cpus("a") == (0,)
    table.repin("a")
    assert table.cpus("a") == (1,)


def test_repinning_on_a_full_node_changes_nothing_that_counts() -> None:
    table = taken((4000, 4000))
    before = dict(table.held)
    table.repin("a")
    table.repin("unknown")
    assert table.held == before


def test_resizing_keeps_the_cores_it_can() -> None:
    table = taken((2000, 0), near=frozenset({2, 3}))
    assert table.take("a", (3000, 0)) == ""
    assert set(table.ids("a")) > {2, 3}
    table = taken((2000, 0), near=frozenset({2, 3}))
    assert table.take("a", (1000, 0)) == ""
    assert set(table.ids("a")) < {2, 3}


def test_a_shortage_names_the_socket_and_the_numbers() -> None:
    table = taken((0, 3000))
    assert table.take("b", (1000, 2000)) == "socket 1 has 1000 millicores left, 2000 are needed"
    assert "b" not in table.held


def test_adopted_cores_are_not_given_again() -> None:
    table = CoreTable(server())
    table.adopt("a", ((0, 1000), (1, 500)))
    assert table.take("b", (2000, 0)) == ""
    assert not {0, 1} & set(table.ids("b"))


@pytest.mark.parametrize(
    ("held", "parts", "expected"),
    [
        # Whole cores, as requested.
        ({0: 1000, 1: 1000, 4: 1000, 5: 1000}, (3000, 1000), ((0, 1, 4), (5,))),
        ({0: 1000, 1: 1000, 4: 1000, 5: 1000}, (1000, 3000), ((5,), (0, 1, 4))),
        # Twice as many, and half as many, as requested: in proportion, with the core in the middle for both.
        ({0: 1000, 1: 1000, 4: 1000, 5: 1000}, (1500, 500), ((0, 1, 4), (5,))),
        ({0: 1000, 1: 1000}, (3000, 1000), ((0, 1), (1,))),
        # A part of a core goes to the smallest.
        ({0: 500, 1: 1000, 4: 1000}, (500, 2000), ((0,), (1, 4))),
        # Fewer cores than parts.
        ({0: 1000}, (1000, 1000), ((0,), (0,))),
        ({0: 1000, 1: 1000}, (1_000_000, 1), ((0, 1), (1,))),
        ({}, (1000, 1000), ((), ())),
        ({0: 1000}, (), ()),
    ],
)
def test_cores_of_a_gang_are_dealt_out_by_what_its_parts_request(
    held: dict[int, int], parts: tuple[int, ...], expected: tuple[tuple[int, ...], ...]
) -> None:
    table = CoreTable(server())
    table.adopt("a", tuple(held.items()))
    assert table.split("a", parts) == expected


def test_declared_cores_are_dealt_round_robin_to_real_cpus() -> None:
    declared = declared_cores(8, 2, (0, 1), housekeeping=0)
    assert declared.shared
    assert [core.cpus for socket in declared.sockets for core in socket] == [(0,), (1,)] * 4
    assert declared.millicores() == (4000, 4000)
    assert declared_cores(4, 1, (0, 1)).housekeeping == frozenset()
    assert declared_cores(8, 1, (0, 1)).housekeeping == {0}


@pytest.mark.parametrize("text", ["1-0", "-1", "a", "0-99999999", "1,,x"])
def test_text_that_is_no_list_of_ids_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_ids(text)


@given(st.sets(st.integers(0, 300)))
def test_a_list_of_ids_reads_back(ids: set[int]) -> None:
    assert parse_ids(format_ids(ids)) == tuple(sorted(ids))


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["take", "release", "repin"]),
        st.sampled_from("abcde"),
        st.tuples(st.integers(0, 4500), st.integers(0, 4500)),
    ),
    max_size=30,
)


@given(ACTIONS)
def test_no_core_is_given_twice_and_what_fits_by_sum_is_given(actions: list[tuple[str, str, tuple[int, int]]]) -> None:
    table = CoreTable(server(housekeeping=frozenset({0})))
    for action, owner, amounts in actions:
        before = dict(table.held)
        if action == "release":
            table.release(owner)
        elif action == "repin":
            had = table.millicores(owner)
            table.repin(owner)
            assert table.millicores(owner) == had
        else:
            left = table.free(owner)
            fits = all(
                amount <= sum(left[core.id] for core in table.core_map.usable(socket))
                for socket, amount in enumerate(amounts)
            )
            assert (table.take(owner, amounts) == "") == fits
            assert table.millicores(owner) == sum(amounts) if fits else table.held == before
        use: dict[int, int] = {}
        for shares in table.held.values():
            for core, part in shares:
                assert part > 0
                use[core] = use.get(core, 0) + part
        assert all(part <= CORE for part in use.values())
        assert 0 not in use


@given(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4), st.integers(0, 4))
def test_a_resized_gang_has_as_many_cores_as_possible_in_common_with_the_former(a: int, b: int, c: int, d: int) -> None:
    before, after = (a * CORE, b * CORE), (c * CORE, d * CORE)
    table = CoreTable(server())
    assert table.take("old", before) == ""
    old = table.held["old"]
    assert table.take("new", after, former="old") == ""
    assert table.held["old"] == old
    assert table.millicores("new") == sum(after)
    # What the two hold together is the larger of the two at each socket: the master counts no more.
    assert len({*table.ids("old"), *table.ids("new")}) == max(a, c) + max(b, d)
