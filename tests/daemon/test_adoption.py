"""What a restarted daemon believes of what it finds: a job can write its own files, and whatever it wrote it alone ends
for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon.kit import Cluster, Intents, Observed, in_phase, log_of, run, with_changes
from ganger.agent.v1 import agent_pb2
from ganger.injob.launcher.client import Launcher
from ganger.injob.page import Page, page_path
from ganger.injob.page_layout import MAGIC, VERSION, Word
from ganger.injob.process_identity import start_ticks
from ganger.v1 import job_pb2
from ganger_daemon.claimed_directories import DaemonError
from ganger_daemon.node.process_identity import (
    NO_PROCESS,
    FoundProcesses,
    ProcessId,
    RankProcess,
    end,
    holds_files_of_rank,
    is_alive,
    parent_of,
    recognise,
)
from kit.waiting import eventually
from rpc.kit import until


@pytest.fixture
def bystander() -> Iterator[ProcessId]:
    """A process of the same user that has nothing to do with any job."""
    process = subprocess.Popen(["sleep", "600"])
    yield ProcessId(process.pid, start_ticks(process.pid))
    process.kill()
    process.wait()


def page_of(made: Cluster, uid: str, epoch: int) -> Path:
    return Path(page_path(str(made.directory / "r-n1" / uid / f"{epoch}"), 0))


def name_in_page(path: Path, process: ProcessId) -> None:
    page = Page.open(str(path))
    page.set(Word.PID, process.pid)
    page.set(Word.START_TICKS, process.start_ticks)


async def jobs_running(made: Cluster, number: int) -> list[str]:
    """Uids of as many gangs of one rank, of epochs 1, 2, ..., each on a device of its own."""
    await made.until_session("n1")
    uids = [str(uuid.uuid4()) for _ in range(number)]
    for index, uid in enumerate(uids):
        gang = made.gang({"n1": [0]}, "n1", uid=uid, epoch=index + 1)
        gang.job, gang.claim.device_mask = f"jobs/{index + 1}", 1 << index
        gang.claim.millicores[:] = [500, 500]
        await made.master.want("n1", gang)
    for epoch in range(1, number + 1):
        await made.master.until("n1", epoch, in_phase(Observed.PHASE_RUNNING))
    return uids


async def kill_daemon(made: Cluster) -> None:
    made.processes["n1"].kill()
    await made.processes["n1"].wait()
    for gang in made.master.book("n1").observed.values():
        made.pids.update(rank.pid for rank in gang.ranks)
    made.master.book("n1").observed.clear()


def kill_launcher(made: Cluster, *, with_reaper: bool = False) -> None:
    (path,) = (made.directory / "r-n1" / "launchers").glob("*.sock")
    with Launcher(str(path)) as launcher:
        if with_reaper:
            os.kill(parent_of(launcher.pid), signal.SIGKILL)
        os.kill(launcher.pid, signal.SIGKILL)


def is_there(process: ProcessId) -> bool:
    return start_ticks(process.pid) == process.start_ticks


def test_a_launchers_own_child_is_trusted_and_no_other_process_without_proof(bystander: ProcessId) -> None:
    own, dead = ProcessId(os.getpid(), start_ticks(os.getpid())), ProcessId(bystander.pid, 1)

    def none_belongs(process: ProcessId) -> bool:
        return False

    assert recognise(RankProcess(own, is_own=True), [bystander], none_belongs) == FoundProcesses(own, bystander)
    assert recognise(RankProcess(bystander, is_own=False), [NO_PROCESS], none_belongs) == FoundProcesses(
        NO_PROCESS, bystander
    )
    assert recognise(None, [bystander, own], lambda process: process == own) == FoundProcesses(own, bystander)
    assert recognise(None, [dead], none_belongs) == FoundProcesses(dead), "a dead process receives no signal"
    assert recognise(None, [NO_PROCESS], none_belongs) == FoundProcesses(NO_PROCESS)
    assert recognise(None, [bystander], none_belongs).is_lost


def test_what_was_ended_is_gone_and_a_later_process_of_its_pid_is_left_alone(bystander: ProcessId) -> None:
    # the kernel needs a while to take back so much memory
    holds_much = "import time; kept = bytearray(b'x') * (300 << 20); print(flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", holds_much], stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        started.stdout.readline()
        process = ProcessId(started.pid, start_ticks(started.pid))
        assert end(process, within_s=20.0)
        assert not is_alive(process)
    earlier = ProcessId(bystander.pid, bystander.start_ticks - 1)
    assert end(earlier, within_s=20.0)
    assert is_alive(bystander)


def test_a_process_belongs_to_a_rank_by_its_output_or_by_the_page_it_maps(tmp_path: Path) -> None:
    log, page = tmp_path / "rank-0.1.log", tmp_path / "rank-0.page"
    Page.create(str(page), epoch=1, rank=0, world=1, mapped=False).close()
    log.touch()
    with log.open("ab") as output, log.open("rb") as reading:
        writer = subprocess.Popen(["sleep", "600"], stdout=output)
        reader = subprocess.Popen(["sleep", "600"], stdin=reading, stdout=subprocess.DEVNULL)
        try:
            assert holds_files_of_rank(writer.pid, log, page)
            assert not holds_files_of_rank(reader.pid, log, page), "a process that only reads a log is not its rank"
        finally:
            for process in (writer, reader):
                process.kill()
                process.wait()
    assert not holds_files_of_rank(writer.pid, log, page), "gone"
    assert not holds_files_of_rank(os.getpid(), log, page)
    mapped = Page.open(str(page))
    page.unlink()
    assert holds_files_of_rank(os.getpid(), log, page), "even if the job has removed it since"
    mapped.close()


@pytest.mark.system
def test_jobs_that_forge_damage_or_remove_their_files_cost_a_restarted_daemon_only_themselves(
    bystander: ProcessId,
) -> None:
    async def story(made: Cluster) -> None:
        await made.daemon_process("n1")
        forger, scribbler, remover, tidier = await jobs_running(made, 4)
        honest = made.master.book("n1").observed[1].ranks[0].pid
        await kill_daemon(made)

        name_in_page(page_of(made, forger, 1), bystander)
        Page.open(str(page_of(made, scribbler, 2))).set(Word.MAGIC, MAGIC << 16 | 0xBAD)
        page_of(made, remover, 3).unlink()
        for path in (made.directory / "n1" / "jobs" / tidier / "4").glob("*.json"):
            path.unlink() if "gang" in path.name else path.write_text('{"grant": 3, "ranks": [1], "kind": "x"}')
        await made.daemon_process("n1")

        # the launcher knows its own children, whatever their pages say
        adopted = await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        assert [rank.pid for rank in adopted.ranks] == [honest]
        scribbled = await made.master.until("n1", 2, in_phase(Observed.PHASE_ENDED))
        assert scribbled.outcome.kind == agent_pb2.Outcome.KIND_FAILED
        assert scribbled.outcome.message.endswith("was overwritten by its job")
        removed = await made.master.until("n1", 3, in_phase(Observed.PHASE_ENDED))
        assert removed.outcome.message.endswith("were removed by its job")
        await made.master.until("n1", 4, in_phase(Observed.PHASE_RUNNING))
        forged = made.gang({"n1": [0]}, "n1", uid=forger)
        forged.claim.device_mask = 1
        await made.master.want("n1", with_changes(forged, 2, intent=Intents.INTENT_STOP))
        assert (await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))).has_stepped
        assert start_ticks(honest) is None
        assert is_there(bystander)
        said = (made.directory / "n1.log").read_text()
        assert f"name process {bystander.pid}, which is none of this gang: it is left alone" in said

    run(story)


@pytest.mark.system
def test_without_a_launcher_ranks_are_known_by_what_they_hold_and_strangers_are_left_alone(
    bystander: ProcessId,
) -> None:
    async def story(made: Cluster) -> None:
        await made.daemon_process("n1")
        honest, forger = await jobs_running(made, 2)
        pid = made.master.book("n1").observed[1].ranks[0].pid
        await kill_daemon(made)
        kill_launcher(made)
        name_in_page(page_of(made, forger, 2), bystander)
        (made.directory / "n1" / "jobs" / forger / "2" / "local.json").unlink()
        await made.daemon_process("n1")

        adopted = await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        assert [rank.pid for rank in adopted.ranks] == [pid]
        ended = await made.master.until("n1", 2, in_phase(Observed.PHASE_ENDED))
        assert f"name process {bystander.pid}, which is none of this gang" in ended.outcome.message
        stop = with_changes(made.gang({"n1": [0]}, "n1", uid=honest), 2, intent=Intents.INTENT_STOP)
        await made.master.want("n1", stop)
        await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))
        assert is_there(bystander)

    run(story)


@pytest.mark.system
def test_a_job_under_pages_of_another_version_is_left_to_run_watched_and_can_be_stopped() -> None:
    async def story(made: Cluster) -> None:
        await made.daemon_process("n1")
        (uid,) = await jobs_running(made, 1)
        pid = made.master.book("n1").observed[1].ranks[0].pid
        await kill_daemon(made)
        launch = made.directory / "n1" / "jobs" / uid / "1" / "rank-0.launch.json"
        launch.write_text(json.dumps({**json.loads(launch.read_text()), "page_version": VERSION + 1}))
        Page.open(str(page_of(made, uid, 1))).set(Word.MAGIC, MAGIC << 16 | VERSION + 1)
        await made.daemon_process("n1")

        def steps() -> int:
            return len(log_of(made.directory, "n1", uid, 0, 1))

        kept = await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        assert f"has version {VERSION + 1}, this Ganger reads version {VERSION}" in kept.trouble
        assert [rank.pid for rank in kept.ranks] == [pid]
        assert not kept.capabilities.can_offload
        assert not kept.capabilities.can_checkpoint
        assert "another version" in kept.capabilities.missing["OFFLOAD"]
        before = steps()
        eventually(lambda: steps() > before + 5, what="the job goes on")
        gang = made.gang({"n1": [0]}, "n1", uid=uid)
        pause = {"intent": Intents.INTENT_PARK, "level": job_pb2.SUSPEND_LEVEL_PAUSE, "stop_sequence": 2}
        await made.master.want("n1", with_changes(gang, 2, **pause))
        await made.master.until("n1", 1, in_phase(Observed.PHASE_PARKED))
        stood = steps()
        await made.master.want("n1", with_changes(gang, 3))
        await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        eventually(lambda: steps() > stood, what="the job goes on")
        await made.master.want("n1", with_changes(gang, 4, intent=Intents.INTENT_STOP))
        ended = await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))
        assert ended.outcome.kind == 5

    run(story)


def test_a_daemon_of_another_name_does_not_take_the_directory_of_a_node_whose_jobs_may_run() -> None:
    async def story(made: Cluster) -> None:
        await made.daemon("n1")
        await made.stop_daemon("n1")
        with pytest.raises(DaemonError, match=r"is that of node n1, whose jobs may still run: give --node n1, or, "):
            await made.daemon("n2", state_directory=made.directory / "n1")

    run(story)


@pytest.mark.system
@pytest.mark.parametrize(("code", "with_reaper"), [(0, False), (3, False), (0, True)])
def test_a_script_that_ends_without_daemon_and_launcher_is_known_to_have_ended_and_never_run_again_in_silence(
    code: int, with_reaper: bool
) -> None:
    async def story(made: Cluster) -> None:
        await made.daemon_process("n1")
        await made.until_session("n1")
        go, uid = made.directory / "go", str(uuid.uuid4())
        script = f"echo began; until test -e {go}; do sleep 0.05; done; exit {code}"
        gang = made.gang({"n1": [0]}, "n1", uid=uid, command=["/bin/sh", "-c", script])
        gang.spec.agent = job_pb2.JobSpec.AGENT_NONE
        await made.master.want("n1", gang)
        (rank,) = (await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))).ranks
        process = ProcessId(rank.pid, start_ticks(rank.pid) or 0)
        await kill_daemon(made)
        kill_launcher(made, with_reaper=with_reaper)
        go.touch()
        await until(lambda: not is_there(process))
        await made.daemon_process("n1")
        outcome = (await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))).outcome
        kinds = agent_pb2.Outcome
        if with_reaper:
            assert outcome.kind == kinds.KIND_FAILED
            assert "the end of rank 0 was not seen" in outcome.message
        else:
            assert (outcome.kind, outcome.exit_code) == (kinds.KIND_FAILED if code else kinds.KIND_DONE, code)
        assert log_of(made.directory, "n1", uid, 0, 1) == ["began"]

    run(story)
