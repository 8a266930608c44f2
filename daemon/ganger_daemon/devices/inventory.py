"""The devices of a node, and the description of its server: cores and memory as the kernel reports them, devices, and
the configuration set made of it.

`nvml` has real GPUs, `virtual` declared ones, those of a recorded server, or none. One conformance suite tests all.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from ganger.cluster.resources import ConfigurationSet, DeviceGroup, LocalityLevel, Socket
from msgspec.structs import replace

from ganger_daemon.node.core_table import Core, CoreMap, housekeeping_of, parse_ids

UNREADABLE = -1
"""Used memory of a device that does not answer."""
MAX_DEVICES = 64
MAX_EVENTS = 1024
"""Most events that are kept until they are read; beyond it the oldest are dropped (recorded faults stay)."""


class HealthKind(Enum):
    XID = "xid"
    ECC = "ecc"
    LOST = "lost"


# Of an inventory without GPUs behind it.
VIRTUAL_DRIVER = "virtual"


@dataclass(frozen=True, slots=True)
class HealthEvent:
    """Something happened to a device. `fatal`: nothing may start on it, and what ran on it is not to be trusted."""

    device: int
    kind: HealthKind
    code: int
    fatal: bool
    message: str


@dataclass(frozen=True, slots=True)
class Device:
    """One device. `cpus`: the CPUs near it, empty when unknown."""

    index: int
    uuid: str
    name: str
    memory_bytes: int
    cpus: frozenset[int] = field(default_factory=frozenset)


@dataclass(frozen=True, slots=True)
class Inventory:
    """Hardware of a node. It does not change while the daemon runs."""

    configuration_set: ConfigurationSet
    devices: tuple[Device, ...]
    core_map: CoreMap
    driver: str = ""

    def near(self, device_mask: int) -> frozenset[int]:
        """The CPUs near the devices of a mask."""
        return frozenset().union(*(device.cpus for device in self.devices if device_mask >> device.index & 1))


class Devices(ABC):
    """The devices of one node, which never change. No call blocks for long, none raises for a device that failed: it is
    in `faults`."""

    def __init__(self, inventory: Inventory, faults: Mapping[int, str] | None = None) -> None:
        self.inventory = inventory
        self._faults = dict(faults or {})
        self._events: list[HealthEvent] = []
        self._lock = threading.Lock()

    @property
    @abstractmethod
    def capabilities(self) -> Mapping[str, str]:
        """What the devices can do, by name: text for people."""

    def used_memory(self) -> tuple[int, ...]:
        """Bytes in use now by device index; UNREADABLE for a device that does not answer."""
        return (UNREADABLE,) * len(self.inventory.devices)

    def used_by(self, pids: Collection[int]) -> tuple[int, ...]:
        """Return the bytes that these processes use now, by device index. UNREADABLE where no driver reports it, and
        where it lists none of these processes on a device."""
        return (UNREADABLE,) * len(self.inventory.devices)

    def use_by(self, pids: Collection[int], device_mask: int) -> float | None:
        """Return the recent utilization of these devices by these processes, 0 to 1; None if it is not reported."""
        return None

    def are_used(self, pids: Collection[int], device_mask: int) -> bool | None:
        """Return whether one of these devices was recently used by one of these processes; None if that is unknown."""
        return None

    def attach(self, pid: int, device_mask: int, baseline_bytes: int | None = None) -> None:
        """Attach a rank at its hello. Virtual devices count the memory that it uses above its baseline, which is given
        after a restart of the daemon as it was noted."""

    def baseline(self, pid: int) -> int | None:
        """Return the memory of an attached rank at its hello, in bytes, where it is counted from there."""
        return None

    def detach(self, pid: int) -> None:
        """End what `attach` began."""

    def environment(self, device_mask: int) -> dict[str, str]:
        """Return the variables that make just these devices visible to a rank."""
        # UUIDs, never indices: the order of indices differs between the driver's tools and the framework
        uuids = [device.uuid for device in self.inventory.devices if device_mask >> device.index & 1]
        return {"CUDA_VISIBLE_DEVICES": ",".join(uuids), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    def files(self, device_mask: int) -> tuple[str, ...]:
        """Return the device files by which just these devices are opened; empty for those that have none."""
        return ()

    def take_events(self) -> tuple[HealthEvent, ...]:
        """Return the events since the last call."""
        with self._lock:
            taken, self._events = tuple(self._events), []
        return taken

    def faults(self) -> dict[int, str]:
        """Devices out of service, by index, and why."""
        with self._lock:
            return dict(self._faults)

    def warnings(self) -> dict[int, str]:
        """Devices in service that are slower than they should be, by index, and why."""
        return {}

    def close(self) -> None:
        """Release what is open."""

    def _note(self, event: HealthEvent) -> None:
        with self._lock:
            if event.fatal:
                if self._faults.get(event.device) == event.message:
                    return
                self._faults.setdefault(event.device, event.message)
            self._events.append(event)
            del self._events[:-MAX_EVENTS]


# What holds the clock of a device down for its own protection, by the driver's bits. A limit that operators set is no
# such reason, and the power limit holds down every device that works hard.
_SLOWDOWNS: Mapping[int, str] = {
    0x40: "its clock is held down because it is too hot: look at its cooling",
    0x20: "its clock is held down because it or its memory is too hot: look at its cooling",
    0x80: "its clock is held down by the power brake: look at the power supply",
    0x08: "its clock is held down by its hardware: look at its cooling and power supply",
}
_WARNED_S = 60.0


@dataclass(slots=True)
class SlowdownWatch:
    """Whether a device is slowed down for long. It is once it has been slowed down for a minute longer than not; that
    ends after as much time at full speed, two minutes at most. `reason`: why it is; empty: it is not."""

    reason: str = ""
    _slow_s: float = 0.0

    def add(self, reasons: int, passed_s: float) -> None:
        """Take a sample into account. `reasons`: the driver's bits; `passed_s`: seconds since the sample before."""
        found = next((text for bit, text in _SLOWDOWNS.items() if reasons & bit), "")
        change = passed_s if found else -passed_s
        self._slow_s = min(2 * _WARNED_S, max(0.0, self._slow_s + change))
        if found and self._slow_s >= _WARNED_S:
            self.reason = found
        elif not self._slow_s:
            self.reason = ""


