"""Process images without CRIU: of programs that keep their state in the unit's own directories.

A dump packs those directories while the processes are stopped. A restore starts the root's command again, with the id
that it had, as a sibling of what restores it. A program that goes on from its files cannot see the difference.
While its files and its output disagree, it locks the file STEP_LOCK in a directory of the unit's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from ganger.injob.process_identity import stands_still
from ganger_daemon.images.contract import (
    PID_FILE,
    DumpRequest,
    ImageFacts,
    ImageRefusedError,
    Machine,
    ProcessImages,
    UnitProcesses,
    read_facts,
    write_facts,
)
from ganger_daemon.images.packing import fill_directories, pack_directories
from ganger_daemon.images.process_tree import UnitProc, pid_inside
from ganger_daemon.node.accounts import Account

STEP_LOCK = "step.lock"
_PROGRAM = "program.img"
_CLONE_PARENT = 0x8000
_CLONE = {"x86_64": 56, "aarch64": 220}


class FakeImages(ProcessImages):
    """`refusal`: why the next dump is refused; empty: it is not."""

    capability = "fake"

    def __init__(self) -> None:
        super().__init__()
        self.refusal = ""

    def dump(self, request: DumpRequest) -> ImageFacts:
        unit, directory = request.unit, request.directory
        if self.refusal:
            raise ImageRefusedError(self.refusal)
        root, proc = pid_inside(unit.root_pid), UnitProc(unit.init_pid or None)
        _stop_between_steps(unit)
        files, descriptors = proc.open_files((root,)), proc.descriptors(root)
        logs = {path for number in (1, 2) if (path := descriptors.get(number, "")) in files}
        program = {
            "argv": _words(unit.root_pid, "cmdline"),
            "env": _words(unit.root_pid, "environ"),
            "cwd": os.readlink(f"/proc/{unit.root_pid}/cwd"),
            "pid": root,
            "outputs": {number: descriptors[number] for number in (1, 2) if number in descriptors},
        }
        (directory / _PROGRAM).write_text(json.dumps(program))
        facts = ImageFacts(
            root_pid=root,
            processes=1,
            logs=tuple(files[path] for path in sorted(logs)),
            files=tuple(file for path, file in sorted(files.items()) if path not in logs),
            own_directories=unit.own_directories,
            machine=Machine("any", (), "any", "fake"),
            labels=unit.labels,
        )
        try:
            pack_directories(unit, directory, [file.path for file in facts.files])
            write_facts(directory, facts)
            request.meanwhile()
        except BaseException:
            os.kill(unit.root_pid, signal.SIGCONT)
            raise
        os.kill(unit.root_pid, signal.SIGCONT if request.goes_on else signal.SIGKILL)
        return facts

    def has_consent(self, directory: Path) -> bool:
        return False

    def fill(self, init_pid: int, directory: Path, account: Account | None = None) -> None:
        fill_directories(init_pid, read_facts(directory).own_directories, directory)

    def restore_arguments(
        self, directory: Path, files: Mapping[str, int], *, is_stopped: bool = False, account: Account | None = None
    ) -> list[str]:
        return [sys.executable, "-P", __file__, str(directory), json.dumps(dict(files)), str(int(is_stopped))]

    def restore_failure(self, directory: Path) -> str:
        return "the command of the fake failed"


def _stop_between_steps(unit: UnitProcesses) -> None:
    root = f"/proc/{unit.init_pid}/root" if unit.init_pid else ""
    places = [Path(f"{root}{each}") / STEP_LOCK for each in unit.own_directories]
    with contextlib.ExitStack() as stack:
        for place in places:
            if place.exists():
                fcntl.flock(stack.enter_context(place.open("a")), fcntl.LOCK_EX)
        os.kill(unit.root_pid, signal.SIGSTOP)
        while not stands_still(unit.root_pid):
            os.sched_yield()


def _words(pid: int, name: str) -> list[str]:
    return Path(f"/proc/{pid}/{name}").read_bytes().decode().split("\0")[:-1]


def restore(directory: Path, logs: Mapping[str, int], is_stopped: bool) -> None:
    """Start the program as this process's sibling, with its id in the unit."""
    program = json.loads((directory / _PROGRAM).read_text())
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(program["pid"] - 1))
    libc = ctypes.CDLL(None, use_errno=True)
    child = libc.syscall(_CLONE[os.uname().machine], _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    if child < 0:
        raise OSError(ctypes.get_errno(), "clone")
    if child == 0:
        os.setsid()
        for number, path in program["outputs"].items():
            given = logs.get(path) or os.open(path, os.O_WRONLY | os.O_APPEND)
            os.dup2(given, int(number))
        os.chdir(program["cwd"])
        if is_stopped:
            os.kill(os.getpid(), signal.SIGSTOP)
        os.execvpe(program["argv"][0], program["argv"], dict(word.split("=", 1) for word in program["env"]))
    (directory / PID_FILE).write_text(str(program["pid"]))


if __name__ == "__main__":
    restore(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3] == "1")
