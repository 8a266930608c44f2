"""Jobs of two accounts on one node of root: each runs as its own, is stopped, saved and taken over as any other job,
and can do nothing to the other, to the daemon or to the node."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from daemon.account_kit import Accounted, run
from daemon.image_kit import needs_images
from daemon.kit import Intents, Observed, log_of, with_changes
from ganger.agent.v1 import agent_pb2
from ganger.injob.launcher.client import Launcher
from ganger.injob.launcher.namespaces import LINKS
from ganger.injob.process_identity import stands_still, start_ticks, user_of
from ganger.v1 import job_pb2
from ganger_daemon.cgroups.contract import Variant
from ganger_daemon.claimed_directories import DaemonError
from ganger_daemon.node import node_context
from ganger_daemon.node.launchers import children_of
from ganger_daemon.node.log_store import held_bytes
from kit.accounts import makes_accounts
from kit.waiting import eventually
from rpc.kit import until

IS_IN_TMP = Path(sys.prefix).resolve().is_relative_to("/tmp")
pytestmark = [pytest.mark.system, makes_accounts]
HOSTILE = Path(__file__).parent / "hostile_account.py"
# Runs a script once its first argument is there.
WAITING = """
import os, runpy, sys, time
del sys.argv[0]
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
runpy.run_path(sys.argv[0])
"""


def groups_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cgroup").read_text()


def test_a_job_runs_as_its_user_with_the_accounts_groups_home_and_umask_and_gains_no_rights() -> None:
    async def story(these: Accounted) -> None:
        await these.daemon()
        words = "id -u; id -g; umask; echo $HOME $USER; grep NoNewPrivs /proc/self/status; echo again >> /dev/stdout"
        gang = these.gang(these.ann, 1, ["/bin/sh", "-c", words])
        await these.made.master.want("n1", gang)
        ended = await these.phase(1, Observed.PHASE_ENDED)
        assert ended.outcome.kind == agent_pb2.Outcome.KIND_DONE, ended
        assert log_of(these.made.directory, "n1", gang.job_uid, 0, 1) == [
            str(these.ann.uid),
            str(these.ann.gid),
            "0077",
            f"{these.ann.home} {these.ann.name}",
            "NoNewPrivs:\t1",
            "again",
        ]

    run(story)


@pytest.mark.parametrize("certified", [True, False])
def test_a_daemon_of_root_with_certificates_runs_jobs_as_their_users_unless_it_is_told_otherwise(
    certified: bool,
) -> None:
    async def story(these: Accounted) -> None:
        await these.daemon(accounts="")
        request = these.made.master.book("n1").request
        assert request is not None
        assert request.capabilities["switch_user"] == ("accounts" if certified else "no")
        gang = these.gang(these.ann, 1, ["/bin/sh", "-c", "id -u"])
        if not certified:
            gang.user = "root"
        await these.made.master.want("n1", gang)
        assert (await these.phase(1, Observed.PHASE_ENDED)).outcome.kind == agent_pb2.Outcome.KIND_DONE
        ran_as = str(these.ann.uid if certified else 0)
        assert log_of(these.made.directory, "n1", gang.job_uid, 0, 1) == [ran_as]

    run(story, certified=certified)


@pytest.mark.parametrize("user", ["no-such-user", "root", "daemon"])
def test_a_user_without_an_account_that_may_run_jobs_is_refused_by_name(user: str) -> None:
    async def story(these: Accounted) -> None:
        await these.daemon()
        gang = these.tiny(these.ann, 1)
        gang.user = user
        await these.made.master.want("n1", gang)
        ended = await these.phase(1, Observed.PHASE_ENDED)
        assert ended.outcome.kind == agent_pb2.Outcome.KIND_LAUNCH_FAILED
        assert ended.outcome.message.startswith(
            f"CANNOT_SWITCH_USER: no account of this node runs the jobs of {user!r}"
        )

    run(story)


def test_a_node_whose_directories_accounts_cannot_reach_does_not_start_with_accounts() -> None:
    async def story(these: Accounted) -> None:
        these.made.directory.chmod(0o700)
        said = r"/tmp/gd\w+ is closed to other accounts \(mode 0700\); .* \(--accounts own\)"
        with pytest.raises(DaemonError, match=said):
            await these.daemon()
        these.made.directory.chmod(0o711)
        shared = Path("/dev/shm") / these.made.directory.name
        with pytest.raises(DaemonError, match=r"is in /dev/shm, which jobs of other accounts have of their own"):
            await these.made.daemon("n2", accounts="system", run_directory=shared)
        shutil.rmtree(shared)

    run(story)


def test_a_job_of_an_account_rests_at_every_level_and_goes_on_from_its_checkpoint() -> None:
    async def story(these: Accounted) -> None:
        await these.daemon()
        gang = these.tiny(these.ann, 1)
        await these.made.master.want("n1", gang)
        await these.phase(1, Observed.PHASE_RUNNING)
        sequence = 1
        for level in (job_pb2.SUSPEND_LEVEL_PAUSE, job_pb2.SUSPEND_LEVEL_OFFLOAD):
            parked = await these.parked(gang, sequence + 1, level)
            assert parked.level == level
            before, sequence = len(these.steps(gang)), sequence + 2
            await these.made.master.want("n1", with_changes(gang, sequence))
            await until(lambda known=before: len(these.steps(gang)) > known)
        saved = await these.parked(gang, sequence + 1, job_pb2.SUSPEND_LEVEL_CHECKPOINT)
        assert saved.checkpoint.step == saved.stop_step
        place = these.made.storage / gang.job_uid
        assert [(path.stat().st_uid, oct(path.stat().st_mode & 0o7777)) for path in (place, place / "checkpoints")] == [
            (0, "0o711"),
            (these.ann.uid, "0o700"),
        ]
        await these.made.master.want("n1", with_changes(gang, sequence + 2, intent=Intents.INTENT_STOP))
        await these.phase(1, Observed.PHASE_ENDED)
        await these.made.master.forget("n1", 1)
        await these.made.master.until_absent("n1", 1)
        again = these.tiny(these.ann, 2, steps=int(saved.stop_step) + 5, uid=gang.job_uid)
        again.restore.checkpoint_path, again.restore.step = saved.checkpoint.path, saved.checkpoint.step
        await these.made.master.want("n1", again)
        ended = await these.phase(2, Observed.PHASE_ENDED)
        assert ended.outcome.kind == agent_pb2.Outcome.KIND_DONE, ended
        assert these.steps(again)[0] == str(saved.stop_step + 1)
        # nothing of the first part is left but its log
        for directory in ("jobs", "work"):
            left = these.made.directory / "n1" / directory / gang.job_uid
            eventually(lambda at=left: [path.name for path in at.iterdir()] == ["2"], what=f"only 2 in {directory}")

    run(story)


def test_a_job_that_was_saved_before_there_were_accounts_goes_on_as_its_users() -> None:
    async def story(these: Accounted) -> None:
        await these.daemon(accounts="own")
        gang = these.tiny(these.ann, 1)
        gang.user = "root"
        await these.made.master.want("n1", gang)
        await these.phase(1, Observed.PHASE_RUNNING)
        saved = await these.parked(gang, 2, job_pb2.SUSPEND_LEVEL_CHECKPOINT)
        await these.made.master.want("n1", with_changes(gang, 3, intent=Intents.INTENT_STOP))
        await these.phase(1, Observed.PHASE_ENDED)
        await these.made.stop_daemon("n1")
        await these.made.master.forget("n1", 1)
        await these.daemon()
        again = these.tiny(these.ann, 2, steps=int(saved.stop_step) + 5, uid=gang.job_uid)
        again.restore.checkpoint_path, again.restore.step = saved.checkpoint.path, saved.checkpoint.step
        await these.made.master.want("n1", again)
        ended = await these.phase(2, Observed.PHASE_ENDED)
        assert ended.outcome.kind == agent_pb2.Outcome.KIND_DONE, ended
        assert these.steps(again)[0] == str(saved.stop_step + 1)

    run(story)


def test_the_next_daemon_and_the_next_launcher_take_a_job_of_an_account_over() -> None:
    async def story(these: Accounted) -> None:
        await these.daemon()
        gang = these.tiny(these.ann, 1)
        await these.made.master.want("n1", gang)
        pid = (await these.phase(1, Observed.PHASE_RUNNING)).ranks[0].pid
        await these.made.stop_daemon("n1")
        (path,) = these.made.directory.glob(f"r-n1/launchers/{these.ann.uid}/*.sock")
        with Launcher(str(path), uid=these.ann.uid) as launcher:
            os.kill(launcher.pid, signal.SIGKILL)
        these.made.master.book("n1").observed.clear()
        await these.daemon()
        adopted = await these.phase(1, Observed.PHASE_RUNNING)
        assert [rank.pid for rank in adopted.ranks] == [pid]
        await these.parked(gang, 2, job_pb2.SUSPEND_LEVEL_CHECKPOINT)
        with Launcher(str(path), uid=these.ann.uid) as launcher:
            assert user_of(launcher.pid) == these.ann.uid
            if these.made.daemons["n1"].host.cgroups.variant is not Variant.NONE:
                assert f"/user-{these.ann.uid}" in groups_of(launcher.pid)

    run(story)


@pytest.mark.parametrize("cgroups", ["auto", "none"])
def test_a_plain_command_of_an_account_stands_still_without_a_daemon_and_goes_on_with_the_next(cgroups: str) -> None:
    async def story(these: Accounted) -> None:
        these.made.master.lost_after = 1.0
        await these.daemon(cgroups=cgroups)
        await these.made.master.want("n1", these.gang(these.ann, 1, ["sleep", "600"]))
        pid = (await these.phase(1, Observed.PHASE_RUNNING)).ranks[0].pid
        await these.made.stop_daemon("n1")
        await until(lambda: stands_still(pid))
        await these.daemon(cgroups=cgroups)
        await until(lambda: not stands_still(pid))

    run(story)


@pytest.mark.torch
def test_two_ranks_of_an_account_meet_at_a_store_of_its_launcher() -> None:
    async def story(these: Accounted) -> None:
        await these.daemon()
        script = "import torch.distributed as d; d.init_process_group('gloo'); d.barrier(); print('met', d.get_rank())"
        gang = these.gang(these.ann, 1, [these.python, "-c", script], ranks=[0, 1], device_mask=3)
        await these.made.master.want("n1", gang)
        ended = await these.phase(1, Observed.PHASE_ENDED)
        assert ended.outcome.kind == agent_pb2.Outcome.KIND_DONE, ended
        assert [log_of(these.made.directory, "n1", gang.job_uid, rank, 1)[-1] for rank in (0, 1)] == ["met 0", "met 1"]

    run(story)


def test_a_launcher_speaks_for_no_process_of_another_account() -> None:
    class Lying:
        """What a launcher of an account may answer: it is that account's program."""

        uid, pid = 12345, os.getpid()

        def list(self) -> list[dict[str, Any]]:
            return [{"name": f"{uuid.uuid4()}/1/rank-0", "kind": "rank", "pid": os.getpid(), "start_ticks": 1}]

    assert children_of(Lying()) == {}  # type: ignore[arg-type]  # all of a launcher that is looked at


