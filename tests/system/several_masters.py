"""A cluster with several masters on one PostgreSQL database, and callers that submit to it without pause."""

from __future__ import annotations

import signal
import threading
import time
import uuid
from collections import Counter
from pathlib import Path

from ganger.client import Client
from ganger.wire.endpoints import ensure_token
from ganger.wire.errors import ApiError
from kit.cluster import Cluster, Service
from kit.waiting import eventually

from benchmarks.postgresql_server import PostgresqlServer

_LEADS = "ganger master ready at "
_STANDS_BY = "ganger master stands by at "


class MasterGroup(Cluster):
    """As `Cluster`, with two masters. `master_directory`, for clients and daemons, is the list of their directories."""

    def __post_init__(self) -> None:
        self.directories = [self.directory / "m0", self.directory / "m1"]
        super().__post_init__()
        self.server = PostgresqlServer()
        # Without certificates the masters are on one machine, and one token opens all of them.
        token = ensure_token(self.directories[0])[0]
        ensure_token(self.directories[1])[1].write_text(token)
        first = self.master
        self.masters: list[Service] = []
        for directory in self.directories:
            argv = [*first.argv, "--database-url", self.server.url]
            argv[argv.index("--state-dir") + 1] = str(directory)
            log, armed = self.directory / f"{directory.name}.log", self.directory / f"{directory.name}.failpoints"
            self.masters.append(Service(directory.name, argv, log, first.environment, armed))
        self.master = self.masters[0]

    @property
    def master_directory(self) -> Path:
        return Path(",".join(map(str, self.directories)))

    def start_master(self) -> None:
        """Start the database and all masters: the first one leads."""
        self.server.__enter__()
        for master in self.masters:
            self.start_again(master)
        assert self.leader is self.masters[0]

    def start_again(self, master: Service) -> None:
        """Start a master, and wait until it leads or stands by."""
        master.log.write_text("")
        master.start()
        eventually(lambda: self._said(master) or not master.alive, what=f"{master.name} serves", story=self.story)
        assert master.alive, self.story()

    @staticmethod
    def _said(master: Service) -> str:
        """Return what a master has announced last: that it leads, or stands by."""
        lines = master.log.read_text(errors="replace").splitlines()
        return next((line for line in reversed(lines) if line.startswith((_LEADS, _STANDS_BY))), "")

    @property
    def leader(self) -> Service:
        """The master that leads, once there is one that runs."""
        return eventually(
            lambda: next((m for m in self.masters if m.alive and self._said(m).startswith(_LEADS)), None),
            what="a master leads",
            story=self.story,
        )

    def stop(self) -> None:
        for master in self.masters:
            # One that stands still would not end.
            master.signal(signal.SIGCONT)
        try:
            super().stop()
            for master in self.masters:
                master.stop()
        finally:
            self.server.__exit__(None, None, None)

    def story(self, last_lines: int = 40) -> str:
        logs = [f"--- {m.name}\n" + m.log.read_text(errors="replace")[-4_000:] for m in self.masters if m.log.exists()]
        return "\n".join([*logs, super().story(last_lines)])


class Submitters:
    """Threads that submit jobs that stay pending, `per_s` in all. Each repeats a submission with its request id until
    it is accepted, as a user is told to. `accepted`: when, by the monotonic clock, and which job, by label."""

    def __init__(self, cluster: Cluster, per_s: float, threads: int = 8) -> None:
        self._master = str(cluster.master_directory)
        self._pause_s = threads / per_s
        self._ended = threading.Event()
        self.accepted: dict[str, tuple[float, str]] = {}
        self.failures: Counter[str] = Counter()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(threads)]

    def __enter__(self) -> Submitters:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        count, due = 0, time.monotonic()
        with Client(self._master) as client:
            while not self._ended.is_set():
                count += 1
                label, request_id = f"s{number}-{count}", str(uuid.uuid4())
                while label not in self.accepted:
                    try:
                        # As many GPUs as the cluster has: a job of the test holds some.
                        job = client.submit(["true"], gpus=2, name=label, request_id=request_id)
                        self.accepted[label] = (time.monotonic(), job.name)
                    except ApiError as error:
                        self.failures[error.reason] += 1
                due = max(due + self._pause_s, time.monotonic())
                self._ended.wait(due - time.monotonic())

    def count_after(self, moment: float) -> int:
        return sum(1 for when, _ in list(self.accepted.values()) if when > moment)

    def check(self, cluster: Cluster) -> None:
        """Every accepted submission is one job, and no submission is two."""
        with Client(str(cluster.master_directory)) as client:
            found = Counter(job.spec.display_name for job in client.list_jobs())
            named = {job.spec.display_name: job.name for job in client.list_jobs()}
        assert not [label for label in self.accepted if not found[label]], "submissions are lost"
        assert not [label for label, times in found.items() if times > 1], "submissions are there twice"
        assert {label: job for label, (_, job) in self.accepted.items()} == {
            label: job for label, job in named.items() if label in self.accepted
        }
