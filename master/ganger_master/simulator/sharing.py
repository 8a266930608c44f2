"""Jobs that share GPUs in a replay: the pass that has them take turns and packs them, and what is remembered of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ganger.cluster.capacity_index import CapacityIndex

from ganger_master.core.change_reason import TrialFinding
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.migration_plans import MigrationPlan
from ganger_master.planner.plan import PlanDraft
from ganger_master.planner.refusal_backoff import NONE_EXCLUDED
from ganger_master.planner.shared import NOTHING, plan_shared
from ganger_master.policies.placements import PlacementPreference
from ganger_master.policies.slicing import quantum_s
from ganger_master.simulator.measurement_model import ModelledRates
from ganger_master.simulator.replay import Clock


class Sharing:
    """`gpus`: of the cluster. `round_s`: gangs that share a device have it for so long; None: for as long as a switch
    is worth."""

    def __init__(
        self,
        placement: PlacementPreference,
        table: LiveTable,
        room: CapacityIndex,
        windows: ModelledRates,
        clock: Clock,
        gpus: int,
        round_s: float | None,
    ) -> None:
        self._placement, self._table, self._room = placement, table, room
        self._windows, self._clock, self._gpus, self._round_s = windows, clock, gpus, round_s
        self.remembered = NOTHING
        # When they change places.
        self.switches_at = -math.inf

    def quantum_s(self, switch_s: float) -> float:
        """Seconds for which gangs that share a device have it, if a switch takes so long."""
        return quantum_s(switch_s) if self._round_s is None else self._round_s

    def plan(
        self, switch_s: float, errands: Sequence[MigrationPlan], kept_out: frozenset[int]
    ) -> tuple[PlanDraft, tuple[TrialFinding, ...]]:
        """The changes to propose now. `switch_s`: how long a switch takes. `errands`: moves under way. `kept_out`:
        numbers of those who are not to be started yet."""
        now = self._windows.now = self._clock.now
        found, self.remembered, findings = plan_shared(
            self._placement,
            self._table,
            now,
            self._room,
            self.remembered,
            self._windows,
            self._gpus,
            self.quantum_s(switch_s),
            NONE_EXCLUDED.resting(kept_out),
            errands=errands,
        )
        self.switches_at = found.next_change_s
        return found, findings
