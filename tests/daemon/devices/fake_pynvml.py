"""The `pynvml` module as far as the daemon uses it, playing a recorded server: same names, errors and defects."""

# ruff: noqa: N802, N815

from __future__ import annotations

import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ganger_daemon.devices.virtual import RecordedServer, read_recording


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


class FakeNvml:
    NVMLError = NVMLError
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_TIMEOUT = 10
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_P2P_CAPS_INDEX_READ = (0,)  # as the real module has it
    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0
    NVML_AFFINITY_SCOPE_NODE = 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    NVML_COMPUTEMODE_DEFAULT = 0
    nvmlEventTypeXidCriticalError = 8
    nvmlEventTypeDoubleBitEccError = 2

    def __init__(self, name: str) -> None:
        self.recording: RecordedServer = read_recording(Path(name))
        self.server = self.recording.server
        self.used = list(self.recording.used_memory)
        self.ecc = [0] * len(self.server.devices)
        self.lost: set[int] = set()
        self.mig: set[int] = set()
        # By device: pid and bytes; the driver says None where it does not know.
        self.processes: dict[int, list[tuple[int, int | None]]] = {}
        # By device: percent by pid.
        self.utilisation: dict[int, dict[int, int]] = {}
        # By device: why its clock is held down.
        self.slowdowns: dict[int, int] = {}
        # By device: percent of the time in which a kernel ran, and in which memory was read or written.
        self.rates: dict[int, tuple[int, int]] = {}
        self.compute_mode = self.NVML_COMPUTEMODE_DEFAULT
        self.events: queue.Queue[tuple[int, int, int]] = queue.Queue()
        self.can_report_events = True
        self.open = 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return self.server.driver.encode()  # older versions answer bytes

    def nvmlDeviceGetCount(self) -> int:
        return len(self.server.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return self.server.devices[handle].uuid

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self.server.devices[handle].name

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(busId=f"00000000:{0xE0 + handle:02X}:00.0")

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        if handle in self.lost:
            raise NVMLError(self.NVML_ERROR_GPU_IS_LOST)
        return SimpleNamespace(total=self.server.devices[handle].memory_bytes, used=self.used[handle])

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        if handle in self.lost:
            raise NVMLError(self.NVML_ERROR_GPU_IS_LOST)
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in self.processes.get(handle, [])]

    def nvmlDeviceGetMigMode(self, handle: int) -> tuple[int, int]:
        return (1, 1) if handle in self.mig else (0, 0)

    def nvmlDeviceGetCpuAffinity(self, handle: int, words: int) -> list[int]:
        cpus = self.server.devices[handle].cpus
        return [sum(1 << bit for bit in range(64) if 64 * word + bit in cpus) for word in range(words)]

    def nvmlDeviceGetCpuAffinityWithinScope(self, handle: int, words: int, scope: int) -> list[int]:
        raise NVMLError(self.NVML_ERROR_NOT_SUPPORTED)

    def nvmlDeviceGetTopologyCommonAncestor(self, a: int, b: int) -> int:
        return self.server.ancestors[min(a, b), max(a, b)]

    def nvmlDeviceGetP2PStatus(self, a: int, b: int, index: int) -> int:
        assert isinstance(index, int), "a tuple is an ArgumentError in the real library"
        return self.NVML_P2P_STATUS_OK if (min(a, b), max(a, b)) in self.server.nvlink else 5

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        return self.ecc[handle]

    def nvmlDeviceGetProcessUtilization(self, handle: int, since: int) -> Any:
        if handle not in self.utilisation:
            raise NVMLError(0)  # "success": nothing ran
        return [SimpleNamespace(pid=pid, smUtil=percent) for pid, percent in self.utilisation[handle].items()]

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        if handle not in self.rates:
            raise NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        gpu, memory = self.rates[handle]
        return SimpleNamespace(gpu=gpu, memory=memory)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return self.slowdowns.get(handle, 0)

    def nvmlDeviceGetComputeMode(self, handle: int) -> int:
        return self.compute_mode

    def nvmlEventSetCreate(self) -> object:
        if not self.can_report_events:
            raise NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        return object()

    def nvmlEventSetFree(self, events: object) -> None:
        pass

    def nvmlDeviceGetSupportedEventTypes(self, handle: int) -> int:
        return 0xFF

    def nvmlDeviceRegisterEvents(self, handle: int, kinds: int, events: object) -> None:
        pass

    def nvmlEventSetWait_v2(self, events: object, milliseconds: int) -> SimpleNamespace:
        try:
            device, kind, data = self.events.get(timeout=milliseconds / 1000)
        except queue.Empty:
            raise NVMLError(self.NVML_ERROR_TIMEOUT) from None
        return SimpleNamespace(device=device, eventType=kind, eventData=data)
