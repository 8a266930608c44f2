"""Time-slice groups: what each gang of a group is charged with, which gangs leave, and when a group is dissolved; and
the jobs of a proposed slice matrix: whether each may be time-sliced, and whether it starts, stays or moves.

All gangs of a group hold its devices. Cores are held once for all time slices, as many as the largest slice needs:
each gang is charged with what its slice needs beyond the slices before, so that the sum over the gangs is what the
group holds. Host memory is charged to each gang. While a new matrix is not yet active everywhere, both count.

The slice that runs at this moment is what the group's leading daemon reported last. It changes with every quantum, so
it is not stored, and no decision depends on it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from ganger.cluster.refusals import Reason, Refusal
from ganger.cluster.resources import Bandwidth, Claim, LocalityLevel
from ganger.job_state import JobState
from msgspec.structs import replace

from ganger_master.core import attempts, colocation, ending, gang_orders, moves
from ganger_master.core.answers import RefusedError
from ganger_master.core.colocation import has_arenas
from ganger_master.core.commands import ObservedSlices
from ganger_master.core.events import GangApproved, JobResumed, MoveBegun, RowsChanged
from ganger_master.core.gang_model import Gang, GangIntent, GangPhase, GangRole, Matrix, Piece, TimesliceGroup
from ganger_master.core.gang_orders import has_two_worlds
from ganger_master.core.job_model import JobRecord, SuspendLevel
from ganger_master.core.plan_changes import SliceChange
from ganger_master.core.preconditions import unfinished
from ganger_master.core.state import State

Cores: TypeAlias = tuple[int, ...]


def charges(rows: Sequence[Sequence[int]], needs: Mapping[int, Cores]) -> dict[int, Cores]:
    """Return the millicores by socket that each gang is charged with on a node.

    rows: epochs by time slice. needs: millicores by socket of each gang's claim. The charges add up to the largest
    slice, socket by socket."""
    found = {epoch: [0] * len(cores) for epoch, cores in needs.items()}
    sockets = max([len(cores) for cores in needs.values()], default=0)
    most = [0] * sockets
    for row in rows:
        there = [epoch for epoch in dict.fromkeys(row) if epoch in needs]
        for socket in range(sockets):
            missing = max(0, sum([needs[epoch][socket] for epoch in there]) - most[socket])
            most[socket] += missing
            for epoch in there:
                more = min(missing, needs[epoch][socket] - found[epoch][socket])
                found[epoch][socket] += more
                missing -= more
    return {epoch: tuple(cores) for epoch, cores in found.items()}


def change(state: State, event: RowsChanged) -> None:
    """Apply a slice matrix that `timeslice_admission` has approved; waiting jobs of it get their gangs."""
    now, cause = event.time, event.cause
    for number, (claims, level) in event.starts.items():
        # The charge of a time-sliced gang depends on all gangs of the group: compute the node anew.
        for claim in claims:
            state.dirty.rows[claim.node] = None
        attempts.start(state, GangApproved(now, cause, number, claims, level))
    for number in event.resumes:
        gang = state.gangs[state.jobs[number].epoch]
        # No gang is co-located with it.
        state.put_gang(_alone(state, gang))
        if state.jobs[number].is_waiting:
            gang = state.gangs[gang.epoch]
            attempts.start(state, GangApproved(now, cause, number, gang.claims, gang.level))
        else:
            attempts.resume(state, JobResumed(now, cause, number))
    for number, (claims, level, purpose) in event.moves.items():
        for claim in claims:
            state.dirty.rows[claim.node] = None
        if state.jobs[number].is_waiting:
            attempts.start(state, GangApproved(now, cause, number, claims, level))
        else:
            moves.begin(state, MoveBegun(now, cause, number, claims, level, purpose))
    epochs = _epochs_of(state, event)
    nodes = _nodes_of(state, {epoch for row in epochs for epoch in row})
    before = state.gangs.sets.get(event.number)
    if before is None:
        number = state.counters.next_set
        state.counters.next_set += 1
        matrix = Matrix(1, epochs, event.quantum_s, event.level)
        state.put_set(TimesliceGroup(number, nodes, nodes[0], matrix))
    else:
        number = before.number
        matrix = Matrix(before.active.version + 1, epochs, event.quantum_s, event.level)
        state.put_set(replace(before, nodes=tuple(sorted({*before.nodes, *nodes})), coming=matrix))
    begun = event.starts.keys() | event.moves.keys() | {*event.resumes}
    for job in sorted({job for row in event.rows for job in row} - begun):
        state.put_job(replace(state.jobs[job], revision=state.jobs[job].revision + 1))
        # The gangs that it was co-located with are gone or parked.
        gang = _alone(state, state.gangs[state.jobs[job].epoch])
        if gang.pieces != state.gangs[gang.epoch].pieces:
            state.put_gang(gang)
    figures = {"node_set": number, "version": matrix.version, "quantum_seconds": f"{matrix.quantum_s:g}"}
    for job in sorted({job for row in event.rows for job in row}):
        own = " ".join([str(index) for index, row in enumerate(event.rows) if job in row])
        state.history(
            now, f"jobs/{job}", "rows_changed", cause, event.reason, rows=own, of_rows=len(event.rows), **figures
        )


def _alone(state: State, gang: Gang) -> Gang:
    """Return the gang without marks of shared devices, except devices that a quarantined gang holds."""
    for piece in gang.pieces:
        node = piece.claim.node
        gang = gang_orders.marked(gang, node, piece.claim.shared_mask & colocation.stray_devices(state, node))
    return gang


def _epochs_of(state: State, event: RowsChanged) -> tuple[tuple[int, ...], ...]:
    """Return the epochs by time slice. A job that moves has two: its destination, and until it is parked its source."""
    found = []
    for index, row in enumerate(event.rows):
        jobs = [state.jobs[number] for number in row]
        leaving = [state.jobs[number].epoch for number, rows in event.stays.items() if index in rows]
        coming = [job.next_epoch if job.number in event.moves else job.epoch for job in jobs]
        found.append((*coming, *leaving))
    return tuple(found)


def follow(state: State, now: float, cause: str) -> None:
    """Review the groups that were touched."""
    while state.dirty.sets:
        number = next(iter(state.dirty.sets))
        del state.dirty.sets[number]
        if number in state.gangs.sets:
            _review(state, number, now, cause)


def takes_turns(gang: Gang | None) -> bool:
    """Return whether a gang may be on its devices: until it is parked elsewhere or gone."""
    return gang is not None and any(_on_devices(piece) for piece in gang.pieces)


def members(state: State, node_set: TimesliceGroup) -> list[int]:
    """Return the epochs that are time-sliced in a group, in order. A gang that left, and runs on devices of its own, is
    not a member because of a matrix that is about to end."""
    newest = node_set.newest.epochs
    found = []
    for epoch in {epoch for row in node_set.rows for epoch in row}:
        gang = state.gangs.get(epoch)
        if gang is not None and takes_turns(gang) and (epoch in newest or gang.node_set == node_set.number):
            found.append(epoch)
    return sorted(found)


def slowest_switch(state: State, number: int) -> float:
    """Return the seconds of the last slice switch on the slowest node of a group; zero if none was measured."""
    node_set = state.gangs.sets.get(number)
    if node_set is None:
        return 0.0
    seen = [state.gangs.rows_seen.get((number, node)) for node in node_set.nodes]
    return max([one.switch_s for one in seen if one is not None], default=0.0)


def is_free_of_turns(claims: Iterable[Sequence[Claim]]) -> bool:
    """Return whether no two of these gangs have a device in common."""
    used: dict[str, int] = {}
    for own in claims:
        for claim in own:
            if used.get(claim.node, 0) & claim.device_mask:
                return False
            used[claim.node] = used.get(claim.node, 0) | claim.device_mask
    return True


def _review(state: State, number: int, now: float, cause: str) -> None:
    _give_up_unable(state, state.gangs.sets[number], now, cause)
    node_set = state.gangs.sets[number]
    coming = node_set.coming
    if coming is not None and all(_is_active(state, number, node, coming.version) for node in node_set.nodes):
        node_set = replace(node_set, active=coming, coming=None)
    live = members(state, node_set)
    for epoch in {epoch for row in node_set.rows for epoch in row}.difference(live) & state.gangs.keys():
        state.put_gang(replace(state.gangs[epoch], node_set=0))
    if _needs_no_turns(state, node_set, live):
        _dissolve(state, node_set, live, now, cause)
        return
    nodes = _nodes_of(state, live)
    newest = node_set.newest
    if node_set.coming is None and newest.epochs - set(live):
        rows = tuple([own for row in newest.rows if (own := tuple([epoch for epoch in row if epoch in live]))])
        rows = filled(rows, {epoch: state.gangs[epoch] for epoch in live})
        node_set = replace(node_set, coming=replace(newest, version=newest.version + 1, rows=rows))
    if set(nodes) != set(node_set.nodes) and node_set.coming is None:
        node_set = replace(node_set, nodes=nodes)
    leader = node_set.leader
    if leader not in node_set.nodes or _is_lost(state, leader):
        able = [node for node in node_set.nodes if not _is_lost(state, node)] or node_set.nodes
        node_set = replace(node_set, leader=able[0], set_epoch=node_set.set_epoch + 1)
        state.history(now, f"nodes/{able[0]}", "leads_node_set", cause, node_set=number, set_epoch=node_set.set_epoch)
    state.put_set(node_set)
    _charge(state, node_set, live)
    # The group that was just put has been reviewed.
    state.dirty.sets.pop(number, None)


def _give_up_unable(state: State, node_set: TimesliceGroup, now: float, cause: str) -> None:
    """Requeue gangs that turn out to be unable to stop for a slice switch: they would keep their devices from the other
    gangs for ever. Their jobs continue from the last checkpoint, on devices of their own."""
    unable = {
        epoch
        for node in node_set.nodes
        if (seen := state.gangs.rows_seen.get((node_set.number, node))) is not None
        for epoch in seen.unable
        if epoch in state.gangs.places_on.get(node, ())
    }
    for epoch in sorted(unable):
        gang = state.gangs.get(epoch)
        if gang is None or gang.intent is not GangIntent.RUN or state.gangs.set_of.get(epoch) != node_set.number:
            continue
        job = state.jobs[gang.job]
        if job.ending is None:
            state.put_job(replace(job, preemptions=job.preemptions + 1))
            reason = f"it takes no turns: it cannot be suspended at {node_set.newest.level.name}"
            state.history(now, job, "turn_refused", cause, reason, epoch=epoch)
            ending.end(state, job.number, JobState.PENDING, now, reason)


def _is_active(state: State, number: int, node: str, version: int) -> bool:
    seen = state.gangs.rows_seen.get((number, node))
    return _is_lost(state, node) or (seen is not None and seen.version >= version)


def _is_lost(state: State, node: str) -> bool:
    """Return whether a node is lost. A removed node was lost, too, and gangs with a part there may still be members."""
    known = state.nodes.get(node)
    return known is None or known.lost


def filled(rows: Sequence[Sequence[int]], gangs: Mapping[int, Gang]) -> tuple[tuple[int, ...], ...]:
    """Return the time slices with running gangs added wherever their devices idle, gangs with the fewest slices first.
    No slice may need more cores than the largest one does."""
    found = [list(row) for row in rows]
    turns = {epoch: sum([epoch in row for row in rows]) for epoch in gangs}
    needs = {node: _needs_on(gangs.values(), node) for gang in gangs.values() for node in gang.nodes}
    most = {node: _largest(_sums(rows, own)) for node, own in needs.items()}
    for row in found:
        for epoch in sorted(gangs, key=lambda one: (turns[one], one)):
            there = [*[gangs[other] for other in row], gangs[epoch]]
            if epoch in row or gangs[epoch].intent is not GangIntent.RUN:
                continue
            if not is_free_of_turns([gang.claims for gang in there]):
                continue
            wanted = {node: _largest(_sums([[*row, epoch]], needs[node])) for node in gangs[epoch].nodes}
            if all(want <= have for node in wanted for want, have in zip(wanted[node], most[node], strict=True)):
                row.append(epoch)
                turns[epoch] += 1
    return tuple([tuple(row) for row in found])


def _largest(sums: Sequence[Cores]) -> Cores:
    return tuple([max(cores) for cores in zip(*sums, strict=True)])


def _needs_no_turns(state: State, node_set: TimesliceGroup, live: Sequence[int]) -> bool:
    gangs = [state.gangs[epoch] for epoch in live]
    if not is_free_of_turns([gang.claims for gang in gangs]):
        return False
    for node in {node for gang in gangs for node in gang.nodes}:
        needs = _needs_on(gangs, node)
        most = [max(cores) for cores in zip(*_sums(node_set.rows, needs), strict=True)]
        if any(sum(cores) > most[socket] for socket, cores in enumerate(zip(*needs.values(), strict=True))):
            return False
    return True


def _sums(rows: Sequence[Sequence[int]], needs: Mapping[int, Cores]) -> list[Cores]:
    found = []
    for row in rows:
        there = [needs[epoch] for epoch in dict.fromkeys(row) if epoch in needs]
        if there:
            found.append(tuple([sum(cores) for cores in zip(*there, strict=True)]))
    return found


def _dissolve(state: State, node_set: TimesliceGroup, live: Sequence[int], now: float, cause: str) -> None:
    state.forget_set(node_set.number)
    for epoch in live:
        gang = state.gangs[epoch]
        pieces = tuple([replace(piece, held=piece.claim) if _on_devices(piece) else piece for piece in gang.pieces])
        gang = replace(gang, pieces=pieces, node_set=0)
        # A gang that is being prepared has taken part in no slice switch.
        state.put_gang(gang if gang.intent is GangIntent.PREPARE else gang_orders.begin_anew(gang))
        job = state.jobs[gang.job]
        state.put_job(replace(job, revision=job.revision + 1))
        state.history(now, job, "turns_ended", cause, node_set=node_set.number)


def _charge(state: State, node_set: TimesliceGroup, live: Collection[int]) -> None:
    gangs = [state.gangs[epoch] for epoch in live]
    by_node = {
        node: charges(node_set.rows, _needs_on(gangs, node)) for node in {node for gang in gangs for node in gang.nodes}
    }
    for gang in gangs:
        pieces = []
        for piece in gang.pieces:
            if _on_devices(piece):
                cores = by_node[piece.claim.node][gang.epoch]
                piece = replace(piece, held=replace(piece.claim, millicores=cores))
            pieces.append(piece)
        state.put_gang(replace(gang, pieces=tuple(pieces), node_set=node_set.number))


def _needs_on(gangs: Iterable[Gang], node: str) -> dict[int, Cores]:
    return {
        gang.epoch: piece.claim.millicores
        for gang in gangs
        for piece in gang.pieces
        if piece.claim.node == node and _on_devices(piece)
    }


def _on_devices(piece: Piece) -> bool:
    return piece.held is not None and bool(piece.held.device_mask)


def _nodes_of(state: State, epochs: Iterable[int]) -> tuple[str, ...]:
    return tuple(sorted({node for epoch in epochs for node in state.gangs[epoch].nodes}))


def running_row(node_set: TimesliceGroup, seen: Mapping[tuple[int, str], ObservedSlices]) -> tuple[int, int] | None:
    """Return the version of the matrix and the slice (from 0) that runs; None if no report names a valid matrix."""
    report = seen.get((node_set.number, node_set.leader))
    for matrix in (node_set.active, node_set.coming):
        if (
            report is not None
            and matrix is not None
            and matrix.version == report.version
            and report.row < len(matrix.rows)
        ):
            return matrix.version, report.row
    return None


def has_turn(node_set: TimesliceGroup, seen: Mapping[tuple[int, str], ObservedSlices], epoch: int) -> bool | None:
    """Return whether the slice that runs has the gang; None if no report tells which one runs."""
    running = running_row(node_set, seen)
    if running is None:
        return None
    version, row = running
    matrix = node_set.active if node_set.active.version == version else node_set.newest
    return epoch in matrix.rows[row]


Claims: TypeAlias = tuple[Claim, ...]


class MatrixRefusedError(Exception):
    """A refusal of a matrix. `number`: the job that it is about."""

    def __init__(self, number: int, refusal: Refusal) -> None:
        self.number, self.refusal = number, refusal


@dataclass(slots=True, eq=False)
class SlicedMember:
    """A job of a proposed matrix. `claims`: its place now or then. `gang`: its present gang, None if it has none."""

    change: SliceChange
    job: JobRecord
    gang: Gang | None
    claims: Claims
    level: LocalityLevel
    is_parked: bool = False
    is_moving: bool = False

    @property
    def needs_devices(self) -> bool:
        """Return whether it has no devices at `claims` yet."""
        return self.is_new_there or self.is_parked

    @property
    def is_new_there(self) -> bool:
        """Return whether it holds nothing at `claims` yet."""
        return self.gang is None or self.is_moving

    def memory_for(self, place: int) -> int:
        """Return the bytes of host memory that it takes for one of its claims, beyond what it holds there."""
        claim = self.claims[place]
        if self.is_new_there or self.gang is None:
            return claim.memory_bytes + claim.arena_bytes
        return self.gang.lacking_claims[place].memory_bytes if self.is_parked else 0

    def bandwidth_for(self, place: int) -> Bandwidth:
        """Return the same of the node's bandwidth."""
        if self.is_new_there or self.gang is None:
            return self.claims[place].bandwidth
        return self.gang.lacking_claims[place].bandwidth if self.is_parked else ()


