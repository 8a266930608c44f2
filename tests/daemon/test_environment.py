"""The environment of ranks: their job, their gang, and torchrun's variables where there are several."""

from __future__ import annotations

import json
import os
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from daemon.kit import Cluster, Observed, in_phase, log_of, run
from ganger.v1 import job_pb2, resources_pb2
from ganger_daemon.node.daemon_files import DaemonPaths, DirectoryNameError, choose_run_directory

pytestmark = pytest.mark.system

TORCHRUN = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
}  # fmt: skip
PRINT = ["/bin/sh", "-c", "env"]


async def _environments(made: Cluster, placement: dict[str, list[int]], **spec: Any) -> dict[int, dict[str, str]]:
    """The environment of each rank of a gang with this placement; `spec` are fields of its description."""
    uid = str(uuid.uuid4())
    for node in placement:
        await made.daemon(node)
    for node in placement:
        gang = made.gang(placement, node, uid=uid, command=PRINT, attempt=3)
        gang.spec.display_name = "digits"
        for name, value in spec.items():
            setattr(gang.spec, name, value)
        await made.master.want(node, gang)
    for node in placement:
        await made.master.until(node, 1, in_phase(Observed.PHASE_ENDED))
    return {
        rank: dict(line.split("=", 1) for line in log_of(made.directory, node, uid, rank, 1) if "=" in line)
        for node, ranks in placement.items()
        for rank in ranks
    }


def test_a_job_of_one_task_has_no_variables_of_torchrun() -> None:
    async def story(made: Cluster) -> None:
        found = (await _environments(made, {"n1": [0]}))[0]
        assert TORCHRUN & set(found) == set()
        assert not [name for name in found if name.startswith("TORCHELASTIC")]
        own = {name: value for name, value in found.items() if name.startswith(("GANGER_JOB_N", "GANGER_JOB_I"))}
        assert own == {"GANGER_JOB_ID": "1", "GANGER_JOB_NAME": "digits"}
        assert (found["GANGER_ATTEMPT"], found["GANGER_NODES"]) == ("3", "n1")
        assert (found["GANGER_ROLE_RANK"], found["GANGER_ROLE_SIZE"]) == ("0", "1")
        assert "GANGER_ROLE_HOSTS" not in found

    run(story)


def test_the_tasks_of_each_role_have_their_own_program_variables_and_devices() -> None:
    async def story(made: Cluster) -> None:
        roles = [
            resources_pb2.Role(name="ps", tasks=1, shape=resources_pb2.TaskShape(millicores=100)),
            resources_pb2.Role(name="worker", tasks=3, shape=resources_pb2.TaskShape(gpus=1, millicores=100)),
        ]
        programs = [
            job_pb2.RoleProgram(role="ps", command=["/bin/sh", "-c", "echo PROGRAM=server; env"]),
            job_pb2.RoleProgram(role="worker", environment={"MODE": "async", "COMMON": "theirs"}),
        ]
        placement, uid = {"n1": [0, 1, 2], "n2": [3]}, str(uuid.uuid4())
        for node in placement:
            await made.daemon(node)
        for node, tasks in (("n1", [1, 2]), ("n2", [0, 1])):
            gang = made.gang(placement, node, uid=uid, command=PRINT)
            gang.spec.environment["COMMON"] = "all"
            del gang.spec.roles[:], gang.claim.tasks[:]
            gang.spec.roles.extend(roles)
            gang.spec.role_programs.extend(programs)
            gang.claim.tasks.extend(tasks)
            gang.claim.device_mask, gang.claim.millicores[0] = (0b11, 2000) if node == "n1" else (0b1, 1000)
            await made.master.want(node, gang)
        for node in placement:
            await made.master.until(node, 1, in_phase(Observed.PHASE_ENDED))
        found = {
            rank: dict(line.split("=", 1) for line in log_of(made.directory, node, uid, rank, 1) if "=" in line)
            for node, ranks in placement.items()
            for rank in ranks
        }
        names = ("GANGER_ROLE", "GANGER_ROLE_RANK", "GANGER_ROLE_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        assert [tuple(found[rank][name] for name in names) for rank in range(4)] == [
            ("ps", "0", "1", "0", "0", "1"),
            ("worker", "0", "3", "1", "0", "2"),
            ("worker", "1", "3", "2", "1", "2"),
            ("worker", "2", "3", "3", "0", "1"),
        ]
        assert [(found[rank].get("PROGRAM"), found[rank].get("MODE")) for rank in (0, 1)] == [
            ("server", None),
            (None, "async"),
        ]
        assert [found[rank]["COMMON"] for rank in (0, 1)] == ["all", "theirs"]
        assert [found[rank]["GANGER_DEVICES"] for rank in range(4)] == ["", "0,1", "0,1", "0"]
        assert [found[rank]["ROLE_NAME"] for rank in (0, 1)] == ["ps", "worker"]
        assert [json.loads(found[rank]["GANGER_ROLE_SIZES"]) for rank in (0, 3)] == [{"ps": 1, "worker": 3}] * 2
        hosts = json.loads(found[0]["GANGER_ROLE_HOSTS"])
        assert (len(hosts["ps"]), len(hosts["worker"])) == (1, 3)
        assert {host for hosts in hosts.values() for host in hosts} == {"127.0.0.1"}

    run(story)


