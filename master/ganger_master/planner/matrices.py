"""Turns for a live cluster: whoever finds room starts, and who finds none joins others on their devices.

A matrix is proposed when somebody joins; from then on the nodes switch its rows by themselves (docs/design/006). Who
joins takes the devices with the fewest gangs, of those whose gangs can take turns with it; its first turn is the next.
Rows are filled in the order in which gangs came, then with everybody who still fits, so that no device idles while a
gang that is on it could run. A gang that takes turns with others although there is room elsewhere goes there.
When nobody joins, who is beside one that has received less than its share goes to one that has more (`fairness`); off a
node that is drained who found no free devices elsewhere goes to take turns there. Who does so where the master tells.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np
from ganger.cluster.claims import split_cores
from ganger.cluster.fit import MEMORY_SHARE, demand, share_of_memory
from ganger.cluster.resources import Claim
from ganger.cluster.room import CapacityIndex
from ganger.cluster.topology import bits
from ganger.cluster.view import View
from msgspec import structs

from ganger_master.core.change_reason import NO_PURPOSE, Goal, Purpose
from ganger_master.core.colocation import has_arenas
from ganger_master.core.commands import CHANGES_LIMIT, CLAIMS_LIMIT, Change
from ganger_master.core.gang_orders import same_place
from ganger_master.core.model import Gang, GangIntent, GangPhase, JobRecord, JobState, SuspendLevel
from ganger_master.core.moves import can_hand_over
from ganger_master.planner.host_memory import Shortage, make_room
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.migration_plans import is_free
from ganger_master.planner.plan import PlanDraft
from ganger_master.planner.refusal_backoff import NOTHING_KEPT_OUT, KeptOut
from ganger_master.planner.slices import MOST_ROWS, Claims, seat_of, takes_turns, thin
from ganger_master.planner.timeslice_stage import NOTHING as NOTHING_OWED
from ganger_master.planner.timeslice_stage import Fairness, Pairs, can_go, going
from ganger_master.policies.placements import PlacementPreference, Want
from ganger_master.policies.slicing import Seat

# Of those who wait, as many are looked at in one pass; of those who join, as many at once.
_WAITING_MOST: Final = 2_000
_JOINERS_MOST: Final = 64
# Rows of a cycle, if everybody has a turn in so many: who is to have the least waits no longer for it.
_CYCLE_MOST: Final = 12
_ANYWHERE: Final = Want()
_SETTLED: Final = (GangPhase.STARTING, GangPhase.RUNNING)

_Device: TypeAlias = tuple[str, int]


@dataclass(frozen=True, slots=True)
class SlicedJob:
    """One who takes turns, or is to: `claims` are where it is, or is to be; `starts`: it waits, and is to begin there;
    `purpose`: it runs elsewhere, and is to move there for this."""

    job: JobRecord
    gang: Gang | None
    claims: Claims
    purpose: Purpose = NO_PURPOSE

    @property
    def number(self) -> int:
        return self.job.number

    @property
    def starts(self) -> bool:
        """Whether it has nothing yet where it is to be; of what rests there only the devices are missing."""
        return self.gang is None or not same_place(self.gang.claims, self.claims)

    @property
    def devices(self) -> frozenset[_Device]:
        return frozenset((claim.node, device) for claim in self.claims for device in bits(claim.device_mask))

    @property
    def missing_claims(self) -> Claims:
        """What it needs there beyond what its gang holds: a gang at OFFLOAD keeps less host memory than it claims."""
        return self.claims if self.gang is None or self.starts else self.gang.lacking_claims


def plan_matrices(
    placement: PlacementPreference,
    table: LiveTable,
    now: float,
    room: CapacityIndex,
    quantum_s: float | None,
    kept_out: KeptOut = NOTHING_KEPT_OUT,
    busy: Collection[int] = (),
    fairness: Fairness = NOTHING_OWED,
    draining: Collection[str] = (),
    changing: Collection[int] = (),
) -> PlanDraft:
    """The changes to propose now. `room` is left as it is. `quantum_s` None: nobody takes turns. `busy`: numbers of
    those who are not to be disturbed. `draining`: names of nodes that are to be emptied. `changing`: numbers of node
    sets whose last change is not yet made on all their nodes."""
    room.refresh()
    filling = _Filling(placement, room)
    waiting = _waiting(table, kept_out)
    parked = [pair for pair in _rested(table) if pair[0].number not in busy]
    running = [pair for pair in table.running if pair[0].number not in busy]
    try:
        stranded = filling.bring_back(parked)
        joining = _Joining(room.view, running, kept_out, filling)
        crowded = filling.start(waiting, joining.may_go_on if quantum_s is not None else None)
        if quantum_s is not None:
            joining.join((*stranded, *crowded))
            if not (crowded or parked):
                filling.part(joining.sharers)
            joining.leave(draining, fairness)
            # Who waits and may join nobody is no reason to leave those who share as they are.
            if not (filling.changes or joining.has_news):
                joining.balance(fairness, running, now, quantum_s)
        changes = list(filling.changes)
        if quantum_s is not None:
            changes += joining.changes(quantum_s, changing)
            spared = {*busy, *kept_out.not_stopped, *[change.number for change in changes]}
            changes += make_room(joining.shortages, table.running, table.going, spared)
    finally:
        filling.undo()
    line = np.array([job.number for job, _ in waiting], np.int64)
    shares = quantum_s is not None and any(gang.node_set for _, gang in running)
    # Who has received what is looked at again.
    next_s = now + quantum_s if quantum_s is not None and shares else math.inf
    return PlanDraft(tuple(changes), waits=bool(crowded or stranded), line=line, next_change_s=next_s)


def rows_of(sharers: Sequence[SlicedJob], cores: Mapping[str, Sequence[int]]) -> list[list[SlicedJob]]:
    """Who runs at once, row by row: nobody twice on a device, nor more cores of a node than there are for a row.

    A row takes those first who have had least for their weight, then everybody who still fits (stride scheduling,
    Waldspurger and Weihl 1995). Of all cycles in which everybody has a turn, up to `_CYCLE_MOST` rows, it is the first
    of those after which the gangs of each device are nearest to their shares.
    """
    if not sharers:
        return []
    weights = [one.job.spec.weight for one in sharers]
    crowds = _crowds(sharers)
    rows: list[list[SlicedJob]] = []
    had = [0] * len(sharers)
    length, least = 0, math.inf
    while not all(had) or (len(rows) < _CYCLE_MOST and least > 0.0):
        row: list[SlicedJob] = []
        for index in sorted(range(len(sharers)), key=lambda index: had[index] / weights[index]):
            if not row or _fits(sharers[index], row, cores):
                row.append(sharers[index])
                had[index] += 1
        rows.append(row)
        error = _error([count / weight for count, weight in zip(had, weights, strict=True)], crowds)
        if all(had) and error < least:
            length, least = len(rows), error
    return rows[:length]


def _crowds(sharers: Sequence[SlicedJob]) -> list[list[int]]:
    """The places in line of those who are on one device, device by device."""
    found: dict[_Device, list[int]] = {}
    for index, one in enumerate(sharers):
        for device in one.devices:
            found.setdefault(device, []).append(index)
    return [crowd for crowd in found.values() if len(crowd) > 1]


def _error(had: Sequence[float], crowds: Sequence[Sequence[int]]) -> float:
    """By which part of the largest share on its device the smallest one is short, at most."""
    apart = [(min(shares), max(shares)) for shares in ([had[index] for index in crowd] for crowd in crowds)]
    return max((1.0 - low / high for low, high in apart if high), default=0.0)


def _fits(one: SlicedJob, row: Sequence[SlicedJob], cores: Mapping[str, Sequence[int]]) -> bool:
    if any(one.devices & other.devices for other in row):
        return False
    for claim in one.claims:
        there = [claim.millicores] + [own.millicores for other in row for own in other.claims if own.node == claim.node]
        if any(sum(wanted) > have for wanted, have in zip(zip(*there, strict=True), cores[claim.node], strict=True)):
            return False
    return True


def may_take_turns(job: JobRecord, gang: Gang | None) -> bool:
    """Whether it would be let in (`core.timeslice_admission`), as far as can be told from here."""
    if not takes_turns(job):
        return False
    offered = job.capabilities
    if gang is None:
        return not (job.epoch or (offered.known and not offered.offload))
    settled = gang.intent is GangIntent.RUN and gang.phase in (GangPhase.STARTING, GangPhase.RUNNING)
    able = offered.offload or not offered.known
    return settled and able and not job.next_epoch and job.ending is None and has_arenas(gang)


def _waiting(table: LiveTable, kept_out: KeptOut) -> list[tuple[JobRecord, Gang | None]]:
    """Pending jobs, each with the gang in which it rests in host memory since a user suspended it, if there is one."""
    found: list[tuple[JobRecord, Gang | None]] = []
    for job in table.waiting_jobs(_WAITING_MOST):
        if job.number not in kept_out.not_started:
            known = table.get(job.number) if job.epoch else None
            gang = None if known is None else known[1]
            rests = gang is not None and gang.phase is GangPhase.PARKED and gang.park_level is SuspendLevel.OFFLOAD
            found.append((job, gang if rests else None))
    return found


def _rested(table: LiveTable) -> list[tuple[JobRecord, Gang]]:
    """Whom a plan has parked in host memory."""
    found = []
    for job, gang in zip(table.jobs, table.gangs, strict=True):
        if job is None or gang is None or job.state is not JobState.HOLDING or job.next_epoch or job.ending is not None:
            continue
        if gang.phase is GangPhase.PARKED and gang.park_level is SuspendLevel.OFFLOAD:
            found.append((job, gang))
    return sorted(found, key=lambda pair: pair[0].number)


class _Filling:
    """Who finds room, with the places taken in a room, and all of it undone."""

    def __init__(self, placement: PlacementPreference, room: CapacityIndex) -> None:
        self._placement, self._room = placement, room
        self.changes: list[Change] = []
        self._taken: list[Claims] = []
        shares = [share_of_memory(made, 1) for made in room.view.sets.values() if made.devices]
        # A whole share would leave none for others.
        self.least_memory = min(shares, default=0) // MOST_ROWS
        # Host memory in bytes, by node, that is kept for jobs that rest there.
        self.kept_memory: Counter[str] = Counter()

    def undo(self) -> None:
        for claims in reversed(self._taken):
            self._room.give(claims)
        self._taken.clear()

    def start(
        self, pairs: Iterable[tuple[JobRecord, Gang | None]], may_go_on: Callable[[JobRecord, Gang], bool] | None
    ) -> list[tuple[JobRecord, Gang | None]]:
        """Starts jobs that find room, one that rests where it is if it can; the others. `may_go_on`: whether a job that
        rests could take turns there, so that jobs after it leave it the memory; None: jobs take no turns."""
        crowded, vain = [], set()
        for job, gang in pairs:
            if gang is not None and is_free(self._room.view, gang.lacking_claims):
                self._change(job, "START", gang.claims, gang.lacking_claims)
                continue
            shape = thin(job.shape, self.least_memory)
            is_bound = gang is not None and not can_hand_over(job)
            claims = None if shape in vain or is_bound else self._placement.place(self._room, shape, _ANYWHERE)
            if claims is None:
                if not is_bound:
                    vain.add(shape)
                crowded.append((job, gang))
                if gang is not None and may_go_on is not None and may_go_on(job, gang):
                    self._keep_memory(gang.lacking_claims)
            else:
                self._change(job, "START", claims)
        return crowded

    def _keep_memory(self, lacking: Claims) -> None:
        """As much of it as there is."""
        view = self._room.view
        for claim in lacking:
            slot = view.slots[claim.node]
            memory = max(0, min(claim.memory_bytes, int(view.memory[slot])))
            kept = (Claim(claim.node, 0, (0,) * len(view.millicores[slot]), memory),)
            self._room.take(kept)
            self._taken.append(kept)
            self.kept_memory[claim.node] += memory

    def bring_back(self, parked: Iterable[tuple[JobRecord, Gang]]) -> list[tuple[JobRecord, Gang]]:
        """Who rests goes on where it was, or elsewhere, where there is room; the others."""
        stranded = []
        view = self._room.view
        for job, gang in parked:
            own = gang.lacking_claims
            if is_free(view, own):
                self._change(job, "RESUME", (), own)
                continue
            shape = thin(job.shape, self.least_memory)
            claims = self._placement.place(self._room, shape, _ANYWHERE) if can_hand_over(job) else None
            if claims is None:
                stranded.append((job, gang))
            else:
                self._change(job, "MOVE", claims)
        return stranded

    def part(self, sharers: Mapping[int, SlicedJob]) -> None:
        """One who takes turns with others although there is room for it goes there."""
        staying = [one for one in sharers.values() if one.gang is not None and one.gang.phase is not GangPhase.MOVING]
        crowds = Counter(device for one in staying for device in one.devices)
        for one in staying:
            is_crowded = any(crowds[device] > 1 for device in one.devices)
            if one.gang is None or not one.gang.node_set or not is_crowded or not can_go(one.job, one.gang):
                continue
            claims = self._placement.place(self._room, thin(one.job.shape, self.least_memory), _ANYWHERE)
            if claims is not None:
                self._change(one.job, "MOVE", claims, purpose=Purpose(Goal.FAIRNESS, detail="devices are free"))
                return

    def _change(
        self, job: JobRecord, kind: str, claims: Claims, taken: Claims = (), purpose: Purpose = NO_PURPOSE
    ) -> None:
        self.changes.append(Change(job.number, job.revision, kind, claims, purpose=purpose))
        self._room.take(taken or claims)
        self._taken.append(taken or claims)


class _Joining:
    """Who takes turns, and who is to join them; places are found one after the other."""

    def __init__(
        self, view: View, running: Iterable[tuple[JobRecord, Gang]], kept_out: KeptOut, filling: _Filling
    ) -> None:
        self._view, self._filling = view, filling
        # Of jobs that go on where they rest once there is memory for them.
        self.shortages: list[Shortage] = []
        self.sharers: dict[int, SlicedJob] = {}
        self._on: dict[_Device, set[int]] = {}
        # Devices of somebody who takes no turns.
        self._closed: set[_Device] = set()
        # By node: host memory in bytes that joining jobs are given, and what is kept for those that lack some.
        self._given_memory: Counter[str] = Counter()
        # By node: what those hold together who take turns there, or may.
        self._held_cores: dict[str, tuple[int, ...]] = {}
        self._joined: dict[int, SlicedJob] = {}
        # Where they are to be.
        self._moved: dict[int, SlicedJob] = {}
        barred = {*kept_out.not_started, *kept_out.not_stopped}
        there = [SlicedJob(job, gang, gang.claims) for job, gang in running]
        crowds = Counter(device for one in there for device in one.devices)
        for one in there:
            job, gang = one.job, one.gang
            assert gang is not None, "it runs"
            # Who shares devices at once takes no turns; a mark of those who have left says nothing.
            is_alone = all(crowds[device] == 1 for device in one.devices)
            if gang.node_set or (is_alone and may_take_turns(job, gang) and job.number not in barred):
                self._put(one)
                self._count_cores(gang)
            else:
                self._closed.update(one.devices)
        self._seen = set(self._on)
        self._kept_out = kept_out

    @property
    def has_news(self) -> bool:
        return bool(self._joined or self._moved)

    def join(self, crowded: Sequence[tuple[JobRecord, Gang | None]]) -> None:
        """Jobs that find no room take turns: where they rest, if they do, else with others."""
        for job, gang in crowded[:_WAITING_MOST]:
            if len(self._joined) >= _JOINERS_MOST:
                return
            one = self._joiner(job, gang)
            if one is not None:
                self._join(one)

    def _joiner(self, job: JobRecord, gang: Gang | None) -> SlicedJob | None:
        if gang is not None:
            return self._back(job, gang)
        return self._best(job) if may_take_turns(job, None) else None

    def may_go_on(self, job: JobRecord, gang: Gang) -> bool:
        """Whether a job that rests may take turns where it is, if there is host memory for it."""
        if job.number in self._kept_out.not_started or not takes_turns(job):
            return False
        return self._may_join(_where_it_rests(job, gang)) and all(map(self._fits_cores, gang.claims))

    def _back(self, job: JobRecord, gang: Gang) -> SlicedJob | None:
        if job.number in self._kept_out.not_started or not takes_turns(job):
            return None
        there = _where_it_rests(job, gang)
        may_go_on = self.may_go_on(job, gang)
        if may_go_on and self._fits_memory(there):
            return there
        # What a plan has parked goes back to where it was; a user's job is not to wait for what happens there.
        best = self._best(job) if job.state is JobState.PENDING and can_hand_over(job) else None
        if best is not None:
            return replace(best, gang=gang)
        if may_go_on:
            self._take_memory(there)
            short = {claim.node: -left for claim in there.claims if (left := self._memory_left(claim.node)) < 0}
            self.shortages.append(Shortage(job, short))
        return None

    def leave(self, draining: Collection[str], fairness: Fairness) -> None:
        """Off these nodes, onto devices of others."""
        for number, one in list(self.sharers.items()):
            if number in self._joined or not any(claim.node in draining for claim in one.claims):
                continue
            best = self._best(one.job) if one.gang is not None and can_go(one.job, one.gang) else None
            if best is not None and self._is_settled(best.claims, fairness):
                self._move(replace(best, gang=one.gang, purpose=Purpose(Goal.DRAIN)))

    def balance(self, fairness: Fairness, pairs: Pairs, now: float, quantum_s: float) -> None:
        """Away from who is behind, to be with who is ahead."""
        for one in going(fairness, pairs, self.sharers.keys(), self._view, now, quantum_s):
            guest, host = self.sharers[one.number], self.sharers[one.host]
            there = self._at(guest.job, seat_of(host.claims))
            settled = self._is_settled((*host.claims, *guest.claims), fairness)
            if there is not None and settled and self._may_join(there):
                detail = f"it is {one.gap_s:.1f} s behind jobs/{one.host}"
                self._move(replace(there, gang=guest.gang, purpose=Purpose(Goal.FAIRNESS, one.helped, detail=detail)))

    def _best(self, job: JobRecord) -> SlicedJob | None:
        """On the devices with the fewest gangs."""
        for *_, seat in sorted([key for seat in self._seats(job) if (key := self._key(seat)) is not None]):
            one = self._at(job, seat)
            if one is not None and self._may_join(one):
                return one
        return None

    def _is_settled(self, claims: Claims, fairness: Fairness) -> bool:
        """Whether nobody who takes turns on these nodes is on its way: nothing else becomes of a set meanwhile."""
        nodes = {claim.node for claim in claims}
        return not any(map(nodes.intersection, fairness.bound_for.values())) and all(
            one.gang is None or (one.gang.phase in _SETTLED and not one.job.next_epoch)
            for one in self.sharers.values()
            if any(claim.node in nodes for claim in one.claims)
        )

    def _move(self, one: SlicedJob) -> None:
        self._moved[one.number] = one
        for device in one.devices:
            self._on.setdefault(device, set()).add(one.number)
        self._take_memory(one)

    def changes(self, quantum_s: float, changing: Collection[int]) -> list[Change]:
        """One group for each set that somebody joins; who would join one that is changing waits until that is done."""
        changes: list[Change] = []
        for present in self._sets():
            there = [one for one in present if one.number not in self._moved]
            numbers = {one.gang.node_set for one in there if one.gang is not None and one.gang.node_set}
            coming = [self._moved[one.number] for one in present if one.number in self._moved]
            is_moving = any(one.gang is not None and one.job.next_epoch for one in there)
            if len(numbers) > 1 or is_moving or not numbers.isdisjoint(changing):
                # Nothing else becomes of a set while it changes, or one of it moves.
                continue
            # Who moves within the set takes turns where it is until it rests.
            staying = [one for one in present if one.number in self._moved and one.gang is not None]
            staying = [one for one in staying if one.gang is not None and one.gang.node_set in numbers]
            numbers.discard(0)
            members = [*there, *coming]
            if len(members) > CHANGES_LIMIT or sum([len(one.claims) for one in members]) > CLAIMS_LIMIT:
                # The matrix of a set is one group of changes, and no plan may be longer.
                continue
            rows = rows_of([*there, *staying, *coming], self._cores_of([*there, *staying]))
            level = SuspendLevel.PAUSE if self._all_stay([*members, *staying]) else SuspendLevel.OFFLOAD
            for one in members:
                own = tuple([index for index, row in enumerate(rows) if one in row])
                changes.append(
                    Change(
                        one.number,
                        one.job.revision,
                        "ROW",
                        one.claims if one.starts or one.number in self._moved else (),
                        level=level,
                        # A job has one change in a plan, so no other group there is of this name.
                        together=members[0].number,
                        node_set=max(numbers, default=0),
                        rows=own,
                        quantum_seconds=quantum_s,
                        purpose=one.purpose,
                    )
                )
        return changes

    # -- places --------------------------------------------------------------------------------------------------------

    def _seats(self, job: JobRecord) -> list[Seat]:
        """Where gangs of its size are, and on each node the devices with the fewest gangs."""
        found = {seat_of(one.claims) for one in self.sharers.values() if one.job.gpus == job.gpus}
        for name in sorted({name for name, _ in self._on}):
            slot = self._view.slots.get(name)
            if slot is None or not self._view.available[slot]:
                continue
            topology = self._view.topologies[slot]
            open_ones = [d for d in range(topology.devices) if self._is_open((name, d), job)]
            open_ones.sort(key=lambda device: (len(self._on.get((name, device), ())), device))
            if len(open_ones) >= job.gpus > 0:
                found.add(((name, sum(1 << device for device in open_ones[: job.gpus])),))
        return sorted(found)

    def _is_open(self, device: _Device, job: JobRecord) -> bool:
        if device in self._closed:
            return False
        there = [self.sharers[number] for number in self._on.get(device, ())]
        if not there:
            slot = self._view.slots[device[0]]
            return bool(self._view.free[slot] >> device[1] & 1)
        return len(there) < MOST_ROWS and all(one.job.spec.priority == job.spec.priority for one in there)

    def _key(self, seat: Seat) -> tuple[int, int, int, Seat] | None:
        """Of places with as many gangs those that the fewest lose turns for."""
        there = [self._on.get((name, device), set()) for name, mask in seat for device in bits(mask)]
        counts = [len(gangs) for gangs in there]
        return (max(counts), sum(counts), len(set().union(*there)), seat) if counts else None

    def _at(self, job: JobRecord, seat: Seat) -> SlicedJob | None:
        """A gang of one role on just these devices; None where cores or memory are missing, or that is not for it."""
        task = job.shape.roles[0].shape
        claims = []
        for name, mask in seat:
            slot = self._view.slots.get(name)
            if slot is None or not self._view.available[slot] or not task.gpus or mask.bit_count() % task.gpus:
                return None
            topology = self._view.topologies[slot]
            made = topology.configuration_set
            if job.spec.device_type not in ("", made.device_type):
                return None
            # Of whom nothing is known it could be all that a device has.
            arena = job.arena_bytes_per_device or made.device_memory_bytes
            shape = structs.replace(thin(job.shape, self._filling.least_memory), arena_bytes_per_device=arena)
            tasks = (mask.bit_count() // task.gpus,)
            needed = demand(made, shape, tasks)
            cores = split_cores(topology, self._free_cores(name), mask, needed.millicores)
            if cores is None or needed.memory_bytes + needed.arena_bytes > self._memory_left(name):
                return None
            claims.append(Claim(name, mask, cores, needed.memory_bytes, needed.arena_bytes, tasks))
        if sum(claim.device_mask.bit_count() for claim in claims) != job.gpus:
            return None
        closed = self._kept_out.nodes.get(job.number, frozenset())
        return None if any(claim.node in closed for claim in claims) else SlicedJob(job, None, tuple(claims))

    def _free_cores(self, name: str) -> tuple[int, ...]:
        """What a row may have of a node: what is free, and what those hold who take turns there or will."""
        free = self._view.millicores[self._view.slots[name]]
        return tuple(
            [have + more for have, more in zip(free, self._held_cores.get(name, (0,) * len(free)), strict=True)]
        )

    def _count_cores(self, gang: Gang) -> None:
        for piece in gang.pieces:
            if piece.held is not None:
                cores, known = piece.held.millicores, self._held_cores.get(piece.claim.node)
                if known is not None:
                    cores = tuple([have + more for have, more in zip(known, cores, strict=True)])
                self._held_cores[piece.claim.node] = cores

    def _fits_cores(self, claim: Claim) -> bool:
        slot = self._view.slots.get(claim.node)
        if slot is None or not self._view.available[slot]:
            return False
        return all(want <= have for want, have in zip(claim.millicores, self._free_cores(claim.node), strict=True))

    def _may_join(self, one: SlicedJob) -> bool:
        return all(self._is_open(device, one.job) for device in one.devices)

    def _join(self, one: SlicedJob) -> None:
        self._joined[one.number] = one
        self._put(one)
        self._take_memory(one)

    def _fits_memory(self, one: SlicedJob) -> bool:
        return all(_memory_of(claim) <= self._memory_left(claim.node) for claim in one.missing_claims)

    def _memory_left(self, name: str) -> int:
        free = int(self._view.memory[self._view.slots[name]]) + self._filling.kept_memory[name]
        return free - self._given_memory[name]

    def _take_memory(self, one: SlicedJob) -> None:
        for claim in one.missing_claims:
            self._given_memory[claim.node] += _memory_of(claim)

    def _put(self, one: SlicedJob) -> None:
        self.sharers[one.number] = one
        for device in one.devices:
            self._on.setdefault(device, set()).add(one.number)

    # -- sets ----------------------------------------------------------------------------------------------------------

    def _sets(self) -> list[list[SlicedJob]]:
        """Who takes turns together: those who join, all on their devices, and all who do so on the same nodes."""
        left = {**self._joined, **self._moved}
        spots = {**self.sharers, **self._moved}
        found = []
        while left:
            members = {next(iter(left))}
            nodes: set[str] = set()
            while True:
                nodes.update(claim.node for number in members for claim in spots[number].claims)
                grown = set(members)
                for number in members:
                    for device in spots[number].devices:
                        grown.update(self._on[device] - self._elsewhere(device))
                grown.update(
                    number
                    for number, one in spots.items()
                    if (number in left or (one.gang is not None and one.gang.node_set))
                    and any(claim.node in nodes for claim in one.claims)
                )
                if grown == members:
                    break
                members = grown
            for number in members:
                left.pop(number, None)
            # Who came first has the first row.
            found.append(
                sorted((self.sharers[n] for n in members), key=lambda one: (one.number in self._joined, one.number))
            )
        return found

    def _elsewhere(self, device: _Device) -> set[int]:
        """Those on a device who are about to leave it."""
        return {number for number, one in self._moved.items() if device not in one.devices}

    def _cores_of(self, members: Sequence[SlicedJob]) -> dict[str, tuple[int, ...]]:
        names = {claim.node for one in members for claim in one.claims}
        found = {name: list(self._view.millicores[self._view.slots[name]]) for name in names}
        for one in members:
            if one.number in self._joined or one.gang is None:
                continue
            for piece in one.gang.pieces:
                if piece.held is not None and piece.held.device_mask:
                    have = found[piece.claim.node]
                    found[piece.claim.node] = [a + b for a, b in zip(have, piece.held.millicores, strict=True)]
        return {name: tuple(cores) for name, cores in found.items()}

    def _all_stay(self, members: Sequence[SlicedJob]) -> bool:
        """Whether all who take turns on a device have room there together, by what was measured or named."""
        needs: dict[_Device, int] = {}
        for one in members:
            size = one.job.shape.device_memory_bytes
            if not size or not (one.job.capabilities.pause or not one.job.capabilities.known):
                return False
            for device in one.devices:
                needs[device] = needs.get(device, 0) + size
        for (name, _), needed in needs.items():
            whole = self._view.topology(name).configuration_set.device_memory_bytes
            if needed > MEMORY_SHARE * whole:
                return False
        return True


def _where_it_rests(job: JobRecord, gang: Gang) -> SlicedJob:
    return SlicedJob(job, gang, tuple([structs.replace(claim, shared_mask=0) for claim in gang.claims]))


def _memory_of(claim: Claim) -> int:
    return claim.memory_bytes + claim.arena_bytes
