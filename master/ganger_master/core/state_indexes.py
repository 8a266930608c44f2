"""The jobs, gangs and nodes of the state, each with the look-ups that follow from them, and what each user holds."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, TypeAlias, TypeVar

from ganger.cluster.resources import Bandwidth, Claim, ConfigurationSet, NodeRow, more_bandwidth
from ganger.cluster.topology import Topology, bits
from ganger.job_state import JobState
from msgspec.structs import replace

from ganger_master.core.accounting import Charges, UserUsage
from ganger_master.core.commands import ObservedGang, ObservedSlices
from ganger_master.core.gang_model import Gang, TimesliceGroup
from ganger_master.core.job_model import JobRecord, Request
from ganger_master.core.job_spec import Dependency, JobSpec, bytes_of
from ganger_master.core.node_model import Node

# Bytes of a job beside its command, environment and parameters.
_JOB_BYTES: Final = 1_024
# Bytes of a dependency, in the spec and among those that are open.
_DEPENDENCY_BYTES: Final = 128


def spec_bytes(spec: JobSpec) -> int:
    """Bytes that the spec of a job takes in memory and in the store."""
    return _own_bytes(spec) + bytes_of_all(spec.environment)


def _own_bytes(spec: JobSpec) -> int:
    parameters = {} if spec.array is None else spec.array.parameters
    own = _JOB_BYTES + sum(map(bytes_of, spec.all_words)) + bytes_of_all(spec.labels) + bytes_of_all(parameters)
    own += _DEPENDENCY_BYTES * len(spec.dependencies)
    return own + sum([bytes_of_all(program.environment) for program in spec.role_programs])


def bytes_of_all(texts: Mapping[str, str]) -> int:
    """Bytes of names and values together."""
    return bytes_of("".join([*texts, *texts.values()]))


@dataclass(slots=True)
class Holdings:
    """Counts that follow each change of a job. Jobs that have ended count as finished, not for their user."""

    pending: Counter[str] = field(default_factory=Counter)
    live_bytes: Counter[str] = field(default_factory=Counter)
    finished_bytes: int = 0
    _bytes: dict[int, int] = field(default_factory=dict)
    # The environment that was measured last: members of an array share one.
    _measured: tuple[Mapping[str, str] | None, int] = field(default=(None, 0), compare=False)

    def note(self, old: JobRecord | None, new: JobRecord) -> None:
        """Count a job as it is now. `old`: as it was counted before, None for a new one."""
        if old is None or old.spec is not new.spec:
            self._take(old)
            if self._measured[0] is not new.spec.environment:
                self._measured = new.spec.environment, bytes_of_all(new.spec.environment)
            self._bytes[new.number] = _own_bytes(new.spec) + self._measured[1]
            self._give(new)
        elif old.state is not new.state:
            self._take(old)
            self._give(new)

    def forget(self, job: JobRecord) -> None:
        """Count a job no more."""
        self._take(job)
        del self._bytes[job.number]

    def bytes_of(self, number: int) -> int:
        """Bytes of one job's spec, as in `spec_bytes`."""
        return self._bytes[number]

    def _give(self, job: JobRecord, sign: int = 1) -> None:
        size = sign * self._bytes[job.number]
        if job.state.is_finished:
            self.finished_bytes += size
        else:
            self.live_bytes[job.user] += size
        if job.state is JobState.PENDING:
            self.pending[job.user] += sign

    def _take(self, job: JobRecord | None) -> None:
        if job is None:
            return
        self._give(job, -1)
        for counts in (self.pending, self.live_bytes):
            if not counts[job.user]:
                del counts[job.user]


