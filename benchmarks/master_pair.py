"""Two masters on a PostgreSQL server of their own, and daemons: what a cluster with a stand-by master is."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from ganger.wire.endpoints import ensure_token

from benchmarks.bench_cluster import GANGER, READY, START_S, BenchCluster
from benchmarks.postgresql_server import PostgresqlServer

_STANDS_BY: Final = "ganger master stands by at "
_LEADS_WITHIN_S: Final = 30.0


class MasterPair(BenchCluster):
    """Two masters on one database, and daemons with virtual GPUs. `settings`: environment of all of its programs;
    `memory`: host memory of a node; `daemon`: further options of daemons."""

    def __init__(
        self,
        *,
        nodes: int,
        gpus: int,
        cores: int,
        memory: str,
        policy: Sequence[str] = ("--policy", "fifo-backfill"),
        daemon: Sequence[str] = (),
        settings: Mapping[str, str] | None = None,
    ) -> None:
        options = ("--virtual-gpu-memory", "1G", *daemon)
        super().__init__(nodes=nodes, gpus=gpus, cores=cores, memory=memory, master=policy, daemon=options)
        self._directories = [self.directory / "m0", self.directory / "m1"]
        # As a list, for daemons and commands.
        self.master = Path(",".join(map(str, self._directories)))
        self._environment |= {"GANGER_MASTER": str(self.master), **(settings or {})}
        self.database = PostgresqlServer()
        self.masters: list[subprocess.Popen[bytes] | None] = [None, None]
        token = ensure_token(self._directories[0])[0]
        ensure_token(self._directories[1])[1].write_text(f"{token}\n")

    def _start_master(self) -> None:
        self.database.__enter__()
        for number in range(2):
            self.start(number)

    def start(self, number: int) -> None:
        """Start a master, and wait until it leads or stands by."""
        self.start_master(number)
        self.until(lambda: bool(self._announced(number)), START_S, "a master leads or stands by")

    def start_master(self, number: int) -> None:
        log = self.directory / f"program-m{number}.log"
        # What it announced in its last life goes to the log of all lives.
        with self.directory.joinpath(f"former-m{number}.log").open("ab") as former:
            former.write(log.read_bytes() if log.exists() else b"")
        log.write_text("")
        command = (
            *(*GANGER, "master", *self._master_options, "--state-dir", str(self._directories[number])),
            *("--storage", str(self.directory / "storage"), "--database-url", self.database.url),
        )
        with log.open("ab") as out:
            self.masters[number] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env=self._environment,
            )

    def _announced(self, number: int) -> str:
        log = self.directory / f"program-m{number}.log"
        lines = reversed(log.read_text(errors="replace").splitlines())
        return next((line for line in lines if line.startswith((READY, _STANDS_BY))), "")

    def leading(self) -> list[int]:
        """Return the numbers of the masters that run, and announced last that they lead."""
        return [
            number
            for number, process in enumerate(self.masters)
            if process is not None and process.poll() is None and self._announced(number).startswith(READY)
        ]

    def leader(self) -> int:
        """Return the number of the master that leads, as soon as one does. Raises BenchClusterError."""
        self.until(lambda: bool(self.leading()), _LEADS_WITHIN_S, "a master leads")
        return self.leading()[0]

    def signal(self, number: int, what: signal.Signals) -> None:
        self._master(number).send_signal(what)

    def end_of(self, number: int) -> int:
        """Wait for a master's end; return its exit code."""
        return self._master(number).wait(_LEADS_WITHIN_S)

    def _master(self, number: int) -> subprocess.Popen[bytes]:
        process = self.masters[number]
        assert process is not None, "it was started"
        return process

    def stop(self) -> None:
        for process in self.masters:
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for process in self.masters:
            if process is not None:
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        try:
            super().stop()
        finally:
            self.database.__exit__(None, None, None)
