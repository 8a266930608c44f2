"""A cluster from flags or a file: configuration sets and rows as the view knows them, or everything that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from ganger.cluster.resources import LocalityLevel
from ganger_master.simulator.traces.servers import (
    ServersFileError,
    servers_from_description,
    servers_from_file,
    servers_from_flags,
)

MIXED = """
servers:
  - {name: old, nodes: 12, gpus_per_node: 4, gpu_type: P100, cores_per_node: 20, memory_per_node: 256G}
  - name: new
    nodes: 3
    gpus_per_node: 8
    gpu_type: V100
    gpu_memory: 32G
    topology: 2x2x2
    nodes_per_rack: 2
    fabric: a
    dimensions: {disk_mb_per_s: 500}
  - {name: feeders, nodes: 1, gpus_per_node: 0, cores_per_node: 64}
"""


def test_flags_give_one_kind_of_server_with_its_share_of_cores_and_memory() -> None:
    servers = servers_from_flags(nodes=8, gpus_per_node=8, gpu_type=None)
    assert (servers.nodes, servers.gpus, servers.millicores, servers.memory_bytes) == (8, 64, 192_000, 4 * 10**12)
    view = servers.view()
    assert list(view.names()) == [f"node-{number}" for number in range(8)]
    assert view.row("node-7").free_mask == 0xFF


def test_file_gives_kinds_of_servers_with_names_that_sort_as_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(MIXED)
    servers = servers_from_file(path)
    assert (servers.nodes, servers.gpus) == (16, 72)
    names = [row.node for group in servers.groups for row in group.rows()]
    assert names[9:14] == ["old-09", "old-10", "old-11", "new-0", "new-1"]
    new = servers.groups[1].configuration_set
    assert (new.device_memory_bytes, dict(new.dimensions)) == (32 << 30, {"disk_mb_per_s": 500})
    assert {group.level for group in new.groups} == {LocalityLevel.SWITCH, LocalityLevel.SOCKET}
    view = servers.view()
    assert [view.row(name).rack for name in ("new-0", "new-1", "new-2", "old-00")] == [
        "new-rack-0",
        "new-rack-0",
        "new-rack-1",
        "",
    ]
    assert view.row("feeders-0").free_millicores == (64_000,)
    assert servers.of_types("V100").gpus == 24
    assert servers.of_types("V100|P100").gpus == 72
    assert servers.of_types("K80").gpus == 0


def test_everything_wrong_is_told_at_once_with_its_place() -> None:
    with pytest.raises(ServersFileError) as caught:
        servers_from_description(
            {
                "servers": [
                    {"nodes": 0, "gpus_per_node": True, "colour": "red", "memory_per_node": "lots"},
                    "eight",
                    {"name": "a", "nodes": 1, "gpus_per_node": 8, "topology": "2x2"},
                    {"name": "b", "nodes": 1, "gpus_per_node": 1},
                    {"name": "b", "nodes": 1, "gpus_per_node": 1, "dimensions": {"disk": -1}},
                ],
                "nodes": 3,
            }
        )
    problems = caught.value.problems
    starts = [problem.partition(": ")[0] for problem in problems]
    assert starts == [
        "nodes",
        "servers[0].colour",
        "servers[0].nodes",
        "servers[0].gpus_per_node",
        "servers[0].memory_per_node",
        "servers[1]",
        "servers[2].topology",
        "servers[4].dimensions",
        "servers",
    ]
    assert problems[6] == "servers[2].topology: 2x2 has 4 GPUs, but gpus_per_node is 8"
    assert problems[8] == "servers: the name b is given twice"


def test_flags_are_called_by_their_names() -> None:
    with pytest.raises(ServersFileError) as caught:
        servers_from_flags(gpus_per_node=65, cores_per_node="many")
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "--nodes",
        "--gpus-per-node",
        "--cores-per-node",
    ]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (
            "servers: [",
            "cluster.yaml: not readable as YAML: expected the node content, but found '<stream end>'",
        ),
        ("servers:\n\t- {nodes: 1}", "cluster.yaml: not readable as YAML: found character '\\t'"),
        (
            "servers:\n- {nodes: 1, gpus_per_node: 1, nodes: 2}",
            "not readable as YAML: nodes is given twice (at line 2,",
        ),
        ("servers: []\nservers: []", "not readable as YAML: servers is given twice (at line 2,"),
        ("\xff", "a mapping with a list `servers`"),
        ("[]", "a mapping with a list `servers`"),
        ("servers: []", "a mapping with a list `servers`"),
        ("servers: [{nodes: 1, gpus_per_node: 0}]", "none of them has a GPU"),
        ("servers: [{nodes: 1, gpus_per_node: 0, topology: 2x2}]", "a server without GPUs has none"),
        ("servers: [{nodes: 100000, gpus_per_node: 1}, {nodes: 1, gpus_per_node: 1}]", "100,001 nodes together"),
        ("servers: [{1: 2}]", "servers[0]: not a mapping"),
        ("a" * 1_100_000, "longer than"),
    ],
)
def test_file_that_describes_no_cluster_is_refused_by_name(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ServersFileError) as caught:
        servers_from_file(path)
    assert what in str(caught.value)
    assert "cluster.yaml" in str(caught.value)


def test_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServersFileError, match="cannot be read"):
        servers_from_file(tmp_path / "none.yaml")
