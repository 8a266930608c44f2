"""Gangs on nodes that the master did not start: adopted, ended by an operator, or left alone.

A quarantined gang runs on and keeps its devices, cores and memory until it ends or an operator decides. Adoption takes
it as the gang of its job, under its own epoch, by the order that its daemons obey.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from ganger.cluster.resources import Claim, exceeds, more_bandwidth
from ganger.job_state import JobState
from ganger.text import counted
from msgspec.structs import replace

from ganger_master.core import commands, events, gang_orders
from ganger_master.core.answers import Done, JobAnswer, RefusedError
from ganger_master.core.approval import level_of
from ganger_master.core.colocation import holders_on, kept_of
from ganger_master.core.commands import ObservedGang
from ganger_master.core.desired_projection import threads_of
from ganger_master.core.events import Decision
from ganger_master.core.gang_model import Gang, GangIntent, GangPhase, GangRole, ObservedPhase, Piece, StoredOrder
from ganger_master.core.job_model import JobRecord, SuspendLevel
from ganger_master.core.node_model import Stray
from ganger_master.core.state import State

# More ranges are joined, the oldest first. Epochs between them then count as skipped, too, and are not stopped.
_RANGES_MOST: Final = 64
# Nodes that a refusal names.
_NAMED: Final = 8
_SETTLED: Final = (ObservedPhase.RUNNING, ObservedPhase.PARKED)


def note_ids(state: State, next_epoch: int, next_job: int) -> None:
    """Give no id below these again, `next_epoch` of gangs and `next_job` of jobs; note those that are skipped."""
    counters = state.counters
    counters.skipped_jobs = _with_range(counters.skipped_jobs, counters.next_job, next_job)
    counters.skipped_epochs = _with_range(counters.skipped_epochs, counters.next_epoch, next_epoch)
    counters.next_job = max(counters.next_job, next_job)
    counters.next_epoch = max(counters.next_epoch, next_epoch)


def _with_range(known: tuple[tuple[int, int], ...], first: int, end: int) -> tuple[tuple[int, int], ...]:
    if end <= first:
        return known
    ranges = [*known, (first, end)]
    if len(ranges) > 1 and ranges[-2][1] == ranges[-1][0]:
        ranges[-2:] = [(ranges[-2][0], end)]
    if len(ranges) > _RANGES_MOST:
        ranges[:2] = [(ranges[0][0], ranges[1][1])]
    return tuple(ranges)


def is_skipped(state: State, epoch: int) -> bool:
    """Return whether this database never gave that epoch."""
    counters = state.counters
    return epoch >= counters.next_epoch or any(first <= epoch < end for first, end in counters.skipped_epochs)


def stray_of(observed: ObservedGang, quarantined: bool, note: str, before: Stray | None = None) -> Stray:
    """Return a node's part of a gang as a stray. `before`: as it was reported earlier; its quarantine then stands."""
    is_over = observed.phase is ObservedPhase.ENDED
    return Stray(
        **{name: getattr(observed, name) for name in _AS_REPORTED},
        device_mask=0 if is_over else observed.device_mask,
        master_sequence=before.master_sequence if before is not None else observed.master_sequence + 1,
        quarantined=quarantined if before is None else before.quarantined,
        note=note if before is None else before.note,
        newest_order=observed.newest_order or (before.newest_order if before is not None else None),
        is_ordered=before is not None and before.is_ordered,
    )


_AS_REPORTED: Final = (
    "job", "uid", "epoch", "phase", "level", "stop_step", "residue_bytes", "outcome", "kept_memory_bytes",
)  # fmt: skip


def quarantined_parts(state: State, uid: str, epoch: int) -> dict[str, Stray]:
    """Return the parts of a quarantined gang, by node; none if it is not quarantined."""
    parts: dict[str, Stray] = {}
    for name in sorted(state.nodes.strays_of.get(uid, ())):
        for stray in state.nodes[name].strays:
            if _is_gang(stray, uid, epoch) and stray.quarantined:
                parts[name] = stray
    return parts


