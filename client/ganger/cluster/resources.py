"""The words of the resource abstraction, as frozen values: what servers are, what jobs ask for, what gangs hold.

Everything here is immutable and ordered by name where order matters. Cores are thousandths of a physical core
(`millicores`), memory is bytes, devices are bits of an integer mask (bit i: device i).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from itertools import zip_longest
from operator import add, gt
from typing import Final, TypeAlias

from msgspec import Struct, field
from msgspec.structs import replace

# Names of durations in stored bodies and recordings, which earlier versions wrote with the unit in full.
STORED_NAMES: Final[Mapping[str, str]] = {
    name: f"{name.removesuffix('s')}seconds"
    for name in (
        "patience_s",
        "time_limit_s",
        "checkpoint_interval_s",
        "run_s",
        "move_pause_s",
        "pause_s",
        "quantum_s",
        "switch_s",
    )
}


# Dimensions beside devices, cores and memory that tasks may name and nodes may declare, in the order of `Bandwidth`.
DIMENSIONS: Final = ("disk_mb_per_s", "net_mb_per_s")
# Megabytes (10^6 bytes) per second of the node's disks and of its network; empty: none, or no limit.
Bandwidth: TypeAlias = tuple[int, ...]
# Of a dimension that a node does not declare. Never add it up over nodes.
UNLIMITED_MB_PER_S: Final = 1 << 40


def more_bandwidth(one: Bandwidth, other: Bandwidth) -> Bandwidth:
    """Return the sum of two amounts, either of which may be empty."""
    return tuple(map(add, one, other)) if one and other else one or other


def less_bandwidth(one: Bandwidth, other: Bandwidth) -> Bandwidth:
    """Return what the first amount has beyond the second."""
    if not any(one):
        return ()
    found = tuple([max(0, own - less) for own, less in zip(one, other or (0,) * len(one), strict=True)])
    return found if any(found) else ()


def exceeds(wanted: Bandwidth, free: Bandwidth) -> bool:
    """Return whether an amount is more than what is free; empty `free`: no limit."""
    return bool(wanted and free) and any(map(gt, wanted, free))


class LocalityLevel(IntEnum):
    """The best path between two devices; of a gang, its worst pair. Smaller is closer."""

    NVLINK = 1
    SWITCH = 2
    SOCKET = 3
    NODE = 4
    RACK = 5
    FABRIC = 6
    CLUSTER = 7


class DeviceGroup(Struct, frozen=True, gc=False):
    """Devices that reach each other at `level` or better."""

    level: LocalityLevel
    device_mask: int


class Socket(Struct, frozen=True, gc=False):
    millicores: int
    device_mask: int


# Host memory of a node that names no size; a modelled node uses far less. Never add it up over nodes.
_UNLIMITED_BYTES: Final = 1 << 60


class ConfigurationSet(Struct, frozen=True, gc=False):
    """Servers of identical hardware. Few and immutable.

    `memory_bytes`: host memory; zero: no size is named, and it limits nothing. `dimensions`: amounts by name; those of
    `DIMENSIONS` are counted.
    """

    name: str
    device_type: str = ""
    devices: int = 0
    device_memory_bytes: int = 0
    groups: tuple[DeviceGroup, ...] = ()
    sockets: tuple[Socket, ...] = (Socket(0, 0),)
    memory_bytes: int = 0
    dimensions: Mapping[str, float] = field(default_factory=dict)

    @property
    def free_memory_bytes(self) -> int:
        """Return the host memory of an idle node."""
        return self.memory_bytes or _UNLIMITED_BYTES

    @property
    def bandwidth(self) -> Bandwidth:
        """Return what an idle node has; empty if it declares no limit."""
        if not self.dimensions or self.dimensions.keys().isdisjoint(DIMENSIONS):
            return ()
        return tuple([int(self.dimensions.get(name, UNLIMITED_MB_PER_S)) for name in DIMENSIONS])


class NodeRow(Struct, frozen=True, gc=False):
    """One node as the view shows it."""

    node: str
    configuration_set: str
    free_mask: int
    free_millicores: tuple[int, ...]
    free_memory_bytes: int
    version: int = 0
    available: bool = True
    rack: str = ""
    fabric: str = ""
    socket_jobs: tuple[int, ...] = ()
    group_jobs: tuple[int, ...] = ()
    device_rows: tuple[int, ...] = ()
    affinity: int = 0
    # Memory that parked gangs keep of each device; empty where they keep none, as nearly everywhere.
    parked_bytes: tuple[int, ...] = ()
    # Empty where the node declares no limit.
    free_bandwidth: Bandwidth = ()
    # Names, sorted; without partitions in the cluster, empty on all nodes.
    partitions: tuple[str, ...] = ()


class TaskShape(Struct, frozen=True, gc=False):
    """One task. Zero millicores or memory means: a share of the node in proportion to its devices. `bandwidth`: empty
    if the task names none, and then it is not counted."""

    gpus: int = 1
    millicores: int = 0
    memory_bytes: int = 0
    bandwidth: Bandwidth = ()


class Role(Struct, frozen=True, gc=False, omit_defaults=True):
    """`tasks` tasks of one shape. `tasks_min`, `tasks_max`: the range of an elastic role; both zero: it has none."""

    name: str
    tasks: int
    shape: TaskShape
    tasks_min: int = 0
    tasks_max: int = 0


class Locality(Struct, frozen=True, gc=False, rename=STORED_NAMES):
    """What a job tolerates: `widest` at once, `wish` if it comes within `patience_s`."""

    widest: LocalityLevel = LocalityLevel.CLUSTER
    wish: LocalityLevel | None = None
    patience_s: float = 0.0


class Claim(Struct, frozen=True, gc=False, omit_defaults=True):
    """What a gang holds or requests on one node. `tasks[r]`: of role r; ranks run role by role, then claim by claim."""

    node: str
    device_mask: int
    millicores: tuple[int, ...]
    memory_bytes: int
    arena_bytes: int = 0
    tasks: tuple[int, ...] = ()
    # What a gang parked at OFFLOAD keeps of each of the node's devices, though it holds none; no request has it.
    parked_bytes: tuple[int, ...] = ()
    # The devices of this claim that other gangs may hold too: set for every gang of a co-location.
    shared_mask: int = 0
    # Of a gang parked at OFFLOAD: what it keeps of `memory_bytes`; no request has it.
    parked_memory_bytes: int = 0
    bandwidth: Bandwidth = ()


def tasks_of(claims: Sequence[Claim]) -> tuple[int, ...]:
    """Return how many tasks of each role claims have together."""
    return tuple(map(sum, zip_longest(*[claim.tasks for claim in claims], fillvalue=0)))


def accepts_type(wanted: str, device_type: str) -> bool:
    """Return whether a gang that wants these types (`GangShape.device_type`) runs on devices of this type."""
    return wanted in ("", device_type) or ("," in wanted and device_type in wanted.split(","))


def shapes_by_type(shape: GangShape) -> tuple[GangShape, ...]:
    """Return the shape once for each device type that it accepts, the preferred one first; as it is for one or none."""
    if "," not in shape.device_type:
        return (shape,)
    return tuple([replace(shape, device_type=one) for one in shape.device_type.split(",")])


class GangShape(Struct, frozen=True, gc=False):
    """All that placement needs to know of a job: its roles and what it tolerates. `device_type`: the types that it
    accepts, with commas, the preferred one first, all devices of a gang being of one of them; empty: any."""

    roles: tuple[Role, ...]
    device_type: str = ""
    locality: Locality = Locality()
    nodes: int = 0
    arena_bytes_per_device: int = 0
    # What each of its devices must have left; zero takes what there is.
    device_memory_bytes: int = 0
    # What one task needs of host memory by measurement, where its role names none; zero: unknown.
    task_memory_bytes: int = 0
    # So many such gangs are to find host memory on a device: where none is named each takes that part of the share.
    residents: int = 1
    # It runs on nodes of this partition; empty: on any.
    partition: str = ""
    # Nodes that no search finds for it, by name.
    closed_nodes: frozenset[str] = frozenset()

    @property
    def gpus(self) -> int:
        # Asked for all the time, and most gangs have one role.
        if len(self.roles) == 1:
            return self.roles[0].tasks * self.roles[0].shape.gpus
        return sum([role.tasks * role.shape.gpus for role in self.roles])

    @property
    def tasks(self) -> int:
        return sum([role.tasks for role in self.roles])

    @property
    def names_bandwidth(self) -> bool:
        """Return whether a task names disk or network bandwidth."""
        return any(role.shape.bandwidth for role in self.roles)
