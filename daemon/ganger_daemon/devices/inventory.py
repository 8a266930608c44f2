"""Description of a server: cores and memory as the kernel reports them, devices, and the configuration set made of
it."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ganger.cluster.resources import ConfigurationSet, DeviceGroup, LocalityLevel, Socket
from msgspec.structs import replace

from ganger_daemon.devices.contract import Device, HealthEvent, HealthKind, Inventory
from ganger_daemon.node.core_table import Core, CoreMap, housekeeping_of, parse_ids

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
    """The set under a name derived from all it consists of: servers that differ in anything that counts get different
    names, identical ones the same."""
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
