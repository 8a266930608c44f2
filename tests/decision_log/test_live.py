"""A real cluster recorded over real submissions, and its recording replayed by another process."""

from __future__ import annotations

import gzip
import json
import os
import signal
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from kit.cluster import GANGER, NO_PRELOAD, Cluster
from kit.shell import Shell
from kit.waiting import eventually

pytestmark = pytest.mark.system


def replay(file: Path, *arguments: str) -> Any:
    # Another order of sets and of dictionaries' keys than the master's, if anything went by that.
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [*GANGER, "replay", str(file), "--json", *arguments], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_a_real_master_recorded_over_real_submissions_replays_identically(tmp_path: Path) -> None:
    with Cluster(tmp_path, master_options=("--policy", "backfill"), daemon_options=NO_PRELOAD) as cluster:
        shell = Shell(cluster.master_directory)
        first = shell.json("submit", "--gpus", "3", "--", "sleep", "600")["name"]
        captures = cluster.master_directory / "captures"
        with subprocess.Popen(
            [*GANGER, "--master", str(cluster.master_directory), "record", "--seconds", "600"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as recording:
            eventually(lambda: list(captures.glob("*.partial")), what="the recording has begun", story=cluster.story)
            # The large one waits, and is asked after while it does: which is no decision.
            large = shell.json("submit", "--env", "TOKEN=hunter2", "--gpus", "8", "--", "true")["name"]
            small = shell.json("submit", "--gpus", "1", "--", "true")["name"]
            eventually(lambda: "GPUS" in shell("why", large), what="the large one waits", story=cluster.story)
            shell("wait", small, "--timeout", "60s")
            array = shell.submit("--gpus", "8", "--array", "0-2%1", "--", "true")
            shell("update", large, array, "--priority", "5", "--memory", "1M")
            shell("cancel", first)
            shell("wait", large, array, "--timeout", "60s")
            recording.send_signal(signal.SIGINT)
            _, said = recording.communicate(timeout=30)
        assert recording.returncode == 130
        assert "captures/" in said
        eventually(lambda: not list(captures.glob("*.partial")), what="the recording is whole", story=cluster.story)
    (file,) = captures.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert b"hunter2" not in gzip.decompress(file.read_bytes())
    whole = replay(file, "--job", large.removeprefix("jobs/"), "--policy", "backfill")
    assert (whole["differences"], whole["recording"]["end_reason"]) == (0, "the client that started it went away")
    assert whole["otherwise"]["differences"] == []
    assert (whole["commands"]["SubmitJob"], whole["verdicts"]["approved"]) == (2, 5)
    assert (whole["commands"]["UpdateJob"], whole["commands"]["UpdateArray"]) == (1, 1)
    verdicts = [moment["verdict"] for moment in whole["job"]["moments"] if moment["what"] == "request"]
    assert verdicts[-1] == "approved"
    assert {"passed", "refused"} & set(verdicts[:-1])


def test_record_prints_where_the_file_is_and_copies_it_when_asked(tmp_path: Path) -> None:
    with Cluster(tmp_path, nodes=0) as cluster:
        shell = Shell(cluster.master_directory)
        copy = tmp_path / "copy.gz"
        assert shell("record", "--seconds", "0.2", "--out", str(copy)) == f"{copy}\n"
        assert stat.S_IMODE(copy.stat().st_mode) == 0o600
        (file,) = (cluster.master_directory / "captures").iterdir()
        assert file.read_bytes() == copy.read_bytes()
        answer = shell.json("record", "--seconds", "0.2")
        assert Path(answer["path"]).parent == file.parent
        assert answer["end_reason"] == "its time was over"
        assert replay(copy)["differences"] == 0
        refused = shell.try_("record", "--seconds", "0.2", "--out", str(tmp_path / "missing" / "file"))
        assert refused.code == 4
        assert "cannot copy" in refused.err
        again = shell.try_("record", "--seconds", "0.2", "--out", str(copy))
        assert (again.code, copy.read_bytes()) == (4, file.read_bytes())
        assert "there is such a file already" in again.err
        for wrong in (("--most", "nonsense"), ("--most", "0"), ("--seconds", "nan"), ("--seconds", "0")):
            assert shell.try_("record", *wrong).code == 2
        assert len(list(file.parent.iterdir())) == 2
