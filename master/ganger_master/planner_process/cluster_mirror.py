"""The cluster as the master last told it: jobs in a table, nodes in a room, both as one commit left them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from ganger.cluster.capacity_index import CapacityIndex
from ganger.scheduling.view_mirror import Mirror
from ganger.v1 import scheduling_pb2
from ganger.wire import resource_names as names
from ganger.wire import times
from msgspec.structs import replace

from ganger_master.core.model import JobState
from ganger_master.planner.in_place_resize import NOTHING_UNDER_WAY, Resizing
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.terms import capacity_of
from ganger_master.policies.job_facts import Capacity
from ganger_master.rpc.live_job_messages import live_job_from_wire


class ClusterMirror:
    """`told`: the whole cluster was heard of once; before that nothing else means anything."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.table = LiveTable()
        self.told = False
        self.policy = ""
        self.plan_every_s = 0.0
        # Names of nodes that are to be emptied.
        self.draining: tuple[str, ...] = ()
        # Numbers of node sets whose newest matrix is not yet made on all their nodes.
        self.changing: frozenset[int] = frozenset()
        # None: no time slicing.
        self.quantum_s: float | None = None
        # Opportunistic migrations of a node and hour; None: the planner decides.
        self.moves_per_hour: float | None = None
        self._clock = clock
        # Of the master's clock before ours.
        self._ahead_s = 0.0
        self._mirror = Mirror()
        self._room = CapacityIndex(self._mirror.view)
        self._parts: list[scheduling_pb2.ClusterDelta] = []
        self._revisions: dict[int, int] = {}
        self._signatures: dict[int, int] = {}
        self._changed = asyncio.Event()

    @property
    def now(self) -> float:
        """By the master's clock, which all times of jobs are of."""
        return self._clock() + self._ahead_s

    @property
    def room(self) -> CapacityIndex:
        if self._room.view is not self._mirror.view:
            self._room = CapacityIndex(self._mirror.view)
        return self._room

    @property
    def capacity(self) -> Capacity:
        return self.capacity_beside(NOTHING_UNDER_WAY)

    def capacity_beside(self, resizing: Resizing) -> Capacity:
        """What there is with what changes of size under way hold."""
        return capacity_of(self._mirror.view, self.table, resizing)

    def apply(self, delta: scheduling_pb2.ClusterDelta) -> tuple[int, ...]:
        """Jobs that changed; none before the last part of a moment is there. Raises RequestInvalid for what this
        program does not know."""
        self._parts.append(delta)
        if delta.continues:
            return ()
        parts, self._parts = self._parts, []
        first = parts[0]
        if first.view.from_version == 0:
            self.table = LiveTable(quotas=dict(first.quotas))
            self._revisions.clear()
            self._signatures.clear()
        self._mirror.apply(first.view)
        changed = [self._put(job) for part in parts for job in part.jobs]
        changed.extend(self._forget(names.parse_job_name(name)) for name in first.forgotten)
        self._ahead_s = times.unix_seconds(first.time) - self._clock()
        self.policy, self.plan_every_s = first.policy, times.seconds(first.plan_every)
        self.draining = tuple([names.parse_node_name(node) for node in first.draining])
        self.changing = frozenset(map(names.parse_node_set_name, first.changing_node_sets))
        self.quantum_s = times.seconds(first.quantum) if first.HasField("quantum") else None
        self.moves_per_hour = first.moves_per_hour if first.HasField("moves_per_hour") else None
        self.told = True
        self._changed.set()
        return tuple(changed)

    def signature(self, number: int) -> int:
        """Of a live job; zero of others."""
        return self._signatures.get(number, 0)

    async def reach(self, revisions: Mapping[int, int]) -> None:
        """Until these jobs are told of at least at these revisions, or as having ended."""
        while any(self._revisions.get(number, revision) < revision for number, revision in revisions.items()):
            self._changed.clear()
            await self._changed.wait()

    def _put(self, message: scheduling_pb2.LiveJob) -> int:
        job, gang = live_job_from_wire(message)
        if job.state.is_finished:
            if job.number not in self._revisions:
                # It ended before we came: others like it may take as long.
                self.table.put(replace(job, state=JobState.PENDING), None)
            self._revisions.pop(job.number, None)
            self._signatures.pop(job.number, None)
        else:
            self._revisions[job.number] = job.revision
            self._signatures[job.number] = message.signature
        self.table.put(job, gang)
        return job.number

    def _forget(self, number: int) -> int:
        self._signatures.pop(number, None)
        if self._revisions.pop(number, None) is not None:
            self.table.forget(number)
        return number
