"""What readers see: durable state, watchers of changes, streams of placement leases, and sampled progress of jobs.

The writer's state may be ahead of the store; this never is. Elements are immutable, so readers may keep them. A watcher
gets a flag and reads the state again, so a slow watcher costs no queue.

A stream of leases is a bounded queue of batches per call of WatchLeases. What does not fit expires unused.

The latest measured progress of each job is sampled, lossy, and kept in memory only, outside the state.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from operator import attrgetter
from typing import Any, Final, TypeAlias

from ganger.cluster.resources import ConfigurationSet, NodeRow
from ganger.cluster.view import LoadMode
from msgspec.structs import replace

from ganger_master.core.commands import ClaimTurns
from ganger_master.core.desired_projection import DesiredSet
from ganger_master.core.effects import Effects, StoredChanges
from ganger_master.core.gang_model import Gang, TimesliceGroup
from ganger_master.core.job_model import JobMetric, JobRecord
from ganger_master.core.node_model import Counters, Element, Node
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


class CommittedState:
    """Durable state by key, and the marks of its watchers."""

    def __init__(self) -> None:
        self.jobs: dict[int, JobRecord] = {}
        self.gangs: dict[int, Gang] = {}
        self.nodes: dict[str, Node] = {}
        self.sets: dict[int, TimesliceGroup] = {}
        self.configuration_sets: dict[str, ConfigurationSet] = {}
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

    def reset(self, state: State) -> None:
        """Start over from a state whose content is stored; every watcher is woken."""
        nodes = state.nodes
        pairs: tuple[tuple[dict[Any, Any], Mapping[Any, Any]], ...] = (
            (self.configuration_sets, nodes.configuration_sets),
            (self.nodes, nodes),
            (self.jobs, state.jobs),
            (self.gangs, state.gangs),
            (self.sets, state.gangs.sets),
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
            self._take_away(kind, key)
        jobs, gangs = self.jobs, self.gangs
        has_sets = any(kind == "node_set" for kind, _ in news.removes)
        for element in news.puts.values():
            # By far the most.
            if isinstance(element, JobRecord):
                jobs[element.number] = element
            elif isinstance(element, Gang):
                gangs[element.epoch] = element
            else:
                has_sets = has_sets or isinstance(element, TimesliceGroup)
                self._install(element)
        self.desired.update(news.desired)
        if news.rows or news.view_version > self.view_version:
            self._show(news.rows)
            self.view_version = news.view_version
            self.devices, self.free_devices, self.mode = news.devices, news.free_devices, news.mode
        if self._job_watchers and (news.jobs or news.rows or has_sets):
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
        """Return whether a planner follows all jobs."""
        return bool(self._job_watchers)

    @contextmanager
    def watching_jobs(self) -> Iterator[JobNews]:
        """Collects which jobs changed; its mark is set by changes of the view and of node sets, too, and by nodes that
        leave."""
        news = JobNews()
        self._job_watchers.add(news)
        try:
            yield news
        finally:
            self._job_watchers.discard(news)

    def wake(self, subject: str) -> None:
        """Lets the watchers of a subject look again."""
        for mark in self._watchers.get(subject, ()):
            mark.set()

    def _show(self, rows: Iterable[NodeRow]) -> None:
        shown = self.rows
        for row in sorted(rows, key=_by_version):
            shown.pop(row.node, None)
            shown[row.node] = row

    def _install(self, element: Element) -> None:
        match element:
            case JobRecord():
                self.jobs[element.number] = element
            case Gang():
                self.gangs[element.epoch] = element
            case Node():
                self.nodes[element.name] = element
            case TimesliceGroup():
                self.sets[element.number] = element
            case ConfigurationSet():
                self.configuration_sets[element.name] = element
            case Counters():
                self.counters = element

    def _take_away(self, kind: str, key: str) -> None:
        match kind:
            case "job":
                self.jobs.pop(int(key), None)
                self.wake(f"jobs/{key}")
            case "gang":
                self.gangs.pop(int(key), None)
            case "node":
                self.nodes.pop(key, None)
                self.desired.pop(key, None)
                self.rows.pop(key, None)
                self.wake("view")
                for watched in self._job_watchers:
                    watched.add(())
            case "node_set":
                self.sets.pop(int(key), None)
            case "configuration_set":
                self.configuration_sets.pop(key, None)


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

    def report(self, job: int, sample: Sample, node: str = "") -> None:
        """Record a sample. `node`: the node of the reporting daemon, which reports for its own ranks."""
        before = self._samples.get(job)
        known = sample
        if before is not None:
            if (sample.epoch, sample.step, sample.time) < (before.epoch, before.step, before.time):
                known = before
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
