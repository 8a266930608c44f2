"""The time-slicing pass of `gandiva` in the simulator (Xiao et al., OSDI 2018, section 3).

Jobs start in order of priority and arrival, by Algorithm 1. A job that finds no free devices joins nodes whose gangs
are of its size, least loaded first, or any nodes if there are none. There the next slice of a slice matrix is chosen
once a quantum (`policies.slicing`). A gang that leaves is parked in host memory if an arena is reserved for it, else on
storage; a gang that enters starts, resumes, or moves from its arena to other devices once those are free. The state is
a value: how far each job is behind, and which jobs are to enter. Losing it costs some fairness.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from operator import le
from typing import Final

import numpy as np
from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.claims import split_cores
from ganger.cluster.fit import demand, share_of_memory
from ganger.cluster.resources import Claim, GangShape
from ganger.cluster.search import PlacementRequest
from ganger.cluster.view import View
from msgspec import structs

from ganger_master.core.colocation import has_arenas
from ganger_master.core.model import Gang, GangIntent, GangPhase, JobRecord, JobState, SuspendLevel
from ganger_master.core.plan_changes import MoveChange, PlanChange, ResumeChange, StartChange, SuspendChange
from ganger_master.planner.device_groups import fits_beside
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.plan import PlanDraft
from ganger_master.planner.refusal_backoff import NONE_EXCLUDED, ExcludedJobs
from ganger_master.policies.placements import PlacementPreference
from ganger_master.policies.slicing import (
    QUANTUM_S,
    Seat,
    SharedNode,
    SliceShare,
    credited,
    next_row,
    node_sets,
)

Claims = tuple[Claim, ...]

# Python 3.11 needs as long for the lookup of an enumeration member as for a call, and a pass compares many.
_RUN, _PARKED, _HOLDING, _OFFLOAD = GangIntent.RUN, GangPhase.PARKED, JobState.HOLDING, SuspendLevel.OFFLOAD

# Gangs that are time-sliced on one device at most: each keeps its state and its processes in host memory.
MOST_ROWS: Final = 4
# Gangs over several nodes that join others at one boundary: each ties nodes together.
_MOST_WIDE: Final = 8


@dataclass(frozen=True, slots=True)
class Turns:
    """The state between two passes. `sharers`: shares as credited when the present slice began, by number; `entering`:
    places of jobs that are still to enter it."""

    sharers: Mapping[int, SliceShare] = field(default_factory=dict)
    entering: Mapping[int, Seat] = field(default_factory=dict)
    since_s: float = -math.inf


def plan_slices(
    placement: PlacementPreference,
    table: LiveTable,
    now: float,
    room: CapacityIndex,
    turns: Turns,
    quantum_s: float = QUANTUM_S,
    kept_out: ExcludedJobs = NONE_EXCLUDED,
    busy: Iterable[int] = (),
    units: Iterable[tuple[int, ...]] = (),
) -> tuple[PlanDraft, Turns]:
    """Return the changes to propose now, and the state if they are proposed. `room` is left unchanged. `busy`: numbers
    of jobs to leave as they are. `units`: numbers of co-located jobs, which are time-sliced as one."""
    live = _Live(table, now, kept_out, frozenset(busy), units)
    if not (live.waiting or live.parked):
        return PlanDraft(), Turns(since_s=turns.since_s)
    room.follow()
    filling = _Filling(placement, room, live)
    is_due = now >= turns.since_s + quantum_s
    try:
        if is_due:
            crowded = filling.start(live.waiting.values())
            turns = _switched(filling, live, crowded, turns, now, quantum_s)
            filling.enter(turns.entering)
        else:
            filling.enter(turns.entering)
            crowded = filling.start(job for job in live.waiting.values() if job.number not in turns.entering)
        filling.bring_back([number for number in live.parked if number not in turns.entering])
    finally:
        filling.undo()
    if not filling.entered.isdisjoint(turns.entering):
        left = {number: seat for number, seat in turns.entering.items() if number not in filling.entered}
        turns = replace(turns, entering=left)
    started = {change.number for change in filling.changes if not isinstance(change, SuspendChange)}
    shares = bool(crowded) or any(number not in started for number in live.parked)
    line = np.array(list(live.waiting), np.int64)
    next_s = turns.since_s + quantum_s if shares else math.inf
    return PlanDraft(tuple(filling.changes), waits=bool(crowded), next_change_s=next_s, line=line), turns


class _Live:
    """Pending, running and parked jobs by number, in the order in which they are served."""

    def __init__(
        self,
        table: LiveTable,
        now: float,
        kept_out: ExcludedJobs,
        busy: frozenset[int],
        units: Iterable[tuple[int, ...]],
    ) -> None:
        rows, facts = table.facts(now)
        self._facts = facts
        order = np.lexsort((facts.number, facts.arrival_s, -facts.priority))
        rows = rows[order]
        self.waiting: dict[int, JobRecord] = {}
        self.running: dict[int, tuple[JobRecord, Gang]] = {}
        self.parked: dict[int, tuple[JobRecord, Gang]] = {}
        self.busy = busy
        self.not_stopped = frozenset(kept_out.not_stopped)
        for row, waits in zip(rows.tolist(), table.is_waiting(rows).tolist(), strict=True):
            job, gang = table.jobs[row], table.gangs[row]
            if job is None:
                continue
            if waits:
                if job.number not in kept_out.not_started:
                    self.waiting[job.number] = job
            elif gang is None or job.next_epoch or job.ending is not None or job.state is not _HOLDING:
                continue
            elif gang.intent is _RUN:
                self.running[job.number] = (job, gang)
            elif job.number in busy:
                # It is parked on its way to another place.
                continue
            elif gang.phase is _PARKED and gang.park_level is _OFFLOAD:
                self.parked[job.number] = (job, gang)
        self._units = units
        # Present jobs of a unit by its first number; most passes need few units.
        self._there: dict[int, list[int]] = {}

    @cached_property
    def attained_s(self) -> dict[int, float]:
        return dict(zip(self._facts.number.tolist(), self._facts.attained_s.tolist(), strict=True))

    @cached_property
    def weight(self) -> dict[int, float]:
        return dict(zip(self._facts.number.tolist(), self._facts.weight.tolist(), strict=True))

    @cached_property
    def _unit_of(self) -> dict[int, tuple[int, ...]]:
        return {number: unit for unit in self._units for number in unit}

    def host_of(self, number: int) -> int | None:
        """Return the job that represents its unit; None if it does so itself, or is in no unit."""
        there = self._together(number)
        return there[0] if number in there[1:] else None

    def guests(self, number: int) -> Sequence[int]:
        """Return the other jobs of the unit that it represents."""
        there = self._together(number)
        return there[1:] if there[:1] == [number] else ()

    def _together(self, number: int) -> list[int]:
        """Return the jobs of its unit that share its devices, the representative first; empty without a unit."""
        unit = self._unit_of.get(number)
        if unit is None:
            return []
        found = self._there.get(unit[0])
        if found is None:
            gangs = [(n, self.running[n][1]) for n in unit if n in self.running]
            gangs += [(n, self.parked[n][1]) for n in unit if n in self.parked]
            # One of them may have resumed elsewhere by itself.
            seats = [(n, seat_of(gang.claims)) for n, gang in gangs if shares_all(gang.claims)]
            found = self._there[unit[0]] = [n for n, seat in seats if seat == seats[0][1]]
        return found

    def sharer(self, number: int, known: Mapping[int, SliceShare]) -> SliceShare:
        job, gang = self.running.get(number) or self.parked.get(number) or (self.waiting[number], None)
        runs = number in self.running
        guests = self.guests(number)
        stays = runs and not all(self._may_stop(*self.running[one]) for one in (number, *guests) if one in self.running)
        before = known.get(number, SliceShare(number, job.gpus, job.create_time))
        return structs.replace(
            before,
            gpus=job.gpus,
            weight=sum([self.weight[one] for one in (number, *guests)]),
            priority=job.spec.priority,
            is_preemptible=not stays,
            # To continue elsewhere takes more than a slice switch.
            is_bound=runs or bool(guests),
            seat=seat_of(gang.claims) if gang is not None else (),
            runs=runs,
            received_s=max(before.received_s, self.attained_s[number]),
        )

    def _may_stop(self, job: JobRecord, gang: Gang) -> bool:
        offered = job.capabilities
        return (
            job.spec.preemptible
            and job.number not in self.not_stopped
            and job.number not in self.busy
            and gang.phase is GangPhase.RUNNING
            and (offered.offload or offered.checkpoint)
        )


def seat_of(claims: Claims) -> Seat:
    return tuple([(claim.node, claim.device_mask) for claim in claims if claim.device_mask])


def takes_turns(job: JobRecord) -> bool:
    """Return whether the job may be time-sliced at all (`core.timeslice_admission`), whatever it does now."""
    spec = job.spec
    return (
        spec.preemptible and spec.time_limit_seconds is None and len(spec.roles) == 1 and not job.capabilities.no_turns
    )


def shares_all(claims: Claims) -> bool:
    """Return whether all of its devices may be shared."""
    return all(claim.device_mask == claim.shared_mask for claim in claims)


class _Filling:
    """Changes, with their places taken in the capacity index until `undo`."""

    def __init__(self, placement: PlacementPreference, room: CapacityIndex, live: _Live) -> None:
        self._placement, self._room, self._live = placement, room, live
        self.view = room.view
        self.changes: list[PlanChange] = []
        self.entered: set[int] = set()
        self._taken: list[Claims] = []
        shares = [share_of_memory(made, 1) for made in room.view.sets.values() if made.devices]
        self._least_memory = min(shares, default=0) // MOST_ROWS

    def undo(self) -> None:
        for claims in reversed(self._taken):
            self._room.give(claims)
        self._taken.clear()

    def start(self, jobs: Iterable[JobRecord]) -> list[JobRecord]:
        """Start the jobs that fit; return the others."""
        crowded = []
        vain: set[GangShape] = set()
        for job in jobs:
            shape = thin(job.shape, self._least_memory)
            claims = None if shape in vain else self._placement.place(self._room, PlacementRequest(shape))
            if claims is None:
                vain.add(shape)
                crowded.append(job)
            else:
                self._change(StartChange(job.number, job.revision, claims), claims)
        return crowded

    def enter(self, row: Mapping[int, Seat]) -> None:
        """Let jobs enter the slice where their devices are free. Keep free devices for jobs that wait for others."""
        waits = []
        for number, seat in row.items():
            if number in self._live.running or not self._enter(number, seat):
                waits.append((number, seat))
        for number, seat in waits:
            if number in self._live.parked or number in self._live.waiting:
                self._keep(seat)

    def bring_back(self, numbers: Iterable[int]) -> None:
        """Resume parked jobs in place, or elsewhere on their nodes, where they fit."""
        for number in numbers:
            job, gang = self._live.parked[number]
            seat = seat_of(gang.claims)
            host = self._live.host_of(number)
            if host is not None:
                if host in self._live.running:
                    self._come_back(job, gang, host)
                continue
            if not self._enter(number, seat) and len(seat) == 1:
                node, mask = seat[0]
                slot = self.view.slots.get(node)
                if slot is None or not self.view.available[slot]:
                    continue
                free = self.view.topologies[slot].best(self.view.free[slot], mask.bit_count(), job.spec.locality.widest)
                if free is not None:
                    self._enter(number, ((node, free),))

    def stop(self, number: int) -> None:
        """Park a job with the guests on its devices."""
        for one in (number, *self._live.guests(number)):
            if one in self._live.running:
                job, gang = self._live.running[one]
                has_arena = job.capabilities.offload and has_arenas(gang)
                level = SuspendLevel.OFFLOAD if has_arena else SuspendLevel.CHECKPOINT
                self.changes.append(SuspendChange(one, job.revision, level=level))

    def _come_back(self, job: JobRecord, gang: Gang, host: int) -> None:
        """Resume a guest beside its host, where they share all of its devices."""
        there = [self._live.running[one][0] for one in (host, *self._live.guests(host)) if one in self._live.running]
        lacks = gang.lacking_claims
        if all(map(self._has_cores, lacks)) and fits_beside(job, gang.parked_claims, there, self.view):
            claims = [
                structs.replace(one, shared_mask=own.shared_mask) for one, own in zip(lacks, gang.claims, strict=True)
            ]
            self._change(ResumeChange(job.number, job.revision), tuple(claims))

    def memory_of(self, job: JobRecord, node: str, gpus: int) -> int:
        """Return the least bytes that so many GPUs of a gang need on a node."""
        shape = thin(job.shape, self._least_memory)
        tasks = (gpus // shape.roles[0].shape.gpus,)
        return demand(self.view.topology(node).configuration_set, shape, tasks).memory_bytes

    def _enter(self, number: int, seat: Seat) -> bool:
        parked = self._live.parked.get(number)
        job = parked[0] if parked is not None else self._live.waiting.get(number)
        if job is None:
            return True
        gang = parked[1] if parked is not None else None
        if not all(self._is_free(node, mask) for node, mask in seat):
            return False
        if gang is not None and seat == seat_of(gang.claims):
            if any(piece.held is None for piece in gang.pieces) or not all(map(self._has_cores, gang.lacking_claims)):
                return False
            self._change(ResumeChange(job.number, job.revision), gang.lacking_claims)
            return True
        found = self._claims_at(job, seat)
        if found is None:
            return False
        kind = StartChange if gang is None else MoveChange
        self._change(kind(job.number, job.revision, found), found)
        return True

    def _claims_at(self, job: JobRecord, seat: Seat) -> Claims | None:
        """Return the claims of a gang of one role on exactly these devices; None where cores or memory are missing."""
        shape = thin(job.shape, self._least_memory)
        task = shape.roles[0].shape
        found = []
        for node, mask in seat:
            slot = self.view.slots[node]
            topology = self.view.topologies[slot]
            tasks = (mask.bit_count() // task.gpus,)
            needed = demand(topology.configuration_set, shape, tasks)
            cores = split_cores(topology, self.view.millicores[slot], mask, needed.millicores)
            left = self.view.memory[slot] - needed.memory_bytes
            if cores is None or left < 0:
                return None
            arena = needed.arena_bytes if needed.arena_bytes <= left else 0
            found.append(Claim(node, mask, cores, needed.memory_bytes, arena, tasks))
        return tuple(found)

    def _change(self, change: PlanChange, taken: Claims) -> None:
        self.changes.append(change)
        self.entered.add(change.number)
        self._take(taken)

    def _keep(self, seat: Seat) -> None:
        for node, mask in seat:
            slot = self.view.slots.get(node)
            if slot is not None and self.view.free[slot] & mask:
                none = (0,) * len(self.view.millicores[slot])
                self._take((Claim(node, self.view.free[slot] & mask, none, 0),))

    def _take(self, claims: Claims) -> None:
        self._room.take(claims)
        self._taken.append(claims)

    def _is_free(self, node: str, mask: int) -> bool:
        slot = self.view.slots.get(node)
        return slot is not None and self.view.available[slot] and not mask & ~self.view.free[slot]

    def _has_cores(self, claim: Claim) -> bool:
        """Return whether its node has the cores of a claim free, and the host memory that the claim names."""
        slot = self.view.slots[claim.node]
        return claim.memory_bytes <= self.view.memory[slot] and all(
            map(le, claim.millicores, self.view.millicores[slot])
        )


@lru_cache(4096)
def thin(shape: GangShape, memory_bytes: int) -> GangShape:
    """Return the shape with `memory_bytes` for each GPU where it names no memory. A whole share would leave none to
    others."""
    if not memory_bytes:
        return shape
    roles = []
    for role in shape.roles:
        task = role.shape
        if task.gpus and not task.memory_bytes:
            task = structs.replace(task, memory_bytes=memory_bytes * task.gpus)
        roles.append(structs.replace(role, shape=task))
    return structs.replace(shape, roles=tuple(roles))


def as_held(shape: GangShape, gang: Gang) -> GangShape:
    """Return the shape of a gang of one role with the host memory that each of its tasks has now."""
    role = shape.roles[0]
    each = max([claim.memory_bytes // max(1, sum(claim.tasks)) for claim in gang.claims], default=0)
    task = structs.replace(role.shape, memory_bytes=max(role.shape.memory_bytes, each))
    return structs.replace(shape, roles=(structs.replace(role, shape=task),))


def _switched(
    filling: _Filling, live: _Live, crowded: Sequence[JobRecord], turns: Turns, now: float, quantum_s: float
) -> Turns:
    """Choose the next slices of all time-sliced jobs: stop those that leave, and record those that enter."""
    seats = {
        number: seat_of(gang.claims)
        for number, (_, gang) in (*live.running.items(), *live.parked.items())
        if live.host_of(number) is None
    }
    # A job that could not enter the last slice, though its devices were free, is passed over in this one.
    crowded = [job for job in crowded if job.number not in turns.entering]
    joined = _joined(filling, seats, crowded)
    shared = {name for number in live.parked if number in seats for name, _ in seats[number]}
    shared.update(name for names in joined.values() for name in names)
    if not shared:
        return Turns(since_s=now)
    wanted: list[Seat] = [*seats.values(), *(tuple((name, 0) for name in names) for names in joined.values())]
    of_node: dict[str, list[int]] = {}
    for number, names in (*((n, [name for name, _ in seat]) for n, seat in seats.items()), *joined.items()):
        for name in names:
            of_node.setdefault(name, []).append(number)
    seconds = now - turns.since_s if math.isfinite(turns.since_s) else 0.0
    sharers: dict[int, SliceShare] = {}
    entering: dict[int, Seat] = {}
    for names in node_sets(wanted):
        if not shared.intersection(names):
            continue
        numbers = sorted({number for name in names for number in of_node.get(name, ())} - turns.entering.keys())
        members = [live.sharer(number, turns.sharers) for number in numbers]
        running = [one.number for one in members if one.runs]
        credit = credited(members, running, seconds, quantum_s)
        sharers.update({one.number: one for one in credit})
        nodes = _nodes(filling.view, names, seats, running)
        if not nodes:
            continue
        row = next_row(credit, nodes, quantum_s)
        enters = {number: row.seats[number] for number in row.entering(credit)}
        enters = {number: seat for number, seat in enters.items() if _is_close(live, number, seat, filling.view)}
        if enters:
            entering.update(enters)
            for number in row.leaving(credit):
                filling.stop(number)
    return Turns(sharers, entering, now)


def _nodes(view: View, names: Iterable[str], seats: Mapping[int, Seat], running: Sequence[int]) -> list[SharedNode]:
    """Return the nodes with their free devices and those of running gangs."""
    masks = {name: view.free[slot] for name in names if (slot := view.slots.get(name)) is not None}
    for number in running:
        for name, mask in seats[number]:
            if name in masks:
                masks[name] |= mask
    return [SharedNode(name, view.topology(name), mask) for name, mask in masks.items() if mask]


def _is_close(live: _Live, number: int, seat: Seat, view: View) -> bool:
    """Return whether a gang that fits into one node is in one."""
    job = live.waiting.get(number) or live.parked[number][0]
    most = max([view.topology(name).devices for name, _ in seat])
    return len(job.spec.roles) == 1 and (len(seat) == 1 or job.gpus > most)


def _joined(filling: _Filling, seats: Mapping[int, Seat], crowded: Sequence[JobRecord]) -> dict[int, tuple[str, ...]]:
    """Return the nodes where jobs without free devices are time-sliced, by number: nodes with gangs of the same size
    first, then the least loaded. Jobs are left out that have to wait for devices or for the host memory of parked
    gangs."""
    view = filling.view
    memory: dict[str, int] = {}
    load: dict[str, int] = {name: 0 for slot, name in enumerate(view.nodes) if name and view.available[slot]}
    for seat in seats.values():
        for name, mask in seat:
            if name in load:
                load[name] += mask.bit_count()
    found: dict[int, tuple[str, ...]] = {}
    by_size: dict[tuple[int, str], list[tuple[bool, float, str]]] = {}
    wide = 0
    for job in crowded:
        if len(job.spec.roles) != 1:
            continue
        of = (job.gpus, job.spec.device_type)
        if of not in by_size:
            by_size[of] = [_rank(view, name, load, job) for name in load if _may_host(view, name, job)]
            heapq.heapify(by_size[of])
        line = by_size[of]
        most = max([view.topology(name).devices for _, _, name in line], default=0)
        if not most or (job.gpus > most and wide == _MOST_WIDE):
            continue
        wide += job.gpus > most
        names: list[str] = []
        while line and len(names) < -(-job.gpus // most):
            entry = heapq.heappop(line)
            name = entry[2]
            fresh = _rank(view, name, load, job)
            if fresh != entry:
                heapq.heappush(line, fresh)
            elif fresh[1] <= MOST_ROWS and view.topology(name).devices >= min(job.gpus, most):
                needed = filling.memory_of(job, name, min(job.gpus, most))
                if needed <= memory.setdefault(name, view.memory[view.slots[name]]):
                    names.append(name)
        if len(names) == -(-job.gpus // most):
            found[job.number] = tuple(sorted(names))
            for name in names:
                load[name] += min(job.gpus, most)
                memory[name] -= filling.memory_of(job, name, min(job.gpus, most))
        for name in names:
            heapq.heappush(line, _rank(view, name, load, job))
    return found


def _rank(view: View, name: str, load: Mapping[str, int], job: JobRecord) -> tuple[bool, float, str]:
    slot = view.slots[name]
    devices = view.topologies[slot].devices
    return (view.affinity[slot] != job.gpus, (load[name] + min(job.gpus, devices)) / devices, name)


def _may_host(view: View, name: str, job: JobRecord) -> bool:
    made = view.topology(name).configuration_set
    return made.devices > 0 and job.spec.device_type in ("", made.device_type)