def proposed_member(state: State, change: SliceChange, before: TimesliceGroup | None) -> SlicedMember:
    """Return the member that a change proposes for the set `before` (None: a new set). Raises MatrixRefusedError."""
    job = _sliceable_job(state, change)
    gang = state.gangs.get(job.epoch)
    if job.is_waiting and gang is not None:
        return _parked(state, change, job, gang)
    if job.is_waiting:
        if not change.claims:
            refuse(job.number, Reason.WRONG_STATE, detail="where it is to start is missing")
        if any(claim.shared_mask for claim in change.claims):
            refuse(job.number, Reason.NOT_SUPPORTED, detail="a co-located job is not time-sliced")
        return SlicedMember(change, job, None, change.claims, LocalityLevel.CLUSTER)
    if gang is not None and _is_parked_by_plan(gang) and not job.next_epoch and job.ending is None:
        return _parked(state, change, job, gang)
    return _running(state, change, job, gang, before)


def _sliceable_job(state: State, change: SliceChange) -> JobRecord:
    """Return the job of a change, if its spec and its earlier attempts allow time slices. Raises MatrixRefusedError."""
    try:
        job = unfinished(state, change.number)
    except RefusedError as error:
        refuse(change.number, Reason.WRONG_STATE, detail=error.refused.message)
    if change.revision != job.revision:
        refuse(job.number, Reason.STALE_REVISION, {"revision": job.revision, "given": change.revision})
    if not job.preemptible:
        refuse(job.number, Reason.WRONG_STATE, detail="the job is not preemptible, so it is not time-sliced")
    if job.time_limit_s is not None:
        refuse(job.number, Reason.WRONG_STATE, detail="the job has a time limit, which continues while it is parked")
    if job.no_time_slices:
        refuse(job.number, Reason.WRONG_STATE, detail=job.no_time_slices)
    return job


