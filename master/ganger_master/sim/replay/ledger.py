"""What became of every job of a replay: when it started and ended, what it held, what switching cost it."""

from __future__ import annotations

import math

import numpy as np

from ganger_master.core.model import Gang, GangPhase, Intent
from ganger_master.sim.report.outcomes import Outcomes, outcomes
from ganger_master.sim.traces.workload import Workload


class Ledger:
    """By position in the workload; times are on the workload's clock."""

    def __init__(self, jobs: Workload) -> None:
        count = len(jobs)
        self._jobs = jobs
        self._first_start, self._end = np.full(count, np.nan), np.full(count, np.nan)
        self._service, self._trained = np.zeros(count), np.zeros(count)
        self._gpu_seconds, self._core_seconds = np.zeros(count), np.zeros(count)
        self._trains_since = np.full(count, np.nan)
        self._preemptions, self._migrations = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self._resizes = np.zeros(count, np.int64)
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
            self._trains_since[job] = np.nan

    def leaves(self, job: int, gang: Gang, held_since: float, now: float, finished: bool) -> None:
        """It gave its gang back, and has halted before."""
        held = now - held_since
        self._service[job] += held
        self._gpu_seconds[job] += held * gang.devices
        self._core_seconds[job] += held * sum([sum(claim.millicores) for claim in gang.claims]) / 1000
        if finished:
            self._end[job] = now
            self.ended += 1
        elif gang.intent is not Intent.HAND_OVER and gang.phase is not GangPhase.RESIZING:
            self._preemptions[job] += 1

    def moves(self, job: int, gang: Gang) -> None:
        """It goes on elsewhere, or with another number of devices, with all that it has done."""
        (self._resizes if gang.resizes else self._migrations)[job] += 1

    def outcomes(self) -> Outcomes:
        return outcomes(
            self._jobs,
            self._first_start,
            self._end,
            self._service,
            overhead_s=self._service - self._trained,
            gpu_seconds=self._gpu_seconds,
            core_seconds=self._core_seconds,
            preemptions=self._preemptions,
            migrations=self._migrations,
            resizes=self._resizes,
        )
