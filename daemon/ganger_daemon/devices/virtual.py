"""Devices without GPUs behind them: declared, read from the recording of another server, or none; and the choice. The
memory of a declared device is the anonymous memory of the processes on it above what they used at their hello, so it
can be checked that an offload frees it."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from ganger.cluster.resources import ConfigurationSet, LocalityLevel, Socket
from ganger.text import counted, os_reason

from ganger_daemon.devices.inventory import (
    MAX_DEVICES,
    UNREADABLE,
    VIRTUAL_DRIVER,
    Device,
    Devices,
    GpuServer,
    HealthEvent,
    HealthKind,
    Inventory,
    ecc_event,
    groups_of,
    inventory_of,
    lost_event,
    named,
    odd_devices,
    read_cores,
    read_memory_bytes,
    usable_cpus,
    xid_event,
)
from ganger_daemon.devices.nvml import NoDriverError, NvmlDevices
from ganger_daemon.node.core_table import (
    Core,
    CoreMap,
    declared_cores,
    housekeeping_of,
    parse_ids,
)
from ganger_daemon.node.process_identity import anonymous_bytes

DEVICE_TYPE = "virtual"


class NoDevices(Devices):
    """A node that offers cores and memory only, as where the driver's library is missing."""

    def __init__(self, core_map: CoreMap, memory_bytes: int, reason: str = "none declared") -> None:
        sockets = tuple(Socket(millicores, 0) for millicores in core_map.millicores())
        found = named(ConfigurationSet("", sockets=sockets, memory_bytes=memory_bytes))
        super().__init__(Inventory(found, (), core_map))
        self._reason = reason

    @property
    def capabilities(self) -> Mapping[str, str]:
        shared = str(self.inventory.core_map.shared).lower()
        return {"devices": "none", "packing": "no", "devices_reason": self._reason, "shared_cores": shared}

    def environment(self, device_mask: int) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": ""}


def choose_devices(virtual: VirtualSpec | None = None, recorded: Path | None = None, node: str = "") -> Devices:
    """`node`: makes the UUIDs of virtual devices its own. Raises ValueError for a bad declaration or recording."""
    if virtual is not None:
        return VirtualDevices(virtual, node)
    if recorded is not None:
        return RecordedDevices(read_recording(recorded))
    try:
        return NvmlDevices()
    except NoDriverError as reason:
        return NoDevices(read_cores(), read_memory_bytes(), str(reason))


@dataclass(frozen=True, slots=True)
class VirtualSpec:
    """What to declare. `topology` is SOCKETSxDEVICES ("2x2") or SOCKETSxSWITCHESxDEVICES ("2x2x4"), empty for one
    socket. Zero cores or memory: what the machine has, at least one core per socket. `gpu_cores`: CPU time, in cores,
    of all gangs on one device together; zero: no limit."""

    gpus: int = 4
    topology: str = ""
    cores: int = 0
    memory_bytes: int = 0
    gpu_memory_bytes: int = 4 * 2**30
    gpu_cores: float = 0.0


@dataclass(frozen=True, slots=True)
class _Process:
    device_mask: int
    baseline_bytes: int