def _running(
    state: State, change: SliceChange, job: JobRecord, gang: Gang | None, before: TimesliceGroup | None
) -> SlicedMember:
    is_active = gang is not None and gang.role is GangRole.ACTIVE
    settled = is_active and gang is not None and gang.phase in (GangPhase.STARTING, GangPhase.RUNNING)
    if gang is None or not settled or gang.intent is not GangIntent.RUN or job.next_epoch or job.ending is not None:
        refuse(job.number, Reason.WRONG_STATE, detail="only a running or pending job can be time-sliced")
    is_new = gang.phase is GangPhase.STARTING and not gang.stepped and gang.epoch not in state.gangs.set_of
    if is_new and len(gang.pieces) > 1:
        # Its parts may wait on their devices for parts that are not launched yet. Time slices that begin then are a
        # deadlock: those parts reach no boundary without the others, which wait for their slice.
        refuse(job.number, Reason.WRONG_STATE, detail="it is on several nodes and has not stepped on all of them yet")
    if colocation.beside(state, gang):
        refuse(job.number, Reason.NOT_SUPPORTED, detail="a co-located job is not time-sliced")
    if has_two_worlds(state, job.number):
        refuse(job.number, Reason.WRONG_STATE, detail="it is being resized: its former world is still ending")
    if change.claims and not gang_orders.same_place(change.claims, gang.claims):
        return _moving(state, change, job, gang)
    of = state.gangs.set_of.get(gang.epoch)
    if of is not None and (before is None or of != before.number):
        refuse(
            job.number, Reason.WRONG_STATE, {"node_set": of}, detail="it is time-sliced already, in another node set"
        )
    return SlicedMember(change, job, gang, gang.claims, gang.level)


