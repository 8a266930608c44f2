"""A live planner recorded over twelve jobs, and every plan made again by another process. (20 s each)"""

from __future__ import annotations

import gzip
import json
import os
import re
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ganger.v1 import scheduling_pb2
from ganger_master.decision_log.log_file import read_lines
from ganger_master.decision_log.recording import ClusterLine, Line, encode_line
from kit.cluster import GANGER, Cluster
from msgspec.structs import replace
from system.harness import Run
from system.hasty import RECORDS, hasty_planner

pytestmark = [pytest.mark.system, pytest.mark.torch, pytest.mark.timeout(600)]

JOBS = 12
WANTS = ("--cpus-per-gpu", "1", "--memory", "256M", "--gpu-memory", "900M")


def made_again(file: Path, *arguments: str, code: int = 0) -> Any:
    # Another order of sets than in the recorded process, if a plan depended on that.
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    words = [*GANGER, "replay", str(file), "--json", *arguments]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout)


def recorded(directory: Path, *options: str) -> Path:
    """Return the recording of the planner of a cluster of four GPUs that twelve jobs want."""
    master_options = ("--no-planner", "--plan-every", "2s", *options)
    cluster = Cluster(
        directory, nodes=2, virtual_gpus=2, topology="2", virtual_memory="32G", master_options=master_options
    )
    with cluster, hasty_planner(cluster):
        gangs = [2 if number % 7 == 3 else 1 for number in range(JOBS)]
        runs = [Run.submit(cluster, f"job-{at}", *WANTS, world=gpus, steps=24) for at, gpus in enumerate(gangs)]
        for run in runs:
            run.hurry()
        for run in runs:
            run.wait_state("SUCCEEDED", within_seconds=240)
    (file,) = (directory / RECORDS).iterdir()
    return file


def without(number: int, line: Line) -> Line:
    """Return a line of a recording as if the planner had not observed this job."""
    if not isinstance(line, ClusterLine):
        return line
    deltas = [scheduling_pb2.ClusterDelta.FromString(delta) for delta in line.deltas]
    for delta in deltas:
        kept = [job for job in delta.jobs if job.job != f"jobs/{number}"]
        del delta.jobs[:]
        delta.jobs.extend(kept)
    return replace(line, deltas=tuple([delta.SerializeToString() for delta in deltas]))


@pytest.mark.parametrize(
    ("policy", "kind", "options"), [("gandiva", "ROW", ("--quantum", "1s")), ("ganger", "START", ())]
)
def test_every_plan_of_a_recorded_live_run_is_made_again_and_the_first_that_differs_is_named(
    tmp_path: Path, policy: str, kind: str, options: tuple[str, ...]
) -> None:
    file = recorded(tmp_path / policy, "--policy", policy, *options)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    found = made_again(file)
    assert (found["differences"], found["recording"]["policy"]) == (0, policy)
    assert found["recording"]["end_reason"] == "the planner was stopped"
    assert found["changes"][kind]["approved"] >= JOBS
    assert found["plans"] >= JOBS
    of_a_job = made_again(file, "--job", str(JOBS))["job"]["changes"]
    assert any(one["change"]["kind"] == kind and one["approved"] for one in of_a_job)

    # As if the planner had not observed the last job.
    changed = tmp_path / "changed.jsonl.gz"
    with gzip.open(changed, "wb") as out:
        for line in read_lines(file):
            out.write(encode_line(without(JOBS, line)))
    found = made_again(changed, code=1)
    assert found["differences"] == 1
    first = found["first_difference"]
    assert re.search(rf"\b{JOBS}\b", first["recorded"])
    assert not re.search(rf"\b{JOBS}\b", first["now"])