class VirtualDevices(Devices):
    """The declared devices of one node. `node` makes their UUIDs its own."""

    def __init__(
        self,
        spec: VirtualSpec,
        node: str = "",
        anonymous_bytes: Callable[[int], int | None] = anonymous_bytes,
    ) -> None:
        memory_bytes = spec.memory_bytes or read_memory_bytes()
        super().__init__(virtual_inventory(spec, node, usable_cpus(), memory_bytes))
        self._gpu_cores = spec.gpu_cores
        self._anonymous_bytes = anonymous_bytes
        self._processes: dict[int, _Process] = {}

    @property
    def capabilities(self) -> Mapping[str, str]:
        return {
            "devices": "virtual",
            "shared_cores": str(self.inventory.core_map.shared).lower(),
            "packing": "yes",
            "gpu_cores": f"{self._gpu_cores:g}" if self._gpu_cores else "any",
        }

    def used_memory(self) -> tuple[int, ...]:
        used = [0] * len(self.inventory.devices)
        with self._lock:
            processes = list(self._processes.items())
        for pid, process in processes:
            now = self._anonymous_bytes(pid)
            if now is None:
                self.detach(pid)
                continue
            bits = [i for i in range(len(used)) if process.device_mask >> i & 1]
            for i in bits:
                used[i] += max(0, now - process.baseline_bytes) // len(bits)
        return tuple(used)

    def attach(self, pid: int, device_mask: int, baseline_bytes: int | None = None) -> None:
        mask = device_mask & ((1 << len(self.inventory.devices)) - 1)
        now = self._anonymous_bytes(pid)
        if mask and now is not None:
            with self._lock:
                self._processes[pid] = _Process(mask, now if baseline_bytes is None else baseline_bytes)

    def baseline(self, pid: int) -> int | None:
        with self._lock:
            process = self._processes.get(pid)
        return process.baseline_bytes if process else None

    def detach(self, pid: int) -> None:
        with self._lock:
            self._processes.pop(pid, None)

    def environment(self, device_mask: int) -> dict[str, str]:
        indices = [str(device.index) for device in self.inventory.devices if device_mask >> device.index & 1]
        return {"CUDA_VISIBLE_DEVICES": "", "GANGER_DEVICES": ",".join(indices)}

    def close(self) -> None:
        with self._lock:
            self._processes.clear()


def parse_topology(text: str, gpus: int) -> tuple[int, int, int]:
    """(sockets, switches per socket or 0, devices per innermost group). Raises ValueError with the expected form."""
    try:
        parts = [int(part) for part in text.lower().split("x")] if text else [1, gpus]
    except ValueError:
        parts = []
    if len(parts) == 1:
        parts = [1, *parts]
    if len(parts) not in (2, 3) or min(parts) < (0 if gpus == 0 else 1) or parts[0] < 1:
        raise ValueError(f"topology {text!r} is not SOCKETSxDEVICES or SOCKETSxSWITCHESxDEVICES, for example 2x2")
    sockets, switches, devices = (parts[0], 0, parts[1]) if len(parts) == 2 else (parts[0], parts[1], parts[2])
    described = sockets * max(1, switches) * devices
    if described != gpus:
        raise ValueError(
            f"topology {text!r} has {counted(described, 'device')} but {gpus} are declared; make them agree"
        )
    return sockets, switches, devices


