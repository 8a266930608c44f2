"""The master as a whole: starts and stops its directory, store, writer, server and child processes. These are the
default host of job schedulers and the planner, and are started again when they die.

Where the database has leases, the master serves at once and refuses all calls until it leads.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc
from ganger import __version__, program_setup
from ganger.failpoints import Failpoints
from ganger.service_unit import ServiceManager
from ganger.wire.endpoints import EndpointError, address_for_clients, is_loopback
from ganger.wire.revocation import Revocations
from ganger.wire.tls import Renewed, server_context

from ganger_master.config import Config
from ganger_master.core.accounting import by_user
from ganger_master.core.commands import NoteEnds, NoteSlowNode, OpenStore
from ganger_master.core.leader_lease import LeaderLease, LeaseCandidate, read_again_s
from ganger_master.core.settings import CoreSettings, SlowNodes, needs_planner
from ganger_master.decision_log import recorder
from ganger_master.estimators.node_speeds import SpeedWatch
from ganger_master.policies import live_policy_named
from ganger_master.rpc import audit
from ganger_master.rpc.access import UserLimits
from ganger_master.rpc.node_selection_messages import absent_nodes
from ganger_master.rpc.server import MasterServer
from ganger_master.runtime import state_directory as retention
from ganger_master.runtime.publication import ProgressBoard
from ganger_master.runtime.state_directory import (
    DatabaseMarks,
    MasterObstacle,
    StartError,
    StateDirectory,
    check_authority,
    check_certificate,
    check_storage,
    obstacle_of,
    storage_token,
)
from ganger_master.runtime.writer import Writer
from ganger_master.store import tables
from ganger_master.store.sql import SqlStore
from ganger_master.store.tables import Problem, Store, StoreError

if TYPE_CHECKING:
    from ganger_master.metrics import MetricsServer, Snapshot

_BACKOFF_S: Final = (0.1, 0.5, 2.0, 5.0, 15.0)
# Having lived this long, a child's death is not the start of a series.
_HEALTHY_S: Final = 30.0
_GRACE_S: Final = 3.0


def _child_command(module: str, state_dir: Path, *more: str) -> tuple[str, ...]:
    """The child ends when its standard input does, so it never outlives a master that was killed."""
    return (sys.executable, "-m", module, "--state-dir", str(state_dir), *more, "--until-stdin-closes")


class SupervisedProcess:
    """One child and the task that keeps it."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = tuple(command)
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self.starts = 0

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._keep())

    async def stop(self) -> None:
        """Ends the child, by force if it does not obey."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(_GRACE_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            began = loop.time()
            self.starts += 1
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
                )
                code = await self._process.wait()
            except OSError as error:
                log.error("child cannot be started", extra={"command": self._command[2], "error": str(error)})
                code = -1
            failures = 1 if loop.time() - began >= _HEALTHY_S else failures + 1
            pause = _BACKOFF_S[min(failures, len(_BACKOFF_S)) - 1]
            log.warning("child ended", extra={"command": self._command[2], "code": code, "again_seconds": pause})
            await asyncio.sleep(pause)


log = logging.getLogger(__name__)

_STOP_GRACE_S: Final = 0.5
_HOUSEKEEPING_S: Final = 300.0
# Most bytes that the specs of finished jobs take in memory.
_FINISHED_BYTES: Final = 512 * 1024 * 1024
# Between two looks at what lies on storage.
_TIDYING_S: Final = 600.0
# Between two records of ended jobs on storage.
_NOTING_S: Final = 2.0
# Between two comparisons of nodes by the rates of their jobs.
_COMPARING_S: Final = 10.0
# Between two checks for a restore of the database.
_LOOK_S: Final = 0.2
# Rows of history forgotten in one transaction, so that commits need not wait long.
_COMPACT_ROWS: Final = 5_000


class Master:
    """One master. `start` raises StartError with a message for a person; `stop` leaves jobs running."""

    def __init__(
        self,
        config: Config,
        *,
        store: Store | None = None,
        more_handlers: Sequence[grpc.GenericRpcHandler[Any, Any]] = (),
    ) -> None:
        self.config = config
        self.address = ""
        # Where the token opens the door: the same, or with certificates one of its own, for this machine.
        self.local_address = ""
        # Where access tokens of people open the door, if they do.
        self.token_address = ""
        # Where metrics are served, if they are.
        self.metrics_url = ""
        self.token = ""
        self.progress = ProgressBoard()
        self._given_store = store
        self._more_handlers = more_handlers
        self._directory: StateDirectory | None = None
        self._beside: DatabaseMarks | None = None
        self._writer: Writer | None = None
        self._server: MasterServer | None = None
        self._metrics: MetricsServer | None = None
        # The process that places jobs.
        self._children: list[SupervisedProcess] = []
        self._housekeeping: list[asyncio.Task[None]] = []
        # Whether the policy needs a planner, and whether other masters may lead with this database.
        self._is_planned = False
        self.has_stand_bys = False

    @property
    def writer(self) -> Writer:
        assert self._writer is not None, "the master has not started"
        return self._writer

    async def start(self) -> None:
        try:
            await self._start()
        except (StoreError, EndpointError) as error:
            await self.stop()
            raise StartError(str(error), _obstacle_of(error)) from error
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        config = self.config
        self._directory = StateDirectory(config.state_dir)
        self.token = self._directory.token()
        if config.tls is not None:
            check_certificate(config.tls)
        if config.authority is not None:
            check_authority(config.authority)
        try:
            is_planned = live_policy_named(config.policy).is_planned or needs_planner(config.teams, config.partitions)
        except (KeyError, ValueError) as error:
            raise StartError(str(error.args[0]), MasterObstacle.SETTING) from error
        beside = self._beside = DatabaseMarks(config.database_path or config.state_dir / "database")
        writer = self._make_writer(beside)
        self._is_planned = is_planned
        if not self.has_stand_bys:
            await self._open(writer)
        if config.metrics:
            self._metrics = self._serve_metrics(config.metrics)
            self.metrics_url = self._metrics.url
        await self._serve(writer)
        self._directory.write_endpoint(self.local_address)
        if not self.has_stand_bys:
            await self._lead(writer, beside)

    @property
    def leads(self) -> bool:
        """Whether it has started to answer calls."""
        return bool(self._housekeeping)

    async def stand_by(self, on_leader: Callable[[str], None]) -> None:
        """Wait until this master may lead, and lead. Return at once if it does already. `on_leader` is called with the
        address of each master that leads meanwhile; empty if that is not known. Raises StartError."""
        if self.leads:
            return
        writer, beside = self.writer, self._beside
        assert beside is not None, "the master has started"
        lease_s = self.config.leader_lease_s
        holder = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex}"
        candidate = LeaseCandidate(holder, address_for_clients(self.address), lease_s)
        try:
            known: str | None = None
            while (other := await self._leader(writer, candidate, is_first=known is None)) is not None:
                if other.address != known:
                    on_leader(other.address)
                    log.info("standing by", extra={"leader": other.address, "term": other.term})
                    known = other.address
                await asyncio.sleep(read_again_s(other, lease_s))
            await self._open(writer)
        except StoreError as error:
            raise StartError(str(error), _obstacle_of(error)) from error
        await self._lead(writer, beside)

    async def _leader(self, writer: Writer, candidate: LeaseCandidate, *, is_first: bool) -> LeaderLease | None:
        """Return the lease of another master; None once this one has taken it. Raises StoreError, of a database that is
        not reached only at first."""
        while True:
            try:
                return await writer.open(candidate)
            except StoreError as error:
                if is_first or error.problem is Problem.NEWER:
                    raise
                log.warning("lease of the leader not read", extra={"error": str(error)})
            await asyncio.sleep(candidate.lease_s)

    def _make_writer(self, beside: DatabaseMarks) -> Writer:
        """Return a writer whose store is not open. Raises StoreError."""
        config, settings = self.config, _core_settings(self.config)
        store = self._given_store or SqlStore(config.database)
        self.has_stand_bys = store.has_leases
        opens = OpenStore(
            uuid.uuid4().hex,
            beside.marks(),
            # A master that leads for the first time has no file beside the database.
            must_have_marks=not config.database_url and not store.has_leases,
            is_restored=config.restored,
        )
        writer = Writer(store, settings, time.time, Failpoints(tables.FAILPOINTS), beside=beside, opens=opens)
        if self.has_stand_bys:
            writer.ownership.stand_by(None)
        self._writer = writer
        return writer

    async def _open(self, writer: Writer) -> None:
        """Take the database over, unless that is done, and start the writer on it. Raises StoreError and StartError."""
        await writer.start()
        check_storage(writer.state.counters.storage_token, _core_settings(self.config))

    async def _lead(self, writer: Writer, beside: DatabaseMarks) -> None:
        """Do what only the master that leads does, beside answering calls."""
        config = self.config
        assert self._server is not None, "it serves"
        await self._server.lead()
        if config.scheduler_host:
            self._children.append(SupervisedProcess(_child_command("ganger.scheduling.host", config.state_dir)))
        if self._is_planned and config.planner:
            # What it remembers lies beside the master's own files. Policy and pace it hears from the master.
            note = ("--note", str(config.state_dir / "planner.note"))
            command = _child_command("ganger_master.planner_process.cli", config.state_dir, *note)
            self._children.append(SupervisedProcess(command))
            writer.committed.expect_planner()
        for child in self._children:
            child.start()
        loop = asyncio.get_running_loop()
        work = [self._keep_house(), self._keep_storage(), self._note_ends(beside), self._follow_restore(beside)]
        if config.slow_nodes is not SlowNodes.IGNORE:
            work.append(self._compare_nodes())
        self._housekeeping = [loop.create_task(one) for one in work]
        log.info("master ready", extra={"address": self.address, "jobs": len(writer.committed.jobs)})
        for name, nodes in absent_nodes(writer.state):
            log.warning("partition names nodes that have not joined", extra={"partition": name, "nodes": nodes})

    async def _serve(self, writer: Writer) -> None:
        config = self.config
        self._server = MasterServer(
            writer,
            self.progress,
            token=self.token,
            listen=config.listen,
            captures=config.state_dir / recorder.DIRECTORY,
            audit=audit.AuditLog(config.state_dir / audit.FILE),
            limits=UserLimits(config.requests_per_user, config.changes_per_user, config.streams_per_user),
            tls=config.tls,
            authority=config.authority,
            checkpoints_kept_s=config.checkpoints_kept_s,
            listen_tokens=config.listen_tokens,
            has_stand_bys=self.has_stand_bys,
            revocations=None if config.tls is None else Revocations.beside(config.tls),
            more_handlers=self._more_handlers,
        )
        self.address, self.local_address = self._server.address, self._server.local_address
        self.token_address = self._server.token_address
        await self._server.start()

    def _serve_metrics(self, listen: str) -> MetricsServer:
        from ganger_master.metrics import MetricsServer, take

        def snapshot() -> Snapshot:
            daemons = self._server.agents.held if self._server is not None else 0
            return take(self.writer, daemons, time.time())

        tls = self.config.tls
        contexts = None if tls is None or is_loopback(listen) else Renewed(tls, server_context)
        return MetricsServer(listen, __version__, snapshot, asyncio.get_running_loop(), contexts)

    async def stop(self) -> None:
        """Idempotent. What was accepted is durable when it returns."""
        if self._directory is not None:
            self._directory.remove_endpoint()
        for task in self._housekeeping:
            task.cancel()
        await asyncio.gather(*self._housekeeping, return_exceptions=True)
        await asyncio.gather(*[child.stop() for child in self._children])
        if self._metrics is not None:
            # Not here: an answer that it is making waits for this loop.
            await asyncio.to_thread(self._metrics.stop)
        if self._server is not None:
            await self._server.stop(_STOP_GRACE_S)
        if self._writer is not None:
            await self._writer.close()
        if self._directory is not None:
            self._directory.close()
        self._directory = self._server = self._metrics = None
        self._children = []
        self._housekeeping = []

    async def _keep_house(self) -> None:
        """Forgets history older than the retention, and progress of jobs that are over."""
        while True:
            try:
                oldest = time.time() - self.config.events_kept_s
                forgotten = _COMPACT_ROWS
                while forgotten == _COMPACT_ROWS:
                    forgotten = await self.writer.compact(oldest, _COMPACT_ROWS)
            except StoreError as error:
                log.warning("history not compacted", extra={"error": str(error)})
            self.progress.forget(n for n, job in self.writer.committed.jobs.items() if not job.state.is_finished)
            await asyncio.sleep(_HOUSEKEEPING_S)

    async def _compare_nodes(self) -> None:
        """Report nodes on which jobs step more slowly than on others, and those on which they no longer do."""
        watch, marks = SpeedWatch(), dict[int, float]()
        while True:
            committed, samples = self.writer.committed, self.progress.newer_than(marks)
            marks |= {number: sample.time for number, sample in samples.items()}
            watch.note(samples, committed.jobs, committed.gangs, committed.nodes, committed.configuration_sets)
            for name, text in watch.news(committed.nodes).items():
                self.writer.enqueue(NoteSlowNode(name, text))
            await asyncio.sleep(_COMPARING_S)

    async def _keep_storage(self) -> None:
        """Removes what ended jobs left on storage once it has been kept for as long as was set."""
        config, committed = self.config, self.writer.committed
        kept = {retention.LOGS: config.logs_kept_s, retention.CHECKPOINTS: config.checkpoints_kept_s}
        while True:
            ends, now = retention.ends_of(committed.jobs, committed.gangs), time.time()
            try:
                await asyncio.to_thread(
                    retention.note_ended, config.storage_path, retention.known_ends(ends, committed.jobs)
                )
                for part in await asyncio.to_thread(retention.expired, config.storage_path, ends, kept, now):
                    # One by one: the master may be told to stop meanwhile.
                    await asyncio.to_thread(retention.remove, part)
                    log.info("removed from storage", extra={"path": str(part)})
            except OSError as error:
                log.warning("storage not tidied", extra={"error": str(error)})
            await asyncio.sleep(_TIDYING_S)

    async def _note_ends(self, beside: DatabaseMarks) -> None:
        """Record ended jobs on storage too: a database that is restored elsewhere has no files beside it."""
        storage = self.config.storage_path
        while True:
            ends = dict(beside.take_ended())
            if ends:
                try:
                    await asyncio.to_thread(retention.note_ended, storage, ends)
                except OSError as error:
                    log.warning("ends not noted on storage", extra={"error": str(error)})
            await asyncio.sleep(_NOTING_S)

    async def _follow_restore(self, beside: DatabaseMarks) -> None:
        """Once the database turns out to be an older copy, find which of its jobs have ended since."""
        storage, last = self.config.storage_path, None
        while True:
            restoring, state = self.writer.committed.counters.restoring, self.writer.state
            if restoring is not None and restoring is not last and state.ends is None:
                log.warning("the database was restored", extra={"why": restoring.why})
                last = restoring
                uids = frozenset(job.uid for job in self.writer.committed.jobs.values() if not job.state.is_finished)
                ends = await asyncio.to_thread(retention.noted_ends, storage, uids)
                ends |= await asyncio.to_thread(beside.ends, uids)
                self.writer.enqueue(NoteEnds(ends))
            await asyncio.sleep(_LOOK_S)


def _core_settings(config: Config) -> CoreSettings:
    names = {one.name for one in fields(CoreSettings)} & {one.name for one in fields(Config)}
    same = {name: getattr(config, name) for name in names}
    own = {"storage": str(config.storage_path), "storage_token": storage_token(config.storage_path)}
    return CoreSettings(
        **{**same, **own},
        finished_bytes_limit=_FINISHED_BYTES,
        quota_devices=by_user(config.quotas),
    )


def _obstacle_of(error: StoreError | EndpointError) -> MasterObstacle:
    found = obstacle_of(error)
    if found is MasterObstacle.RIGHTS or isinstance(error, EndpointError):
        return found
    match error.problem:
        case Problem.URL | Problem.DRIVER:
            return MasterObstacle.SETTING
        case Problem.UNREADABLE | Problem.SERVER:
            return MasterObstacle.UNREACHABLE
        case _:
            return found


class FencedError(Exception):
    """Another master has taken the store over; the text is for a person. `may_stand_by`: a master that is started again
    waits until it may lead."""

    def __init__(self, message: str, *, may_stand_by: bool) -> None:
        super().__init__(message)
        self.may_stand_by = may_stand_by


async def run(config: Config, say: Callable[[str], None]) -> bool:
    """Run a master until SIGTERM or SIGINT. Return False if it failed; its log has the reason.

    Raises StartError, and FencedError."""
    manager = ServiceManager()
    master = Master(config)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await master.start()
    asked = asyncio.create_task(stop.wait())
    failed = asyncio.create_task(master.writer.stopped.wait())
    leading = asyncio.create_task(
        master.stand_by(lambda leader: say(f"ganger master stands by at {master.address}: {leader or 'another'} leads"))
    )
    try:
        async with manager.notified():
            await asyncio.wait({asked, failed, leading}, return_when=asyncio.FIRST_COMPLETED)
            if leading.done():
                leading.result()
                program_setup.settle()
                say(f"ganger master ready at {master.address}")
                if master.token_address:
                    say(f"access tokens are taken at {master.token_address}")
                if master.metrics_url:
                    say(f"metrics at {master.metrics_url}")
                await asyncio.wait({asked, failed}, return_when=asyncio.FIRST_COMPLETED)
        if master.writer.fenced is not None:
            advice = "started again, it stands by" if master.has_stand_bys else "let one master run on a database"
            raise FencedError(f"{master.writer.fenced}; {advice}", may_stand_by=master.has_stand_bys)
        return stop.is_set()
    finally:
        for task in (asked, failed, leading):
            task.cancel()
        await asyncio.gather(leading, return_exceptions=True)
        await master.stop()
