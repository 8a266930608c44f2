"""Admission of a plan's slice matrix: may these jobs be time-sliced on these devices? All of it or nothing.

A time-sliced job must allow a stop at the level of the matrix, and shares devices only with jobs of its priority. Its
parked state must have room: for OFFLOAD in the arenas of all slices at once, for PAUSE on the devices. Each slice must
fit. Groups have no node in common, and one change of a group is made before the next. A job that runs elsewhere than
its slice says moves there, and is time-sliced where it is until it does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from ganger.cluster.fit import MEMORY_SHARE, fit, lacking_bandwidth
from ganger.cluster.refusals import Reason, Refusal
from ganger.cluster.resources import Bandwidth, Claim, more_bandwidth
from ganger.cluster.topology import bits
from ganger.protocol.slice_rotation import SWITCHES_PER_QUANTUM
from msgspec.structs import replace

from ganger_master.core import approval, events, timeslice_groups
from ganger_master.core.accounting import Owner
from ganger_master.core.elastic import shape_for
from ganger_master.core.gang_model import TimesliceGroup
from ganger_master.core.job_model import SuspendLevel
from ganger_master.core.job_rules import node_rules, rules
from ganger_master.core.plan_changes import PlanChange, SliceChange
from ganger_master.core.state import State
from ganger_master.core.timeslice_groups import (
    Claims,
    MatrixRefusedError,
    SlicedMember,
    proposed_member,
    refuse,
)

# The capability of a node whose daemon switches time slices.
CAPABILITY: Final = "rotation"
ROWS_LIMIT: Final = 64
# With a shorter quantum any machine would only switch.
_LEAST_QUANTUM_S: Final = 0.5


def judge_rows(
    state: State, changes: Sequence[PlanChange], proposer: str, now: float
) -> events.RowsChanged | tuple[int, Refusal]:
    """Return the event that applies the matrix, or the number of the job that it is refused for, and why."""
    try:
        return _judge(state, _alike(changes), proposer, now)
    except MatrixRefusedError as refused:
        return refused.number, refused.refusal


def _alike(changes: Sequence[PlanChange]) -> list[SliceChange]:
    """Return the changes, if all are of one matrix with one quantum and one level. Raises MatrixRefusedError."""
    found: list[SliceChange] = []
    for change in changes:
        if not isinstance(change, SliceChange) or (found and _common(change) != _common(found[0])):
            detail = "a matrix is proposed alone, and all its changes have the same group, quantum and level"
            refuse(change.number, Reason.CLAIM_MISMATCH, detail=detail)
        found.append(change)
    return found


def _common(change: SliceChange) -> tuple[int, float, SuspendLevel]:
    return change.node_set, change.quantum_s, change.level


def _judge(state: State, changes: Sequence[SliceChange], proposer: str, now: float) -> events.RowsChanged:
    first = changes[0]
    before = state.gangs.sets.get(first.node_set)
    if first.node_set and before is None:
        refuse(first.number, Reason.WRONG_STATE, detail=f"there is no nodeSets/{first.node_set}")
    if before is not None and before.coming is not None:
        figures = {"version": before.active.version, "coming": before.coming.version}
        refuse(first.number, Reason.STALE_REVISION, figures, detail="its last change is not yet made on all its nodes")
    rows = _rows(changes)
    _check_quantum(state, first)
    members = {change.number: proposed_member(state, change, before) for change in changes}
    if before is not None:
        _check_complete(state, before, members)
    _check_nodes(state, before, members)
    _check_priorities(members, rows)
    held = _held(state, before, members)
    # Devices that members of this change take, by the owner of a limit: they start together.
    taken: Counter[Owner] = Counter()
    for member in members.values():
        if member.needs_devices:
            _check_start(state, member, held, taken)
    rows, staying = _staying(state, members, rows, before, held)
    here = {**members, **{-number: member for number, (member, _) in staying.items()}}
    stays = {number: own for number, (_, own) in staying.items()}
    count = max([len(rows), *[index + 1 for own in stays.values() for index in own]])
    if count > ROWS_LIMIT:
        refuse(first.number, Reason.CLAIM_MISMATCH, {"rows": count, "limit": ROWS_LIMIT}, detail="too many rows")
    rows = rows + ((),) * (count - len(rows))
    whole = [[*row, *[-number for number, own in stays.items() if index in own]] for index, row in enumerate(rows)]
    for row in whole:
        _check_row(state, [here[number] for number in row], held)
    beginning = [member for member in members.values() if member.is_new_there]
    _check_host_memory(state, [member for member in members.values() if member.needs_devices])
    for member in here.values():
        _check_level(state, member, first.level, here)
    levels = {member.job.number: approval.level_of(state, member.claims) for member in beginning}
    starts = {one.job.number: (one.claims, levels[one.job.number]) for one in beginning if one.gang is None}
    moves = {
        one.job.number: (one.claims, levels[one.job.number], one.change.purpose) for one in beginning if one.is_moving
    }
    resumes = tuple(sorted([number for number, member in members.items() if member.is_parked]))
    takes = _takes(state, held, here, whole)
    group, reason = first.node_set, first.reason
    return events.RowsChanged(
        now, proposer, group, rows, first.quantum_s, first.level, starts, resumes, takes, reason, moves, stays
    )


def _staying(
    state: State,
    members: Mapping[int, SlicedMember],
    rows: Sequence[Sequence[int]],
    before: TimesliceGroup | None,
    held: Mapping[str, Claim],
) -> tuple[tuple[tuple[int, ...], ...], dict[int, tuple[SlicedMember, tuple[int, ...]]]]:
    """Return the time slices, and the present place and slices of each member that moves within this group.

    Until such a member moves it stays in every slice in which its devices idle and the cores suffice, or else gets a
    slice of its own."""
    found: dict[int, tuple[SlicedMember, tuple[int, ...]]] = {}
    taken = [[members[number] for number in row] for row in rows]
    for number, member in members.items():
        gang = member.gang
        if not member.is_moving or gang is None or before is None or gang.node_set != before.number:
            continue
        one = SlicedMember(member.change, member.job, gang, gang.claims, gang.level)
        own = [i for i, row in enumerate(taken) if _fits(state, [one, *row], held)]
        if own and all(member in taken[index] for index in own):
            own = _changed_places(state, taken, one, member, own, held, found)
        if not own:
            own = [len(taken)]
            taken.append([])
        for index in own:
            taken[index].append(one)
        found[number] = one, tuple(own)
    known = set(map(id, members.values()))
    named = [tuple(sorted([one.job.number for one in row if id(one) in known])) for row in taken]
    return tuple(named[: len(rows)]), found


def _changed_places(
    state: State,
    taken: list[list[SlicedMember]],
    leaving: SlicedMember,
    coming: SlicedMember,
    own: list[int],
    held: Mapping[str, Claim],
    settled: Collection[int],
) -> list[int]:
    """Return the slices of a member that leaves, whose devices idle only in slices of its destination.

    There it would run only while its program starts, and its neighbours would wait for it twice. So it exchanges its
    slice with the gangs that are time-sliced with it, if that is possible. settled: numbers of leaving members that
    have their slices already."""
    for index, row in enumerate(taken):
        if index in own or coming in row:
            continue
        others = [one for one in row if not timeslice_groups.is_free_of_turns([leaving.claims, one.claims])]
        rest = [one for one in row if one not in others]
        stay = any(one.is_moving or one.job.number in settled for one in others)
        if stay or not _fits(state, [*rest, leaving], held):
            continue
        for at in own:
            beside = [*taken[at], *others]
            if _fits(state, beside, held):
                taken[at], taken[index] = beside, rest
                return [index]
    return own


def _fits(state: State, row: Sequence[SlicedMember], held: Mapping[str, Claim]) -> bool:
    try:
        _check_row(state, row, held)
    except MatrixRefusedError:
        return False
    return True


def _rows(changes: Sequence[SliceChange]) -> tuple[tuple[int, ...], ...]:
    count = max([index for change in changes for index in change.rows], default=-1) + 1
    if not 0 < count <= ROWS_LIMIT:
        refuse(
            changes[0].number, Reason.CLAIM_MISMATCH, {"rows": count, "limit": ROWS_LIMIT}, detail="rows count from 0"
        )
    rows = tuple([tuple(sorted([c.number for c in changes if index in c.rows])) for index in range(count)])
    for change in changes:
        if not change.rows:
            refuse(change.number, Reason.CLAIM_MISMATCH, detail="it is in no row: suspend it instead")
    if not all(rows):
        refuse(changes[0].number, Reason.CLAIM_MISMATCH, {"row": rows.index(())}, detail="a row without gangs")
    return rows


def _check_quantum(state: State, change: SliceChange) -> None:
    switch = timeslice_groups.slowest_switch(state, change.node_set)
    least = max(_LEAST_QUANTUM_S, SWITCHES_PER_QUANTUM * switch)
    if change.quantum_s < least:
        figures = {
            "quantum_milliseconds": int(1000 * change.quantum_s),
            "least_milliseconds": int(1000 * least),
            "switch_milliseconds": int(1000 * switch),
        }
        refuse(change.number, Reason.QUANTUM, figures)


def _check_complete(state: State, before: TimesliceGroup, members: Mapping[int, SlicedMember]) -> None:
    for epoch in timeslice_groups.members(state, before):
        number = state.gangs[epoch].job
        member = members.get(number)
        if member is None:
            detail = f"jobs/{number} is time-sliced there, too: name it, or suspend it first"
            refuse(next(iter(members)), Reason.CLAIM_MISMATCH, {"epoch": epoch}, detail=detail)
        if member.gang is None or member.gang.epoch != epoch:
            # A lost node has not reported that the gang is gone.
            detail = f"an earlier gang of jobs/{number} may be on its devices there yet"
            refuse(number, Reason.WRONG_STATE, {"epoch": epoch}, detail=detail)


def _check_nodes(state: State, before: TimesliceGroup | None, members: Mapping[int, SlicedMember]) -> None:
    for number, member in members.items():
        for claim in member.claims:
            node = state.nodes.get(claim.node)
            if node is None:
                refuse(number, Reason.NODE_GONE, node=claim.node)
            of = state.gangs.set_on.get(claim.node)
            if of is not None and (before is None or of != before.number):
                refuse(number, Reason.WRONG_STATE, {"node_set": of}, claim.node, "node sets have no node in common")
            if node.capabilities.get(CAPABILITY) != "yes":
                refuse(number, Reason.NOT_SUPPORTED, node=claim.node, detail="its daemon switches no rows")


def _check_priorities(members: Mapping[int, SlicedMember], rows: Sequence[Sequence[int]]) -> None:
    """Check that only jobs of one priority are time-sliced on a device: no job stops for a lower priority."""
    on: dict[tuple[str, int], int] = {}
    for number in dict.fromkeys([number for row in rows for number in row]):
        member = members[number]
        for claim in member.claims:
            for device in bits(claim.device_mask):
                other = on.setdefault((claim.node, device), number)
                mine, theirs = member.job.priority, members[other].job.priority
                if mine != theirs:
                    figures = {"priority": mine, "priority_there": theirs}
                    refuse(
                        number, Reason.WRONG_STATE, figures, claim.node, "only jobs of equal priority share time slices"
                    )


def _held(state: State, before: TimesliceGroup | None, members: Mapping[int, SlicedMember]) -> dict[str, Claim]:
    """Return what the present members hold together, by node: members that come may use it in other slices."""
    epochs = {member.gang.epoch for member in members.values() if member.gang is not None and not member.is_moving}
    if before is not None:
        epochs.update(timeslice_groups.members(state, before))
    found: dict[str, Claim] = {}
    for epoch in sorted(epochs):
        for own in state.gangs[epoch].held:
            if own.device_mask:
                others, cores, mask = found.get(own.node), own.millicores, own.device_mask
                if others is not None:
                    cores = tuple([one + other for one, other in zip(others.millicores, cores, strict=True)])
                    mask |= others.device_mask
                found[own.node] = Claim(own.node, mask, cores, 0)
    return found


def _check_start(state: State, member: SlicedMember, held: Mapping[str, Claim], taken: Counter[Owner]) -> None:
    """Check that a member may start or resume; add its devices to those that are `taken`, by the owner of a limit."""
    job = member.job
    shape = shape_for(job, member.claims)
    if isinstance(shape, Refusal):
        raise MatrixRefusedError(job.number, shape)
    refusals = () if member.is_moving else rules(state, job, shape.gpus, taken)
    refusals = refusals or node_rules(state, job, member.claims)
    if not refusals:
        claims = member.claims
        arena = {claim.arena_bytes // claim.device_mask.bit_count() for claim in claims if claim.device_mask}
        wanted = replace(shape, arena_bytes_per_device=arena.pop()) if len(arena) == 1 else shape
        holding = _free_for(member, held)
        refusals = fit(state.view, wanted, claims, holding=holding, retune=True)
    if refusals:
        raise MatrixRefusedError(job.number, refusals[0])
    if state.limits and not member.is_moving:
        more = max(0, shape.gpus - state.jobs.charges.of(job.number))
        taken.update(dict.fromkeys(state.owners(job), more))


def _free_for(member: SlicedMember, held: Mapping[str, Claim]) -> Claims:
    """Return what a member may use beyond free pieces: what the others hold there, and what it keeps itself."""
    kept = {}
    if member.gang is not None and not member.is_moving:
        kept = {claim.node: claim for claim in member.gang.held}
    found = []
    for claim in member.claims:
        own, theirs = kept.get(claim.node), held.get(claim.node)
        if own is not None and theirs is not None:
            found.append(replace(own, device_mask=theirs.device_mask, millicores=theirs.millicores))
        elif own is not None or theirs is not None:
            found.append(own or theirs or claim)
    return tuple(found)


def _check_row(state: State, row: Sequence[SlicedMember], held: Mapping[str, Claim]) -> None:
    used: dict[str, int] = {}
    cores: dict[str, tuple[int, ...]] = {}
    for member in row:
        for claim in member.claims:
            twice = used.get(claim.node, 0) & claim.device_mask
            if twice:
                figures = {"conflicting": twice.bit_count()}
                refuse(
                    member.job.number, Reason.GPUS, figures, claim.node, "two jobs of a slice have devices in common"
                )
            used[claim.node] = used.get(claim.node, 0) | claim.device_mask
            known = cores.get(claim.node, (0,) * len(claim.millicores))
            cores[claim.node] = tuple([one + other for one, other in zip(known, claim.millicores, strict=True)])
            free = state.view.millicores[state.view.slots[claim.node]] if claim.node in state.view.slots else ()
            own = held[claim.node].millicores if claim.node in held else (0,) * len(free)
            for socket, (have, there) in enumerate(zip(free, own, strict=True)):
                if cores[claim.node][socket] > have + there:
                    figures = {"needed_millicores": cores[claim.node][socket], "free_millicores": have + there}
                    refuse(member.job.number, Reason.CORES, {**figures, "socket": socket}, claim.node)


def _check_host_memory(state: State, coming: Sequence[SlicedMember]) -> None:
    """Check the host memory of all gangs that start or go on at once, and the bandwidth, which each keeps in all
    slices; `fit` has checked each alone."""
    needed: dict[str, int] = {}
    bandwidth: dict[str, Bandwidth] = {}
    for member in coming:
        for place, claim in enumerate(member.claims):
            needed[claim.node] = needed.get(claim.node, 0) + member.memory_for(place)
            free = state.view.memory[state.view.slots[claim.node]]
            if needed[claim.node] > free:
                figures = {"needed_bytes": needed[claim.node], "free_bytes": free}
                refuse(member.job.number, Reason.MEMORY, figures, claim.node, "the states of all rows do not fit")
            bandwidth[claim.node] = more_bandwidth(bandwidth.get(claim.node, ()), member.bandwidth_for(place))
            for lacking in lacking_bandwidth(state.view, state.view.slots[claim.node], bandwidth[claim.node]):
                raise MatrixRefusedError(member.job.number, lacking)


def _check_level(state: State, member: SlicedMember, level: SuspendLevel, members: Mapping[int, SlicedMember]) -> None:
    job = member.job
    if level not in (SuspendLevel.PAUSE, SuspendLevel.OFFLOAD):
        refuse(job.number, Reason.LEVEL_UNAVAILABLE, {"level": int(level)}, detail="rows change by PAUSE or OFFLOAD")
    offered = job.capabilities
    if offered.known and not offered.offers(level):
        why = offered.missing.get(level.name, f"it does not offer {level.name}")
        refuse(job.number, Reason.LEVEL_UNAVAILABLE, detail=why)
    for claim in member.claims:
        if claim.device_mask:
            _check_room(state, member, claim, level, members)


def _check_room(
    state: State, member: SlicedMember, claim: Claim, level: SuspendLevel, members: Mapping[int, SlicedMember]
) -> None:
    """Check the room for the parked state of a member: in its arena, or on the devices."""
    job = member.job
    whole = state.view.topology(claim.node).configuration_set.device_memory_bytes
    if level is SuspendLevel.OFFLOAD:
        # A job that has not run yet could use all memory of a device.
        needed = job.arena_bytes_per_device or whole
        reserved = claim.arena_bytes // claim.device_mask.bit_count()
        if reserved < needed:
            free = state.view.memory[state.view.slots[claim.node]]
            figures = {"needed_bytes": needed, "reserved_bytes": reserved, "free_bytes": free}
            refuse(job.number, Reason.MEMORY, figures, claim.node, "its arena has no room in host memory")
        return
    for device in bits(claim.device_mask):
        needs = [
            other.job.shape.device_memory_bytes
            for other in members.values()
            if any(own.node == claim.node and own.device_mask >> device & 1 for own in other.claims)
        ]
        if not all(needs) or sum(needs) > MEMORY_SHARE * whole:
            figures = {"needed_bytes": sum(needs), "free_bytes": int(MEMORY_SHARE * whole)}
            detail = "the time-sliced jobs do not all stay on the device" if all(needs) else "what it uses is not known"
            refuse(job.number, Reason.DEVICE_MEMORY, figures, claim.node, detail)


def _takes(
    state: State, held: Mapping[str, Claim], members: Mapping[int, SlicedMember], rows: Sequence[Sequence[int]]
) -> Claims:
    """Return what the group will hold beyond what its gangs hold now, by node; what it gives back is not counted."""
    found = []
    for node in sorted({claim.node for member in members.values() for claim in member.claims}):
        mask = memory = 0
        needs: dict[int, tuple[int, ...]] = {}
        for number, member in members.items():
            for place, claim in enumerate(member.claims):
                if claim.node == node:
                    mask |= claim.device_mask
                    memory += member.memory_for(place)
                    needs[number] = claim.millicores
        own = held.get(node, Claim(node, 0, (0,) * len(next(iter(needs.values()))), 0))
        charged = timeslice_groups.charges(rows, needs).values()
        cores = [max(0, sum(more) - had) for more, had in zip(zip(*charged, strict=True), own.millicores, strict=True)]
        found.append(Claim(node, mask & ~own.device_mask, tuple(cores), memory))
    return tuple(found)
