"""Rules that keep a job from every place, or from a node, whatever is free there.

From every place: a gang of it that is quarantined, its partition, the limits of its owners. From a node: its partition,
a reservation, storage, the users that a daemon can switch to, failed launches, and its process image.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from ganger.cluster.fit import outside_partition
from ganger.cluster.refusals import Reason, Refusal
from ganger.cluster.resources import Claim
from ganger.protocol.gang_orders import Mechanism
from ganger.text import counted
from msgspec.structs import replace

from ganger_master.core import accounting, node_checkpoints, node_faults, reservations
from ganger_master.core.accounting import Owner
from ganger_master.core.job_model import JobRecord
from ganger_master.core.node_model import Node
from ganger_master.core.state import State

# The capability of a node with the instructions that programs may use there, in words.
_PROCESSOR: Final = "processor"
_LACKING_SHOWN: Final = 8
# Most jobs that a refusal by a limit names.
_HOLDERS_SHOWN: Final = 3


# -- of the job --------------------------------------------------------------------------------------------------------


def rules(
    state: State, job: JobRecord, gpus: int | None = None, taken: Mapping[Owner, int] = MappingProxyType({})
) -> tuple[Refusal, ...]:
    """Return what keeps the job from any place: a gang of it that runs already, its partition, or a limit.

    gpus: devices to judge by; by default those that the job requests. taken: devices that other jobs of the same change
    take, by the owner of a limit."""
    if job.uid in state.nodes.strays_of:
        return (_quarantined(state, job),)
    if job.epoch not in state.gangs and (absent := node_checkpoints.away(state.nodes, job)) is not None:
        return (absent,)
    refusal = _refusal_by_limits(state, job, job.gpus if gpus is None else gpus, taken)
    return () if refusal is None else (refusal,)


def _quarantined(state: State, job: JobRecord) -> Refusal:
    """Return the refusal of a job whose gang is quarantined: started again, the job would run twice."""
    names = sorted(state.nodes.strays_of[job.uid])
    epochs = sorted({one.epoch for name in names for one in state.nodes[name].strays if one.uid == job.uid})
    detail = (
        f"{Reason.QUARANTINED.meaning} on {', '.join(names)} (epoch {', '.join(map(str, epochs))}): an operator adopts "
        "or ends it with `ganger nodes quarantine`"
    )
    return Refusal(Reason.QUARANTINED, detail=detail, job=job.name)


def full_share(
    state: State, job: JobRecord, needed: int, taken: Mapping[Owner, int] = MappingProxyType({})
) -> tuple[Owner, int] | None:
    """Return the owner of a limit that has no room for so many devices of a job, and the limit; None if all have room.
    taken: devices that other jobs of the same change take, by owner."""
    for owner in state.owners(job) if state.limits else ():
        limit = state.limits.of(owner)
        if limit is not None and state.jobs.charges.beside(job.number, owner) + taken.get(owner, 0) + needed > limit:
            return owner, limit
    return None


def _refusal_by_limits(
    state: State, job: JobRecord, gpus: int, taken: Mapping[Owner, int] = MappingProxyType({})
) -> Refusal | None:
    """Return why a job may hold so many devices nowhere: its partition, or a limit; None if it may. taken: as in
    `full_share`."""
    if state.partitions and (refusal := refusal_by_partition(state, job, gpus)) is not None:
        return refusal
    full = full_share(state, job, gpus, taken)
    if full is None:
        return None
    owner, limit = full
    if (never := accounting.beyond(state.limits, [owner], gpus)) is not None:
        return never[1]
    held = state.jobs.charges.beside(job.number, owner) + taken.get(owner, 0)
    return accounting.full(owner, gpus, held, limit, _holders(state, job, owner))


def refusal_by_partition(state: State, job: JobRecord, gpus: int) -> Refusal | None:
    """Return why a job may not be in its partition with so many devices; None if it may."""
    # A job that has run keeps the time limit that it has.
    limit_s = None if job.start_time else job.time_limit_s
    return state.partitions.refusal(job.partition.name, job.user, state.teams.of(job.user), gpus, limit_s)


def may_never_start(state: State, job: JobRecord) -> Refusal | None:
    """Return why a waiting job may not start at all, whatever gets free, until the settings or the job change; None if
    it may. Limits do not count: they are kept where jobs are ranked."""
    return refusal_by_partition(state, job, 0) if state.partitions and job.is_waiting else None


def _holders(state: State, job: JobRecord, owner: Owner) -> str:
    """Name the jobs that hold most of the GPUs of an owner of a job: "jobs/3 (4), jobs/1 (2), 5 more jobs"."""
    charges = state.jobs.charges
    named = [f"jobs/{number} ({devices})" for number, devices in charges.largest(owner, _HOLDERS_SHOWN, job.number)]
    more = charges.jobs_of(owner) - bool(charges.of(job.number)) - len(named)
    return ", ".join([*named, counted(more, "more job")] if more else named)


# -- of a node ---------------------------------------------------------------------------------------------------------


def node_rules(state: State, job: JobRecord, claims: Sequence[Claim]) -> tuple[Refusal, ...]:
    """Return why a job may not use these nodes, whatever is free there; empty if it may."""
    refusals = []
    failed = launch_failed_on(state, job)
    source = _where_its_image_is_taken(state, job)
    for claim in claims:
        node = claim.node
        if node not in state.nodes:
            refusals.append(Refusal(Reason.NODE_GONE, node=node))
        elif job.partition.name and (outside := _outside_partition(state, job, node)) is not None:
            refusals.append(outside)
        elif _needs_disk(job) and not node_checkpoints.keeps_checkpoints(state.nodes[node]):
            refusals.append(_closed(state, job, node, Reason.STORAGE_NOT_SHARED))
        elif node in state.nodes.choosy:
            reason = _node_rule(job, state.nodes[node], failed)
            if reason is not None:
                refusals.append(_closed(state, job, node, reason))
        if source is not None and node in state.nodes and (why := cannot_restore(source, state.nodes[node])):
            detail = f"{Reason.CANNOT_RESTORE.meaning}: {why}"
            refusals.append(Refusal(Reason.CANNOT_RESTORE, node=node, job=job.name, detail=detail))
    return tuple(refusals)


def _needs_disk(job: JobRecord) -> bool:
    """Return whether a job starts from a checkpoint on a node's disk, which daemons of old cannot fetch."""
    return job.checkpoint is not None and bool(job.checkpoint.nodes)


