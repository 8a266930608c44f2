"""Levels and best masks of one server, against looking at every mask."""

from __future__ import annotations

from itertools import combinations

import pytest
from ganger.cluster.resources import ConfigurationSet, DeviceGroup, LocalityLevel, Socket
from ganger.cluster.topology import Topology, bits, parse_topology
from hypothesis import given
from hypothesis import strategies as st

EIGHT = Topology(parse_topology("2x2x2"))
SIXTEEN = Topology(parse_topology("2x4x2"))


@pytest.mark.parametrize(
    ("mask", "level"),
    [
        (0b1, LocalityLevel.NVLINK),
        (0b11, LocalityLevel.SWITCH),
        (0b101, LocalityLevel.SOCKET),
        (0b10001, LocalityLevel.NODE),
        (0xFF, LocalityLevel.NODE),
    ],
)
def test_level_is_that_of_the_worst_pair(mask: int, level: LocalityLevel) -> None:
    assert EIGHT.level(mask) == level


def test_devices_that_are_all_equally_far_apart_are_at_that_level_however_many() -> None:
    for sockets, level in (
        ((Socket(4000, 0b1111_1111),), LocalityLevel.SOCKET),
        ((Socket(4000, 0),), LocalityLevel.NODE),
    ):
        topology = Topology(ConfigurationSet("one", "x", 8, sockets=sockets))
        assert [topology.level(mask) for mask in (0, 0b1, 0b11, 0b1010_1010)] == [LocalityLevel.NVLINK] * 2 + [
            level
        ] * 2


def test_level_of_a_ring_of_links_is_not_closer_than_its_unlinked_pairs() -> None:
    ring = tuple(DeviceGroup(LocalityLevel.NVLINK, 1 << one | 1 << (one + 1) % 4) for one in range(4))
    topology = Topology(ConfigurationSet("ring", "x", 4, groups=ring, sockets=(Socket(4000, 0b1111),)))
    assert topology.level(0b0011) == LocalityLevel.NVLINK
    assert topology.level(0b0101) == LocalityLevel.SOCKET
    assert topology.level(0b1111) == LocalityLevel.SOCKET


def test_packed_pair_takes_the_switch_it_fills_and_leaves_whole_ones_whole() -> None:
    assert EIGHT.best(0b1111_0111, 1) == 0b0000_0100
    assert EIGHT.best(0b1111_0111, 2) == 0b0000_0011
    assert EIGHT.best(0b1111_1100, 2) == 0b0000_1100


def test_spread_single_device_goes_to_the_socket_with_the_fewest_jobs() -> None:
    mask = EIGHT.best(0b1111_1110, 1, spread=True, socket_jobs=(1, 0), group_jobs=(1, 0, 0, 0))
    assert mask is not None
    assert mask & 0xF0


@pytest.mark.parametrize("topology", [EIGHT, SIXTEEN], ids=["eight", "sixteen"])
@given(data=st.data())
def test_best_mask_is_free_of_the_right_size_and_close_enough(topology: Topology, data: st.DataObject) -> None:
    free = data.draw(st.integers(0, topology.all_mask))
    count = data.draw(st.integers(0, 6))
    widest = data.draw(st.sampled_from([LocalityLevel.SWITCH, LocalityLevel.SOCKET, LocalityLevel.NODE]))
    spread = data.draw(st.booleans())
    mask = topology.best(free, count, widest, spread)
    reachable = [
        sum(1 << bit for bit in chosen)
        for chosen in combinations(bits(free), count)
        if topology.level(sum(1 << bit for bit in chosen)) <= widest
    ]
    assert (mask is not None) == bool(reachable)
    if mask is not None and count:
        assert mask & ~free == 0
        assert mask.bit_count() == count
        assert topology.level(mask) == min(map(topology.level, reachable))


@given(
    devices=st.sampled_from([4, 8, 12]),
    free=st.integers(0, (1 << 12) - 1),
    count=st.integers(0, 6),
    widest=st.sampled_from([LocalityLevel.NVLINK, LocalityLevel.SOCKET, LocalityLevel.NODE]),
    spread=st.booleans(),
)
def test_where_no_devices_are_closer_than_others_the_first_ones_are_the_best(
    devices: int, free: int, count: int, widest: LocalityLevel, spread: bool
) -> None:
    topology = Topology(ConfigurationSet("apart", "x", devices))
    free &= topology.all_mask
    searched = topology._search(free, count, widest, spread, (), ()) if count <= free.bit_count() else None
    assert topology.best(free, count, widest, spread) == searched


@given(
    free=st.integers(0, 255), widest=st.sampled_from([LocalityLevel.SWITCH, LocalityLevel.SOCKET, LocalityLevel.NODE])
)
def test_largest_is_the_most_devices_within_a_level(free: int, widest: LocalityLevel) -> None:
    naive = max(
        (
            len(chosen)
            for size in range(9)
            for chosen in combinations(bits(free), size)
            if EIGHT.level(sum(1 << bit for bit in chosen)) <= widest
        ),
        default=0,
    )
    assert EIGHT.largest(free, widest) == naive


@pytest.mark.parametrize("text", ["", "x", "2x", "0x2", "2x2x2x2", "-1", "9x9", "two"])
def test_topology_that_means_nothing_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(ValueError, match=r"topology"):
        parse_topology(text)


def test_cores_are_dealt_out_to_sockets_whole() -> None:
    assert [socket.millicores for socket in parse_topology("2x2", millicores=5000).sockets] == [3000, 2000]
