"""The processes of `ganger up`: what is started, and what becomes of it when something dies."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ganger.cli import local_cluster as cluster
from ganger.cli.local_cluster import LocalClusterSettings, Started, programs
from ganger.cli.main import run
from ganger.client import Client
from ganger.console import CommandError
from ganger.injob.process_identity import start_ticks
from ganger.wire.endpoints import EndpointError
from ganger.wire.errors import ApiError
from kit.waiting import eventually

GANGER = (sys.executable, "-m", "ganger.cli.main")


def test_a_virtual_cluster_is_a_master_and_daemons_with_the_same_flags(tmp_path: Path) -> None:
    settings = LocalClusterSettings(
        tmp_path,
        2,
        {
            "virtual_gpus": 4,
            "virtual_cores": 8,
            "virtual_memory": "16G",
            "topology": "2x2",
            "policy": "las",
            "plan_every": "1m",
        },
    )
    master, first, second = programs(settings)
    assert [program.name for program in (master, first, second)] == ["master", "n1", "n2"]
    assert master.arguments[3:] == ("master", "--state-dir", str(tmp_path), "--policy", "las", "--plan-every", "1m")
    assert first.arguments[-8:] == (
        *("--virtual-gpus", "4", "--virtual-cores", "8"),
        *("--virtual-memory", "16G", "--topology", "2x2"),
    )
    assert str(tmp_path / "nodes" / "n2") in second.arguments


def test_metrics_are_served_by_the_master_alone(tmp_path: Path) -> None:
    master, daemon = programs(LocalClusterSettings(tmp_path, 1, {"metrics": "127.0.0.1:9464"}))
    assert master.arguments[-2:] == ("--metrics", "127.0.0.1:9464")
    assert "--metrics" not in daemon.arguments


def test_an_empty_value_is_refused_by_the_program_it_is_for_and_not_left_out(tmp_path: Path) -> None:
    master, daemon = programs(
        LocalClusterSettings(tmp_path, 1, {"virtual_gpus": 4, "policy": "", "moves_per_hour": "", "topology": ""})
    )
    assert master.arguments[-4:] == ("--policy", "", "--moves-per-hour", "")
    assert daemon.arguments[-2:] == ("--topology", "")
    for program in (master, daemon):
        ended = subprocess.run(program.arguments, capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == 2
        assert "''" in ended.stderr


@pytest.mark.parametrize("flag", ["--state-dir", "--storage"])
def test_a_directory_without_a_name_is_not_where_one_stands(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["up", "--state-dir", str(tmp_path), flag, ""]) == 2
    assert "no directory is named" in capsys.readouterr().err


def test_real_devices_get_no_virtual_flags(tmp_path: Path) -> None:
    _, daemon = programs(LocalClusterSettings(tmp_path, 1))
    assert not [argument for argument in daemon.arguments if "virtual" in argument]


def test_a_pid_that_went_to_another_process_is_not_ours(tmp_path: Path) -> None:
    ours = start_ticks(os.getpid())
    assert ours is not None
    processes = [{"name": "up", "pid": os.getpid(), "start_ticks": ours}]
    processes.append({"name": "n1", "pid": os.getpid(), "start_ticks": ours - 1})
    (tmp_path / "up.json").write_text(json.dumps({"ready": True, "processes": processes}))
    assert cluster.read_up_file(tmp_path) == (True, (Started("up", os.getpid(), ours),))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"ready": 1, "processes": [{}]}'])
def test_an_unreadable_file_names_no_processes(tmp_path: Path, text: str) -> None:
    (tmp_path / "up.json").write_text(text)
    assert cluster.read_up_file(tmp_path) == (False, ())


def test_a_program_that_will_not_start_is_told_with_its_log(tmp_path: Path) -> None:
    settings = LocalClusterSettings(tmp_path, 1, {"policy": "no such policy"})
    supervisor = cluster.Supervisor(settings, lambda text: None)
    supervisor.start()
    try:
        with pytest.raises(CommandError, match="master ended at once"):
            cluster.wait_until_ready(settings, supervisor.check_alive, 30)
    finally:
        supervisor.stop()
    assert not (tmp_path / "up.json").exists()


@pytest.mark.parametrize("detach", [[], ["--detach"]])
def test_a_flag_that_a_program_finds_wrong_is_wrong_usage_of_up_too(tmp_path: Path, detach: list[str]) -> None:
    arguments = ["up", "--state-dir", str(tmp_path / "c"), "--nodes", "1", "--policy", "nope", *detach]
    done = subprocess.run([sys.executable, "-m", "ganger.cli.main", *arguments], capture_output=True, text=True)
    assert (done.returncode, "master ended at once" in done.stderr) == (2, True), done.stderr


def test_a_program_that_dies_again_and_again_is_left_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    both = (cluster.Program("master", ("sleep", "600"), log), cluster.Program("n1", ("sh", "-c", "echo why"), log))
    monkeypatch.setattr(cluster, "programs", lambda settings: both)
    said: list[str] = []
    supervisor = cluster.Supervisor(LocalClusterSettings(tmp_path, 1), said.append)
    supervisor.start()
    try:

        def is_left() -> bool:
            supervisor.restart_dead()
            return "left for a while:\n  why" in said[-1] if said else False

        eventually(is_left, within_seconds=20)
        supervisor.restart_dead()
        assert is_left()
        _, started = cluster.read_up_file(tmp_path)
        assert [each.name for each in started if each.name == "master"] == ["master"]
    finally:
        supervisor.stop()


def test_a_master_whose_database_another_one_has_taken_over_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, starts = tmp_path / "log", tmp_path / "starts"
    fenced = ("sh", "-c", f"echo one >> {starts}; exit 8")
    both = (cluster.Program("master", fenced, log), cluster.Program("n1", ("sleep", "600"), log))
    monkeypatch.setattr(cluster, "programs", lambda settings: both)
    said: list[str] = []
    supervisor = cluster.Supervisor(LocalClusterSettings(tmp_path, 1), said.append)
    supervisor.start()
    try:

        def is_said() -> bool:
            supervisor.restart_dead()
            return bool(said)

        eventually(is_said, within_seconds=20)
        supervisor.restart_dead()
        (text,) = said
        assert "another master has taken its database over" in text
        assert starts.read_text() == "one\n"
    finally:
        supervisor.stop()


def test_a_program_that_cannot_be_started_now_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = tmp_path / "its" / "logs"
    logs.mkdir(parents=True)
    both = (cluster.Program("master", ("true",), logs / "master"), cluster.Program("n1", ("sleep", "600"), logs / "n1"))
    monkeypatch.setattr(cluster, "programs", lambda settings: both)
    said: list[str] = []
    supervisor = cluster.Supervisor(LocalClusterSettings(tmp_path, 1), said.append)
    supervisor.start()
    try:
        shutil.rmtree(logs)

        def cannot() -> bool:
            supervisor.restart_dead()
            return any("master cannot be started, and is tried again: " in text for text in said)

        eventually(cannot, within_seconds=20)
        logs.mkdir()
        supervisor.restart_dead()
        assert (logs / "master").exists()
    finally:
        supervisor.stop()


def test_down_stops_the_cluster_that_other_commands_talk_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GANGER_MASTER", str(tmp_path / "a"))
    for arguments, directory in (
        (["down"], "a"),
        (["--master", str(tmp_path / "b" / "endpoint.json"), "down"], "b"),
        (["--master", "127.0.0.1:1", "down", "--state-dir", str(tmp_path / "c")], "c"),
    ):
        assert run(arguments) == 0
        assert f"no cluster of {tmp_path / directory} runs" in capsys.readouterr().out
    monkeypatch.setenv("GANGER_MASTER", "127.0.0.1:1")
    assert run(["down"]) == 2
    assert "$GANGER_MASTER is the address 127.0.0.1:1: name the cluster to stop by --state-dir" in (
        capsys.readouterr().err
    )


def test_what_an_earlier_run_logged_is_not_told_again(tmp_path: Path) -> None:
    path = tmp_path / "n1.log"
    path.write_text("old\nnew\nlast\n")
    assert cluster.tail(path, after=4) == "  new\n  last"
    assert cluster.tail(path, lines=1) == "  last"
    assert "no log" in cluster.tail(tmp_path / "none.log")


def test_what_a_program_logged_last_as_an_error_is_told(tmp_path: Path) -> None:
    told = ({"level": "error", "event": "a", "error": "no such master"}, {"level": "info", "event": "b"})
    path = tmp_path / "n1.log"
    path.write_text("\n".join(map(json.dumps, told)) + "\n[1]\nTraceback\n")
    assert cluster.last_error(path) == "no such master"
    assert cluster.last_error(tmp_path / "none.log") == ""


def test_a_state_directory_that_cannot_be_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert run(["up", "--state-dir", str(tmp_path / "file" / "x")]) == 4
    assert f"{tmp_path}/file/x: not a directory" in capsys.readouterr().err


@pytest.mark.system
def test_up_comes_up_heals_and_goes_down_again(tmp_path: Path) -> None:
    directory = tmp_path / "cluster"
    flags = ["--state-dir", str(directory)]
    size = [
        "--nodes",
        "1",
        "--virtual-gpus",
        "2",
        "--virtual-cores",
        "2",
        "--virtual-memory",
        "1G",
        "--topology",
        "1x2",
    ]

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*GANGER, *arguments], capture_output=True, text=True, timeout=100, check=False)

    try:
        started = command("up", *flags, *size, "--detach")
        assert started.returncode == 0, started.stderr
        assert "ganger is up: 1 node," in started.stdout

        again = command("up", *flags, *size)
        assert again.returncode == 4
        assert "runs in" in again.stderr
        assert command("up", *flags, *size, "--detach").returncode == 4
        assert "ganger is up" in (directory / "logs" / "up.log").read_text()

        with Client(str(directory)) as client:
            job = client.submit([sys.executable, "-c", "print('hello from the gang')"], gpus=2, directory=str(tmp_path))
            assert job.wait(60, check=False).is_finished
            assert b"hello from the gang" in b"".join(job.logs())
            lasting = client.submit(["sleep", "600"], gpus=1, directory=str(tmp_path))
            eventually(lambda: lasting.refresh().state == lasting.message.STATE_HOLDING, within_seconds=60)

        _, processes = cluster.read_up_file(directory)
        master = next(process for process in processes if process.name == "master")
        os.kill(master.pid, signal.SIGKILL)
        eventually(lambda: not cluster.is_alive(master), within_seconds=20)

        def answers() -> bool:
            try:
                with Client(str(directory)) as client:
                    return client.job(1).name == "jobs/1"
            except (ApiError, EndpointError):
                return False

        eventually(answers, within_seconds=40, what="the master was started again and knows its job")
    finally:
        stopped = command("down", *flags)
    assert stopped.returncode == 0, stopped.stderr
    assert f"`ganger up --state-dir {directory} {' '.join(size)}` takes it up again" in stopped.stderr
    assert cluster.read_up_file(directory) == (False, ())
    assert "no cluster" in command("down", *flags).stdout
    # The job that went on would last for ten minutes, and what its unit has on this machine for ever.
    assert command("up", *flags, *size, "--detach").returncode == 0
    assert command("down", *flags, "--cancel-jobs").returncode == 0