# Locality level by the driver's code of the closest common ancestor of two devices.
ANCESTOR_LEVELS: Mapping[int, LocalityLevel] = {
    0: LocalityLevel.SWITCH,  # On one board
    10: LocalityLevel.SWITCH,  # One PCIe switch
    20: LocalityLevel.SWITCH,  # Several PCIe switches, no host bridge
    30: LocalityLevel.SOCKET,  # One host bridge
    40: LocalityLevel.SOCKET,  # One NUMA node
    50: LocalityLevel.NODE,
}
INSIDE_A_NODE = (LocalityLevel.NVLINK, LocalityLevel.SWITCH, LocalityLevel.SOCKET)


def groups_of(levels: Mapping[tuple[int, int], LocalityLevel], count: int) -> tuple[DeviceGroup, ...]:
    """The largest groups in which every pair has a path of a level or better, innermost level first, for each level
    at which there are any. They overlap where the relation is not transitive (NVLink as a cube mesh). Groups of one
    device are left out, and those a closer level has already."""
    groups: list[DeviceGroup] = []
    known: set[int] = set()
    for level in INSIDE_A_NODE:
        neighbours = [0] * count
        for (a, b), path in levels.items():
            if path <= level:
                neighbours[a] |= 1 << b
                neighbours[b] |= 1 << a
        for mask in sorted(_cliques(neighbours, count), key=lambda mask: (mask & -mask, mask)):
            if mask.bit_count() > 1 and mask not in known:
                known.add(mask)
                groups.append(DeviceGroup(level, mask))
    return tuple(groups)


def sockets_of(core_map: CoreMap, devices: Sequence[Device]) -> tuple[Socket, ...]:
    """Each device on the socket most of its near CPUs belong to; on the first where that is unknown."""
    masks = [0] * len(core_map.sockets)
    for device in devices:
        shared = [sum(cpu in device.cpus for core in socket for cpu in core.cpus) for socket in core_map.sockets]
        masks[shared.index(max(shared))] |= 1 << device.index
    return tuple(Socket(millicores, mask) for millicores, mask in zip(core_map.millicores(), masks, strict=True))


def device_type_of(product: str) -> str:
    """The short name people use: "NVIDIA A100-SXM4-80GB" -> "a100", "Tesla T4" -> "t4", "NVIDIA GeForce RTX 4090" ->
    "rtx-4090". Memory size, board and brand do not make a type; the memory stands beside it."""
    words = [word for word in re.split(r"[\s/_-]+", product.lower()) if word]
    kept = [word for word in words if word not in BRANDS and not re.fullmatch(FORM, word)]
    return re.sub(r"[^a-z0-9-]", "", "-".join(kept))[:40].strip("-") or "gpu"


