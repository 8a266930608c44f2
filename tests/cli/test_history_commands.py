"""What `ganger history` and `ganger logs` print, against a server with canned answers."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from ganger.client import Client
from ganger.v1 import job_pb2
from ganger.wire import times
from kit.canned import Call, CannedMaster, add_members, running_job

Output = pytest.CaptureFixture[str]


def test_the_last_lines_of_a_log_are_found_from_its_end(
    call: Call, master: CannedMaster, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    running_job(master)
    text = b"".join(b"line %d\n" % number for number in range(9_000))
    master.logs, master.chunk_bytes = {0: text, 1: b"a\n\nunended"}, 5_000
    for count in (0, 1, 3, 4_000, 9_000, 10_000):
        assert call("logs", "1", "--tail", str(count)) == 0
        wanted = text.splitlines(keepends=True)[-count:] if count else []
        assert capsysbinary.readouterr().out == b"".join(wanted)
    assert call("logs", "1", "-r", "1", "-n", "2") == 0
    assert capsysbinary.readouterr().out == b"\nunended"
    assert call("logs", "1", "--tail", "1", "--offset", "3") == 2


def test_logs_are_the_bytes_themselves(
    call: Call, master: CannedMaster, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    running_job(master)
    master.logs = {0: b"\xff one\ntwo\n", 1: b"three\nfour"}
    assert call("logs", "1") == 0
    assert capsysbinary.readouterr().out == master.logs[0]
    assert call("logs", "1", "--all") == 0
    assert capsysbinary.readouterr().out == b"0: \xff one\n0: two\n1: three\n1: four\n"


def test_history_is_read_page_by_page(call: Call, master: CannedMaster, capsys: Output) -> None:
    running_job(master)
    master.events = [
        job_pb2.Event(
            sequence=number, subject="jobs/1", kind=f"kind_{number}", cause="planner", time=times.timestamp(number)
        )
        for number in range(1, 6)
    ]
    assert call("events", "1") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[3] for line in lines] == [f"kind_{number}" for number in range(1, 6)]
    assert call("events", "7") == 3
    # What is kept no longer has a history still, and a node is named as elsewhere.
    master.events += [job_pb2.Event(sequence=6, subject=subject, kind="gone") for subject in ("jobs/7", "nodes/n9")]
    for subject in ("7", "n9"):
        for command in ("events", "history"):
            capsys.readouterr()
            assert call(command, subject) == 0
            assert "gone" in capsys.readouterr().out


def test_events_are_cut_to_the_newest_and_go_on_from_there(call: Call, master: CannedMaster, capsys: Output) -> None:
    subjects = ["jobs/1", *["jobs/2"] * 40, "jobs/1", "jobs/1"]
    master.events = [job_pb2.Event(sequence=n, subject=subject) for n, subject in enumerate(subjects, 1)]
    master.cluster.event_sequence = len(subjects)

    def told(*arguments: str) -> list[int]:
        assert call("events", *arguments, "--json") == 0
        return [event["sequence"] for event in json.loads(capsys.readouterr().out)]

    assert told("-n", "2") == [42, 43]
    assert told("1", "-n", "3") == [1, 42, 43], "however far apart"
    assert told("1", "-n", "3", "--after", "1") == [42, 43]
    assert told("1", "-n", "9") == [1, 42, 43]
    for command in ("events", "history"):
        assert call(command, "") == 2, "no job has an empty name"


def test_following_events_continues_across_a_restart_of_the_master(tmp_path: Path) -> None:
    with CannedMaster(tmp_path) as first:
        client = Client(str(tmp_path))
        first.events = [job_pb2.Event(sequence=1)]
        rounds = client.follow_events()
        assert [event.sequence for event in next(rounds)] == [1]
    second = CannedMaster(tmp_path)
    second.events = [*first.events, job_pb2.Event(sequence=2)]
    later = threading.Timer(1.0, second.__enter__)
    later.start()
    try:
        assert [event.sequence for event in next(filter(None, rounds))] == [2]
    finally:
        client.close()
        later.join()
        second.__exit__(None, None, None)


def test_a_history_is_followed_as_json_too(call: Call, master: CannedMaster, capsys: Output) -> None:
    running_job(master)
    master.events = [
        job_pb2.Event(sequence=n, subject="jobs/1", kind=f"job_{kind}")
        for n, kind in ((1, "submitted"), (2, "succeeded"))
    ]
    assert call("history", "1", "-f", "--json") == 0
    *chapters, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert [chapter["kind"] for chapter in chapters] == ["job_submitted", "job_succeeded"]
    assert last["totals"]["ran_s"] == 0.0


def test_a_log_as_json_has_its_ranks_and_every_byte(call: Call, master: CannedMaster, capsys: Output) -> None:
    running_job(master)
    master.logs = {0: "0123456789ü\n".encode(), 1: b"\xff\n"}
    assert call("logs", "1", "--all", "--json") == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["rank"], one["offset"], one["data"]) for one in told] == [
        (0, 0, "0123456789"),
        (0, 10, "ü\n"),
        (1, 0, "\ufffd\n"),
    ]
    assert [one["data_base64"] for one in told] == [None, None, "/wo="]


def test_history_prints_sentences_and_totals(call: Call, master: CannedMaster, capsys: Output) -> None:
    running_job(master)
    kinds = ("job_submitted", "gang_approved", "gang_running", "job_succeeded")
    master.events = [
        job_pb2.Event(sequence=n, subject="jobs/1", kind=kind, time=times.timestamp(1_000 + n), cause="user:ann")
        for n, kind in enumerate(kinds, 1)
    ]
    assert call("history", "1") == 0
    *lines, sums = capsys.readouterr().out.splitlines()
    assert [line[25:] for line in lines] == [
        "submitted by user:ann: 1 task without GPUs",
        "got its gang on ? by user:ann",
        "runs, after 1.00 s",
        "succeeded",
    ]
    assert sums == "in all: waited 1.00 s; starting 1.00 s; ran 1.00 s"
    assert call("history", "1", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert [chapter["kind"] for chapter in told["chapters"]] == list(kinds)
    assert told["totals"]["ran_s"] == 1.0
    add_members(master)
    master.events = [job_pb2.Event(sequence=9, subject="arrays/1", kind="array_ended", figures={"stopped": "2"})]
    assert call("history", "1") == 0
    assert "ended: 2 stopped" in capsys.readouterr().out
    assert call("history", "8") == 3
