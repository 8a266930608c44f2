"""Matching a packing with where gangs lie: nothing of it is lost, and every job that can stay stays. A packing that is
known is not searched again."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import permutations

import numpy as np
from ganger_master.planner.synergy_round import Place, keeping, remembering
from ganger_master.policies.tunings import Gangs, Pieces, Profiles, TuningNodes, gangs
from ganger_master.policies.tunings.synergy import SYNERGY_TUNE
from hypothesis import given
from hypothesis import strategies as st

# A gang lies on one node with 1 to 4 GPUs; amounts are as good as any.
_gang = st.tuples(st.integers(0, 3), st.integers(1, 4), st.sampled_from(["a", "b"]))


def _place(node: int, gpus: int, kind: str) -> Place:
    return ((node, gpus),), ((gpus * (1000 if kind == "a" else 3000), gpus),)


@given(then=st.lists(_gang, max_size=8), now=st.lists(st.integers(-1, 3), min_size=8, max_size=8))
def test_every_target_is_given_to_one_gang_of_its_kind_and_nodes_alike_change_places_as_a_whole(
    then: list[tuple[int, int, str]], now: list[int]
) -> None:
    kinds = [(kind, gpus) for _, gpus, kind in then]
    present = [None if node < 0 else _place(node, gpus, kind) for node, (_, gpus, kind) in zip(now, then, strict=False)]
    targets = {at: _place(*gang) for at, gang in enumerate(then)}
    found = keeping(present, kinds, targets, ["alike"] * 4)
    contents = [Counter[tuple[object, object]]() for _ in range(4)]
    wanted = [Counter[tuple[object, object]]() for _ in range(4)]
    for kind, place, target in zip(kinds, found, targets.values(), strict=True):
        assert place is not None
        contents[place[0][0][0]][kind, place[1]] += 1
        wanted[target[0][0][0]][kind, target[1]] += 1
    assert sorted(map(repr, map(sorted, map(_items, contents)))) == sorted(map(repr, map(sorted, map(_items, wanted))))
    stayed = sum(
        g[1] for g, was, place in zip(then, present, found, strict=True) if was and place and was[0] == place[0]
    )
    assert stayed == _most_that_can_stay(then, now)
    # A second call with the jobs that stayed keeps them.
    left = [was if was and place and was[0] == place[0] else None for was, place in zip(present, found, strict=True)]
    again = keeping(left, kinds, targets, ["alike"] * 4)
    assert all(
        was is None or (place is not None and place[0] == was[0]) for was, place in zip(left, again, strict=True)
    )


def _items(counter: Counter[tuple[object, object]]) -> list[str]:
    return [repr(item) for item in counter.items()]


def _most_that_can_stay(then: list[tuple[int, int, str]], now: list[int]) -> int:
    """By trying all ways in which nodes could change places; GPUs."""
    have = [Counter[tuple[str, int]]() for _ in range(4)]
    want = [Counter[tuple[str, int]]() for _ in range(4)]
    for node, (target, gpus, kind) in zip(now, then, strict=False):
        want[target][kind, gpus] += gpus
        if node >= 0:
            have[node][kind, gpus] += gpus
    return max(sum((want[a] & have[b]).total() for a, b in enumerate(order)) for order in permutations(range(4)))


def test_nodes_that_are_not_alike_keep_what_was_meant_for_them() -> None:
    targets = {0: _place(0, 1, "a"), 1: _place(1, 1, "b")}
    found = keeping([_place(1, 1, "a"), _place(0, 1, "b")], ["a", "b"], targets, ["small", "large"])
    assert found == [targets[0], targets[1]]


def test_a_job_that_is_not_packed_has_no_place() -> None:
    assert keeping([None, _place(0, 2, "a")], ["a", "b"], {0: _place(0, 1, "a")}, ["x"]) == [_place(0, 1, "a"), None]


def test_a_round_with_the_same_gangs_on_the_same_nodes_searches_no_places() -> None:
    searched = []

    def place(some: Gangs, nodes: TuningNodes) -> Pieces:
        searched.append(len(some))
        assert SYNERGY_TUNE.place is not None
        return SYNERGY_TUNE.place(some, nodes)

    tuning = remembering(replace(SYNERGY_TUNE, place=place))
    assert tuning.place is not None
    flat = Profiles(np.array([1.0, 4.0]), np.array([1.0]), np.array([[[1.0], [2.0]]]))
    nodes = TuningNodes(np.array([4]), np.array([8.0]), np.array([4.0]))
    two, again, other = gangs([1, 2], [0, 0], flat), gangs([1, 2], [0, 0], flat), gangs([2, 2], [0, 0], flat)
    first = tuning.place(two, nodes)
    assert tuning.place(again, nodes) is first
    assert searched == [2]
    assert tuning.place(other, nodes) is not first
    assert tuning.place(other, replace(nodes, cores=np.array([6.0]))) is not first
    # Equal numbers measured anew are other profiles.
    tuning.place(gangs([2, 2], [0, 0], replace(flat)), nodes)
    assert len(searched) == 4
