"""Opportunistic migrations beside the pass that lets jobs share GPUs: neither undoes what the other has begun."""

from __future__ import annotations

import dataclasses

from core.drive import GIB, job_of
from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.resources import Locality, LocalityLevel
from ganger_master.estimators.speed import LocalityPoint
from ganger_master.planner.context import ClusterChange, PlanDraft, PlannerSettings, context_of
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.migrate_stage import plan_moves
from ganger_master.planner.migration_outcomes import MigrationOutcomes
from ganger_master.planner.migration_plans import LONGEST_S
from ganger_master.planner.plan_pace import NONE_EXCLUDED, ExcludedJobs
from ganger_master.planner.sharing_stage import NOTHING, plan_shared
from msgspec.structs import replace
from planner.test_moves import Moved, Rates, together


class Busy(Rates):
    """Jobs keep their devices busy, so that none is co-located."""

    def utilisation(self, number: int) -> float:
        return 1.0


class Shared(Moved):
    """A state that the planner of `gandiva` looks after."""

    def __init__(self, nodes: int = 2) -> None:
        super().__init__(nodes, "gandiva")
        self.rates = Busy()
        self.remembered = NOTHING

    def found(self, kept_out: ExcludedJobs = NONE_EXCLUDED, may_stop: bool = False) -> PlanDraft:
        table = LiveTable()
        for job in self.state.jobs.values():
            table.put(*self.as_received(job))
        view = self.state.view.copy()
        context = context_of(
            self.policy,
            table,
            CapacityIndex(view),
            self.now,
            settings=PlannerSettings(look_s=60.0),
            cluster=ClusterChange(view, draining=tuple(self.state.nodes.draining)),
            rates=self.rates,
            may_preempt=False,
        )
        found, self.remembered, self.findings = plan_shared(context, self.remembered, None, self.moving.plans)
        if found.changes or self.findings:
            return found
        moved, self.moving, self.findings, self.again_s = plan_moves(
            lambda _: found, context, self.moving, makes_room=False
        )
        return moved


def resting() -> tuple[Shared, int]:
    """A pair over two nodes that rests on its way to one of them, where it has a device already."""
    drive = Shared()
    leaves, _ = drive.running(together(3)), drive.running(together(3))
    pair = drive.running(replace(job_of(2, memory=GIB), locality=Locality(LocalityLevel.CLUSTER)), seconds=1_000.0)
    drive.rates.rates[pair] = 10.0
    seen = (LocalityPoint(2, 2, 0.6, LocalityLevel.CLUSTER), LocalityPoint(2, 1, 0.95, LocalityLevel.SOCKET))
    drive.moving = dataclasses.replace(drive.moving, outcomes=MigrationOutcomes(points={"alike": seen}))
    drive.ends(leaves)
    drive.running(together(2))
    drive.runs(pair)
    assert drive.proposed() == [("SUSPEND", pair)]
    drive.rests(pair)
    return drive, pair


def test_a_job_parked_on_its_way_resumes_at_its_destination() -> None:
    drive, pair = resting()
    assert drive.proposed() == [("MOVE", pair)]
    drive.moves(pair)
    assert drive.node_of(pair) == "n1"
    assert drive.proposed() == []


def test_a_job_that_arrives_meanwhile_does_not_get_the_kept_place() -> None:
    drive, pair = resting()
    drive.submit(together(2))
    assert drive.proposed() == [("MOVE", pair)]


def test_a_job_parked_for_an_abandoned_migration_plan_resumes() -> None:
    drive, pair = resting()
    drive.now += LONGEST_S
    assert drive.proposed() == [("RESUME", pair)]