BRANDS = frozenset({"nvidia", "tesla", "geforce", "quadro", "generation", "graphics", "gpu"})
FORM = r"\d+(\.\d+)?g(i?b)?|sxm\d*|pcie|hbm\d*e?|nvl|super|mig|\d+g\.\d+gb|pg\d+.*"


def named(found: ConfigurationSet) -> ConfigurationSet:
    """The set under a name derived from all it consists of: only identical servers have the same name."""
    facts = (
        found.device_type,
        found.devices,
        found.device_memory_bytes,
        tuple((int(group.level), group.device_mask) for group in found.groups),
        tuple((socket.millicores, socket.device_mask) for socket in found.sockets),
        found.memory_bytes,
        tuple(sorted(found.dimensions.items())),
    )
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:8]
    kind = f"{found.device_type}-x{found.devices}" if found.devices else "cpu"
    return replace(found, name=f"{kind}-{digest}")


def with_dimensions(inventory: Inventory, dimensions: Mapping[str, float]) -> Inventory:
    """Return the inventory of a node that declares these amounts, too, under the name of its configuration set then."""
    if not dimensions:
        return inventory
    found = replace(inventory.configuration_set, dimensions={**inventory.configuration_set.dimensions, **dimensions})
    return dataclasses.replace(inventory, configuration_set=named(found))


def _cliques(neighbours: Sequence[int], count: int) -> list[int]:
    """All maximal cliques (Bron and Kerbosch 1973, with pivot), at most MAX_CLIQUES of them."""
    found: list[int] = []

    def extend(chosen: int, candidates: int, excluded: int) -> None:
        if len(found) >= MAX_CLIQUES:
            return
        if not candidates and not excluded:
            found.append(chosen)
            return
        pivot = max(_bits(candidates | excluded), key=lambda i: (candidates & neighbours[i]).bit_count())
        for i in _bits(candidates & ~neighbours[pivot]):
            extend(chosen | 1 << i, candidates & neighbours[i], excluded & neighbours[i])
            candidates &= ~(1 << i)
            excluded |= 1 << i

    extend(0, (1 << count) - 1, 0)
    return found


MAX_CLIQUES = 256
"""No real server has more; a made-up one must not fill the memory."""


def _bits(mask: int) -> list[int]:
    return [i for i in range(mask.bit_length()) if mask >> i & 1]


@dataclass(frozen=True, slots=True)
class GpuServer:
    """`ancestors` and `nvlink` speak of pairs (a, b) with a < b; a pair the driver is silent about meets at the node.
    `unfit`: devices that cannot be used from the start, and why."""

    driver: str
    devices: tuple[Device, ...]
    ancestors: Mapping[tuple[int, int], int] = field(default_factory=dict)
    nvlink: frozenset[tuple[int, int]] = frozenset()
    unfit: Mapping[int, str] = field(default_factory=dict)


def inventory_of(server: GpuServer, core_map: CoreMap, memory_bytes: int) -> Inventory:
    """The configuration set takes the type and memory that most devices have; `odd_devices` names the others."""
    count = len(server.devices)
    levels = {
        (a, b): LocalityLevel.NVLINK
        if (a, b) in server.nvlink
        else ANCESTOR_LEVELS.get(server.ancestors.get((a, b), 50), LocalityLevel.NODE)
        for a in range(count)
        for b in range(a + 1, count)
    }
    kind, memory = _model_of(server)
    found = ConfigurationSet(
        "",
        device_type=kind,
        devices=count,
        device_memory_bytes=memory,
        groups=groups_of(levels, count),
        sockets=sockets_of(core_map, server.devices),
        memory_bytes=memory_bytes,
    )
    return Inventory(named(found), server.devices, core_map, server.driver)


def odd_devices(server: GpuServer) -> dict[int, str]:
    """Devices that must not be used: those unfit, and those that are not like most of the node's."""
    kind, memory = _model_of(server)
    odd = dict(server.unfit)
    for device in server.devices:
        if device_type_of(device.name) != kind:
            odd.setdefault(device.index, f"is a {device.name}, unlike the other devices of this node")
        elif device.memory_bytes < memory:
            odd.setdefault(device.index, f"has {device.memory_bytes} bytes of memory, less than the others' {memory}")
    return odd


