"""Which devices of one server lie close together: levels of device masks, best masks for so many devices.

There is one table for each configuration set. It remembers every requested mask on servers of up to eight devices;
larger servers are searched group by group. The module depends on no nodes or jobs, only on counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, reduce
from itertools import combinations
from operator import or_

from ganger.cluster.resources import ConfigurationSet, DeviceGroup, LocalityLevel, Socket, accepts_type

# Wider than any level: not enough devices.
FAR = 99
# Above this a server has too many masks to look at each: C(8, 4) = 70, C(16, 8) = 12,870.
_ENUMERATED_DEVICES = 8
# Answers of a kind remembered per configuration set; a cluster of 16-device servers could request 2**16.
_MEMO_ENTRIES = 1 << 16
_GIB = 1 << 30


class Topology:
    """The tables of one configuration set. Masks are integers, bit i is device i.

    `partitions`: those that all nodes of this topology are in, by name."""

    def __init__(self, configuration_set: ConfigurationSet, partitions: tuple[str, ...] = ()) -> None:
        self.configuration_set = configuration_set
        self.partitions = partitions
        self.devices = configuration_set.devices
        self.all_mask = (1 << configuration_set.devices) - 1
        self.sockets = tuple(socket.device_mask for socket in configuration_set.sockets)
        self.groups = innermost_groups(configuration_set)
        # Devices that are at a socket or in a group.
        self.neighbours = reduce(or_, (*self.sockets, *self.groups), 0)
        self._cliques = _cliques(configuration_set)
        self._pairs = _pair_levels(configuration_set)
        # Of a server on which all are equally far from each other; None of any other.
        apart = {level for one, levels in enumerate(self._pairs) for level in levels[:one]}
        self._uniform = apart.pop() if len(apart) == 1 else None
        # Most masks are requested again and again.
        self._worst_pair = lru_cache(_MEMO_ENTRIES)(self._find_pair)
        self._closest = lru_cache(_MEMO_ENTRIES)(self._search)
        self._most = lru_cache(_MEMO_ENTRIES)(self._find_most)
        self.circles = tuple({*self.sockets, *(mask for _, mask in self._cliques)} - {0})

    def accepts(self, device_type: str, partition: str) -> bool:
        """Return whether tasks with devices may be here, by `GangShape.device_type` and `GangShape.partition`."""
        return accepts_type(device_type, self.configuration_set.device_type) and self.is_in(partition)

    def is_in(self, partition: str) -> bool:
        """Return whether gangs of a partition may be here; empty: those of none, which may be anywhere."""
        return not partition or partition in self.partitions

    def level(self, mask: int) -> LocalityLevel:
        """The worst pair of the mask's devices; NVLINK, the closest, for fewer than two."""
        if mask & (mask - 1) == 0:
            return LocalityLevel.NVLINK
        if self._uniform is not None:
            return self._uniform
        return self._worst_pair(mask)

    def best(
        self,
        free: int,
        count: int,
        widest: LocalityLevel = LocalityLevel.NODE,
        spread: bool = False,
        socket_jobs: Sequence[int] = (),
        group_jobs: Sequence[int] = (),
    ) -> int | None:
        """`count` of the free devices, at `widest` or closer, or None.

        The closest first. Among equally close ones: packed, those that leave the least behind in the groups they touch,
        so that whole switches and sockets stay free; spread, those beside the fewest jobs with the most left free.
        """
        if count == 0:
            return 0
        if free.bit_count() < count:
            return None
        if not self.circles:
            # None are closer to each other than others.
            return _lowest(free, count) if widest >= LocalityLevel.NODE or count == 1 else None
        jobs = (tuple(socket_jobs), tuple(group_jobs)) if spread else ((), ())
        return self._closest(free, count, widest, spread, *jobs)

    def largest(self, free: int, widest: LocalityLevel) -> int:
        """Most free devices that lie within `widest` of each other."""
        if widest >= LocalityLevel.NODE:
            return free.bit_count()
        return self._most(free, widest)

    def closest(self, free: int, count: int) -> int:
        """Level of the best `count` of the free devices, or FAR."""
        mask = self.best(free, count)
        return FAR if mask is None else int(self.level(mask))

    def _find_pair(self, mask: int) -> LocalityLevel:
        low, rest = (mask & -mask).bit_length() - 1, mask & (mask - 1)
        return max(self.level(rest), *(self._pairs[low][other] for other in bits(rest)))

    def _find_most(self, free: int, widest: LocalityLevel) -> int:
        most = free.bit_count()
        return next((n for n in range(most, 1, -1) if self.best(free, n, widest) is not None), min(1, most))

    def _search(
        self,
        free: int,
        count: int,
        widest: LocalityLevel,
        spread: bool,
        socket_jobs: Sequence[int],
        group_jobs: Sequence[int],
    ) -> int | None:
        def rank(mask: int) -> tuple[int, int, int, int, int]:
            waste = sum((free & ~mask & group).bit_count() for group in self.circles if group & mask)
            if not spread:
                return self.level(mask), waste, 0, 0, mask
            return (
                self.level(mask),
                _jobs_beside(self.sockets, socket_jobs, mask),
                _jobs_beside(self.groups, group_jobs, mask),
                -waste,
                mask,
            )

        masks = [mask for mask in self._masks_to_look_at(free, count) if self.level(mask) <= widest]
        return min(masks, key=rank, default=None)

    def _masks_to_look_at(self, free: int, count: int) -> Iterator[int]:
        if self.devices <= _ENUMERATED_DEVICES:
            yield from (sum(chosen) for chosen in combinations([1 << bit for bit in bits(free)], count))
            return
        for group in (*(mask for _, mask in self._cliques), *self.sockets, self.all_mask):
            if (free & group).bit_count() >= count:
                yield self._fill(free & group, count)

    def _fill(self, free: int, count: int) -> int:
        """`count` of `free`, from the groups that they fill best, so that the fewest groups are cut."""
        mask = 0
        pieces = sorted(
            ((free & group) for group in self.groups if free & group),
            key=lambda piece: (piece.bit_count() > count, -piece.bit_count(), piece),
        )
        for piece in (*pieces, free):
            for bit in bits(piece & ~mask):
                if mask.bit_count() == count:
                    return mask
                mask |= 1 << bit
        return mask


