"""What is kept for kinds of gangs while nodes change: the same answers, to the last figure, as from nothing."""

from __future__ import annotations

from gc import collect
from weakref import ref

import pytest
from ganger.cluster import placement as module
from ganger.cluster.capacity_index import kept
from ganger.cluster.census import Census
from ganger.cluster.placement import Search, candidates
from ganger.cluster.ranking import Ranking
from ganger.cluster.refusals import Reason
from ganger.cluster.resources import GangShape, LocalityLevel
from ganger.cluster.scan import Scan
from ganger.cluster.view import LoadMode
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.clusters import cluster, gang, gangs, server
from kit.histories import CHANGES, History


@settings(max_examples=60)
@given(
    shapes=st.lists(gangs(), min_size=1, max_size=3),
    changes=st.lists(st.tuples(CHANGES, st.integers(0, 2)), max_size=25),
    per_rack=st.sampled_from([0, 2]),
    affinity=st.booleans(),
    avoid=st.sampled_from([(), ("s1", "s2", "gone")]),
)
def test_what_is_kept_answers_as_a_scan_of_all_nodes_would(
    shapes: list[GangShape],
    changes: list[tuple[tuple[str, int], int]],
    per_rack: int,
    affinity: bool,
    avoid: tuple[str, ...],
) -> None:
    history = History(cluster(4, per_rack=per_rack))
    for (what, at), which in changes:
        shape = shapes[which % len(shapes)]
        history.change(what, at, shape)
        for one in shapes:
            for search in (Search(affinity=affinity), Search(avoid=avoid), Search(limit=1, mode=LoadMode.PACK)):
                # A copy begins with nothing.
                assert candidates(history.view, one, **search) == candidates(history.view.copy(), one, **search)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (gang(3, widest=LocalityLevel.SOCKET), Reason.LOCALITY),
        (gang(17), Reason.GPUS),
        (gang(2, cores=9), Reason.CORES),
        (gang(1, gib=65), Reason.MEMORY),
        (gang(1, device_gib=5), Reason.DEVICE_MEMORY),
        (gang(1, cores=9, device_gib=2), Reason.CORES),
        (gang(1, device_type="h100"), Reason.DEVICE_TYPE),
    ],
)
def test_what_stands_in_the_way_is_said_from_the_sums_kept(shape: GangShape, reason: Reason) -> None:
    history = History(cluster(4))
    said = []
    for at in range(4):
        placement = candidates(history.view, shape)
        assert placement == candidates(history.view.copy(), shape)
        said.append(placement.refusals[0].reason)
        history.change("start", at, gang(1))
        history.change("park", 3 - at, shape)
    assert said == [reason] * 4
    assert kept(history.view, (Census, shape, shape.locality.widest), lambda: pytest.fail("nothing was kept"))


def test_a_second_request_soon_after_the_first_scans_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    history = History(cluster(64))
    shape = gang(2, widest=LocalityLevel.NODE)
    for at in range(3):
        history.change("start", at, shape)
        candidates(history.view, shape)
    monkeypatch.setattr(module, "Scan", None)
    monkeypatch.setattr(Scan, "of", lambda *_: pytest.fail("all nodes were scanned"))
    assert candidates(history.view, shape).candidates


def test_a_request_after_many_changes_scans_all_nodes() -> None:
    history = History(cluster(4))
    shape = gang(1)
    made: list[Ranking] = []

    def make() -> Ranking:
        made.append(Ranking(history.view, shape, LoadMode.SPREAD, LocalityLevel.CLUSTER, True))
        return made[-1]

    assert kept(history.view, "it", make) is None
    assert kept(history.view, "it", make) is None, "nothing has changed since the scan"
    history.change("start", 0, shape)
    assert kept(history.view, "it", make) is made[0]
    for _ in range(50):
        history.change("cordon", 0, shape)
    assert kept(history.view, "it", make) is None
    history.change("cordon", 0, shape)
    assert kept(history.view, "it", make) is made[1]
    assert len(made) == 2


def test_the_least_recently_requested_kinds_are_dropped() -> None:
    view = cluster(2000, server())
    shapes = [gang(1, gib=1 + at % 60, cores=1 + at // 60) for at in range(200)]
    for shape in shapes:
        assert kept(view, shape, lambda: pytest.fail("nothing has changed")) is None
    view.set_available("s0", False)
    made = []

    def make(shape: GangShape) -> Ranking:
        made.append(shape)
        return Ranking(view, shape, LoadMode.SPREAD, LocalityLevel.NODE, True)

    assert kept(view, shapes[0], lambda: make(shapes[0])) is None
    assert kept(view, shapes[-1], lambda: make(shapes[-1])) is not None
    assert made == [shapes[-1]]


def test_what_is_kept_goes_with_its_view() -> None:
    view = cluster(4)
    shape = gang(2, widest=LocalityLevel.NODE)
    candidates(view, shape)
    view.set_available("s0", False)
    candidates(view, shape)
    assert [type(one.what) for one in view.kept.values()] == [Ranking]
    assert not view.copy().kept
    gone = ref(view)
    del view
    collect()
    assert gone() is None
