"""What is wrong is said in one clear sentence, with the documented exit code, and nothing is lost by it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ganger.v1.job_service_pb2_grpc import JobServiceStub
from ganger.wire.channels import open_channel
from ganger.wire.endpoints import find_endpoint
from kit.cluster import GANGER, NO_PRELOAD, Cluster
from kit.disks import fill, small_disk
from kit.shell import Shell
from kit.waiting import eventually
from system.harness import Run

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes without cgroups."""
    directory = tmp_path_factory.mktemp("bad")
    state = {"XDG_STATE_HOME": str(directory / "state")}
    with Cluster(directory, daemon_options=("--cgroups", "none"), environment=state) as running:
        yield running
        assert running.master.alive, running.story()
        assert all(daemon.alive for daemon in running.daemons.values()), running.story()
        assert "Traceback" not in running.story(10_000)


@pytest.fixture(scope="module")
def shell(cluster: Cluster) -> Shell:
    return Shell(cluster.master_directory)


def refused(shell: Shell, code: int, *arguments: str) -> str:
    """What `ganger ARGUMENTS` says on stderr; nothing went to stdout and no traceback of ours was shown."""
    done = shell.try_(*arguments)
    assert (done.code, done.out) == (code, ""), done
    assert done.err.startswith("ganger: ")
    assert "Traceback" not in done.err
    return done.err


def program(cluster: Cluster, *arguments: str, code: int, token: str | None = None) -> subprocess.CompletedProcess[str]:
    """A program or client of its own, which must end with this exit code, a sentence, and no traceback."""
    environment = {**cluster.master.environment}
    if token is not None:
        environment["GANGER_TOKEN"] = token
    done = subprocess.run(
        [*GANGER, *arguments], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == code, done
    assert done.stderr.startswith("ganger: ")
    assert "Traceback" not in done.stderr + done.stdout
    return done


def address(cluster: Cluster) -> str:
    return str(json.loads((cluster.master_directory / "endpoint.json").read_text())["address"])


def ended(shell: Shell, *submission: str) -> tuple[str, dict[str, object]]:
    """Submits, waits for the end, and returns the job's number and last state."""
    job = shell.submit(*submission)
    assert shell.try_("wait", job, "--timeout", "60s").code in (0, 1)
    return job, shell.json("show", job)


# descriptions


def test_all_wrong_flags_are_named_at_once(shell: Shell) -> None:
    said = refused(
        shell, 2, *("submit", "--gpus", "many", "--memory", "lots", "--time=-3", "--locality", "moon", "--", "true")
    )
    assert re.findall(r"--\w+", said) == ["--gpus", "--memory", "--locality", "--time"]


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        ("yaml", "colour: red\ncommand: 7\nroles:\n- tasks: many\n  gpus: -1\n"),
        ("toml", 'colour = "red"\ncommand = 7\n[[roles]]\ntasks = "many"\ngpus = -1\n'),
    ],
)
def test_all_mistakes_of_a_file_are_named_with_their_paths(
    shell: Shell, tmp_path: Path, suffix: str, text: str
) -> None:
    path = tmp_path / f"job.{suffix}"
    path.write_text(text)
    said = refused(shell, 2, "submit", "--file", str(path))
    paths = {line.strip().partition(": ")[0] for line in said.splitlines()[1:]}
    assert {"colour", "command", "roles[0].tasks", "roles[0].gpus"} <= paths


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("job.yaml", "gpus: [\n", "is not YAML: expected the node content, but found '<stream end>' (at line 2"),
        ("job.toml", "gpus = \n", "is not TOML: Invalid value (at line 1"),
        ("job.yaml", "- a\n- list\n", "must be a mapping"),
        ("job.json", "{}", "must end in .yaml, .yml or .toml"),
        ("job.yaml", None, "no such file or directory"),
    ],
)
def test_a_file_that_is_no_description_is_told_with_the_place(
    shell: Shell, tmp_path: Path, name: str, text: str | None, why: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    assert why in refused(shell, 2, "submit", "--file", str(tmp_path / name))


def test_a_file_of_bytes_is_not_text(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_bytes(b"\xff\xfe\x00")
    assert "cannot read the job file" in refused(shell, 2, "submit", "--file", str(tmp_path / "job.yaml"))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--gpus", "9"), "the largest that fits has 8 devices"),
        (("--gpus", "5", "--locality", "node"), "the largest that fits has 4 devices"),
        (("--gpus", "8", "--memory", "3G"), "the largest that fits has 4 devices"),
        (("--gpus", "8", "--memory", "900G"), "not enough free host memory"),
        (("--gpus", "8", "--cpus-per-gpu", "500"), "cores"),
        (("--gpu-type", "unheard-of"), "no node has unheard-of"),
    ],
)
def test_a_gang_that_could_never_fit_is_refused_with_the_largest_that_would(
    shell: Shell, options: tuple[str, ...], why: str
) -> None:
    told = refused(shell, 4, "submit", *options, "--", "true")
    assert why in told
    assert refused(shell, 4, "submit", "--dry-run", *options, "--", "true") == told


