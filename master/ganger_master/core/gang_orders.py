"""Orders to gangs, and the desired state of each node that follows from them.

Every change of a gang's desired state raises its master sequence; a stop keeps its own. The source of a move stays
parked until the new gang has stepped; until then the job can go back to it.

The desired state of a node is a pure projection of the state, made once per batch for the nodes that were touched. Its
version rises exactly when its set changes; versions are drawn from one counter, so that nothing of a node must become
durable for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ganger.cluster.resources import Claim, LocalityLevel
from ganger.job_state import JobState
from ganger.protocol.gang_orders import Mechanism
from ganger.protocol.stop_rules import EPOCH_BIT, stops_at_epoch_end
from msgspec.structs import replace

from ganger_master.core.commands import ObservedGang
from ganger_master.core.desired_projection import (
    DesiredGang,
    DesiredSet,
    DesiredSlices,
    GangMember,
    Party,
    Projected,
    threads_of,
)
from ganger_master.core.gang_model import Gang, GangIntent, GangPhase, GangRole, ObservedPhase, Piece, Restore
from ganger_master.core.job_model import JobRecord, SuspendLevel, starting_anew
from ganger_master.core.lifecycle import GangObservation, observation_of
from ganger_master.core.node_checkpoints import are_kept_on_nodes
from ganger_master.core.node_model import Node, Stray
from ganger_master.core.state import State


def new_gang(
    state: State, job: int, claims: Sequence[Claim], level: LocalityLevel, now: float, role: GangRole, restore: Restore
) -> Gang:
    """A gang of a new epoch that runs at once, or prepares to as the destination of a move."""
    moving, version = role is GangRole.DESTINATION, state.next_desired_version
    return Gang(
        epoch=state.take_epoch(),
        job=job,
        role=role,
        phase=GangPhase.MOVING if moving else GangPhase.STARTING,
        pieces=tuple([Piece(claim, claim, wanted_from=version) for claim in claims]),
        level=level,
        create_time=now,
        intent=GangIntent.PREPARE if moving else GangIntent.RUN,
        restore=restore,
        threads=threads_of(claims),
        since=now,
        on_nodes=are_kept_on_nodes(state.nodes, claims),
    )


def run(gang: Gang, now: float) -> Gang:
    """Running needs no agreement: it cancels a stop at any time."""
    was_going = gang.phase in (GangPhase.MOVING, GangPhase.RESIZING)
    phase = GangPhase.RUNNING if gang.stepped and was_going else GangPhase.STARTING
    return _order(
        replace(
            gang,
            role=GangRole.ACTIVE,
            intent=GangIntent.RUN,
            park_level=SuspendLevel.NONE,
            stop_sequence=0,
            stop_step=0,
            rested_level=SuspendLevel.NONE,
            phase=phase,
            parked_by_plan=False,
            stops_at_epoch_end=False,
            # A report from before the order does not cover the steps after it.
            pieces=tuple(_not_parked(piece) for piece in gang.pieces),
            since=now,
            idle=None,
        )
    )


def park(gang: Gang, level: SuspendLevel, now: float, by_plan: bool, at_epoch_end: bool = False) -> Gang:
    """Order a gang to park at a level; during a stop, only the level changes. `at_epoch_end`: ranks that report epochs
    go on to the end of theirs."""
    sequence = gang.master_sequence + 1
    gang = replace(gang, stops_at_epoch_end=at_epoch_end)
    return replace(
        gang,
        master_sequence=sequence,
        intent=GangIntent.PARK,
        park_level=level,
        phase=GangPhase.STOPPING,
        stop_sequence=_stop_sequence(gang, sequence),
        parked_by_plan=by_plan,
        since=now,
        idle=None,
    )


def hand_over(gang: Gang) -> Gang:
    phase = GangPhase.RESIZING if gang.phase is GangPhase.RESIZING else GangPhase.MOVING
    ordered = _order(replace(gang, intent=GangIntent.HAND_OVER, phase=phase))
    return replace(ordered, stop_sequence=_stop_sequence(gang, ordered.master_sequence))


def waits_for_epoch(job: JobRecord, cause: str) -> bool:
    """Return whether a move or resize of a job by this cause waits for the end of an epoch: a user's does not."""
    return job.spec.is_scheduled_at_epochs and not cause.startswith("user:")


def _stop_sequence_of_end(gang: Gang) -> int:
    is_at_epoch_end = stops_at_epoch_end(gang.stop_sequence) and gang.phase is not GangPhase.PARKED
    return 0 if is_at_epoch_end else gang.stop_sequence


