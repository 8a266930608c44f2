"""Co-location in a replay with a preemptive order: runs the co-location stage and keeps its state between passes."""

from __future__ import annotations

from ganger.cluster.capacity_index import CapacityIndex

from ganger_master.core.change_reason import TrialFinding
from ganger_master.core.plan_changes import PlanChange
from ganger_master.planner.colocation_stage import OrderColocation, plan_packing
from ganger_master.planner.job_table import LiveTable
from ganger_master.policies.placements import PlacementPreference
from ganger_master.simulator.measurement_model import ModelledRates
from ganger_master.simulator.replay import Clock


class Packer:
    """Runs the co-location stage. `gpus`: number of GPUs of the cluster."""

    def __init__(
        self,
        placement: PlacementPreference,
        table: LiveTable,
        room: CapacityIndex,
        windows: ModelledRates,
        clock: Clock,
        gpus: int,
        plan_every_s: float,
    ) -> None:
        self._placement, self._table, self._room = placement, table, room
        self._windows, self._clock, self._gpus, self._every_s = windows, clock, gpus, plan_every_s
        self.packing = OrderColocation()

    @property
    def next_look_s(self) -> float:
        return self.packing.next_look_s(self._table, self._every_s)

    def plan(self) -> tuple[tuple[PlanChange, ...], tuple[TrialFinding, ...]]:
        """Return the changes to propose now and the findings of trials."""
        now = self._windows.now = self._clock.now
        changes, self.packing, findings = plan_packing(
            self.packing, self._placement, self._table, self._room, now, self._windows, self._gpus, self._every_s
        )
        return changes, findings