def virtual_inventory(spec: VirtualSpec, node: str, cpus: tuple[int, ...], memory_bytes: int) -> Inventory:
    """The node that a declaration describes. Raises ValueError for one that cannot be."""
    if not 0 <= spec.gpus <= MAX_DEVICES:
        raise ValueError(f"{spec.gpus} devices cannot be declared; a node has 0 to {MAX_DEVICES}")
    if spec.gpus * spec.gpu_cores > len(cpus):
        raise ValueError(
            f"{counted(spec.gpus, 'device')} of {counted(spec.gpu_cores, 'core', 'g')} each cannot be told apart on"
            f" {counted(len(cpus), 'CPU')};"
            " declare fewer devices, or less for each"
        )
    sockets, switches, per_group = parse_topology(spec.topology, spec.gpus)
    core_map = declared_cores(spec.cores or max(len(cpus), sockets), sockets, cpus)
    per_socket = spec.gpus // sockets
    devices = tuple(
        Device(
            index=i,
            uuid=_uuid(node, i),
            name="virtual device",
            memory_bytes=spec.gpu_memory_bytes,
            cpus=frozenset(cpu for core in core_map.sockets[i // per_socket] for cpu in core.cpus),
        )
        for i in range(spec.gpus)
    )
    levels = {
        (a, b): LocalityLevel.SWITCH
        if switches and a // per_group == b // per_group
        else LocalityLevel.SOCKET
        if a // per_socket == b // per_socket
        else LocalityLevel.NODE
        for a in range(spec.gpus)
        for b in range(a + 1, spec.gpus)
    }
    found = ConfigurationSet(
        "",
        device_type=DEVICE_TYPE if spec.gpus else "",
        devices=spec.gpus,
        device_memory_bytes=spec.gpu_memory_bytes if spec.gpus else 0,
        groups=groups_of(levels, spec.gpus),
        sockets=_sockets(core_map, spec.gpus),
        memory_bytes=memory_bytes,
    )
    return Inventory(named(found), devices, core_map, driver=VIRTUAL_DRIVER)


def _sockets(core_map: CoreMap, gpus: int) -> tuple[Socket, ...]:
    per_socket = gpus // len(core_map.sockets)
    full = (1 << per_socket) - 1
    return tuple(
        Socket(millicores, full << (socket * per_socket)) for socket, millicores in enumerate(core_map.millicores())
    )


def _uuid(node: str, index: int) -> str:
    digest = hashlib.sha256(f"{node}/{index}".encode()).hexdigest()
    return f"GPU-{digest[:8]}-{digest[8:12]}-{digest[12:16]}-{digest[16:20]}-{digest[20:32]}"


FIXTURES = Path(__file__).parent / "fixtures"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class RecordedServer:
    server: GpuServer
    core_map: CoreMap
    memory_bytes: int
    used_memory: tuple[int, ...]
    timeline: tuple[tuple[float, HealthEvent], ...]  # Seconds after the start, and what happens then


class RecordedDevices(Devices):
    """Plays a recording. `clock` gives seconds; the timeline starts with the first look at it."""

    def __init__(self, recording: RecordedServer, clock: Callable[[], float] = time.monotonic) -> None:
        core_map = replace(recording.core_map, housekeeping=housekeeping_of(recording.core_map.sockets, None))
        found = inventory_of(recording.server, core_map, recording.memory_bytes)
        super().__init__(found, odd_devices(recording.server))
        self._recording = recording
        self._clock = clock
        self._start = clock()
        self._lost: set[int] = set()
        self._pending = list(recording.timeline)

    @property
    def capabilities(self) -> Mapping[str, str]:
        driver = self._recording.server.driver
        return {"devices": "recorded", "driver": driver, "shared_cores": "false", "packing": "yes"}

    def used_memory(self) -> tuple[int, ...]:
        self._play()
        return tuple(UNREADABLE if i in self._lost else used for i, used in enumerate(self._recording.used_memory))

    def take_events(self) -> tuple[HealthEvent, ...]:
        self._play()
        return super().take_events()

    def faults(self) -> dict[int, str]:
        self._play()
        return super().faults()

    def _play(self) -> None:
        elapsed = self._clock() - self._start
        with self._lock:
            due = [event for _, event in takewhile(lambda entry: entry[0] <= elapsed, self._pending)]
            del self._pending[: len(due)]
            self._lost |= {event.device for event in due if event.kind is HealthKind.LOST}
        for event in due:
            self._note(event)


def read_recording(path: Path) -> RecordedServer:
    """Read a recording; a bare name ("dgx-h100") is one that comes along. Raises ValueError naming the file."""
    if not path.suffix and path.parent == Path("."):
        path = FIXTURES / f"{path}.json"
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        known = ", ".join(sorted(found.stem for found in FIXTURES.glob("*.json")))
        raise ValueError(
            f"cannot read the recorded server {path}: {os_reason(error)}; those that come along: {known}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no recorded server: {error}") from error
    try:
        return _recording_of(content)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
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
            sorted((_scripted(entry, len(devices)) for entry in content.get("timeline", ())), key=lambda one: one[0])
        ),
    )


def _socket(index: int, socket: Mapping[str, Any]) -> tuple[Core, ...]:
    """`cores`: one list of CPUs per hardware thread, side by side: "0-63", "128-191" make 64 cores of two threads."""
    threads = [parse_ids(text) for text in socket["cores"]]
    return tuple(Core(min(cpus), index, tuple(sorted(cpus))) for cpus in zip(*threads, strict=True))


def _scripted(entry: Mapping[str, Any], count: int) -> tuple[float, HealthEvent]:
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
    return float(entry["at_seconds"]), event
