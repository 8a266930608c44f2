"""What readers see: durable state, watchers of changes, streams of leases, and sampled progress of jobs.

The writer's state may be ahead of the store; this never is. Elements are immutable, so readers may keep them. A watcher
gets a flag and reads the state again, so a slow watcher costs no queue. A stream of leases is a bounded queue of
batches per call of WatchLeases: what does not fit expires unused. Progress is sampled, lossy, and kept in memory only,
outside the state. No decision reads it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from operator import attrgetter
from typing import Any, Final, TypeAlias

from ganger.cluster.resources import ConfigurationSet, NodeRow
from ganger.cluster.view import LoadMode
from ganger.v1 import job_pb2
from msgspec.structs import replace

from ganger_master.core.accounting import UserUsage
from ganger_master.core.commands import ClaimTurns
from ganger_master.core.desired_projection import DesiredSet
from ganger_master.core.events import Effects, StoredChanges
from ganger_master.core.gang_model import Gang, TimesliceGroup
from ganger_master.core.job_model import JobMetric, JobRecord
from ganger_master.core.node_model import AccessToken, Counters, Element, Node, Reservation
from ganger_master.core.queue import GrantedLease
from ganger_master.core.state import State


@dataclass(frozen=True, slots=True)
class Publication:
    """Changes of one durable batch for readers."""

    puts: Mapping[tuple[str, str], Element] = field(default_factory=dict)
    removes: tuple[tuple[str, str], ...] = ()
    desired: Mapping[str, DesiredSet] = field(default_factory=dict)
    rows: Sequence[NodeRow] = ()
    view_version: int = 0
    jobs: Sequence[int] = ()
    # Of the nodes that take gangs: all devices, and those that are free.
    devices: int = 0
    free_devices: int = 0
    mode: LoadMode = LoadMode.SPREAD


def publication_of(state: State, changes: StoredChanges, effects: Effects) -> Publication:
    """Return what a batch that left `state` has changed for readers."""
    return Publication(
        puts=changes.puts,
        removes=changes.removes,
        desired={node: state.desired.of(node) for node in effects.nodes},
        rows=[state.view.row(node) for node in effects.rows],
        view_version=state.view.version,
        jobs=effects.jobs,
        devices=state.nodes.devices,
        free_devices=state.nodes.free_devices,
        mode=state.view.mode,
    )


async def comes(news: asyncio.Event, within_s: float) -> bool:
    """Wait for news; return whether they came in time."""
    try:
        async with asyncio.timeout(within_s):
            await news.wait()
    except TimeoutError:
        return False
    return True


class JobNews:
    """Numbers of the jobs that changed since the watcher last took them, each once."""

    def __init__(self) -> None:
        self.mark = asyncio.Event()
        self._numbers: dict[int, None] = {}
        # Everything may have changed.
        self._is_all = True
        self.mark.set()

    def add(self, numbers: Iterable[int]) -> None:
        self._numbers.update(dict.fromkeys(numbers))
        self.mark.set()

    def add_all(self) -> None:
        self._is_all = True
        self.mark.set()

    def take(self) -> Sequence[int] | None:
        """Return the changed jobs and clear them; None: all jobs may have changed."""
        numbers, self._numbers = self._numbers, {}
        is_all, self._is_all = self._is_all, False
        return None if is_all else tuple(numbers)


# Of a planner that the master starts itself: its imports and its first view of the cluster.
PLANNER_GRACE_S: Final = 30.0


class CommittedState:
    """Durable state by key, and the marks of its watchers."""

    def __init__(self) -> None:
        self.jobs: dict[int, JobRecord] = {}
        self.gangs: dict[int, Gang] = {}
        self.nodes: dict[str, Node] = {}
        self.sets: dict[int, TimesliceGroup] = {}
        self.configuration_sets: dict[str, ConfigurationSet] = {}
        self.usage: dict[str, UserUsage] = {}
        self.reservations: dict[str, Reservation] = {}
        self.tokens: dict[str, AccessToken] = {}
        self.counters = Counters()
        self.desired: dict[str, DesiredSet] = {}
        # In the order of their versions, so that what is newer than a version is the end of it.
        self.rows: dict[str, NodeRow] = {}
        self.view_version = 0
        # Of the nodes that take gangs: all devices, and those that are free.
        self.devices = 0
        self.free_devices = 0
        self.mode = LoadMode.SPREAD
        self._watchers: dict[str, set[asyncio.Event]] = {}
        self._job_watchers: set[JobNews] = set()
        # Seconds that a planner may take to connect, and since when none is connected, by a steady clock.
        self._planner_grace_s = 0.0
        self._without_planner_since = 0.0

    def reset(self, state: State) -> None:
        """Start over from a state whose content is stored; every watcher is woken."""
        nodes = state.nodes
        pairs: tuple[tuple[dict[Any, Any], Mapping[Any, Any]], ...] = (
            (self.configuration_sets, nodes.configuration_sets),
            (self.nodes, nodes),
            (self.jobs, state.jobs),
            (self.gangs, state.gangs),
            (self.sets, state.gangs.sets),
            (self.usage, state.usage),
            (self.reservations, state.reservations),
            (self.tokens, state.tokens),
            (self.desired, {name: state.desired.of(name) for name in nodes}),
            (self.rows, {}),
        )
        for kept, found in pairs:
            kept.clear()
            kept.update(found)
        self.counters = replace(state.counters)
        self._show([state.view.row(name) for name in nodes])
        self.view_version = state.view.version
        self.devices, self.free_devices, self.mode = nodes.devices, nodes.free_devices, state.view.mode
        for subject in list(self._watchers):
            self.wake(subject)
        for watched in self._job_watchers:
            watched.add_all()

    def publish(self, news: Publication) -> None:
        for kind, key in news.removes:
            kept, place = self._place_of(kind, key)
            kept.pop(place, None)
            if kind == "job":
                self.wake(f"jobs/{key}")
            elif kind == "node":
                self.desired.pop(key, None)
                self.rows.pop(key, None)
                self.wake("view")
                for watched in self._job_watchers:
                    watched.add(())
        for (kind, key), element in news.puts.items():
            if isinstance(element, Counters):
                self.counters = element
            else:
                kept, place = self._place_of(kind, key)
                kept[place] = element
        is_beside = any(kind in ("node_set", "reservation") for kind, _ in (*news.removes, *news.puts))
        self.desired.update(news.desired)
        if news.rows or news.view_version > self.view_version:
            self._show(news.rows)
            self.view_version = news.view_version
            self.devices, self.free_devices, self.mode = news.devices, news.free_devices, news.mode
        if self._job_watchers and (news.jobs or news.rows or is_beside):
            for watched in self._job_watchers:
                watched.add(news.jobs)
        if self._watchers:
            for number in news.jobs:
                self.wake(f"jobs/{number}")
            for node in news.desired:
                self.wake(f"nodes/{node}")
            if news.rows:
                self.wake("view")

    def rows_after(self, version: int) -> list[NodeRow]:
        """Rows that changed after a version of the view, newest first."""
        return list(takewhile(lambda row: row.version > version, reversed(self.rows.values())))

    @contextmanager
    def watching(self, subject: str) -> Iterator[asyncio.Event]:
        """An event that is set whenever the subject ("jobs/7", "nodes/n1", "view") has news; the watcher clears it."""
        mark = asyncio.Event()
        self._watchers.setdefault(subject, set()).add(mark)
        try:
            yield mark
        finally:
            marks = self._watchers.get(subject, set())
            marks.discard(mark)
            if not marks:
                self._watchers.pop(subject, None)

    @property
    def has_planner(self) -> bool:
        """Return whether a planner follows all jobs, or is expected to within moments."""
        waited_s = time.monotonic() - self._without_planner_since
        return bool(self._job_watchers) or waited_s < self._planner_grace_s

    def expect_planner(self) -> None:
        """Expect the planner that this master starts now, and starts again whenever it ends."""
        self._planner_grace_s, self._without_planner_since = PLANNER_GRACE_S, time.monotonic()

    @contextmanager
    def watching_jobs(self) -> Iterator[JobNews]:
        """Collects which jobs changed. Changes of the view, node sets and reservations, and nodes that leave, set its
        mark, too."""
        news = JobNews()
        self._job_watchers.add(news)
        try:
            yield news
        finally:
            self._job_watchers.discard(news)
            self._without_planner_since = time.monotonic()

    def wake(self, subject: str) -> None:
        """Lets the watchers of a subject look again."""
        for mark in self._watchers.get(subject, ()):
            mark.set()

    def _show(self, rows: Iterable[NodeRow]) -> None:
        shown = self.rows
        for row in sorted(rows, key=_by_version):
            shown.pop(row.node, None)
            shown[row.node] = row

    def _place_of(self, kind: str, key: str) -> tuple[dict[Any, Any], int | str]:
        """Return the elements of a kind, and the key of one of them there."""
        match kind:
            case "job":
                return self.jobs, int(key)
            case "gang":
                return self.gangs, int(key)
            case "node_set":
                return self.sets, int(key)
            case "node":
                return self.nodes, key
            case "configuration_set":
                return self.configuration_sets, key
            case "user_usage":
                return self.usage, key
            case "reservation":
                return self.reservations, key
            case "access_token":
                return self.tokens, key
            case _:
                # No reader needs the ids of requests.
                return {}, key


_by_version: Final = attrgetter("version")


LeaseBatch: TypeAlias = Sequence[GrantedLease]
# A batch takes one commit; a stream so many batches behind has missed the leases of the oldest ones anyway.
_LONGEST_QUEUE: Final = 1_000


class LeaseStreams:
    """Live streams by the name of their scheduler."""

    def __init__(self) -> None:
        self._queues: dict[str, asyncio.Queue[LeaseBatch | None]] = {}
        self._claims: dict[str, tuple[int, ...]] = {}

    def claims(self) -> list[ClaimTurns]:
        """Return what the open streams claim, to be repeated after the core has started over."""
        return [ClaimTurns(scheduler, jobs) for scheduler, jobs in self._claims.items()]

    def is_of(self, scheduler: str, queue: asyncio.Queue[LeaseBatch | None]) -> bool:
        """Return whether the stream with this queue still has the name."""
        return self._queues.get(scheduler) is queue

    def has_other_host(self, scheduler: str) -> bool:
        """Return whether another default host than this one is connected."""
        return any(not jobs and other != scheduler for other, jobs in self._claims.items())

    @contextmanager
    def opened(self, scheduler: str, jobs: tuple[int, ...]) -> Iterator[asyncio.Queue[LeaseBatch | None]]:
        """Yield the queue of a stream; a later stream of the same name takes the name over, and None ends this one."""
        queue: asyncio.Queue[LeaseBatch | None] = asyncio.Queue(_LONGEST_QUEUE)
        former = self._queues.get(scheduler)
        if former is not None:
            _put(former, None)
        self._queues[scheduler] = queue
        self._claims[scheduler] = jobs
        try:
            yield queue
        finally:
            if self._queues.get(scheduler) is queue:
                del self._queues[scheduler]
                del self._claims[scheduler]

    def give(self, leases: LeaseBatch) -> None:
        """Send the leases of one commit: each to the stream that claimed its job, all others to the default host that
        is least busy."""
        host = min(
            [scheduler for scheduler, jobs in self._claims.items() if not jobs],
            key=lambda scheduler: self._queues[scheduler].qsize(),
            default="",
        )
        batches: dict[str, list[GrantedLease]] = {}
        for lease in leases:
            batches.setdefault(lease.scheduler or host, []).append(lease)
        for scheduler, batch in batches.items():
            queue = self._queues.get(scheduler)
            if queue is not None:
                _put(queue, batch)


def _put(queue: asyncio.Queue[LeaseBatch | None], batch: LeaseBatch | None) -> None:
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(batch)


@dataclass(frozen=True, slots=True)
class Sample:
    """Progress of one job at one time. `loss`: NaN until the job reports one; `time`: Unix seconds."""

    epoch: int
    step: int
    samples: int
    steps_per_second: float
    loss: float
    data_wait_share: float
    time: float
    # Reason for its lack of progress, as the daemon of one of its nodes reports it.
    concern: str = ""
    # Time of the last step; zero: not reported.
    step_time: float = 0.0
    # Time of the first step since it last started or resumed; zero: none yet.
    since_time: float = 0.0
    # Utilisation of its devices, 0 to 1; None: not measurable.
    device_use: float | None = None
    # Host memory in use on that node, and bytes of files read again there for want of page cache; None: not measurable.
    working_set_bytes: int = 0
    refault_bytes_per_s: float | None = None
    # As in `Progress` of job.proto.
    used_memory_bytes: int = 0
    least_memory_bytes: int = 0
    trial_memory_bytes: int = 0
    # Metrics that the job reported by name; only the daemon of its first rank reports them.
    metrics: tuple[JobMetric, ...] = ()
    # Completed and planned epochs of training; zero: not reported.
    training_epoch: int = 0
    training_epochs: int = 0
    # Mini-batches evaluated so far, those since the last step, and when the last one was done; zero: it trains.
    evaluated: int = 0
    evaluated_in_row: int = 0
    evaluated_time: float = 0.0


# A daemon's concern holds until the daemon reports otherwise, or reports nothing for this time.
_CONCERN_S = 10.0


class ProgressBoard:
    """One sample per job; an older epoch or an earlier step of the same epoch never replaces a newer one."""

    def __init__(self) -> None:
        self._samples: dict[int, Sample] = {}
        # By job and node: time of the report, and its text.
        self._concerns: dict[int, dict[str, tuple[float, str]]] = {}
        # Of running jobs, as their planner sent them last.
        self.remaining: Mapping[int, job_pb2.RemainingTime] = {}

    def report(self, job: int, sample: Sample, node: str = "") -> None:
        """Record a sample. `node`: the node of the reporting daemon, which reports for its own ranks."""
        before = self._samples.get(job)
        known = sample
        if before is not None:
            other = before
            if (sample.epoch, sample.step, sample.time) < (before.epoch, before.step, before.time):
                known, other = before, sample
            if other.samples and not known.samples and other.epoch == known.epoch:
                # Of a node of parameter servers, which take no samples.
                figures = ("samples", "loss", "training_epoch", "training_epochs")
                known = dataclasses.replace(known, **{name: getattr(other, name) for name in figures})
            # Until the running attempt reports metrics, those of the attempt before are kept.
            known = dataclasses.replace(known, metrics=sample.metrics or before.metrics)
        self._samples[job] = dataclasses.replace(known, concern=self._concern(job, sample, node))

    def _concern(self, job: int, sample: Sample, node: str) -> str:
        """Return the concern of the first node, by name, whose daemon reports one."""
        concerns = {
            other: (since, text)
            for other, (since, text) in self._concerns.pop(job, {}).items()
            if other != node and sample.time - since < _CONCERN_S
        }
        if sample.concern:
            concerns[node] = (sample.time, sample.concern)
        if not concerns:
            return ""
        self._concerns[job] = concerns
        return concerns[min(concerns)][1]

    def of(self, job: int) -> Sample | None:
        return self._samples.get(job)

    def newer_than(self, marks: Mapping[int, float], jobs: Iterable[int] | None = None) -> dict[int, Sample]:
        """Return samples newer than the mark of their job. `jobs`: None: all jobs."""
        chosen = self._samples if jobs is None else [job for job in jobs if job in self._samples]
        return {job: self._samples[job] for job in chosen if self._samples[job].time > marks.get(job, 0.0)}

    def forget(self, is_live: Iterable[int]) -> None:
        """Drop the samples of all jobs that are not in `is_live`."""
        live = set(is_live)
        self._samples = {job: sample for job, sample in self._samples.items() if job in live}
        self._concerns = {job: concerns for job, concerns in self._concerns.items() if job in live}
