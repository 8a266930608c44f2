"""CUDA state of processes, kept in their host memory by the driver's checkpoint calls (cuda-bindings 13 or newer): lock
waits for the device's work, checkpoint gives the device back; restore and unlock undo both, perhaps on another device.
Where a call fails, the driver leaves a process as it was, or reports it as failed: lost."""

from __future__ import annotations

import ctypes
import importlib
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

from ganger.failpoints import hit

from ganger_daemon.images.contract import DeviceStateLostError, ImageRefusedError

OLDEST_DRIVER = 570
LOCK_S = 30.0
_SUCCESS, _INVALID = "CUDA_SUCCESS", "CUDA_ERROR_INVALID_VALUE"
# The driver names no cause; these are the ones that its documentation and its users name.
_NOT_SUPPORTED = "the driver cannot save it: NCCL, managed memory, memory shared between processes, or MIG is in use"
_MEANINGS = {
    "CUDA_ERROR_NOT_READY": "its work on the device was not done in time",
    "CUDA_ERROR_NOT_SUPPORTED": _NOT_SUPPORTED,
    "CUDA_ERROR_OUT_OF_MEMORY": "the device or the host has too little free memory",
    "CUDA_ERROR_ILLEGAL_STATE": "another program stops it at the same time",
    "CUDA_ERROR_NOT_PERMITTED": "the daemon may not stop it",
    "CUDA_ERROR_INVALID_DEVICE": "the device is of another kind or not there",
}


class DriverProcessState(Enum):
    """State of a process for the driver. NONE: it has no CUDA state."""

    NONE = "none"
    RUNNING = "running"
    LOCKED = "locked"
    CHECKPOINTED = "checkpointed"
    FAILED = "failed"


class DriverCallError(Exception):
    """A call of the driver failed. `result`: its name for the error."""

    def __init__(self, call: str, result: str) -> None:
        super().__init__(f"the driver's {call} failed: {result}")
        self.result = result


class DriverCalls(Protocol):
    """The driver's calls, by process id in the daemon's namespace. All but `state` raise DriverCallError; all block."""

    def state(self, pid: int) -> DriverProcessState: ...

    def lock(self, pid: int, timeout_s: float) -> None: ...

    def checkpoint(self, pid: int) -> None: ...

    def restore(self, pid: int, moved: Mapping[str, str]) -> None:
        """`moved`: devices by UUID ("GPU-..."), and those that replace them."""

    def unlock(self, pid: int) -> None: ...


class Replacements(NamedTuple):
    """Devices by UUID, and those that replace them. `own`: of a saved process; `others`: those that it did not use, but
    may have seen. The driver wants a partner for each device that the process has opened, and rejects more than these;
    which they are is not known from outside."""

    own: Mapping[str, str] = {}
    others: Mapping[str, str] = {}


def replacements(
    old: Sequence[str], old_others: Sequence[str], new: Sequence[str], new_others: Sequence[str]
) -> Replacements:
    """Return what replaces the devices of a saved process, in their order; nothing where it gets the same again."""
    if list(old) == list(new):
        return Replacements()
    return Replacements(dict(zip(old, new, strict=False)), dict(zip(old_others, new_others, strict=False)))


class DeviceState:
    """Saves and restores the CUDA state of processes. `unavailable`: why only processes without any are served."""

    def __init__(self, calls: DriverCalls | None, unavailable: str = "", lock_s: float = LOCK_S) -> None:
        self.unavailable = "" if calls is not None else unavailable
        self._calls = calls
        self._lock_s = lock_s

    @property
    def capability(self) -> str:
        """As a node reports it: "yes", or "none: why"."""
        return "yes" if self.has_driver else f"none: {self.unavailable}"

    @property
    def has_driver(self) -> bool:
        """Whether processes here may have CUDA state that can be saved."""
        return self._calls is not None

    def holders(self, pids: Sequence[int]) -> tuple[int, ...]:
        """Return those of some processes that have CUDA state, saved or not."""
        calls = self._calls
        if calls is None:
            return ()
        return tuple(pid for pid in pids if calls.state(pid) is not DriverProcessState.NONE)

    def save(self, pids: Sequence[int]) -> tuple[int, ...]:
        """Bring the CUDA state of a tree into its host memory. Return the processes that had any. May be repeated.

        Raises ImageRefusedError, then all have their devices again; DeviceStateLostError."""
        if self._calls is None:
            return ()
        calls, holders = self._calls, self.holders(pids)
        if len(holders) > 1:
            named = ", ".join(map(str, holders))
            raise ImageRefusedError(f"several of its processes use a GPU ({named}): the driver cannot save them all")
        for pid in holders:
            try:
                self._save_one(calls, pid)
            except DriverCallError as error:
                self._undo(calls, pid, error)
                raise ImageRefusedError(f"the GPU state of {self._why(pid, error)}") from error
        return holders

    def restore(self, pids: Sequence[int], moved: Replacements | None = None) -> None:
        """Give processes their devices again, or those that replace them, and let them go on. May be repeated, also
        after a failure. Raises ImageRefusedError where a later call may succeed, as when the device is full;
        DeviceStateLostError."""
        if self._calls is None:
            if pids:
                raise ImageRefusedError(self.unavailable)
            return
        for pid in pids:
            try:
                if self._calls.state(pid) is DriverProcessState.CHECKPOINTED:
                    self._restore_one(self._calls, pid, moved or Replacements())
                    hit("devices-restored")
                if self._calls.state(pid) is DriverProcessState.LOCKED:
                    self._calls.unlock(pid)
            except DriverCallError as error:
                self._reject_lost(self._calls, pid)
                raise ImageRefusedError(f"the GPU state is not restored: {self._why(pid, error)}") from error
            self._reject_lost(self._calls, pid)

    @staticmethod
    def _restore_one(calls: DriverCalls, pid: int, moved: Replacements) -> None:
        try:
            calls.restore(pid, {**moved.own, **moved.others} if moved.own else {})
        except DriverCallError as error:
            if error.result != _INVALID or not moved.others:
                raise
            calls.restore(pid, moved.own)

    def _save_one(self, calls: DriverCalls, pid: int) -> None:
        # An earlier call may have been interrupted.
        if calls.state(pid) is DriverProcessState.RUNNING:
            calls.lock(pid, self._lock_s)
            hit("devices-locked")
        if calls.state(pid) is DriverProcessState.LOCKED:
            calls.checkpoint(pid)
            hit("devices-saved")
        self._reject_lost(calls, pid)

    def _undo(self, calls: DriverCalls, pid: int, error: DriverCallError) -> None:
        self._reject_lost(calls, pid)
        if calls.state(pid) is DriverProcessState.LOCKED:
            try:
                calls.unlock(pid)
            except DriverCallError as second:
                raise DeviceStateLostError(f"{self._why(pid, error)}; and it stays locked: {second}") from second

    def _reject_lost(self, calls: DriverCalls, pid: int) -> None:
        if calls.state(pid) is DriverProcessState.FAILED:
            raise DeviceStateLostError(f"process {pid} has lost its GPU state: the driver reports it as failed")

    @staticmethod
    def _why(pid: int, error: DriverCallError) -> str:
        if not os.path.exists(f"/proc/{pid}"):
            return f"process {pid}: it has ended"
        return f"process {pid}: {_MEANINGS.get(error.result, str(error))} ({error.result})"