LYING_LAUNCHER = """
import json, socket, sys
victim = json.loads(sys.argv[1])
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(sys.argv[sys.argv.index("--socket") + 1])
    listener.listen()
    while True:
        connection, _ = listener.accept()
        for line in connection.makefile("rb"):
            answer = {"id": json.loads(line)["id"], "children": [], **victim}
            connection.sendall(json.dumps(answer).encode() + b"\\n")
"""


def test_a_launcher_that_names_the_daemon_as_its_rank_harms_its_own_job_only() -> None:
    async def story(these: Accounted) -> None:
        await these.daemon()
        home, victim = Path(these.ann.home), {"pid": os.getpid(), "start_ticks": start_ticks(os.getpid())}
        (home / "launcher.py").write_text(LYING_LAUNCHER)
        python = home / "python3"
        python.write_text(f"#!/bin/sh\nexec {these.python} {home}/launcher.py '{json.dumps(victim)}' \"$@\"\n")
        for path, mode in ((home / "launcher.py", 0o644), (python, 0o755)):
            path.chmod(mode)
            os.chown(path, these.ann.uid, these.ann.gid)
        await these.made.master.want("n1", these.gang(these.ann, 1, [str(python), "train.py"]))
        ended = await these.phase(1, Observed.PHASE_ENDED)
        assert ended.outcome.kind == agent_pb2.Outcome.KIND_LAUNCH_FAILED
        assert ended.outcome.message == f"process {os.getpid()} of rank 0 does not run as {these.ann.name}"
        await these.made.master.want("n1", these.tiny(these.bob, 2, steps=3))
        assert (await these.phase(2, Observed.PHASE_ENDED)).outcome.kind == agent_pb2.Outcome.KIND_DONE

    run(story)


