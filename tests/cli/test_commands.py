"""What the commands print, send and exit with, against a server with canned answers."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from pathlib import Path

import pytest
from ganger.cli import job_table, logs
from ganger.cli.main import run
from ganger.console import aligned, fitted
from ganger.spec import KEYS
from ganger.v1 import job_pb2, job_service_pb2, node_pb2, resources_pb2
from ganger.wire import errors, times
from kit.canned import Call, CannedMaster, add_members, running_job

pytestmark = pytest.mark.usefixtures("scripts")
Output = pytest.CaptureFixture[str]


def test_submit_prints_the_number_alone_on_stdout(call: Call, master: CannedMaster, capsys: Output) -> None:
    assert call("submit", "--gpus", "2", "--name", "a b", "--env", "N=1", "--", "python", "t.py", "--gpus", "9") == 0
    assert capsys.readouterr().out == "submitted job 1\n"
    spec = master.requests[0].spec
    assert list(spec.command) == ["python", "t.py", "--gpus", "9"]
    assert (spec.display_name, spec.roles[0].tasks, spec.environment["N"]) == ("a b", 2, "1")
    assert spec.working_directory == str(Path.cwd())


@pytest.mark.parametrize(
    ("words", "note"),
    [
        ("python x.py --gpus 2", "--gpus after the command goes"),
        ("python x.py --name=a --gpus 2 --name b", "--name, --gpus after the command go"),
        ("--gpus 2 python x.py --lr 1", ""),
        ("-- python x.py --gpus 2", ""),
        ("--gpus 2 -- python x.py --gpus 2", ""),
    ],
)
def test_an_option_of_submit_behind_the_command_is_noted(
    call: Call, master: CannedMaster, capsys: Output, words: str, note: str
) -> None:
    assert call("submit", *words.split()) == 0
    told = capsys.readouterr()
    assert told.out == "submitted job 1\n"
    assert told.err == (note and f"note: {note} to the command; options of ganger come before it\n")
    assert list(master.requests[0].spec.command) == words[words.index("python") :].split()


def test_a_mechanism_and_a_stop_signal_go_with_the_spec(call: Call, capsys: Output) -> None:
    flags = "--mechanism signal --signal B:USR1@300 --requeue --must-move --close-connections --dry-run --json"
    assert call("submit", *flags.split(), "--", "true") == 0
    spec = json.loads(capsys.readouterr().out)
    expected = {"mechanism": "SIGNAL", "stop_signal": "USR1", "stop_grace": 300.0}
    expected |= {"is_move_required": True, "closes_connections": True}
    assert {name: spec[name] for name in expected} == expected
    assert call("submit", "--grace", "5m", "--", "true") == 2
    assert "--grace: goes with the signal" in capsys.readouterr().err


def test_submit_and_why_tell_whether_a_deadline_can_be_met(call: Call, master: CannedMaster, capsys: Output) -> None:
    master.explanation.job.CopyFrom(running_job(master))
    master.explanation.deadline_advice = "can be met: it would end 90 min before it"
    assert call("submit", "--deadline", "6h", "--", "x") == 0
    told = capsys.readouterr()
    assert (told.out, told.err) == (
        "submitted job 2\n",
        "ganger: deadline: can be met: it would end 90 min before it\n",
    )
    assert 21_000 < times.unix_s(master.requests[0].spec.deadline) - time.time() <= 21_600
    assert call("why", "1") == 0
    assert "deadline: can be met: it would end 90 min before it\n" in capsys.readouterr().out


def test_flags_win_over_the_file(call: Call, master: CannedMaster, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("command: [a]\ngpus: 4\nmemory: 1G\n")
    assert call("submit", "--file", str(tmp_path / "job.yaml"), "--gpus", "2") == 0
    (role,) = master.requests[0].spec.roles
    assert (role.tasks, role.shape.memory_bytes) == (2, 1 << 30)


def test_all_mistakes_of_flags_and_file_are_said_at_once(
    call: Call, master: CannedMaster, tmp_path: Path, capsys: Output
) -> None:
    (tmp_path / "job.yaml").write_text("gpus: 3\nroles: [{name: w, tasks: 0}]\npriority: high\n")
    assert call("submit", "-F", str(tmp_path / "job.yaml"), "--memory", "x", "--time", "y") == 2
    text = capsys.readouterr().err
    for path in ("--memory", "--time", "roles[0].tasks", "priority", "gpus", "command"):
        assert f"  {path}: " in text
    assert not master.requests


def test_mistakes_of_pairs_are_said_beside_all_others(call: Call, master: CannedMaster, capsys: Output) -> None:
    flags = ["--env", "NO_SUCH", "--gpus", "x", "--label", "a", "--label", "b=1", "--label", "b=2"]
    assert call("submit", *flags, "--", "x") == 2
    text = capsys.readouterr().err
    for path in ("--env", "--gpus", "--label"):
        assert f"  {path}: " in text
    assert "b is given twice" in text
    rule = "halving,factor=1,first=0,bla=3"
    assert call("submit", *flags, "--array", "index=1,2", "--stop", rule, "--", "x") == 2
    text = capsys.readouterr().err
    for path in ("--env", "--stop", "array.stop.factor", "array.stop.first", "array.grid", "--gpus"):
        assert f"  {path}: " in text
    assert not master.requests


def test_a_dry_run_submits_nothing(call: Call, master: CannedMaster, capsys: Output) -> None:
    master.partitions.partitions.add(name="big")
    flags = "--gpus 2:4 -p big --memory 2G --time 90m --locality node --tolerance rack --not-preemptible --signal TERM"
    assert call("submit", "--dry-run", "--json", *flags.split(), "--", "x") == 0
    assert json.loads(capsys.readouterr().out)["roles"][0]["tasks"] == 2
    assert call("submit", "--dry-run", *flags.split(), "--name", "digits", "--", "python", "a b.py") == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert shown.pop("directory") == str(Path.cwd())
    assert "PATH" in shown.pop("environment").split()
    assert shown == {
        "name": "digits",
        "command": "python 'a b.py'",
        "gpus": "2:4",
        "tasks": "2 to 4 × worker: 1 GPU, cores by measurement, 2G",
        "partition": "big",
        "locality": "node",
        "tolerance": "rack",
        "patience": "10m",
        "time": "1h 30m",
        "preemptible": "false",
        "signal": "TERM",
        "grace": "1m",
    }
    assert shown.keys() <= KEYS
    assert {type(request) for request in master.requests} == {job_service_pb2.ValidateSubmissionRequest}


def test_a_dry_run_names_the_job_that_its_request_id_was_used_for(call: Call, capsys: Output) -> None:
    words = ("submit", "--request-id", "once", "--dry-run", "--", "x")
    assert call(*words) == 0
    assert capsys.readouterr().err == ""
    assert call(*(word for word in words if word != "--dry-run")) == 0
    assert call(*words) == 0
    assert capsys.readouterr().err == "note: --request-id once was used for jobs/1: no other is submitted\n"


def test_a_dry_run_of_an_array_shows_its_members(call: Call, capsys: Output) -> None:
    assert call("submit", "--dry-run", "--array", "lr=1,2,3,4%2", "--stop", "median,first=9", "--", "x") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith(
        "array 4 jobs members 0: lr=1 1: lr=2 2: lr=3 and 1 more at_once 2"
        " stop median by loss, less is better, from step 9 on"
    )


def test_a_dry_run_is_refused_as_the_submission_would_be_and_needs_no_master(
    call: Call, master: CannedMaster, capsys: Output, tmp_path: Path
) -> None:
    words = ("submit", "--dry-run", "--gpus", "5000", "--", "x")
    master.failing = errors.GangImpossible("the largest that fits has 3 devices")
    assert call(*words) == 4
    assert "the largest that fits has 3 devices" in capsys.readouterr().err
    assert run(["--master", str(tmp_path / "none"), *words]) == 0
    assert capsys.readouterr().err == "note: only the description is checked, as no master answers\n"
    assert run(["--master", "127.0.0.1:1", *words]) == 0
    assert master.jobs == {}


def test_the_masters_violations_are_shown_with_their_paths(call: Call, master: CannedMaster, capsys: Output) -> None:
    master.failing = errors.SpecInvalid("refused", violations=[errors.Violation("spec.nodes", "too many")])
    assert call("submit", "--", "x") == 2
    assert "spec.nodes: too many" in capsys.readouterr().err


def test_queue_is_a_table_that_a_script_can_cut(call: Call, master: CannedMaster, capsys: Output) -> None:
    running_job(master)
    assert call("queue") == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.startswith("JOB")
    for text in ("1 ", "digits [bold]", "ann", "running", "step 120 7.25/s loss 0.5", "n1[0-1,3]"):
        assert text in line


def test_json_has_every_key_and_no_environment(call: Call, master: CannedMaster, capsys: Output) -> None:
    running_job(master)
    assert call("show", "1", "--json") == 0
    job = json.loads(capsys.readouterr().out)
    assert (job["state"], job["gang"]["phase"], job["gang"]["epoch"]) == ("HOLDING", "RUNNING", 2)
    assert job["gang"]["claims"][0]["device_mask"] == 0b1011
    assert job["failure"] is None
    assert "environment" not in job["spec"]
    assert "hidden" not in json.dumps(job)


def test_show_names_cores_and_devices(call: Call, master: CannedMaster, capsys: Output) -> None:
    running_job(master)
    assert call("show", "jobs/1") == 0
    assert "n1: GPUs 0-1,3; cores: 2 on socket 0, 0.5 on socket 1;" in capsys.readouterr().out


def test_what_was_given_back_is_not_shown_as_held(call: Call, master: CannedMaster, capsys: Output) -> None:
    gang = running_job(master).gang
    gang.phase, gang.parked_level = job_pb2.Gang.PHASE_PARKED, job_pb2.SUSPEND_LEVEL_OFFLOAD
    gang.cores[:] = ["0-1", "2-3"]
    assert call("show", "jobs/1") == 0
    shown = capsys.readouterr().out
    assert "GPUs and cores are given back" in shown
    assert "0-1" not in shown
    assert call("queue") == 0
    assert capsys.readouterr().out.splitlines()[1].endswith("  n1")


def test_why_puts_the_true_blocker_first_and_says_when(call: Call, master: CannedMaster, capsys: Output) -> None:
    master.explanation.job.CopyFrom(job_pb2.Job(name="jobs/4", state=job_pb2.Job.STATE_PENDING, queue_rank=2))
    master.explanation.blockers.add(reason="GPUS", message="not enough free devices (8 needed)", figures={"needed": 8})
    master.explanation.start_after.CopyFrom(times.duration(60))
    master.explanation.start_before.CopyFrom(times.duration(7_200))
    master.explanation.assumption = "if jobs/3 ends by its time limit"
    assert call("why", "4") == 0
    first, second, last = capsys.readouterr().out.splitlines()
    assert first == "job 4 is pending, place 2 in the queue"
    assert second == "because GPUS: not enough free devices (8 needed)"
    assert last == "may start in 1m to 2h, if jobs/3 ends by its time limit"


def test_the_first_line_states_whether_a_job_runs_or_has_ended(
    call: Call, master: CannedMaster, capsys: Output
) -> None:
    master.explanation.job.CopyFrom(running_job(master))
    master.explanation.assumption = "it has its gang, which is RUNNING"
    assert call("why", "1") == 0
    assert capsys.readouterr().out == "job 1 is running on n1[0-1,3]\n"
    master.explanation.job.gang.phase = job_pb2.Gang.PHASE_STOPPING
    master.explanation.assumption = "it was ordered to end; nodes/n1 has not reported that it does"
    assert call("why", "1") == 0
    assert capsys.readouterr().out.splitlines() == ["job 1 is stopping on n1[0-1,3]", master.explanation.assumption]
    master.explanation.job.state = job_pb2.Job.STATE_FAILED
    master.explanation.job.failure.reason, master.explanation.job.failure.message = "EXIT", "rank 0 exited with code 3"
    assert call("why", "1") == 0
    assert capsys.readouterr().out.splitlines()[0] == "job 1 has failed: EXIT: rank 0 exited with code 3"


def test_the_queue_ends_with_pending_jobs_in_their_order(call: Call, master: CannedMaster, capsys: Output) -> None:
    running_job(master)
    for number, place in ((2, 3), (3, 1), (4, 2)):
        spec = job_pb2.JobSpec(command=["sh", "-c", "x" * 500 + "\n训练"])
        state = job_pb2.Job.STATE_PENDING
        master.jobs[f"jobs/{number}"] = job_pb2.Job(name=f"jobs/{number}", state=state, queue_rank=place, spec=spec)
    master.jobs["jobs/3"].blockers.add(reason="GPUS", message="not enough\nfree devices")
    assert call("queue") == 0
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["1", "3", "4", "2"]
    assert lines[1].endswith("(GPUS) not enough free devices")
    assert lines[3].endswith("(2 ahead)")


def test_a_truncated_queue_says_so_and_lists_jobs_with_a_gang(call: Call, master: CannedMaster, capsys: Output) -> None:
    for number in range(5, 1, -1):
        master.jobs[f"jobs/{number}"] = job_pb2.Job(name=f"jobs/{number}", state=job_pb2.Job.STATE_PENDING)
    # newest first, as a master lists them
    running_job(master)
    assert call("queue", "--limit", "3") == 0
    told = capsys.readouterr()
    assert [line.split()[0] for line in told.out.splitlines()[1:]] == ["1", "4", "5"]
    assert told.err.startswith("only 3 are listed, ")
    assert call("queue", "--limit", "5") == 0
    assert capsys.readouterr().err == ""


def test_on_a_terminal_each_row_is_one_line_and_the_widest_columns_give_way() -> None:
    assert fitted([3, 20, 5], 80) == [3, 20, 5]
    assert fitted([3, 200, 30], 80) == [3, 43, 30]
    assert fitted([3, 200, 100], 64) == [3, 28, 29]
    assert fitted([10, 10], 1) == [6, 6]


def test_signs_that_take_two_columns_do_not_shift_the_others() -> None:
    head, wide, narrow = aligned(("NAME", "USER"), [("训练", "ann"), ("ünï", "bob")]).splitlines()
    assert (head, wide, narrow) == ("NAME  USER", "训练  ann", "ünï   bob")


_HOSTILE = "a\x1b]0;b\x07\x1b[2J\x9b\u202ec\nd"


@pytest.mark.parametrize("command", ["queue", "show 1", "why 1", "history 1", "events 1", "nodes", "top --once"])
def test_what_others_wrote_never_commands_the_terminal(
    call: Call, master: CannedMaster, capsys: Output, command: str
) -> None:
    job = running_job(master)
    job.spec.command[:] = ["python", _HOSTILE]
    job.spec.display_name = job.spec.working_directory = job.trouble = _HOSTILE
    master.explanation.job.CopyFrom(job)
    master.events = [
        job_pb2.Event(sequence=1, subject="jobs/1", kind="job_submitted", message=_HOSTILE, cause=f"user:{_HOSTILE}"),
        job_pb2.Event(sequence=2, subject="jobs/1", kind="job_failed", message=_HOSTILE, cause=f"user:{_HOSTILE}"),
    ]
    kind = resources_pb2.ConfigurationSet(name="v4", devices=4, sockets=[resources_pb2.Socket(millicores=8_000)])
    node = node_pb2.Node(
        name="nodes/n1", state=node_pb2.Node.STATE_DRAINING, state_reason=_HOSTILE, configuration_set="v4"
    )
    master.nodes = node_pb2.ListNodesResponse(nodes=[node], configuration_sets=[kind])
    assert call(*command.split()) == 0
    told = capsys.readouterr()
    assert not set(told.out + told.err) & set("\x1b\x07\x9b\u202e")
    assert "a\\x1b]0;b\\x07" in told.out, "but it can be seen what they wrote"


def test_an_error_that_repeats_what_was_given_never_commands_the_terminal(call: Call, capsys: Output) -> None:
    assert call("submit", "--directory", "/no/\x1b[31mred", "--", "x") == 2
    assert "--directory: /no/\\x1b[31mred is not a directory here" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ("submit", "--", "python", "\udcff.py"),
        ("submit", "--name", "\udcff", "--", "x"),
        ("submit", "--env", "A=\udcff", "--", "x"),
        ("submit", "--request-id", "\udcff", "--", "x"),
        ("cancel", "1", "--reason", "\udcff"),
        ("queue", "--user", "\udcff"),
        ("show", "\udcff"),
        ("history", "--after", str(1 << 70)),
        ("logs", "1", "--offset", str(1 << 70)),
    ],
)
def test_what_the_wire_cannot_carry_is_wrong_usage_and_no_bug(
    call: Call, capsys: Output, arguments: tuple[str, ...]
) -> None:
    assert call(*arguments) == 2
    assert "bug" not in capsys.readouterr().err


def test_a_directory_that_is_gone_is_said(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert call("submit", "--", "x") == 2
    assert "the present directory is gone" in capsys.readouterr().err


def test_a_choice_that_was_not_made_is_null(call: Call, capsys: Output) -> None:
    assert call("submit", "--dry-run", "--json", "--", "x") == 0
    assert json.loads(capsys.readouterr().out)["preemptible"] is None


def test_a_followed_job_that_fails_makes_the_command_fail(call: Call, master: CannedMaster, capsys: Output) -> None:
    job = running_job(master)
    master.logs = {0: b"bye\n", 1: b""}
    job.state = job_pb2.Job.STATE_FAILED
    job.failure.reason, job.failure.message = "EXIT", "rank 0 exited with code 3"
    assert call("wait", "1") == 1
    assert call("logs", "-f", "--all", "1") == 0
    assert "0: bye" in capsys.readouterr().out


def test_logs_are_read_by_role(call: Call, master: CannedMaster, capsys: Output) -> None:
    job = running_job(master)
    del job.spec.roles[:]
    job.spec.roles.add(name="ps", tasks=1)
    job.spec.roles.add(name="worker", tasks=2)
    job.spec.role_programs.add(role="ps", command=["serve", "--all"])
    master.logs = {0: b"serving\n", 1: b"first\n", 2: b"second\n"}
    assert call("logs", "1", "--all") == 0
    assert capsys.readouterr().out == "    ps 0: serving\nworker 0: first\nworker 1: second\n"
    assert call("logs", "1", "--role", "worker", "--rank", "1") == 0
    assert capsys.readouterr().out == "second\n"
    assert call("logs", "1", "--role", "worker", "--all") == 0
    assert capsys.readouterr().out == "worker 0: first\nworker 1: second\n"
    assert call("logs", "1", "--role", "worker", "--rank", "2") == 2
    assert "2 tasks of role worker" in capsys.readouterr().err
    assert call("logs", "1", "--role", "chief") == 2
    assert "it has ps, worker" in capsys.readouterr().err
    assert call("show", "1") == 0
    assert "serve --all" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("times_of", "run_s", "shown"),
    [
        ({}, 0, "50s"),
        ({"end": 140}, 0, ""),
        ({"start": 120, "end": 140}, 0, "20s"),
        ({"start": 120, "end": 140}, 12, "12s"),
        ({"start": 120, "run": 120}, 0, "30s"),
        ({"start": 110, "run": 140}, 12, "22s"),
        ({"start": 110}, 12, "12s"),
    ],
    ids=["waits", "never ran", "short", "ended", "runs", "runs again", "suspended"],
)
def test_the_time_of_a_job_is_how_long_it_ran_without_suspensions_or_how_long_it_has_waited(
    times_of: dict[str, float], run_s: float, shown: str
) -> None:
    job = job_pb2.Job(create_time=times.timestamp(100))
    for name, second in times_of.items():
        getattr(job, "running_since_time" if name == "run" else f"{name}_time").CopyFrom(times.timestamp(second))
    if run_s:
        job.run_duration.CopyFrom(times.duration(run_s))
    assert job_table.elapsed(job, now=150.0) == shown


def test_following_a_pending_job_prints_its_reason(
    call: Call, master: CannedMaster, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_QUIET_S", 0.2)
    job = master.jobs["jobs/1"] = job_pb2.Job(name="jobs/1", state=job_pb2.Job.STATE_PENDING)
    master.explanation.job.CopyFrom(job)
    master.explanation.blockers.add(reason="GPUS", message="needs 9, there are 8")
    master.logs = {0: b""}
    threading.Timer(1.0, lambda: setattr(job, "state", job_pb2.Job.STATE_CANCELLED)).start()
    assert call("logs", "1", "-f") == 0
    assert capsys.readouterr().err == "ganger: job 1 is pending, GPUS: needs 9, there are 8\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.JobNotFound("x"), 3),
        (errors.LevelUnavailable("x"), 4),
        (errors.NotSupported("x"), 4),
        (errors.QueueFull("x"), 4),
        (errors.JobNotYours("x"), 6),
        (errors.TokenInvalid("x"), 6),
        (errors.NameInvalid("x"), 2),
        (RuntimeError("x"), 7),
    ],
)
def test_exit_codes_follow_the_error(
    call: Call, master: CannedMaster, capsys: Output, error: Exception, code: int
) -> None:
    master.failing = error
    assert call("show", "1") == code
    text = capsys.readouterr().err
    assert text.startswith("ganger: ")
    assert "Traceback" not in text


@pytest.mark.parametrize("name", ["x", "jobs/x", "nodes/1", "-1x", "0"])
def test_a_bad_job_name_is_a_usage_error(call: Call, name: str, capsys: Output) -> None:
    assert call("show", "--", name) == 2
    assert f"{name!r} is not a job: give its number" in capsys.readouterr().err


def test_an_array_where_a_job_is_to_be_named_is_wrong_usage(call: Call, master: CannedMaster) -> None:
    add_members(master)
    assert [call(*command, "1") for command in (("suspend",), ("move",), ("resume",))] == [2, 2, 2]
    assert call("suspend", "9") == 3


def test_a_certificate_that_does_not_do_is_not_permitted(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GANGER_TLS", str(tmp_path / "none"))
    assert run(["--master", "localhost:1", "queue"]) == 6
    assert "there is no" in capsys.readouterr().err


def test_a_connection_dropped_without_tls_suggests_a_certificate(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GANGER_TLS", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def hang_up() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    connection.recv(1)
                    connection.close()

        threading.Thread(target=hang_up, daemon=True).start()
        assert run(["--master", f"127.0.0.1:{listening.getsockname()[1]}", "queue"]) == 5
        listening.shutdown(socket.SHUT_RDWR)
    assert "or does it ask for a certificate?" in capsys.readouterr().err


def test_an_unreachable_master_has_an_exit_code_of_its_own(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GANGER_MASTER", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert run(["queue"]) == 5
    assert run(["--master", f"unix:{tmp_path}/absent", "queue"]) == 5
    assert run(["--master", "what ever:x", "queue"]) == 5
    assert "Traceback" not in capsys.readouterr().err


def test_a_bug_is_a_number_with_the_details_in_a_file(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("ganger.wire.endpoints.find_endpoint", lambda master: 1 // 0)
    monkeypatch.setattr("ganger.wire.master_connection.find_endpoint", lambda master: 1 // 0)
    assert run(["queue"]) == 7
    text = capsys.readouterr().err
    assert "ZeroDivisionError" in text
    log = tmp_path / "ganger" / "cli-errors.log"
    assert "Traceback" in log.read_text()
    assert str(log) in text


def test_a_job_that_starts_has_no_pids_yet(call: Call, master: CannedMaster, capsys: Output) -> None:
    gang = running_job(master).gang
    gang.pids[:] = [0, 0]
    assert call("show", "1") == 0
    assert "pids" not in capsys.readouterr().out
    gang.pids[:] = [7, 0]
    assert call("show", "1") == 0
    assert "7 -" in capsys.readouterr().out


def test_the_version_of_the_client_needs_no_master(capsys: Output) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.strip()


def test_version_speaks_of_both_sides(call: Call, capsys: Output) -> None:
    assert call("version", "--json") == 0
    assert json.loads(capsys.readouterr().out)["master"] == "9.9"


def test_version_names_the_nodes_whose_daemons_have_another_version_than_the_master(
    call: Call, master: CannedMaster, capsys: Output
) -> None:
    versions = {"n1": "9.9", "n2": "9.8", "n3": "9.9", "n4": "9.8", "n5": ""}
    nodes = [node_pb2.Node(name=f"nodes/{name}", version=version) for name, version in versions.items()]
    master.nodes = node_pb2.ListNodesResponse(nodes=nodes)
    assert call("version") == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "master 9.9",
        "daemon 9.8 on 2 nodes (n2 n4)",
        "daemon 9.9 on 2 nodes",
    ]
    assert call("version", "--json") == 0
    assert json.loads(capsys.readouterr().out)["daemons"] == {"n1": "9.9", "n2": "9.8", "n3": "9.9", "n4": "9.8"}


def test_a_line_that_is_wrapped_runs_with_the_shell(call: Call, master: CannedMaster, capsys: Output) -> None:
    assert call("submit", "--gpus", "2", "--wrap", "./prepare && python train.py") == 0
    assert list(master.requests[-1].spec.command) == ["sh", "-c", "./prepare && python train.py"]
    assert master.requests[-1].spec.display_name == "wrap"
    assert call("submit", "--name", "mine", "--wrap", "true") == 0
    assert master.requests[-1].spec.display_name == "mine"
    capsys.readouterr()
    assert call("submit", "--wrap", "true", "--", "false") == 2
    assert "give --wrap or a command, not both" in capsys.readouterr().err
    assert call("submit", "--wrap", " ") == 2
    assert "--wrap is empty" in capsys.readouterr().err
    assert call("submit", "--", "./prepare && python train.py") == 2
    assert "COMMAND: './prepare && python train.py' is one word, and no shell runs it" in capsys.readouterr().err
