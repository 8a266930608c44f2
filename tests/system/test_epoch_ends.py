"""A job that is scheduled at epochs is stopped and moved by plans at ends of its epochs, and by its user at any step.
(30 s)"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.cluster import Cluster
from kit.shell import Shell
from kit.waiting import eventually
from system.harness import Run
from system.packing import OPTIONS, WANTS, Plans

pytestmark = [pytest.mark.system, pytest.mark.torch]

SCRIPT = Path(__file__).parent / "jobs" / "epochs.py"
STEPS = 40


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, nodes=2, virtual_gpus=2, topology="2", master_options=OPTIONS) as running:
        yield running


def submitted(cluster: Cluster, script: Path, *words: str) -> Run:
    options = ("--gpus", "1", *WANTS, "--checkpoint-every", "never", "--schedule-at", "epoch", "--distributed")
    number = Shell(cluster.master_directory).submit(*options, "--", sys.executable, str(script), *words)
    return Run(cluster, f"jobs/{number}", cluster.directory / "none", 1, 0)


def step_of(run: Run) -> int:
    return int((run.show()["progress"] or {}).get("step", 0))


def wait_step(run: Run, step: int) -> None:
    eventually(lambda: step_of(run) >= step, within_seconds=120, what=f"it has done step {step}", story=run.story)


def stopped_at(run: Run) -> int:
    eventually(lambda: run.show()["gang"]["phase"] == "PARKED", within_seconds=120, what="it rests", story=run.story)
    return int(run.show()["gang"]["stop_step"])


def scheduled_at(run: Run) -> str:
    (line,) = [line for line in run.shell("show", run.id).splitlines() if line.startswith("scheduled at")]
    return line.removeprefix("scheduled at").strip()


def test_plans_stop_and_move_a_job_at_ends_of_its_epochs_only(cluster: Cluster, tmp_path: Path) -> None:
    go = tmp_path / "go"
    run, plans = submitted(cluster, SCRIPT, "400", str(STEPS), str(go)), Plans(cluster)
    plans.start(run, "n0", 0, shared=False)
    wait_step(run, 2)
    # Each order comes in the middle of an epoch: two steps after the last end.
    for _ in range(2):
        plans.park(run)
        step = stopped_at(run)
        assert step % STEPS == 0, run.story()
        plans.resume(run)
        wait_step(run, step + 2)
    assert scheduled_at(run) == "ends of its epochs"

    plans.move(run, "n1", 0, shared=False)
    moved = eventually(
        lambda: [event for event in run.shell.json("history", run.id)["chapters"] if event["kind"] == "move_committed"],
        within_seconds=120,
        what="it has moved",
        story=run.story,
    )
    assert int(moved[0]["figures"]["step"]) % STEPS == 0
    wait_step(run, int(moved[0]["figures"]["step"]) + 2)

    # The user waits for no epoch, also where a plan does.
    plans.park(run)
    run.shell("suspend", run.id, "--level", "offload", "--wait")
    assert stopped_at(run) % STEPS != 0, run.story()
    run.shell("cancel", run.id)


def test_a_job_without_epochs_is_stopped_at_any_step_and_show_says_so(cluster: Cluster, tmp_path: Path) -> None:
    script = Path(__file__).parent / "jobs" / "chatter.py"
    run, plans = submitted(cluster, script, "--stop-file", str(tmp_path / "stop")), Plans(cluster)
    plans.start(run, "n0", 0, shared=False)
    wait_step(run, 3)
    plans.park(run)
    stopped_at(run)
    assert scheduled_at(run).startswith("any step, as it reports no epochs")
    run.shell("cancel", run.id)