def test_memory_that_a_job_of_an_account_takes_in_dev_shm_is_its_own_and_ends_it_alone() -> None:
    async def story(these: Accounted) -> None:
        daemon = await these.daemon()
        if not daemon.host.cgroups.capabilities["memory"].startswith("v"):
            pytest.skip("no memory limits here")
        other = these.tiny(these.bob, 2, device=1)
        await these.made.master.want("n1", other)
        await these.phase(2, Observed.PHASE_RUNNING)
        gang = these.gang(these.ann, 1, ["/bin/sh", "-c", "exec head -c 400M /dev/zero > /dev/shm/much"])
        gang.claim.memory_bytes, gang.claim.arena_bytes = 128 << 20, 0
        await these.made.master.want("n1", gang)
        ended = await these.phase(1, Observed.PHASE_ENDED)
        assert ended.outcome.kind == agent_pb2.Outcome.KIND_OUT_OF_MEMORY, ended
        assert "much" not in os.listdir("/dev/shm")
        before = len(these.steps(other))
        await until(lambda: len(these.steps(other)) > before)

    run(story)


def test_a_job_does_not_keep_the_blocks_that_it_allocates_behind_the_end_of_its_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story(these: Accounted) -> None:
        daemon = await these.daemon()
        monkeypatch.setattr(daemon.host.logs, "_limit", 1 << 20)
        words = "fallocate --keep-size --length 64M /dev/stdout; echo status $?; exec sleep 600"
        gang = these.gang(these.ann, 1, ["/bin/sh", "-c", words])
        await these.made.master.want("n1", gang)
        path = daemon.host.logs.segment_path(gang.job_uid, 0, 1)
        await until(lambda: bool(log_of(these.made.directory, "n1", gang.job_uid, 0, 1)))
        await until(lambda: held_bytes(path) <= 1 << 20)
        # It has had them; the daemon may have taken them back before it could look.
        assert log_of(these.made.directory, "n1", gang.job_uid, 0, 1) == ["status 0"]

    run(story)