@pytest.mark.parametrize("spec", [{"distributed": True}, {"gpus_min": 1, "gpus_max": 2}])
def test_a_job_of_one_task_that_asks_for_them_or_may_grow_has_them(spec: dict[str, Any]) -> None:
    async def story(made: Cluster) -> None:
        found = (await _environments(made, {"n1": [0]}, **spec))[0]
        assert TORCHRUN - set(found) == set()
        assert (found["RANK"], found["WORLD_SIZE"]) == ("0", "1")
        # rank 0 alone serves a store for it
        assert "TORCHELASTIC_USE_AGENT_STORE" not in found

    run(story)


def test_an_executed_rank_has_its_agent_whatever_the_state_directory_is_called() -> None:
    async def story(made: Cluster) -> None:
        odd = made.directory / "runs: 10% of 'all' #1?"
        await made.daemon("n1", state_directory=odd)
        script = "import sys; print('armed', 'ganger.injob.bootstrap' in sys.modules)"
        gang = made.gang({"n1": [0]}, "n1", uid=str(uuid.uuid4()), command=[sys.executable, "-X", "dev", "-c", script])
        await made.master.want("n1", gang)
        await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))
        (log,) = odd.glob("logs/**/*.log")
        assert "armed True" in log.read_text()

    run(story)


def test_a_run_directory_that_cannot_be_in_a_search_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DirectoryNameError, match="--run-dir"):
        DaemonPaths(tmp_path / "state", Path("/tmp/a:b")).prepare()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "a:b"))
    (tmp_path / "a:b").mkdir()
    assert ":" not in str(choose_run_directory(tmp_path, {"machine_uuid": "m"}))


def test_the_tasks_of_a_gang_over_two_nodes_receive_their_places() -> None:
    async def story(made: Cluster) -> None:
        found = await _environments(made, {"n1": [0, 1], "n2": [2]})
        names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK")
        assert [tuple(int(found[rank][name]) for name in names) for rank in range(3)] == [
            (0, 0, 2, 0, 0),
            (1, 1, 2, 0, 0),
            (2, 0, 1, 1, 1),
        ]
        for name, value in (("WORLD_SIZE", "3"), ("GROUP_WORLD_SIZE", "2"), ("GANGER_NODES", "n1,n2")):
            assert {one[name] for one in found.values()} == {value}
        assert (
            len({(one["MASTER_ADDR"], one["MASTER_PORT"], one["TORCHELASTIC_RUN_ID"]) for one in found.values()}) == 1
        )
        assert all(TORCHRUN - set(one) == set() for one in found.values())

    run(story)
