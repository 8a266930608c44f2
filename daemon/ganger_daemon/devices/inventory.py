"""A GPU server as its driver describes it, and the inventory that follows from it. Pure; shared by `nvml`, which asks
the driver, and `recorded`, which reads what a driver once said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from ganger.cluster.resources import ConfigurationSet, LocalityLevel

from ganger_daemon.devices.contract import Device, HealthEvent, HealthKind, Inventory
from ganger_daemon.devices.topology import ANCESTOR_LEVELS, device_type_of, groups_of, named, sockets_of
from ganger_daemon.node.core_table import CoreMap


@dataclass(frozen=True, slots=True)
class GpuServer:
    """`ancestors` and `nvlink` speak of pairs (a, b) with a < b; a pair the driver is silent about meets at the node.
    `unfit`: devices that cannot be used from the start, and why."""

    driver: str
    devices: tuple[Device, ...]
    ancestors: Mapping[tuple[int, int], int] = field(default_factory=dict)
    nvlink: frozenset[tuple[int, int]] = frozenset()
    unfit: Mapping[int, str] = field(default_factory=dict)


def inventory_of(server: GpuServer, core_map: CoreMap, memory_bytes: int, name: str = "") -> Inventory:
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
    return Inventory(named(found, name), server.devices, core_map, server.driver)


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


def visible_devices(inventory: Inventory, device_mask: int) -> dict[str, str]:
    """UUIDs, never indices: the order of indices differs between the driver's tools and the framework."""
    uuids = [device.uuid for device in inventory.devices if device_mask >> device.index & 1]
    return {"CUDA_VISIBLE_DEVICES": ",".join(uuids), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def _model_of(server: GpuServer) -> tuple[str, int]:
    kinds = Counter(device_type_of(device.name) for device in server.devices)
    if not kinds:
        return "", 0
    kind = min(kinds, key=lambda name: (-kinds[name], name))
    sizes = Counter(device.memory_bytes for device in server.devices if device_type_of(device.name) == kind)
    return kind, min(sizes, key=lambda size: (-sizes[size], size))
