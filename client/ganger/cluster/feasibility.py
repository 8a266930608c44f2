"""Nodes that are alike, sets of nodes as integers, and what one shape of gang means to nodes alike: which could host it
whole, how many of its tasks, at which level.

Sums of tasks by rack, by fabric and of the cluster follow single nodes.

Fragmentation is how many free GPUs the next gang could not use where they are, by the measure of FGD (Weng et al.,
"Beware of Fragmentation", USENIX ATC 2023, section 4): of a node n and a kind of task m, the fragment F_n(m) is the
node's free GPUs if m could not run there, and otherwise the free GPUs too small for it (none here: GPUs are whole); F_n
is its mean over kinds of tasks by how often they are requested; a cluster's is the sum over nodes. A gang of more GPUs
than a node has needs the node whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from ganger.cluster.claims import PLENTY
from ganger.cluster.fit import Demand as Needs
from ganger.cluster.fit import demand
from ganger.cluster.resources import (
    Bandwidth,
    ConfigurationSet,
    GangShape,
    LocalityLevel,
    Role,
    TaskShape,
    accepts_type,
    exceeds,
)
from ganger.cluster.topology import FAR, Topology
from ganger.cluster.view import View

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

    def able(self, millicores: int, memory: int, bandwidth: Bandwidth = ()) -> Sequence[Alike]:
        """Return the members with at least these cores, bytes, and megabytes per second."""
        if self._most_millicores < millicores or self._most_memory < memory:
            return ()
        found = [alike for alike in self.members if alike.millicores >= millicores and alike.memory >= memory]
        if not found:
            self._most_millicores = max([alike.millicores for alike in self.members])
            self._most_memory = max([alike.memory for alike in self.members])
        if any(bandwidth):
            return [alike for alike in found if not exceeds(bandwidth, alike.bandwidth)]
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

    __slots__ = ("bandwidth", "family", "jobs", "lowest_known", "memory", "millicores", "number", "slots")

    def __init__(
        self, number: int, family: Family, millicores: int, memory: int, jobs: int, bandwidth: Bandwidth = ()
    ) -> None:
        # Counts up from 1.
        self.number = number
        self.family = family
        self.millicores = millicores
        self.memory = memory
        self.jobs = jobs
        # Empty: no limit.
        self.bandwidth = bandwidth
        self.slots: Slots = 0
        self.lowest_known = -1

    @property
    def lowest(self) -> int:
        """Lowest slot of the nodes. There must be one."""
        if self.lowest_known < 0:
            self.lowest_known = (self.slots & -self.slots).bit_length() - 1
        return self.lowest_known


class Entries:
    """The classes of equal nodes in an index; some have no nodes now. `is_present`: by number, an empty class at 0."""

    def __init__(self) -> None:
        # The first is number 1.
        self.alikes: list[Alike] = []
        self._is_present = np.zeros(_FEW, np.bool_)

    def add(self, family: Family, millicores: int, memory: int, jobs: int, bandwidth: Bandwidth) -> Alike:
        number = len(self.alikes) + 1
        if number == len(self._is_present):
            self._is_present = np.concatenate((self._is_present, np.zeros_like(self._is_present)))
        alike = Alike(number, family, millicores, memory, jobs, bandwidth)
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


# -- gangs on such nodes -----------------------------------------------------------------------------------------------

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


# Kinds of tasks beyond these are too rare to tell.
MOST_KINDS: Final = 128


@dataclass(frozen=True, eq=False)
class GangMix:
    """Kinds of gangs and how often each is requested: columns of one entry a kind.

    `millicores` and `memory_bytes` are for each GPU, 0 where nothing is asked. `accepts[m, t]`: whether kind m runs on
    GPUs of type t, in the order in which the types were given. `shares` add up to 1.
    """

    gpus: Integers
    millicores: Floats
    memory_bytes: Floats
    accepts: NDArray[np.bool_]
    shares: Floats
    # Names of the device types, for callers that look them up by name.
    device_types: tuple[str, ...] = ()


def fragmented_gpus(
    demand: GangMix,
    free_gpus: Integers,
    free_millicores: Integers,
    free_memory_bytes: Integers,
    devices: Integers,
    device_types: Integers,
) -> Floats:
    """Expected free GPUs of each node that the next gang could not use: columns of one entry a node, of any part of the
    cluster, so that after a change only the nodes it touched are asked about. `device_types`: positions in the types
    that the demand was made with."""
    gpus = np.minimum(demand.gpus[:, None], devices[None, :])
    usable = (
        (gpus <= free_gpus)
        & (gpus * demand.millicores[:, None] <= free_millicores)
        & (gpus * demand.memory_bytes[:, None] <= free_memory_bytes)
        & demand.accepts[:, device_types]
    )
    return np.asarray(free_gpus * (demand.shares @ ~usable))


def demand_of_shapes(shapes: Iterable[GangShape], sets: Iterable[ConfigurationSet]) -> GangMix:
    """The kinds among these gangs, the most frequent 128 of them, on a cluster of these configuration sets; gangs
    without devices leave no fragments. ValueError if none has any.

    What a shape leaves to the node's proportional share is counted on the first set that has devices of its type.
    """
    with_devices = sorted((item for item in sets if item.devices), key=lambda item: item.name)
    types = tuple(sorted({item.device_type for item in with_devices}))
    kinds: Counter[tuple[int, float, float, str]] = Counter()
    for shape, count in Counter(shapes).items():
        at = next((item for item in with_devices if accepts_type(shape.device_type, item.device_type)), None)
        if shape.gpus and at is not None:
            needed = demand(at, shape, tuple(role.tasks for role in shape.roles))
            kind = (shape.gpus, needed.millicores / shape.gpus, needed.memory_bytes / shape.gpus, shape.device_type)
            kinds[kind] += count
    if not kinds:
        raise ValueError("no gang asks for devices that the cluster has")
    # Most frequent first; ties by the kind itself, so that the order of the shapes does not matter.
    frequent = sorted(kinds.items(), key=lambda item: (-item[1], item[0]))[:MOST_KINDS]
    gpus, millicores, memory, wishes = zip(*(kind for kind, _ in frequent), strict=True)
    counts = np.array([count for _, count in frequent], np.float64)
    return GangMix(
        np.array(gpus, np.int64),
        np.array(millicores, np.float64),
        np.array(memory, np.float64),
        np.array([[accepts_type(wish, item) for item in types] for wish in wishes], np.bool_),
        counts / counts.sum(),
        types,
    )


K = TypeVar("K")
T = TypeVar("T")


class FeasibilityAnswers(dict[K, T]):
    """Answers by key, each computed at its first use. All are forgotten once there are `most`; 0: never."""

    def __init__(self, answer: Callable[[K], T], most: int = 0) -> None:
        self._answer, self._most = answer, most

    def __missing__(self, key: K) -> T:
        if self._most and len(self) >= self._most:
            self.clear()
        found = self[key] = self._answer(key)
        return found


# Entries for which memory is reserved at first.
_FIRST_ROOM = 64


class TaskKind(NamedTuple):
    task: TaskShape
    device_type: str
    # What each device must have left.
    device_memory_bytes: int
    partition: str = ""


class TaskRoom:
    """Number of tasks of one kind that a node could take without other tasks, for each class of equal nodes."""

    def __init__(self, kind: TaskKind) -> None:
        self.kind = kind
        single = GangShape((Role("", 1, kind.task),))
        self._needs: FeasibilityAnswers[Topology, Needs] = FeasibilityAnswers(
            lambda topology: demand(topology.configuration_set, single, (1,))
        )
        self.of: FeasibilityAnswers[Alike, int] = FeasibilityAnswers(self._room)
        # By number of the entry of the index.
        self._known, self._count = np.zeros(1, np.int64), 1

    def by_number(self, entries: Entries) -> NDArray[np.int64]:
        """Return the tasks that fit, by number of the entry; 0 for no entry. Read-only."""
        known, count = self._known, len(entries.alikes) + 1
        if self._count < count:
            if len(known) < count:
                known = self._known = np.concatenate((known, np.zeros(max(count, _FIRST_ROOM), np.int64)))
            known[self._count : count] = [self.of[alike] for alike in entries.alikes[self._count - 1 :]]
            self._count = count
        return known[:count]

    def needs(self, topology: Topology) -> Needs:
        """Return the cores and memory that one task needs on such a server."""
        return self._needs[topology]

    def _room(self, alike: Alike) -> int:
        family, kind = alike.family, self.kind
        gpus = kind.task.gpus
        room = PLENTY
        if not family.topology.is_in(kind.partition):
            return 0
        if gpus:
            if not accepts_type(kind.device_type, family.topology.configuration_set.device_type):
                return 0
            room = family.takable(self.kind.device_memory_bytes).bit_count() // gpus
        one = self.needs(family.topology)
        if one.millicores:
            room = min(room, alike.millicores // one.millicores)
        if one.memory_bytes:
            room = min(room, alike.memory // one.memory_bytes)
        if one.bandwidth and alike.bandwidth:
            pairs = zip(alike.bandwidth, one.bandwidth, strict=True)
            room = min([room, *[max(0, free) // wanted for free, wanted in pairs if wanted]])
        return room


class FeasibilityQuery:
    """One gang shape against an index. It remembers its answers as long as the entries of the index live. `levels`: the
    answers of `closest`, shared by all shapes with as many devices of the same kind."""

    def __init__(
        self,
        view: View,
        shape: GangShape,
        rooms: Mapping[TaskKind, TaskRoom],
        levels: Mapping[tuple[int, str, int, str], FeasibilityAnswers[Family, int]],
    ) -> None:
        self._view = view
        self.shape = shape
        self.gpus = shape.gpus
        self.tasks = shape.tasks
        self.everything = tuple(role.tasks for role in shape.roles)
        # Roles with the most devices first: how a gang is spread over nodes.
        self.by_weight = sorted(range(len(shape.roles)), key=lambda index: -shape.roles[index].shape.gpus)
        # Nodes with fewer free devices take no task of it.
        self.least_free = min(role.shape.gpus for role in shape.roles)
        limits, inside = (shape.device_type, shape.device_memory_bytes), shape.partition
        # By role.
        self.rooms = [
            rooms[TaskKind(role.shape, *(limits if role.shape.gpus else ("", 0)), inside)] for role in shape.roles
        ]
        everything = self.everything
        self._whole: FeasibilityAnswers[Topology, Needs] = FeasibilityAnswers(
            lambda topology: demand(topology.configuration_set, shape, everything)
        )
        # Level of the closest devices for the whole gang, FAR where there are too few; without cores and memory.
        self.level = levels[shape.gpus, *(limits if shape.gpus else ("", 0)), inside]
        self._memos: dict[Hashable, FeasibilityAnswers[Any, Any]] = {}

    def whole(self, topology: Topology) -> Needs:
        """Return the cores and memory that the whole gang needs on one such node."""
        return self._whole[topology]

    def takable(self, family: Family) -> int:
        """Return the free devices that have the memory left that the gang needs of each."""
        return family.takable(self.shape.device_memory_bytes)

    def spread_room(self, alike: Alike) -> int:
        """Return a rank of nodes for a gang that is spread over several: the tasks of its heaviest role that fit, then
        those of other roles. Nodes that fit only the other roles rank last."""
        first, *others = self.by_weight
        room = self.rooms[first].of[alike]
        if others:
            room = room * PLENTY + min(sum(self.rooms[index].of[alike] for index in others), PLENTY - 1)
        return room

    def memo(self, key: Hashable, answer: Callable[[K], T]) -> dict[K, T]:
        """Return a mapping that calls `answer` once for each class of equal nodes. Equal `key`s share one mapping."""
        known = self._memos.get(key)
        if known is None:
            known = self._memos[key] = FeasibilityAnswers(answer)
        return known

    @cached_property
    def own_kind(self) -> GangMix:
        """Demand of a cluster where all gangs have this shape."""
        return demand_of_shapes((self.shape,), self._view.sets.values())


def closest(family: Family, gpus: int, device_type: str, device_memory_bytes: int, partition: str = "") -> int:
    """Return the level of the closest `gpus` devices of a node; FAR where there are too few."""
    topology = family.topology
    if not topology.is_in(partition):
        return FAR
    if not gpus:
        return LocalityLevel.NVLINK
    if not accepts_type(device_type, topology.configuration_set.device_type):
        return FAR
    return topology.closest(family.takable(device_memory_bytes), gpus)


Counts = NDArray[np.int64]
# Where more nodes than one in so many changed, all are counted again.
_MANY = 8


class CapacityTotals:
    """`spans`: for racks and fabrics, by slot, the number of its span; -1 where it is not named. `most`: tasks counted
    on one node, however many more it could take."""

    def __init__(self, most: int, spans: Mapping[LocalityLevel, NDArray[np.int32]]) -> None:
        self._most = most
        self._spans = spans
        self._counts = np.zeros(0, np.int64)
        # What belongs to no span is summed up behind the last one, where -1 points; made at the first use.
        self._sums: dict[LocalityLevel, Counts] = {}
        self._whole = np.zeros(1, np.int64)
        self._seen = 0

    def follow(self, journal: Sequence[int], entries: NDArray[np.int32], room_of: Counts) -> None:
        """Update the counts. `journal`: slots that changed since the index was built; `entries`: entry numbers, by
        slot; `room_of`: tasks that fit on a node, by entry number."""
        behind = len(journal) - self._seen
        if not len(self._counts) or behind * _MANY > len(entries):
            self._counts = np.minimum(room_of[entries], self._most)
            self._sums.clear()
            self._whole = self._counts.sum(keepdims=True)
        elif behind:
            changed = set(journal[self._seen :])
            slots = np.fromiter(changed, np.intp, len(changed))
            counts = np.minimum(room_of[entries[slots]], self._most)
            more = counts - self._counts[slots]
            self._counts[slots] = counts
            for level, sums in self._sums.items():
                np.add.at(sums, self._spans[level][slots], more)
            self._whole += more.sum()
        self._seen = len(journal)

    def totals(self, level: LocalityLevel) -> Counts:
        """Return the tasks that fit, by number of the rack or fabric; one value for the cluster. Read-only."""
        if level is LocalityLevel.CLUSTER:
            return self._whole
        sums = self._sums.get(level)
        if sums is None:
            spans = self._spans[level]
            size = int(spans.max(initial=-1)) + 2
            # Sums of whole numbers far below 2**53 are exact.
            found = np.bincount(np.where(spans < 0, size - 1, spans), weights=self._counts, minlength=size)
            sums = self._sums[level] = found.astype(np.int64)
        return sums[:-1]
