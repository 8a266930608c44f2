"""Hollow nodes: the calls that daemons make to their master, of nodes that run nothing.

Each node holds its `Reconcile` call, reports a gang as running as soon as it receives the order to start it, and as
done when its time is over. For the master and all that it serves they are daemons.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import grpc.aio
from ganger.agent.v1 import agent_pb2, agent_pb2_grpc
from ganger.wire import resource_messages as convert
from ganger.wire import times

from benchmarks import master_server as server

_OPENED_AT_ONCE: Final = 50
_PROGRESS_S: Final = 1.0
_STEPS_PER_S: Final = 10.0


@dataclass
class _HollowNode:
    """What one daemon would know. `gangs`: as last reported; `ends_s`: when running ones are done."""

    name: str
    stub: Any
    session: str = ""
    observation: int = 0
    desired_version: int = 0
    gangs: dict[int, agent_pb2.ObservedGang] = field(default_factory=dict)
    began_s: dict[int, float] = field(default_factory=dict)
    ends_s: dict[int, float] = field(default_factory=dict)

    def request(self, changed: bool, wait_s: float) -> agent_pb2.ReconcileRequest:
        self.observation += changed
        return agent_pb2.ReconcileRequest(
            session=self.session,
            observation=self.observation,
            desired_version=self.desired_version,
            changed=changed,
            gangs=self.gangs.values() if changed else (),
            max_wait=times.duration(wait_s),
            storage_proved=True,
        )

    def obey(self, response: agent_pb2.ReconcileResponse, runs_s: float) -> tuple[list[str], bool]:
        """Carry the orders out; return the names of the jobs whose gangs start, and whether anything has changed."""
        for epoch in response.acknowledged_epochs:
            self.gangs.pop(epoch, None)
        if not response.changed:
            return [], False
        self.desired_version = response.desired_version
        begun, changed, now_s = [], False, time.monotonic()
        for gang in response.gangs:
            there = self.gangs.get(gang.epoch)
            if there is None:
                begun.append(gang.job)
                self.gangs[gang.epoch] = _running(gang)
                self.began_s[gang.epoch], self.ends_s[gang.epoch] = now_s, now_s + runs_s
            elif gang.intent == agent_pb2.INTENT_STOP:
                changed |= self._end(gang.epoch, agent_pb2.Outcome.KIND_STOPPED)
            elif there.order != gang.order:
                there.order.CopyFrom(gang.order)
                there.claim_device_mask = gang.claim.device_mask
                changed = True
        return begun, changed or bool(begun)

    def end_due(self) -> list[str]:
        """End the gangs whose time is over; return the names of their jobs."""
        now_s = time.monotonic()
        due = [epoch for epoch, end_s in self.ends_s.items() if end_s <= now_s]
        return [self.gangs[epoch].job for epoch in due if self._end(epoch, agent_pb2.Outcome.KIND_DONE)]

    def _end(self, epoch: int, kind: agent_pb2.Outcome.Kind.ValueType) -> bool:
        if self.ends_s.pop(epoch, None) is None:
            return False
        del self.began_s[epoch]
        self.gangs[epoch].phase = agent_pb2.ObservedGang.PHASE_ENDED
        self.gangs[epoch].outcome.CopyFrom(agent_pb2.Outcome(kind=kind))
        return True

    def progress(self) -> agent_pb2.ProgressReport:
        now_s, report = time.monotonic(), agent_pb2.ProgressReport(session=self.session)
        for epoch, began_s in self.began_s.items():
            gang = report.gangs.add(job=self.gangs[epoch].job, epoch=epoch)
            gang.progress.step = int(_STEPS_PER_S * (now_s - began_s))
            gang.progress.steps_per_s, gang.progress.loss = _STEPS_PER_S, math.nan
            gang.progress.time.CopyFrom(times.timestamp(time.time()))
        return report


def _running(gang: agent_pb2.DesiredGang) -> agent_pb2.ObservedGang:
    return agent_pb2.ObservedGang(
        job=gang.job,
        job_uid=gang.job_uid,
        epoch=gang.epoch,
        order=gang.order,
        phase=agent_pb2.ObservedGang.PHASE_RUNNING,
        ranks=[agent_pb2.ObservedRank(rank=rank, pid=1, start_ticks=1) for rank in gang.members[0].ranks],
        claim_device_mask=gang.claim.device_mask,
        capabilities_presumed=True,
    )


class HollowNodes:
    """Nodes of eight GPUs, one for each of `channels`, which may hold a channel several times.

    Gangs run for `runs_s` seconds on one node. `wait_s`: how long a call is held. `started`, `ended`: called with the
    name of each job whose gang starts and is done. `reports`: whether the progress of gangs is reported each second."""

    def __init__(
        self,
        channels: Iterable[grpc.aio.Channel],
        *,
        wait_s: float,
        runs_s: float = math.inf,
        started: Callable[[str], None],
        ended: Callable[[str], None] = lambda job: None,
        reports: bool = False,
    ) -> None:
        self._nodes = [
            _HollowNode(f"n{number:05}", agent_pb2_grpc.AgentServiceStub(channel))
            for number, channel in enumerate(channels)
        ]
        self._wait_s, self._runs_s, self._reports = wait_s, runs_s, reports
        self._started, self._ended = started, ended

    async def join(self) -> None:
        """Open the sessions of all nodes, and report each as idle."""
        waiting, token = iter(self._nodes), ""

        async def join() -> None:
            nonlocal token
            for node in waiting:
                if not token:
                    # The first session brings the token of the storage that all nodes are to prove.
                    token = (await node.stub.CreateSession(_description(node.name))).storage_token
                node.session = (await node.stub.CreateSession(_description(node.name, token))).session
                first = await node.stub.Reconcile(node.request(changed=True, wait_s=self._wait_s))
                node.desired_version = first.desired_version

        await asyncio.gather(*(join() for _ in range(_OPENED_AT_ONCE)))

    def serve(self) -> Iterator[Awaitable[None]]:
        """Return what serves each node until it is cancelled. Raises AioRpcError where the master refuses a node."""
        for node in self._nodes:
            yield self._serve(node)
            if self._reports:
                yield self._report(node)

    async def _serve(self, node: _HollowNode) -> None:
        changed = False
        while True:
            call = node.stub.Reconcile(node.request(changed, self._wait_s))
            answered = asyncio.ensure_future(call)
            due_s = min(node.ends_s.values(), default=math.inf) - time.monotonic()
            await asyncio.wait([answered], timeout=None if due_s == math.inf else max(0.0, due_s))
            if not answered.done():
                # As a daemon does with news of its own: a set whose call was cancelled is sent again.
                call.cancel()
                await asyncio.gather(answered, return_exceptions=True)
                for job in node.end_due():
                    self._ended(job)
                changed = True
                continue
            begun, changed = node.obey(answered.result(), self._runs_s)
            for job in begun:
                self._started(job)

    async def _report(self, node: _HollowNode) -> None:
        async def reports() -> AsyncIterator[agent_pb2.ProgressReport]:
            while True:
                await asyncio.sleep(_PROGRESS_S)
                if node.began_s:
                    yield node.progress()

        await node.stub.ReportProgress(reports())


def _description(node: str, storage_token: str = "") -> agent_pb2.CreateSessionRequest:
    return agent_pb2.CreateSessionRequest(
        node=f"nodes/{node}",
        machine_uuid=f"machine-{node}",
        boot_id="boot",
        configuration_set=convert.configuration_set_to_wire(server.configuration_set()),
        rack=f"r{int(node[1:]) // 32}",
        peer_address="127.0.0.1:1",
        stream_address="127.0.0.1:1",
        capabilities={"virtual_devices": "true"},
        version="bench",
        storage_token=storage_token,
    )