DENIED = {"EACCES", "EPERM"}
HIDDEN = {"ENOENT", "ESRCH", "EPERM", "EACCES"}  # /proc shows no process of others; without mounts of its own it denies
# What each attempt ends with, and which rule denies it.
MODES = "modes of the daemon's directories and files"
OWN = "the directory belongs to the account that the other job runs as"
PROC = "/proc of the launcher's mounts, and another uid"
UID = "another uid"
MOUNTS = "mounts of the gang's own"
GROUPS = "control groups belong to root"
CAPABILITIES = "no capabilities"
EXPECTED: dict[str, tuple[set[str], str]] = {
    "read the daemon's identity": (DENIED, MODES),
    "read the node's private key": (DENIED, MODES),
    "read the master's token": (DENIED, MODES),
    "list the daemon's state": (DENIED, MODES),
    "list the daemon's run directory": (DENIED, MODES),
    "read another job's launch, with its environment": (DENIED, MODES),
    "read another job's page": (DENIED, MODES),
    "write another job's page": (DENIED, MODES),
    "remove another job's page": (DENIED, MODES),
    "connect to another job's socket": (DENIED, MODES),
    "read another job's orders": (DENIED, MODES),
    "read what another job reports": (DENIED, OWN),
    "connect to another account's launcher": (DENIED, OWN),
    "listen in the place of another account's launcher": (DENIED, OWN),
    "read another job's log": (DENIED, MODES),
    "write another job's log": (DENIED, MODES),
    "link another job's log": (DENIED, MODES),
    "list another job's checkpoints": (DENIED, OWN),
    "read another job's checkpoint": (DENIED, OWN),
    "write another job's checkpoint": (DENIED, OWN),
    "rename another job's checkpoints": (DENIED, MODES),
    "list another job's images": (DENIED, MODES),
    "list the names of jobs": (DENIED, MODES),
    "list another job's temporary files": (DENIED, OWN),
    "read a file in another job's /tmp": (HIDDEN, MOUNTS),
    "read another job's segment of shared memory": (HIDDEN, MOUNTS),
    "reach another job's /tmp by its process": (HIDDEN, PROC),
    "reach another job's /tmp by the daemon's directory": (DENIED, MODES),
    "make a job's directory on storage": (DENIED, MODES),
    "remove the storage's token": (DENIED, MODES),
    "put code into what other jobs import": (DENIED, MODES),
    "make a directory in the run directory": (DENIED, MODES),
    "make a directory for launchers": (DENIED, MODES),
    "rename its own run directory": (DENIED, MODES),
    "put an order into its own run directory": (DENIED, MODES),
    "read another process's environment": (HIDDEN, PROC),
    "see another process's command line": (HIDDEN, PROC),
    "open another process's arena": (HIDDEN, PROC),
    "open another process's memory": (HIDDEN, PROC),
    "open the daemon's memory": (HIDDEN, PROC),
    "take a descriptor of another process": (DENIED, UID),
    "read another process's memory": (DENIED, UID),
    "trace another process": (DENIED, UID),
    "trace the daemon": (DENIED, UID),
    "kill another process": (DENIED, UID),
    "kill another account's launcher": (DENIED, UID),
    "kill the daemon": (DENIED, UID),
    "kill process 1": (DENIED, UID),
    "open the memory of process 1": (HIDDEN, PROC),
    "leave its control groups": (DENIED, GROUPS),
    "raise its memory limit": (DENIED, GROUPS),
    "thaw its control group": (DENIED, GROUPS),
    "mount": (DENIED, CAPABILITIES),
    "make a device": (DENIED, CAPABILITIES),
    "open the machine's disk": (DENIED, "the mode of the device file"),
    "become root": (DENIED, CAPABILITIES),
    "take root's group": (DENIED, CAPABILITIES),
    "become root by a setuid program": (DENIED, "no_new_privs"),
    "give a file away": (DENIED, CAPABILITIES),
    "run before others": (DENIED, CAPABILITIES),
    "open more files than it may": (DENIED, CAPABILITIES),
    "leave a dump of its memory": (DENIED, "the limit of its processes"),
    "fork without end": ({"EAGAIN"}, "pids.max of the gang's group"),
}


