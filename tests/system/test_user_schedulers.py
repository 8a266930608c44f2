"""`ganger submit --scheduler module:Class`: it places its job, and however useless it is the job still starts."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import ganger
import pytest
from kit.cluster import NO_PRELOAD, Cluster
from kit.waiting import eventually

pytestmark = pytest.mark.system

HERE = Path(__file__).parent / "jobs"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("schedulers")
    environment = {"XDG_STATE_HOME": str(directory / "state")}
    with Cluster(directory, environment=environment, daemon_options=NO_PRELOAD) as running:
        yield running


def submit(cluster: Cluster, scheduler: str, *options: str, ok: bool = True) -> CompletedProcess[str]:
    return cluster.run("submit", "--scheduler", scheduler, *options, "--", "true", cwd=HERE, ok=ok)


def number(submitted: CompletedProcess[str]) -> str:
    return submitted.stdout.split()[-1]


def log_of(submitted: CompletedProcess[str]) -> Path:
    return Path(submitted.stderr.split()[-1])


def nodes_used(cluster: Cluster, job: str) -> str:
    return next(line for line in cluster.run("events", job).stdout.splitlines() if "gang_approved" in line)


def processes(name: str) -> list[int]:
    """Pids of detached schedulers of that class."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if f"schedulers:{name}".encode() in words and b"run" in words:
            found.append(int(path.parent.name))
    return found


def succeeds(cluster: Cluster, job: str) -> None:
    done = cluster.run("wait", job, "--timeout", "60s", ok=False)
    assert done.returncode == 0, f"{done.stderr}\n{cluster.run('history', job).stdout}\n{cluster.story()}"


def test_it_places_its_job_and_ends_with_it(cluster: Cluster) -> None:
    submitted = submit(cluster, "schedulers:Last")
    succeeds(cluster, number(submitted))
    assert "nodes=n1" in nodes_used(cluster, number(submitted)), "the default would have taken n0"
    assert f"asked for jobs/{number(submitted)}" in log_of(submitted).read_text()
    assert log_of(submitted).stat().st_mode & 0o077 == 0
    eventually(lambda: not processes("Last"), what="the scheduler has ended with its job")


OTHERS = ("las2d", "gandiva", "tetris", "optimus", "synergy")


@pytest.mark.parametrize("policy", ["ganger", *(pytest.param(one, marks=pytest.mark.chaos) for one in OTHERS)])
def test_a_users_scheduler_decides_and_a_useless_one_loses_its_leases_where_the_planner_ranks(
    tmp_path: Path, policy: str
) -> None:
    environment = {"XDG_STATE_HOME": str(tmp_path / "state")}
    options: dict[str, Any] = {"master_options": ("--policy", policy), "daemon_options": NO_PRELOAD}
    with Cluster(tmp_path, environment=environment, **options) as cluster:
        submitted = submit(cluster, "schedulers:Last")
        succeeds(cluster, number(submitted))
        assert "nodes=n1" in nodes_used(cluster, number(submitted)), "the planner would have taken n0"
        assert f"asked for jobs/{number(submitted)}" in log_of(submitted).read_text()
        assert "by scheduler" in nodes_used(cluster, number(submitted))
        succeeds(cluster, number(submit(cluster, "schedulers:Raising")))


def test_the_library_starts_it_too(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)
    monkeypatch.setenv("XDG_STATE_HOME", cluster.environment["XDG_STATE_HOME"])
    with ganger.Client(str(cluster.master_directory)) as client:
        job = client.submit(["true"], scheduler="schedulers:Last")
        assert job.wait(60) == "SUCCEEDED"
        assert job.scheduler_log is not None
        assert f"asked for {job.name}" in job.scheduler_log.read_text()
        assert client.submit(["true"]).scheduler_log is None
    assert "nodes=n1" in nodes_used(cluster, str(job.id))


def test_useless_ones_lose_their_turns_to_the_default(cluster: Cluster) -> None:
    useless = {kind: submit(cluster, f"schedulers:{kind}") for kind in ("Killed", "Raising", "Absurd", "Spamming")}
    other = cluster.run("submit", "--", "true")
    for submitted in useless.values():
        succeeds(cluster, number(submitted))
    for kind in useless:
        for pid in processes(kind):
            os.kill(pid, signal.SIGKILL)
    # Others were not kept waiting either.
    succeeds(cluster, number(other))


def test_a_hung_one_loses_its_turns_and_ends_with_the_place_where_it_hung(cluster: Cluster) -> None:
    submitted = submit(cluster, "schedulers:Hung")
    succeeds(cluster, number(submitted))
    eventually(lambda: not processes("Hung"), what="the hung scheduler has ended", within_seconds=40)
    assert "schedulers.py" in log_of(submitted).read_text()


def test_killed_while_its_job_waits_it_is_replaced_by_the_default(cluster: Cluster) -> None:
    filler = str(cluster.json("submit", "--gpus", "8", "--", "sleep", "600")["name"]).removeprefix("jobs/")
    eventually(lambda: cluster.json("show", filler)["state"] == "HOLDING", what="the cluster is full")
    submitted = submit(cluster, "schedulers:Last")
    eventually(lambda: "asked for" in log_of(submitted).read_text(), what="it had a turn")
    explained: dict[str, Any] = cluster.json("why", number(submitted))
    assert explained["blockers"], explained
    for pid in processes("Last"):
        os.kill(pid, signal.SIGKILL)
    cluster.run("cancel", filler)
    succeeds(cluster, number(submitted))


@pytest.mark.parametrize(
    ("scheduler", "code", "why"),
    [
        ("nowhere:Class", 2, "No module named 'nowhere'"),
        ("schedulers:Missing", 2, "has no attribute 'Missing'"),
        ("schedulers:PlacementLease", 2, "does not derive from ganger.scheduling.JobScheduler"),
        ("broken:Any", 2, "RuntimeError: wrong on line 2, in"),
        ("schedulers", 2, "'schedulers' is not module:Class"),
        ("killed:Any", 4, "killed:Any was killed by SIGKILL while it was loaded; the last that it printed: out of"),
        ("leaving:Any", 4, "the scheduler leaving:Any ended with code 3 while it was loaded"),
    ],
)
def test_one_that_cannot_be_loaded_stops_the_submission(
    cluster: Cluster, tmp_path: Path, scheduler: str, code: int, why: str
) -> None:
    before = cluster.run("queue", "--all", "--json").stdout.count('"name": "jobs/')
    (tmp_path / "broken.py").write_text("# the user's own mistake\nraise RuntimeError('wrong on line 2')\n")
    (tmp_path / "killed.py").write_text("import os\nos.write(2, b'out of memory\\n')\nos.kill(os.getpid(), 9)\n")
    (tmp_path / "leaving.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "schedulers.py").symlink_to(HERE / "schedulers.py")
    for options in ((), ("--dry-run",)):
        done = cluster.run("submit", "--scheduler", scheduler, *options, "--", "true", cwd=tmp_path, ok=False)
        assert done.returncode == code
        assert why in done.stderr
        assert "Traceback" not in done.stderr
    assert cluster.run("queue", "--all", "--json").stdout.count('"name": "jobs/') == before
    assert not list(Path(cluster.environment["XDG_STATE_HOME"]).rglob("starting-*"))


def test_it_is_not_left_behind_when_the_submission_is_refused(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = submit(cluster, "schedulers:Raising", "--gpus", "500", ok=False)
    assert done.returncode == 4
    assert not processes("Raising")