def _outside_partition(state: State, job: JobRecord, node: str) -> Refusal | None:
    """Return the refusal of a node that is not in the job's partition. None for one that is, and where the job is
    already: it stays where it was when the settings changed."""
    gang = state.gangs.get(job.epoch)
    if (gang is not None and gang.piece(node) is not None) or node not in state.view:
        return None
    name = job.partition.name
    if state.view.topology(node).is_in(name):
        return None
    return outside_partition(node, name, job.name)


def _where_its_image_is_taken(state: State, job: JobRecord) -> Node | None:
    """Return the node of a job that continues by its process image; None for any other job."""
    gang = state.gangs.get(job.epoch) if job.capabilities.mechanism is Mechanism.IMAGE else None
    return state.nodes.get(gang.claims[0].node) if gang is not None and gang.claims else None


def cannot_restore(source: Node, node: Node) -> str:
    """Return why a node cannot restore process images that another node takes; empty if nothing is known against it."""
    if node.name == source.name:
        return ""
    images = node.capabilities.get("image", "")
    if images.startswith("none"):
        return images.removeprefix("none: ")
    return _lacks(node.capabilities.get(_PROCESSOR, ""), source.capabilities.get(_PROCESSOR, ""))


@lru_cache(maxsize=256)
def _lacks(processor: str, other: str) -> str:
    """Return which instructions of another processor one lacks, as a text; empty for none, or if that is not known."""
    lacking = sorted(set(other.split()) - set(processor.split())) if processor else []
    return f"its processor lacks {', '.join(lacking[:_LACKING_SHOWN])}" if lacking else ""


