"""A fake master that speaks the real AgentService, and real daemons under it, for tests of the daemon."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import sysconfig
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from ganger.agent.v1 import agent_pb2, agent_pb2_grpc
from ganger.injob.process_identity import user_of
from ganger.v1 import job_pb2, resources_pb2
from ganger.wire.endpoints import ensure_token, write_endpoint
from ganger.wire.errors import SessionSuperseded
from ganger.wire.revocation import Revocations
from ganger.wire.servers import bind, make_server
from ganger.wire.tls import server_credentials
from ganger_daemon.app import Daemon, DaemonSettings
from ganger_daemon.devices.virtual import VirtualSpec
from kit.certified import Authority

TINY_JOB = Path(__file__).parent / "tiny_job.py"
PATIENCE = 30.0

Observed = agent_pb2.ObservedGang
Intents = agent_pb2.Intent


@dataclass
class NodeBook:
    """What the fake master knows and wants of one node."""

    session: str = ""
    request: agent_pb2.CreateSessionRequest | None = None
    desired: dict[int, agent_pb2.DesiredGang] = field(default_factory=dict)
    version: int = 1
    observed: dict[int, agent_pb2.ObservedGang] = field(default_factory=dict)
    acknowledged: list[int] = field(default_factory=list)
    reports: int = 0
    observation: int = 0
    # Why the node is out of service, by source.
    faults: dict[str, str] = field(default_factory=dict)
    warnings: dict[int, str] = field(default_factory=dict)
    # Epochs whose spec is held back, as if there were no room for it, and those whose spec the daemon requests.
    late: set[int] = field(default_factory=set)
    missed: tuple[int, ...] = ()
    # Gangs of the parts of an observed set so far.
    parts: list[agent_pb2.ObservedGang] = field(default_factory=list)

    def wanted(self) -> list[agent_pb2.DesiredGang]:
        gangs = []
        for epoch, gang in self.desired.items():
            copy = agent_pb2.DesiredGang()
            copy.CopyFrom(gang)
            if epoch in self.late:
                copy.ClearField("spec")
            gangs.append(copy)
        return gangs


class FakeMaster(agent_pb2_grpc.AgentServiceServicer):
    """Answers at once when something changed, else holds the call."""

    def __init__(self, storage: Path) -> None:
        self.storage = storage
        self.storage_token = "the-token"
        self.nodes: dict[str, NodeBook] = {}
        self.changed = asyncio.Condition()
        self.progress: dict[int, job_pb2.Progress] = {}
        self.lost_after: float | None = None
        self.logs_kept: float | None = None
        self.revocation_list = b""
        # As a master of Ganger 0.1, which states none.
        self.wire_versions: agent_pb2.WireVersions | None = None
        # Of the next heartbeat.
        self.refusal: Exception | None = None

    def book(self, node: str) -> NodeBook:
        return self.nodes.setdefault(node, NodeBook())

    async def CreateSession(  # noqa: N802
        self, request: agent_pb2.CreateSessionRequest, context: Any
    ) -> agent_pb2.Session:
        book = self.book(request.node.removeprefix("nodes/"))
        book.session = uuid.uuid4().hex
        book.request = request
        book.observation = 0
        answer = agent_pb2.Session(session=book.session, storage=str(self.storage), storage_token=self.storage_token)
        if self.lost_after is not None:
            answer.lost_after.FromMilliseconds(int(self.lost_after * 1000))
        if self.wire_versions is not None:
            answer.wire_versions.CopyFrom(self.wire_versions)
        if self.logs_kept is not None:
            answer.log_retention.FromMilliseconds(int(self.logs_kept * 1000))
        return answer

    async def Reconcile(  # noqa: N802
        self, request: agent_pb2.ReconcileRequest, context: Any
    ) -> agent_pb2.ReconcileResponse:
        refusal, self.refusal = self.refusal, None
        if refusal is not None:
            raise refusal
        book = next((book for book in self.nodes.values() if book.session == request.session), None)
        if book is None:
            raise SessionSuperseded("another session")
        async with self.changed:
            book.reports += 1
            book.missed = tuple(request.missing_specs)
            if request.has_more:
                book.parts.extend(request.gangs)
                return agent_pb2.ReconcileResponse(observation=request.observation)
            if request.changed:
                book.observed = {gang.epoch: gang for gang in (*book.parts, *request.gangs)}
                book.parts = []
                book.faults, book.warnings = dict(request.node_faults), dict(request.device_warnings)
            book.observation = request.observation
            self.changed.notify_all()
            deadline = time.monotonic() + request.max_wait.ToTimedelta().total_seconds()
            sent = list(book.acknowledged)
            while book.version == request.desired_version and sent == book.acknowledged:
                if book.session != request.session:
                    raise SessionSuperseded("another session")
                try:
                    await asyncio.wait_for(self.changed.wait(), max(0.01, deadline - time.monotonic()))
                except TimeoutError:
                    break
            return agent_pb2.ReconcileResponse(
                revocation_list=b"" if request.revocation_digest else self.revocation_list,
                desired_version=book.version,
                changed=book.version != request.desired_version,
                gangs=book.wanted() if book.version != request.desired_version else [],
                later_specs=sorted(book.late & set(book.desired)) if book.version != request.desired_version else [],
                acknowledged_epochs=book.acknowledged,
                observation=request.observation,
            )

    async def ReportProgress(  # noqa: N802
        self, request_iterator: Any, context: Any
    ) -> agent_pb2.ReportProgressResponse:
        async for report in request_iterator:
            for gang in report.gangs:
                self.progress[gang.epoch] = gang.progress
        return agent_pb2.ReportProgressResponse()

    async def want(self, node: str, gang: agent_pb2.DesiredGang) -> None:
        async with self.changed:
            book = self.book(node)
            book.desired[gang.epoch] = gang
            book.version += 1
            self.changed.notify_all()

    async def forget(self, node: str, epoch: int, acknowledge: bool = True) -> None:
        async with self.changed:
            book = self.book(node)
            book.desired.pop(epoch, None)
            if acknowledge:
                book.acknowledged.append(epoch)
            book.version += 1
            self.changed.notify_all()

    async def until(
        self, node: str, epoch: int, holds: Callable[[agent_pb2.ObservedGang], bool], patience: float = PATIENCE
    ) -> agent_pb2.ObservedGang:
        """The first observation of a gang that satisfies; fails with the last one after `patience` seconds."""
        deadline = time.monotonic() + patience
        async with self.changed:
            while True:
                gang = self.book(node).observed.get(epoch)
                if gang is not None and holds(gang):
                    return gang
                left = deadline - time.monotonic()
                if left <= 0:
                    raise AssertionError(f"{node} epoch {epoch} never got there; last seen:\n{gang}{self._seen()}")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.changed.wait(), min(left, 0.5))

    def _seen(self) -> str:
        """Every gang, in a line: what stands in the way of one is often the end of another."""
        every = [(node, gang) for node, book in self.nodes.items() for gang in book.observed.values()]
        return "".join(
            [
                f"\n{node} epoch {gang.epoch}: {agent_pb2.ObservedGang.Phase.Name(gang.phase)} {gang.outcome}".rstrip()
                for node, gang in every
            ]
        )

    async def until_absent(self, node: str, epoch: int, patience: float = PATIENCE) -> None:
        deadline = time.monotonic() + patience
        async with self.changed:
            while epoch in self.book(node).observed:
                assert time.monotonic() < deadline, f"{node} still reports epoch {epoch}"
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.changed.wait(), 0.5)


class Cluster:
    """A fake master with its directory, and what daemons need to find it."""

    def __init__(self, directory: Path, *, certified: bool = False) -> None:
        self.directory = directory
        self.authority = Authority(directory) if certified else None
        self.storage = directory / "storage"
        self.storage.mkdir()
        (self.storage / ".ganger-token").write_text("the-token\n")
        self.master = FakeMaster(self.storage)
        self.daemons: dict[str, Daemon] = {}
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self.pids: set[int] = set()
        # Accounts of the daemons; of all jobs: their user, the Python of their commands, and where they run.
        self.accounts = "own"
        self.user, self.python, self.place = "", sys.executable, directory
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        token, token_file = ensure_token(self.directory / "master")
        own = self.authority and self.authority.issue("master", "m")
        self._server = make_server(token, revocations=None if own is None else Revocations.beside(own))
        agent_pb2_grpc.add_AgentServiceServicer_to_server(self.master, self._server)
        self.address = bind(self._server, "127.0.0.1:0", server_credentials(own) if own else None)
        await self._server.start()
        write_endpoint(self.directory / "master", self.address, token_file)

    async def stop_master(self) -> None:
        """The master goes away; what it knows and wants stays."""
        assert self._server is not None
        await self._server.stop(0)
        self._server = None

    async def daemon(self, node: str, **changes: Any) -> Daemon:
        """A daemon in this process."""
        values: dict[str, Any] = {
            "state_directory": self.directory / node,
            "master": str(self.directory / "master"),
            "node": node,
            "run_directory": self.directory / f"r-{node}",
            "virtual": VirtualSpec(4, "2x2", 4, 8 << 30, 1 << 28),
            "cgroups": "none",
            "preload": False,
            "accounts": self.accounts,
        }
        if self.authority is not None:
            values |= {"master": self.address, "tls": self.authority.issue("daemon", node)}
        values.update(changes)
        daemon = Daemon(DaemonSettings(**values))
        await daemon.start()
        self.daemons[node] = daemon
        await asyncio.wait_for(daemon.session.connected.wait(), PATIENCE)
        return daemon

    async def stop_daemon(self, node: str) -> None:
        await self.daemons.pop(node).stop()

    async def daemon_process(
        self, node: str, failpoints: str = "", program: str = "ganger.cli.main", cgroups: str = "none"
    ) -> asyncio.subprocess.Process:
        """A daemon as a process of its own. `program`: the module that runs the command."""
        self.master.book(node).session = ""
        environment = {**os.environ, "GANGER_FAILPOINTS": failpoints, "PYTHONPATH": str(TINY_JOB.parent.parent)}
        with open(self.directory / f"{node}.log", "ab") as said:  # noqa: ASYNC230
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", program, "daemon", "--state-dir", str(self.directory / node),
                "--master", str(self.directory / "master"), "--node", node,
                "--run-dir", str(self.directory / f"r-{node}"),
                "--virtual-gpus", "4", "--virtual-cores", "4", "--virtual-memory", "8G", "--virtual-gpu-memory", "256M",
                "--topology", "2x2", "--cgroups", cgroups, "--no-preload", "--accounts", self.accounts,
                env=environment,
                stderr=said,
                stdout=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
        self.processes[node] = process
        return process

    async def until_session(self, node: str) -> None:
        async with asyncio.timeout(PATIENCE):
            while not self.master.book(node).session or not self.master.book(node).reports:  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # the condition of the master has no word for it

    def member(self, node: str, ranks: list[int]) -> agent_pb2.Member:
        request = self.master.book(node).request
        assert request is not None, f"{node} has no session"
        return agent_pb2.Member(
            node=f"nodes/{node}", peer_address=request.peer_address, stream_address=request.stream_address, ranks=ranks
        )

    def gang(
        self,
        placement: dict[str, list[int]],
        node: str,
        *,
        uid: str,
        epoch: int = 1,
        sequence: int = 1,
        command: list[str] | None = None,
        steps: int = 0,
        pause: float = 0.01,
        size: int = 1024,
        mode: str = "",
        **changes: Any,
    ) -> agent_pb2.DesiredGang:
        ranks = placement[node]
        gang = agent_pb2.DesiredGang(
            job="jobs/1",
            job_uid=uid,
            epoch=epoch,
            order=agent_pb2.OrderKey(epoch=epoch, master_sequence=sequence),
            intent=Intents.INTENT_RUN,
            claim=resources_pb2.Claim(
                node=f"nodes/{node}",
                device_mask=(1 << len(ranks)) - 1,
                millicores=[1000 * len(ranks), 0],
                memory_bytes=1 << 30,
                arena_bytes=(64 << 20) * len(ranks),
                tasks=[len(ranks)],
            ),
            members=[self.member(other, numbers) for other, numbers in placement.items()],
            spec=job_pb2.JobSpec(
                command=command or [self.python, str(TINY_JOB), str(steps), str(pause), str(size), mode],
                working_directory=str(self.place),
                environment={"PATH": os.environ["PATH"]},
                roles=[resources_pb2.Role(name="worker", tasks=len(ranks), shape=resources_pb2.TaskShape(gpus=1))],
            ),
            threads=1,
            user=self.user,
        )
        if self.python != sys.executable:
            gang.spec.environment["PYTHONPATH"] = sysconfig.get_path("purelib")
        for name, value in changes.items():
            field_value = getattr(gang, name)
            if hasattr(field_value, "CopyFrom"):
                field_value.CopyFrom(value)
            else:
                setattr(gang, name, value)
        return gang

    async def close(self) -> None:
        for book in self.master.nodes.values():
            for gang in book.observed.values():
                self.pids.update(rank.pid for rank in gang.ranks)
        for daemon in list(self.daemons.values()):
            await daemon.stop()
        for process in self.processes.values():
            if process.returncode is None:
                process.kill()
                await process.wait()
        if self._server is not None:
            await self._server.stop(0)
        for pid in self.pids:
            with contextlib.suppress(OSError):
                if is_ours(pid, self.directory):
                    os.kill(pid, signal.SIGKILL)
        for socket_path in self.directory.glob("r-*/launchers/*.sock"):
            stop_launcher(socket_path)
        for socket_path in self.directory.glob("r-*/launchers/*/*.sock"):
            stop_launcher(socket_path, int(socket_path.parent.name))
        shutil.rmtree(self.directory, ignore_errors=True)


def is_ours(pid: int, directory: Path) -> bool:
    return str(directory) in Path(f"/proc/{pid}/environ").read_text(errors="replace")


def stop_launcher(socket_path: Path, uid: int | None = None) -> None:
    """Ends a launcher that this test had started, and what it still looks after."""
    from ganger.injob.launcher.client import Launcher, LauncherError

    with contextlib.suppress(LauncherError, OSError), Launcher(str(socket_path), uid=uid) as launcher:
        # by the kernel's word, as a launcher of another account may give any
        for child in launcher.list():
            if user_of(int(child["pid"])) == launcher.uid:
                os.kill(int(child["pid"]), signal.SIGKILL)
        os.kill(launcher.pid, signal.SIGTERM)


@contextlib.asynccontextmanager
async def cluster(*, certified: bool = False, base: str = "/tmp") -> AsyncIterator[Cluster]:
    """Everything in a short directory, for sockets have short names."""
    directory = Path(tempfile.mkdtemp(prefix="gd", dir=base))
    made = Cluster(directory, certified=certified)
    await made.start()
    try:
        yield made
    finally:
        await made.close()


def with_changes(gang: agent_pb2.DesiredGang, sequence: int, **changes: Any) -> agent_pb2.DesiredGang:
    """The same gang under a newer order."""
    new = agent_pb2.DesiredGang()
    new.CopyFrom(gang)
    new.order.master_sequence = sequence
    for name, value in changes.items():
        setattr(new, name, value)
    return new


def log_of(directory: Path, node: str, uid: str, rank: int, epoch: int) -> list[str]:
    """Return the lines of a log; one that is being written is none yet."""
    path = directory / node / "logs" / uid / f"rank-{rank}.{epoch}.log"
    return path.read_text().split("\n")[:-1] if path.exists() else []


def in_phase(phase: int) -> Callable[[agent_pb2.ObservedGang], bool]:
    return lambda gang: gang.phase == phase


def run(story: Callable[[Cluster], Awaitable[None]], *, certified: bool = False) -> None:
    """One story in a cluster of its own, guarded by a token or by certificates."""

    async def inside() -> None:
        async with cluster(certified=certified) as made:
            await story(made)

    asyncio.run(inside())
