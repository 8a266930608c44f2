"""What became of every job of a replay: when it started and ended, what it held, what switching cost it."""

from __future__ import annotations

import math
from array import array

import numpy as np

from ganger_master.core.model import Gang, GangIntent, GangPhase
from ganger_master.simulator.report.outcomes import Outcomes, outcomes
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