class UsageIndex(dict[str, UserUsage]):
    """The use of GPUs by user, and what the running jobs add to it, in millionths of a GPU: integers add up exactly."""

    def __init__(self) -> None:
        super().__init__()
        self._running: dict[int, tuple[str, int]] = {}
        self._by_user: dict[str, int] = {}

    def put_running(self, number: int, user: str, microgpus: int) -> bool:
        """The job uses so many millionths of a GPU from now on; return whether that is news."""
        before = self._running.get(number, ("", 0))[1]
        if microgpus == before:
            return False
        if microgpus:
            self._running[number] = user, microgpus
        else:
            del self._running[number]
        left = self._by_user.get(user, 0) + microgpus - before
        if left:
            self._by_user[user] = left
        else:
            self._by_user.pop(user, None)
        return True

    def user_of(self, number: int) -> str:
        """Return the user of a running job; empty for any other job."""
        return self._running.get(number, ("", 0))[0]

    def gpus_of(self, user: str) -> float:
        """Return the GPUs that the user's running jobs use."""
        return self._by_user.get(user, 0) / 1e6

    @property
    def users_running(self) -> Iterable[str]:
        """Return the users of running jobs."""
        return self._by_user.keys()


# To look up a member of an enumeration takes Python 3.11 as long as a call, and this one is compared all the time.
_PENDING = JobState.PENDING
_Key = TypeVar("_Key")


