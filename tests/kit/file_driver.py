"""A GPU driver for daemons in tests: a process has its state in the file `gpu` of its directory for temporary files.

The file is part of an image of the process, as the state that a driver has saved in its memory. A process that uses the
device waits while the state is not `running`. `python -m kit.file_driver` is `ganger` with this driver. A file
`gpu-faults` beside it fails calls: by call, its result and the state that it leaves behind ("": as it was), used once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ganger_daemon.app
from ganger.cli.main import main
from ganger_daemon.images.driver import DeviceState, DriverCallError, DriverProcessState
from kit.scripted_driver import ALLOWED

# Begins a program that uses the device `uuid`, and waits for it in `use()`.
PROGRAM = """
import json, os, time
from pathlib import Path
gpu = Path(os.environ["TMPDIR"]) / "gpu"
(gpu.parent / "new").write_text(json.dumps({"state": "running", "uuid": os.environ["FAKE_GPU"]}))
os.rename(gpu.parent / "new", gpu)
def use():
    while json.loads(gpu.read_text())["state"] != "running":
        time.sleep(0.002)
"""


class FileDriver:
    def state(self, pid: int) -> DriverProcessState:
        found = read(pid)
        return DriverProcessState(found["state"]) if found else DriverProcessState.NONE

    def lock(self, pid: int, timeout_s: float) -> None:
        self._call("lock", pid)

    def checkpoint(self, pid: int) -> None:
        self._call("checkpoint", pid)

    def restore(self, pid: int, moved: Mapping[str, str]) -> None:
        self._call("restore", pid, moved)

    def unlock(self, pid: int) -> None:
        self._call("unlock", pid)

    def _call(self, name: str, pid: int, moved: Mapping[str, str] | None = None) -> None:
        before, after = ALLOWED[name]
        found, faults = read(pid), read(pid, "gpu-faults")
        if not found or found["state"] != before.value:
            raise DriverCallError(name, "CUDA_ERROR_ILLEGAL_STATE")
        if name in faults:
            result, left = faults.pop(name)
            write(pid, faults, "gpu-faults")
            write(pid, {**found, "state": left or found["state"]})
            raise DriverCallError(name, result)
        write(pid, {"state": after.value, "uuid": (moved or {}).get(found["uuid"], found["uuid"])})


def read(pid: int, name: str = "gpu") -> dict[str, Any]:
    """Return the content of a file of a process; empty for one without a device."""
    try:
        return dict(json.loads((_directory(pid) / name).read_text()))
    except (OSError, KeyError):
        return {}


def write(pid: int, content: Mapping[str, Any], name: str = "gpu") -> None:
    directory = _directory(pid)
    (directory / f"{name}.new").write_text(json.dumps(dict(content)))
    os.rename(directory / f"{name}.new", directory / name)


def _directory(pid: int) -> Path:
    words = Path(f"/proc/{pid}/environ").read_text().split("\0")
    environment = dict(word.split("=", 1) for word in words if "=" in word)
    if "FAKE_GPU" not in environment:
        raise KeyError("FAKE_GPU")
    return Path(f"/proc/{pid}/root{environment['TMPDIR']}")


def state_here(driver: str) -> DeviceState:
    return DeviceState(FileDriver())


if __name__ == "__main__":
    vars(ganger_daemon.app)["choose_device_state"] = state_here
    main()
