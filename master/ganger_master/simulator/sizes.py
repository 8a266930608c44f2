"""Elastic jobs in a replay: runs the growth stage and keeps its state between passes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from ganger.cluster.capacity_index import CapacityIndex

from ganger_master.core.change_reason import TrialFinding
from ganger_master.planner.growth_stage import GrowthTrials, Sizes, plan_sizes
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.plan import PlanDraft
from ganger_master.policies.elastic_growth import IDLE_S
from ganger_master.policies.placements import PlacementPreference
from ganger_master.simulator.measurement_model import ModelledRates
from ganger_master.simulator.replay import Clock


class Sizing:
    """Grows elastic jobs onto idle GPUs and takes the GPUs back for pending jobs.

    `wake`: called when a pass is due without a change. `most_idle_s`: maximum time for which GPUs stay idle.
    """

    def __init__(
        self,
        placement: PlacementPreference,
        table: LiveTable,
        room: CapacityIndex,
        windows: ModelledRates,
        clock: Clock,
        most_idle_s: float,
        wake: Callable[[], None],
    ) -> None:
        self._placement, self._table, self._room = placement, table, room
        self._windows, self._clock, self._wake = windows, clock, wake
        self._idle_s = min(IDLE_S, most_idle_s)
        self._growing, self._planned = GrowthTrials(), Sizes()
        # Times at which a wake-up is scheduled.
        self._wakes: set[float] = set()

    def trains(self, number: int) -> None:
        """Note that a job trains as of now; schedule a pass for when enough of it is measured."""
        self._windows.now = self._clock.now
        self._come_back(self._windows.next_look_s(number))

    def plan(self, busy: Collection[int]) -> None:
        """Decide on the changes to propose now. `busy`: numbers of jobs that keep their size."""
        now = self._windows.now = self._clock.now
        found, self._growing = plan_sizes(
            self._placement, self._table, now, self._room, self._windows, self._growing, self._idle_s, busy
        )
        self._planned = found
        self._come_back(min(found.next_s, *map(self._windows.next_look_s, self._growing.trials), math.inf))

    @property
    def is_giving(self) -> bool:
        """Whether the last plan takes GPUs back for pending jobs, so that no job need be preempted for them."""
        return self._planned.is_giving

    @property
    def findings(self) -> tuple[TrialFinding, ...]:
        return self._planned.findings

    def beside(self, found: PlanDraft) -> PlanDraft:
        """Merge the result of another pass with the changes planned last."""
        return PlanDraft(self._planned.changes, next_change_s=self._planned.next_s).followed_by(found)

    def refused(self, numbers: Collection[int]) -> None:
        """Note the jobs of the last plan whose changes the core refused."""
        changed = frozenset(change.number for change in self._planned.changes)
        self._growing = self._growing.without(changed.intersection(numbers), self._clock.now)

    def _come_back(self, time: float) -> None:
        if time < math.inf and time > self._clock.now and time not in self._wakes:
            self._wakes.add(time)
            self._clock.at(time, lambda: self._due(time))

    def _due(self, time: float) -> None:
        self._wakes.discard(time)
        self._wake()