def closed_to_image(state: State, job: JobRecord) -> dict[str, str]:
    """Return the nodes that cannot restore a job's process image, and why; none for a job that has no image."""
    source = _where_its_image_is_taken(state, job)
    if source is None:
        return {}
    found = {name: cannot_restore(source, node) for name, node in state.nodes.items()}
    return {name: why for name, why in found.items() if why}


def launch_failed_on(state: State, job: JobRecord) -> Collection[str]:
    """Nodes closed to a job that could not be launched there; none where it could go nowhere else."""
    if not job.launch_failed_on:
        return ()
    failed = node_faults.failed_on(state, job)
    if not failed:
        return ()
    others = [name for name in state.nodes.choosy if _node_rule(job, state.nodes[name], ()) is not None]
    return failed if node_faults.could_go_elsewhere(state, job, [*failed, *others]) else ()


def _closed(state: State, job: JobRecord, node: str, reason: Reason) -> Refusal:
    if reason is Reason.NODE_RESERVED:
        return Refusal(reason, node=node, detail=f"{reason.meaning} ({state.nodes[node].reservation})")
    if reason is not Reason.LAUNCH_FAILED:
        return Refusal(reason, node=node, job=job.name)
    failure = node_faults.visible_to(state.jobs, state.nodes[node].launch_failure, job.user)
    detail = f"{reason.meaning}: {failure}; it waits for another node, or for `ganger uncordon {node}`"
    return Refusal(reason, node=node, detail=detail)


def _node_rule(job: JobRecord, node: Node, failed: Collection[str]) -> Reason | None:
    if node.name in failed:
        return Reason.LAUNCH_FAILED
    if node.reserved_for and job.user not in node.reserved_for:
        return Reason.NODE_RESERVED
    if job.checkpoint is not None and not job.checkpoint.nodes and not node.storage_proved:
        return Reason.STORAGE_NOT_SHARED
    if not can_become(node, job.user):
        return Reason.CANNOT_SWITCH_USER
    return None


def closed_nodes(state: State, job: JobRecord) -> dict[str, Reason]:
    """Return the nodes that a job may not use, whatever is free there, and why."""
    failed = launch_failed_on(state, job)
    found = {name: _node_rule(job, state.nodes[name], failed) for name in state.nodes.choosy}
    return {name: reason for name, reason in found.items() if reason is not None}


def shut_out(state: State, job: JobRecord, nodes: Collection[str], now: float) -> tuple[Refusal, ...]:
    """Return why a waiting job may not start on these nodes for the sake of its partition or of reservations: one
    refusal for each closed node, or one without a node for all; empty if it may start on each."""
    if (refusal := may_never_start(state, job)) is not None:
        return (replace(refusal, job=job.name),)
    if not state.reservations:
        return ()
    known = [node for name in nodes if (node := state.nodes.get(name)) is not None]
    reserved = [node.name for node in known if node.reserved_for and job.user not in node.reserved_for]
    closed = [replace(_closed(state, job, name, Reason.NODE_RESERVED), job=job.name) for name in reserved]
    return (*closed, *reservations.start_rules(state, job, set(nodes).difference(reserved), now))


def can_become(node: Node, user: str) -> bool:
    """Return whether a node runs jobs of this user, as far as the master can know: a daemon that cannot switch users
    runs all as its own, and one that does runs none as root."""
    switches, own = node.capabilities.get("switch_user", "yes"), node.capabilities.get("user", "")
    if switches == "accounts":
        return user != "root"
    return switches != "no" or not user or not own or own == user


def forbidden_nodes(state: State, job: JobRecord, now: float) -> tuple[Refusal, ...]:
    """Return why the job may not start on nodes that take gangs now: one refusal for each of these nodes."""
    reasons = closed_nodes(state, job)
    found = [_closed(state, job, name, reasons[name]) for name in sorted(reasons) if state.nodes[name].takes_gangs]
    closed = {refusal.node for refusal in found}
    reserved = {node for reservation in state.reservations.values() for node in reservation.nodes}
    open_ones = [name for name in reserved - closed if name in state.nodes and state.nodes[name].takes_gangs]
    return (*found, *reservations.start_rules(state, job, open_ones, now))
