"""Checkpoints on the nodes' own disks, of gangs whose nodes do not all see the storage: when they are kept there, from
where a job may start, and which may go."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from heapq import nsmallest
from typing import Final

from ganger.cluster.refusals import Reason, Refusal
from ganger.cluster.resources import Claim
from msgspec.structs import replace

from ganger_master.core.job_model import Checkpoint, JobRecord
from ganger_master.core.node_model import Node

# The capability of a node whose daemon keeps checkpoints on its disk and fetches those of other nodes.
CAPABILITY: Final = "disk_checkpoints"
# Step and epoch, which is that of the attempt that wrote it.
_PATH: Final = re.compile(r"[a-z]+/(\d{1,18})-(\d{1,18})")
# Nodes that are named to a leader for a copy: it takes the first that can.
_CANDIDATES: Final = 3


def keeps_checkpoints(node: Node) -> bool:
    """Return whether the daemon of a node keeps checkpoints on its disk, and fetches those of other nodes."""
    return node.capabilities.get(CAPABILITY) == "yes"


def are_kept_on_nodes(nodes: Mapping[str, Node], claims: Sequence[Claim]) -> bool:
    """Return whether the checkpoints of a gang with these claims are kept on its leader's disk: not all of its nodes
    see the storage, and all can do it."""
    found = [node for claim in claims if (node := nodes.get(claim.node)) is not None]
    return not all(node.storage_proved for node in found) and all(map(keeps_checkpoints, found))


def is_gone(nodes: Mapping[str, Node], checkpoint: Checkpoint) -> bool:
    """Return whether all nodes whose disks had a checkpoint were removed from the cluster."""
    return bool(checkpoint.nodes) and not any(name in nodes for name in checkpoint.nodes)


def sources(nodes: Mapping[str, Node], names: Collection[str]) -> list[Node]:
    """Return those of the named nodes that can give a checkpoint to others now."""
    found = [nodes[name] for name in names if name in nodes]
    return [node for node in found if node.heard and not (node.lost or node.silent)]


def streams_of(nodes: Mapping[str, Node], names: Collection[str]) -> list[str]:
    """Return the addresses at which the named nodes give a checkpoint, those that can give it now first.

    A node that is away has one, too, if only an empty one: without it, a daemon would look for the checkpoint on
    storage, or take it for lost because another node does not have it."""
    there = sources(nodes, names)
    away = [nodes[name] for name in names if name in nodes and nodes[name] not in there]
    return [node.stream_address for node in (*there, *away)]


def away(nodes: Mapping[str, Node], job: JobRecord) -> Refusal | None:
    """Return why a job cannot start from its checkpoint now: no node that has it is there. None if it can, and where
    the checkpoint is gone for good: then it starts from an earlier one."""
    checkpoint = job.checkpoint
    if checkpoint is None or not checkpoint.nodes or is_gone(nodes, checkpoint) or sources(nodes, checkpoint.nodes):
        return None
    where = " and ".join(checkpoint.nodes)
    detail = (
        f"its checkpoint of step {checkpoint.step} lies on {where}, which cannot be reached: it waits for the node, or"
        f" starts from an earlier one after `ganger nodes remove {checkpoint.nodes[0]}`"
    )
    return Refusal(Reason.CHECKPOINT_AWAY, job=job.name, detail=detail)


def without_removed(nodes: Mapping[str, Node], job: JobRecord) -> JobRecord:
    """Return the job as it starts: without the checkpoints whose nodes were all removed from the cluster."""
    newest, before = job.checkpoint, job.checkpoint_before
    if before is not None and is_gone(nodes, before):
        before = None
    if newest is not None and is_gone(nodes, newest):
        newest, before = before, None
    return replace(job, checkpoint=newest, checkpoint_before=before)


def is_new_copy(job: JobRecord, path: str, node: str) -> bool:
    """Return whether a checkpoint on a node's disk is one that the job starts from, and is not known to be there."""
    return not job.state.is_finished and with_copies(job, path, [node]) is not job


def with_copies(job: JobRecord, path: str, nodes: Collection[str]) -> JobRecord:
    """Return the job with these nodes as further ones that have its checkpoint of this path; the same job if they are
    known, and for a checkpoint that it does not start from, or that lies on storage."""

    def of(checkpoint: Checkpoint | None) -> Checkpoint | None:
        if checkpoint is None or checkpoint.path != path or not checkpoint.nodes:
            return checkpoint
        more = sorted(set(nodes).difference(checkpoint.nodes))
        return replace(checkpoint, nodes=(*checkpoint.nodes, *more)) if more else checkpoint

    newest, before = of(job.checkpoint), of(job.checkpoint_before)
    if newest is job.checkpoint and before is job.checkpoint_before:
        return job
    return replace(job, checkpoint=newest, checkpoint_before=before)


def copy_candidates(nodes: Mapping[str, Node], members: Collection[str], copies: int) -> list[Node]:
    """Return nodes of which one is to keep a copy of a gang's checkpoints, besides its leader; none for one copy."""
    if copies < 2:
        return []
    # From the leader's place on, so that not all copies are on the first nodes.
    leader = next(iter(members), "")
    others = (node for name, node in nodes.items() if name not in members and keeps_checkpoints(node))
    there = (node for node in others if sources(nodes, [node.name]))
    return nsmallest(_CANDIDATES, there, key=lambda node: (node.name < leader, node.name))


def may_go(job: JobRecord, path: str, now: float, kept_s: float | None) -> bool:
    """Return whether a checkpoint on a node's disk is of no use any more; not for a path that is none.

    `kept_s`: how long those of an ended job are kept; None: for ever. Those stay that are newer than the newest
    recorded one: the master may not have recorded them yet, and the report of an attempt that was cut off may still
    come, long after the next one has begun. Older ones are copies, which the leader does not remove from other
    nodes."""
    found = _PATH.fullmatch(path)
    if found is None:
        return False
    if job.state.is_finished:
        return kept_s is not None and now > job.end_time + kept_s
    wanted = [one for one in (job.checkpoint, job.checkpoint_before) if one is not None]
    step, epoch = int(found[1]), int(found[2])
    is_older = any((epoch, step) < (one.epoch, one.step) for one in wanted)
    return path not in [one.path for one in wanted] and is_older