def unknown_job(state: State, number: int) -> str:
    """Return what is known of a job whose number was given but that the database lacks: a gang of it that is in
    quarantine, or that it is lost by a restore; empty if it has just ended here."""
    there = {name for names in state.nodes.strays_of.values() for name in names}
    strays = [(name, one) for name in sorted(there) for one in state.nodes[name].strays if one.job == number]
    found = next((one for _, one in strays if one.holds_back), None)
    if found is not None:
        gang = f"{found.uid}-{found.epoch}"
        nodes = ", ".join([name for name, one in strays if _is_gang(one, found.uid, found.epoch)][:_NAMED])
        text = f"jobs/{number} is not in the database, but its gang of epoch {found.epoch} is on {nodes}"
        if found.is_ordered:
            return f"{text}, where it is being ended"
        return (
            f"{text}, in quarantine: an operator makes it a job by `ganger nodes quarantine adopt {gang}`, or ends it "
            f"by `ganger nodes quarantine end {gang}`"
        )
    if not any(first <= number < end for first, end in state.counters.skipped_jobs):
        return ""
    text = (
        f"jobs/{number} is not in the database: the copy that was restored is older than the job, or the job has ended "
        f"since; `ganger history {number}` shows what is recorded of it"
    )
    if state.counters.restoring is not None:
        text += ". Whether it runs is known once all nodes have reported: `ganger nodes` names those that have not"
    return text


def live_epochs(state: State, uid: str) -> dict[int, list[str]]:
    """Return the nodes of a job's living gangs that are quarantined or being ended by an operator, by epoch."""
    epochs: dict[int, list[str]] = {}
    for name in sorted(state.nodes.strays_of.get(uid, ())):
        for stray in state.nodes[name].strays:
            if stray.uid == uid and stray.holds_back and stray.phase is not ObservedPhase.ENDED:
                epochs.setdefault(stray.epoch, []).append(name)
    return epochs


def decide_end(state: State, command: commands.EndQuarantined, now: float) -> Decision:
    _known_parts(state, command)
    return (events.QuarantineEnded(now, f"user:{command.user}", command.uid, command.epoch),), Done()


def decide_adopt(state: State, command: commands.AdoptQuarantined, now: float) -> Decision:
    parts = _known_parts(state, command)
    refusal, number = adoption_refusal(state, parts), next(iter(parts.values())).job
    if refusal:
        text = f"epoch {command.epoch} of {command.uid} cannot be adopted: {refusal}"
        raise RefusedError("ADOPTION_REFUSED", text, {"job": f"jobs/{number}"})
    return (events.QuarantineAdopted(now, f"user:{command.user}", command.uid, command.epoch),), JobAnswer(number)


def _known_parts(state: State, command: commands.EndQuarantined | commands.AdoptQuarantined) -> dict[str, Stray]:
    uid, epoch = command.uid, command.epoch
    if parts := quarantined_parts(state, uid, epoch):
        return parts
    text = f"no gang of epoch {epoch} of {uid} is quarantined: `ganger nodes quarantine list` shows those that are"
    raise RefusedError("GANG_NOT_FOUND", text)


def adoption_refusal(state: State, parts: Mapping[str, Stray]) -> str:
    """Return why a quarantined gang of these parts cannot be adopted now; empty if it can."""
    job = _job_of(state, parts, 0.0)
    taken = job if isinstance(job, str) else adoptable_gang(state, job, next(iter(parts.values())).epoch, parts, 0.0)
    return taken if isinstance(taken, str) else ""


def end(state: State, event: events.QuarantineEnded) -> None:
    """End a quarantined gang: its nodes are ordered to stop it, and its job waits until it is gone."""
    parts = quarantined_parts(state, event.uid, event.epoch)
    for name in parts:
        node = state.nodes[name]
        strays = tuple(
            [
                replace(stray, quarantined=False, is_ordered=True) if _is_gang(stray, event.uid, event.epoch) else stray
                for stray in node.strays
            ]
        )
        state.put_node(replace(node, strays=strays))
        state.history(event.time, f"nodes/{name}", "quarantine_ended", event.cause, epoch=event.epoch, uid=event.uid)
    if all(part.phase is ObservedPhase.ENDED for part in parts.values()):
        dismiss(state, event.uid, event.epoch)


