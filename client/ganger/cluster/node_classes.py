"""Nodes that are alike, and sets of nodes as integers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ganger.cluster.topology import Topology

# Bit i: the node in slot i of the view.
Slots: TypeAlias = int
# Entries for which there is room at first.
_FEW: Final = 32
# So many nodes are added up, and so many more put into bytes, one by one.
_TWO: Final = 2
_SOME: Final = 128
# Of large integers this part is looked at by itself: each step through the whole moves all of it.
_WORD_BITS: Final = 64
_WORD: Final = (1 << _WORD_BITS) - 1


class Family:
    """Nodes with the same devices free and gangs of the same size on them; `members` by what else they have left."""

    __slots__ = (
        "_lowest",
        "_most_memory",
        "_most_millicores",
        "affinity",
        "free",
        "left",
        "mask",
        "members",
        "topology",
    )

    def __init__(self, topology: Topology, mask: int, affinity: int, left: tuple[int, ...]) -> None:
        self.topology = topology
        self.mask = mask
        self.affinity = affinity
        # Bytes of each device beside what parked gangs keep of it.
        self.left = left
        # Free devices.
        self.free = mask.bit_count()
        # An ordered set of those with nodes.
        self.members: dict[Alike, None] = {}
        self._lowest = -1
        # No member has more; whose look was in vain finds out how much it is.
        self._most_millicores = self._most_memory = 0

    @property
    def lowest(self) -> int:
        """Lowest slot of the nodes. There must be one."""
        if self._lowest < 0:
            self._lowest = min([alike.lowest for alike in self.members])
        return self._lowest

    def takable(self, needed_bytes: int) -> int:
        """Return the free devices with at least `needed_bytes` left each; all where device memory is not reported."""
        return self.mask & self.roomy(needed_bytes) if needed_bytes else self.mask

    def roomy(self, needed_bytes: int) -> int:
        """Return the devices, free or not, with at least `needed_bytes` left each."""
        if not needed_bytes or not self.topology.configuration_set.device_memory_bytes:
            return self.topology.all_mask
        return sum([1 << device for device, left in enumerate(self.left) if left >= needed_bytes])

    def able(self, millicores: int, memory: int) -> Sequence[Alike]:
        """Return the members with at least these cores and bytes."""
        if self._most_millicores < millicores or self._most_memory < memory:
            return ()
        found = [alike for alike in self.members if alike.millicores >= millicores and alike.memory >= memory]
        if not found:
            self._most_millicores = max([alike.millicores for alike in self.members])
            self._most_memory = max([alike.memory for alike in self.members])
        return found

    def flip(self, alike: Alike, slots: Slots) -> None:
        """Add the nodes `slots` to a member, or remove them if it has them."""
        before = alike.slots
        alike.slots ^= slots
        alike.lowest_known = self._lowest = -1
        if not before:
            self.members[alike] = None
            if alike.millicores > self._most_millicores:
                self._most_millicores = alike.millicores
            if alike.memory > self._most_memory:
                self._most_memory = alike.memory
        elif not alike.slots:
            del self.members[alike]


class Alike:
    """A class of nodes that are equal for placement. Cores are summed over sockets: a task may use any of them."""

    __slots__ = ("family", "jobs", "lowest_known", "memory", "millicores", "number", "slots")

    def __init__(self, number: int, family: Family, millicores: int, memory: int, jobs: int) -> None:
        # Counts up from 1.
        self.number = number
        self.family = family
        self.millicores = millicores
        self.memory = memory
        self.jobs = jobs
        self.slots: Slots = 0
        self.lowest_known = -1

    @property
    def lowest(self) -> int:
        """Lowest slot of the nodes. There must be one."""
        if self.lowest_known < 0:
            self.lowest_known = (self.slots & -self.slots).bit_length() - 1
        return self.lowest_known


class Entries:
    """The classes of equal nodes in an index; some have no nodes now. Columns are by number, with an empty class at 0,
    and read-only."""

    def __init__(self) -> None:
        # The first is number 1.
        self.alikes: list[Alike] = []
        # Free devices, free millicores, free memory.
        self._amounts = np.zeros((3, _FEW), np.int64)
        self._is_present = np.zeros(_FEW, np.bool_)

    def add(self, family: Family, millicores: int, memory: int, jobs: int) -> Alike:
        number = len(self.alikes) + 1
        if number == len(self._is_present):
            self._amounts = np.concatenate((self._amounts, np.zeros_like(self._amounts)), axis=1)
            self._is_present = np.concatenate((self._is_present, np.zeros_like(self._is_present)))
        self._amounts[:, number] = family.free, millicores, memory
        alike = Alike(number, family, millicores, memory, jobs)
        self.alikes.append(alike)
        return alike

    def flip(self, alike: Alike, slots: Slots) -> None:
        """Add the nodes `slots` to an entry, or remove them if it has them."""
        alike.family.flip(alike, slots)
        self._is_present[alike.number] = bool(alike.slots)

    @property
    def is_present(self) -> NDArray[np.bool_]:
        """Flags by number: whether the class has nodes."""
        return self._is_present[: len(self.alikes) + 1]

    def amounts(self, first: int) -> NDArray[np.int64]:
        """Return free devices, millicores and bytes of memory as three rows, for the classes from number `first` on."""
        return self._amounts[:, first : len(self.alikes) + 1]


def together(slots: Sequence[int], size: int) -> Slots:
    """Return slots below `size` as bits of one integer."""
    if len(slots) <= _TWO:
        return sum([1 << slot for slot in slots])
    if len(slots) <= _SOME:
        some = bytearray(size // 8 + 1)
        for slot in slots:
            some[slot >> 3] |= 1 << (slot & 7)
        return int.from_bytes(some, "little")
    flags = np.zeros(size, np.bool_)
    flags[np.asarray(slots)] = True
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")


def each(slots: Slots) -> Iterator[int]:
    """Ascending."""
    at = 0
    while slots:
        empty = (slots & -slots).bit_length() - 1
        slots >>= empty
        at += empty
        word = slots & _WORD
        while word:
            lowest = word & -word
            yield at + lowest.bit_length() - 1
            word ^= lowest
        slots >>= _WORD_BITS
        at += _WORD_BITS


def each_from_last(slots: Slots) -> Iterator[int]:
    while slots:
        highest = slots.bit_length() - 1
        yield highest
        slots ^= 1 << highest
