"""The live jobs as columns, updated with each event: a plan reads all jobs, an event changes few.

The order and number of updates make no difference: the last state of each job counts.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
from ganger.job_state import JobState
from msgspec.structs import replace

from ganger_master.core.accounting import NO_LIMITS, Limits
from ganger_master.core.ending import is_backing_off
from ganger_master.core.gang_model import Gang, GangIntent, GangPhase
from ganger_master.core.job_model import JobRecord, SuspendLevel
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.tenancy import NO_TEAMS
from ganger_master.planner.device_groups import DeviceGroups, returns_devices, shares_devices
from ganger_master.policies.fairness import QuotaUse, TeamUse
from ganger_master.policies.orders import Facts, Flags, Floats, Integers, JobOrder, RecentServices, ServiceHistory

if TYPE_CHECKING:
    from ganger_master.estimators.run_time import ServiceMemory

# Python 3.11 needs as long for the lookup of an enumeration member as for a call, and `put` runs for every event.
_RUN, _PARK, _PARKED = GangIntent.RUN, GangIntent.PARK, GangPhase.PARKED
_PENDING, _HOLDING, _SUSPENDED = JobState.PENDING, JobState.HOLDING, JobState.SUSPENDED

# The partition of a job, empty for none, and the nodes that are closed to it.
NodeAdmission: TypeAlias = tuple[str, frozenset[str]]
_NO_NODES: Final = frozenset[str]()
_ALL_NODES: Final[NodeAdmission] = ("", _NO_NODES)
_FIRST_ROOM = 64
_NEVER: Final = math.inf
_NO_NEWCOMERS: Final[tuple[Integers, Floats]] = np.zeros(0, np.int64), np.zeros(0)
# In place of the code of its node: a gang on several nodes, and no gang that is to run.
_SEVERAL, _NO_NODE = -1, 0


class LiveTable:
    """One row per live job. `positions` are rows; a row is reused once its job has ended.

    learns: the order reads service indices or expected remaining times.
    limits: a pending job that would exceed one is left out of the table's views until other jobs of its user, team or
        partition have returned devices.
    teams: the teams and their use; None: there are none.
    """

    def __init__(self, learns: bool = True, limits: Limits = NO_LIMITS, teams: TeamUse | None = None) -> None:
        self.jobs: list[JobRecord | None] = []
        # The gang that a job holds or returns; None while it has none.
        self.gangs: list[Gang | None] = []
        self._row_of: dict[int, int] = {}
        self._vacant: list[int] = []
        self._users: dict[str, int] = {}
        self._live = np.zeros(_FIRST_ROOM, bool)
        # Row 4: the code of the node where the gang of a running job is.
        self._integers = np.zeros((5, _FIRST_ROOM), np.int64)
        self._node_codes: dict[str, int] = {}
        # Rows of running jobs with a measured pause of a move, and of jobs that a plan may have parked.
        self._moved: set[int] = set()
        self._parked: set[int] = set()
        # Rows 5 to 9: run time, running since, pending since, first start, wait before the present run; infinity for
        # a time that has not come.
        self._numbers = np.zeros((10, _FIRST_ROOM))
        self._flags = np.zeros((4, _FIRST_ROOM), bool)
        # Rows of jobs that could start, that return their devices, and that run on devices which may be shared.
        # Keys of the queue by row: priority, highest first, then number. `_queue` holds them in order.
        self._waiting: dict[int, tuple[int, int, int]] = {}
        self._queue: list[tuple[int, int, int]] = []
        self._going: set[int] = set()
        self._sharing: set[int] = set()
        # None: to be computed again, for a gang has joined or left shared devices.
        self._groups: DeviceGroups | None = None
        self._unknown = _unknown(_FIRST_ROOM)
        # None: no user has a quota.
        self.quotas = QuotaUse(limits, NO_TEAMS if teams is None else teams.index) if limits else None
        # None: use gives no job precedence.
        self.teams = teams
        # Whether jobs are in partitions; numbers of the jobs that some nodes are closed to.
        self._has_partitions = False
        self._closed: Collection[int] = ()
        # Run times by kind of job, with the rows of live jobs; the jobs that ended last.
        self.memory = _memory() if learns else None
        self._services = RecentServices()

    def __len__(self) -> int:
        return len(self._row_of)

    def row(self, number: int) -> int:
        """Return the row of a live job. KeyError if it is not live."""
        return self._row_of[number]

    def get(self, number: int) -> tuple[JobRecord, Gang | None] | None:
        """Return a live job and its gang as last put; None if it is not live."""
        row = self._row_of.get(number)
        job = None if row is None else self.jobs[row]
        return None if row is None or job is None else (job, self.gangs[row])

    def pair(self, number: int) -> tuple[JobRecord, Gang] | None:
        """Return a live job that has a gang, with it; else None."""
        job, gang = self.get(number) or (None, None)
        return None if job is None or gang is None else (job, gang)

    def put(self, job: JobRecord, gang: Gang | None) -> None:
        """Record a job as it is now, with the gang of its present epoch if it has one. A job that ended before the
        table had it is a sample for similar jobs."""
        number = job.number
        row = self._row_of.get(number)
        if job.state.is_finished:
            if row is None:
                self.put(replace(job, state=_PENDING), None)
                row = self._row_of.get(number)
            if row is not None:
                self._end(job, row)
            return
        if job.held or is_backing_off(job):
            # It waits for another job or for a time, not for devices.
            if row is not None:
                self.forget(number)
            return
        if row is None:
            row = self._enter(job)
        else:
            self._update_request(job, row)
        held_before = self.gangs[row]
        self.jobs[row] = job
        self.gangs[row] = gang
        self._put_times(job, gang, row)
        # A job that has not reported its capabilities yet may be preemptible.
        is_preemptible = job.preemptible and (job.capabilities.checkpoint or not job.capabilities.known)
        holds = gang is not None and gang.intent is _RUN and job.ending is None and job.state is _HOLDING
        is_parked = gang is None or (gang.intent is _PARK and gang.phase is _PARKED)
        waits = job.state is _PENDING and is_parked and job.ending is None and not job.next_epoch
        is_going = gang is not None and returns_devices(gang)
        self._flags[:, row] = is_preemptible, holds, waits, is_going
        self._queue_up(job, row, waits)
        self._integers[4, row] = self._node_code(gang) if holds and gang is not None else _NO_NODE
        if holds and job.move_pause_s:
            self._moved.add(row)
        else:
            self._moved.discard(row)
        if is_going:
            self._going.add(row)
        else:
            self._going.discard(row)
        if gang is not None and is_parked and job.state is _HOLDING and not job.next_epoch:
            self._parked.add(row)
        else:
            self._parked.discard(row)
        if holds and gang is not None and shares_devices(gang):
            if row not in self._sharing or held_before is None or held_before.claims != gang.claims:
                self._share(row)
        elif row in self._sharing:
            self._share(row, False)
        # A job that its user has suspended wants no devices.
        self._live[row] = job.state is not _SUSPENDED or is_going
        if self.quotas is not None:
            self._keep_out(self.quotas, self.quotas.put(job, gang, waits))

    def _node_code(self, gang: Gang) -> int:
        pieces = gang.pieces
        if len(pieces) != 1:
            return _SEVERAL
        return self._node_codes.setdefault(pieces[0].claim.node, len(self._node_codes) + 1)

    def _enter(self, job: JobRecord) -> int:
        spec = job.spec
        row = self._take_row(job.number)
        user = self._users.setdefault(job.user, len(self._users))
        self._has_partitions = self._has_partitions or bool(job.partition.name)
        if self.teams is not None and user == len(self._users) - 1:
            self.teams.name(job.user, user)
        self._integers[:, row] = job.number, job.gpus, job.priority, user, _NO_NODE
        self._numbers[:5, row] = job.create_time, *_amounts(spec), spec.weight, spec.deadline or _NEVER
        self._numbers[5:, row] = 0.0, _NEVER, _NEVER, _NEVER, 0.0
        if self.memory is not None:
            self.memory.begin(row, (user, spec.gpus))
        return row

    def _update_request(self, job: JobRecord, row: int) -> None:
        """Take over the size of an elastic job and what `ganger update` may change: the priority at any time, the
        other requests before the start."""
        spec = job.spec
        if spec.is_elastic or spec.has_role_ranges:
            self._integers[1, row] = job.gpus
        before = self.jobs[row]
        if before is not None and before.spec is not spec:
            self._integers[2, row] = job.priority
            if not job.start_time:
                self._numbers[1:3, row] = _amounts(spec)

    def _put_times(self, job: JobRecord, gang: Gang | None, row: int) -> None:
        waiting_since = self._numbers.item(7, row)
        if job.pending_since:
            self._numbers[9, row] = 0.0
        elif waiting_since < _NEVER and gang is not None:
            # The wait that ended when this gang was approved or resumed; unknown in a table that is new since then.
            self._numbers[9, row] = max(0.0, max(gang.create_time, gang.since) - waiting_since)
        began = job.running_since or _NEVER, job.pending_since or _NEVER, job.start_time or _NEVER
        self._numbers[5:9, row] = job.run_s, *began

    def _end(self, job: JobRecord, row: int) -> None:
        if self.memory is not None:
            self.memory.end(row, job.run_s)
        self._services.add(job.run_s * job.spec.gpus)
        self._drop(job.number, row)

    def forget(self, number: int) -> None:
        """Remove a live job whose end was not reported. KeyError if it is not live."""
        row = self._row_of[number]
        if self.memory is not None:
            self.memory.leave(row)
        self._drop(number, row)

    @property
    def history(self) -> ServiceHistory:
        """Return the GPU-seconds of the jobs that ended last."""
        return self._services.history

    def look(self, now: float, order: JobOrder) -> None:
        """Learn from the jobs as a plan with this order would at `now`."""
        if order.with_history is not None:
            _ = self._services.history
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
        """Return the rows of all live jobs, and their facts at `now`.

        learned: with service indices.
        expects: with expected remaining times.
        remaining_s: an oracle's remaining seconds, by job number.
        """
        rows = self._live.nonzero()[0]
        number, gpus, priority, user = self._integers[:4].take(rows, axis=1)
        numbers = self._numbers.take(rows, axis=1)
        arrival, cores, memory, weight, deadline, ran, _, _, started, waited_before = numbers
        is_preemptible, is_running, _, _ = self._flags.take(rows, axis=1)
        stretch, waited = _seconds_since(numbers[6:8], now)
        attained = ran + stretch
        index = expected = remaining = self._unknown[: len(rows)]
        if learned:
            assert self.memory is not None, "a table without `learns` has no service indices"
            index = self.memory.index(rows, attained) / np.maximum(gpus, 1)
        if expects:
            assert self.memory is not None, "a table without `learns` expects no remaining times"
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
            teams=None if self.teams is None else self.teams.shares(user, now),
        )

    def are_among(self, rows: Integers, numbers: Collection[int]) -> Flags:
        """Return by row whether its job is one of `numbers`. `rows` are live; `numbers` need not be."""
        found = np.zeros(len(self._live), bool)
        found[[row for number in numbers if (row := self._row_of.get(number)) is not None]] = True
        return np.asarray(found[rows], bool)

    def is_waiting(self, rows: Integers) -> Flags:
        """Return by row whether the job could start: it is pending and holds no devices, or is parked."""
        return np.asarray(self._flags[2, rows], bool)

    @property
    def last_stop_s(self) -> float:
        """Return when the last preempted job became pending; minus infinity if none waits."""
        stopped = self._flags[2] & (self._numbers[5] > 0)
        return float(self._numbers[7, stopped].max(initial=-np.inf))

    @property
    def held_gpus(self) -> int:
        """Return the number of GPUs of all gangs that run or return their devices."""
        held = int(self._integers[1, self._flags[1] | self._flags[3]].sum())
        # Shared devices count once.
        return held - self.groups.doubly_held_gpus if self._sharing else held

    @property
    def running(self) -> list[tuple[JobRecord, Gang]]:
        """Return the jobs that hold a gang which is to run, by number."""
        return self._by_number(np.flatnonzero(self._flags[1]))

    def each_running(self) -> Iterator[tuple[JobRecord, Gang]]:
        """Yield the same jobs in any order."""
        for row in np.flatnonzero(self._flags[1]).tolist():
            job, gang = self.jobs[row], self.gangs[row]
            if job is not None and gang is not None:
                yield job, gang

    @property
    def apart(self) -> list[tuple[JobRecord, Gang]]:
        """Return those of `running` with a gang on several nodes."""
        return self._by_number(np.flatnonzero(self._integers[4] == _SEVERAL))

    def within(self, nodes: Iterable[str]) -> list[tuple[JobRecord, Gang]]:
        """Return those of `running` with a gang on a single node, which is one of `nodes`."""
        codes = [code for node in nodes if (code := self._node_codes.get(node)) is not None]
        return self._by_number(np.flatnonzero(np.isin(self._integers[4], codes)))

    @property
    def moved(self) -> list[tuple[JobRecord, Gang]]:
        """Return those of `running` with a measured pause of a move."""
        return self._by_number(np.array(list(self._moved), np.int64))

    def _by_number(self, rows: Integers) -> list[tuple[JobRecord, Gang]]:
        return self.gangs_at(rows[np.argsort(self._integers[0, rows])])

    @property
    def going(self) -> list[tuple[JobRecord, Gang]]:
        """Return the jobs that return their devices, by row."""
        return self.gangs_at(np.array(sorted(self._going), np.int64))

    def jobs_at(self, rows: Integers) -> list[JobRecord]:
        """Return the jobs of these rows, in their order."""
        return [job for row in rows.tolist() if (job := self.jobs[row]) is not None]

    def gangs_at(self, rows: Integers) -> list[tuple[JobRecord, Gang]]:
        """Return the jobs of these rows that have a gang, in their order."""
        jobs, gangs, all_rows = self.jobs, self.gangs, rows.tolist()
        return [(job, gang) for row in all_rows if (job := jobs[row]) is not None and (gang := gangs[row]) is not None]

    @property
    def has_sharing(self) -> bool:
        """Return whether any job runs on devices that may be shared."""
        return bool(self._sharing)

    @property
    def groups(self) -> DeviceGroups:
        """Return the groups of jobs that share devices, as the master last reported."""
        if self._groups is None:
            rows = np.array(list(self._sharing), np.int64)
            self._groups = DeviceGroups(self._by_number(rows), self._row_of, len(self._live))
        return self._groups

    @property
    def parked(self) -> list[tuple[JobRecord, Gang]]:
        """Return the jobs that a plan has parked, by number."""
        if not self._parked:
            return []
        rows = np.array(list(self._parked), np.int64)
        return self._by_number(rows[self._live[rows] & ~self._flags[1:, rows].any(0)])

    @property
    def offloaded(self) -> list[tuple[JobRecord, Gang]]:
        """Return those of `parked` that are in host memory and not ending."""
        return [pair for pair in self.parked if pair[1].park_level is SuspendLevel.OFFLOAD and pair[0].ending is None]

    @property
    def most_urgent_waiting(self) -> int | None:
        """Return the highest priority of the jobs that could start; None if there are none."""
        if not self._waiting:
            return None
        return -self._queue[0][0]

    @property
    def least_urgent_running(self) -> int | None:
        """Return the lowest priority of the running jobs; None if there are none."""
        running = self._flags[1]
        return int(self._integers[2, running].min()) if running.any() else None

    def asking(self, numbers: Sequence[int], most_gpus: int, least_urgent: int | None) -> list[int]:
        """Return those of `numbers`, in their order, that could start and have at most `most_gpus` GPUs or a priority
        above `least_urgent`."""
        rows = np.fromiter([self._row_of.get(number, -1) for number in numbers], np.int64, len(numbers))
        gpus, priority = self._integers[1:3, rows]
        least = np.iinfo(np.int64).max if least_urgent is None else least_urgent
        may = (rows >= 0) & self._flags[2, rows] & ((gpus <= most_gpus) | (priority > least))
        return [numbers[at] for at in np.flatnonzero(may).tolist()]

    @property
    def has_waiting(self) -> bool:
        """Return whether any job could start."""
        return bool(self._waiting)

    @property
    def least_waiting_gpus(self) -> int:
        """Return the GPUs of the smallest gang that could start. There must be one."""
        return int(self._integers[1, self._flags[2]].min())

    def waiting_at_most(self, gpus: int) -> list[JobRecord]:
        """Return the jobs that could start and have at most that many GPUs."""
        rows = np.flatnonzero(self._flags[2] & (self._integers[1] <= gpus)).tolist()
        return [job for row in rows if (job := self.jobs[row]) is not None]

    def waiting_jobs(self, most: int) -> list[JobRecord]:
        """Return the jobs that could start, by priority and number; none if there are more than `most`."""
        if len(self._waiting) > most:
            return []
        return list(self.queue())

    @property
    def newcomers(self) -> tuple[Integers, Floats]:
        """Return the rows of startable jobs that have never run, and since when each is pending, in Unix seconds."""
        if not self._waiting:
            return _NO_NEWCOMERS
        rows = np.flatnonzero(self._flags[2] & (self._numbers[8] == _NEVER))
        return rows, self._numbers[7, rows]

    @property
    def is_by_arrival(self) -> bool:
        """Return whether, under an order by arrival, `queue` is that order, and every job of it may start."""
        return self.quotas is None and self.teams is None and not self.is_partitioned

    @property
    def is_partitioned(self) -> bool:
        """Return whether some nodes are not for all jobs."""
        return self._has_partitions or self.has_closed_nodes

    @property
    def has_closed_nodes(self) -> bool:
        """Return whether nodes are closed to a job."""
        return bool(self._closed)

    def admissions_at(self, rows: Integers) -> list[NodeAdmission]:
        """Return which nodes are for the jobs at these rows, by position."""
        found = [self.jobs[row] for row in rows.tolist()]
        return [_ALL_NODES if job is None else (job.partition.name, job.closed_nodes) for job in found]

    def live(self) -> Iterator[tuple[JobRecord, Gang | None]]:
        """Yield all live jobs, each with its gang, by row."""
        for job, gang in zip(self.jobs, self.gangs, strict=True):
            if job is not None:
                yield job, gang

    def close(self, closed: Mapping[int, frozenset[str]]) -> None:
        """Set the nodes that jobs may not use, by number. All others may use all nodes of their partition."""
        for number in {*self._closed, *closed}:
            row = self._row_of.get(number)
            job = None if row is None else self.jobs[row]
            nodes = closed.get(number, _NO_NODES)
            if row is not None and job is not None and job.closed_nodes is not nodes:
                self.jobs[row] = replace(job, closed_nodes=nodes)
        self._closed = closed.keys()

    def queue(self) -> Iterator[JobRecord]:
        """Yield the jobs that could start, by priority and number."""
        for *_, row in self._queue:
            if (job := self.jobs[row]) is not None:
                yield job

    def _queue_up(self, job: JobRecord, row: int, waits: bool) -> None:
        before, key = self._waiting.get(row), (-job.priority, job.number, row) if waits else None
        if before == key:
            return
        if before is not None:
            del self._waiting[row], self._queue[bisect_left(self._queue, before)]
        if key is not None:
            self._waiting[row] = key
            insort(self._queue, key)

    def is_going(self, rows: Integers) -> Flags:
        """Return by row whether the job returns its devices."""
        return np.asarray(self._flags[3, rows], bool)

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
        if is_shared:
            self._sharing.add(row)
        else:
            self._sharing.remove(row)
        self._groups = None

    def _keep_out(self, quotas: QuotaUse, numbers: Iterable[int]) -> None:
        for number in numbers:
            row, waits = self._row_of[number], number not in quotas.kept_out
            self._live[row] = self._flags[2, row] = waits
            if (job := self.jobs[row]) is not None:
                self._queue_up(job, row, waits)

    def _drop(self, number: int, row: int) -> None:
        del self._row_of[number]
        job = self.jobs[row]
        self._live[row] = False
        self._flags[:, row] = False
        if job is not None:
            self._queue_up(job, row, False)
        self._integers[4, row] = _NO_NODE
        self._moved.discard(row)
        self._going.discard(row)
        self._parked.discard(row)
        if row in self._sharing:
            self._share(row, False)
        if self.quotas is not None and job is not None:
            self._keep_out(self.quotas, self.quotas.put(job, None, False))
        self.jobs[row] = self.gangs[row] = None
        self._vacant.append(row)

    def _grow(self) -> None:
        room = 2 * len(self._live)
        self._live = np.concatenate((self._live, np.zeros(room // 2, bool)))
        # The units by row have to grow, too.
        self._groups = None
        self._unknown = _unknown(room)
        for name in ("_integers", "_numbers", "_flags"):
            old = getattr(self, name)
            new = np.zeros((len(old), room), old.dtype)
            new[:, : room // 2] = old
            setattr(self, name, new)


def _memory() -> ServiceMemory:
    # Imported only for orders that learn.
    from ganger_master.estimators.run_time import ServiceMemory

    return ServiceMemory()


def _amounts(spec: JobSpec) -> tuple[float, int]:
    millicores = sum([role.tasks * role.shape.millicores for role in spec.roles])
    return millicores / 1000, sum([role.tasks * role.shape.memory_bytes for role in spec.roles])


def _unknown(count: int) -> Floats:
    """Return a read-only column of NaN, shared by all results that lack these facts."""
    nothing = np.full(count, np.nan)
    nothing.flags.writeable = False
    return nothing


def _seconds_since(began: Floats, now: float) -> Floats:
    return np.asarray(np.maximum(now - began, 0.0), float)