# In the namespaces of a restored job, other processes have no ids; the daemon may be one of them.
GONE = {"ESRCH", "ENOENT"}


@pytest.mark.parametrize("is_restored", [False, pytest.param(True, marks=needs_images)])
def test_a_hostile_job_of_another_account_is_denied_all_that_it_tries(
    monkeypatch: pytest.MonkeyPatch, is_restored: bool
) -> None:
    monkeypatch.setattr(node_context, "MOST_PROCESSES", 200)

    async def story(these: Accounted) -> None:
        made = these.made
        daemon = await these.daemon()
        groups = daemon.host.cgroups
        if groups.variant is Variant.NONE or groups.capabilities["process_limit"].startswith("none"):
            pytest.skip(f"no control groups here: {groups.capabilities}")
        victim = these.tiny(these.ann, 1)
        await made.master.want("n1", victim)
        ranks = (await these.phase(1, Observed.PHASE_RUNNING)).ranks
        await made.master.want("n1", with_changes(victim, 2, checkpoint_request=1))
        saved = await made.master.until("n1", 1, lambda gang: bool(gang.checkpoint.path))

        hostile = these.gang(these.bob, 2, [], device=1)
        home = Path(these.bob.home)
        hostile.spec.command[:] = [these.python, "-c", WAITING, str(HOSTILE), str(home / "words.json")]
        hostile.spec.agent = job_pb2.JobSpec.AGENT_NONE
        await made.master.want("n1", hostile)
        if is_restored:
            hostile = await _restored(these, hostile)
        words = _words(these, victim, hostile, ranks[0].pid, saved.checkpoint.path)
        for place in ("tmp", "dev/shm"):
            (Path(f"/proc/{ranks[0].pid}/root") / place / "secret").write_text("of ann")
        (home / "own").touch()
        os.chown(home / "own", these.bob.uid, these.bob.gid)
        (home / "words.new").write_text(json.dumps(words))
        os.chown(home / "words.new", these.bob.uid, these.bob.gid)
        (home / "words.new").rename(home / "words.json")
        ended = await these.phase(hostile.epoch, Observed.PHASE_ENDED)
        lines = log_of(made.directory, "n1", hostile.job_uid, 0, hostile.epoch)
        assert ended.outcome.kind == agent_pb2.Outcome.KIND_DONE, (ended, lines)
        found = {one["attempt"]: one["result"] for one in map(json.loads, lines)}
        assert found.keys() == EXPECTED.keys()
        also = GONE if is_restored else set()
        allowed = {name: found[name] for name, (denials, _) in EXPECTED.items() if found[name] not in denials | also}
        # Where Ganger is installed below /tmp, jobs share that (`DaemonPaths.private_places_trouble`).
        assert set(allowed) == ({"read a file in another job's /tmp"} if IS_IN_TMP else set())

        # and the other job has noticed nothing
        before = len(these.steps(victim))
        await until(lambda: len(these.steps(victim)) > before)
        assert (await these.parked(victim, 3, job_pb2.SUSPEND_LEVEL_CHECKPOINT)).checkpoint.step > saved.checkpoint.step

    run(story, certified=True)


