"""Time slices and co-location in a replay: runs Gandiva's pass and keeps its state between passes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from ganger.cluster.capacity_index import CapacityIndex

from ganger_master.core.change_reason import TrialFinding
from ganger_master.core.state import State
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.migration_plans import MigrationPlan
from ganger_master.planner.plan import PlanDraft
from ganger_master.planner.refusal_backoff import NONE_EXCLUDED
from ganger_master.planner.shared import NOTHING, plan_shared
from ganger_master.policies.placements import PlacementPreference
from ganger_master.policies.timeslice_fairness import QUANTUM_S, quantum_s
from ganger_master.simulator.measurement_model import ModelledRates
from ganger_master.simulator.replay import Clock


class Sharing:
    """Runs the pass for time-sliced and co-located jobs.

    `gpus`: number of GPUs of the cluster. `round_s`: a time slice and its switch last so long; None: the cost of a
    switch decides. `received_s`: seconds for which each running job has trained, by number.
    """

    def __init__(
        self,
        placement: PlacementPreference,
        table: LiveTable,
        room: CapacityIndex,
        windows: ModelledRates,
        clock: Clock,
        gpus: int,
        round_s: float | None,
        state: State,
        received_s: Callable[[], Mapping[int, float]],
    ) -> None:
        self._placement, self._table, self._room = placement, table, room
        self._windows, self._clock, self._gpus, self._round_s = windows, clock, gpus, round_s
        self._state, self._received_s = state, received_s
        self.remembered = NOTHING
        # When the next pass is due without a change.
        self.next_look_s = -math.inf

    def quantum_s(self, switch_s: float) -> float:
        """Return the length of a time slice in seconds for switches of `switch_s` seconds."""
        least_s = quantum_s(switch_s, 0.0)
        if self._round_s is None:
            return max(QUANTUM_S, least_s)
        return math.ceil((least_s + switch_s) / self._round_s or 1.0) * self._round_s - switch_s

    def plan(
        self, switch_s: float, errands: Sequence[MigrationPlan], kept_out: frozenset[int]
    ) -> tuple[PlanDraft, tuple[TrialFinding, ...]]:
        """Return the changes to propose now and the findings of trials.

        `switch_s`: duration of a switch. `errands`: migrations in progress. `kept_out`: jobs not to be started yet.
        """
        now = self._windows.now = self._clock.now
        found, self.remembered, findings = plan_shared(
            self._placement,
            self._table,
            now,
            self._room,
            self.remembered,
            self._windows,
            self._gpus,
            QUANTUM_S if self._round_s is None else self._round_s,
            NONE_EXCLUDED.resting(kept_out),
            turn_s=self.quantum_s(switch_s),
            received_s=self._received_s(),
            draining=tuple(self._state.nodes.draining),
            changing=[number for number, one in self._state.gangs.sets.items() if one.coming is not None],
            errands=errands,
        )
        self.next_look_s = found.next_change_s
        return found, findings