class JobIndex(dict[int, JobRecord]):
    """The jobs by number, and indexes of them.

    requests: number by user and request id. former: the same of forgotten jobs, those forgotten first at the front.
    finished: in the order in which they ended. live: all others. running_limited: jobs with a time limit that have a
    gang. moving: jobs with a destination. backing_off: failed jobs that are tried again later. dependents: by
    dependency, the jobs that wait for it. shares: devices that count towards quotas; empty without
    quotas. holdings: jobs and bytes by user. left_by: by node the job that last gave devices back there, and when; for
    the history of the job that gets them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[tuple[str, str], int] = {}
        self.former: dict[tuple[str, str], Request] = {}
        self.finished: dict[int, None] = {}
        self.live: dict[int, None] = {}
        self.running_limited: dict[int, None] = {}
        self.moving: dict[int, None] = {}
        self.backing_off: dict[int, None] = {}
        self.dependents: dict[Dependency, dict[int, None]] = {}
        self.charges = Charges()
        self.holdings = Holdings()
        self.left_by: dict[str, tuple[int, float]] = {}

    def put(self, old: JobRecord | None, job: JobRecord) -> None:
        """Replace a job that was `old`, None for a new one."""
        number = job.number
        self[number] = job
        self.holdings.note(old, job)
        if old is None and job.request_id:
            self.requests[job.user, job.request_id] = number
        if job.state.is_finished:
            self.live.pop(number, None)
            self.finished[number] = None
        else:
            self.live[number] = None
        list_if(self.backing_off, number, job.again_at and job.state is _PENDING)
        list_if(self.running_limited, number, job.time_limit_s is not None and job.state is JobState.HOLDING)
        list_if(self.moving, number, job.next_epoch)
        if job.awaits or (old is not None and old.awaits):
            self.index_dependencies(old, job)

    def index_dependencies(self, old: JobRecord | None, job: JobRecord) -> None:
        """Note for which dependencies a job waits."""
        for dependency in () if old is None else old.awaits:
            waiting = self.dependents.get(dependency, {})
            waiting.pop(job.number, None)
            if not waiting:
                self.dependents.pop(dependency, None)
        for dependency in () if job.state.is_finished else job.awaits:
            self.dependents.setdefault(dependency, {})[job.number] = None

    def forget(self, number: int) -> None:
        """Remove a job that has ended."""
        job = self.pop(number)
        self.holdings.forget(job)
        del self.finished[number]
        if self.requests.get((job.user, job.request_id)) == number:
            del self.requests[job.user, job.request_id]


def list_if(listed: dict[_Key, None], key: _Key, belongs: object) -> None:
    """Add a key to an ordered set, or remove it."""
    if belongs:
        listed[key] = None
    else:
        listed.pop(key, None)


class GangIndex(dict[int, Gang]):
    """The gangs by epoch, and indexes of them.

    epochs_of: by job, ascending. places_on: by node and epoch, in the order of epochs, which of the gang's pieces is
    there. sets: the time-slice groups by number. set_of, set_on: the group of an epoch and of a node. last_reports: by
    node and epoch the last report of a gang, and gang and job as it left them. rows_seen: by group and node the last
    report of its time slices. idle: gangs that run without using their devices. at_epoch_ends: gangs that a plan parks
    at the end of an epoch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.epochs_of: dict[int, list[int]] = {}
        self.places_on: dict[str, dict[int, int]] = {}
        self.sets: dict[int, TimesliceGroup] = {}
        self.set_of: dict[int, int] = {}
        self.set_on: dict[str, int] = {}
        self.last_reports: dict[tuple[str, int], tuple[ObservedGang, Gang, JobRecord]] = {}
        self.rows_seen: dict[tuple[int, str], ObservedSlices] = {}
        self.idle: dict[int, None] = {}
        self.at_epoch_ends: dict[int, None] = {}

    def of_job(self, number: int) -> list[Gang]:
        """Return all gangs of a job that still have something somewhere, oldest first."""
        return list(map(self.__getitem__, self.epochs_of.get(number, ())))

    def held_on(self, node: str) -> list[Claim]:
        """Return what the gangs of a node hold there, by epoch."""
        held = [self[epoch].pieces[place].held for epoch, place in self.places_on.get(node, {}).items()]
        return [claim for claim in held if claim is not None]

    def sharing_on(self, node: str) -> list[int]:
        """Return the jobs whose gangs share devices of a node, by epoch."""
        places = self.places_on.get(node, {}).items()
        return [gang.job for epoch, place in places if (gang := self[epoch]).pieces[place].claim.shared_mask]

    def living_on(self, node: str) -> list[Gang]:
        """Return the gangs that may have something on a node, by epoch. What was there when it was lost is gone."""
        places = self.places_on.get(node, {}).items()
        return [self[epoch] for epoch, place in places if not self[epoch].pieces[place].gone]

    def affinity_of(self, node: str) -> int:
        """Return the devices of the oldest gang that holds some on a node; zero when it is idle."""
        for epoch, place in self.places_on.get(node, {}).items():
            gang = self[epoch]
            held = gang.pieces[place].held
            if held is not None and held.device_mask:
                return gang.devices
        return 0

    def listeners(self, gang: Gang) -> list[str]:
        """Return the nodes whose orders name the addresses of this gang: its own, and those of a destination."""
        nodes = list(gang.nodes)
        for other in self.of_job(gang.job):
            if other.restore.parked_epoch == gang.epoch:
                nodes.extend(other.nodes)
        return nodes

    def place(self, node: str, epoch: int, place: int) -> None:
        """Record that piece number `place` of a new gang is on a node."""
        there = self.places_on.setdefault(node, {})
        is_newest = not there or epoch > next(reversed(there))
        there[epoch] = place
        if not is_newest:
            # An adopted gang may be older than those that are there.
            self.places_on[node] = dict(sorted(there.items()))

    def index(self, gang: Gang) -> None:
        insort(self.epochs_of.setdefault(gang.job, []), gang.epoch)

    def forget(self, epoch: int, known_nodes: Iterable[str]) -> Gang:
        """Remove a gang and return it. known_nodes: those whose entries stay although no gang is left there."""
        gang = self.pop(epoch)
        self.idle.pop(epoch, None)
        self.at_epoch_ends.pop(epoch, None)
        self.epochs_of[gang.job].remove(epoch)
        if not self.epochs_of[gang.job]:
            del self.epochs_of[gang.job]
        for node in gang.nodes:
            self.places_on[node].pop(epoch, None)
            if node not in known_nodes and not self.places_on[node]:
                del self.places_on[node]
            self.last_reports.pop((node, epoch), None)
        return gang

    def put_set(self, node_set: TimesliceGroup) -> None:
        old = self.sets.get(node_set.number)
        if old is not None:
            self._unindex_set(old)
        self.sets[node_set.number] = node_set
        for row in node_set.rows:
            for epoch in row:
                self.set_of[epoch] = node_set.number
        for node in node_set.nodes:
            self.set_on[node] = node_set.number

    def forget_set(self, number: int) -> TimesliceGroup:
        node_set = self.sets.pop(number)
        self._unindex_set(node_set)
        for node in node_set.nodes:
            self.rows_seen.pop((number, node), None)
        return node_set

    def note_rows(self, node: str, rows: ObservedSlices) -> bool:
        """Record what a node reports of the slices of a group; return whether that is news."""
        key = rows.node_set, node
        if rows.node_set not in self.sets or self.rows_seen.get(key) == rows:
            return False
        self.rows_seen[key] = rows
        return True

    def _unindex_set(self, node_set: TimesliceGroup) -> None:
        for row in node_set.rows:
            for epoch in row:
                self.set_of.pop(epoch, None)
        for node in node_set.nodes:
            self.set_on.pop(node, None)


