"""Slice matrices: jobs that share devices in time slices, the jobs that join them, and the slices of each group.

A job that finds no free devices joins the devices with the fewest gangs (docs/design/006-rotation.md).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import add, le
from typing import Final

from ganger.cluster.claims import split_cores
from ganger.cluster.fit import MEMORY_SHARE, demand, share_of_memory
from ganger.cluster.refusals import Reason
from ganger.cluster.resources import Claim, exceeds
from ganger.cluster.topology import bits
from ganger.cluster.view import View
from ganger.job_state import JobState
from msgspec import structs

from ganger_master.core.colocation import has_arenas
from ganger_master.core.commands import CHANGES_LIMIT, CLAIMS_LIMIT
from ganger_master.core.gang_model import Gang, GangIntent, GangPhase
from ganger_master.core.job_model import JobRecord, SuspendLevel
from ganger_master.core.plan_changes import Goal, PlanChange, Purpose, SliceChange
from ganger_master.planner.context import PlanOutcome
from ganger_master.planner.device_groups import MOST_ROWS, Claims, seat_of, takes_turns, thin
from ganger_master.planner.plan_pace import ExcludedJobs
from ganger_master.planner.timeslice_shares import (
    Fairness,
    NodeDevice,
    Pairs,
    Shortage,
    SlicedJob,
    can_go,
    going,
    rows_of,
)
from ganger_master.policies.fairness import Seat

# Jobs that may join time-slice groups at once.
_JOINERS_MOST: Final = 64
_SETTLED: Final = (GangPhase.STARTING, GangPhase.RUNNING)


def may_take_turns(job: JobRecord, gang: Gang | None) -> bool:
    """Return whether the master would let the job into a time-slice group, as far as a planner can predict it."""
    if not takes_turns(job):
        return False
    offered = job.capabilities
    if gang is None:
        return not (job.epoch or (offered.known and not offered.offload))
    settled = gang.intent is GangIntent.RUN and gang.phase in (GangPhase.STARTING, GangPhase.RUNNING)
    able = offered.offload or not offered.known
    return settled and able and not job.next_epoch and job.ending is None and has_arenas(gang)


# Margin over the measured minimum quantum, and how long that measurement counts.
_QUANTUM_MARGIN: Final = 1.5
_QUANTUM_BELIEVED_S: Final = 60.0


class SliceQuantum:
    """The seconds of a time slice: the cluster's quantum, or more where slice switches need it."""

    def __init__(self) -> None:
        # The least quantum where slice switches take long, and until when that counts.
        self._least_s, self._until_s = 0.0, -math.inf

    def at(self, wanted_s: float | None, now: float) -> float | None:
        """Return the quantum at `now`, in seconds; None without time slices. `wanted_s`: the cluster's."""
        if wanted_s is None or now >= self._until_s:
            return wanted_s
        return max(wanted_s, self._least_s)

    def settle(self, outcome: PlanOutcome) -> None:
        """Learn from refusals of a quantum that is too short."""
        for _, refusals in outcome.refusals:
            if refusals and refusals[0].reason is Reason.QUANTUM:
                self._least_s = _QUANTUM_MARGIN * refusals[0].figures.get("least_milliseconds", 0) / 1000
                self._until_s = outcome.now + _QUANTUM_BELIEVED_S


def least_memory(view: View) -> int:
    """Return the bytes of host memory for each GPU of a job that names none. A whole share would leave none for other
    gangs of the device."""
    shares = [share_of_memory(made, 1) for made in view.sets.values() if made.devices]
    return min(shares, default=0) // MOST_ROWS


