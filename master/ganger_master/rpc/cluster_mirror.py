"""What the master sends to planners, as the events of a planner's loop: jobs and nodes as one commit left them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from math import isfinite, nan

from ganger.v1 import job_pb2, scheduling_pb2
from ganger.wire import resource_names as names
from ganger.wire import times
from ganger.wire.view_mirror import Mirror

from ganger_master.core.gang_model import Gang
from ganger_master.core.job_model import JobRecord
from ganger_master.planner.context import ClusterChange, ProgressReports
from ganger_master.planner.rate_registry import ProgressReport
from ganger_master.rpc.planner_messages import live_job_from_wire


class ClusterMirror:
    """Follows one stream of deltas. `clock`: this machine's time in Unix seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.policy = ""
        self.plan_every_s = 0.0
        self._clock = clock
        # Seconds by which the master's clock is ahead of this one.
        self._ahead_s = 0.0
        self._mirror = Mirror()
        self._parts: list[scheduling_pb2.ClusterDelta] = []
        self._revisions: dict[int, int] = {}
        # Numbers of jobs without news since `expect_news`.
        self._expected: set[int] = set()
        self._changed = asyncio.Event()

    @property
    def now(self) -> float:
        """The time by the master's clock, which all times of jobs are of."""
        return self._clock() + self._ahead_s

    def apply(self, delta: scheduling_pb2.ClusterDelta) -> ClusterChange | None:
        """Return what has changed; None before the last part of a moment has arrived. Raises RequestInvalid for what
        this program does not know."""
        self._parts.append(delta)
        if delta.has_more:
            return None
        parts, self._parts = self._parts, []
        first = parts[0]
        is_whole = first.view.from_version == 0
        if is_whole:
            self._revisions.clear()
        self._mirror.apply(first.view)
        jobs = [self._put(job) for part in parts for job in part.jobs]
        forgotten = [names.parse_job_name(name) for name in first.removed_jobs]
        for number in forgotten:
            self._revisions.pop(number, None)
        self._expected.difference_update(forgotten)
        self._ahead_s = times.unix_s(first.time) - self._clock()
        self.policy, self.plan_every_s = first.policy, times.seconds(first.plan_interval)
        self._changed.set()
        return ClusterChange(
            self._mirror.view,
            jobs,
            forgotten,
            is_whole=is_whole,
            quotas=dict(first.quotas),
            draining=tuple([names.parse_node_name(node) for node in first.draining_nodes]),
            changing=frozenset(map(names.parse_node_set_name, first.changing_node_sets)),
            quantum_s=times.seconds(first.quantum) if first.HasField("quantum") else None,
            moves_per_hour=first.migrations_per_hour if first.HasField("migrations_per_hour") else None,
        )

    def expect_news(self, numbers: Iterable[int]) -> None:
        """Await news of these jobs: `wait_for_news` waits for what arrives from now on."""
        self._expected = set(numbers)

    async def wait_for_news(self, numbers: Collection[int], rest_s: float) -> None:
        """Wait until news of all these jobs have arrived since `expect_news`, or none for `rest_s` seconds."""
        self._expected.intersection_update(numbers)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(rest_s) as timeout:
                while left := len(self._expected):
                    self._changed.clear()
                    await self._changed.wait()
                    if len(self._expected) < left:
                        timeout.reschedule(asyncio.get_running_loop().time() + rest_s)

    async def reach(self, revisions: Mapping[int, int]) -> None:
        """Wait until these jobs are known at least at these revisions, or have ended."""
        while any(self._revisions.get(number, revision) < revision for number, revision in revisions.items()):
            self._changed.clear()
            await self._changed.wait()

    def _put(self, message: scheduling_pb2.LiveJob) -> tuple[JobRecord, Gang | None, int]:
        job, gang = live_job_from_wire(message)
        self._expected.discard(job.number)
        if job.state.is_finished:
            self._revisions.pop(job.number, None)
        else:
            self._revisions[job.number] = job.revision
        return job, gang, message.signature


def reports_from_wire(batch: scheduling_pb2.ProgressBatch) -> ProgressReports:
    """Return the reports of jobs that have done a step, in the order of their numbers."""
    # A job without a step may report for other reasons.
    known = {names.parse_job_name(name): one for name, one in batch.progress.items() if one.HasField("step_time")}
    # The order of a map on the wire is that of no program.
    return ProgressReports({number: progress_from_wire(known[number]) for number in sorted(known)})


def progress_from_wire(progress: job_pb2.Progress) -> ProgressReport:
    """Return a job's report; its `step_time` is set."""
    return ProgressReport(
        progress.step,
        times.unix_s(progress.step_time),
        times.unix_s(progress.first_step_time) if progress.HasField("first_step_time") else nan,
        progress.device_utilization if progress.HasField("device_utilization") else None,
        progress.loss,
        progress.training_epoch or _reported_passes(progress),
        progress.training_epochs,
    )


def _reported_passes(progress: job_pb2.Progress) -> int:
    """Return the passes of a job that reports its epoch as a metric."""
    reported = [metric.value for metric in progress.metrics if metric.name == "epoch"]
    return int(max(0.0, reported[0])) if reported and isfinite(reported[0]) else 0
