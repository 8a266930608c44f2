"""Real GPUs, through NVML (the `pynvml` module of nvidia-ml-py), known by UUID. A thread waits for XID and ECC events.
Two defects are guarded: some constants are tuples of one (NVML_P2P_CAPS_INDEX_READ), and the process utilisation of an
idle device raises an error whose text is "success"."""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any

from ganger.cluster.topology import bits

from ganger_daemon.devices import inventory
from ganger_daemon.devices.inventory import (
    MAX_DEVICES,
    UNREADABLE,
    Device,
    Devices,
    GpuServer,
    SlowdownWatch,
    ecc_event,
    inventory_of,
    lost_event,
    odd_devices,
    xid_event,
)
from ganger_daemon.node.core_table import CoreMap

log = logging.getLogger(__name__)

WAIT_MS = 1000
"""How long the health thread waits at a time; close() takes at most about this long."""
_USE_S = 2.0
"""Period over which utilization is read by process: the driver's samples are a sixth of a second to a second old."""
CPU_WORDS = 64
"""Words of 64 CPUs asked for: 4,096 CPUs."""


class NoDriverError(Exception):
    """There is no NVIDIA driver here, or it does not answer. The text says which."""


class NvmlDevices(Devices):
    """The GPUs of this machine. Raises NoDriverError when there are none to ask."""

    def __init__(
        self,
        memory_bytes: int = 0,
        library: ModuleType | Any | None = None,
        core_map: CoreMap | None = None,
        wait_ms: int = WAIT_MS,
    ) -> None:
        self._nvml: Any = library if library is not None else _load()
        self._wait_ms = wait_ms
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise NoDriverError(f"the NVIDIA driver does not answer: {error}") from error
        try:
            self._handles: list[Any] = self._list_handles()
            server = self._read_server()
            cores = core_map if core_map is not None else inventory.read_cores()
            found = inventory_of(server, cores, memory_bytes or inventory.read_memory_bytes())
            super().__init__(found, odd_devices(server))
        except BaseException:
            self._nvml.nvmlShutdown()
            raise
        self._packing = self._whether_shared()
        self._stop = threading.Event()
        self._health = "events"
        self._ecc = [self._ecc_errors(i) for i in range(len(self._handles))]
        self._slowdowns = [SlowdownWatch() for _ in self._handles]
        self._watcher = threading.Thread(target=self._watch, name="device-health", daemon=True)
        self._watcher.start()

    @property
    def capabilities(self) -> Mapping[str, str]:
        return {
            "devices": "nvml",
            "driver": self.inventory.driver,
            "device_health": self._health,
            "shared_cores": "false",
            "packing": self._packing,
        }

    def used_memory(self) -> tuple[int, ...]:
        return tuple(self._used_memory(i) for i in range(len(self._handles)))

    def used_by(self, pids: Collection[int]) -> tuple[int, ...]:
        return tuple(self._used_by(handle, pids) for handle in self._handles)

    def use_by(self, pids: Collection[int], device_mask: int) -> float | None:
        since = int(1e6 * (time.time() - _USE_S))
        wanted, percent, is_reported = frozenset(pids), 0, False
        for device in bits(device_mask):
            found = self.process_utilisation(device, since)
            is_reported = is_reported or not wanted.isdisjoint(found)
            percent += min(100, sum(used for pid, used in found.items() if pid in wanted))
        return percent / (100 * device_mask.bit_count()) if is_reported else None

    def are_used(self, pids: Collection[int], device_mask: int) -> bool | None:
        since, is_known = int(1e6 * (time.time() - _USE_S)), True
        for device in bits(device_mask):
            found = self.process_utilisation(device, since)
            if any(found.get(pid) for pid in pids):
                return True
            if found:
                # The driver names the processes that use it, and they are none of these.
                continue
            rates = self._ask(self._nvml.nvmlDeviceGetUtilizationRates, self._handles[device])
            if rates is not None and (rates.gpu or rates.memory):
                return True
            is_known = is_known and rates is not None
        return False if is_known else None

    def close(self) -> None:
        if not self._stop.is_set():
            self._stop.set()
            self._watcher.join(timeout=self._wait_ms / 1000 + 5)
            self._ask(self._nvml.nvmlShutdown)

    def process_utilisation(self, device: int, since_microseconds: int = 0) -> dict[int, int]:
        """Percent of the device's compute each process used since then, by pid; empty when idle or unknown."""
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(self._handles[device], since_microseconds)
        except self._nvml.NVMLError:
            # Includes the one that says "success" and the one that says "not found": both mean idle.
            return {}
        return {int(sample.pid): int(sample.smUtil) for sample in samples}

    def _whether_shared(self) -> str:
        for index, handle in enumerate(self._handles):
            mode = self._ask(self._nvml.nvmlDeviceGetComputeMode, handle)
            if mode not in (None, self._nvml.NVML_COMPUTEMODE_DEFAULT):
                return f"no: device {index} is in an exclusive compute mode"
        return "yes"

    def files(self, device_mask: int) -> tuple[str, ...]:
        chosen = [handle for index, handle in enumerate(self._handles) if device_mask >> index & 1]
        minors = [self._ask(getattr(self._nvml, "nvmlDeviceGetMinorNumber", None), handle) for handle in chosen]
        return tuple(f"/dev/nvidia{int(minor)}" for minor in minors if minor is not None)

    def _list_handles(self) -> list[Any]:
        try:
            count = min(int(self._nvml.nvmlDeviceGetCount()), MAX_DEVICES)
            handles = [self._nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
        except self._nvml.NVMLError as error:
            raise NoDriverError(f"the NVIDIA driver cannot list its devices: {error}") from error
        if not handles:
            raise NoDriverError("the NVIDIA driver knows of no device")
        return handles

    def _read_server(self) -> GpuServer:
        nvml, handles = self._nvml, self._handles
        devices = tuple(self._read_device(i, handle) for i, handle in enumerate(handles))
        pairs = [(a, b) for a in range(len(handles)) for b in range(a + 1, len(handles))]
        ancestors = {
            (a, b): _int(self._ask(nvml.nvmlDeviceGetTopologyCommonAncestor, handles[a], handles[b]), 50)
            for a, b in pairs
        }
        # No PCI path to speak of does not exclude NVLink, so every pair is asked.
        nvlink_index = _plain(getattr(nvml, "NVML_P2P_CAPS_INDEX_NVLINK", 2))
        works = _plain(getattr(nvml, "NVML_P2P_STATUS_OK", 0))
        nvlink = frozenset(
            (a, b)
            for a, b in pairs
            if self._ask(nvml.nvmlDeviceGetP2PStatus, handles[a], handles[b], nvlink_index) == works
        )
        unfit: dict[int, str] = {}
        for i, handle in enumerate(handles):
            mode = self._ask(nvml.nvmlDeviceGetMigMode, handle)
            if devices[i].memory_bytes == 0:
                unfit[i] = "did not answer at the start"
            elif mode is not None and int(mode[0]) == 1:
                unfit[i] = "is cut into MIG slices; turn MIG mode off to let gangs use it"
        return GpuServer(_text(self._ask(nvml.nvmlSystemGetDriverVersion)), devices, ancestors, nvlink, unfit)

    def _read_device(self, index: int, handle: Any) -> Device:
        nvml = self._nvml
        pci = self._ask(nvml.nvmlDeviceGetPciInfo, handle)
        bus_id = _text(getattr(pci, "busId", "")) if pci is not None else ""
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        return Device(
            index=index,
            uuid=_text(self._ask(nvml.nvmlDeviceGetUUID, handle)) or f"unknown-{index}",
            name=_text(self._ask(nvml.nvmlDeviceGetName, handle)),
            memory_bytes=int(memory.total) if memory is not None else 0,
            cpus=self._near(handle, bus_id),
        )

    def _near(self, handle: Any, bus_id: str) -> frozenset[int]:
        words = self._ask(
            getattr(self._nvml, "nvmlDeviceGetCpuAffinityWithinScope", None),
            handle,
            CPU_WORDS,
            getattr(self._nvml, "NVML_AFFINITY_SCOPE_NODE", 0),
        ) or self._ask(self._nvml.nvmlDeviceGetCpuAffinity, handle, CPU_WORDS)
        found = frozenset(
            64 * i + bit for i, word in enumerate(words or ()) for bit in range(64) if int(word) >> bit & 1
        )
        return found or inventory.cpus_near(bus_id)

    def warnings(self) -> dict[int, str]:
        found = {index: watch.reason for index, watch in enumerate(self._slowdowns)}
        return {index: reason for index, reason in found.items() if reason}

    def _ask(self, call: Callable[..., Any] | None, *arguments: Any) -> Any:
        if call is None:
            return None
        try:
            return call(*arguments)
        except self._nvml.NVMLError:
            return None

    def _used_memory(self, index: int) -> int:
        try:
            return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handles[index]).used)
        except self._nvml.NVMLError as error:
            if _code(error) == self._nvml.NVML_ERROR_GPU_IS_LOST:
                self._note(lost_event(index))
            return UNREADABLE

    def _used_by(self, handle: Any, pids: Collection[int]) -> int:
        found = self._ask(self._nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
        sizes = [process.usedGpuMemory for process in found if process.pid in pids]
        # In a container the driver may list no process, or say nothing of its memory.
        return UNREADABLE if not sizes or None in sizes else sum(sizes)

    def _watch(self) -> None:
        events, looked_at = self._register(), time.monotonic()
        # Under its newer name, and as drivers before 535 have it.
        names = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
        reasons_of = next((call for name in names if (call := getattr(self._nvml, name, None)) is not None), None)
        while not self._stop.is_set():
            if events is None:
                self._stop.wait(self._wait_ms / 1000)
            else:
                self._wait_for(events)
            for index in range(len(self._handles)):
                self._used_memory(index)
                errors = self._ecc_errors(index)
                if errors > self._ecc[index]:
                    self._ecc[index] = errors
                    self._note(ecc_event(index, errors))
            before, looked_at = looked_at, time.monotonic()
            for watch, handle in zip(self._slowdowns, self._handles, strict=True):
                watch.add(int(self._ask(reasons_of, handle) or 0), looked_at - before)
        if events is not None:
            self._ask(self._nvml.nvmlEventSetFree, events)

    def _register(self) -> Any:
        nvml = self._nvml
        wanted = nvml.nvmlEventTypeXidCriticalError | nvml.nvmlEventTypeDoubleBitEccError
        try:
            events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError as error:
            self._health = f"polled: {error}"
            return None
        registered = 0
        for handle in self._handles:
            supported = self._ask(nvml.nvmlDeviceGetSupportedEventTypes, handle)
            kinds = wanted & (int(supported) if supported is not None else wanted)
            if kinds:
                try:
                    nvml.nvmlDeviceRegisterEvents(handle, kinds, events)
                    registered += 1
                except nvml.NVMLError as error:
                    log.warning("device cannot report events", extra={"cause": str(error)})
        if not registered:
            self._health = "polled: no device reports events"
            self._ask(nvml.nvmlEventSetFree, events)
            return None
        return events

    def _wait_for(self, events: Any) -> None:
        nvml = self._nvml
        try:
            data = nvml.nvmlEventSetWait_v2(events, self._wait_ms)
        except nvml.NVMLError as error:
            if _code(error) != nvml.NVML_ERROR_TIMEOUT:
                # A lost device makes the wait fail at once: do not spin.
                self._stop.wait(self._wait_ms / 1000)
            return
        uuid = _text(self._ask(nvml.nvmlDeviceGetUUID, data.device))
        index = next((device.index for device in self.inventory.devices if device.uuid == uuid), None)
        if index is None:
            return
        if int(data.eventType) & nvml.nvmlEventTypeXidCriticalError:
            self._note(xid_event(index, int(data.eventData)))
        elif int(data.eventType) & nvml.nvmlEventTypeDoubleBitEccError:
            self._note(ecc_event(index, max(1, self._ecc_errors(index))))

    def _ecc_errors(self, index: int) -> int:
        nvml = self._nvml
        return _int(
            self._ask(
                nvml.nvmlDeviceGetTotalEccErrors,
                self._handles[index],
                nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                nvml.NVML_VOLATILE_ECC,
            ),
            0,
        )


def _load() -> Any:
    try:
        return importlib.import_module("pynvml")
    except ImportError as error:
        raise NoDriverError("the nvidia-ml-py package is not installed") from error


def _plain(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) else value


def _code(error: Exception) -> int:
    return int(getattr(error, "value", -1))


def _int(value: Any, otherwise: int) -> int:
    return otherwise if value is None else int(value)


def _text(value: Any) -> str:
    """Older versions of the library answer bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")
