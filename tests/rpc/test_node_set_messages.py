"""Node sets as users see them: rows of jobs."""

from __future__ import annotations

from ganger.resources.values import Level
from ganger.v1 import job_pb2
from ganger_master.core.model import Gang, GangPhase, GangRole, Matrix, NodeSet, SuspendLevel
from ganger_master.rpc.node_set_messages import node_set_to_wire


def gang(epoch: int, job: int) -> Gang:
    return Gang(epoch, job, GangRole.ACTIVE, GangPhase.RUNNING, (), Level.NODE, 1.0)


def test_rows_name_the_jobs_of_the_newest_matrix_that_are_still_there() -> None:
    now = Matrix(3, ((11,), (12, 13)), 60.0, SuspendLevel.PAUSE)
    coming = Matrix(4, ((11, 14), (12, 13), (99,)), 30.0, SuspendLevel.OFFLOAD)
    gangs = {11: gang(11, 1), 12: gang(12, 2), 14: gang(14, 4)}
    message = node_set_to_wire(NodeSet(7, ("n1", "n2"), "n2", now, coming), gangs)
    assert (message.name, list(message.nodes), message.leader) == ("nodeSets/7", ["nodes/n1", "nodes/n2"], "nodes/n2")
    assert (message.version, message.quantum.seconds, message.level) == (4, 30, job_pb2.SUSPEND_LEVEL_OFFLOAD)
    assert [list(row.jobs) for row in message.rows] == [["jobs/1", "jobs/4"], ["jobs/2"]]
    assert message.changes
    assert not node_set_to_wire(NodeSet(7, ("n1",), "n1", now), gangs).changes
