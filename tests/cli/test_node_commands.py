"""What the commands of nodes print and send, against a server with canned answers."""

from __future__ import annotations

import io
import json

import pytest
from ganger.cli.nodes import free_bandwidth
from ganger.cluster.resources import UNLIMITED_MB_PER_S
from ganger.v1 import job_pb2, node_pb2, resources_pb2
from ganger.wire import errors
from kit.canned import Call, CannedMaster, running_job

Output = pytest.CaptureFixture[str]


def test_nodes_are_listed_and_drained_with_a_reason(call: Call, master: CannedMaster, capsys: Output) -> None:
    kind = resources_pb2.ConfigurationSet(
        name="v4",
        device_type="virtual",
        devices=4,
        sockets=[resources_pb2.Socket(millicores=8_000)],
        memory_bytes=1 << 30,
    )
    row = node_pb2.NodeState(node="nodes/n1", free_mask=0b0011, free_millicores=[4_000], free_memory_bytes=1 << 29)
    node = node_pb2.Node(name="nodes/n1", state=node_pb2.Node.STATE_READY, configuration_set="v4", view_entry=row)
    master.nodes = node_pb2.ListNodesResponse(nodes=[node], configuration_sets=[kind])
    assert call("nodes") == 0
    line = " ".join(capsys.readouterr().out.splitlines()[1].split())
    assert line == "n1 ready virtual 4 2 8 4 1G 512M never"
    node.state, node.state_reason = node_pb2.Node.STATE_SILENT, "its daemon does not call"
    master.nodes = node_pb2.ListNodesResponse(nodes=[node], configuration_sets=[kind])
    assert call("nodes") == 0
    line = " ".join(capsys.readouterr().out.splitlines()[1].split())
    assert line == "n1 silent virtual 4 2 8 4 1G 512M never its daemon does not call"
    node.state, node.state_reason = node_pb2.Node.STATE_READY, ""
    master.nodes = node_pb2.ListNodesResponse(nodes=[node], configuration_sets=[kind])
    assert call("drain", "n1") == 2
    running_job(master)
    master.jobs["jobs/2"] = job_pb2.Job(name="jobs/2", state=job_pb2.Job.STATE_HOLDING)
    master.jobs["jobs/3"] = job_pb2.Job(name="jobs/3", state=job_pb2.Job.STATE_HOLDING)
    assert call("nodes", "drain", "n1", "--reason", "new fan") == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first == "node n1 is draining: new fan"
    assert [line.partition(":")[0] for line in others] == ["  job 1"], "no other job is on it"
    assert call("uncordon", "n1") == 0
    assert "node n1 is ready" in capsys.readouterr().out


def test_a_node_shows_the_bandwidth_that_is_free_of_what_it_declares() -> None:
    row = node_pb2.NodeState(free_disk_mb_per_s=200, free_net_mb_per_s=UNLIMITED_MB_PER_S - 50)
    assert free_bandwidth(row) == "disk 200 MB/s", "the network has no limit"
    assert free_bandwidth(node_pb2.NodeState()) == ""


def test_a_node_that_was_never_accepted_shows_why_in_nodes_and_top(
    call: Call, master: CannedMaster, capsys: Output
) -> None:
    unknown = node_pb2.Node.STATE_UNKNOWN
    why = "not accepted: the storage directory belongs to another cluster"
    master.nodes.nodes.add(name="nodes/n1", state=unknown, state_reason=why)
    assert call("nodes") == 0
    assert " ".join(capsys.readouterr().out.splitlines()[1].split()) == f"n1 unknown never {why}"
    assert call("nodes", "--json") == 0
    assert json.loads(capsys.readouterr().out)["nodes"][0]["state_reason"] == why
    assert call("top", "--once") == 0
    assert " ".join(capsys.readouterr().out.split("\n\n")[1].splitlines()[1].split()) == f"n1 unknown {why}"


def test_declaring_a_node_lost_asks_first(
    call: Call, master: CannedMaster, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert call("lost", "n1") == 2
    assert "There is no terminal to answer on: give --yes" in capsys.readouterr().err
    assert [type(request).__name__ for request in master.requests] == ["GetNodeRequest"], "that there is such a node"
    assert call("nodes", "lost", "n1", "--yes") == 0
    assert "node n1 is lost" in capsys.readouterr().out
    master.failing = errors.NodeNotFound("there is no nodes/n9")
    assert call("lost", "n9") == 3
    assert "powered off" not in capsys.readouterr().err, "no confirmation is requested"


def test_a_node_is_removed_without_asking(call: Call, master: CannedMaster, capsys: Output) -> None:
    assert call("nodes", "remove", "n1") == 0
    assert capsys.readouterr().out == "node n1 is removed\n"
    assert call("nodes", "remove", "n1", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"name": "nodes/n1", "removed": True}
    assert [request.name for request in master.requests] == ["nodes/n1", "nodes/n1"]


def test_json_is_heeded_before_a_command_of_nodes(call: Call, master: CannedMaster, capsys: Output) -> None:
    assert call("nodes", "--json", "drain", "n1", "-m", "x") == 0
    assert json.loads(capsys.readouterr().out)["state"] == "DRAINING"
    assert call("bench", "--list", "--json") == 0
    assert "slice" in json.loads(capsys.readouterr().out)


def test_drain_says_of_each_job_where_it_goes_or_what_it_waits_for(
    call: Call, master: CannedMaster, capsys: Output
) -> None:
    def told() -> str:
        master.explanation.job.CopyFrom(job)
        assert call("drain", "n1", "-m", "new fan") == 0
        return capsys.readouterr().out.splitlines()[1]

    job = running_job(master)
    master.explanation.blockers.add(reason="NODE_UNAVAILABLE", message="it goes once there is room elsewhere")
    master.explanation.blockers.add(reason="GPUS", message="not enough free devices (1 free)")
    assert told() == "  job 1: it goes once there is room elsewhere; GPUS: not enough free devices (1 free)"
    assert call("why", "1") == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "but NODE_UNAVAILABLE: it goes once there is room elsewhere",
        "and GPUS: not enough free devices (1 free)",
    ]
    del master.explanation.blockers[:]
    job.gang.phase = job_pb2.Gang.PHASE_STOPPING
    assert told() == "  job 1: stopping, and goes on elsewhere"
    job.gang.move_claims.add(node="nodes/n2")
    assert told() == "  job 1: moves to n2"
    job.gang.parked_level = job_pb2.SUSPEND_LEVEL_CHECKPOINT
    assert told() == "  job 1: is being saved on storage"