# What the vendor's XID catalogue calls errors of the hardware or of the driver, after which a device needs a reset or
# service. The others (13, 31, 43, 45, ...) are mostly the application's own and leave the device usable.
FATAL_XIDS: Mapping[int, str] = {
    48: "double-bit ECC error",
    64: "row remapping failed",
    74: "NVLink error",
    79: "fell off the bus",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "GSP does not answer",
    120: "GSP error",
    140: "unrecovered ECC error",
    143: "initialisation failed",
}


def xid_event(device: int, code: int) -> HealthEvent:
    known = FATAL_XIDS.get(code)
    if code == 79:
        return HealthEvent(device, HealthKind.LOST, code, True, f"XID 79: {known}")
    return HealthEvent(
        device, HealthKind.XID, code, known is not None, f"XID {code}: {known or 'reported by the driver'}"
    )


def ecc_event(device: int, errors: int) -> HealthEvent:
    return HealthEvent(device, HealthKind.ECC, errors, True, f"uncorrectable ECC errors: {errors}")


def lost_event(device: int) -> HealthEvent:
    return HealthEvent(device, HealthKind.LOST, 0, True, "does not answer: lost")


def _model_of(server: GpuServer) -> tuple[str, int]:
    kinds = Counter(device_type_of(device.name) for device in server.devices)
    if not kinds:
        return "", 0
    kind = min(kinds, key=lambda name: (-kinds[name], name))
    sizes = Counter(device.memory_bytes for device in server.devices if device_type_of(device.name) == kind)
    return kind, min(sizes, key=lambda size: (-sizes[size], size))


SYSTEM = Path("/sys/devices/system")
MEMORY_FOR_JOBS = 0.9
"""Share of host memory that jobs may claim: the rest is the kernel's, the daemon's and the page cache's."""


def read_cores(system: Path = SYSTEM) -> CoreMap:
    """The physical cores this process may use, by socket. A core's id is its lowest CPU. CPUs that are offline or
    outside the affinity of this process are left out; where the kernel says nothing of topology, each CPU is a core."""
    allowed = os.sched_getaffinity(0) if system == SYSTEM else None
    cores: dict[tuple[int, int], set[int]] = {}
    for cpu, directory in _cpus(system):
        if allowed is not None and cpu not in allowed:
            continue
        siblings = _ids(directory / "topology" / "thread_siblings_list") or (cpu,)
        package = _number(directory / "topology" / "physical_package_id")
        cores.setdefault((max(0, package), min(siblings)), set()).add(cpu)
    if not cores:
        cores = {(0, cpu): {cpu} for cpu in (allowed or range(os.cpu_count() or 1))}
    packages = sorted({package for package, _ in cores})
    sockets = tuple(
        tuple(Core(min(cpus), index, tuple(sorted(cpus))) for (of, _), cpus in sorted(cores.items()) if of == package)
        for index, package in enumerate(packages)
    )
    return CoreMap(sockets, housekeeping_of(sockets, None))


def usable_cpus() -> tuple[int, ...]:
    """The CPUs this process may run on, ascending."""
    return tuple(sorted(os.sched_getaffinity(0)))


def read_memory_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Host memory that jobs may claim."""
    for line in meminfo.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemTotal":
            mebibytes = int(int(rest.split()[0]) / 1024 * MEMORY_FOR_JOBS)
            # Whole gigabytes, so that servers of one model agree however much the firmware keeps.
            return max(1, mebibytes // 1024) * 2**30
    raise OSError(f"{meminfo} has no MemTotal")


def cpus_near(bus_id: str, devices: Path = Path("/sys/bus/pci/devices")) -> frozenset[int]:
    """The CPUs on the NUMA node of a PCI device; empty where unknown."""
    # NVML says 00000000:0A:00.0, sysfs 0000:0a:00.0
    domain, _, rest = bus_id.lower().partition(":")
    return frozenset(_ids(devices / f"{domain[-4:]}:{rest}" / "local_cpulist"))


def _cpus(system: Path) -> Iterator[tuple[int, Path]]:
    try:
        entries = sorted((system / "cpu").iterdir())
    except OSError:
        return
    for entry in entries:
        suffix = entry.name.removeprefix("cpu")
        if entry.name.startswith("cpu") and suffix.isdigit() and (entry / "topology").is_dir():
            yield int(suffix), entry


def _ids(path: Path) -> tuple[int, ...]:
    try:
        return parse_ids(path.read_text())
    except (OSError, ValueError):
        return ()


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return -1
