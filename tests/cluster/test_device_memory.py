"""Memory of devices: what parked gangs keep is not free, and no gang gets more than is left."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import product

import pytest
from ganger.cluster.fit import fit
from ganger.cluster.placement import candidates, impossible
from ganger.cluster.refusals import Reason
from ganger.cluster.resources import Claim, GangShape, Role, TaskShape
from ganger.cluster.view import View
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.clusters import GIB, cluster, gang, idle_row, parked, server
from msgspec.structs import replace

# Devices of the servers here have 4 GiB.
ON_FIRST_TWO = candidates(cluster(1), gang(2)).candidates[0][0]
assert ON_FIRST_TWO.device_mask == 0b0011


@pytest.mark.parametrize(
    ("kept", "needed", "figures"),
    [
        ((), 0, None),
        ((), 4, None),
        ((), 5, {"needed_bytes": 5 * GIB, "free_bytes": 4 * GIB, "conflicting": 2}),
        ((1, 0, 0, 0), 3, None),
        ((1, 0, 0, 0), 4, {"needed_bytes": 4 * GIB, "free_bytes": 3 * GIB, "conflicting": 1}),
        ((1, 3, 0, 0), 2, {"needed_bytes": 2 * GIB, "free_bytes": GIB, "conflicting": 1}),
        ((1, 3, 0, 0), 4, {"needed_bytes": 4 * GIB, "free_bytes": GIB, "conflicting": 2}),
        # Of devices it does not ask for, and where it does not say what it needs.
        ((0, 0, 4, 4), 4, None),
        ((4, 4, 4, 4), 0, None),
        # More than there is, as a measurement may say.
        ((6, 0, 0, 0), 1, {"needed_bytes": GIB, "free_bytes": 0, "conflicting": 1}),
    ],
)
def test_a_gang_fits_where_enough_of_each_device_is_left(
    kept: tuple[int, ...], needed: int, figures: dict[str, int] | None
) -> None:
    view = cluster(1)
    if kept:
        view.take(parked("s0", *kept))
    refusals = fit(view, gang(2, device_gib=needed), [ON_FIRST_TWO])
    assert [(refusal.reason, refusal.figures, refusal.node) for refusal in refusals] == (
        [] if figures is None else [(Reason.DEVICE_MEMORY, figures, "s0")]
    )


def test_a_parked_gang_may_go_on_beside_others_but_counts_its_own_only_once() -> None:
    view = cluster(1)
    own, other = parked("s0", 1, 1, 0, 0), parked("s0", 1, 0, 0, 0)
    view.take(own)
    assert fit(view, gang(2, device_gib=4), [ON_FIRST_TWO])
    assert fit(view, gang(2, device_gib=4), [ON_FIRST_TWO], holding=[own]) == ()
    view.take(other)
    (refusal,) = fit(view, gang(2, device_gib=4), [ON_FIRST_TWO], holding=[own])
    assert refusal.figures["free_bytes"] == 3 * GIB
    assert fit(view, gang(2, device_gib=3), [ON_FIRST_TWO], holding=[own]) == ()


def test_a_gang_on_a_device_is_not_checked_again_for_other_cores() -> None:
    view = cluster(1)
    view.take(ON_FIRST_TWO)
    more = replace(ON_FIRST_TWO, millicores=(2000, 0))
    assert fit(view, gang(2, device_gib=9), [more], holding=[ON_FIRST_TWO], retune=True) == ()


def test_memory_of_parked_gangs_is_never_requested() -> None:
    (refusal,) = fit(cluster(1), gang(2), [replace(ON_FIRST_TWO, parked_bytes=(1, 0, 0, 0))])
    assert refusal.reason is Reason.CLAIM_MISMATCH


def test_a_set_that_does_not_say_how_much_its_devices_have_takes_all() -> None:
    unknown = replace(server(), device_memory_bytes=0)
    view = cluster(1, unknown)
    view.take(parked("s0", 9, 9, 9, 9))
    shape = gang(2, device_gib=80)
    assert impossible(view, shape) is None
    assert fit(view, shape, candidates(view, shape).candidates[0]) == ()


def test_a_node_that_names_no_size_of_host_memory_has_room_for_any_parked_state() -> None:
    claim = replace(ON_FIRST_TWO, memory_bytes=0, arena_bytes=80 * 2 * GIB)
    shape = replace(gang(2), arena_bytes_per_device=80 * GIB, roles=(Role("worker", 2, TaskShape(1, 2000)),))
    unnamed = cluster(1, replace(server(), memory_bytes=0))
    assert fit(unnamed, shape, [claim]) == ()
    assert unnamed.emptied().memory == unnamed.memory
    small = cluster(1, replace(server(), memory_bytes=4 * GIB))
    assert Reason.MEMORY in [refusal.reason for refusal in fit(small, shape, [replace(claim, memory_bytes=GIB)])]


def test_a_row_carries_what_is_kept_only_where_something_is() -> None:
    view = cluster(2)
    view.take(parked("s1", 0, 0.5, 0, 0))
    assert [row.parked_bytes for row in view.rows()] == [(), (0, GIB // 2, 0, 0)]
    heard = View([server()])
    for row in view.rows():
        assert heard.put(row)
        assert not heard.put(row)
    assert heard.parked == view.copy().parked == view.parked
    assert view.emptied().parked == view.idle().parked == {}
    view.give(parked("s1", 0, 0.5, 0, 0))
    assert view.parked == {}
    heard.remove("s1")
    assert heard.parked == {}
    heard.put(replace(idle_row("s2", server()), parked_bytes=(0, 0)))
    assert heard.row("s2").parked_bytes == ()


def test_devices_with_enough_left_are_chosen() -> None:
    view = cluster(1)
    view.take(parked("s0", 2, 0, 0, 2))
    for shape, mask in [(gang(2, device_gib=3), 0b0110), (gang(4, device_gib=2), 0b1111)]:
        (claims, *_) = candidates(view, shape).candidates
        assert claims[0].device_mask == mask
        assert fit(view, shape, claims) == ()


def test_a_parked_place_comes_first_with_its_own_memory_and_is_asked_for_without() -> None:
    view = cluster(1)
    own = replace(parked("s0", 1, 1, 0, 0), memory_bytes=ON_FIRST_TWO.memory_bytes)
    view.take(own)
    shape = gang(2, device_gib=4)
    place = replace(ON_FIRST_TWO, parked_bytes=own.parked_bytes)
    assert candidates(view, shape, parked=[place]).candidates[0] == (ON_FIRST_TWO,)
    view.take(parked("s0", 0, 0, 1, 1))
    assert candidates(view, shape, parked=[place]).candidates == ((ON_FIRST_TWO,),)
    view.take(parked("s0", 1, 0, 0, 0))
    assert candidates(view, shape, parked=[place]).candidates == ()


def test_what_is_lacking_is_named_with_the_most_that_is_left_and_where() -> None:
    view = cluster(2)
    view.take(parked("s0", 1, 1, 1, 2))
    view.take(replace(candidates(view, gang(4)).candidates[0][0], node="s1"))
    (refusal,) = candidates(view, gang(2, device_gib=4)).refusals
    assert (refusal.reason, refusal.node) == (Reason.DEVICE_MEMORY, "s0")
    assert refusal.figures == {
        "devices": 2,
        "devices_with_room": 0,
        "needed_bytes": 4 * GIB,
        "largest_free_bytes": 3 * GIB,
    }


def test_where_devices_are_missing_as_well_the_memory_of_the_free_ones_comes_first() -> None:
    view = cluster(1)
    view.take(replace(ON_FIRST_TWO, device_mask=0b1100))
    view.take(parked("s0", 1, 1, 0, 0))
    reasons = [refusal.reason for refusal in candidates(view, gang(2, device_gib=4)).refusals]
    assert reasons == [Reason.GPUS, Reason.DEVICE_MEMORY]
    # Enough devices are free, so more of them are not what it waits for.
    assert candidates(view, gang(2, device_gib=4)).refusals[0].figures["largest_free"] == 2


def test_more_than_any_device_has_is_impossible_and_the_most_is_told() -> None:
    small, large = server("4"), replace(server("2"), name="large", device_memory_bytes=8 * GIB)
    view = View([small, large])
    view.put(idle_row("a", small))
    view.put(idle_row("b", large))
    view.take(parked("b", 3, 3))
    # What is parked may go; what a device is made of stays.
    assert impossible(view, gang(2, device_gib=8)) is None
    refusal = impossible(view, gang(1, device_gib=9))
    assert refusal is not None
    assert refusal.reason is Reason.GANG_IMPOSSIBLE
    assert refusal.figures == {"needed_bytes": 9 * GIB, "largest_bytes": 8 * GIB}
    # So many of them has only the one kind, so much memory only the other.
    wide = impossible(view, gang(4, device_gib=8))
    assert wide is not None
    assert (wide.figures["needed"], wide.figures["largest"]) == (4, 2)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=8, max_size=8), st.integers(0, 0xFF), st.integers(1, 4), st.integers(0, 4))
def test_a_place_is_found_whenever_a_node_has_enough_devices_with_enough_left(
    kept: list[int], held: int, gpus: int, device_gib: int
) -> None:
    view = cluster(2)
    for node in range(2):
        view.take(Claim(f"s{node}", held >> 4 * node & 0xF, (), 0))
        view.take(parked(f"s{node}", *kept[4 * node : 4 * node + 4]))
    shape = gang(gpus, device_gib=device_gib)
    room = [not held >> at & 1 and (kept[at] + device_gib <= 4 or not device_gib) for at in range(8)]
    found = candidates(view, shape)
    assert bool(found.candidates) == (sum(room) >= gpus)
    assert all(fit(view, shape, claims) == () for claims in found.candidates)
    if not found.candidates and sum(not held >> at & 1 for at in range(8)) >= gpus:
        assert Reason.DEVICE_MEMORY in {refusal.reason for refusal in found.refusals}


@dataclass
class ParkingCluster:
    """A view of two nodes, with the gangs that run and those that are parked on them."""

    view: View = field(default_factory=lambda: cluster(2))
    running: list[tuple[GangShape, tuple[Claim, ...]]] = field(default_factory=list)
    # Shape, claims before parking, and what each still holds of its devices.
    parked: list[tuple[GangShape, tuple[Claim, ...], tuple[Claim, ...]]] = field(default_factory=list)

    def start(self, number: int) -> None:
        shape = gang(1 + number % 3, device_gib=1 + number % 4)
        for claims in candidates(self.view, shape, limit=1).candidates:
            self._run(shape, claims)

    def park(self, number: int) -> None:
        if not self.running:
            return
        shape, claims = self.running.pop(number % len(self.running))
        # Never more than it may use.
        size = min(shape.device_memory_bytes, number % 4 * GIB // 2)
        held = tuple(self._parked_claim(claim, size) for claim in claims)
        self.parked.append((shape, claims, held))
        free = all(self.view.row(claim.node).free_mask & claim.device_mask == claim.device_mask for claim in claims)
        assert not free or fit(self.view, shape, claims, holding=held) == ()

    def resume(self, number: int) -> None:
        if not self.parked:
            return
        shape, claims, held = self.parked.pop(number % len(self.parked))
        if fit(self.view, shape, claims, holding=held):
            self.parked.append((shape, claims, held))
            return
        for claim in held:
            self.view.give(claim)
        self._run(shape, claims)

    def end(self, number: int) -> None:
        if self.running:
            claims = self.running.pop(number % len(self.running))[1]
        elif self.parked:
            claims = self.parked.pop(number % len(self.parked))[2]
        else:
            return
        for claim in claims:
            self.view.give(claim)

    def used_bytes(self) -> Counter[tuple[str, int]]:
        """Return the memory in use by node and device."""
        used: Counter[tuple[str, int]] = Counter()
        for shape, claims in self.running:
            for claim, device in product(claims, range(4)):
                used[claim.node, device] += shape.device_memory_bytes * (claim.device_mask >> device & 1)
        for _, _, held in self.parked:
            for claim in held:
                for device, size in enumerate(claim.parked_bytes):
                    used[claim.node, device] += size
        return used

    def _run(self, shape: GangShape, claims: tuple[Claim, ...]) -> None:
        for claim in claims:
            self.view.take(claim, shape.gpus)
        self.running.append((shape, claims))

    def _parked_claim(self, claim: Claim, size: int) -> Claim:
        self.view.give(claim)
        kept = tuple(size * (claim.device_mask >> at & 1) for at in range(4))
        held = Claim(claim.node, 0, (), 0, parked_bytes=kept)
        self.view.take(held)
        return held


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["start", "park", "resume", "end"]), st.integers(0, 40)), max_size=30))
def test_no_device_is_overcommitted_and_the_gang_parked_last_can_resume(acts: list[tuple[str, int]]) -> None:
    cluster_of_gangs = ParkingCluster()
    for act, number in acts:
        getattr(cluster_of_gangs, act)(number)
        assert max(cluster_of_gangs.used_bytes().values(), default=0) <= 4 * GIB
