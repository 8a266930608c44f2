"""A plan in which a stage raises an error fails alone: nothing of it is left, and the next one is made."""

from __future__ import annotations

import pytest
from core.drive import job_of
from ganger.cluster.capacity_index import CapacityIndex, Trial
from ganger.cluster.resources import Claim
from ganger_master.core.commands import ProposePlan
from ganger_master.planner.context import ClusterChange, PlanContext, PlannerSettings, PlanStage
from ganger_master.planner.loop import PlannerLoop
from ganger_master.planner.plan_pace import PlanPace
from ganger_master.policies import policy_named
from kit.clusters import GIB, cluster
from msgspec.structs import replace
from planner.test_passes import Planned


class Failing(PlanStage):
    """Gives back what runs, takes all else, tries more on top, and fails in the midst of it; later it is in order."""

    def __init__(self) -> None:
        self.is_broken = True

    def plan(self, context: PlanContext) -> None:
        if not self.is_broken:
            return
        room, view = context.room, context.room.view
        outer, inner = Trial(room), Trial(room)
        for _, gang in context.jobs.running:
            outer.give(gang.claims)
        inner.take((Claim("n1", 0b11, (1_000, 0), GIB, tasks=(2,)),))
        outer.take((Claim("n1", 0b100, (0, 500), GIB, tasks=(1,)),))
        # The second piece is held: the first is not taken either.
        inner.take((Claim("n2", 0b1, (0, 0), GIB), Claim("n1", 0b100, (0, 0), GIB)))
        assert view.free, "not reached"


def test_a_stage_that_fails_leaves_the_committed_state_to_the_next_plan_which_is_made() -> None:
    drive = Planned(nodes=2)
    drive.running(job_of(2))
    waiting = drive.submit(job_of(2))
    loop = PlannerLoop(policy_named("las"), PlannerSettings(PlanPace(60.0, least_rest_s=0.0, least_alone_s=0.0)))
    failing = Failing()
    loop._stages.append(failing)
    view = drive.state.view.copy()
    jobs = [(*drive.as_received(job), 0) for job in drive.state.jobs.values()]
    loop.observe(ClusterChange(view, jobs, is_whole=True), drive.now)
    committed = [replace(row, version=0) for row in view.rows()]
    with pytest.raises(AssertionError, match="are held already"):
        loop.step(drive.now)
    assert [replace(row, version=0) for row in view.rows()] == committed
    plan, due_s = loop.step(drive.now)
    assert plan is None
    assert drive.now < due_s < drive.now + 60.0, "it is tried again, and not at once"
    failing.is_broken = False
    plan, _ = loop.step(due_s)
    assert plan is not None
    assert [change.number for change in plan.changes] == [waiting]
    answer = drive.step(ProposePlan(plan.changes))
    assert answer.verdicts[0].approved  # type: ignore[union-attr]


def test_trials_are_undone_at_the_end_of_a_tentative_block_also_without_an_error() -> None:
    view = cluster(2)
    room, before = CapacityIndex(view), list(cluster(2).free)
    with room.tentative():
        Trial(room).take((Claim("s0", 0b11, (0, 0), GIB),))
        kept = Trial(room)
        kept.take((Claim("s1", 0b1, (0, 0), GIB),))
        kept.undo()
        assert list(view.free) != before
    assert list(view.free) == before
