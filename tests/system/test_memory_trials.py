"""A trial of memory with real processes: a job that reads a file in every step loses rate with less page cache and
keeps its memory, `profile` has the curve, and a job without file caches is not tried. (40 s)"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from ganger_daemon.cgroups.group_tree import choose_cgroups
from kit.cluster import Cluster
from kit.waiting import eventually
from system.harness import Run
from system.hasty import events, hasty_planner, story

pytestmark = [pytest.mark.system, pytest.mark.torch, pytest.mark.timeout(600)]

MEBIBYTE = 1 << 20
OPTIONS = ("--policy", "las+synergy-tune", "--no-planner")
FILE_MEBIBYTES = 512


def curve_of(run: Run) -> dict[str, Any]:
    return run.shell.json("profile", run.id)["cores_curve"] or {}


def rates_of(run: Run) -> dict[int, float]:
    """Return steps/s by bytes of memory."""
    return {int(one["memory_bytes"]): one["steps_per_s"] for one in curve_of(run).get("memory_points", [])}


def test_a_job_that_reads_a_file_again_is_measured_with_less_page_cache_and_keeps_its_memory(tmp_path: Path) -> None:
    cgroups = choose_cgroups(f"ganger-test-{os.getpid()}/probe")
    can_try = cgroups.capabilities["memory"] == "v2"
    cgroups.tidy()
    if not can_try:
        pytest.skip("no control group of this machine holds file caches back")
    data = tmp_path / "data"
    with data.open("wb") as file:
        for _ in range(FILE_MEBIBYTES):
            file.write(os.urandom(MEBIBYTE))
        os.fsync(file.fileno())
        # Not in the page cache of this process's own group.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with (
        Cluster(tmp_path, nodes=1, virtual_gpus=2, topology="2", virtual_cores=2, master_options=OPTIONS) as cluster,
        hasty_planner(cluster),
    ):
        reads = Run.submit(cluster, "reads", steps=1_000_000, job=("--reads", str(data), "--waits", "0"))
        plain = Run.submit(cluster, "plain", steps=1_000_000)
        eventually(
            lambda: len(rates_of(reads)) >= 3 and not int(curve_of(reads).get("trial_memory_bytes", 0)),
            what="it has been measured with two amounts, and with all",
            within_seconds=180,
            story=lambda: story(cluster, reads, plain),
            every_seconds=0.2,
        )
        by_memory = rates_of(reads)
        assert by_memory[min(by_memory)] < 0.8 * by_memory[max(by_memory)]
        assert int(curve_of(reads)["enough_memory_bytes"]) > min(by_memory)
        (held,) = reads.show()["gang"]["claims"]
        assert int(held["memory_bytes"]) == max(by_memory), "no memory is taken from a running job"
        told = reads.shell.try_("profile", reads.id).out
        assert "MEMORY" in told
        assert "page cache included" in told
        assert rates_of(plain) == {}
        assert "it uses too little" in plain.shell.try_("why", "--cpus", plain.id).out
        assert [run.state for run in (reads, plain)] == ["HOLDING"] * 2
        assert [one["subject"] for one in events(reads, "gang_approved")].count(reads.name) == 1
