"""What `ganger top` draws, against a server with canned answers."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios

import pytest
from ganger.cli.top import RecentChanges, picture
from ganger.client import Client
from ganger.v1 import job_pb2, node_pb2
from ganger.wire import times
from kit.canned import Call, CannedMaster, running_job

Output = pytest.CaptureFixture[str]


def test_top_fills_the_screen_with_running_jobs_first(master: CannedMaster) -> None:
    running_job(master)
    for number in range(2, 60):
        pending = job_pb2.Job(name=f"jobs/{number}", state=job_pb2.Job.STATE_PENDING, queue_rank=100 - number)
        master.jobs[pending.name] = pending
    master.cluster = node_pb2.Cluster(jobs_holding=1, jobs_pending=58)
    with Client(str(master.directory)) as client:
        now = picture(client, 15)
    assert [row[0] for row in now.jobs] == ["1", *(str(number) for number in range(59, 50, -1))]
    assert now.jobs_left_out == 49


def test_without_a_terminal_top_prints_once(call: Call, master: CannedMaster, capsys: Output) -> None:
    running_job(master)
    assert call("top") == 0
    assert "120" in capsys.readouterr().out


def test_top_draws_rows_of_turns_and_the_last_changes(call: Call, master: CannedMaster, capsys: Output) -> None:
    running_job(master).gang.colocated_jobs.append("jobs/9")
    node_set = master.nodes.node_sets.add(name="nodeSets/1", nodes=["nodes/n1", "nodes/n2"], leader="nodes/n1")
    node_set.quantum.FromSeconds(60)
    node_set.level = job_pb2.SUSPEND_LEVEL_OFFLOAD
    node_set.slices.add(jobs=["jobs/1", "jobs/9"])
    # it moves from one GPU of the row to another
    node_set.slices.add(jobs=["jobs/4", "jobs/4"])
    told = (("gang_running", {}), ("move_begun", {"goal": "HOLE", "nodes": "n2"}), ("change_kept", {"gain": "1.42"}))
    master.events = [
        job_pb2.Event(
            sequence=n, subject="jobs/1", kind=kind, figures=figures, cause="planner", time=times.timestamp(n)
        )
        for n, (kind, figures) in enumerate(told, 1)
    ]
    master.cluster = node_pb2.Cluster(jobs_holding=1, event_sequence=3)
    assert call("top", "--once") == 0
    _, _, turns, jobs, changes = capsys.readouterr().out.split("\n\n")
    assert jobs.endswith("n1[0-1,3], beside 9")
    assert [line.split() for line in turns.splitlines()[1:]] == [
        ["n1", "n2", "1", "1", "of", "2", "1m", "offload", "1", "9"],
        ["2", "1", "of", "2", "1m", "offload", "4"],
    ]
    assert [line.split(None, 2)[2] for line in changes.splitlines()[1:]] == [
        "moves to n2 by planner, to make room for a pending gang",
        "the change was kept: its rate was 1.42 times that of before",
    ]


def test_top_is_one_object_for_a_script(call: Call, master: CannedMaster, capsys: Output) -> None:
    running_job(master)
    master.jobs["jobs/2"] = job_pb2.Job(name="jobs/2", state=job_pb2.Job.STATE_PENDING)
    master.jobs["jobs/3"] = job_pb2.Job(name="jobs/3", state=job_pb2.Job.STATE_SUCCEEDED)
    event = job_pb2.Event(
        sequence=1, subject="jobs/1", kind="move_begun", figures={"goal": "HOLE", "nodes": "n2"}, cause="planner"
    )
    master.events = [event]
    master.cluster = node_pb2.Cluster(jobs_holding=1, event_sequence=1)
    assert call("top", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["cluster"]["jobs_holding"] == 1
    assert [job["name"] for job in told["jobs"]] == ["jobs/1", "jobs/2"]
    (change,) = told["changes"]
    assert (change["subjects"], change["text"]) == (
        ["1"],
        "moves to n2 by planner, to make room for a pending gang",
    )
    assert {"nodes", "node_sets", "configuration_sets"} < told.keys()


def test_top_reads_the_changes_that_came_since_it_looked_last(master: CannedMaster) -> None:
    changes = RecentChanges()
    with Client(str(master.directory)) as client:
        for number in range(1, 10):
            event = job_pb2.Event(
                sequence=number, subject=f"jobs/{number}", kind="move_done", figures={"pause_ms": str(number)}
            )
            master.events.append(event)
            shown = changes.read(client, number)
        assert [row[1] for row in shown] == ["4", "5", "6", "7", "8", "9"]
        asked = len(master.requests)
        assert changes.read(client, 9) == shown
        assert len(master.requests) == asked


def test_top_prints_one_line_for_all_jobs_of_one_change(master: CannedMaster) -> None:
    turns = {"node_set": "1", "of_rows": "2", "quantum_seconds": "60"}
    for number, row in ((1, "0"), (2, "0"), (3, "1")):
        event = job_pb2.Event(
            sequence=number, subject=f"jobs/{number}", kind="rows_changed", figures={**turns, "rows": row}
        )
        master.events.append(event)
    with Client(str(master.directory)) as client:
        ((_, jobs, told),) = RecentChanges().read(client, 3)
    sentence = "time-sliced with other jobs on its GPUs, 1 of 2 time slices of 60 s in nodeSets/1"
    assert (jobs, told) == ("1 2 3", sentence)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_top_that_is_ended_leaves_the_terminal_as_it_was(master: CannedMaster, number: signal.Signals) -> None:
    ours, its = pty.openpty()
    before = termios.tcgetattr(its)
    command = [sys.executable, "-m", "ganger.cli.main", "--master", str(master.directory), "top"]
    environment = {**os.environ, "TERM": "xterm"}
    process = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=environment, start_new_session=True)
    try:
        written = b""
        while b"NODE" not in written:
            written += os.read(ours, 4096)
        process.send_signal(number)
        while b"\x1b[?1049l" not in written:
            assert select.select([ours], [], [], 20)[0], written
            written += os.read(ours, 4096)
        assert process.wait(20) == 128 + number
        assert termios.tcgetattr(its) == before
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(its)


def test_where_nothing_can_be_drawn_top_prints_once(
    call: Call, master: CannedMaster, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    assert call("top") == 0
    assert "GPUs held" in capsys.readouterr().out
