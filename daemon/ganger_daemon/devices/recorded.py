"""Devices of a recorded server, with scripted faults (an XID, an ECC error, a lost device at a given second), for
tests and to try Ganger on the shape of another machine."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ganger_daemon.devices.contract import MAX_DEVICES, UNREADABLE, Device, Devices, HealthEvent, HealthKind, Inventory
from ganger_daemon.devices.inventory import (
    GpuServer,
    ecc_event,
    inventory_of,
    lost_event,
    odd_devices,
    visible_devices,
    xid_event,
)
from ganger_daemon.node.core_table import Core, CoreMap, default_housekeeping, housekeeping_of, parse_ids

FIXTURES = Path(__file__).parent / "fixtures"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Scripted:
    """A scripted event, `at_s` after the start."""

    at_s: float
    event: HealthEvent


@dataclass(frozen=True, slots=True)
class RecordedServer:
    server: GpuServer
    core_map: CoreMap
    memory_bytes: int
    used_memory: tuple[int, ...]
    timeline: tuple[Scripted, ...]


class RecordedDevices(Devices):
    """Plays a recording. `clock` gives seconds; the timeline starts with the first look at it."""

    def __init__(
        self,
        recording: RecordedServer,
        name: str = "",
        clock: Callable[[], float] = time.monotonic,
        housekeeping: int | None = None,
    ) -> None:
        core_map = _with_housekeeping(recording.core_map, housekeeping)
        self._inventory = inventory_of(recording.server, core_map, recording.memory_bytes, name)
        self._recording = recording
        self._clock = clock
        self._start = clock()
        self._faults = odd_devices(recording.server)
        self._lost: set[int] = set()
        self._pending = list(recording.timeline)
        self._events: list[HealthEvent] = []
        self._lock = threading.Lock()

    @property
    def capabilities(self) -> Mapping[str, str]:
        return {
            "devices": "recorded",
            "driver": self._recording.server.driver,
            "shared_cores": "false",
            "packing": "yes",
        }

    def discover(self) -> Inventory:
        return self._inventory

    def used_memory(self) -> tuple[int, ...]:
        self._play()
        return tuple(UNREADABLE if i in self._lost else used for i, used in enumerate(self._recording.used_memory))

    def used_by(self, pids: Collection[int]) -> tuple[int, ...]:
        return (UNREADABLE,) * len(self._recording.used_memory)

    def environment(self, device_mask: int) -> dict[str, str]:
        return visible_devices(self._inventory, device_mask)

    def take_events(self) -> tuple[HealthEvent, ...]:
        self._play()
        with self._lock:
            taken, self._events = tuple(self._events), []
        return taken

    def faults(self) -> dict[int, str]:
        self._play()
        with self._lock:
            return dict(self._faults)

    def close(self) -> None:
        with self._lock:
            self._pending.clear()

    def _play(self) -> None:
        elapsed = self._clock() - self._start
        with self._lock:
            while self._pending and self._pending[0].at_s <= elapsed:
                event = self._pending.pop(0).event
                self._events.append(event)
                if event.fatal:
                    self._faults.setdefault(event.device, event.message)
                if event.kind is HealthKind.LOST:
                    self._lost.add(event.device)


def read_recording(path: Path) -> RecordedServer:
    """Read a recording; a bare name ("dgx-h100") is one of those that come along. Raises ValueError naming the file and
    what is wrong with it."""
    if not path.suffix and path.parent == Path("."):
        path = FIXTURES / f"{path}.json"
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        known = ", ".join(sorted(found.stem for found in FIXTURES.glob("*.json")))
        raise ValueError(
            f"cannot read the recorded server {path}: {error.strerror}; those that come along: {known}"
        ) from error
    except ValueError as error:
        raise ValueError(f"{path} is no recorded server: {error}") from error
    try:
        return _recording_of(content)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is no recorded server of format {FORMAT}: {error!r}") from error


def _recording_of(content: Mapping[str, Any]) -> RecordedServer:
    if content["format"] != FORMAT:
        raise ValueError(f"format {content['format']}")
    entries = content["devices"]
    if len(entries) > MAX_DEVICES:
        raise ValueError(f"{len(entries)} devices, at most {MAX_DEVICES}")
    devices = tuple(
        Device(
            index=i,
            uuid=str(entry["uuid"]),
            name=str(entry.get("name", content.get("product", ""))),
            memory_bytes=int(entry.get("memory_bytes", content.get("memory_bytes_per_device", 0))),
            cpus=frozenset(parse_ids(entry.get("cpus", ""))),
        )
        for i, entry in enumerate(entries)
    )
    pairs = [(a, b) for a in range(len(devices)) for b in range(a + 1, len(devices))]
    server = GpuServer(
        driver=str(content["driver"]),
        devices=devices,
        ancestors={(a, b): int(content["ancestors"][a][b]) for a, b in pairs},
        nvlink=frozenset((a, b) for a, b in pairs if content["nvlink"][a][b]),
        unfit={int(i): str(why) for i, why in content.get("unfit", {}).items()},
    )
    return RecordedServer(
        server,
        CoreMap(tuple(_socket(i, socket) for i, socket in enumerate(content["sockets"]))),
        int(content["memory_bytes"]),
        tuple(int(entry.get("used_bytes", 0)) for entry in entries),
        tuple(
            sorted(
                (_scripted(entry, len(devices)) for entry in content.get("timeline", ())),
                key=lambda one: one.at_s,
            )
        ),
    )


def _socket(index: int, socket: Mapping[str, Any]) -> tuple[Core, ...]:
    """`cores`: one list of CPUs per hardware thread, side by side: "0-63", "128-191" make 64 cores of two threads."""
    threads = [parse_ids(text) for text in socket["cores"]]
    return tuple(Core(min(cpus), index, tuple(sorted(cpus))) for cpus in zip(*threads, strict=True))


def _scripted(entry: Mapping[str, Any], count: int) -> Scripted:
    device = int(entry["device"])
    if not 0 <= device < count:
        raise ValueError(f"the timeline names device {device} of {count}")
    if "xid" in entry:
        event = xid_event(device, int(entry["xid"]))
    elif "ecc" in entry:
        event = ecc_event(device, int(entry["ecc"]))
    elif entry.get("lost"):
        event = lost_event(device)
    else:
        raise ValueError(f"the timeline has an entry that is neither xid, ecc nor lost: {dict(entry)}")
    return Scripted(float(entry["at_seconds"]), event)


def _with_housekeeping(core_map: CoreMap, housekeeping: int | None) -> CoreMap:
    count = sum(len(socket) for socket in core_map.sockets)
    kept = default_housekeeping(count) if housekeeping is None else housekeeping
    return CoreMap(core_map.sockets, housekeeping_of(core_map.sockets, kept), core_map.shared)
