"""A planner that believes what it measures after seconds, in place of the one that a master starts, and what it did."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kit.cluster import Cluster, Service
from system.harness import Run

PROGRAM = Path(__file__).parent / "hasty_planner.py"
# Of a cluster's directory: where its planner records what it observes and plans.
RECORDS = "planner.records"


@contextmanager
def hasty_planner(cluster: Cluster) -> Iterator[Service]:
    """Of a cluster whose master starts none."""
    directory = cluster.directory
    files = (directory / "planner.note", directory / RECORDS)
    words = [sys.executable, str(PROGRAM), str(cluster.master_directory), *map(str, files)]
    environment = cluster.master.environment
    service = Service("planner", words, directory / "planner.log", environment, directory / "planner.failpoints")
    service.start()
    try:
        yield service
    finally:
        service.stop()


def story(cluster: Cluster, *runs: Run) -> str:
    log = cluster.directory / "planner.log"
    return "".join(run.story() for run in runs) + (log.read_text() if log.exists() else "")


def events(job: Run, kind: str, goal: str = "") -> list[dict[str, Any]]:
    """Of all jobs, in their order; of changes with this goal, if one is named."""
    found = [event for event in job.shell.json("history") if event["kind"] == kind]
    return [event for event in found if not goal or event["figures"].get("goal") == goal]