def _stop_sequence(gang: Gang, sequence: int) -> int:
    """Return the number of the agreement of an order with this sequence. One at the end of an epoch is another than one
    at the next boundary: ranks may be past the step of the former."""
    bit = EPOCH_BIT if gang.stops_at_epoch_end else 0
    known = gang.stop_sequence
    if known and (gang.phase is GangPhase.PARKED or known & EPOCH_BIT == bit):
        return known
    return sequence | bit


def stop(gang: Gang, now: float, checkpoint_first: bool = False) -> Gang:
    """Stop a gang wherever it still is. Stopping it again changes nothing."""
    if gang.intent is GangIntent.STOP:
        return gang
    return replace(
        gang,
        master_sequence=gang.master_sequence + 1,
        role=GangRole.LEAVING,
        intent=GangIntent.STOP,
        phase=GangPhase.STOPPING,
        # An end waits for no epoch.
        stop_sequence=_stop_sequence_of_end(gang),
        stops_at_epoch_end=False,
        checkpoint_first=checkpoint_first,
        since=now,
    )


def retune(gang: Gang, claims: Sequence[Claim], repin: bool) -> Gang:
    pieces = tuple(replace(piece, claim=claim, held=claim) for piece, claim in zip(gang.pieces, claims, strict=True))
    requests = gang.repin_request + 1 if repin else gang.repin_request
    return _order(replace(gang, pieces=pieces, threads=threads_of(claims), repin_request=requests))


def reserve(gang: Gang, claims: Sequence[Claim]) -> Gang:
    """More host memory for its arenas: the limit rises, nothing else changes."""
    pieces = tuple(
        replace(piece, claim=claim, held=claim if piece.held is not None else None)
        for piece, claim in zip(gang.pieces, claims, strict=True)
    )
    return _order(replace(gang, pieces=pieces))


def let_in(gang: Gang, newcomer: Claim) -> Gang:
    """Mark the devices that a newcomer shares; its daemon gets a new order."""
    pieces = tuple(
        [shared(piece, newcomer.device_mask) if piece.claim.node == newcomer.node else piece for piece in gang.pieces]
    )
    return gang if pieces == gang.pieces else _order(replace(gang, pieces=pieces))


def marked(gang: Gang, node: str, mask: int) -> Gang:
    """Mark these of its devices on a node as shared, and no others.

    Its daemon needs no new order: a gang that comes to an unmarked device waits until that is free."""

    def of(piece: Piece) -> Piece:
        if piece.claim.node != node:
            return piece
        held = piece.held
        if held is not None:
            held = replace(held, shared_mask=held.shared_mask & mask)
        return replace(piece, claim=replace(piece.claim, shared_mask=mask), held=held)

    return replace(gang, pieces=tuple([of(piece) for piece in gang.pieces]))


def shared(piece: Piece, mask: int) -> Piece:
    """Return the part with those of its devices that are in the mask marked as shared, too."""
    held = piece.held
    return replace(piece, claim=_marked(piece.claim, mask), held=None if held is None else _marked(held, mask))


def _marked(claim: Claim, mask: int) -> Claim:
    return replace(claim, shared_mask=claim.shared_mask | claim.device_mask & mask)


def rested(gang: Gang, now: float) -> Gang:
    """All parts rest: OFFLOAD gives up devices and cores, keeps the memory that its processes use and their arenas, and
    what cannot be freed of the devices. What rested so before keeps what it kept."""
    pieces = gang.pieces
    if gang.park_level is SuspendLevel.OFFLOAD:
        pieces = tuple(
            piece if _has_given_up(piece) else replace(piece, held=kept_offloaded(gang, piece)) for piece in pieces
        )
    step = pieces[0].stop_step
    return replace(gang, pieces=pieces, phase=GangPhase.PARKED, rested_level=gang.park_level, stop_step=step, since=now)


def kept_offloaded(gang: Gang, piece: Piece) -> Claim:
    cores = (0,) * len(piece.claim.millicores)
    memory = min(piece.claim.memory_bytes, piece.kept_memory_bytes or piece.claim.memory_bytes)
    kept = replace(piece.claim, device_mask=0, millicores=cores, shared_mask=0, memory_bytes=memory)
    # A time-sliced gang goes on without a request.
    bandwidth = piece.claim.bandwidth if gang.node_set else ()
    return replace(kept, parked_bytes=piece.residue_bytes, bandwidth=bandwidth)


def _has_given_up(piece: Piece) -> bool:
    held = piece.held
    return held is None or (held != piece.claim and not held.device_mask and not any(held.millicores))


def begin_anew(gang: Gang) -> Gang:
    """Give a gang a new order that voids orders given on its nodes since the last one."""
    return _order(gang)