def innermost_groups(configuration_set: ConfigurationSet) -> tuple[int, ...]:
    """Masks of the closest groups of devices: of the first level that has any, else one per socket with devices."""
    if not configuration_set.groups:
        return tuple(socket.device_mask for socket in configuration_set.sockets if socket.device_mask)
    closest = min(group.level for group in configuration_set.groups)
    return tuple(group.device_mask for group in configuration_set.groups if group.level == closest)


def bits(mask: int) -> Iterator[int]:
    """The devices of a mask, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _lowest(mask: int, count: int) -> int:
    rest = mask
    for _ in range(count):
        rest &= rest - 1
    return mask ^ rest


def parse_topology(
    text: str,
    *,
    name: str = "",
    device_type: str = "virtual",
    device_memory_bytes: int = 4 * _GIB,
    millicores: int = 8000,
    memory_bytes: int = 16 * _GIB,
) -> ConfigurationSet:
    """A server from "sockets x switches x devices per switch" ("2x2x2"), "sockets x devices" ("2x2"), "devices" ("4").

    Cores are dealt out to the sockets evenly, whole ones first to the lower sockets. ValueError for anything else.
    """
    parts = text.lower().split("x")
    if not 1 <= len(parts) <= 3 or not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"topology {text!r} is none of DEVICES, SOCKETSxDEVICES, SOCKETSxSWITCHESxDEVICES: try 2x2")
    numbers = [int(part) for part in parts]
    sockets = numbers[0] if len(numbers) > 1 else 1
    switches = numbers[1] if len(numbers) == 3 else 1
    per_switch = numbers[-1]
    devices = sockets * switches * per_switch
    if devices > 64:
        raise ValueError(f"topology {text!r} has {devices} devices: a server has at most 64")
    per_socket = switches * per_switch
    socket_masks = [((1 << per_socket) - 1) << (index * per_socket) for index in range(sockets)]
    groups = [
        DeviceGroup(LocalityLevel.SWITCH, ((1 << per_switch) - 1) << (index * per_switch))
        for index in range(sockets * switches if len(numbers) == 3 else 0)
    ]
    groups += [DeviceGroup(LocalityLevel.SOCKET, mask) for mask in socket_masks]
    return ConfigurationSet(
        name=name or f"{device_type}-{text.lower()}",
        device_type=device_type,
        devices=devices,
        device_memory_bytes=device_memory_bytes,
        groups=tuple(groups),
        sockets=tuple(
            Socket(share, mask) for share, mask in zip(_shares(millicores, sockets), socket_masks, strict=True)
        ),
        memory_bytes=memory_bytes,
    )


def _shares(millicores: int, sockets: int) -> list[int]:
    cores, rest = divmod(millicores, 1000)
    shares = [1000 * (cores // sockets + (index < cores % sockets)) for index in range(sockets)]
    shares[-1] += rest
    return shares


def _jobs_beside(groups: Sequence[int], jobs: Sequence[int], mask: int) -> int:
    return sum(count for group, count in zip(groups, jobs, strict=False) if group & mask)


def _cliques(configuration_set: ConfigurationSet) -> tuple[tuple[LocalityLevel, int], ...]:
    return tuple(sorted((group.level, group.device_mask) for group in configuration_set.groups))


def _pair_levels(configuration_set: ConfigurationSet) -> list[list[LocalityLevel]]:
    levels = [[LocalityLevel.NODE] * configuration_set.devices for _ in range(configuration_set.devices)]
    closeness = [(LocalityLevel.SOCKET, socket.device_mask) for socket in configuration_set.sockets]
    for level, mask in (*closeness, *_cliques(configuration_set)):
        for one in bits(mask):
            for other in bits(mask):
                levels[one][other] = min(levels[one][other], level)
    return levels


@lru_cache(16_384)
def counted_jobs(
    topology: Topology,
    counts: tuple[tuple[int, ...], tuple[int, ...]],
    mask: int,
    millicores: tuple[int, ...],
    sign: int,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the jobs at each socket and in each group with a claim more (`sign` 1) or less (-1).

    Cached: many nodes are filled alike."""
    at_sockets, in_groups = counts
    return (
        tuple(
            jobs + sign if devices & mask or any(millicores[at : at + 1]) else jobs
            for at, (jobs, devices) in enumerate(zip(at_sockets, topology.sockets, strict=True))
        ),
        tuple(jobs + sign if group & mask else jobs for jobs, group in zip(in_groups, topology.groups, strict=True)),
    )