class SliceMatrices:
    """Time-sliced jobs and jobs that are to join them. Each place found counts for the next search.

    least_memory: bytes of host memory for each GPU of a job that names none.
    kept_memory: bytes of host memory, by node, that are kept for jobs that rest there.
    most_rows: gangs that share one device at most.
    takes_free: whether jobs may join on free devices, too.
    """

    def __init__(
        self,
        view: View,
        running: Iterable[tuple[JobRecord, Gang]],
        kept_out: ExcludedJobs,
        least_memory: int,
        kept_memory: Mapping[str, int],
        most_rows: int = MOST_ROWS,
        takes_free: bool = True,
    ) -> None:
        self._most_rows, self._takes_free = most_rows, takes_free
        self._view, self._least_memory, self._kept_memory = view, least_memory, kept_memory
        # Missing host memory, for each parked job that can resume once there is enough.
        self.shortages: list[Shortage] = []
        self.sharers: dict[int, SlicedJob] = {}
        # By number: a job is time-sliced with jobs of its own priority.
        self._priorities: dict[int, int] = {}
        self._on: dict[NodeDevice, set[int]] = {}
        # Devices of jobs that are not time-sliced.
        self._closed: set[NodeDevice] = set()
        # Host memory by node, in bytes, that this pass gives to jobs that join or lack some.
        self._given_memory: Counter[str] = Counter()
        # Millicores by node and socket that the gangs hold that are time-sliced there, or may be.
        self._held_cores: dict[str, tuple[int, ...]] = {}
        self._joined: dict[int, SlicedJob] = {}
        # Time-sliced jobs with new devices.
        self._moved: dict[int, SlicedJob] = {}
        barred = {*kept_out.not_started, *kept_out.not_stopped}
        there = [(job, gang, one := SlicedJob(job, gang, gang.claims), one.devices) for job, gang in running]
        crowds = Counter(device for *_, devices in there for device in devices)
        for job, gang, one, devices in there:
            # Co-located gangs are not time-sliced. A shared mask alone does not show that another gang is there now.
            is_alone = all(crowds[device] == 1 for device in devices)
            if gang.node_set or (is_alone and may_take_turns(job, gang) and job.number not in barred):
                self._put(one, devices)
                self._count_cores(gang)
            else:
                self._closed.update(devices)
        self._kept_out = kept_out

    @property
    def has_news(self) -> bool:
        return bool(self._joined or self._moved)

    def join(self, unserved: Sequence[tuple[JobRecord, Gang | None]]) -> None:
        """Time-slice jobs that find no free devices: a parked job in place if it can, the others with other jobs."""
        # Of jobs that no place serves, the next one alike is passed over until a job has joined.
        vain = set[tuple[object, ...]]()
        for job, gang in unserved:
            if len(self._joined) >= _JOINERS_MOST:
                return
            spec = job.spec
            alike = (job.shape, job.priority, spec.device_type, job.arena_bytes_per_device, may_take_turns(job, None))
            is_alike = gang is None and not job.epoch
            if is_alike and alike in vain:
                continue
            one = self._joiner(job, gang)
            if one is not None:
                self._join(one)
                vain.clear()
            elif is_alike:
                vain.add(alike)

    def _joiner(self, job: JobRecord, gang: Gang | None) -> SlicedJob | None:
        if gang is not None:
            return self._back(job, gang)
        return self._best(job) if may_take_turns(job, None) else None

    def may_go_on(self, job: JobRecord, gang: Gang) -> bool:
        """Return whether a parked job may be time-sliced where it is, given enough host memory."""
        if job.number in self._kept_out.not_started or not takes_turns(job):
            return False
        if not job.closed_nodes.isdisjoint(gang.nodes):
            return False
        return self._may_join(_where_it_rests(job, gang)) and all(map(self._fits_cores, gang.claims))

    def _back(self, job: JobRecord, gang: Gang) -> SlicedJob | None:
        if job.number in self._kept_out.not_started or not takes_turns(job):
            return None
        there = _where_it_rests(job, gang)
        may_go_on = self.may_go_on(job, gang)
        if may_go_on and all(_memory_of(claim) <= self._memory_left(claim.node) for claim in there.missing_claims):
            return there
        # A job that a plan parked returns to its own devices. One that its user resumed need not wait for them.
        best = self._best(job) if job.state is JobState.PENDING and job.capabilities.can_hand_over else None
        if best is not None:
            return replace(best, gang=gang)
        if may_go_on:
            self._take_memory(there)
            short = {claim.node: -left for claim in there.claims if (left := self._memory_left(claim.node)) < 0}
            self.shortages.append(Shortage(job, short))
        return None

    def leave(self, draining: Collection[str], fairness: Fairness) -> None:
        """Move time-sliced jobs off draining nodes onto devices of other groups."""
        for number, one in list(self.sharers.items()):
            if number in self._joined or not any(claim.node in draining for claim in one.claims):
                continue
            best = self._best(one.job) if one.gang is not None and can_go(one.job, one.gang) else None
            if best is not None and self._is_settled(best.claims, fairness):
                self._move(replace(best, gang=one.gang, purpose=Purpose(Goal.DRAIN)))

    def balance(self, fairness: Fairness, pairs: Pairs, now: float, quantum_s: float) -> None:
        """Move time-sliced jobs that are behind away from jobs that are ahead of them."""
        for one in going(fairness, pairs, self.sharers.keys(), self._view, now, quantum_s):
            guest, host = self.sharers[one.number], self.sharers[one.host]
            there = self._at(guest.job, seat_of(host.claims))
            settled = self._is_settled((*host.claims, *guest.claims), fairness)
            if there is not None and settled and self._may_join(there):
                detail = f"it is {one.gap_s:.1f} s behind jobs/{one.host}"
                self._move(replace(there, gang=guest.gang, purpose=Purpose(Goal.FAIRNESS, one.helped, detail=detail)))

    def _best(self, job: JobRecord) -> SlicedJob | None:
        for *_, seat in sorted([key for seat in self._seats(job) if (key := self._key(seat)) is not None]):
            one = self._at(job, seat)
            if one is not None and self._may_join(one):
                return one
        return None

    def _is_settled(self, claims: Claims, fairness: Fairness) -> bool:
        """Return whether no time-sliced job on these nodes is changing: a group takes one change at a time."""
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

    def changes(self, quantum_s: float, changing: Collection[int]) -> list[PlanChange]:
        """Return one group of changes for each time-slice group that jobs join, without groups that are changing."""
        changes: list[PlanChange] = []
        for present in self._sets():
            there = [one for one in present if one.number not in self._moved]
            numbers = {one.gang.node_set for one in there if one.gang is not None and one.gang.node_set}
            coming = [self._moved[one.number] for one in present if one.number in self._moved]
            is_moving = any(one.gang is not None and one.job.next_epoch for one in there)
            if len(numbers) > 1 or is_moving or not numbers.isdisjoint(changing):
                # A group takes no other change while it changes or one of its gangs migrates.
                continue
            # A gang that moves within the group keeps its slices on the old devices until it is parked.
            staying = [one for one in present if one.number in self._moved and one.gang is not None]
            staying = [one for one in staying if one.gang is not None and one.gang.node_set in numbers]
            numbers.discard(0)
            members = [*there, *coming]
            if len(members) > CHANGES_LIMIT or sum([len(one.claims) for one in members]) > CLAIMS_LIMIT:
                # The matrix of a group is one group of changes, which has to fit into one plan.
                continue
            rows = rows_of([*there, *staying, *coming], self._cores_of([*there, *staying]))
            level = SuspendLevel.PAUSE if self._all_stay([*members, *staying]) else SuspendLevel.OFFLOAD
            for one in members:
                own = tuple([index for index, row in enumerate(rows) if one in row])
                changes.append(
                    SliceChange(
                        one.number,
                        one.job.revision,
                        one.claims if one.starts or one.number in self._moved else (),
                        level=level,
                        # A job has one change in a plan, so the name is unique.
                        together=members[0].number,
                        node_set=max(numbers, default=0),
                        rows=own,
                        quantum_s=quantum_s,
                        purpose=one.purpose,
                    )
                )
        return changes

    # -- places --------------------------------------------------------------------------------------------------------

    def _seats(self, job: JobRecord) -> list[Seat]:
        """Return candidate places: those of gangs of its size, and on each node the devices with the fewest gangs."""
        gpus, view = job.gpus, self._view
        found = {seat_of(one.claims) for one in self.sharers.values() if one.job.gpus == gpus}
        for name, open_ones in self._open_devices(job.priority).items():
            slot = view.slots.get(name)
            if not len(open_ones) >= gpus > 0 or slot is None or not view.available[slot]:
                continue
            if view.topologies[slot].is_in(job.partition.name) and name not in job.closed_nodes:
                found.add(((name, sum([1 << device for _, device in sorted(open_ones)[:gpus]])),))
        wide = self._wide_seat(job)
        return sorted([*found, wide] if wide else found)

    def _open_devices(self, priority: int) -> Mapping[str, list[tuple[int, int]]]:
        """Return, of nodes where jobs may be time-sliced, (number of gangs, device) of those that a job of this
        priority may join."""
        found: dict[str, list[tuple[int, int]]] = {}
        for (name, device), numbers in self._on.items():
            there = found.setdefault(name, [])
            if self._takes_joiner((name, device), numbers, priority):
                there.append((len(numbers), device))
        for name, there in found.items() if self._takes_free else ():
            slot = self._view.slots.get(name)
            free = bits(self._view.free[slot]) if slot is not None else ()
            there += [(0, one) for one in free if (name, one) not in self._closed and (name, one) not in self._on]
        return found

    def _wide_seat(self, job: JobRecord) -> Seat:
        """Return the whole nodes with the fewest gangs for a job that is larger than any node; empty if there are too
        few, or one would have devices to spare."""
        topologies = self._view.topologies
        there = zip(self._view.nodes, self._view.available, topologies, strict=True)
        names = [name for name, is_there, of in there if name and is_there and of.is_in(job.partition.name)]
        names = [name for name in names if name not in job.closed_nodes]
        devices = {name: topologies[self._view.slots[name]].devices for name in names}
        most = max(devices.values(), default=0)
        if not most or job.gpus <= most or job.gpus % most:
            return ()
        whole = [
            (sum([len(self._on.get((name, device), ())) for device in range(most)]), name)
            for name in names
            if devices[name] == most and all(self._is_open((name, device), job) for device in range(most))
        ]
        count = job.gpus // most
        if len(whole) < count:
            return ()
        return tuple(sorted([(name, (1 << most) - 1) for _, name in sorted(whole)[:count]]))

    def _is_open(self, device: NodeDevice, job: JobRecord) -> bool:
        numbers = self._on.get(device)
        if numbers is not None:
            return self._takes_joiner(device, numbers, job.priority)
        is_free = bool(self._view.free[self._view.slots[device[0]]] >> device[1] & 1)
        return is_free and self._takes_free and device not in self._closed

    def _takes_joiner(self, device: NodeDevice, numbers: Collection[int], priority: int) -> bool:
        """Return whether a job of this priority may join the jobs on a device, by number."""
        if len(numbers) >= self._most_rows or device in self._closed:
            return False
        return {self._priorities[number] for number in numbers} == {priority}

    def _key(self, seat: Seat) -> tuple[int, int, int, Seat] | None:
        """Return the sort key of a place: gangs per device, then the number of gangs that get fewer slices."""
        there = [self._on.get((name, device), set()) for name, mask in seat for device in bits(mask)]
        counts = [len(gangs) for gangs in there]
        return (max(counts), sum(counts), len(set().union(*there)), seat) if counts else None

    def _at(self, job: JobRecord, seat: Seat) -> SlicedJob | None:
        """Return a job of one role on exactly these devices; None if cores or memory lack, or a node is closed."""
        task = job.shape.roles[0].shape
        claims = []
        for name, mask in seat:
            slot = self._view.slots.get(name)
            if slot is None or not self._view.available[slot] or not task.gpus or mask.bit_count() % task.gpus:
                return None
            topology = self._view.topologies[slot]
            made = topology.configuration_set
            if not topology.accepts(job.spec.device_type, job.partition.name) or name in job.closed_nodes:
                return None
            # A job without a measurement may need all memory of a device.
            arena = job.arena_bytes_per_device or made.device_memory_bytes
            shape = structs.replace(thin(job.shape, self._least_memory), arena_bytes_per_device=arena)
            tasks = (mask.bit_count() // task.gpus,)
            needed = demand(made, shape, tasks)
            cores = split_cores(topology, self._free_cores(name), mask, needed.millicores)
            if cores is None or needed.memory_bytes + needed.arena_bytes > self._memory_left(name):
                return None
            bandwidth = needed.bandwidth
            if exceeds(bandwidth, self._view.bandwidth.get(slot, ())):
                return None
            memory, arena = needed.memory_bytes, needed.arena_bytes
            claims.append(Claim(name, mask, cores, memory, arena, tasks, bandwidth=bandwidth))
        if sum(claim.device_mask.bit_count() for claim in claims) != job.gpus:
            return None
        # Gangs whose places it may take need not be of one type.
        types = {self._view.topology(claim.node).configuration_set.device_type for claim in claims}
        if "," in job.spec.device_type and len(types) > 1:
            return None
        return SlicedJob(job, None, tuple(claims))

    def _free_cores(self, name: str) -> tuple[int, ...]:
        """Return the millicores by socket that one slice may use: free ones and those of time-sliced gangs there."""
        free = self._view.millicores[self._view.slots[name]]
        return tuple(map(add, free, self._held_cores.get(name, (0,) * len(free))))

    def _count_cores(self, gang: Gang) -> None:
        for held in gang.held:
            known = self._held_cores.get(held.node, (0,) * len(held.millicores))
            self._held_cores[held.node] = tuple(map(add, known, held.millicores))

    def _fits_cores(self, claim: Claim) -> bool:
        slot = self._view.slots.get(claim.node)
        if slot is None or not self._view.available[slot]:
            return False
        return all(map(le, claim.millicores, self._free_cores(claim.node)))

    def _may_join(self, one: SlicedJob) -> bool:
        return all(self._is_open(device, one.job) for device in one.devices)

    def _join(self, one: SlicedJob) -> None:
        self._joined[one.number] = one
        self._put(one, one.devices)
        self._take_memory(one)

    def _memory_left(self, name: str) -> int:
        free = int(self._view.memory[self._view.slots[name]]) + self._kept_memory.get(name, 0)
        return free - self._given_memory[name]

    def _take_memory(self, one: SlicedJob) -> None:
        for claim in one.missing_claims:
            self._given_memory[claim.node] += _memory_of(claim)

    def _put(self, one: SlicedJob, devices: Iterable[NodeDevice]) -> None:
        self.sharers[one.number], self._priorities[one.number] = one, one.job.priority
        for device in devices:
            self._on.setdefault(device, set()).add(one.number)

    # -- time-slice groups ---------------------------------------------------------------------------------------------

    def _sets(self) -> list[list[SlicedJob]]:
        """Return the groups that change: each a joining job, all on its devices and all time-sliced on its nodes."""
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
            # The oldest job has the first slice.
            found.append(
                sorted((self.sharers[n] for n in members), key=lambda one: (one.number in self._joined, one.number))
            )
        return found

    def _elsewhere(self, device: NodeDevice) -> set[int]:
        return {number for number, one in self._moved.items() if device not in one.devices}

    def _cores_of(self, members: Sequence[SlicedJob]) -> dict[str, tuple[int, ...]]:
        names = {claim.node for one in members for claim in one.claims}
        found = {name: self._view.millicores[self._view.slots[name]] for name in names}
        there = [one.gang for one in members if one.number not in self._joined and one.gang is not None]
        for held in [held for gang in there for held in gang.held if held.device_mask]:
            found[held.node] = tuple(map(add, found[held.node], held.millicores))
        return found

    def _all_stay(self, members: Sequence[SlicedJob]) -> bool:
        """Return whether all time-sliced jobs of each device fit into its memory together, as measured or requested."""
        needs: dict[NodeDevice, int] = {}
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
