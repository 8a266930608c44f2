"""A server that comes back without one of its GPUs is used for what it still has."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from kit.cluster import NO_PRELOAD, Cluster
from kit.shell import Shell
from kit.waiting import eventually

pytestmark = pytest.mark.system


def test_after_lost_a_server_with_a_gpu_less_goes_on_with_its_jobs(tmp_path: Path) -> None:
    with Cluster(
        tmp_path, nodes=1, environment={"GANGER_MASTER_SESSION_ALIVE": "1s"}, daemon_options=NO_PRELOAD
    ) as cluster:
        shell = Shell(cluster.master_directory)
        job = shell.submit("--gpus", "2", "--", "sleep", "600")

        def state() -> str:
            return str(shell.json("show", job)["state"])

        def runs(on: int) -> None:
            eventually(
                lambda: state() == "HOLDING" and shell.json("show", job)["gang"]["phase"] == "RUNNING",
                what=f"the job runs where there are {on} GPUs",
                within_seconds=60,
                story=cluster.story,
            )

        runs(on=4)
        # The machine is switched off: what is on its disk stays.
        daemon = cluster.daemons["n0"]
        daemon.kill()
        mine = (cluster.directory / "n0", cluster.run_directory / "n0")
        eventually(lambda: not cluster._kill_all(cluster.survivors(*mine)), what="nothing of n0 is left")
        shutil.rmtree(mine[1])
        for option, value in (("--virtual-gpus", "3"), ("--topology", "1x3")):
            daemon.argv[daemon.argv.index(option) + 1] = value
        daemon.start()
        # To the kernel of this machine it was not.
        eventually(
            lambda: "start its daemon as before, boot the machine, or `ganger lost n0`" in daemon.log.read_text(),
            what="the daemon says what to do",
            within_seconds=30,
            story=cluster.story,
        )
        eventually(
            lambda: shell.json("nodes")["nodes"][0].get("state_reason", "").startswith("not accepted: nodes/n0 has"),
            what="`ganger nodes` shows why n0 is not accepted",
            within_seconds=30,
            story=cluster.story,
        )
        eventually(lambda: shell.try_("lost", "n0", "--yes").code == 0, what="n0 is seen dead", within_seconds=30)
        eventually(
            lambda: shell.json("nodes")["nodes"][0]["state"] == "READY",
            what="n0 is taken as it is",
            within_seconds=60,
            story=cluster.story,
        )
        found = shell.json("nodes")
        (node,) = found["nodes"]
        kinds = {kind["name"]: kind.get("devices") for kind in found["configuration_sets"]}
        assert kinds[node["configuration_set"]] == 3
        runs(on=3)
        assert "came back as" in shell("history", "nodes/n0")