def has_given_up(gang: Gang) -> bool:
    """Return whether other gangs may hold its devices: it was parked in host memory, and has had no order to run since.

    That stays so while it goes to another level, or fails to."""
    return gang.rested_level is SuspendLevel.OFFLOAD


def holding(gang: Gang, claims: Sequence[Claim]) -> Gang:
    """Let a gang hold these claims (again), except parts that have ended."""
    pieces = tuple(
        replace(piece, claim=claim, held=None if piece.gone else claim)
        for piece, claim in zip(gang.pieces, claims, strict=True)
    )
    return replace(gang, pieces=pieces, threads=threads_of(claims))


def holds_nothing(gang: Gang) -> bool:
    return all(piece.held is None for piece in gang.pieces)


def is_over(gang: Gang) -> bool:
    """Return whether nothing is left of it anywhere, nor on a node that may come back with it."""
    return all(piece.gone and piece.held is None and not piece.lost for piece in gang.pieces)


def holds_devices(gang: Gang) -> bool:
    """Return whether it still holds its whole placement."""
    return all(piece.held == piece.claim for piece in gang.pieces)


def same_place(one: Sequence[Claim], other: Sequence[Claim]) -> bool:
    """Same nodes, devices and tasks: what is parked on one can run on the other without moving."""
    return [(c.node, c.device_mask, c.tasks) for c in one] == [(c.node, c.device_mask, c.tasks) for c in other]


def _order(gang: Gang) -> Gang:
    return replace(gang, master_sequence=gang.master_sequence + 1)


def _not_parked(piece: Piece) -> Piece:
    if piece.idle_since:
        piece = replace(piece, idle_since=0.0)
    if piece.phase in (ObservedPhase.PARKED, ObservedPhase.READY, ObservedPhase.STOPPING):
        return replace(piece, phase=ObservedPhase.STARTING)
    return piece


def go_on_elsewhere(
    state: State, job: JobRecord, source: Gang, claims: Sequence[Claim], level: LocalityLevel, now: float
) -> int:
    """Prepare a destination that takes its state from `source`, or is started once the script there has saved itself;
    return its epoch, which is not active yet."""
    restore = Restore(
        parked_epoch=source.epoch,
        step=source.stop_step,
        peak_device_bytes=job.peak_device_bytes,
        is_process_image=job.capabilities.mechanism is Mechanism.IMAGE,
    )
    if job.saves_itself:
        restore = Restore()
    destination = new_gang(state, job.number, claims, level, now, GangRole.DESTINATION, restore)
    # A script that saves itself begins anew there.
    state.put_gang(replace(destination, attempt=job.attempt + job.saves_itself))
    state.put_job(replace(job, next_epoch=destination.epoch))
    return destination.epoch


def go_back(state: State, job: JobRecord, source: Gang, now: float, cause: str) -> None:
    """Run the parked source again, as a newer epoch: the move failed after its commit."""
    job = starting_anew(replace(job, state=JobState.HOLDING))
    state.put_gang(replace(source, pieces=tuple([replace(piece, held=None) for piece in source.pieces])))
    source = state.gangs[source.epoch]
    epoch = go_on_elsewhere(state, job, source, source.claims, source.level, now)
    state.history(now, job, "move_back", cause, epoch=epoch, source=source.epoch)


def reap(state: State, job: JobRecord, now: float) -> bool:
    """Stop the sources of a job whose new gang has stepped; return whether there were any."""
    sources = [other for other in state.gangs.of_job(job.number) if other.role is GangRole.SOURCE]
    for source in sources:
        state.put_gang(stop(source, now))
    return bool(sources)


def is_usable(gang: Gang) -> bool:
    """Return whether a job whose new gang has failed can continue from this one."""
    return (
        gang.role is GangRole.SOURCE
        and gang.phase is GangPhase.PARKED
        and observation_of(gang) is GangObservation.PARKED
    )


def is_superseded(state: State, gang: Gang) -> bool:
    """Return whether a newer epoch of the job was committed: then this gang may be read, but never run."""
    return state.jobs[gang.job].moved_from >= gang.epoch


def has_two_worlds(state: State, number: int) -> bool:
    """Return whether an elastic job has two worlds, also while the old one is only stopping. Only one of them holds
    their common devices, so a gang that joined those would not be known to the other."""
    return any(one.resizes and one.restore.parked_epoch in state.gangs for one in state.gangs.of_job(number))


def can_go_back(gang: Gang) -> bool:
    """Return whether a source that was ordered to park or to hand over can run on: it has given nothing up yet."""
    return gang.intent in (GangIntent.RUN, GangIntent.HAND_OVER) or gang.phase is not GangPhase.PARKED


