"""Two real nodes and a planner: a reservation that lies ahead keeps a job out that could not leave; one that begins
moves a job off, lets its users in, and returns its node at the end."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from kit.cluster import Cluster
from kit.shell import Shell
from kit.waiting import eventually
from system.harness import Run
from system.test_drain import node_of
from system.test_node_health import node

pytestmark = [pytest.mark.system, pytest.mark.torch]

# No agent, so it can neither be moved nor stopped.
OPAQUE = ("--gpus", "1", "--memory", "1G", "--agent", "none")


def opaque(shell: Shell, *options: str) -> str:
    """Submit a job that cannot leave its node, and return its number."""
    return shell.submit(*OPAQUE, *options, "--", "true")


def ran_on(shell: Shell, number: str) -> str:
    """Wait until a job has succeeded, and return its node."""

    def succeeded() -> bool:
        return str(shell.json("show", number)["state"]) == "SUCCEEDED"

    eventually(succeeded, what=f"jobs/{number} succeeds", within_seconds=30, story=lambda: shell("history", number))
    (node,) = {name for name in ("n0", "n1") if f"on {name}" in shell("history", number)}
    return node


def test_a_reservation_keeps_jobs_out_moves_them_off_lets_users_in_and_returns_its_node(tmp_path: Path) -> None:
    options = ("--policy", "las")
    with Cluster(tmp_path, nodes=2, virtual_gpus=1, topology="1", master_options=options) as cluster:
        # Its priority keeps the node for it that is open to all jobs.
        trainer = Run.submit(cluster, "trainer", "--memory", "1G", "--priority", "1", steps=2_000)
        trainer.wait_step(3, within_seconds=60)
        shell, here, me = trainer.shell, node_of(trainer), str(trainer.show()["user"])
        (there,) = {"n0", "n1"} - {here}

        # Ahead, of the idle node: only a job that ends before may start there.
        shell("reserve", "create", "course", "--nodes", there, "--start", "1h", "--duration", "1h", "--users", "zoe")
        late, short = opaque(shell, "--time", "2h"), opaque(shell, "--time", "30m")
        assert ran_on(shell, short) == there
        assert shell.json("show", late)["state"] == "PENDING"
        why = shell("why", late)
        assert "NODE_RESERVED" in why
        assert "(course), when the job may still run" in why
        assert node_of(trainer) == here

        # One that begins at once, of the other node: the job that runs there leaves.
        began = time.time()
        shell("reserve", "create", "disks", "--nodes", here, "--start", "now", "--duration", "1h", "--users", "zoe")
        eventually(lambda: node_of(trainer) == there, what="it moves", within_seconds=30, story=cluster.story)
        trainer.wait_step(trainer.last_step() + 2, within_seconds=30)
        assert node(shell, here)["state"] == "READY"
        assert shell.json("show", late)["state"] == "PENDING"

        shell("reserve", "update", "disks", "--users", f"zoe,{me}")
        assert ran_on(shell, late) == here, "a user of the reservation gets in"

        shell("reserve", "update", "disks", "--users", "zoe")
        last = opaque(shell)
        eventually(lambda: "disks" in shell("why", last), what="it waits for the end", within_seconds=10)
        shell("reserve", "update", "disks", "--duration", f"{time.time() - began + 2:.0f}s")
        assert ran_on(shell, last) == here, "the node is used again"
        assert [one["name"] for one in json.loads(shell("reserve", "--json"))] == ["course"]
        kinds = [one["kind"] for one in shell.json("events") if one["subject"] == "cluster"]
        assert kinds.count("reservation_updated") == 3
        assert kinds[-1] == "reservation_ended"
        shell("cancel", trainer.id)
