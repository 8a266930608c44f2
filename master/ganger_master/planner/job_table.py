"""The live jobs as columns that are kept, not made anew: a plan looks at all of them, an event changes few.

Whoever plans feeds it every job that changed; it makes no difference in which order, or how often.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np
from ganger.cluster.topology import bits

from ganger_master.core.model import Gang, GangIntent, GangPhase, JobRecord, JobSpec, JobState, SuspendLevel
from ganger_master.core.retry import is_backing_off
from ganger_master.planner.context import Mates, mates_of
from ganger_master.planner.quotas import QuotaUse
from ganger_master.policies.job_facts import Facts, Flags, Floats, Integers
from ganger_master.policies.orders import JobOrder
from ganger_master.policies.service_history import NO_HISTORY, ServiceHistory

if TYPE_CHECKING:
    from ganger_master.estimators.run_time import ServiceMemory

# To look up a member of an enumeration takes Python 3.11 as long as a call, and these are asked for all the time.
_RUN, _PARK, _STOP, _PARKED = GangIntent.RUN, GangIntent.PARK, GangIntent.STOP, GangPhase.PARKED
_PENDING, _HOLDING, _SUSPENDED = JobState.PENDING, JobState.HOLDING, JobState.SUSPENDED

_NO_QUOTAS: Final[Mapping[str, int]] = MappingProxyType({})
_FIRST_ROOM = 64
_NEVER: Final = math.inf
# Ended jobs that a history is made from, and by what share it may be behind.
_HISTORY, _STALE = 20_000, 0.05


class LiveTable:
    """One row per live job. `positions` are rows; a row is reused once its job has ended. `learns`: somebody will ask
    for indices, or for the remaining time that is to be expected. `quotas`: as `Settings.quota_devices`; who would take
    its user beyond is as if it were not there until others of its user have gone."""

    def __init__(self, learns: bool = True, quotas: Mapping[str, int] = _NO_QUOTAS) -> None:
        self.jobs: list[JobRecord | None] = []
        # The gang a job holds or is giving back, None while it has none.
        self.gangs: list[Gang | None] = []
        self._row_of: dict[int, int] = {}
        self._vacant: list[int] = []
        self._users: dict[str, int] = {}
        self._live = np.zeros(_FIRST_ROOM, bool)
        self._integers = np.zeros((4, _FIRST_ROOM), np.int64)
        # From the sixth on: run for, running since, waiting since, started, waited before; what has not begun begins at
        # infinity.
        self._numbers = np.zeros((10, _FIRST_ROOM))
        self._flags = np.zeros((4, _FIRST_ROOM), bool)
        # Rows of those who could be started, of those who are giving back what they hold, and of those who run on
        # devices that others may be on, too.
        self._waiting: dict[int, None] = {}
        self._going: set[int] = set()
        self._sharing: set[int] = set()
        # None: somebody has come to others, or left them, since somebody asked. The same by row.
        self._mates: Mates | None = None
        self._units = np.zeros(0, np.int64)
        # By row of a job that shares devices: the GPUs that it and its mates hold together.
        self._unit_gpus: dict[int, int] = {}
        self._unknown = _unknown(_FIRST_ROOM)
        # None: nobody is bounded.
        self.quotas = QuotaUse(quotas) if quotas else None
        # What jobs like the live ones took, by row, and the GPU-seconds of those that ended last.
        self.memory = _memory() if learns else None
        self._services: deque[float] = deque(maxlen=_HISTORY)
        self._history, self._since_history = NO_HISTORY, 0

    def __len__(self) -> int:
        return len(self._row_of)

    def row(self, number: int) -> int:
        """KeyError for a job that is not live."""
        return self._row_of[number]

    def get(self, number: int) -> tuple[JobRecord, Gang | None] | None:
        """A live job as it was put last, and its gang."""
        row = self._row_of.get(number)
        job = None if row is None else self.jobs[row]
        return None if row is None or job is None else (job, self.gangs[row])

    def put(self, job: JobRecord, gang: Gang | None) -> None:
        """A job as it is now, with the gang of its present epoch if there is one."""
        number = job.number
        row = self._row_of.get(number)
        if job.state.is_finished:
            if row is not None:
                if self.memory is not None:
                    self.memory.end(row, job.run_seconds)
                self._services.append(job.run_seconds * job.spec.gpus)
                self._since_history += 1
                self._drop(number, row)
            return
        if job.held or is_backing_off(job):
            # Nobody looks for a place for it: it waits for another job or for its time, not for devices.
            if row is not None:
                self.forget(number)
            return
        spec = job.spec
        if row is None:
            row = self._take_row(number)
            user = self._users.setdefault(job.user, len(self._users))
            self._integers[:, row] = number, job.gpus, spec.priority, user
            self._numbers[:5, row] = job.create_time, *_amounts(spec), spec.weight, spec.deadline or _NEVER
            self._numbers[5:, row] = 0.0, _NEVER, _NEVER, _NEVER, 0.0
            if self.memory is not None:
                self.memory.begin(row, (user, spec.gpus))
        else:
            if spec.is_elastic:
                self._integers[1, row] = job.gpus
            before = self.jobs[row]
            if before is not None and before.spec is not spec:
                # It may have been updated: its priority at any time, its wishes before it starts.
                self._integers[2, row] = spec.priority
                if not job.start_time:
                    self._numbers[1:3, row] = _amounts(spec)
        held_before = self.gangs[row]
        self.jobs[row] = job
        self.gangs[row] = gang
        waiting_since = self._numbers.item(7, row)
        if job.pending_since:
            self._numbers[9, row] = 0.0
        elif waiting_since < _NEVER and gang is not None:
            # The wait that ended when this gang was approved or resumed; a table made anew does not know it.
            self._numbers[9, row] = max(0.0, max(gang.create_time, gang.since) - waiting_since)
        began = job.running_since or _NEVER, job.pending_since or _NEVER, job.start_time or _NEVER
        self._numbers[5:9, row] = job.run_seconds, *began
        # One that has not said yet what it can may be able to.
        is_preemptible = job.spec.preemptible and (job.capabilities.checkpoint or not job.capabilities.known)
        holds = gang is not None and gang.intent is _RUN and job.ending is None and job.state is _HOLDING
        rests = gang is None or (gang.intent is _PARK and gang.phase is _PARKED)
        waits = job.state is _PENDING and rests and job.ending is None and not job.next_epoch
        goes = gang is not None and _gives_back(gang)
        self._flags[:, row] = is_preemptible, holds, waits, goes
        if waits:
            self._waiting[row] = None
        else:
            self._waiting.pop(row, None)
        if goes:
            self._going.add(row)
        else:
            self._going.discard(row)
        if holds and gang is not None and shares_devices(gang):
            if row not in self._sharing or held_before is None or held_before.claims != gang.claims:
                self._share(row)
        elif row in self._sharing:
            self._share(row, False)
        # Who rests for its user wants nothing.
        self._live[row] = job.state is not _SUSPENDED or goes
        if self.quotas is not None:
            self._keep_out(self.quotas, self.quotas.put(job, gang, waits))

    def forget(self, number: int) -> None:
        """A live job of which nobody said how it ended. KeyError for another one."""
        row = self._row_of[number]
        if self.memory is not None:
            self.memory.leave(row)
        self._drop(number, row)

    @property
    def history(self) -> ServiceHistory:
        """What the jobs that ended last took; made anew once there are a twentieth more."""
        self._renew_history()
        return self._history

    def _renew_history(self) -> None:
        if self._since_history > _STALE * len(self._history.services):
            self._history, self._since_history = ServiceHistory.of(self._services), 0

    def look(self, now: float, order: JobOrder) -> None:
        """Learns what such an order would, asked now."""
        if order.with_history is not None:
            self._renew_history()
        if order.learns and self.memory is not None:
            rows = np.flatnonzero(self._live)
            ran, running_since = self._numbers[5:7].take(rows, axis=1)
            self.memory.index(rows, ran + _seconds_since(running_since, now))

    def facts(
        self,
        now: float,
        learned: bool = False,
        expects: bool = False,
        remaining_s: Callable[[Integers], Floats] | None = None,
    ) -> tuple[Integers, Facts]:
        """Rows of all live jobs, and what may be known of them. `learned`: with indices; `expects`: with the remaining
        time that is to be expected; `remaining_s`: with what an oracle says of the jobs of these numbers."""
        rows = self._live.nonzero()[0]
        number, gpus, priority, user = self._integers.take(rows, axis=1)
        numbers = self._numbers.take(rows, axis=1)
        arrival, cores, memory, weight, deadline, ran, _, _, started, waited_before = numbers
        is_preemptible, is_running, _, _ = self._flags.take(rows, axis=1)
        stretch, waited = _seconds_since(numbers[6:8], now)
        attained = ran + stretch
        index = expected = remaining = self._unknown[: len(rows)]
        if learned:
            assert self.memory is not None, "nobody was to ask for indices"
            index = self.memory.index(rows, attained) / np.maximum(gpus, 1)
        if expects:
            assert self.memory is not None, "nobody was to ask for what is to be expected"
            expected = self.memory.remaining_s(rows, attained)
        if remaining_s is not None:
            remaining = remaining_s(number)
        return rows, Facts(
            number=number,
            arrival_s=arrival,
            gpus=gpus,
            cores=cores,
            memory_bytes=memory,
            priority=priority,
            weight=weight,
            user=user,
            deadline_s=deadline,
            is_running=is_running,
            is_preemptible=is_preemptible,
            attained_s=attained,
            waited_s=waited,
            started_s=started,
            stretch_s=stretch,
            waited_before_s=waited_before,
            expected_remaining_s=expected,
            index=index,
            remaining_s=remaining,
        )

    def are_among(self, rows: Integers, numbers: Collection[int]) -> Flags:
        """By row: whether it is that of one of these; some may not be live. Of few numbers, of many rows, all live."""
        found = np.zeros(len(self._live), bool)
        found[[row for number in numbers if (row := self._row_of.get(number)) is not None]] = True
        among: Flags = found[rows]
        return among

    def is_waiting(self, rows: Integers) -> Flags:
        """Whether they could be started: pending, with nothing left anywhere, or at rest where they are."""
        waiting: Flags = self._flags[2, rows]
        return waiting

    @property
    def last_stop_s(self) -> float:
        """When the last of those who have run before began to wait; minus infinity if none waits."""
        stopped = self._flags[2] & (self._numbers[5] > 0)
        return float(self._numbers[7, stopped].max(initial=-np.inf))

    @property
    def held_gpus(self) -> int:
        """Of all who run, or are giving back what they hold."""
        held = int(self._integers[1, self._flags[1] | self._flags[3]].sum())
        if not self._sharing:
            return held
        # Those who share devices hold them once.
        sharing = self.sharing
        return held - sum([gang.devices for _, gang in sharing]) + len(_devices_of([gang for _, gang in sharing]))

    @property
    def running(self) -> list[tuple[JobRecord, Gang]]:
        """Who holds a gang and was not told to give it back, by number."""
        rows = np.flatnonzero(self._flags[1])
        rows = rows[np.argsort(self._integers[0, rows])].tolist()
        jobs, gangs = self.jobs, self.gangs
        return [(job, gang) for row in rows if (job := jobs[row]) is not None and (gang := gangs[row]) is not None]

    @property
    def sharing(self) -> list[tuple[JobRecord, Gang]]:
        """Who runs on devices that others may be on, too, by number."""
        rows = sorted(self._sharing, key=lambda row: int(self._integers[0, row]))
        pairs = [(self.jobs[row], self.gangs[row]) for row in rows]
        return [(job, gang) for job, gang in pairs if job is not None and gang is not None]

    @property
    def going(self) -> list[tuple[JobRecord, Gang]]:
        """Who is giving back what it holds, by row."""
        pairs = [(self.jobs[row], self.gangs[row]) for row in sorted(self._going)]
        return [(job, gang) for job, gang in pairs if job is not None and gang is not None]

    def jobs_at(self, rows: Integers) -> list[JobRecord]:
        """In the order of the rows."""
        return [job for row in rows.tolist() if (job := self.jobs[row]) is not None]

    def gangs_at(self, rows: Integers) -> list[tuple[JobRecord, Gang]]:
        """Those of them who have a gang, in the order of the rows."""
        found = [(self.jobs[row], self.gangs[row]) for row in rows.tolist()]
        return [(job, gang) for job, gang in found if job is not None and gang is not None]

    @property
    def has_sharing(self) -> bool:
        """Whether anybody runs on devices that others may be on, too."""
        return bool(self._sharing)

    @property
    def mates(self) -> Mates:
        """Who shares devices with whom, as the master last said."""
        if self._mates is None:
            self._mates = mates_of(self.sharing)
            self._units = np.full(len(self._live), -1)
            self._unit_gpus.clear()
            for number, together in self._mates.items():
                row = self._row_of[number]
                self._units[row] = self._row_of[together[0]]
                if number == together[0]:
                    on = _devices_of([gang for mate in together if (gang := self.gangs[self._row_of[mate]])])
                    self._unit_gpus.update({self._row_of[mate]: len(on) for mate in together})
        return self._mates

    def units(self, rows: Integers) -> Integers:
        """The row of the first of those who share devices, the same for all of them; -1: nobody is on its devices."""
        if not self.mates:
            return np.full(len(rows), -1)
        units: Integers = self._units[rows]
        return units

    def with_unit_gpus(self, rows: Integers, gpus: Integers) -> Integers:
        """Return `gpus`, the GPUs of these rows, with all that it and its mates hold for a job that shares devices."""
        found = gpus.copy()
        for at in np.flatnonzero(self.units(rows) >= 0).tolist():
            found[at] = self._unit_gpus[int(rows[at])]
        return found

    @property
    def parked(self) -> list[tuple[JobRecord, Gang]]:
        """Who rests because a plan said so, by number."""
        rows = np.flatnonzero(self._live & ~self._flags[1:].any(0))
        pairs = [(self.jobs[row], self.gangs[row]) for row in rows[np.argsort(self._integers[0, rows])].tolist()]
        return [
            (job, gang)
            for job, gang in pairs
            if job is not None
            and gang is not None
            and job.state is JobState.HOLDING
            and gang.intent is GangIntent.PARK
            and gang.phase is GangPhase.PARKED
            and not job.next_epoch
        ]

    @property
    def most_urgent_waiting(self) -> int | None:
        """The highest priority of those that could be started; None without any."""
        if not self._waiting:
            return None
        return int(self._integers[2, self._flags[2]].max())

    @property
    def least_urgent_running(self) -> int | None:
        """The lowest priority of those who hold a gang and were not told to give it back; None without any."""
        running = self._flags[1]
        return int(self._integers[2, running].min()) if running.any() else None

    def asking(self, numbers: Sequence[int], most_gpus: int, least_urgent: int | None) -> list[int]:
        """Of these, in their order, who could be started and is of no more devices than that, or of a higher priority
        than `least_urgent`."""
        rows = np.fromiter([self._row_of.get(number, -1) for number in numbers], np.int64, len(numbers))
        _, gpus, priority, _ = self._integers[:, rows]
        may = (rows >= 0) & self._flags[2, rows] & ((gpus <= most_gpus) | (priority > _or_most(least_urgent)))
        return [numbers[at] for at in np.flatnonzero(may).tolist()]

    @property
    def has_waiting(self) -> bool:
        """Whether anybody could be started."""
        return bool(self._waiting)

    @property
    def least_waiting_gpus(self) -> int:
        """Of the smallest gang that could be started; there must be one."""
        return int(self._integers[1, self._flags[2]].min())

    def waiting_at_most(self, gpus: int) -> list[JobRecord]:
        """Who could be started and has a gang of no more than that."""
        rows = np.flatnonzero(self._flags[2] & (self._integers[1] <= gpus)).tolist()
        return [job for row in rows if (job := self.jobs[row]) is not None]

    def waiting_jobs(self, most: int) -> list[JobRecord]:
        """Who could be started, by priority and number; nobody if there are more than that."""
        if len(self._waiting) > most:
            return []
        found = [job for row in self._waiting if (job := self.jobs[row]) is not None]
        return sorted(found, key=lambda job: (-job.spec.priority, job.number))

    def is_going(self, rows: Integers) -> Flags:
        """Whether they are giving back what they hold."""
        going: Flags = self._flags[3, rows]
        return going

    def _take_row(self, number: int) -> int:
        if self._vacant:
            row = self._vacant.pop()
        else:
            row = len(self.jobs)
            self.jobs.append(None)
            self.gangs.append(None)
            if row == len(self._live):
                self._grow()
        self._row_of[number] = row
        self._live[row] = True
        return row

    def _share(self, row: int, is_shared: bool = True) -> None:
        """It runs on other devices than before that others may be on, too; or on none any more."""
        if is_shared:
            self._sharing.add(row)
        else:
            self._sharing.remove(row)
        self._mates = None

    def _keep_out(self, quotas: QuotaUse, numbers: Iterable[int]) -> None:
        """Of these, who wait, it may have changed whether they are kept out."""
        for number in numbers:
            row = self._row_of[number]
            self._live[row] = self._flags[2, row] = number not in quotas.kept_out
            if number in quotas.kept_out:
                self._waiting.pop(row, None)
            else:
                self._waiting[row] = None

    def _drop(self, number: int, row: int) -> None:
        del self._row_of[number]
        self._live[row] = False
        self._flags[:, row] = False
        self._waiting.pop(row, None)
        self._going.discard(row)
        if row in self._sharing:
            self._share(row, False)
        job = self.jobs[row]
        if self.quotas is not None and job is not None:
            self._keep_out(self.quotas, self.quotas.put(job, None, False))
        self.jobs[row] = self.gangs[row] = None
        self._vacant.append(row)

    def _grow(self) -> None:
        room = 2 * len(self._live)
        self._live = np.concatenate((self._live, np.zeros(room // 2, bool)))
        # Each row is to have a place in it.
        self._mates = None
        self._unknown = _unknown(room)
        for name in ("_integers", "_numbers", "_flags"):
            old = getattr(self, name)
            new = np.zeros((len(old), room), old.dtype)
            new[:, : room // 2] = old
            setattr(self, name, new)


def _memory() -> ServiceMemory:
    # For the orders that learn alone.
    from ganger_master.estimators.run_time import ServiceMemory

    return ServiceMemory()


def _amounts(spec: JobSpec) -> tuple[float, int]:
    """Cores and bytes of memory in all."""
    millicores = sum([role.tasks * role.shape.millicores for role in spec.roles])
    return millicores / 1000, sum([role.tasks * role.shape.memory_bytes for role in spec.roles])


def _or_most(priority: int | None) -> int:
    """Of nobody who runs there is one with a lower priority."""
    return np.iinfo(np.int64).max if priority is None else priority


def _unknown(count: int) -> Floats:
    """What nobody knows of so many jobs; shared by all who are told so."""
    nothing = np.full(count, np.nan)
    nothing.flags.writeable = False
    return nothing


def _seconds_since(began: Floats, now: float) -> Floats:
    """None since what has not begun."""
    seconds: Floats = np.maximum(now - began, 0.0)
    return seconds


def is_shared(gang: Gang) -> bool:
    """Return whether other gangs may be on its devices at the same time."""
    return any(piece.claim.shared_mask for piece in gang.pieces)


def shares_devices(gang: Gang) -> bool:
    """Return whether other gangs may hold its devices: in time slices, or at the same time."""
    return bool(gang.node_set) or is_shared(gang)


def _devices_of(gangs: Iterable[Gang]) -> set[tuple[str, int]]:
    """Return all devices of these gangs, as node and number."""
    return {(claim.node, device) for gang in gangs for claim in gang.claims for device in bits(claim.device_mask)}


def _gives_back(gang: Gang) -> bool:
    if gang.intent is _PARK:
        return gang.park_level is not SuspendLevel.PAUSE and gang.phase is not _PARKED
    return gang.intent is _STOP