async def _restored(these: Accounted, gang: Any) -> Any:
    """Suspend a job on its process image, and let it go on from there. Return its gang."""
    master = these.made.master
    await master.until("n1", gang.epoch, lambda seen: seen.capabilities.can_checkpoint)
    parked = await these.parked(gang, 2, job_pb2.SUSPEND_LEVEL_CHECKPOINT)
    await master.forget("n1", gang.epoch)
    again = these.gang(these.bob, gang.epoch + 1, list(gang.spec.command), device=1, uid=gang.job_uid)
    again.restore.checkpoint_path, again.restore.step = parked.checkpoint.path, parked.checkpoint.step
    await master.want("n1", again)
    await these.phase(again.epoch, Observed.PHASE_RUNNING)
    return again


def _words(these: Accounted, victim: Any, hostile: Any, rank: int, checkpoint: str) -> dict[str, Any]:
    made, directory = these.made, these.made.directory
    run_directory, uid = directory / "r-n1", victim.job_uid
    epoch = hostile.epoch
    (launcher,) = run_directory.glob(f"launchers/{these.ann.uid}/*.sock")
    with Launcher(str(launcher), uid=these.ann.uid) as connected:
        launcher_pid = connected.pid
    setuid_id = directory / "setuid-id"
    shutil.copy("/usr/bin/id", setuid_id)
    setuid_id.chmod(0o4755)
    groups, group = made.daemons["n1"].host.cgroups, f"{hostile.job_uid}-{epoch}"
    root = Path(groups.join_files(f"{uid}-1")[0]).parent.parent.parent
    freezer = groups.freezer_file(f"{uid}-1").replace(f"{uid}-1", group)
    places = [Path(path).parent for path in groups.join_files(f"{uid}-1")]
    names = ("memory.limit_in_bytes", "memory.max")
    limit = next(place / name for place in places for name in names if (place / name).exists())
    disks = [
        path for path in ("/dev/vda", "/dev/sda", "/dev/nvme0n1", "/dev/mem", "/dev/loop0") if os.path.exists(path)
    ]
    assert made.authority is not None, "the cluster has certificates"
    return {
        "rank": rank,
        "daemon": os.getpid(),
        "launcher_pid": launcher_pid,
        "node_json": str(directory / "n1" / "node.json"),
        "key": str(made.authority.issue("daemon", "n1") / "key.pem"),
        "token": str(directory / "master" / "token"),
        "state": str(directory / "n1"),
        "run": str(run_directory),
        "launch": str(directory / "n1" / "jobs" / uid / "1" / "rank-0.launch.json"),
        "page": str(run_directory / uid / "1" / "rank-0.page"),
        "socket": str(run_directory / uid / "1" / "job.sock"),
        "orders": str(run_directory / uid / "1" / "orders"),
        "work": str(directory / "n1" / "work" / uid / "1"),
        "launcher": str(launcher),
        "log": str(directory / "n1" / "logs" / uid / "rank-0.1.log"),
        "checkpoints": str(made.storage / uid / "checkpoints"),
        "shard": str(made.storage / uid / checkpoint / "rank-0.shard"),
        "images": str(made.storage / uid / "images"),
        "names": LINKS,
        "temporary": f"{LINKS}/{uid}-1/tmp",
        "places": str(directory / "n1" / "tmp" / f"{uid}-1"),
        "storage": str(made.storage),
        "inject": str(run_directory / "inject"),
        "own_run": str(run_directory / hostile.job_uid / str(epoch)),
        "roots": [str(root)],
        "memory_limit": str(limit.parent.parent / group / limit.name),
        "freezer": freezer,
        "thaw_word": "0" if freezer.endswith("cgroup.freeze") else "THAWED",
        "disk": disks[0],
        "setuid_id": str(setuid_id),
        "own_file": "own",
    }
