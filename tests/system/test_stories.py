"""Short stories of users at the command line, with real jobs on a real cluster of two nodes with four devices each."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from kit.cluster import Cluster
from kit.shell import Shell
from kit.waiting import eventually

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "examples" / "digits_cnn" / "attached.py"
CHATTER = Path(__file__).parent / "jobs" / "chatter.py"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("stories")) as running:
        yield running


@pytest.fixture(scope="module")
def shell(cluster: Cluster) -> Shell:
    return Shell(cluster.master_directory)


@pytest.fixture(autouse=True)
def _nothing_left(shell: Shell) -> Iterator[None]:
    """Each story begins on an idle cluster, whatever became of the one before."""
    yield
    for node in shell.json("nodes")["nodes"]:
        shell.try_("uncordon", node["name"])
    for job in shell.json("queue"):
        shell.try_("cancel", job["name"])
    eventually(lambda: not shell.json("queue"), what="every job has ended")


def until(shell: Shell, job: str, is_so: Callable[[dict[str, object]], bool], what: str) -> None:
    eventually(
        lambda: is_so(shell.json("show", job)),
        what=f"job {job}: {what}",
        within_seconds=60,
        every_seconds=0.1,
        story=lambda: shell("show", job) + shell("history", job),
    )


def runs(job: dict[str, object]) -> bool:
    gang = job["gang"]
    return job["state"] == "HOLDING" and isinstance(gang, dict) and gang["phase"] == "RUNNING"


def sleeping(shell: Shell, gpus: int, *options: str) -> str:
    return shell.submit("--gpus", str(gpus), *options, "--", "sleep", "600")


def losses(path: Path) -> list[tuple[int, str]]:
    return [(int(step), loss) for step, loss in (line.split() for line in path.read_text().splitlines())]


# suspended, resumed, moved, retuned


@pytest.mark.torch
def test_a_training_is_suspended_at_each_level_moved_and_repinned_and_its_numbers_stay(
    shell: Shell, tmp_path: Path
) -> None:
    def submit(name: str) -> str:
        files = ("--losses", str(tmp_path / name), "--weights", str(tmp_path / f"{name}.weights"))
        return shell.submit("--name", name, "--", sys.executable, str(DIGITS), "--epochs", "30", *files)

    undisturbed, job = submit("undisturbed"), submit("disturbed")
    done = [0]

    def stepped() -> bool:
        path = tmp_path / "disturbed"
        done[0] = len(path.read_text().splitlines()) if path.exists() else 0
        return done[0] >= wanted

    wanted = 5
    for deed in (("suspend", "pause"), ("suspend", "offload"), ("suspend", "checkpoint"), ("move", ""), ("repin", "")):
        eventually(stepped, what=f"step {wanted}", within_seconds=60, story=lambda: shell("history", job))
        before = shell.json("show", job)
        match deed:
            case ("suspend", level):
                assert f"job {job} is suspended ({level}) at step " in shell("suspend", job, "--level", level) or (
                    level == "checkpoint"
                )
                assert shell.json("show", job)["state"] == "SUSPENDED"
                assert f"job {job} is running" in shell("resume", job)
            case ("move", _):
                shell("move", job)
                after = shell.json("show", job)
                assert after["gang"]["epoch"] > before["gang"]["epoch"]
                assert after["gang"]["claims"][0]["node"] != before["gang"]["claims"][0]["node"]
            case _:
                shell("repin", job)
        stepped()
        wanted = done[0] + 5
    shell("wait", job, undisturbed, "--timeout", "2m")
    assert [step for step, _ in losses(tmp_path / "disturbed")] == list(
        range(1, len(losses(tmp_path / "disturbed")) + 1)
    )
    assert losses(tmp_path / "disturbed") == losses(tmp_path / "undisturbed")
    assert (tmp_path / "disturbed.weights").read_text() == (tmp_path / "undisturbed.weights").read_text()


@pytest.mark.torch
def test_retuned_to_other_cores_a_job_goes_on_with_them(shell: Shell, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    job = shell.submit("--cpus-per-gpu", "1", "--", sys.executable, str(CHATTER), "--stop-file", str(stop))
    until(shell, job, runs, "runs")
    shell("retune", job, "--cores", "2")
    until(shell, job, lambda now: sum(now["gang"]["claims"][0]["millicores"]) == 2000, "has two cores")  # type: ignore[index]
    stop.touch()
    shell("wait", job, "--timeout", "60s")


@pytest.mark.torch
def test_no_line_of_a_log_is_lost_or_doubled_by_a_suspend_and_a_move(shell: Shell, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    job = shell.submit("--", sys.executable, str(CHATTER), "--stop-file", str(stop))
    until(shell, job, runs, "runs")
    for order in (("suspend", job, "--level", "offload"), ("resume", job), ("move", job)):
        shell(*order)
    until(shell, job, runs, "runs")
    stop.touch()
    shell("wait", job, "--timeout", "60s")
    numbers = [int(number) for number in re.findall(r"line (\d+)\n", shell("logs", job))]
    assert numbers == list(range(1, len(numbers) + 1)), [pair for pair in pairwise(numbers) if pair[1] != pair[0] + 1]
    assert shell("logs", job, "--offset=-7") == shell("logs", job)[-7:]


# updated


def test_a_pending_job_overtakes_once_its_priority_is_raised(shell: Shell) -> None:
    filler, first, second = (sleeping(shell, 8) for _ in range(3))
    until(shell, filler, runs, "runs")
    until(shell, second, lambda now: now["queue_rank"] == 2, "is behind the first")
    assert f"job {second} is pending, place 1 in the queue, priority 5" in shell("update", second, "--priority", "5")
    shell("cancel", filler)
    until(shell, second, runs, "runs")
    assert shell.json("show", first)["state"] == "PENDING"
    assert re.search(r"updated by user:\S+: priority 0 -> 5\n", shell("history", second))
    refused = shell.try_("update", second, "--memory", "1G")
    assert refused.code == 4
    assert "cancel it and submit it again" in refused.err


def test_with_a_raised_limit_a_job_goes_on_and_with_one_that_it_has_passed_it_ends(shell: Shell) -> None:
    job = sleeping(shell, 1, "--time", "8s")
    until(shell, job, runs, "runs")
    shell("update", job, "--time", "1h")
    # It began later, and is over when its own eight seconds are.
    other = sleeping(shell, 1, "--time", "8s")
    until(shell, other, lambda now: now["state"] == "FAILED", "its time is up")
    assert runs(shell.json("show", job))
    shell("update", job, "--time", "5s", "--yes")
    until(shell, job, lambda now: now["state"] == "FAILED", "its time is up")
    assert shell.json("show", job)["failure"]["reason"] == "TIME_LIMIT"


# waiting


def test_why_names_the_job_that_fills_the_cluster_and_its_end_starts_the_pending_one(shell: Shell) -> None:
    filler = sleeping(shell, 8)
    until(shell, filler, runs, "runs")
    job = shell.submit("--gpus", "2", "--", "true")
    until(shell, job, lambda now: bool(now["blockers"]), "has a reason")
    said = shell("why", job)
    assert f"job {job} is pending, place 1 in the queue" in said
    assert "because GPUS: " in said
    assert "2 needed" in said
    assert "start unknown" in said or "may start " in said
    assert "GPUS" in shell("queue")
    shell("cancel", filler)
    shell("wait", job, "--timeout", "60s")


def test_the_higher_priority_goes_first(shell: Shell) -> None:
    filler = sleeping(shell, 8)
    until(shell, filler, runs, "runs")
    low, high = (shell.submit("--gpus", "8", "--priority", text, "--", "true") for text in ("-5", "5"))
    assert [shell.json("show", job)["queue_rank"] for job in (high, low)] == [1, 2]
    shell("cancel", filler)
    shell("wait", low, high, "--timeout", "60s")
    ends = [shell.json("show", job)["end_time"] for job in (high, low)]
    assert ends == sorted(ends)


def test_twenty_quick_jobs_all_succeed(shell: Shell) -> None:
    jobs = [shell.submit("--label", "array=quick", "--", "true") for _ in range(20)]
    shell("wait", *jobs, "--timeout", "2m")
    assert {shell.json("show", job)["preemptions"] for job in jobs} == {0}


# ends


def test_a_job_past_its_time_limit_is_ended_and_says_so(shell: Shell) -> None:
    job = shell.submit("--time", "1s", "--", "sleep", "600")
    assert shell.try_("wait", job, "--timeout", "60s").code == 1
    assert "TIME_LIMIT" in shell("show", job)


def test_so_is_one_that_hangs_before_its_first_step(shell: Shell, tmp_path: Path) -> None:
    script = tmp_path / "hangs.py"
    script.write_text(
        "import time\n"
        "from ganger.injob.control import Control\n"
        "control = Control.from_environment()\n"
        "control.claim()\n"
        "control.hello(0)\n"
        "time.sleep(600)\n"
    )
    job = shell.submit("--time", "1s", "--gpus", "1", "--", sys.executable, str(script))
    assert shell.try_("wait", job, "--timeout", "60s").code == 1
    assert "did not come to a step within its time limit" in shell("show", job)


def test_a_pending_a_running_and_a_suspended_job_can_be_cancelled(shell: Shell) -> None:
    running = sleeping(shell, 7)
    until(shell, running, runs, "runs")
    suspended = sleeping(shell, 1)
    until(shell, suspended, runs, "runs")
    shell("suspend", suspended, "--level", "pause", "--no-wait")
    pending = sleeping(shell, 8)
    shell("cancel", pending, suspended, running)
    for job in (pending, suspended, running):
        assert shell.try_("wait", job, "--timeout", "60s").code == 1
        assert shell.json("show", job)["state"] == "CANCELLED"


def test_cancel_goes_on_after_one_that_has_ended(shell: Shell) -> None:
    ended = shell.submit("--", "true")
    shell("wait", ended, "--timeout", "60s")
    running = sleeping(shell, 1)
    done = shell.try_("cancel", ended, running)
    assert done.code == 4
    assert f"job {ended} has succeeded; it cannot be cancelled" in done.err
    assert shell.try_("wait", running, "--timeout", "60s").code == 1


@pytest.mark.parametrize(("command", "code"), [("exit 0", 0), ("exit 7", 1), ("kill -9 $$", 1)])
def test_a_followed_submission_ends_as_its_job_does(shell: Shell, command: str, code: int) -> None:
    done = shell.try_("submit", "--follow", "--", "sh", "-c", f"echo to out; echo to err >&2; {command}")
    assert done.code == code, done
    assert done.out.endswith("to out\nto err\n")


# nodes


@pytest.mark.torch
def test_drain_moves_jobs_off_and_uncordon_takes_new_ones(shell: Shell, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    job = shell.submit("--", sys.executable, str(CHATTER), "--stop-file", str(stop))
    until(shell, job, runs, "runs")
    node = shell.json("show", job)["gang"]["claims"][0]["node"]
    shell("drain", node, "--reason", "a new fan")
    until(
        shell,
        job,
        lambda now: runs(now) and now["gang"]["claims"][0]["node"] != node,
        "runs elsewhere",  # type: ignore[index]
    )
    assert "a new fan" in shell("nodes")
    stop.touch()
    shell("wait", job, "--timeout", "60s")
    waits = sleeping(shell, 8)
    until(shell, waits, lambda now: bool(now["blockers"]), "waits")
    assert "NODE_UNAVAILABLE" in shell("why", waits)
    shell("uncordon", node)
    until(shell, waits, runs, "runs on both nodes")


# what is printed


def test_tables_show_what_is_there(shell: Shell) -> None:
    job = sleeping(shell, 3, "--name", "a name with blanks")
    until(shell, job, runs, "runs")
    header, line, *_ = shell("queue").splitlines()
    assert header.split() == ["JOB", "NAME", "USER", "STATE", "GPUS", "TIME", "PLACE", "PROGRESS", "NODES/REASON"]
    assert line.split("  ")[0] == job
    assert "a name with blanks" in line
    assert re.search(r"n\d\[[0-9,-]+\]$", line)
    shown = shell("show", job)
    for key in ("state", "command", "gang", "submitted", "time"):
        assert re.search(rf"^{key} +\S", shown, re.MULTILINE), shown
    nodes = shell("nodes").splitlines()
    assert [line.split()[0] for line in nodes] == ["NODE", "n0", "n1"]
    free = [int(line.split()[4]) for line in nodes[1:]]
    assert sum(free) == 5
    assert "job_submitted" in shell("events", job)
    assert "submitted by user:" in shell("history", job)
