"""A real cluster for system tests: one master and some daemons, as processes of this machine that can be killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from ganger.failpoints import VARIABLE
from kit.leftovers import remove_leftovers
from kit.shell import Shell
from kit.waiting import eventually

GANGER = (sys.executable, "-m", "ganger.cli.main")
# Of daemons whose jobs have no PyTorch: the first job on a node would wait until its launcher has imported it.
NO_PRELOAD = ("--no-preload",)


_SETTINGS = {
    # Whose ranks are killed over and over is not to be waited for.
    "GANGER_MASTER_RESTART_DELAY": "0",
    # Most tests are of mechanisms, which are the same under every policy, and a planner is one more process.
    "GANGER_MASTER_POLICY": "fifo-backfill",
}


@dataclass
class Service:
    """One program of the cluster and how to start it again."""

    name: str
    argv: list[str]
    log: Path
    environment: dict[str, str]
    armed: Path
    process: subprocess.Popen[bytes] | None = None

    def arm(self, failpoints: str) -> None:
        """Have it die at the next passage of a failpoint; it runs on until then."""
        fresh = self.armed.with_suffix(".new")
        fresh.write_text(failpoints)
        fresh.rename(self.armed)

    def start(self) -> None:
        assert not self.alive, f"{self.name} is running"
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**self.environment, VARIABLE: f"@{self.armed}"},
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def is_stopped(self) -> bool:
        """Whether it is held at a failpoint by SIGSTOP."""
        if not self.alive:
            return False
        assert self.process is not None
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def signal(self, number: int) -> None:
        assert self.process is not None
        if self.alive:
            self.process.send_signal(number)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait()

    def stop(self, within_seconds: float = 15.0) -> None:
        if not self.alive:
            return
        assert self.process is not None
        self.signal(signal.SIGTERM)
        # One that a test has stopped would not end.
        self.signal(signal.SIGCONT)
        try:
            self.process.wait(within_seconds)
        except subprocess.TimeoutExpired:
            self.kill()


@dataclass
class Cluster:
    """`with Cluster(tmp_path, nodes=2) as cluster:` starts a master and daemons and ends everything they started."""

    directory: Path
    nodes: int = 2
    virtual_gpus: int = 4
    topology: str = "2x2"
    virtual_cores: int = 8
    virtual_memory: str = "8G"
    lost_after: str = "10m"
    master_options: Sequence[str] = ()
    daemon_options: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    master: Service = field(init=False)
    daemons: dict[str, Service] = field(init=False)

    def __post_init__(self) -> None:
        environment = {**_SETTINGS, **os.environ, **self.environment, "PYTHONUNBUFFERED": "1"}
        self.directory.mkdir(parents=True, exist_ok=True)
        self.master = Service(
            "master",
            [
                *GANGER,
                "master",
                *("--state-dir", str(self.master_directory)),
                *("--storage", str(self.storage)),
                *("--lost-after", self.lost_after),
                *self.master_options,
            ],
            self.directory / "master.log",
            environment,
            self.directory / "master.failpoints",
        )
        self.daemons = {}
        for number in range(self.nodes):
            name = f"n{number}"
            self.daemons[name] = Service(
                name,
                [
                    *GANGER,
                    "daemon",
                    *("--node", name),
                    *("--state-dir", str(self.directory / name)),
                    *("--run-dir", str(self.run_directory / name)),
                    *("--master", str(self.master_directory)),
                    *("--virtual-gpus", str(self.virtual_gpus)),
                    *("--topology", self.topology),
                    *("--virtual-cores", str(self.virtual_cores)),
                    *("--virtual-memory", self.virtual_memory),
                    *self.daemon_options,
                ],
                self.directory / f"{name}.log",
                environment,
                self.directory / f"{name}.failpoints",
            )

    @property
    def master_directory(self) -> Path:
        return self.directory / "master"

    @property
    def storage(self) -> Path:
        return self.directory / "storage"

    @property
    def run_directory(self) -> Path:
        # A Unix socket's path has at most 107 characters, and pages belong on a tmpfs.
        return Path("/dev/shm") / f"ganger-test-{os.getpid()}-{abs(hash(str(self.directory))) % 10**8}"

    def __enter__(self) -> Cluster:
        self.storage.mkdir(parents=True, exist_ok=True)
        self.run_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self.start_master()
            for name in self.daemons:
                self.daemons[name].start()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start_master(self) -> None:
        (self.master_directory / "endpoint.json").unlink(missing_ok=True)
        self.master.start()
        eventually(
            lambda: (self.master_directory / "endpoint.json").exists() or not self.master.alive,
            what="the master serves",
            story=self.story,
        )
        assert self.master.alive, self.story()

    def wait_ready(self, nodes: int | None = None) -> None:
        wanted, shell = self.nodes if nodes is None else nodes, Shell(self.master_directory)
        eventually(
            lambda: sum(node["state"] == "READY" for node in shell.json("nodes")["nodes"]) >= wanted,
            what=f"{wanted} nodes are ready",
            story=self.story,
        )

    def stop(self) -> None:
        """Ends the services and every process they left: those run in the cluster's directories."""
        for daemon in self.daemons.values():
            if daemon.process is not None:
                daemon.signal(signal.SIGTERM)
        for service in (*self.daemons.values(), self.master):
            service.stop()
        self._kill_all(self.survivors())
        remove_leftovers(self.directory / name for name in self.daemons)
        shutil.rmtree(self.run_directory, ignore_errors=True)

    def destroy_node(self, name: str) -> None:
        """As if the server had burnt: its daemon, launchers and ranks are killed, its memory and its disk are gone."""
        self.daemons[name].kill()
        mine = (self.directory / name, self.run_directory / name)
        # Repeated until no process is left: one that is killed may just have forked another.
        eventually(lambda: not self._kill_all(self.survivors(*mine)), what=f"nothing of {name} is left")
        remove_leftovers([mine[0]])
        for directory in mine:
            shutil.rmtree(directory, ignore_errors=True)

    @staticmethod
    def _kill_all(pids: Sequence[int]) -> Sequence[int]:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        return pids

    def survivors(self, *directories: Path) -> list[int]:
        """Processes whose environment or command line names a directory of the cluster: ranks, launchers, stores."""
        marks = [f"{path}".encode() for path in directories or (self.directory, self.run_directory)]
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                text = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if any(mark in text for mark in marks):
                found.append(int(entry.name))
        return found

    def run(self, *arguments: str, ok: bool = True, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """`ganger ARGUMENTS` against this cluster."""
        done = subprocess.run(
            [*GANGER, *arguments],
            env=self._of_users,
            capture_output=True,
            text=True,
            timeout=120,
            cwd=cwd,
            check=False,
        )
        if ok:
            assert done.returncode == 0, (
                f"ganger {' '.join(arguments)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
            )
        return done

    @property
    def _of_users(self) -> dict[str, str]:
        """Not the services': what is captured of it is a job's, and the same as of commands run in this process."""
        return {**os.environ, **self.environment, "GANGER_MASTER": str(self.master_directory)}

    def begin(self, *arguments: str) -> subprocess.Popen[bytes]:
        """`ganger ARGUMENTS` against this cluster, beside the test: it may wait for a master that is held or dead."""
        return subprocess.Popen(
            [*GANGER, *arguments],
            env=self._of_users,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def json(self, *arguments: str) -> dict[str, object]:
        answer = json.loads(self.run(arguments[0], "--json", *arguments[1:]).stdout)
        assert isinstance(answer, dict)
        return answer

    def story(self, last_lines: int = 40) -> str:
        """The last lines of every service's log."""
        parts = []
        for service in (self.master, *self.daemons.values()):
            lines = service.log.read_text(errors="replace").splitlines()[-last_lines:] if service.log.exists() else []
            parts.append(f"--- {service.name} ({'alive' if service.alive else 'ended'})\n" + "\n".join(lines))
        return "\n".join(parts)
