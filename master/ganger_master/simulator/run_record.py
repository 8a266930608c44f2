"""What became of every job of a replay: when it started and ended, what it held, what switching cost it.

What a replayed cluster is like over time: devices and cores in use, who waits, free devices that nobody can use.
"""

from __future__ import annotations

import math
from array import array

import numpy as np
from ganger.cluster.fragmentation import GangMix, fragmented_gpus

from ganger_master.core.model import Gang, GangIntent, GangPhase
from ganger_master.core.state import State
from ganger_master.simulator.report.figures import demand_of
from ganger_master.simulator.report.outcomes import Outcomes, outcomes
from ganger_master.simulator.report.series import SeriesRecorder, StepSeries
from ganger_master.simulator.traces.workload import Workload


class Ledger:
    """By position in the workload; times are on the workload's clock."""

    def __init__(self, jobs: Workload) -> None:
        count = len(jobs)
        self._jobs = jobs
        # Written job by job, which arrays of NumPy take several times as long for.
        nothing, never = array("d", bytes(8 * count)), array("d", [math.nan]) * count
        self._first_start, self._end, self._trains_since = never[:], never[:], never[:]
        self._service, self._trained = nothing[:], nothing[:]
        self._gpu_seconds, self._core_seconds = nothing[:], nothing[:]
        self._preemptions, self._migrations, self._resizes = (array("q", bytes(8 * count)) for _ in range(3))
        self.ended = 0

    def trains(self, job: int, held_since: float, now: float) -> None:
        """Its gang, held since a time, has done its first step."""
        if math.isnan(self._first_start[job]):
            self._first_start[job] = held_since
        self._trains_since[job] = now

    def halts(self, job: int, now: float) -> None:
        """It does no more steps, though it may hold its gang still; told as often as one likes."""
        if not math.isnan(self._trains_since[job]):
            self._trained[job] += now - self._trains_since[job]
            self._trains_since[job] = math.nan

    def leaves(self, job: int, gang: Gang, held_since: float, now: float, finished: bool) -> None:
        """It gave its gang back, and has halted before."""
        held = now - held_since
        self._service[job] += held
        self._gpu_seconds[job] += held * gang.devices
        self._core_seconds[job] += held * sum([sum(claim.millicores) for claim in gang.claims]) / 1000
        if finished:
            self._end[job] = now
            self.ended += 1
        elif gang.intent is not GangIntent.HAND_OVER and gang.phase is not GangPhase.RESIZING:
            self._preemptions[job] += 1

    def moves(self, job: int, gang: Gang) -> None:
        """It goes on elsewhere, or with another number of devices, with all that it has done."""
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


# Looks at fragmentation, which asks about every node, over the time in which jobs are submitted.
_LOOKS = 1_000


class Meters:
    """`millicores`: of the whole cluster."""

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
        self._used.record(now, state.devices - state.free_devices)
        self._waiting.record(now, len(state.waiting))
        if now < self._next_look or self._demand is None:
            return
        self._next_look = now + self._every
        self._cores.record(now, (self._millicores - sum(map(sum, state.view.millicores))) / 1000)
        # What is not free nobody can use, as in a crowd most of the time.
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
