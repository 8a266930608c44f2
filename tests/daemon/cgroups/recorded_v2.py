"""A cgroup v2 tree with cpuset and memory, for machines whose kernel has only v1 for them: a directory with the files a
v2 kernel shows, and the kernel's side of each (what appears on mkdir, what a write does, when rmdir is refused)."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from ganger_daemon.cgroups import controllers as files
from ganger_daemon.node.core_table import format_ids, parse_ids

ALWAYS = {
    "cgroup.procs": "",
    "cgroup.threads": "",
    "cgroup.controllers": "",
    "cgroup.subtree_control": "",
    "cgroup.events": "populated 0\nfrozen 0\n",
    "cgroup.freeze": "0\n",
    "cgroup.kill": "",
    "cpu.stat": "usage_usec 0\nuser_usec 0\nsystem_usec 0\n",
}
OF_CONTROLLER = {
    "cpuset": {"cpuset.cpus": "", "cpuset.cpus.effective": "", "cpuset.mems": "", "cpuset.cpus.partition": "member\n"},
    "memory": {
        "memory.max": "max\n",
        "memory.swap.max": "max\n",
        "memory.current": "0\n",
        "memory.events": "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\noom_group_kill 0\n",
    },
    "cpu": {"cpu.weight": "100\n", "cpu.max": "max 100000\n"},
}


class RecordedV2:
    """The kernel behind `mount`. `busy`: groups that hold processes, which so cannot hand down controllers."""

    def __init__(self, mount: Path, controllers: str = "cpuset cpu memory", cpus: str = "0-7") -> None:
        self.mount = mount
        self.busy: set[Path] = set()
        self.writes: list[tuple[str, str]] = []
        mount.mkdir()
        for name, text in {**ALWAYS, "cgroup.controllers": controllers + "\n"}.items():
            (mount / name).write_text(text)
        (mount / "cpuset.cpus.effective").write_text(cpus + "\n")

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        mkdir, rmdir, write = Path.mkdir, Path.rmdir, files.write
        kernel = self

        def kernel_mkdir(path: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
            if kernel.mount not in path.parents or path.is_dir():
                return mkdir(path, mode, parents, exist_ok)
            if parents and not path.parent.is_dir():
                kernel_mkdir(path.parent, mode, parents, exist_ok)
            mkdir(path, mode)
            return kernel.fill(path)

        def kernel_rmdir(path: Path) -> None:
            if kernel.mount not in path.parents:
                return rmdir(path)
            if not path.is_dir():
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            if files.pids_in(path) or files.subdirectories(path):
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
            return shutil.rmtree(path)

        def kernel_write(path: Path, text: str) -> bool:
            kernel.writes.append((path.name, text))
            return kernel.take(path, text) if kernel.mount in path.parents else write(path, text)

        monkeypatch.setattr(Path, "mkdir", kernel_mkdir)
        monkeypatch.setattr(Path, "rmdir", kernel_rmdir)
        monkeypatch.setattr(files, "write", kernel_write)

    def fill(self, group: Path) -> None:
        handed_down = files.read(group.parent / "cgroup.subtree_control").split()
        wanted = {**ALWAYS, "cgroup.controllers": " ".join(handed_down) + "\n"}
        for controller in handed_down:
            wanted |= OF_CONTROLLER[controller]
        for name, text in wanted.items():
            (group / name).write_text(text)
        if "cpuset" in handed_down:
            (group / "cpuset.cpus.effective").write_text(files.read(group.parent / "cpuset.cpus.effective") + "\n")

    def take(self, path: Path, text: str) -> bool:
        group = path.parent
        if not path.exists():
            return False
        if path.name == "cgroup.subtree_control":
            controller = text.removeprefix("+")
            if controller not in files.read(group / "cgroup.controllers").split():
                return False
            if group in self.busy:
                return False
            path.write_text(" ".join(sorted({*files.read(path).split(), controller})) + "\n")
            for child in files.subdirectories(group):
                for name, initial in OF_CONTROLLER[controller].items():
                    (group / child / name).write_text(initial)
                known = {*files.read(group / child / "cgroup.controllers").split(), controller}
                (group / child / "cgroup.controllers").write_text(" ".join(sorted(known)) + "\n")
                if controller == "cpuset":
                    above = files.read(group / "cpuset.cpus.effective")
                    (group / child / "cpuset.cpus.effective").write_text(above + "\n")
        elif path.name == "cgroup.procs":
            pid = os.getpid() if text == "0" else int(text)
            for other in self.mount.rglob("cgroup.procs"):
                other.write_text("".join(f"{one}\n" for one in files.pids_in(other.parent) if one != pid))
            path.write_text(path.read_text() + f"{pid}\n")
            self.busy = {group for group in self.busy if files.pids_in(group)}
        elif path.name == "cpuset.cpus":
            above = set(parse_ids(files.read(group.parent / "cpuset.cpus.effective")))
            path.write_text(text + "\n")
            # none of them there: the kernel gives what the parent has
            (group / "cpuset.cpus.effective").write_text(format_ids(set(parse_ids(text)) & above or above) + "\n")
        elif path.name == "cgroup.freeze":
            path.write_text(text + "\n")
            (group / "cgroup.events").write_text(f"populated 0\nfrozen {text}\n")
        else:
            path.write_text(text + "\n")
        return True
