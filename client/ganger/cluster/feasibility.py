"""What one shape of gang means to nodes alike: which could host it whole, how many of its tasks, at which level.

Sums of tasks by rack, by fabric and of the cluster follow single nodes.

Fragmentation is how many free GPUs the next gang could not use where they are, by the measure of FGD (Weng et al.,
"Beware of Fragmentation", USENIX ATC 2023, section 4): of a node n and a kind of task m, the fragment F_n(m) is the
node's free GPUs if m could not run there, and otherwise the free GPUs too small for it (none here: GPUs are whole); F_n
is its mean over kinds of tasks by how often they are requested; a cluster's is the sum over nodes. A gang of more GPUs
than a node has needs the node whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ganger.cluster.claims import PLENTY
from ganger.cluster.fit import Demand as Needs
from ganger.cluster.fit import demand
from ganger.cluster.node_classes import Alike, Entries, Family
from ganger.cluster.resources import ConfigurationSet, GangShape, LocalityLevel, Role, TaskShape, accepts_type
from ganger.cluster.topology import FAR, Topology
from ganger.cluster.view import View

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
    """Answers by key, each computed at its first use."""

    def __init__(self, answer: Callable[[K], T]) -> None:
        self._answer = answer

    def __missing__(self, key: K) -> T:
        found = self[key] = self._answer(key)
        return found


# Entries for which memory is reserved at first; new entries that are computed one by one, not as columns.
_FIRST_ROOM, _FEW = 64, 8


class TaskKind(NamedTuple):
    task: TaskShape
    device_type: str
    # What each device must have left.
    device_memory_bytes: int


class TaskRoom:
    """Number of tasks of one kind that a node could take without other tasks, for each class of equal nodes."""

    def __init__(self, kind: TaskKind) -> None:
        self.kind = kind
        self._single = GangShape((Role("", 1, kind.task),))
        self._needs: dict[Topology, Needs] = {}
        self.of: FeasibilityAnswers[Alike, int] = FeasibilityAnswers(self._room)
        # By number of the entry of the index.
        self._known, self._count = np.zeros(1, np.int64), 1

    def by_number(self, entries: Entries) -> NDArray[np.int64]:
        """Return the tasks that fit, by number of the entry; 0 for no entry. Read-only."""
        known, count = self._known, len(entries.alikes) + 1
        if self._count < count:
            if len(known) < count:
                known = self._known = np.concatenate((known, np.zeros(max(count, _FIRST_ROOM), np.int64)))
            # Usually few are new, and each column has a fixed cost.
            known[self._count : count] = (
                [self.of[alike] for alike in entries.alikes[self._count - 1 :]]
                if count - self._count <= _FEW
                else self._of_all(entries, self._count)
            )
            self._count = count
        return known[:count]

    def _of_all(self, entries: Entries, first: int) -> NDArray[np.int64]:
        """Return the tasks that fit, for the entries from number `first` on."""
        some = entries.alikes[first - 1 :]
        topologies = {alike.family.topology for alike in some}
        if self.kind.device_memory_bytes or len(topologies) > 1 or not self.kind.task.gpus:
            return np.array([self.of[alike] for alike in some], np.int64)
        (topology,) = topologies
        if not accepts_type(self.kind.device_type, topology.configuration_set.device_type):
            return np.zeros(len(some), np.int64)
        one = self.needs(topology)
        free, millicores, memory = entries.amounts(first)
        room: NDArray[np.int64] = free // one.gpus
        if one.millicores:
            room = np.minimum(room, millicores // one.millicores)
        if one.memory_bytes:
            room = np.minimum(room, memory // one.memory_bytes)
        return room

    def needs(self, topology: Topology) -> Needs:
        """Return the cores and memory that one task needs on such a server."""
        found = self._needs.get(topology)
        if found is None:
            found = self._needs[topology] = demand(topology.configuration_set, self._single, (1,))
        return found

    def _room(self, alike: Alike) -> int:
        family = alike.family
        gpus = self.kind.task.gpus
        room = PLENTY
        if gpus:
            if not accepts_type(self.kind.device_type, family.topology.configuration_set.device_type):
                return 0
            room = family.takable(self.kind.device_memory_bytes).bit_count() // gpus
        one = self.needs(family.topology)
        if one.millicores:
            room = min(room, alike.millicores // one.millicores)
        if one.memory_bytes:
            room = min(room, alike.memory // one.memory_bytes)
        return room


class FeasibilityQuery:
    """One gang shape against an index. It remembers its answers as long as the entries of the index live. `levels`: the
    answers of `closest`, shared by all shapes with as many devices of the same kind."""

    def __init__(
        self,
        view: View,
        shape: GangShape,
        task_room: Callable[[TaskKind], TaskRoom],
        levels: Callable[[GangShape], FeasibilityAnswers[Family, int]],
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
        # By role.
        self.rooms = [task_room(kind) for kind in map(self._kind, shape.roles)]
        self._whole: dict[Topology, Needs] = {}
        # Level of the closest devices for the whole gang, FAR where there are too few; without cores and memory.
        self.level = levels(shape)
        self._memos: dict[Hashable, FeasibilityAnswers[Any, Any]] = {}

    def whole(self, topology: Topology) -> Needs:
        """Return the cores and memory that the whole gang needs on one such node."""
        found = self._whole.get(topology)
        if found is None:
            found = self._whole[topology] = demand(topology.configuration_set, self.shape, self.everything)
        return found

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

    def _kind(self, role: Role) -> TaskKind:
        shape = self.shape
        return TaskKind(role.shape, *((shape.device_type, shape.device_memory_bytes) if role.shape.gpus else ("", 0)))


def closest(family: Family, gpus: int, device_type: str, device_memory_bytes: int) -> int:
    """Return the level of the closest `gpus` devices of a node; FAR where there are too few."""
    topology = family.topology
    if not gpus:
        return LocalityLevel.NVLINK
    if not accepts_type(device_type, topology.configuration_set.device_type):
        return FAR
    return topology.closest(family.takable(device_memory_bytes), gpus)


Counts = NDArray[np.int64]
# Where more nodes than one in so many changed, all are counted again.
_MANY = 8


class CapacityTotals:
    """`racks` and `fabrics`: by slot, the number of its span; -1 where it is not named. `most`: tasks counted on one
    node, however many more it could take."""

    def __init__(self, most: int, racks: NDArray[np.int32], fabrics: NDArray[np.int32]) -> None:
        self._most = most
        self._racks = racks
        self._fabrics = fabrics
        self._counts = np.zeros(0, np.int64)
        # What belongs to no span is summed up behind the last one, where -1 points; None until first needed.
        self._by_rack: Counts | None = None
        self._by_fabric: Counts | None = None
        self._whole = np.zeros(1, np.int64)
        self._seen = 0

    def follow(self, journal: Sequence[int], entries: NDArray[np.int32], room_of: Counts) -> None:
        """Update the counts. `journal`: slots that changed since the index was built; `entries`: entry numbers, by
        slot; `room_of`: tasks that fit on a node, by entry number."""
        behind = len(journal) - self._seen
        if not len(self._counts) or behind * _MANY > len(entries):
            self._counts = np.minimum(room_of[entries], self._most)
            self._by_rack = self._by_fabric = None
            self._whole = self._counts.sum(keepdims=True)
        elif behind:
            changed = set(journal[self._seen :])
            slots = np.fromiter(changed, np.intp, len(changed))
            counts = np.minimum(room_of[entries[slots]], self._most)
            more = counts - self._counts[slots]
            self._counts[slots] = counts
            if self._by_rack is not None:
                np.add.at(self._by_rack, self._racks[slots], more)
            if self._by_fabric is not None:
                np.add.at(self._by_fabric, self._fabrics[slots], more)
            self._whole += more.sum()
        self._seen = len(journal)

    def totals(self, level: LocalityLevel) -> Counts:
        """Return the tasks that fit, by number of the rack or fabric; one value for the cluster. Read-only."""
        if level is LocalityLevel.RACK:
            if self._by_rack is None:
                self._by_rack = _summed(self._racks, self._counts)
            return self._by_rack[:-1]
        if level is LocalityLevel.FABRIC:
            if self._by_fabric is None:
                self._by_fabric = _summed(self._fabrics, self._counts)
            return self._by_fabric[:-1]
        return self._whole


def _summed(spans: NDArray[np.int32], counts: Counts) -> Counts:
    size = int(spans.max(initial=-1)) + 2
    # Sums of whole numbers far below 2**53 are exact.
    return np.bincount(np.where(spans < 0, size - 1, spans), weights=counts, minlength=size).astype(np.int64)