def project_node(state: State, node: Node, version: int = 0) -> DesiredSet:
    """Return the gangs that the node is to have now, by epoch, and the strays that it is to stop.

    During a restore the set is empty and of version zero, with which a daemon begins: it changes nothing then."""
    if state.counters.restoring is not None:
        report = state.reports.get(node.name)
        state.desired.projected[node.name] = {}
        return DesiredSet(describe=() if report is None else undescribed(report.report.gangs))
    known = state.desired.projected.get(node.name, {})
    fresh: dict[int, Projected] = {}
    for epoch, place in state.gangs.places_on.get(node.name, {}).items():
        gang = state.gangs[epoch]
        piece = gang.pieces[place]
        # A lost piece counts as gone for its job, but is to be stopped should the node come back.
        if not piece.gone or piece.lost:
            party, before = party_of(state, gang), known.get(epoch)
            fresh[epoch] = before if before is not None and before.party is party else Projected(party, place)
    state.desired.projected[node.name] = fresh
    strays = [_desired_stray(state, node.name, stray) for stray in node.strays if not stray.quarantined]
    describe = tuple(
        [
            stray.epoch
            for stray in node.strays
            if stray.quarantined and stray.newest_order is None and stray.phase is not ObservedPhase.ENDED
        ]
    )
    rows = rows_on(state, node.name)
    return DesiredSet(version, tuple(fresh.values()), node.acknowledged, tuple(strays), rows, describe)


def undescribed(gangs: Iterable[ObservedGang]) -> tuple[int, ...]:
    """Return the epochs of living gangs whose orders the daemon has not sent yet."""
    return tuple(
        sorted({gang.epoch for gang in gangs if gang.newest_order is None and gang.phase is not ObservedPhase.ENDED})
    )


def rows_on(state: State, node: str) -> tuple[DesiredSlices, ...]:
    """Return the slice matrices of a node: that of the one group it is in."""
    number = state.gangs.set_on.get(node)
    if number is None:
        return ()
    node_set = state.gangs.sets[number]
    others = [name for name in node_set.nodes if name != node_set.leader]
    members = []
    for name in (node_set.leader, *others):
        known = state.nodes.get(name)
        members.append(GangMember(name, known.peer_address if known else "", known.stream_address if known else "", ()))
    return (DesiredSlices(number, node_set.set_epoch, node_set.newest, tuple(members)),)


def project_touched(state: State) -> list[str]:
    """Project the nodes that were touched; those whose set differs get one new version. Return their names."""
    if not state.unstored.is_kept:
        state.dirty.wants.clear()
        return []
    version = state.counters.desired_version + 1
    changed = []
    if state.counters.restoring is not None:
        changed = [name for name in state.dirty.wants if name in state.nodes]
        state.desired.update({name: project_node(state, state.nodes[name]) for name in changed})
        state.dirty.wants.clear()
        return changed
    for name in state.dirty.wants:
        node = state.nodes.get(name)
        if node is None:
            continue
        old = state.desired.of(name)
        new = project_node(state, node, version)
        is_same = new.is_like(old)
        state.desired[name] = replace(new, version=old.version) if is_same else new
        # A daemon that has just opened a session may have lost its gangs: their specs are not sent again.
        if not is_same or not node.heard:
            changed.append(name)
    state.dirty.wants.clear()
    if changed:
        state.counters.desired_version = version
    return changed


def party_of(state: State, gang: Gang) -> Party:
    known = state.desired.parties.get(gang.epoch)
    parked = state.gangs.get(gang.restore.parked_epoch) if gang.restore.parked_epoch else None
    source = party_of(state, parked) if parked is not None else None
    if known is None or known.gang is not gang or known.source is not source:
        nodes = [state.nodes.get(piece.claim.node) for piece in gang.pieces]
        job = state.jobs[gang.job]
        curve = state.cores_curves.get(job.number) if job.epoch == gang.epoch else None
        tried = 0 if curve is None else curve.trial_memory_bytes
        known = Party(gang, job, state.settings, nodes, source, tried)
        state.desired.parties[gang.epoch] = known
    return known


def _desired_stray(state: State, node: str, stray: Stray) -> DesiredGang:
    return DesiredGang(
        job=stray.job,
        uid=stray.uid,
        epoch=stray.epoch,
        master_sequence=stray.master_sequence,
        intent=GangIntent.STOP,
        claim=stray.newest_order.claim if stray.newest_order is not None else Claim(node, stray.device_mask, (), 0),
        grace_s=state.settings.grace_s if stray.is_ordered else 0.0,
        needs_spec=False,
    )
