"""A daemon that hangs: its node takes no gangs, and does again as soon as the daemon calls."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from kit.cluster import NO_PRELOAD, Cluster
from kit.shell import Shell
from kit.waiting import eventually

pytestmark = pytest.mark.system


def test_a_job_starts_on_a_node_that_answers_and_one_without_room_there_waits_for_the_silent_node(
    tmp_path: Path,
) -> None:
    # Daemons call every 5 s then, and are silent after 35 s.
    with Cluster(tmp_path, nodes=2, lost_after="20s", daemon_options=NO_PRELOAD) as cluster:
        ganger = Shell(cluster.master_directory)

        def nodes() -> dict[str, str]:
            return {node["name"].removeprefix("nodes/"): node["state"] for node in ganger.json("nodes")["nodes"]}

        def places() -> list[str]:
            jobs = sorted(ganger.json("queue"), key=lambda job: int(job["name"].removeprefix("jobs/")))
            return [claim["node"] for job in jobs if job["gang"] for claim in job["gang"]["claims"]]

        cluster.daemons["n1"].signal(signal.SIGSTOP)
        try:
            eventually(lambda: nodes()["n1"] == "SILENT", within_seconds=60.0, what="n1 is silent", story=cluster.story)
            for _ in range(2):
                ganger("submit", "--gpus", "4", "--", "sleep", "600")
            eventually(lambda: places() == ["nodes/n0"], what="the first job has its gang", story=cluster.story)
            assert "nodes/n1 is silent" in ganger("why", "2")
        finally:
            cluster.daemons["n1"].signal(signal.SIGCONT)
        eventually(lambda: places() == ["nodes/n0", "nodes/n1"], what="the second goes to n1", story=cluster.story)
        assert nodes() == {"n0": "READY", "n1": "READY"}
