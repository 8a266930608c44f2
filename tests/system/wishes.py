"""What could be asked of the running jobs of a cluster: turns, packs, moves and changes of size, as dice say."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

from ganger.v1 import job_pb2, resources_pb2, scheduling_pb2

from benchmarks.witnesses import Device

# Of each node; and what a job says that it uses of a device, for which, and a tenth more, its arena has room.
DEVICES = 4
NEEDS_MEBIBYTES = 64
MOST_GPUS = 4

Live: TypeAlias = scheduling_pb2.LiveJob
Place: TypeAlias = tuple[Device, ...]
_MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Seen:
    """What the master says at one moment."""

    jobs: dict[str, Live]
    # By node: devices, bytes, and whether it takes new gangs.
    free: dict[str, int]
    memory: dict[str, int]
    is_ready: bool

    def devices_of(self, name: str) -> Place:
        return devices_of(self.jobs[name].gang.claims)

    def holders(self, device: Device) -> list[str]:
        """Return the jobs that are on a device or time-sliced there, without those that have left it."""
        return [name for name, job in self.jobs.items() if holds(job) and device in devices_of(job.gang.held)]


@dataclass(frozen=True)
class Wish:
    """A change to request. `judge` returns its result, once it is settled; `joins`: devices on which a job is already,
    and stays; `others`: further jobs that the change affects."""

    kind: str
    what: str
    changes: tuple[scheduling_pb2.Change, ...]
    judge: Callable[[Seen], str]
    joins: Place = ()
    others: tuple[str, ...] = ()

    @property
    def jobs(self) -> tuple[str, ...]:
        return (*[change.job for change in self.changes], *self.others)


def devices_of(claims: Iterable[resources_pb2.Claim]) -> Place:
    return tuple(
        (claim.node.removeprefix("nodes/"), bit)
        for claim in claims
        for bit in range(DEVICES)
        if claim.device_mask >> bit & 1
    )


def claims_of(devices: Sequence[Device], shared: bool = False) -> list[resources_pb2.Claim]:
    found = []
    for node, own in itertools.groupby(sorted(devices), key=lambda device: device[0]):
        bits = [bit for _, bit in own]
        mask = sum(1 << bit for bit in bits)
        found.append(
            resources_pb2.Claim(
                node=f"nodes/{node}",
                device_mask=mask,
                millicores=[1000 * len(bits)],
                memory_bytes=512 * _MEBIBYTE * len(bits),
                arena_bytes=NEEDS_MEBIBYTES * _MEBIBYTE * 11 // 10 * len(bits),
                tasks=[len(bits)],
                shared_mask=mask if shared else 0,
            )
        )
    return found


def has_ended(job: Live) -> bool:
    return job.state in (job_pb2.Job.STATE_SUCCEEDED, job_pb2.Job.STATE_FAILED, job_pb2.Job.STATE_CANCELLED)


def waits(job: Live) -> bool:
    return job.state == job_pb2.Job.STATE_PENDING and not job.is_ending


def is_quiet(job: Live) -> bool:
    return (
        job.state == job_pb2.Job.STATE_HOLDING and not job.is_ending and not job.is_moving and not job.gang.is_stopping
    )


def runs(job: Live) -> bool:
    return is_quiet(job) and job.gang.phase == job_pb2.Gang.PHASE_RUNNING and not job.gang.parked_level


def rests(job: Live) -> bool:
    return is_quiet(job) and job.gang.phase == job_pb2.Gang.PHASE_PARKED


def is_settled(job: Live) -> bool:
    return has_ended(job) or waits(job) or runs(job) or rests(job)


def holds(job: Live) -> bool:
    return job.state == job_pb2.Job.STATE_HOLDING and not rests(job)


def takes_turns(job: Live) -> bool:
    return bool(job.gang.node_set)


def is_packed(job: Live) -> bool:
    return any(claim.shared_mask for claim in job.gang.claims)


def is_plain(job: Live) -> bool:
    """It runs by itself on devices of its own."""
    return runs(job) and not takes_turns(job) and not is_packed(job)


class Wishes:
    """Changes that could be requested now; the master approves most, and gives a reason for the rest. `gpus`: by job,
    zero for an elastic one; `busy`: jobs with a change under way."""

    def __init__(
        self, dice: random.Random, seen: Seen, gpus: Mapping[str, int], busy: Set[str], quantum_ms: int
    ) -> None:
        self._dice, self._seen, self._gpus = dice, seen, gpus
        self._idle = [name for name, job in seen.jobs.items() if name in gpus and name not in busy]
        self._busy, self._quantum_ms = busy, quantum_ms

    def any_of(self, kind: str) -> Wish | None:
        ways: dict[str, list[Callable[[], Wish | None]]] = {
            "turn": [self._join, self._join, self._reweigh, self._leave, self._switch],
            "pack": [self._pack, self._pack, self._part, self._rest_in_pack, self._return_to_pack],
            "move": [self._move],
            "resize": [self._resize],
            "start": [self._start],
            "rest": [self._rest, self._go_on, self._go_on],
        }
        order = ways[kind]
        self._dice.shuffle(order)
        return next((wish for way in order if (wish := way()) is not None), None)

    def useful(self) -> Wish | None:
        """Return a change that resumes a stopped job where there is room."""
        resting = [name for name in self._idle if rests(self._seen.jobs[name])]
        return self._start() or self._move(resting) or self._return_to_pack()

    # turns

    def _join(self) -> Wish | None:
        """Return a change that time-slices a pending job, or one parked on devices of others, with them."""
        comes = [name for name in self._idle if self._may_come(name)]
        if not comes:
            return None
        newcomer = self._dice.choice(comes)
        job = self._seen.jobs[newcomer]
        if waits(job):
            held = [device for device in self._all() if len(self._takers(device)) >= 1]
            if len(held) < self._gpus[newcomer]:
                return None
            place = tuple(sorted(self._dice.sample(held, self._gpus[newcomer])))
        else:
            place = self._seen.devices_of(newcomer)
        there = {name for device in place for name in self._takers(device)}
        sets = self._sets_on(
            {node for name in there for node, _ in self._seen.devices_of(name)} | {n for n, _ in place}
        )
        if not there or len(sets) > 1:
            return None
        number = next(iter(sets), 0)
        members = {*there, newcomer, *self._members(number)}
        return self._matrix(members, number, {newcomer: place} if waits(job) else {}, f"{newcomer} joins at {place}")

    def _reweigh(self) -> Wish | None:
        number = self._a_set()
        return self._matrix(set(self._members(number)), number, {}, "other rows") if number else None

    def _leave(self) -> Wish | None:
        number = self._a_set()
        if not number:
            return None
        name = self._dice.choice(self._members(number))
        return Wish("turn", f"{name} leaves its turns", (self._suspend(name),), self._until_rests(name))

    def _switch(self) -> Wish | None:
        """Return a wish without a change: every time-sliced job gets a slice."""
        number = self._a_set()
        if not number:
            return None
        members = self._members(number)
        return Wish("turn", f"turns of {', '.join(members)}", (), lambda seen: "done", others=tuple(members))

    def _matrix(self, members: set[str], number: int, starts: dict[str, Place], what: str) -> Wish | None:
        if members & self._busy or not members:
            return None
        places = {name: starts.get(name) or self._seen.devices_of(name) for name in members}
        rows: list[set[str]] = []
        order = sorted(members)
        self._dice.shuffle(order)
        for name in (*order, *self._dice.sample(order, self._dice.choice([0, 0, 1]))):
            fitting = [
                row for row in rows if name not in row and not any({*places[one]} & {*places[name]} for one in row)
            ]
            if fitting and not any(name in row for row in rows):
                self._dice.choice(fitting).add(name)
            else:
                rows.append({name})
        quantum_ms = self._dice.randint(self._quantum_ms, 3 * self._quantum_ms)
        level = self._dice.choice([job_pb2.SUSPEND_LEVEL_PAUSE, job_pb2.SUSPEND_LEVEL_OFFLOAD])
        changes = []
        for name in order:
            row = scheduling_pb2.SliceChange(
                node_set=f"nodeSets/{number}" if number else "",
                slices=[index for index, own in enumerate(rows) if name in own],
                claims=claims_of(starts[name]) if name in starts else [],
                level=level,
            )
            row.quantum.FromMilliseconds(quantum_ms)
            changes.append(self._change(name, slice=row, together=1))

        def judge(seen: Seen) -> str:
            return "done" if any(takes_turns(seen.jobs[name]) for name in members) else "called off"

        told = " | ".join("+".join(sorted(row)) for row in rows)
        return Wish("turn", f"{what}: {told}", tuple(changes), judge)

    def _may_come(self, name: str) -> bool:
        job = self._seen.jobs[name]
        return not self._is_elastic(name) and (waits(job) or (rests(job) and not is_packed(job)))

    def _takers(self, device: Device) -> list[str]:
        """Return the jobs on a device that may be time-sliced there."""
        return [
            name
            for name in self._seen.holders(device)
            if name in self._gpus and not self._is_elastic(name) and not is_packed(self._seen.jobs[name])
        ]

    def _sets_on(self, nodes: Set[str]) -> set[int]:
        """Return the time-slice groups on nodes. Groups have no node in common: a job on a node of one joins it."""
        return {
            job.gang.node_set
            for name, job in self._seen.jobs.items()
            if takes_turns(job) and any(node in nodes for node, _ in self._seen.devices_of(name))
        }

    def _members(self, number: int) -> list[str]:
        return [name for name, job in self._seen.jobs.items() if number and job.gang.node_set == number]

    def _a_set(self) -> int:
        """One of whose members nothing is being changed; zero if there is none."""
        numbers = sorted({job.gang.node_set for job in self._seen.jobs.values()} - {0})
        idle = [number for number in numbers if not self._busy & {*self._members(number)}]
        return self._dice.choice(idle) if idle else 0

    # packs

    def _pack(self) -> Wish | None:
        jobs = [name for name in self._idle if self._gpus[name] == 1]
        hosts = [name for name in jobs if is_plain(self._seen.jobs[name])]
        guests = [name for name in jobs if name in hosts or waits(self._seen.jobs[name])]
        if not hosts or len({*hosts, *guests}) < 2:
            return None
        host = self._dice.choice(hosts)
        guest = self._dice.choice([name for name in guests if name != host])
        (device,) = self._seen.devices_of(host)
        claims = claims_of([device], shared=True)
        if waits(self._seen.jobs[guest]):
            change = self._change(guest, start=scheduling_pb2.StartChange(claims=claims))
        else:
            change = self._change(guest, move=scheduling_pb2.MoveChange(claims=claims))
        what = f"{guest} joins {host} on {device}"
        return Wish("pack", what, (change,), self._until_at(guest, (device,)), (device,), (host,))

    def _part(self) -> Wish | None:
        packed = [name for name in self._idle if is_packed(self._seen.jobs[name]) and runs(self._seen.jobs[name])]
        place = self._free(1)
        if not packed or not place:
            return None
        name = self._dice.choice(packed)
        change = self._change(name, move=scheduling_pb2.MoveChange(claims=claims_of(place)))
        return Wish("pack", f"{name} leaves its pack for {place}", (change,), self._until_at(name, place))

    def _rest_in_pack(self) -> Wish | None:
        packed = [name for name in self._idle if is_packed(self._seen.jobs[name]) and runs(self._seen.jobs[name])]
        if not packed:
            return None
        name = self._dice.choice(packed)
        return Wish("pack", f"{name} rests beside another", (self._suspend(name),), self._until_rests(name))

    def _return_to_pack(self) -> Wish | None:
        resting = [name for name in self._idle if is_packed(self._seen.jobs[name]) and rests(self._seen.jobs[name])]
        return self._resume(self._dice.choice(resting), "pack") if resting else None

    # moves, sizes, and the rest

    def _move(self, only: Sequence[str] | None = None) -> Wish | None:
        able = [
            name
            for name in (self._idle if only is None else only)
            if not is_packed(job := self._seen.jobs[name]) and not takes_turns(job) and (runs(job) or rests(job))
        ]
        self._dice.shuffle(able)
        for name in able:
            place = self._free(len(self._seen.devices_of(name)))
            if place:
                change = self._change(name, move=scheduling_pb2.MoveChange(claims=claims_of(place)))
                return Wish("move", f"{name} to {place}", (change,), self._until_at(name, place))
        return None

    def _resize(self) -> Wish | None:
        able = [name for name in self._idle if self._is_elastic(name) and is_plain(self._seen.jobs[name])]
        if not able:
            return None
        name = self._dice.choice(able)
        own = list(self._seen.devices_of(name))
        free = [device for device in self._all() if self._is_free(device)]
        sizes = [gpus for gpus in range(1, MOST_GPUS + 1) if gpus != len(own) and gpus <= len(own) + len(free)]
        if not sizes:
            return None
        gpus = self._dice.choice(sizes)
        kept = self._dice.sample(own, self._dice.randint(max(0, gpus - len(free)), min(gpus, len(own))))
        place = tuple(sorted([*kept, *self._dice.sample(free, gpus - len(kept))]))
        change = self._change(name, resize=scheduling_pb2.ResizeChange(claims=claims_of(place)))
        return Wish("resize", f"{name} from {own} to {place}", (change,), self._until_at(name, place))

    def _start(self) -> Wish | None:
        waiting = [name for name in self._idle if waits(self._seen.jobs[name])]
        if not waiting:
            return None
        name = self._dice.choice(waiting)
        place = self._free(self._gpus[name] or 1)
        if not place:
            return None
        change = self._change(name, start=scheduling_pb2.StartChange(claims=claims_of(place)))
        return Wish("start", f"{name} on {place}", (change,), self._until_at(name, place))

    def _rest(self) -> Wish | None:
        able = [name for name in self._idle if is_plain(self._seen.jobs[name])]
        if not able:
            return None
        name = self._dice.choice(able)
        return Wish("rest", f"{name} rests", (self._suspend(name),), self._until_rests(name))

    def _go_on(self) -> Wish | None:
        resting = [name for name in self._idle if rests(self._seen.jobs[name])]
        return self._resume(self._dice.choice(resting), "rest") if resting else None

    def _resume(self, name: str, kind: str) -> Wish:
        change = self._change(name, resume=scheduling_pb2.ResumeChange())
        place = self._seen.devices_of(name)
        joins = place if is_packed(self._seen.jobs[name]) else ()
        return Wish(kind, f"{name} goes on", (change,), self._until_at(name, place), joins)

    # pieces

    def _is_elastic(self, name: str) -> bool:
        return not self._gpus[name]

    def _change(self, name: str, together: int = 0, **change: Any) -> scheduling_pb2.Change:
        return scheduling_pb2.Change(job=name, revision=self._seen.jobs[name].revision, group=together, **change)

    def _suspend(self, name: str) -> scheduling_pb2.Change:
        level = job_pb2.SUSPEND_LEVEL_OFFLOAD
        return self._change(name, suspend=scheduling_pb2.SuspendChange(level=level))

    def _until_at(self, name: str, place: Place) -> Callable[[Seen], str]:
        return lambda seen: "done" if runs(seen.jobs[name]) and seen.devices_of(name) == place else "called off"

    def _until_rests(self, name: str) -> Callable[[Seen], str]:
        return lambda seen: "done" if rests(seen.jobs[name]) else "called off"

    def _all(self) -> list[Device]:
        return [(node, bit) for node in sorted(self._seen.free) for bit in range(DEVICES)]

    def _is_free(self, device: Device) -> bool:
        return bool(self._seen.free[device[0]] >> device[1] & 1)

    def _free(self, count: int) -> Place:
        free = [device for device in self._all() if self._is_free(device)]
        return tuple(sorted(self._dice.sample(free, count))) if count and len(free) >= count else ()