def _parked(state: State, change: SliceChange, job: JobRecord, gang: Gang) -> SlicedMember:
    if gang.phase is not GangPhase.PARKED or gang.rested_level is not SuspendLevel.OFFLOAD:
        refuse(job.number, Reason.WRONG_STATE, detail="it is not parked in host memory")
    if change.claims and not gang_orders.same_place(change.claims, gang.claims):
        return _moving(state, change, job, gang)
    if gang_orders.is_superseded(state, gang):
        refuse(job.number, Reason.WRONG_STATE, detail="its parked gang is superseded and cannot resume where it is")
    claims = tuple([replace(claim, shared_mask=0) for claim in gang.claims])
    return SlicedMember(change, job, gang, claims, gang.level, is_parked=True)


def _moving(state: State, change: SliceChange, job: JobRecord, gang: Gang) -> SlicedMember:
    if gang.phase is GangPhase.STARTING or has_two_worlds(state, job.number) or not job.capabilities.can_hand_over:
        refuse(job.number, Reason.WRONG_STATE, detail="its state cannot be moved, or not yet")
    if gang.node_set and not has_arenas(gang):
        refuse(job.number, Reason.WRONG_STATE, detail="no host memory is reserved for it to leave its time slices")
    if any(claim.shared_mask for claim in change.claims):
        refuse(job.number, Reason.NOT_SUPPORTED, detail="a co-located job is not time-sliced")
    if gang.phase is not GangPhase.PARKED and not is_free_of_turns([change.claims, gang.claims]):
        refuse(job.number, Reason.CLAIM_MISMATCH, detail="it would move onto devices of its own")
    if sum(claim.device_mask.bit_count() for claim in change.claims) != gang.devices:
        refuse(job.number, Reason.CLAIM_MISMATCH, detail="a move does not change the size of a job")
    return SlicedMember(change, job, gang, change.claims, LocalityLevel.CLUSTER, is_moving=True)


def _is_parked_by_plan(gang: Gang) -> bool:
    offloaded = gang.rested_level is SuspendLevel.OFFLOAD and gang.park_level is SuspendLevel.OFFLOAD
    return gang.phase is GangPhase.PARKED and gang.intent is GangIntent.PARK and gang.parked_by_plan and offloaded


def refuse(
    number: int, reason: Reason, figures: Mapping[str, int] | None = None, node: str = "", detail: str = ""
) -> NoReturn:
    raise MatrixRefusedError(number, Refusal(reason, figures or {}, node, f"jobs/{number}", detail))