def dismiss(state: State, uid: str, epoch: int) -> None:
    """Acknowledge the parts of a gang that have ended, so that their nodes forget them."""
    for name in sorted(state.nodes.strays_of.get(uid, ())):
        node = state.nodes[name]
        left = tuple(
            [one for one in node.strays if not _is_gang(one, uid, epoch) or one.phase is not ObservedPhase.ENDED]
        )
        if left != node.strays:
            state.put_node(replace(node, strays=left, acknowledged=(*node.acknowledged, epoch)))


def _is_gang(stray: Stray, uid: str, epoch: int) -> bool:
    return (stray.uid, stray.epoch) == (uid, epoch)


def adopt(state: State, event: events.QuarantineAdopted) -> None:
    parts = quarantined_parts(state, event.uid, event.epoch)
    job = _job_of(state, parts, event.time)
    assert isinstance(job, JobRecord), "decided before"
    gang = adoptable_gang(state, job, event.epoch, parts, event.time)
    assert isinstance(gang, Gang), "decided before"
    give_gang(state, job, gang, event.time, event.cause)


def _job_of(state: State, parts: Mapping[str, Stray], now: float) -> JobRecord | str:
    """Return the job of this gang, made anew where the database does not have it; or why there can be none."""
    part = next(iter(parts.values()))
    known = state.jobs.get(part.job)
    if known is None:
        order = part.newest_order
        if order is None or order.spec is None:
            return "its daemon has not sent what it runs; wait a moment, or end it"
        if not part.job:
            return "its daemon does not name a job"
        return JobRecord(part.job, part.uid, order.user, order.spec, now, pending_since=now)
    if known.uid != part.uid:
        return f"{known.name} is another job by now; end it, and submit its job anew"
    if known.state.is_finished or known.ending is not None:
        return f"{known.name} has ended or is about to"
    if known.epoch or known.next_epoch:
        return f"{known.name} has another gang, of epoch {known.epoch or known.next_epoch}"
    return known


def adoptable_gang(state: State, job: JobRecord, epoch: int, parts: Mapping[str, Stray], now: float) -> Gang | str:
    """Return the gang that these parts make, by the newest order of its daemons; or why it cannot be adopted.

    `parts`: by node; a gang is adopted with all its parts or not at all."""
    known = state.gangs.get(epoch)
    if known is not None and known.job != job.number:
        return f"its epoch is that of another gang by now, of {state.jobs[known.job].name}"
    orders = [part.newest_order for part in parts.values() if part.newest_order is not None]
    if len(orders) < len(parts):
        return "its daemon has not sent its order; wait a moment"
    newest = max(orders, key=lambda one: one.master_sequence)
    missing = [name for name in newest.nodes if name not in parts]
    if missing or len(newest.nodes) != len(parts):
        return f"its part on {', '.join(missing) or 'another node'} is not there"
    refused = _refusal_by_order(newest, parts)
    if refused:
        return refused
    claims = tuple([_order_of(parts[name]).claim for name in newest.nodes])
    misfit = _hardware_mismatch(state, claims)
    if misfit:
        return misfit
    gang = _built(state, job, newest, [parts[name] for name in newest.nodes], claims, now)
    return _claim_conflict(state, job, gang) or gang