def test_what_is_too_large_for_a_message_is_refused_before_it_is_sent(shell: Shell) -> None:
    environment = [option for number in range(5) for option in ("--env", f"BIG{number}={'x' * 60_000}")]
    assert "must be at most 262144 bytes" in refused(shell, 2, "submit", *environment, "--", "true")


def test_an_oversize_message_is_refused_by_the_master_too(cluster: Cluster) -> None:
    import grpc
    from ganger.v1 import job_pb2, job_service_pb2

    endpoint = find_endpoint(str(cluster.master_directory))
    spec = job_pb2.JobSpec(command=["x" * (5 << 20)])
    with open_channel(endpoint, [("grpc.max_send_message_length", -1)]) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            JobServiceStub(channel).CreateJob(job_service_pb2.CreateJobRequest(spec=spec))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


# names, tokens, states


@pytest.mark.parametrize("command", ["show", "logs", "why", "suspend", "resume", "move", "repin", "cancel", "wait"])
def test_an_unknown_job_is_named(shell: Shell, command: str) -> None:
    assert "there is no jobs/4711" in refused(shell, 3, command, "4711")
    assert "'x7' is not a job: give its number" in refused(shell, 2, command, "x7")


@pytest.mark.parametrize("command", ["drain", "cordon", "uncordon", "lost"])
def test_an_unknown_node_is_named(shell: Shell, command: str) -> None:
    reason = ("--reason", "test") if command in ("drain", "cordon") else ("--yes",) if command == "lost" else ()
    assert "there is no nodes/nowhere" in refused(shell, 3, command, "nowhere", *reason)


def test_an_order_to_a_job_that_has_ended_is_refused(shell: Shell) -> None:
    job, _ = ended(shell, "--", "true")
    orders = {
        "suspend": "suspended",
        "resume": "resumed",
        "move": "moved",
        "repin": "given other cores",
        "cancel": "cancelled",
        "update --priority 3": "changed",
    }
    for line, order in orders.items():
        told = refused(shell, 4, *line.split(), job)
        assert told == f"ganger: job {job} has succeeded; it cannot be {order}\n"


@pytest.mark.parametrize("token", ["", "wrong"])
def test_a_missing_or_wrong_token_opens_nothing(cluster: Cluster, token: str) -> None:
    done = program(cluster, "--master", address(cluster), "queue", token=token, code=6)
    assert "token" in done.stderr


def test_no_master_at_the_address_is_said_with_what_to_do(cluster: Cluster, tmp_path: Path) -> None:
    done = program(cluster, "--master", f"unix:{tmp_path}/missing", "queue", code=5)
    assert "is it running? `ganger up` starts one here" in done.stderr


# jobs that cannot run


def test_a_command_that_is_not_there_fails_its_job_by_name(shell: Shell) -> None:
    _, job = ended(shell, "--", "no-such-command-anywhere")
    assert job["state"] == "FAILED"
    assert "cannot execute 'no-such-command-anywhere': no such file or directory" in str(job["failure"])
    assert (job["failures"], job["preemptions"]) == (1, 0), "another try would meet the same"


def test_a_directory_that_is_gone_on_the_node_fails_its_job_by_name(shell: Shell, tmp_path: Path) -> None:
    filler = shell.submit("--gpus", "8", "--", "sleep", "600")
    gone = tmp_path / "gone"
    gone.mkdir()
    job = shell.submit("--gpus", "8", "--directory", str(gone), "--", "true")
    gone.rmdir()
    shell("cancel", filler)
    assert shell.try_("wait", job, "--timeout", "60s").code == 1
    assert f"working directory {gone} does not exist on this node" in shell("show", job)


