"""The devices of a node: `nvml` has real GPUs, `virtual` declared ones, those of a recorded server, or none. One
conformance suite tests all."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum

from ganger.cluster.resources import ConfigurationSet

from ganger_daemon.node.core_table import CoreMap

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
