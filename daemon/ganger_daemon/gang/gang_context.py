"""Facts about one gang on this node that stay the same from its start to its end, and its ways to other daemons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ganger.agent.v1 import agent_pb2, peer_pb2

from ganger_daemon.checkpoints.manifest import ShardReport
from ganger_daemon.gang.control_pages import ControlPages
from ganger_daemon.gang.desired_messages import LocalPart, local_part
from ganger_daemon.node.directories import GangPaths
from ganger_daemon.node.node_context import NodeContext

if TYPE_CHECKING:
    from ganger.agent.v1.peer_pb2_grpc import PeerServiceAsyncStub


class Peers(Protocol):
    """Calls to the daemons of other nodes."""

    async def rendezvous(self, address: str, job_uid: str, epoch: int) -> tuple[str, int]:
        """Return host and port of the ranks' rendezvous. Raises OSError."""
        ...

    async def shard_written(self, address: str, job_uid: str, epoch: int, report: ShardReport) -> bool:
        """Send the leader at `address` a report. Return whether the whole checkpoint is published by now."""
        ...

    async def switch_row(self, address: str, order: peer_pb2.SliceOrder) -> peer_pb2.SliceMember | None:
        """Send a slice order to a member of a time-slice group. Return its state after it; None without an answer."""
        ...

    def stub(self, address: str) -> PeerServiceAsyncStub:
        """Return the peer service of the daemon at `address`."""
        ...


@dataclass(frozen=True, slots=True)
class GangContext:
    """Facts that the collaborators of one gang share.

    `wake`: runs the next tick of the gang's loop at once; `write_notes`: writes the notes for the next daemon."""

    host: NodeContext
    peers: Peers
    paths: GangPaths
    part: LocalPart
    pages: ControlPages
    wake: Callable[[], None]
    write_notes: Callable[[], None]

    @classmethod
    def of(
        cls,
        host: NodeContext,
        peers: Peers,
        desired: agent_pb2.DesiredGang,
        wake: Callable[[], None],
        write_notes: Callable[[], None],
    ) -> GangContext:
        """Return the context of a desired gang. Raises DesiredInvalidError if it has no part on this node."""
        part = local_part(desired, host.node)
        paths = host.paths.of(desired.job_uid, desired.epoch)
        pages = ControlPages(paths.run, desired.epoch, part.world, part.ranks)
        return cls(host, peers, paths, part, pages, wake, write_notes)
