"""Interface to the devices of a node.

`nvml` (real GPUs), `virtual` (declared, or those of a recorded server, for machines without any) and `choice.NoDevices`
implement it; one conformance suite tests all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from ganger.cluster.resources import ConfigurationSet

from ganger_daemon.node.core_table import CoreMap

UNREADABLE = -1
"""Used memory of a device that does not answer."""
MAX_DEVICES = 64


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


class Devices(Protocol):
    """The devices of one node. No call blocks for long, none raises for a device that failed: it is in `faults`.

    Methods with a body are those of devices whose use is counted by a driver, or not at all."""

    @property
    def capabilities(self) -> Mapping[str, str]: ...

    def discover(self) -> Inventory: ...

    def used_memory(self) -> tuple[int, ...]:
        """Bytes in use now by device index; UNREADABLE for a device that does not answer."""

    def used_by(self, pids: Collection[int]) -> tuple[int, ...]:
        """Return the bytes that these processes use now, by device index. UNREADABLE where the driver does not report
        it, and where it lists none of these processes on a device."""

    def use_by(self, pids: Collection[int], device_mask: int) -> float | None:
        """Return the recent utilization of these devices by these processes, 0 to 1; None if it is not reported."""
        return None

    def attach(self, pid: int, device_mask: int, baseline_bytes: int | None = None) -> None:
        """Attach a rank at its hello. Virtual devices count the memory that it uses above its baseline, which is given
        after a restart of the daemon as it was noted."""
        return

    def baseline(self, pid: int) -> int | None:
        """Return the memory of an attached rank at its hello, in bytes, where it is counted from there."""
        return None

    def detach(self, pid: int) -> None:
        """End what `attach` began."""
        return

    def environment(self, device_mask: int) -> dict[str, str]:
        """Return the variables that make just these devices visible to a rank."""

    def take_events(self) -> tuple[HealthEvent, ...]:
        """Return the events since the last call."""

    def faults(self) -> dict[int, str]:
        """Devices out of service, by index, and why."""

    def close(self) -> None:
        """Release what is open."""
        return
