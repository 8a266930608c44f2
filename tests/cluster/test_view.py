"""The view gives back exactly what was taken, and its copies and columns agree with it."""

from __future__ import annotations

import numpy as np
import pytest
from ganger.cluster.columns import ColumnTable
from ganger.cluster.placement import candidates
from ganger.cluster.resources import Claim, ConfigurationSet, GangShape, Socket
from ganger.cluster.view import View
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.clusters import cluster, gang, gangs, idle_row, server
from msgspec.structs import replace


def rows(view: View) -> list[object]:
    return [replace(row, version=0) for row in view.rows()]


@settings(max_examples=60)
@given(
    masks=st.lists(st.integers(1, 15), min_size=1, max_size=8),
    before=st.one_of(st.none(), st.lists(st.integers(0, 2), min_size=4, max_size=4)),
    data=st.data(),
)
def test_claims_on_each_device_are_counted(masks: list[int], before: list[int] | None, data: st.DataObject) -> None:
    view = cluster(1)
    rows = before or [0, 0, 0, 0]
    free = sum(1 << device for device, claims in enumerate(rows) if not claims)
    view.put(replace(view.row("s0"), device_rows=tuple(rows), free_mask=free, version=0))
    held: list[Claim] = []
    for mask in masks:
        if held and data.draw(st.booleans()):
            claim, sign = held.pop(data.draw(st.integers(0, len(held) - 1))), -1
            view.give(claim)
        else:
            claim, sign = Claim("s0", mask, (0, 0), 0, shared_mask=mask), 1
            view.take(claim)
            held.append(claim)
        rows = [claims + sign * (claim.device_mask >> device & 1) for device, claims in enumerate(rows)]
        assert list(view.row("s0").device_rows) == list(view.copy().row("s0").device_rows) == rows
        assert view.free[0] == sum(1 << device for device, claims in enumerate(rows) if not claims)


@settings(max_examples=60)
@given(shapes=st.lists(gangs(), max_size=8), order=st.randoms(use_true_random=False))
def test_freed_is_what_was_held_in_any_order(shapes: list[GangShape], order: object) -> None:
    view = cluster(4, per_rack=2)
    before = rows(view)
    held: list[Claim] = []
    for shape in shapes:
        for claims in candidates(view, shape, limit=1).candidates:
            for claim in claims:
                view.take(claim, shape.gpus)
                held.append(claim)
            # Some of the devices keep a little of a gang that is parked.
            left = replace(claims[0], device_mask=0, millicores=(), memory_bytes=0, arena_bytes=0, tasks=())
            held.append(replace(left, parked_bytes=(len(held), 0, 0, 7)))
            view.take(held[-1])
    order.shuffle(held)  # type: ignore[attr-defined]
    for claim in held:
        view.give(claim)
    assert rows(view) == before


def test_columns_follow_every_change() -> None:
    view = cluster(3)
    view.columns()
    claim = candidates(view, gang(2)).candidates[0][0]
    view.take(claim, 2)
    view.set_available("s2", False)
    columns = view.columns()
    slot = view.slots[claim.node]
    assert int(columns.free[slot]) == view.free[slot]
    assert int(columns.millicores[slot]) == sum(view.millicores[slot])
    assert not columns.available[view.slots["s2"]]
    fresh = view.copy()
    fresh._table = ColumnTable()
    for name in type(columns).__slots__:
        np.testing.assert_array_equal(getattr(fresh.columns(), name)[:3], getattr(columns, name)[:3])


def test_copy_is_independent() -> None:
    view = cluster(2)
    twin = view.copy()
    twin.take(candidates(twin, gang(4)).candidates[0][0])
    assert view.row("s0").free_mask == 0b1111
    assert twin.row("s0").free_mask == 0


def test_taking_what_is_held_is_our_mistake() -> None:
    view = cluster(1)
    claim = candidates(view, gang(4)).candidates[0][0]
    view.take(claim)
    with pytest.raises(AssertionError, match="held already"):
        view.take(claim)


def test_taking_more_than_there_is_or_giving_back_what_is_free_is_our_mistake() -> None:
    claim = candidates(cluster(1), gang(1)).candidates[0][0]
    for more, what in [
        (replace(claim, memory_bytes=1 << 50), "memory"),
        (replace(claim, millicores=(1 << 20, 0)), "cores"),
        (replace(claim, device_mask=1 << 5), "held already"),
    ]:
        with pytest.raises(AssertionError, match=what):
            cluster(1).take(more)
    with pytest.raises(AssertionError, match="given back twice"):
        cluster(1).give(claim)


def test_device_that_failed_while_held_is_not_free_afterwards() -> None:
    view = cluster(1)
    claim = candidates(view, gang(4)).candidates[0][0]
    view.take(claim)
    view.put(replace(view.row("s0"), available=False), in_service=0b0111)
    view.give(claim)
    assert view.row("s0").free_mask == 0b0111


def test_row_that_is_only_newer_raises_the_version() -> None:
    view = cluster(1)
    assert not view.put(replace(view.row("s0"), version=view.version + 5))
    assert view.row("s0").version == view.version == 6


def test_emptied_view_has_no_devices_that_are_out_of_service() -> None:
    view = cluster(2)
    view.put(replace(view.row("s0"), free_mask=0b0111), in_service=0b0111)
    view.remove("s1")
    view.take(candidates(view, gang(2)).candidates[0][0])
    empty = view.emptied()
    assert [row.free_mask for row in empty.rows()] == [0b0111]
    assert empty.free == [0b0111, 0]


def test_putting_the_same_row_again_changes_nothing() -> None:
    view = cluster(2)
    version = view.version
    assert not view.put(idle_row("s0", server()))
    assert view.version == version


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from(["change", "change", "look", "copy"]))))
def test_columns_of_a_view_and_of_its_copies_follow_each_their_own_changes(steps: list[tuple[int, int, str]]) -> None:
    views = [cluster(4)]
    for which, slot, step in steps:
        view = views[which % len(views)]
        if step == "copy":
            views.append(view.copy())
        elif step == "look":
            view.columns()
        else:
            claim = Claim(f"s{slot}", 1, (1000, 0), 0, tasks=(1,))
            (view.take if view.free[slot] & 1 else view.give)(claim)
    for view in views:
        columns = view.columns()
        view._table = ColumnTable()
        for name in type(columns).__slots__:
            np.testing.assert_array_equal(getattr(view.columns(), name)[:4], getattr(columns, name)[:4])


@pytest.mark.parametrize("of", [server(), replace(server(), sockets=(Socket(8_000, 0),), groups=())])
def test_idle_node_takes_the_affinity_of_its_first_gang_and_loses_it_with_the_last(of: ConfigurationSet) -> None:
    view = cluster(1, of)
    first, second = (Claim("s0", mask, (), 0) for mask in (0b0011, 0b0100))
    view.take(first, 2)
    view.take(second, 1)
    assert view.row("s0").affinity == 2
    view.give(first)
    assert view.row("s0").affinity == 2
    view.give(second)
    assert view.row("s0").affinity == 0
