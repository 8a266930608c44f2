"""A GPU driver for tests: it keeps the states of processes, and fails calls as scripted."""

from __future__ import annotations

from collections.abc import Mapping

from ganger_daemon.images.driver import DriverCallError, DriverProcessState

ALLOWED = {
    "lock": (DriverProcessState.RUNNING, DriverProcessState.LOCKED),
    "checkpoint": (DriverProcessState.LOCKED, DriverProcessState.CHECKPOINTED),
    "restore": (DriverProcessState.CHECKPOINTED, DriverProcessState.LOCKED),
    "unlock": (DriverProcessState.LOCKED, DriverProcessState.RUNNING),
}


class ScriptedDriver:
    """`states`: of the processes with CUDA state. `faults`: by call, its result and the state it leaves behind (None:
    as it was), used once. `made`: the calls in order."""

    def __init__(self, *pids: int) -> None:
        self.states = dict.fromkeys(pids, DriverProcessState.RUNNING)
        self.faults: dict[str, tuple[str, DriverProcessState | None]] = {}
        self.made: list[str] = []
        self.moved: Mapping[str, str] = {}

    def state(self, pid: int) -> DriverProcessState:
        return self.states.get(pid, DriverProcessState.NONE)

    def lock(self, pid: int, timeout_s: float) -> None:
        self._call("lock", pid)

    def checkpoint(self, pid: int) -> None:
        self._call("checkpoint", pid)

    def restore(self, pid: int, moved: Mapping[str, str]) -> None:
        self._call("restore", pid)
        self.moved = moved

    def unlock(self, pid: int) -> None:
        self._call("unlock", pid)

    def _call(self, name: str, pid: int) -> None:
        self.made.append(name)
        if name in self.faults:
            result, after = self.faults.pop(name)
            if after is not None:
                self.states[pid] = after
            raise DriverCallError(name, result)
        before, after = ALLOWED[name]
        if self.state(pid) is not before:
            raise DriverCallError(name, "CUDA_ERROR_ILLEGAL_STATE")
        self.states[pid] = after
