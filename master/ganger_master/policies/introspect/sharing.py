"""Whether another gang may share devices of a node in turns, and how the others are parked meanwhile.

Where all of them fit into device memory side by side they are paused; else whoever does not run is offloaded into its
arena in host memory, and the arenas of all must fit there at once: a row that could not be parked could never be
switched. What does not fit is refused with its number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ganger.resources.fit import MEMORY_SHARE
from ganger.resources.reasons import Reason, Refusal

from ganger_master.core.model import SuspendLevel


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a gang measured of each of its devices: the most it uses, and what its processes keep while offloaded. Its
    arena holds what it uses and a tenth more."""

    peak_bytes: int
    residue_bytes: int = 0

    @property
    def arena_bytes(self) -> int:
        return self.peak_bytes * 11 // 10


@dataclass(frozen=True, slots=True)
class Host:
    """A node: memory of each device, and host memory that arenas of these gangs may use."""

    name: str
    device_memory_bytes: int
    arena_room_bytes: int


@dataclass(frozen=True, slots=True)
class Resident:
    """A gang's part on the node."""

    footprint: Footprint
    devices: int


def parked_at(host: Host, residents: Sequence[Resident], newcomer: Resident) -> SuspendLevel | Refusal:
    """The level at which they take turns, everybody perhaps on the same device; or why the newcomer may not join."""
    everybody = [one.footprint for one in (*residents, newcomer)]
    room = int(MEMORY_SHARE * host.device_memory_bytes)
    if sum(one.peak_bytes for one in everybody) <= room:
        return SuspendLevel.PAUSE
    kept = sum(one.residue_bytes for one in everybody)
    needed = kept + max(one.peak_bytes - one.residue_bytes for one in everybody)
    if needed > room:
        figures = {"needed_bytes": needed, "free_bytes": room}
        detail = "beside what parked gangs keep of a device the largest does not fit"
        return Refusal(Reason.DEVICE_MEMORY, figures, node=host.name, detail=detail)
    arenas = sum(one.footprint.arena_bytes * one.devices for one in residents)
    needed = newcomer.footprint.arena_bytes * newcomer.devices
    if arenas + needed > host.arena_room_bytes:
        figures = {"needed_bytes": needed, "free_bytes": max(0, host.arena_room_bytes - arenas)}
        return Refusal(Reason.MEMORY, figures, node=host.name, detail="the arenas of all that share do not fit")
    return SuspendLevel.OFFLOAD
