"""Which devices this node has: declared ones, recorded ones, those of the driver, or none."""

from __future__ import annotations

from pathlib import Path

from ganger_daemon.devices.contract import Devices
from ganger_daemon.devices.machine import read_cores, read_memory_bytes
from ganger_daemon.devices.none import NoDevices
from ganger_daemon.devices.nvml import NoDriverError, NvmlDevices
from ganger_daemon.devices.recorded import RecordedDevices, read_recording
from ganger_daemon.devices.virtual import VirtualDevices, VirtualSpec


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
