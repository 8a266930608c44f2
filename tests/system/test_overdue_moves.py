"""A move whose other side falls silent is undone at its deadline, and the job has lost no step. (30 s)"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from kit.cluster import Cluster
from kit.waiting import eventually
from system.harness import Run

pytestmark = [pytest.mark.system, pytest.mark.torch]

DEADLINE_S = 6
# Where a daemon is held: the destination's before it says that it is ready, the source's before it says that it rests.
HELD = {"destination": "before-move-commit", "source": "parked-before-report"}


def test_a_move_whose_daemon_hangs_in_the_middle_goes_back_and_the_job_loses_no_step(tmp_path: Path) -> None:
    environment = {"GANGER_MASTER_MOVE_DEADLINE": f"{DEADLINE_S}s"}
    with Cluster(tmp_path, nodes=2, virtual_gpus=1, topology="1", environment=environment) as cluster:
        still = Run.submit(cluster, "still", "--memory", "1G", steps=200)
        moved = Run.submit(cluster, "moved", "--memory", "1G", steps=200)
        still.hurry()
        still.wait_state("SUCCEEDED", within_seconds=120)
        moved.wait_step(3, within_seconds=120)
        home = moved.show()["gang"]["claims"][0]["node"]
        names = {"destination": {"nodes/n0": "n1", "nodes/n1": "n0"}[home], "source": home.removeprefix("nodes/")}
        for number, side in enumerate(HELD):
            held = cluster.daemons[names[side]]
            held.arm(f"{HELD[side]}=stop")
            answer = moved.shell.try_("move", moved.id)
            assert "the move was called off, nothing is lost" in answer.err, answer
            eventually(lambda held=held: held.is_stopped, what="its daemon hangs", within_seconds=60, story=moved.story)
            why = eventually(
                lambda number=number: aborted(moved)[number:], what="undone", within_seconds=60, story=moved.story
            )[-1]
            assert f"nodes/{names[side]}" in why
            assert f"within {DEADLINE_S} s" in why
            shown = moved.show()
            assert shown["trouble"] == f"its move was given up: {why}"
            assert shown["gang"]["claims"][0]["node"] == home
            if side == "destination":
                moved.wait_step(moved.last_step() + 5)
            held.armed.unlink(missing_ok=True)
            held.signal(signal.SIGCONT)
            moved.wait_step(moved.last_step() + 5)
            cluster.wait_ready()
        moved.hurry()
        moved.wait_state("SUCCEEDED", within_seconds=120)
        moved.check(still)


def aborted(run: Run) -> list[str]:
    """Return why moves of the job were undone, oldest first."""
    events = run.shell.json("history")
    return [one["message"] for one in events if one["kind"] == "move_aborted" and one["subject"] == run.name]


def test_a_job_that_comes_to_no_boundary_is_not_moved_and_not_killed(tmp_path: Path) -> None:
    with Cluster(tmp_path, nodes=2, virtual_gpus=1, topology="1", daemon_options=("--order-deadline", "2")) as cluster:
        run = Run.submit(cluster, "slow", "--memory", "1G", steps=48)
        run.wait_step(3, within_seconds=120)
        (rank,) = {line.pid for line in run.lines(0)}
        os.kill(rank, signal.SIGSTOP)
        try:
            assert "the move was called off, nothing is lost" in run.shell.try_("move", run.id).err

            (why,) = eventually(lambda: aborted(run), what="the move is undone", within_seconds=60, story=run.story)
            assert "it came to no boundary for" in why
        finally:
            os.kill(rank, signal.SIGCONT)
        run.hurry()
        run.wait_state("SUCCEEDED", within_seconds=120)
        assert {line.pid for line in run.lines(0)} == {rank}
