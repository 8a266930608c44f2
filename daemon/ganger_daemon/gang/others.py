"""Calls to the daemons of a gang's other nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ganger.agent.v1 import peer_pb2

from ganger_daemon.checkpoints.manifest import ShardReport
from ganger_daemon.gang.boundary_relay import Link, RelayMessage


class Peers(Protocol):
    async def rendezvous(self, address: str, job_uid: str, epoch: int) -> tuple[str, int]:
        """Return host and port of the ranks' rendezvous. Raises OSError."""
        ...

    async def shard_written(self, address: str, job_uid: str, epoch: int, report: ShardReport) -> bool:
        """Send the leader at `address` a report. Return whether the whole checkpoint is published by now."""
        ...

    async def switch_row(self, address: str, order: peer_pb2.RowOrder) -> peer_pb2.RowState | None:
        """Send a slice order to a member of a time-slice group. Return its state after it; None without an answer."""
        ...

    def link(self, address: str, received: Callable[[RelayMessage], None]) -> Link:
        """Return a stream of boundary points to the leader, not started yet."""
        ...
