"""Passes of a policy over what another policy has left: time-sliced gangs, of which nothing is free alone."""

from __future__ import annotations

import pytest
from core.test_colocation import small
from ganger.cluster.capacity_index import CapacityIndex
from ganger_master.planner.context import capacity_of, context_of
from ganger_master.planner.order_stage import plan_by
from ganger_master.policies import live_policy_named
from msgspec.structs import replace
from planner.test_leaving import InTurns


@pytest.mark.parametrize("policy", ["las", "drf", "las+best-fit", "ganger", "synergy"])
def test_time_sliced_jobs_are_preempted_together_or_not_at_all(policy: str) -> None:
    drive = InTurns()
    pair = set(drive.together)
    (urgent,) = drive.submitted(replace(small(), priority=5))
    policy_now = live_policy_named(policy)
    table, view = drive.table(), drive.state.view.copy()
    capacity = capacity_of(view, table)
    assert capacity.gpus == 4, "a time-sliced device counts once"
    before = [replace(row, version=0) for row in view.rows()]
    found = plan_by(context_of(policy_now, table, CapacityIndex(view), drive.now))
    assert [replace(row, version=0) for row in view.rows()] == before
    stopped = {change.number for change in found.changes if change.kind == "SUSPEND"}
    assert len(stopped & pair) in (0, 2)
    assert stopped
    assert urgent in found.line


def test_all_of_a_time_slice_group_make_room_for_a_gang_that_needs_every_device() -> None:
    drive = InTurns()
    drive.submitted(replace(small(4), priority=5))
    policy = live_policy_named("las")
    table, view = drive.table(), drive.state.view.copy()
    found = plan_by(context_of(policy, table, CapacityIndex(view), drive.now))
    stopped = [change.number for change in found.changes if change.kind == "SUSPEND"]
    assert sorted(stopped) == sorted(drive.numbers)
