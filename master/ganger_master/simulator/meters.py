"""What a replayed cluster is like over time: devices and cores in use, who waits, free devices that nobody can use."""

from __future__ import annotations

import numpy as np
from ganger.cluster.fragmentation import GangMix, fragmented_gpus

from ganger_master.core.state import State
from ganger_master.simulator.report.fragmentation import demand_of
from ganger_master.simulator.report.series import SeriesRecorder, StepSeries
from ganger_master.simulator.traces.workload import Workload

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
