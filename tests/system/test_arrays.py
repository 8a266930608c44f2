"""A job array on a real cluster: at most so many at once, and early stopping by reported metrics, under kills."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from kit.cluster import Cluster
from kit.shell import Shell
from kit.waiting import eventually

# Most of its time goes into programs that start and die.
pytestmark = [pytest.mark.system, pytest.mark.chaos]

REPORTER = Path(__file__).parent / "jobs" / "reporter.py"


def test_a_search_outlives_its_master_and_only_its_best_member_runs_to_the_end(tmp_path: Path) -> None:
    stop_file = tmp_path / "stop"
    with Cluster(tmp_path / "cluster", nodes=1) as cluster:
        shell = Shell(cluster.master_directory)
        name = shell.submit(
            *("--array", "quality=0.3,0.9,0.1,0.5%3", "--agent", "none"),
            *("--stop", "halving,metric=accuracy,goal=max,resource=epoch,first=3"),
            *("--", sys.executable, str(REPORTER), "--quality", "{quality}", "--stop-file", str(stop_file)),
        )
        array = name.removeprefix("arrays/")

        def states() -> Counter[str]:
            return Counter(shell.json("show", array)["states"])

        def members() -> dict[str, dict[str, Any]]:
            shown = shell.json("show", array)["members"]
            return {member["array"]["member"]["parameters"]["quality"]: member for member in shown}

        def until(is_so: Any, what: str) -> None:
            eventually(is_so, what=what, within_seconds=60, every_seconds=0.2, story=lambda: shell("show", array))

        until(lambda: all(len(members()[quality]["array"]["rungs"]) for quality in ("0.3", "0.9")), "two at a rung")
        cluster.master.kill()
        cluster.start_master()
        until(lambda: states()["stopped"] == 3, "three of four are stopped")
        assert members()["0.9"]["state"] == "HOLDING"
        stop_file.touch()
        assert shell("wait", array, "--timeout", "60s").count("was stopped by the rule of its array") == 3
        assert members()["0.9"]["state"] == "SUCCEEDED"
        assert shell("logs", f"{array}_1") == "{'quality': '0.9'}\n"
        story = shell("history", array)
        assert story.splitlines()[-2].endswith("ended: 3 stopped, 1 succeeded")
        assert "others did better" in story
        assert shell.json("show", array)["best"]["parameters"] == {"quality": "0.9"}
        line = next(line for line in shell("queue", "--all").splitlines() if line.startswith(f"{array}[4]"))
        assert "1 succeeded, 3 stopped" in line
