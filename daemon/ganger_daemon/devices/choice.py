"""Choice of this node's devices: declared, recorded, those of the driver, or none.

A node without devices offers cores and memory only, as where the driver's library is missing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from ganger.cluster.resources import ConfigurationSet, Socket

from ganger_daemon.devices.contract import Devices, HealthEvent, Inventory
from ganger_daemon.devices.inventory import named, read_cores, read_memory_bytes
from ganger_daemon.devices.nvml import NoDriverError, NvmlDevices
from ganger_daemon.devices.virtual import RecordedDevices, VirtualDevices, VirtualSpec, read_recording
from ganger_daemon.node.core_table import CoreMap


class NoDevices(Devices):
    def __init__(self, core_map: CoreMap, memory_bytes: int, name: str = "", reason: str = "none declared") -> None:
        sockets = tuple(Socket(millicores, 0) for millicores in core_map.millicores())
        self._inventory = Inventory(
            named(ConfigurationSet("", sockets=sockets, memory_bytes=memory_bytes), name), (), core_map
        )
        self._reason = reason

    @property
    def capabilities(self) -> Mapping[str, str]:
        return {
            "devices": "none",
            "packing": "no",
            "devices_reason": self._reason,
            "shared_cores": str(self._inventory.core_map.shared).lower(),
        }

    def discover(self) -> Inventory:
        return self._inventory

    def used_memory(self) -> tuple[int, ...]:
        return ()

    def used_by(self, pids: Collection[int]) -> tuple[int, ...]:
        return ()

    def environment(self, device_mask: int) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": ""}

    def take_events(self) -> tuple[HealthEvent, ...]:
        return ()

    def faults(self) -> dict[int, str]:
        return {}


def choose_devices(
    virtual: VirtualSpec | None = None,
    recorded: Path | None = None,
    name: str = "",
    memory_bytes: int = 0,
    housekeeping: int | None = None,
    node: str = "",
) -> Devices:
    """`name`: of the configuration set, derived when empty. `node`: makes the UUIDs of virtual devices its own.
    `memory_bytes`: zero for the machine's. Raises ValueError for a declaration or a recording that cannot be."""
    if virtual is not None:
        return VirtualDevices(virtual, node, housekeeping)
    if recorded is not None:
        return RecordedDevices(read_recording(recorded), name, housekeeping=housekeeping)
    try:
        return NvmlDevices(name, memory_bytes, housekeeping)
    except NoDriverError as reason:
        return NoDevices(read_cores(housekeeping), memory_bytes or read_memory_bytes(), name, str(reason))