def test_a_script_that_raises_leaves_its_traceback_in_the_log(shell: Shell, tmp_path: Path) -> None:
    script = tmp_path / "raises.py"
    script.write_text("raise RuntimeError('boom on purpose')\n")
    job, shown = ended(shell, "--", sys.executable, str(script))
    assert shown["state"] == "FAILED"
    assert "rank 0 exited with code 1" in str(shown["failure"])
    log = shell("logs", job)
    assert 'raises.py", line 1, in <module>' in log
    assert log.endswith("RuntimeError: boom on purpose\n")
    assert "ganger/" not in log, "only the user's own frames"


def test_a_script_that_cannot_be_read_is_told_in_the_log(shell: Shell, tmp_path: Path) -> None:
    job, shown = ended(shell, "--", sys.executable, str(tmp_path / "missing.py"))
    assert shown["state"] == "FAILED"
    assert "No such file or directory" in shell("logs", job)


def test_a_followed_job_that_fails_says_so_with_exit_code_1(shell: Shell) -> None:
    done = shell.try_("submit", "--follow", "--", "sh", "-c", "echo said; exit 3")
    assert done.code == 1
    assert "said\n" in done.out
    assert "failed: EXIT, rank 0 exited with code 3" in done.err


# programs that cannot start


def test_a_state_directory_has_one_master_and_one_daemon(cluster: Cluster, tmp_path: Path) -> None:
    second = program(cluster, "master", "--state-dir", str(cluster.master_directory), code=4)
    assert f"another master (pid {cluster.master.process and cluster.master.process.pid})" in second.stderr
    options = ("--state-dir", str(cluster.directory / "n0"), "--run-dir", str(cluster.run_directory / "n9"))
    other = program(cluster, "daemon", "--node", "n9", "--master", str(cluster.master_directory), *options, code=4)
    assert "another daemon" in other.stderr


def test_a_port_in_use_is_named(cluster: Cluster, tmp_path: Path) -> None:
    done = program(cluster, "master", "--state-dir", str(tmp_path / "m"), "--listen", address(cluster), code=4)
    assert f"cannot listen on {address(cluster)}: in use" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("code", "options", "why"),
    [
        (2, ("--listen", "0.0.0.0:0"), "without certificates"),
        (2, ("--policy", "wishful"), "policy 'wishful'"),
        (2, ("--database-url", "nonsense"), "database URL"),
        (2, ("--lost-after", "soon"), "soon"),
        (5, ("--database-url", "sqlite:////dev/null/ganger.db"), "/dev/null/ganger.db"),
    ],
)
def test_a_master_that_is_told_what_cannot_be_names_it(
    cluster: Cluster, tmp_path: Path, code: int, options: tuple[str, ...], why: str
) -> None:
    assert why in program(cluster, "master", "--state-dir", str(tmp_path / "m"), *options, code=code).stderr


def test_a_daemon_that_is_told_what_cannot_be_names_it(cluster: Cluster, tmp_path: Path) -> None:
    options = ("--state-dir", str(tmp_path / "d"), "--master", str(cluster.master_directory))
    assert "cannot name a node" in program(cluster, "daemon", *options, "--node", "a/b", code=2).stderr
    far = ("--run-dir", str(tmp_path / ("far" * 30)))
    assert "is too long for sockets" in program(cluster, "daemon", *options, "--node", "n9", *far, code=2).stderr


@pytest.mark.parametrize(
    ("name", "content", "code", "why"),
    [("ganger.db", b"this is not a database" * 500, 4, "database"), ("token", b"", 4, "the token")],
)
def test_a_state_directory_that_is_damaged_is_named_and_left_alone(
    cluster: Cluster, tmp_path: Path, name: str, content: bytes, code: int, why: str
) -> None:
    state = tmp_path / "m"
    state.mkdir(mode=0o700)
    (state / name).write_bytes(content)
    (state / name).chmod(0o600)
    assert why in program(cluster, "master", "--state-dir", str(state), code=code).stderr
    assert (state / name).read_bytes() == content


# disks


