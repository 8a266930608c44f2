"""Node sets as users see them: rows of jobs."""

from __future__ import annotations

from ganger.cluster.resources import LocalityLevel
from ganger.v1 import job_pb2
from ganger_master.core.commands import ObservedSlices
from ganger_master.core.gang_model import Gang, GangPhase, GangRole, Matrix, TimesliceGroup
from ganger_master.core.job_model import SuspendLevel
from ganger_master.core.timeslice_groups import has_turn
from ganger_master.rpc.node_service import node_set_to_wire


def gang(epoch: int, job: int) -> Gang:
    return Gang(epoch, job, GangRole.ACTIVE, GangPhase.RUNNING, (), LocalityLevel.NODE, 1.0)


def test_rows_name_the_jobs_of_the_newest_matrix_that_are_still_there() -> None:
    now = Matrix(3, ((11,), (12, 13)), 60.0, SuspendLevel.PAUSE)
    coming = Matrix(4, ((11, 14), (12, 13), (99,)), 30.0, SuspendLevel.OFFLOAD)
    gangs = {11: gang(11, 1), 12: gang(12, 2), 14: gang(14, 4)}
    message = node_set_to_wire(TimesliceGroup(7, ("n1", "n2"), "n2", now, coming), gangs, {})
    assert (message.name, list(message.nodes), message.leader) == ("nodeSets/7", ["nodes/n1", "nodes/n2"], "nodes/n2")
    assert (message.version, message.quantum.seconds, message.level) == (4, 30, job_pb2.SUSPEND_LEVEL_OFFLOAD)
    assert [list(row.jobs) for row in message.slices] == [["jobs/1", "jobs/4"], ["jobs/2"]]
    assert message.is_changing
    assert not node_set_to_wire(TimesliceGroup(7, ("n1",), "n1", now), gangs, {}).is_changing


def test_the_row_that_runs_is_what_the_leader_said_last_of_a_matrix_that_stands() -> None:
    now = Matrix(3, ((11,), (12,), (13,)), 60.0, SuspendLevel.OFFLOAD)
    coming = Matrix(4, ((11,), (12,), (13,), (14,)), 60.0, SuspendLevel.OFFLOAD)
    gangs = {11: gang(11, 1), 13: gang(13, 3), 14: gang(14, 4)}
    alone, growing = TimesliceGroup(7, ("n1", "n2"), "n2", now), TimesliceGroup(7, ("n1", "n2"), "n2", now, coming)
    seen = {(7, "n1"): ObservedSlices(7, 3, 3, row=0), (7, "n2"): ObservedSlices(7, 3, 4, row=2)}
    # the second row is empty, so the third is shown as the second
    assert [list(row.jobs) for row in node_set_to_wire(alone, gangs, seen).slices] == [["jobs/1"], ["jobs/3"]]
    assert node_set_to_wire(alone, gangs, seen).active_slice == 2
    assert node_set_to_wire(alone, gangs, {}).active_slice == 0
    assert node_set_to_wire(growing, gangs, seen).active_slice == 0
    assert [has_turn(growing, seen, epoch) for epoch in (11, 13, 14)] == [False, True, False]
    later = {(7, "n2"): ObservedSlices(7, 4, 4, row=3)}
    assert node_set_to_wire(growing, gangs, later).active_slice == 3
    assert [has_turn(growing, later, epoch) for epoch in (11, 13, 14)] == [False, False, True]
    assert has_turn(alone, later, 14) is None
    assert has_turn(alone, {(7, "n2"): ObservedSlices(7, 3, 3, row=9)}, 11) is None