def give_gang(state: State, job: JobRecord, gang: Gang, now: float, cause: str) -> None:
    """Make this gang the only one of the job."""
    rests = gang.intent is GangIntent.PARK
    trouble = job.trouble
    if rests and job.state is not JobState.SUSPENDED:
        trouble = FOUND_AT_REST
    level = gang.park_level if rests else SuspendLevel.NONE
    for name in gang.nodes:
        # It may rest, so what it holds is not just its claim.
        state.dirty.rows[name] = None
    state.put_gang(gang)
    state.put_job(
        replace(
            job.with_size_of(gang.claims),
            state=JobState.SUSPENDED if rests else JobState.HOLDING,
            revision=job.revision + 1,
            pending_since=0.0,
            epoch=gang.epoch,
            next_epoch=0,
            # What it waited for has come: it was started.
            held=False,
            awaits=(),
            again_at=0.0,
            ending=None,
            running_since=0.0 if rests else job.running_since or now,
            start_time=job.start_time or now,
            suspended_level=level if gang.phase is GangPhase.PARKED else SuspendLevel.NONE,
            trouble=trouble,
        )
    )
    state.counters.next_job = max(state.counters.next_job, job.number + 1)
    state.dirty.jobs[job.number] = None
    for name in gang.nodes:
        node = state.nodes[name]
        strays = tuple([stray for stray in node.strays if not _is_gang(stray, job.uid, gang.epoch)])
        state.put_node(replace(node, strays=strays))
    state.history(now, job, "gang_adopted", cause, epoch=gang.epoch, nodes=" ".join(gang.nodes))


def _refusal_by_order(newest: StoredOrder, parts: Mapping[str, Stray]) -> str:
    if any(_order_of(part).is_sliced for part in parts.values()):
        return "it is time-sliced with other jobs on its devices"
    if newest.intent not in (GangIntent.RUN, GangIntent.PARK, GangIntent.HAND_OVER):
        return f"it was ordered to {newest.intent.value.lower()}"
    if newest.restore.parked_epoch and any(part.phase not in _SETTLED for part in parts.values()):
        return f"it still takes its state from epoch {newest.restore.parked_epoch}; wait until it steps"
    if any(part.phase in (ObservedPhase.ENDED, ObservedPhase.NONE) for part in parts.values()):
        return "a part of it has ended"
    return ""


def _hardware_mismatch(state: State, claims: Sequence[Claim]) -> str:
    for claim in claims:
        kind = state.nodes.configuration_sets[state.nodes[claim.node].configuration_set]
        if claim.device_mask >> kind.devices or len(claim.millicores) > len(kind.sockets):
            return f"nodes/{claim.node} has other hardware by now"
    return ""


def _claim_conflict(state: State, job: JobRecord, gang: Gang) -> str:
    """Return why the pieces of a gang (less than its claims if it is parked) cannot be claimed; empty if they can."""
    if not job.spec.accepts(gang.devices):
        return f"it has {counted(gang.devices, 'device')}, which {job.name} does not accept"
    for claim in gang.held:
        kind = state.nodes.configuration_sets[state.nodes[claim.node].configuration_set]
        held = state.gangs.held_on(claim.node)
        if any(claim.device_mask & other.device_mask & ~(claim.shared_mask & other.shared_mask) for other in held):
            return f"another gang is given a device of it on nodes/{claim.node}"
        other = _other_on(state, job, claim)
        if other is not None:
            return f"epoch {other.epoch} of {other.uid}, quarantined too, has a device of it on nodes/{claim.node}"
        for index, socket in enumerate(kind.sockets[: len(claim.millicores)]):
            others = sum([other.millicores[index] for other in held if index < len(other.millicores)])
            if others + claim.millicores[index] > socket.millicores:
                return f"cores of it are given to others on nodes/{claim.node}"
        memory = sum([other.memory_bytes + other.arena_bytes for other in held])
        if memory + claim.memory_bytes + claim.arena_bytes > kind.free_memory_bytes:
            return f"memory of it is given to others on nodes/{claim.node}"
        bandwidth = claim.bandwidth
        for beside in held:
            bandwidth = more_bandwidth(bandwidth, beside.bandwidth)
        if claim.bandwidth and exceeds(bandwidth, kind.bandwidth):
            return f"disk or network bandwidth of it is given to others on nodes/{claim.node}"
        device = _crowded_device(state, job, claim)
        if device is not None:
            return f"device {device} of nodes/{claim.node} has no room for it beside what others keep there"
    return ""