@pytest.mark.torch
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_and_said(cluster: Cluster, shell: Shell) -> None:
    run = Run.submit(cluster, "damaged", "--max-failures", "1", steps=400)
    stops = []
    for _ in range(2):
        run.wait_step(run.last_step() + 2)
        shell("suspend", run.id, "--level", "checkpoint")
        stops.append(run.last_step())
        if len(stops) == 1:
            shell("resume", run.id)
    older, newer = sorted((cluster.storage / str(run.show()["uid"]) / "checkpoints").glob("*-*/rank-0.shard"))
    damage(newer)
    shell("resume", run.id)
    run.wait_step(stops[1] + 1)
    steps = [line.step for line in run.lines(0)]
    assert steps[stops[1] :][:2] == [stops[0] + 1, stops[0] + 2], "it went back to the good one, not to the beginning"
    assert f"checkpoint {newer.parent} cannot be restored: rank-0.shard" in shell("events", run.id)
    # with no good one left it must not start anew, and the files stay for a repair
    damage(older)
    os.kill(run.lines(0)[-1].pid, 9)
    assert shell.try_("wait", run.id, "--timeout", "60s").code == 1
    shown = shell("show", run.id)
    assert "NO_CHECKPOINT" in shown
    assert str(older.parent) in shown
    assert older.exists()
    assert newer.exists()


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)


@pytest.mark.torch
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_job_whose_checkpoint_finds_no_room_runs_on_and_says_why(cluster: Cluster, shell: Shell) -> None:
    run = Run.submit(cluster, "full", steps=400)
    run.wait_step(2)
    checkpoints = cluster.storage / str(run.show()["uid"]) / "checkpoints"
    checkpoints.mkdir(parents=True)
    with small_disk(checkpoints, "1m") as filler:
        fill(filler)
        said = refused(shell, 4, "suspend", run.id, "--level", "checkpoint")
        assert re.search(r"is (starting|running): STORAGE_FULL: rank 0: .*no space left on device; .* bytes free", said)
        assert "STORAGE_FULL" in shell("show", run.id)
        assert "STORAGE_FULL" in shell("why", run.id)
        assert "suspend_refused" in shell("events", run.id)
        run.wait_step(run.last_step() + 2)
        filler.unlink()
        shell("suspend", run.id, "--level", "checkpoint")
        assert len(list(checkpoints.glob("*-*/MANIFEST.json"))) == 1
        assert not list(checkpoints.glob("*.tmp"))
        assert "STORAGE_FULL" not in shell("show", run.id)
        shell("cancel", run.id)
    steps = [line.step for line in run.lines(0)]
    assert steps == list(range(1, len(steps) + 1)), "no step was lost or done twice"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_node_whose_disk_is_full_fails_no_job_that_can_run_elsewhere(tmp_path: Path) -> None:
    with Cluster(tmp_path, daemon_options=NO_PRELOAD) as cluster:
        shell, jobs = Shell(cluster.master_directory), tmp_path / "n0" / "jobs"
        jobs.mkdir(exist_ok=True)
        with small_disk(jobs, "64k") as filler:
            fill(filler)
            # The second has its first place on either node, as the first may still lie on the other.
            numbers = [shell.submit("--gpus", "4", "--", "true") for _ in range(4)]
            for number in numbers:
                done = shell.try_("wait", number, "--timeout", "60s")
                assert done.code == 0, shell("events") + shell("why", number) + shell("nodes")
            (bad,) = [node for node in shell.json("nodes")["nodes"] if node["name"] == "nodes/n0"]
            assert bad["launch_failures"] > 0
            assert "no space left on device" in shell("nodes")
            filler.unlink()
            assert shell.try_("wait", shell.submit("--gpus", "8", "--", "true"), "--timeout", "60s").code == 0
        assert "failed" not in shell("nodes")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_full_disk_under_the_database_is_said_and_loses_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "master"
    directory.mkdir()
    with small_disk(directory, "4m") as filler, Cluster(tmp_path, nodes=0) as cluster:
        shell = Shell(cluster.master_directory)
        kept = shell.submit("--", "true")
        fill(filler)
        large = ("--env", f"BIG={'x' * 60_000}", "--", "true")
        accepted = {kept}
        # What the database had set aside for itself takes some more.
        while (done := shell.try_("submit", *large)).code == 0:
            accepted.add(done.out.split()[-1])
        assert "the disk is full: free some space" in done.err
        filler.unlink()
        eventually(lambda: shell.try_("submit", "--", "true").code == 0, what="it accepts jobs again")
        listed = {job["name"].removeprefix("jobs/") for job in shell.json("queue", "--all")}
        assert accepted <= listed
        cluster.master.kill()
        cluster.start_master()
        assert listed <= {job["name"].removeprefix("jobs/") for job in shell.json("queue", "--all")}