# Devices of a claim, and its cores by socket.
_Pieces: TypeAlias = tuple[int, tuple[int, ...]]
_Counts: TypeAlias = tuple[int, ...]


class NodeIndex(dict[str, Node]):
    """The nodes by name, and indexes of them.

    devices, free_devices: of the nodes that take gangs. nodes_with: how many of these have so many devices free, of
    those that have any. draining: to be emptied, by an operator, for a fault of their own or for a reservation. faulty:
    have a device with a fault. reserved: of reservations that begin soon or last. tested: to be tested. choosy: may be
    closed to some jobs. unheard: not lost, and have not reported their gangs yet. strays_of: by job uid the nodes with
    a gang that is quarantined or being ended by an operator. last_answer: when a daemon was last answered, Unix
    seconds. next_silence_check: no node can turn silent or be lost before; None while none can. drained_in_vain: by
    epoch, gangs without a place off a draining node: `freed` of the view that was searched, and when.
    """

    def __init__(self) -> None:
        super().__init__()
        self.configuration_sets: dict[str, ConfigurationSet] = {}
        self.devices = 0
        self.free_devices = 0
        self.nodes_with: dict[int, int] = {}
        self.draining: dict[str, None] = {}
        self.faulty: dict[str, None] = {}
        self.reserved: dict[str, None] = {}
        self.choosy: dict[str, None] = {}
        self.tested: dict[str, None] = {}
        self.unheard: dict[str, None] = {}
        self.strays_of: dict[str, dict[str, None]] = {}
        self.last_answer: dict[str, float] = {}
        self.next_silence_check: float | None = None
        self.drained_in_vain: dict[int, tuple[int, float]] = {}

    @property
    def largest_free(self) -> int:
        """Devices that are free on one node that takes gangs, at most."""
        return max(self.nodes_with, default=0)

    def put(self, old: Node | None, node: Node) -> None:
        """Replace a node; `old`: as it was, None for a new one."""
        name = node.name
        self[name] = node
        list_if(self.draining, name, node.is_emptied)
        list_if(self.faulty, name, bool(node.device_faults))
        list_if(self.reserved, name, node.reservation)
        list_if(self.unheard, name, not node.heard and not node.lost)
        list_if(self.choosy, name, node.is_choosy)
        list_if(self.tested, name, node.test is not None)
        if old is None or old.strays is not node.strays:
            self.index_strays(old, node)

    def forget(self, name: str) -> None:
        node = self.pop(name)
        self.index_strays(node, replace(node, strays=()))
        for known in (self.draining, self.faulty, self.reserved, self.choosy, self.tested, self.last_answer):
            known.pop(name, None)

    def index_strays(self, old: Node | None, node: Node) -> None:
        uids = {stray.uid for stray in node.strays if stray.holds_back}
        for stray in old.strays if old is not None else ():
            nodes = self.strays_of.get(stray.uid)
            if nodes is not None and stray.uid not in uids:
                nodes.pop(node.name, None)
                if not nodes:
                    del self.strays_of[stray.uid]
        for uid in uids:
            self.strays_of.setdefault(uid, {})[node.name] = None

    def count_free(self, before: int, now: int) -> None:
        """Count a node that takes gangs: so many devices free; zero before it does, and once it does not."""
        if before == now:
            return
        self.free_devices += now - before
        counts = self.nodes_with
        if now:
            counts[now] = counts.get(now, 0) + 1
        if before:
            counts[before] -= 1
            if not counts[before]:
                del counts[before]

    def note_answer(self, name: str, now: float, limits_s: tuple[float | None, ...]) -> None:
        """Record that a node's daemon was answered. limits_s: silences after which something happens."""
        self.last_answer[name] = now
        for after in limits_s:
            if after is not None and (self.next_silence_check is None or now + after < self.next_silence_check):
                self.next_silence_check = now + after