def _crowded_device(state: State, job: JobRecord, claim: Claim) -> int | None:
    """Return a device whose memory is too small for what gangs at rest keep there and what another gang needs."""
    whole = state.nodes.configuration_sets[state.nodes[claim.node].configuration_set].device_memory_bytes
    at_rest = [one.parked_bytes for one in [*state.gangs.held_on(claim.node), claim] if one.parked_bytes]
    if not at_rest or not whole:
        return None
    holders = [*holders_on(state, claim.node), (job.number, claim)]
    specs = {**{number: state.jobs[number].spec for number, _ in holders[:-1]}, job.number: job.spec}
    for device, kept_bytes in enumerate(map(sum, zip(*at_rest, strict=True))):
        needed = [specs[number].gpu_memory_bytes for number, one in holders if one.device_mask >> device & 1]
        if any(one and one + kept_bytes > whole for one in needed):
            return device
    return None


def _other_on(state: State, job: JobRecord, claim: Claim) -> Stray | None:
    """Return a gang of another job that has a device of the claim, does not share it, and is quarantined or about to be
    ended by an operator."""
    for stray in state.nodes[claim.node].strays:
        if stray.phase is ObservedPhase.PARKED and stray.level is SuspendLevel.OFFLOAD:
            continue
        shared = stray.newest_order.claim.shared_mask if stray.newest_order is not None else 0
        overlap = stray.device_mask & claim.device_mask & ~(shared & claim.shared_mask)
        if stray.holds_back and stray.uid != job.uid and overlap:
            return stray
    return None


def _built(
    state: State, job: JobRecord, newest: StoredOrder, parts: Sequence[Stray], claims: Sequence[Claim], now: float
) -> Gang:
    version = state.next_desired_version
    gang = Gang(
        epoch=parts[0].epoch,
        job=job.number,
        role=GangRole.ACTIVE,
        phase=GangPhase.STARTING,
        pieces=tuple(
            [
                _piece(state, job, part, claim, newest.stop_sequence, version)
                for part, claim in zip(parts, claims, strict=True)
            ]
        ),
        level=level_of(state, claims),
        create_time=now,
        master_sequence=newest.master_sequence,
        restore=newest.restore,
        threads=newest.threads or threads_of(claims),
        checkpoint_request=newest.checkpoint_request,
        repin_request=newest.repin_request,
        stepped=any(part.phase in _SETTLED for part in parts),
        since=now,
    )
    if newest.intent is GangIntent.PARK:
        parked = replace(
            gang,
            intent=GangIntent.PARK,
            phase=GangPhase.STOPPING,
            park_level=newest.level,
            stop_sequence=newest.stop_sequence or newest.master_sequence,
        )
        rests = all(part.phase is ObservedPhase.PARKED and part.level >= newest.level for part in parts)
        gang = gang_orders.rested(parked, now) if rests and len({part.stop_step for part in parts}) == 1 else parked
    elif newest.intent is GangIntent.HAND_OVER:
        # The move it is the source of is not committed: it runs on.
        gang = gang_orders.run(gang, now)
    if len({_order_of(part).master_sequence for part in parts}) > 1:
        # Some nodes have not received the newest order: send it to all.
        gang = gang_orders.begin_anew(gang)
    return gang


def _piece(state: State, job: JobRecord, part: Stray, claim: Claim, stop_sequence: int, version: int) -> Piece:
    is_parked = part.phase is ObservedPhase.PARKED
    is_offloaded = is_parked and part.level is SuspendLevel.OFFLOAD
    return Piece(
        claim=claim,
        held=claim,
        phase=part.phase,
        level=part.level,
        master_sequence=_order_of(part).master_sequence,
        stop_sequence=stop_sequence if is_parked else 0,
        stop_step=part.stop_step,
        kept_memory_bytes=part.kept_memory_bytes if is_offloaded else 0,
        wanted_from=version,
        residue_bytes=(kept_of(state, claim, job.spec.gpu_memory_bytes, part.residue_bytes) if is_offloaded else ()),
    )


def _order_of(part: Stray) -> StoredOrder:
    assert part.newest_order is not None, "looked at before"
    return part.newest_order


# Why a job is suspended although no user has suspended it.
END_UNKNOWN: Final = (
    "the database was restored from a backup, and what became of the job since is not known: `ganger resume` runs it "
    "(again), `ganger cancel` ends it"
)


FOUND_AT_REST: Final = "it was found at rest after a restore of the database: `ganger resume` lets it go on"
