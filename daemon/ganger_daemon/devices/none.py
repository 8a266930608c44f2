"""A node without devices: cores and memory only. Legal, and what is left when the driver's library is missing."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ganger.cluster.resources import ConfigurationSet, Socket

from ganger_daemon.devices.contract import HealthEvent, Inventory
from ganger_daemon.devices.topology import named
from ganger_daemon.node.core_table import CoreMap


class NoDevices:
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

    def use_by(self, pids: Collection[int], device_mask: int) -> float | None:
        return None

    def attach(self, pid: int, device_mask: int, baseline_bytes: int | None = None) -> None:
        """Nothing to count."""

    def baseline(self, pid: int) -> int | None:
        return None

    def detach(self, pid: int) -> None:
        """Nothing was counted."""

    def environment(self, device_mask: int) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": ""}

    def take_events(self) -> tuple[HealthEvent, ...]:
        return ()

    def faults(self) -> dict[int, str]:
        return {}

    def close(self) -> None:
        """Nothing is open."""
