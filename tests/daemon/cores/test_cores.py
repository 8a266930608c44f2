"""Which cores a gang gets: whole ones, near ones, and never more than there are."""

from __future__ import annotations

import pytest
from ganger_daemon.node.core_table import (
    CORE,
    Core,
    CoreMap,
    CoreShortage,
    CoreTable,
    Grant,
    adopt,
    allocate,
    allocate_after,
    cpus_of,
    declared_cores,
    format_ids,
    parse_ids,
    quota_cpus,
    release,
    repin,
    resize,
    split,
)
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


def given_to(table: CoreTable | CoreShortage, owner: str) -> Grant:
    assert isinstance(table, CoreTable)
    return table.held[owner]


def test_a_claim_becomes_whole_cores_with_all_their_threads() -> None:
    table = allocate(CoreTable.empty(server()), "a", (2000, 1000))
    grant = given_to(table, "a")
    assert grant.shares == ((0, 1000), (1, 1000), (4, 1000))
    assert cpus_of(server(), grant) == (0, 1, 4, 8, 9, 12)


def test_cores_near_the_devices_come_first() -> None:
    assert given_to(allocate(CoreTable.empty(server()), "a", (2000, 0), near={2, 3, 10, 11}), "a").cores == (2, 3)


def test_housekeeping_cores_are_never_given() -> None:
    table = CoreTable.empty(server(housekeeping=frozenset({0})))
    assert table.core_map.millicores() == (3000, 4000)
    assert 0 not in given_to(allocate(table, "a", (3000, 0)), "a").cores
    assert allocate(table, "a", (4000, 0)) == CoreShortage(0, 4000, 3000)


def test_parts_of_cores_are_packed_together() -> None:
    table = CoreTable.empty(server())
    for owner in ("a", "b"):
        table = allocate(table, owner, (1500, 0))
        assert isinstance(table, CoreTable)
    assert set(table.held["a"].cores) & set(table.held["b"].cores)
    assert sum(left == CORE for left in table.free().values()) == 5


def test_a_part_of_a_core_is_worth_that_part_of_its_threads_and_whole_cores_need_no_quota() -> None:
    table = CoreTable.empty(server())
    assert quota_cpus(server(), given_to(allocate(table, "a", (2000, 1000)), "a")) == 0.0
    assert quota_cpus(server(), given_to(allocate(table, "a", (1250, 0)), "a")) == 2.5
    declared = declared_cores(8, 1, (0, 1), housekeeping=0)
    assert quota_cpus(declared, given_to(allocate(CoreTable.empty(declared), "a", (1250,)), "a")) == 0.0


def test_repinning_moves_to_other_cores_of_the_same_number() -> None:
    table = allocate(CoreTable.empty(server()), "a", (2000, 0))
    assert isinstance(table, CoreTable)
    moved = repin(table, "a")
    assert moved.held["a"].millicores == 2000
    assert not set(moved.held["a"].cores) & set(table.held["a"].cores)


def test_repinning_declared_cores_looks_for_another_real_cpu() -> None:
    table = CoreTable.empty(declared_cores(8, 1, (0, 1), housekeeping=0))
    for owner in ("a", "b"):
        table = allocate(table, owner, (1000,))
        assert isinstance(table, CoreTable)
    assert cpus_of(table.core_map, table.held["a"]) == (0,)
    assert cpus_of(table.core_map, repin(table, "a").held["a"]) == (1,)


def test_repinning_on_a_full_node_changes_nothing_that_counts() -> None:
    table = allocate(CoreTable.empty(server()), "a", (4000, 4000))
    assert isinstance(table, CoreTable)
    assert repin(table, "a").held["a"] == table.held["a"]
    assert repin(table, "unknown") == table


def test_resizing_keeps_the_cores_it_can() -> None:
    table = allocate(CoreTable.empty(server()), "a", (2000, 0), near={2, 3})
    assert isinstance(table, CoreTable)
    assert set(given_to(resize(table, "a", (3000, 0)), "a").cores) > {2, 3}
    assert set(given_to(allocate(table, "a", (1000, 0)), "a").cores) < {2, 3}


def test_a_shortage_names_the_socket_and_the_numbers() -> None:
    table = allocate(CoreTable.empty(server()), "a", (0, 3000))
    assert isinstance(table, CoreTable)
    assert allocate(table, "b", (1000, 2000)) == CoreShortage(1, 2000, 1000)


def test_an_adopted_grant_is_not_given_again() -> None:
    table = adopt(CoreTable.empty(server()), "a", Grant(((0, 1000), (1, 500))))
    assert not {0, 1} & set(given_to(allocate(table, "b", (2000, 0)), "b").cores)


def test_ranks_share_out_the_cores_of_their_gang() -> None:
    grant = Grant(((0, 1000), (1, 1000), (4, 1000), (5, 1000)))
    assert split(server(), grant, 2) == ((0, 1), (4, 5))
    assert split(server(), grant, 3) == ((0,), (1,), (4, 5))
    assert split(server(), Grant(((0, 1000),)), 2) == ((0,), (0,))
    assert split(server(), Grant(), 2) == ((), ())


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
        st.sampled_from(["allocate", "release", "repin", "resize"]),
        st.sampled_from("abcde"),
        st.tuples(st.integers(0, 4500), st.integers(0, 4500)),
    ),
    max_size=30,
)


@given(ACTIONS)
def test_no_core_is_given_twice_and_what_fits_by_sum_is_given(actions: list[tuple[str, str, tuple[int, int]]]) -> None:
    table = CoreTable.empty(server(housekeeping=frozenset({0})))
    for action, owner, amounts in actions:
        before = table
        if action == "release":
            table = release(table, owner)
        elif action == "repin":
            table = repin(table, owner)
            if owner in before.held:
                assert table.held[owner].millicores == before.held[owner].millicores
        else:
            result = (allocate if action == "allocate" else resize)(table, owner, amounts)
            left = release(table, owner).free()
            fits = all(
                amount <= sum(left[core.id] for core in table.core_map.usable(socket))
                for socket, amount in enumerate(amounts)
            )
            assert isinstance(result, CoreTable) == fits
            if isinstance(result, CoreTable):
                table = result
                assert table.held[owner].millicores == sum(amounts)
        use: dict[int, int] = {}
        for grant in table.held.values():
            for core, part in grant.shares:
                assert part > 0
                use[core] = use.get(core, 0) + part
        assert all(part <= CORE for part in use.values())
        assert 0 not in use


@given(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4), st.integers(0, 4))
def test_a_resized_gang_has_as_many_cores_as_possible_in_common_with_the_former(a: int, b: int, c: int, d: int) -> None:
    before, after = (a * CORE, b * CORE), (c * CORE, d * CORE)
    table = allocate(CoreTable.empty(server()), "old", before)
    assert isinstance(table, CoreTable)
    both = allocate_after(table, "old", "new", after)
    old, new = given_to(both, "old"), given_to(both, "new")
    assert old == table.held["old"]
    assert new.millicores == sum(after)
    # What the two hold together is the larger of the two at each socket: the master counts no more.
    assert len({*old.cores, *new.cores}) == max(a, c) + max(b, d)
