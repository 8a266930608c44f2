"""The record of a replay: outcomes of its jobs, and time series of devices, cores, pending jobs and fragmentation."""

from __future__ import annotations

import math
from array import array

import numpy as np
from ganger.cluster.feasibility import GangMix, fragmented_gpus

from ganger_master.core.gang_model import Gang, GangIntent, GangPhase
from ganger_master.core.state import State
from ganger_master.simulator.report.figures import demand_of
from ganger_master.simulator.report.outcomes import Outcomes, SeriesRecorder, StepSeries, outcomes
from ganger_master.simulator.traces.workload import Workload


class Ledger:
    """Outcomes of jobs by position in the workload. Times are on the workload's clock."""

    def __init__(self, jobs: Workload) -> None:
        count = len(jobs)
        self._jobs = jobs
        # Plain arrays: writing single elements of NumPy arrays takes several times as long.
        nothing, never = array("d", bytes(8 * count)), array("d", [math.nan]) * count
        self._first_start, self._end, self._trains_since = never[:], never[:], never[:]
        self._service, self._trained = nothing[:], nothing[:]
        self._gpu_seconds, self._core_seconds = nothing[:], nothing[:]
        self._preemptions, self._migrations, self._resizes = (array("q", bytes(8 * count)) for _ in range(3))
        self.ended = 0

    def trains(self, job: int, held_since: float, now: float) -> None:
        """Record that its gang, which holds devices since `held_since`, has done its first step."""
        self.starts(job, held_since)
        self._trains_since[job] = now

    def halts(self, job: int, now: float) -> None:
        """Record that it stops training, though it may still hold devices. Idempotent."""
        if not math.isnan(self._trains_since[job]):
            self._trained[job] += now - self._trains_since[job]
            self._trains_since[job] = math.nan

    def leaves(self, job: int, gang: Gang, held_since: float, now: float, finished: bool) -> None:
        """Record that it released its devices, after `halts`."""
        self._hold(job, gang, now - held_since)
        if finished:
            self._end[job] = now
            self.ended += 1
        elif gang.intent is not GangIntent.HAND_OVER and gang.phase is not GangPhase.RESIZING:
            self._preemptions[job] += 1

    def starts(self, job: int, held_since: float) -> None:
        """Record that its first slice has begun at `held_since`."""
        if math.isnan(self._first_start[job]):
            self._first_start[job] = held_since

    def sliced(self, job: int, gang: Gang, held_s: float, trained_s: float, stops: int) -> None:
        """Record slices: seconds for which it held devices and for which it trained, and how often it was parked."""
        self._hold(job, gang, held_s)
        self._trained[job] += trained_s
        self._preemptions[job] += stops

    def received_s(self, job: int, now: float) -> float:
        """Return the seconds for which it has trained."""
        since = self._trains_since[job]
        return self._trained[job] + (0.0 if math.isnan(since) else now - since)

    def _hold(self, job: int, gang: Gang, held_s: float) -> None:
        self._service[job] += held_s
        self._gpu_seconds[job] += held_s * gang.devices
        self._core_seconds[job] += held_s * sum([sum(claim.millicores) for claim in gang.claims]) / 1000

    def moves(self, job: int, gang: Gang) -> None:
        """Record a migration or a resize of the running job."""
        (self._resizes if gang.resizes else self._migrations)[job] += 1

    def outcomes(self) -> Outcomes:
        service = np.array(self._service)
        return outcomes(
            self._jobs,
            np.array(self._first_start),
            np.array(self._end),
            service,
            overhead_s=service - np.array(self._trained),
            gpu_seconds=np.array(self._gpu_seconds),
            core_seconds=np.array(self._core_seconds),
            preemptions=np.array(self._preemptions),
            migrations=np.array(self._migrations),
            resizes=np.array(self._resizes),
        )


# Samples of fragmentation, which costs a pass over all nodes, between the first and the last submission.
_LOOKS = 1_000


class Meters:
    """Time series of the cluster. `millicores`: of the whole cluster."""

    def __init__(self, jobs: Workload, state: State, millicores: int) -> None:
        self._state = state
        self._millicores = millicores
        self._used = SeriesRecorder(0.0)
        self._cores = SeriesRecorder(0.0)
        self._waiting = SeriesRecorder(0.0)
        self._fragmented = SeriesRecorder(0.0)
        types = tuple(sorted({one.device_type for one in state.view.sets.values() if one.devices}))
        self._demand = demand_of(jobs, types) if len(jobs) and types else None
        # By node, all of which have joined.
        sets = [topology.configuration_set for topology in state.view.topologies]
        self._devices = np.array([one.devices for one in sets], np.int64)
        self._types = np.array([types.index(one.device_type) if one.devices else 0 for one in sets], np.int64)
        span = float(jobs.submit_s[-1] - jobs.submit_s[0]) if len(jobs) else 0.0
        self._every = span / _LOOKS
        self._next_look = 0.0

    def read(self, now: float) -> None:
        state = self._state
        self._used.record(now, state.nodes.devices - state.nodes.free_devices)
        self._waiting.record(now, len(state.queue.waiting))
        if now < self._next_look or self._demand is None:
            return
        self._next_look = now + self._every
        self._cores.record(now, (self._millicores - sum(map(sum, state.view.millicores))) / 1000)
        # Without free devices nothing is fragmented: on an oversubscribed cluster that is most of the time.
        self._fragmented.record(now, self._lost(self._demand) if any(state.view.free) else 0.0)

    def series(self, end: float) -> dict[str, StepSeries]:
        return {
            "used_gpus": self._used.series(end),
            "used_cores": self._cores.series(end),
            "waiting_jobs": self._waiting.series(end),
            "fragmented_gpus": self._fragmented.series(end),
        }

    def _lost(self, demand: GangMix) -> float:
        columns, size = self._state.view.columns(), len(self._devices)
        free = np.bitwise_count(columns.free[:size]).astype(np.int64)
        millicores, memory = columns.millicores[:size], columns.memory[:size]
        return float(fragmented_gpus(demand, free, millicores, memory, self._devices, self._types).sum())
