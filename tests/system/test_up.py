"""A cluster that `ganger up` started runs gangs over its nodes, and the end of a part harms no job."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from kit.up import NO_PRELOAD, Up
from kit.waiting import eventually

pytestmark = pytest.mark.system

TWO_NODES = ("--nodes", "2", "--virtual-gpus", "2", "--virtual-cores", "4", "--virtual-memory", "4G")
# An order with a planner, so that there is one to be killed.
WITH_PLANNER = (*TWO_NODES, "--policy", "fifo-backfill+defrag")
DIGITS = Path(__file__).parents[2] / "examples" / "digits_cnn" / "plain.py"
OVER_BOTH = ("--gpus", "2", "--nodes", "2")
# A rank takes memory of its host, and holds it until the other rank has taken as much: both make a file in argv[1].
TAKES_300_MB = """
import os, pathlib, sys, time
held = bytearray(b"x") * 300_000_000
directory = pathlib.Path(sys.argv[1])
(directory / os.environ["RANK"]).touch()
while len(list(directory.iterdir())) < 2:
    time.sleep(0.05)
print(len(held))
"""


@pytest.fixture(scope="module")
def without_planner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with Up(tmp_path_factory.mktemp("up") / "c", *TWO_NODES, settings=NO_PRELOAD) as up:
        yield up


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with Up(tmp_path_factory.mktemp("up") / "c", *WITH_PLANNER, settings=NO_PRELOAD) as up:
        yield up


def end_of(up: Up, job: str) -> tuple[str, str]:
    up.try_("wait", job, "--timeout", "100s")
    return up.json("show", job)["state"], up("history", job)


def test_a_gang_over_two_nodes_whose_ranks_end_one_after_the_other_succeeds(up: Up) -> None:
    jobs = [up.submit(*OVER_BOTH, "--", "bash", "-c", f"[ $RANK = {rank} ] || sleep 3; exit 0") for rank in (0, 1)]
    for job in jobs:
        state, told = end_of(up, job)
        assert state == "SUCCEEDED", told


def test_a_gang_over_two_nodes_has_its_memory_limit_on_each_of_them(up: Up, tmp_path: Path) -> None:
    job = up.submit(*OVER_BOTH, "--memory", "400M", "--", "python", "-c", TAKES_300_MB, str(tmp_path))
    state, told = end_of(up, job)
    assert state == "SUCCEEDED", told


def test_a_rank_that_takes_more_than_its_node_gives_it_is_out_of_memory(up: Up, tmp_path: Path) -> None:
    command = ("python", "-c", TAKES_300_MB, str(tmp_path))
    job = up.submit(*OVER_BOTH, "--memory", "200M", "--max-failures", "0", "--", *command)
    state, told = end_of(up, job)
    assert state == "FAILED"
    assert "used more host memory than its claim" in told


@dataclass
class Counting:
    """A gang over both nodes whose ranks count in their logs until they are told to end."""

    up: Up
    end: Path
    job: str = ""

    def begin(self) -> None:
        script = f"n=0; until [ -e {self.end} ]; do n=$((n+1)); echo $n; sleep 0.1; done"
        self.job = self.up.submit(*OVER_BOTH, "--", "bash", "-c", script)
        self.wait_for_more()

    def counts(self, rank: int) -> list[int]:
        done = self.up.shell.try_("logs", self.job, "--rank", str(rank))
        # The last line may be half written.
        return [int(line) for line in done.out.splitlines()[:-1]] if done.code == 0 else []

    def wait_for_more(self) -> None:
        before = [len(self.counts(rank)) for rank in (0, 1)]
        eventually(
            lambda: all(len(self.counts(rank)) > before[rank] for rank in (0, 1)),
            within_seconds=60,
            what="both ranks count on",
            story=self.up.story,
        )

    def check_unharmed(self) -> None:
        """Each rank has counted from one on, without a gap and without a second start, and ends as it should."""
        self.wait_for_more()
        self.end.touch()
        state, told = end_of(self.up, self.job)
        assert state == "SUCCEEDED", told
        for rank in (0, 1):
            counts = self.counts(rank)
            assert counts == list(range(1, len(counts) + 1))
        assert self.up.json("show", self.job)["failures"] == 0


@pytest.fixture
def counting(up: Up, tmp_path: Path) -> Iterator[Counting]:
    up.wait_ready(2)
    counting = Counting(up, tmp_path / "end")
    try:
        counting.begin()
        yield counting
    finally:
        counting.end.touch()


@pytest.mark.parametrize("part", ["master", "n1"])
def test_a_killed_part_is_started_again_and_no_job_is_harmed(up: Up, counting: Counting, part: str) -> None:
    killed = up.kill(part)
    eventually(lambda: up.processes().get(part, killed).pid != killed.pid, within_seconds=30, what=f"{part} runs again")
    up.wait_ready(2)
    counting.check_unharmed()


@pytest.mark.parametrize("part", ["ganger.scheduling.host", "ganger_master.planner_process"])
def test_a_killed_child_of_the_master_is_started_again_and_no_job_is_harmed(
    request: pytest.FixtureRequest, tmp_path: Path, part: str
) -> None:
    up = request.getfixturevalue("up" if part == "ganger_master.planner_process" else "without_planner")
    counting = Counting(up, tmp_path / "end")
    counting.begin()

    def child() -> int:
        return next((pid for pid in children_of(up.processes()["master"].pid) if part in command_line(pid)), 0)

    killed = eventually(child, within_seconds=30, what=f"the master runs {part}", story=up.story)
    os.kill(killed, signal.SIGKILL)
    eventually(lambda: child() not in (0, killed), within_seconds=60, what=f"{part} runs again", story=up.story)
    assert end_of(up, up.submit("--", "true"))[0] == "SUCCEEDED"
    counting.check_unharmed()


def test_up_after_the_supervisor_was_killed_takes_over_what_runs(up: Up, counting: Counting) -> None:
    before = up.processes()
    up.kill("up")
    assert "taken over from an earlier `ganger up`: master, n1, n2" in up.start()
    after = up.processes()
    assert {name: after[name].pid for name in ("master", "n1", "n2")} == {
        name: before[name].pid for name in ("master", "n1", "n2")
    }
    killed = up.kill("n1")
    eventually(lambda: up.processes().get("n1", killed).pid != killed.pid, within_seconds=30, what="n1 runs again")
    counting.check_unharmed()


def test_up_after_the_supervisor_and_the_master_were_killed_starts_what_is_missing(up: Up, counting: Counting) -> None:
    up.kill("up")
    up.kill("master")
    up.start()
    counting.check_unharmed()


def test_up_with_other_flags_takes_nothing_over_and_names_the_command_that_does(up: Up) -> None:
    up.kill("up")
    refused = up.try_("up", "--state-dir", str(up.directory), "--nodes", "2", "--virtual-gpus", "3")
    assert refused.returncode == 4
    command = f"ganger up --state-dir {up.directory} {' '.join(WITH_PLANNER)}"
    assert f"still runs, with other flags: take it over with `{command}`" in refused.stderr
    up.start()


def test_jobs_go_on_through_down_and_up(up: Up, counting: Counting) -> None:
    # The cluster is found by $GANGER_MASTER.
    assert "stopped" in up("down")
    assert not up.processes()
    up.start()
    counting.check_unharmed()


def test_a_supervisor_that_may_not_write_goes_on_and_starts_a_killed_master_once_it_may(
    up: Up, counting: Counting
) -> None:
    supervisor = up.processes()["up"]
    _, most = resource.prlimit(supervisor.pid, resource.RLIMIT_FSIZE)
    # Every write into a file fails from now on, of what it starts, too: as on a full disk.
    resource.prlimit(supervisor.pid, resource.RLIMIT_FSIZE, (0, most))
    killed = up.kill("master")
    eventually(
        lambda: (
            {pid for pid in children_of(supervisor.pid) if " master --state-dir" in command_line(pid)} - {killed.pid}
        ),
        within_seconds=30,
        what="it has tried to start the master",
    )
    eventually(
        lambda: not any(" master --state-dir" in command_line(pid) for pid in children_of(supervisor.pid)),
        within_seconds=30,
        what="the master could not start",
    )
    resource.prlimit(supervisor.pid, resource.RLIMIT_FSIZE, (most, most))
    up.wait_ready(2)
    assert up.processes()["up"] == supervisor
    counting.check_unharmed()


def children_of(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] not in ("Z", "X") and int(fields[1]) == pid:
            found.append(int(path.parent.name))
    return found


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


@pytest.mark.torch
def test_a_state_directory_may_have_any_signs_in_its_name(tmp_path: Path) -> None:
    # An executed job finds its agent by a list of paths that ":" separates.
    with Up(tmp_path / "a:b %#? é'x", "--nodes", "1", "--virtual-gpus", "1", settings=NO_PRELOAD) as up:
        job = up.submit("--gpus", "1", "--", "bash", "-c", f"exec {sys.executable} {DIGITS} --epochs 500")
        eventually(
            lambda: "offers          pause, offload" in up.shell("show", job),
            within_seconds=60,
            what="the executed job has its agent",
            story=up.story,
        )
        up("suspend", job, "--level", "offload")


def test_up_with_other_devices_below_jobs_fails_at_once_with_the_former_command(tmp_path: Path) -> None:
    flags = ("--nodes", "1", "--virtual-gpus", "2", "--virtual-memory", "4G")
    with Up(tmp_path / "c", *flags, settings=NO_PRELOAD) as up:
        job = up.submit("--gpus", "2", "--", "sleep", "600")
        eventually(lambda: up.phase(job) == "RUNNING", within_seconds=60, story=up.story)
        directory = ("--state-dir", str(up.directory))
        up("down", *directory)
        done = up.try_("up", *directory, "--nodes", "1", "--virtual-gpus", "3", "--detach")
        # Refused by the master, not given up after a wait.
        assert (done.returncode, "waited" in done.stderr) == (4, False), done.stderr
        assert f"nodes/n1 has something of jobs/{job}" in done.stderr
        assert f"was started with `ganger up {' '.join(directory)} --nodes 1 --virtual-gpus 2" in done.stderr
        up.start()
        assert up.json("show", job)["state"] == "HOLDING"


def test_up_with_a_settings_file_of_a_master_goes_by_it_where_no_flag_does(tmp_path: Path) -> None:
    settings = tmp_path / "master.toml"
    settings.write_text('state_dir = "/nowhere"\n[teams.vision]\nusers = ["*"]\ngpus = 1\n')
    flags = ("--nodes", "1", "--virtual-gpus", "2", "--config", str(settings))
    with Up(tmp_path / "c", *flags, settings=NO_PRELOAD) as up:
        assert "vision" in up("usage")
        # Beyond the limit of its team.
        assert up.try_("submit", "--gpus", "2", "--", "sleep", "600").returncode == 4
        up("down", "--state-dir", str(up.directory))
        settings.write_text('policy = "nosuch"\n')
        refused = up.try_("up", "--state-dir", str(up.directory), "--config", str(settings), "--detach")
        assert (refused.returncode, "there is no policy 'nosuch'" in refused.stderr) == (2, True), refused.stderr
