"""What `ganger doctor` says of machines, nodes and masters, and with which exit code."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from ganger.cli.diagnosis import FAIL, OK, WARN, capability_findings, cluster_findings, node_findings
from ganger.v1 import node_pb2
from ganger_daemon import node_checks
from kit.canned import Call, CannedMaster

Node = node_pb2.Node
WHOLE = {"cgroup": "v2", "cpuset": "v2", "memory": "v2", "freeze": "v2", "image": "criu 4.2", "devices": "nvml"}


@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        ({}, ["cgroup v2, image criu 4.2"]),
        # What follows from a missing cgroup is not said again.
        (
            {"cgroup": "none: not root", "cpuset": "affinity", "memory": "none: not root", "freeze": "signals"},
            ["cgroup: jobs are kept apart by nothing (not root)"],
        ),
        (
            {"memory": "none: no controller"},
            ["memory: a job may use more memory than it has asked for (no controller)"],
        ),
        ({"cpuset": "affinity: no controller"}, ["cpuset: a job may leave its cores (no controller)"]),
        # One cause of several lacks is said once.
        (
            {"cpuset": "affinity: no group /a: denied", "memory": "none: no group /b: denied", "freeze": "signals"},
            [
                "cpuset, memory, freeze: a job may leave its cores; a job may use more memory than it has asked for;"
                " a job that does not obey is stopped process by process (no group /a: denied)"
            ],
        ),
        ({"image": "none: no CRIU found"}, ["image: only programs that write checkpoints", "(no CRIU found)"]),
        ({"devices": "none", "devices_reason": "no driver"}, ["devices: no job with GPUs runs here (no driver)"]),
        ({"gpu_state": "none: driver 535"}, ["gpu_state: programs without an agent keep their GPU memory"]),
        ({"switch_user": "shared"}, ["switch_user: jobs of all users run as the daemon's user"]),
        ({"switch_user": "accounts"}, ["cgroup v2, image criu 4.2"]),
        # Of devices that are not there no state can be saved.
        ({"gpu_state": "none: no driver", "devices": "virtual"}, ["cgroup v2, image criu 4.2"]),
    ],
)
def test_a_node_is_told_what_it_lacks_what_that_means_and_why(lacks: Mapping[str, str], said: list[str]) -> None:
    (finding,) = capability_findings("n1", {**WHOLE, **lacks})
    assert finding.level == (OK if said[0].startswith("cgroup v2") else WARN)
    assert all(part in finding.found for part in said), finding


@pytest.mark.parametrize(
    ("node", "level", "found", "advice"),
    [
        (Node(state=Node.STATE_READY, capabilities=WHOLE), OK, "cgroup v2", ""),
        (Node(state=Node.STATE_SILENT, state_reason="no call"), FAIL, "does not call: no call", "start its daemon"),
        (Node(state=Node.STATE_LOST), FAIL, "lost", "ganger nodes remove n1"),
        (Node(state=Node.STATE_CORDONED, state_reason="disk"), WARN, "no new jobs: disk", "ganger uncordon n1"),
        (Node(state=Node.STATE_DRAINING, state_reason="disk"), WARN, "move off, and", "ganger uncordon n1"),
        (
            Node(state=Node.STATE_DRAINING, state_reason="reserved: disks", reservation="disks"),
            WARN,
            "gets no new ones: reserved: disks",
            "ganger reserve delete disks",
        ),
        (
            Node(state=Node.STATE_DRAINING, state_reason="fan; reserved: disks", reservation="disks"),
            WARN,
            "gets no new ones: fan; reserved: disks",
            "uncordon n1; reservation disks stands beside that",
        ),
        (Node(state=Node.STATE_READY, device_faults={2: "XID 79"}), FAIL, "GPU 2: XID 79", "replace"),
        (Node(state=Node.STATE_READY, device_warnings={1: "too hot"}), WARN, "GPU 1: too hot", "all ranks"),
        (Node(state=Node.STATE_READY, state_reason="slow: steps take 2.0 times"), WARN, "slow: steps", "drain n1"),
        (Node(launch_failures=3, launch_failure="no python"), FAIL, "3 jobs in a row", "ganger uncordon n1"),
        (Node(quarantined=["quarantinedGangs/a-1"]), WARN, "did not start: a-1", "ganger nodes quarantine"),
    ],
)
def test_a_node_in_trouble_is_named_with_the_command_that_mends_it(
    node: node_pb2.Node, level: str, found: str, advice: str
) -> None:
    node.name = "nodes/n1"
    (finding,) = node_findings(node)
    assert (finding.level, finding.subject) == (level, "n1")
    assert found in finding.found
    assert advice in finding.advice


@pytest.mark.parametrize(
    ("cluster", "nodes", "levels"),
    [
        (node_pb2.Cluster(version="1.0"), 1, [OK]),
        (node_pb2.Cluster(version="0.9"), 1, [WARN]),
        (node_pb2.Cluster(version="1.0"), 0, [OK, FAIL]),
        (node_pb2.Cluster(version="1.0", restore=node_pb2.Restore(reason="older")), 1, [OK, FAIL]),
    ],
)
def test_a_master_of_another_version_without_nodes_or_restored_is_named(
    cluster: node_pb2.Cluster, nodes: int, levels: list[str]
) -> None:
    assert [one.level for one in cluster_findings(cluster, "1.0", nodes)] == levels


def test_the_command_ends_with_4_if_anything_must_be_mended(
    call: Call, master: CannedMaster, capsys: pytest.CaptureFixture[str]
) -> None:
    master.nodes = node_pb2.ListNodesResponse(nodes=[Node(name="nodes/n1", state=Node.STATE_LOST)])
    assert call("doctor") == 4
    said = capsys.readouterr()
    assert "FAIL  n1: it is lost\n      -> start its daemon" in said.out
    master.nodes = node_pb2.ListNodesResponse(nodes=[Node(name="nodes/n1", state=Node.STATE_READY)])
    assert call("doctor", "--json") == 0
    assert {one["level"] for one in json.loads(capsys.readouterr().out)} <= {OK, WARN}


def test_a_daemon_of_another_version_than_the_masters_is_named(
    call: Call, master: CannedMaster, capsys: pytest.CaptureFixture[str]
) -> None:
    versions = {"n1": "9.9", "n2": "9.8"}
    nodes = [Node(name=f"nodes/{name}", state=Node.STATE_READY, version=of) for name, of in versions.items()]
    master.nodes = node_pb2.ListNodesResponse(nodes=nodes)
    assert call("doctor") == 0
    said = capsys.readouterr().out
    assert said.count("its daemon has version") == 1
    assert "WARN  n2: its daemon has version 9.8, the master 9.9" in said


def test_a_named_master_that_does_not_answer_must_be_mended(
    call: Call, master: CannedMaster, capsys: pytest.CaptureFixture[str]
) -> None:
    (master.directory / "endpoint.json").unlink()
    assert call("doctor") == 4
    assert "FAIL  master: " in capsys.readouterr().out


def test_storage_that_cannot_be_written_must_be_mended_and_the_check_leaves_nothing(tmp_path: Path) -> None:
    _, found = node_checks.findings(tmp_path, "none")
    assert [level for level, subject, *_ in found if subject.startswith("storage")] == [OK]
    _, found = node_checks.findings(tmp_path / "none", "none")
    assert [level for level, subject, *_ in found if subject.startswith("storage")] == [FAIL]
    assert list(tmp_path.iterdir()) == []
    left = [path for path in Path("/sys/fs/cgroup").glob("**/ganger-doctor-*") if str(os.getpid()) in path.name]
    assert left == []


def test_a_machine_is_checked_as_a_daemon_would_find_it(tmp_path: Path) -> None:
    capabilities, _ = node_checks.findings(None, "none")
    assert capabilities["image"] == "none: not wanted"
    assert {"cgroup", "memory", "devices", "gpu_state"} <= capabilities.keys()