def row_of(node: Node, topology: Topology, held: Sequence[Claim], affinity: int = 0) -> NodeRow:
    """Return what is free on a node whose gangs hold these claims, without faulty devices and those of strays."""
    configuration_set = topology.configuration_set
    used_mask = used_memory = 0
    kept_of_devices: tuple[int, ...] = ()
    free_cores = [socket.millicores for socket in configuration_set.sockets]
    whole = configuration_set.bandwidth
    used_bandwidth: Bandwidth = ()
    pieces = []
    for claim in held:
        used_mask |= claim.device_mask
        used_memory += claim.memory_bytes + claim.arena_bytes
        used_bandwidth = more_bandwidth(used_bandwidth, claim.bandwidth)
        pieces.append((claim.device_mask, claim.millicores))
        if claim.parked_bytes:
            before = kept_of_devices or (0,) * topology.devices
            kept_of_devices = tuple([kept + more for kept, more in zip(before, claim.parked_bytes, strict=True)])
        for index, millicores in enumerate(claim.millicores):
            free_cores[index] -= millicores
    for stray in node.strays:
        used_mask |= stray.device_mask
        if stray.newest_order is not None and stray.device_mask:
            claim = stray.newest_order.claim
            used_memory += claim.memory_bytes + claim.arena_bytes
            used_bandwidth = more_bandwidth(used_bandwidth, claim.bandwidth)
            for index, millicores in enumerate(claim.millicores[: len(free_cores)]):
                free_cores[index] -= millicores
    for device in node.device_faults:
        used_mask |= 1 << device
    at_sockets, in_groups, on_devices = _neighbours(topology.sockets, topology.groups, topology.devices, tuple(pieces))
    return NodeRow(
        node=node.name,
        configuration_set=node.configuration_set,
        free_mask=topology.all_mask & ~used_mask,
        free_millicores=tuple([cores if cores > 0 else 0 for cores in free_cores]),
        free_memory_bytes=max(0, configuration_set.free_memory_bytes - used_memory),
        available=node.takes_gangs,
        rack=node.rack,
        fabric=node.fabric,
        socket_jobs=at_sockets,
        group_jobs=in_groups,
        device_rows=on_devices,
        affinity=affinity,
        parked_bytes=kept_of_devices,
        partitions=topology.partitions,
        free_bandwidth=tuple([max(0, all_of_it - used) for all_of_it, used in zip(whole, used_bandwidth, strict=True)])
        if whole and used_bandwidth
        else whole,
    )


@lru_cache(16_384)
def _neighbours(
    sockets: tuple[int, ...], groups: tuple[int, ...], devices: int, held: tuple[_Pieces, ...]
) -> tuple[_Counts, _Counts, _Counts]:
    """Count the claims at each socket, in each group and on each device. Cached: many nodes are filled alike."""
    at_sockets, in_groups, on_devices = [0] * len(sockets), [0] * len(groups), [0] * devices
    for mask, cores in held:
        for i, at in enumerate(sockets):
            if mask & at or (i < len(cores) and cores[i]):
                at_sockets[i] += 1
        for i, group in enumerate(groups):
            if mask & group:
                in_groups[i] += 1
        for device in bits(mask & (1 << devices) - 1):
            on_devices[device] += 1
    return tuple(at_sockets), tuple(in_groups), tuple(on_devices)


def is_other_row(old: Node, node: Node) -> bool:
    """Return whether a change of a node affects its free pieces (`row_of`), besides what its gangs hold."""
    return (
        old.takes_gangs != node.takes_gangs
        or old.strays != node.strays
        or old.device_faults != node.device_faults
        or (old.configuration_set, old.rack, old.fabric) != (node.configuration_set, node.rack, node.fabric)
    )


def opens(old: Node, node: Node) -> bool:
    """Return whether a node takes gangs from a change on, or gangs of other users than before."""
    return node.takes_gangs and (not old.takes_gangs or old.reserved_for != node.reserved_for)
