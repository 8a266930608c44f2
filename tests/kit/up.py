"""A cluster that `ganger up` started, as a user starts it: real commands, real processes, nothing set that a user would
not set."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from ganger.cli import local_cluster as cluster
from kit.leftovers import remove_leftovers
from kit.shell import Shell
from kit.waiting import eventually

GANGER = (sys.executable, "-m", "ganger.cli.main")
# Of clusters whose jobs have no PyTorch: the first job on a node would wait until its launcher has imported it.
NO_PRELOAD = MappingProxyType({"GANGER_DAEMON_NO_PRELOAD": "1"})


@dataclass
class Up:
    """`with Up(tmp_path / "c", "--nodes", "2") as up:` runs `ganger up --detach` and ends all that it started."""

    directory: Path
    flags: tuple[str, ...]

    def __init__(self, directory: Path, *flags: str, settings: Mapping[str, str] = MappingProxyType({})) -> None:
        """`settings`: environment variables beside those of this process."""
        self.directory, self.flags = directory, flags
        names = ("GANGER_MASTER", "GANGER_TOKEN", "XDG_RUNTIME_DIR")
        self.environment = {name: text for name, text in os.environ.items() if name not in names}
        self.environment |= {"GANGER_MASTER": str(directory), **settings}

    def __enter__(self) -> Up:
        try:
            self.start()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def start(self) -> str:
        return self("up", "--state-dir", str(self.directory), *self.flags, "--detach")

    def try_(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*GANGER, *arguments], env=self.environment, capture_output=True, text=True, timeout=200, check=False
        )

    def __call__(self, *arguments: str) -> str:
        """Return the output of `ganger ARGUMENTS`, which must succeed."""
        done = self.try_(*arguments)
        assert done.returncode == 0, f"ganger {shlex.join(arguments)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    @property
    def shell(self) -> Shell:
        """Run commands in this process: those that are repeated until something is so would each start another."""
        return Shell(self.directory)

    def json(self, command: str, *arguments: str) -> Any:
        return self.shell.json(command, *arguments)

    def phase(self, job: str) -> str:
        """The phase of a job's gang; empty while it has none."""
        gang = self.json("show", job)["gang"]
        return str(gang["phase"]) if gang else ""

    def submit(self, *arguments: str) -> str:
        """The number of the new job."""
        return str(json.loads(self("submit", "--json", *arguments))["name"]).removeprefix("jobs/")

    def processes(self) -> dict[str, cluster.Started]:
        """Return the running programs by name: "up", "master", "n1", ..."""
        return {each.name: each for each in cluster.read_up_file(self.directory)[1]}

    def kill(self, name: str) -> cluster.Started:
        """kill -9 one of them and wait until it is gone."""
        found = self.processes()[name]
        os.kill(found.pid, signal.SIGKILL)
        eventually(lambda: not cluster.is_alive(found), what=f"{name} is gone")
        return found

    def wait_ready(self, nodes: int) -> None:
        eventually(lambda: self._ready() == nodes, within_seconds=60, what=f"{nodes} nodes are ready", story=self.story)

    def _ready(self) -> int:
        done = self.shell.try_("nodes", "--json")
        return 0 if done.code else sum(node["state"] == "READY" for node in json.loads(done.out)["nodes"])

    def story(self) -> str:
        logs = sorted((self.directory / "logs").glob("*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)

    def remove(self) -> None:
        """End every process that names the state directory, and remove what they left."""
        self.try_("down", "--state-dir", str(self.directory), "--cancel-jobs")
        nodes = list((self.directory / "nodes").glob("*"))
        eventually(lambda: not self._end(), what="nothing of the cluster is left")
        remove_leftovers(nodes)

    def _end(self) -> Sequence[int]:
        mark, found = os.fsencode(self.directory), []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                text = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
                if mark in text:
                    os.kill(int(entry.name), signal.SIGKILL)
                    found.append(int(entry.name))
            except OSError:
                continue
        return found