class CudaBindings:
    """The driver's calls by cuda-bindings. Raises ImportError without them, DriverCallError without a driver."""

    def __init__(self) -> None:
        self._cuda: Any = importlib.import_module("cuda.bindings.driver")
        try:
            result = self._cuda.cuInit(0)
        except Exception as error:  # the bindings' own classes, which depend on their version
            raise DriverCallError("cuInit", str(error)) from error
        _checked("cuInit", result)

    def state(self, pid: int) -> DriverProcessState:
        result = self._cuda.cuCheckpointProcessGetState(pid)
        if _name(result[0]) != _SUCCESS:
            return DriverProcessState.NONE
        name = str(result[1].name).rpartition("STATE_")[2].lower()
        known = {state.value: state for state in DriverProcessState}
        # On the way to the other one, by another program.
        passing = {"checkpointing": DriverProcessState.LOCKED, "restoring": DriverProcessState.CHECKPOINTED}
        return known.get(name) or passing.get(name, DriverProcessState.FAILED)

    def lock(self, pid: int, timeout_s: float) -> None:
        arguments = self._cuda.CUcheckpointLockArgs()
        arguments.timeoutMs = int(timeout_s * 1000)
        _checked("lock", self._cuda.cuCheckpointProcessLock(pid, arguments))

    def checkpoint(self, pid: int) -> None:
        _checked("checkpoint", self._cuda.cuCheckpointProcessCheckpoint(pid, None))

    def restore(self, pid: int, moved: Mapping[str, str]) -> None:
        arguments = self.restore_arguments(moved) if moved else None
        _checked("restore", self._cuda.cuCheckpointProcessRestore(pid, arguments))

    def unlock(self, pid: int) -> None:
        _checked("unlock", self._cuda.cuCheckpointProcessUnlock(pid, None))

    def restore_arguments(self, moved: Mapping[str, str]) -> Any:
        pairs = []
        for old, new in moved.items():
            pair = self._cuda.CUcheckpointGpuPair()
            pair.oldUuid, pair.newUuid = self._uuid(old), self._uuid(new)
            pairs.append(pair)
        arguments = self._cuda.CUcheckpointRestoreArgs()
        arguments.gpuPairs, arguments.gpuPairsCount = pairs, len(pairs)
        return arguments

    def _uuid(self, text: str) -> Any:
        found = self._cuda.CUuuid()
        ctypes.memmove(found.getPtr(), uuid.UUID(text.removeprefix("GPU-")).bytes, 16)
        return found


def choose_device_state(driver: str, make_calls: Callable[[], DriverCalls] = CudaBindings) -> DeviceState:
    """Return what saves CUDA state on a node. `driver`: version of its driver; any text that
    is no version where there is none."""
    number = driver.split(".")[0]
    if not number.isdigit():
        return DeviceState(None, "there is no GPU driver")
    if int(number) < OLDEST_DRIVER:
        return DeviceState(None, f"the GPU driver is {driver}; {OLDEST_DRIVER} is the oldest that saves processes")
    try:
        return DeviceState(make_calls())
    except ImportError:
        return DeviceState(None, "cuda-bindings is not installed (pip install 'ganger[gpu]')")
    except DriverCallError as error:
        return DeviceState(None, str(error))


def _checked(call: str, result: tuple[Any, ...]) -> None:
    if _name(result[0]) != _SUCCESS:
        raise DriverCallError(call, _name(result[0]))


def _name(status: Any) -> str:
    return str(getattr(status, "name", status))
