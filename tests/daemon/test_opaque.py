"""Jobs without an agent, jobs that do not obey, and a master that is away: no device is held in vain."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import uuid
from collections.abc import Awaitable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from daemon.kit import PATIENCE, Cluster, Intents, Observed, in_phase, log_of, run, with_changes
from ganger.agent.v1 import agent_pb2
from ganger.injob.launcher.client import Launcher
from ganger.injob.page import Page, now_ns
from ganger.injob.page_layout import Word
from ganger.injob.process_identity import start_ticks
from ganger.v1 import job_pb2
from ganger_daemon.gang import step_rate
from ganger_daemon.node.launchers import Launchers
from kit.waiting import eventually

pytestmark = pytest.mark.system

PAUSE = {"intent": Intents.INTENT_PARK, "level": job_pb2.SUSPEND_LEVEL_PAUSE}


def is_stopped(pid: int) -> bool:
    """Whether the kernel runs nothing of this process: stopped by a signal, or frozen."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "T"


async def until(holds: object, what: str) -> None:
    await asyncio.to_thread(eventually, holds, what=what)  # type: ignore[arg-type]


def test_a_command_that_cannot_be_executed_is_its_own_failure_and_not_the_nodes(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text("true\n")

    async def story(made: Cluster) -> None:
        await made.daemon("n1")
        for epoch, command in ((1, "no-such-program"), (2, str(tmp_path / "train.sh"))):
            gang = made.gang({"n1": [0]}, "n1", uid=str(uuid.uuid4()), epoch=epoch, command=[command])
            gang.job = f"jobs/{epoch}"
            await made.master.want("n1", gang)
            ended = await made.master.until("n1", epoch, in_phase(Observed.PHASE_ENDED))
            assert (ended.outcome.kind, ended.outcome.exit_code) == (agent_pb2.Outcome.KIND_LAUNCH_FAILED, 127)
            await made.master.forget("n1", epoch)

    run(story)


@pytest.mark.parametrize("code", [75, 76])
def test_a_job_that_ends_with_a_code_of_ours_has_failed_like_any_other(code: int) -> None:
    async def story(made: Cluster) -> None:
        await made.daemon("n1")
        command = [sys.executable, "-c", f"raise SystemExit({code})"]
        await made.master.want("n1", made.gang({"n1": [0]}, "n1", uid=str(uuid.uuid4()), command=command))
        ended = await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))
        assert (ended.outcome.kind, ended.outcome.exit_code) == (agent_pb2.Outcome.KIND_FAILED, code)
        assert ended.outcome.message == f"rank 0 exited with code {code}"

    run(story)


# The agent finds no loop in the first, and looks for a step in the second.
@pytest.mark.parametrize(
    "script",
    [
        "import time\nwhile True: time.sleep(0.1)",
        "import time, torch.utils.data as data\nfor _ in data.DataLoader(range(9999)): time.sleep(0.1)",
    ],
)
def test_a_python_that_saves_itself_is_waited_for_no_longer_than_its_agent_may_take_to_report(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ganger_daemon.gang.observation._LATEST_REPORT_S", 7.0)

    async def story(made: Cluster) -> None:
        await made.daemon("n1", criu="none")
        gang = made.gang({"n1": [0]}, "n1", uid=str(uuid.uuid4()), command=[made.python, "-u", "-c", script])
        gang.spec.stop_signal = "TERM"
        await made.master.want("n1", gang)
        early = await made.master.until("n1", 1, lambda seen: seen.capabilities.can_checkpoint)
        assert (early.capabilities.mechanism, early.capabilities_presumed) == (job_pb2.MECHANISM_SIGNAL, True)
        later = await made.master.until("n1", 1, lambda seen: not seen.capabilities_presumed)
        assert later.capabilities.mechanism == job_pb2.MECHANISM_SIGNAL

    run(story)


def test_a_plain_command_runs_at_once_is_paused_by_freezing_and_says_what_it_cannot() -> None:
    async def story(made: Cluster) -> None:
        await made.daemon("n1", criu="none")
        gang = made.gang({"n1": [0]}, "n1", uid=str(uuid.uuid4()), command=["sleep", "600"])
        await made.master.want("n1", gang)
        running = await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING), patience=8)
        assert running.capabilities.can_pause
        assert "by freezing" in running.capabilities.offload_by
        assert not running.capabilities.can_checkpoint
        assert set(running.capabilities.missing) == {"CHECKPOINT", "MOVE", "TURNS"}
        pid = running.ranks[0].pid
        for sequence in (2, 4):
            await made.master.want("n1", with_changes(gang, sequence, stop_sequence=sequence, **PAUSE))
            parked = await made.master.until("n1", 1, in_phase(Observed.PHASE_PARKED))
            assert parked.level == job_pb2.SUSPEND_LEVEL_PAUSE
            assert is_stopped(pid)
            await made.master.want("n1", with_changes(gang, sequence + 1))
            await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
            assert not is_stopped(pid)
        await made.master.want("n1", with_changes(gang, 6, stop_sequence=6, **PAUSE))
        await made.master.until("n1", 1, in_phase(Observed.PHASE_PARKED))
        await made.master.want("n1", with_changes(gang, 7, intent=Intents.INTENT_STOP))
        ended = await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))
        assert ended.outcome.kind == 5, "a frozen job hears SIGTERM too"

    run(story)


def test_several_processes_without_an_agent_on_one_node_are_paused_together_by_freezing() -> None:
    async def story(made: Cluster) -> None:
        await made.daemon("n1")
        gang = made.gang({"n1": [0, 1]}, "n1", uid=str(uuid.uuid4()), command=["sleep", "600"])
        await made.master.want("n1", gang)
        running = await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        assert running.capabilities.can_pause
        await made.master.want("n1", with_changes(gang, 2, stop_sequence=2, **PAUSE))
        parked = await made.master.until("n1", 1, in_phase(Observed.PHASE_PARKED))
        assert parked.level == job_pb2.SUSPEND_LEVEL_PAUSE
        pids = [rank.pid for rank in parked.ranks]
        assert [is_stopped(pid) for pid in pids] == [True, True]
        await made.master.want("n1", with_changes(gang, 3))
        await until(lambda: not any(map(is_stopped, pids)), "both going on")

    run(story)


def test_processes_without_an_agent_on_several_nodes_cannot_be_paused_and_the_reason_is_reported() -> None:
    async def story(made: Cluster) -> None:
        await asyncio.gather(made.daemon("n1"), made.daemon("n2"))
        uid, placement = str(uuid.uuid4()), {"n1": [0], "n2": [1]}
        for node in placement:
            await made.master.want(node, made.gang(placement, node, uid=uid, command=["sleep", "600"]))
        running = await made.master.until("n2", 1, in_phase(Observed.PHASE_RUNNING))
        assert not running.capabilities.can_pause
        assert "on several nodes" in running.capabilities.missing["PAUSE"]

    run(story)


def test_without_an_agent_a_python_is_left_alone_but_for_its_exit_code() -> None:
    async def story(made: Cluster) -> None:
        await made.daemon("n1")
        uid = str(uuid.uuid4())
        says = "import sys; print('agent' if 'ganger.training.agent' in sys.modules else 'alone'); sys.exit(3)"
        gang = made.gang({"n1": [0]}, "n1", uid=uid, command=[sys.executable, "-c", says])
        gang.spec.agent = job_pb2.JobSpec.AGENT_NONE
        await made.master.want("n1", gang)
        ended = await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))
        assert ended.outcome.exit_code == 3
        assert log_of(made.directory, "n1", uid, 0, 1) == ["alone"]

    run(story)


async def begun_deaf(made: Cluster, uid: str) -> agent_pb2.DesiredGang:
    """Start a job that obeys no order, and wait until it runs."""
    gang = made.gang({"n1": [0]}, "n1", uid=uid, mode="deaf")
    gang.grace.FromMilliseconds(300)
    await made.master.want("n1", gang)
    await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
    await until(lambda: "deaf" in log_of(made.directory, "n1", uid, 0, 1), "a job that hears nothing")
    return gang


def test_a_job_that_ignores_every_order_loses_its_devices() -> None:
    async def story(made: Cluster) -> None:
        await made.daemon("n1", order_patience_s=0.2, order_deadline_s=3.0)
        uid = str(uuid.uuid4())
        gang = await begun_deaf(made, uid)
        await made.master.want("n1", with_changes(gang, 2, stop_sequence=2, **PAUSE))
        ended = await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))
        assert ended.outcome.kind == 9, ended.outcome
        assert "did not obey" in ended.outcome.message
        assert "most recent call first" in "\n".join(log_of(made.directory, "n1", uid, 0, 1)), (
            "its stacks are in its log"
        )

    run(story)


def test_a_job_that_does_not_stop_for_a_move_is_left_alone_and_the_reason_is_said() -> None:
    async def story(made: Cluster) -> None:
        await made.daemon("n1", order_patience_s=0.2, order_deadline_s=0.5)
        uid = str(uuid.uuid4())
        gang = await begun_deaf(made, uid)
        await made.master.want("n1", with_changes(gang, 2, stop_sequence=2, intent=Intents.INTENT_HAND_OVER))
        troubled = await made.master.until("n1", 1, lambda message: bool(message.trouble))
        assert "it came to no boundary for" in troubled.trouble
        await made.master.want("n1", with_changes(gang, 3))
        running = await made.master.until("n1", 1, lambda message: not message.trouble)
        assert running.phase in (Observed.PHASE_STARTING, Observed.PHASE_RUNNING)
        assert not is_stopped(running.ranks[0].pid)

    run(story)


def test_without_a_lease_jobs_stand_still_until_the_master_is_back() -> None:
    async def story(made: Cluster) -> None:
        made.master.lost_after = 1.0
        await made.daemon("n1")
        steps, plain = str(uuid.uuid4()), str(uuid.uuid4())
        await made.master.want("n1", made.gang({"n1": [0]}, "n1", uid=steps, pause=0.005))
        sleeping = made.gang({"n1": [0]}, "n1", uid=plain, epoch=2, command=["sleep", "600"])
        sleeping.claim.device_mask = 2
        await made.master.want("n1", sleeping)
        await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        pid = (await made.master.until("n1", 2, in_phase(Observed.PHASE_RUNNING))).ranks[0].pid
        await made.stop_master()
        await until(lambda: is_stopped(pid), "the plain command standing still")
        stood = 0

        def stands() -> bool:
            nonlocal stood
            before, stood = stood, len(log_of(made.directory, "n1", steps, 0, 1))
            return before == stood

        await asyncio.to_thread(eventually, stands, every_seconds=0.3, what="the training standing still")
        await made.start()
        await until(lambda: not is_stopped(pid), "the plain command going on")
        await until(lambda: len(log_of(made.directory, "n1", steps, 0, 1)) > stood, "the training going on")

    run(story)


# Counts in the file $0 for ever, and does not mind SIGTERM.
COUNT = "trap '' TERM; n=0; while :; do n=$((n+1)); echo $n > $0.new; mv $0.new $0; done"


def test_a_gang_that_outlived_its_lease_is_killed_as_it_stands_when_the_master_stops_it(tmp_path: Path) -> None:
    counter = tmp_path / "counter"

    async def story(made: Cluster) -> None:
        made.master.lost_after = 1.0
        await made.daemon("n1")
        command = ["bash", "-c", COUNT, str(counter)]
        gang = made.gang({"n1": [0]}, "n1", uid=str(uuid.uuid4()), command=command)
        gang.grace.FromSeconds(60)
        await made.master.want("n1", gang)
        pid = (await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))).ranks[0].pid
        await until(counter.exists, "the job counts")
        await made.stop_master()
        await until(lambda: is_stopped(pid), "the job stands still")
        stood = counter.read_text()
        await made.master.want("n1", with_changes(gang, 2, intent=Intents.INTENT_STOP))
        await made.start()
        ended = await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))
        assert (ended.outcome.kind, ended.outcome.exit_code) == (agent_pb2.Outcome.KIND_STOPPED, -signal.SIGKILL)
        assert counter.read_text() == stood

    run(story)


# Counts in the file $0 for ever; SIGTERM makes the file $0.told.
COUNT_ON = COUNT.replace("trap ''", "trap 'touch $0.told'")


async def stands_still_in_its_grace(made: Cluster, counter: Path, grace_s: int, cut_off: Awaitable[None]) -> int:
    """Stop a job that counts on after SIGTERM, and let its lease end within its grace. Return its pid."""
    gang = made.gang({"n1": [0]}, "n1", uid=str(uuid.uuid4()), command=["bash", "-c", COUNT_ON, str(counter)])
    await made.master.want("n1", gang)
    pid = (await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))).ranks[0].pid
    await until(counter.exists, "the job counts")
    stop = with_changes(gang, 2, intent=Intents.INTENT_STOP)
    stop.grace.FromSeconds(grace_s)
    await made.master.want("n1", stop)
    await until(counter.with_name("counter.told").exists, "the job has got SIGTERM")
    await cut_off
    await until(lambda: is_stopped(pid), "the job stands still")
    return pid


def test_a_job_whose_lease_ends_in_its_grace_is_killed_at_the_end_of_the_grace(tmp_path: Path) -> None:
    counter = tmp_path / "counter"

    async def story(made: Cluster) -> None:
        made.master.lost_after = 1.0
        await made.daemon("n1")
        pid = await stands_still_in_its_grace(made, counter, 8, made.stop_master())
        stood = counter.read_text()
        await until(lambda: start_ticks(pid) is None, "the end of the job, without a master")
        assert counter.read_text() == stood

    run(story)


def test_a_job_whose_lease_ended_in_its_grace_is_killed_as_it_stands_by_the_next_daemon(tmp_path: Path) -> None:
    counter = tmp_path / "counter"

    async def story(made: Cluster) -> None:
        made.master.lost_after = 1.0
        await made.daemon("n1")
        pid = await stands_still_in_its_grace(made, counter, 600, made.stop_daemon("n1"))
        stood = counter.read_text()
        await made.stop_master()
        connecting = asyncio.ensure_future(made.daemon("n1"))
        await until(lambda: start_ticks(pid) is None, "the end of the job, without a master")
        assert counter.read_text() == stood
        await made.start()
        await connecting
        ended = await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))
        assert (ended.outcome.kind, ended.outcome.exit_code) == (agent_pb2.Outcome.KIND_STOPPED, -signal.SIGKILL)

    run(story)


def test_a_stop_without_grace_kills_a_job_that_runs_and_traps_sigterm(tmp_path: Path) -> None:
    counter = tmp_path / "counter"

    async def story(made: Cluster) -> None:
        await made.daemon("n1")
        command = ["bash", "-c", "trap 'touch $0.told' TERM; touch $0; while :; do :; done", str(counter)]
        gang = made.gang({"n1": [0]}, "n1", uid=str(uuid.uuid4()), command=command)
        await made.master.want("n1", gang)
        await until(counter.exists, "the job runs")
        stop = with_changes(gang, 2, intent=Intents.INTENT_STOP)
        stop.grace.FromSeconds(0)
        await made.master.want("n1", stop)
        ended = await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))
        assert (ended.outcome.kind, ended.outcome.exit_code) == (agent_pb2.Outcome.KIND_STOPPED, -signal.SIGKILL)
        assert not counter.with_name("counter.told").exists()

    run(story)


@pytest.mark.parametrize("cgroups", ["auto", "none"])
def test_a_plain_command_stands_still_without_a_daemon_and_goes_on_once_the_master_has_answered_the_next_one(
    cgroups: str,
) -> None:
    async def story(made: Cluster) -> None:
        made.master.lost_after = 1.0
        groups = (await made.daemon("n1", cgroups=cgroups)).host.cgroups
        await made.master.want("n1", made.gang({"n1": [0]}, "n1", uid=str(uuid.uuid4()), command=["sleep", "600"]))
        await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        (group,) = groups.groups()
        await made.stop_daemon("n1")
        await until(lambda: groups.frozen(group), "standing still, frozen by the launcher")
        await made.stop_master()
        connecting = asyncio.ensure_future(made.daemon("n1", cgroups=cgroups))
        await until(lambda: "n1" in made.daemons, "a daemon that has adopted what is there")
        await made.daemons["n1"].gangs.judged()
        assert groups.frozen(group), "no master has confirmed that this attempt may go on"
        await made.start()
        await connecting
        await until(lambda: not groups.frozen(group), "going on")

    run(story)


def test_a_plain_command_that_lost_its_launcher_and_its_daemon_is_frozen_by_the_next_daemon_without_a_master() -> None:
    async def story(made: Cluster) -> None:
        made.master.lost_after = 1.0
        await made.daemon("n1")
        await made.master.want("n1", made.gang({"n1": [0]}, "n1", uid=str(uuid.uuid4()), command=["sleep", "600"]))
        pid = (await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))).ranks[0].pid
        (socket_path,) = made.directory.glob("r-n1/launchers/*.sock")
        with Launcher(str(socket_path)) as launcher:
            launcher_pid = int(launcher.info()["pid"])
        await made.stop_master()
        await made.stop_daemon("n1")
        os.kill(launcher_pid, signal.SIGKILL)
        connecting = asyncio.ensure_future(made.daemon("n1"))
        await until(lambda: is_stopped(pid), "standing still")
        await made.start()
        await connecting
        await until(lambda: not is_stopped(pid), "going on")

    run(story)


def test_a_plain_command_goes_on_when_its_daemon_does_that_hung_for_longer_than_its_lease() -> None:
    async def story(made: Cluster) -> None:
        made.master.lost_after = 1.0
        process = await made.daemon_process("n1")
        await made.until_session("n1")
        await made.master.want("n1", made.gang({"n1": [0]}, "n1", uid=str(uuid.uuid4()), command=["sleep", "600"]))
        pid = (await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))).ranks[0].pid
        process.send_signal(signal.SIGSTOP)
        try:
            await until(lambda: is_stopped(pid), "standing still, frozen by the launcher")
        finally:
            process.send_signal(signal.SIGCONT)
        await until(lambda: not is_stopped(pid), "going on")

    run(story)


@pytest.mark.parametrize("master_is_away", [False, True], ids=["the master answers", "the master is away for a while"])
def test_a_plain_command_starts_although_its_launch_takes_longer_than_its_lease(
    monkeypatch: pytest.MonkeyPatch, master_is_away: bool
) -> None:
    begun, may_go_on = threading.Event(), threading.Event()
    get = Launchers.get

    def slow(launchers: Launchers, *arguments: Any) -> Launcher:
        begun.set()
        may_go_on.wait(PATIENCE)
        return get(launchers, *arguments)

    async def story(made: Cluster) -> None:
        made.master.lost_after = 1.0
        await made.daemon("n1")
        monkeypatch.setattr(Launchers, "get", slow)
        uid = str(uuid.uuid4())
        await made.master.want("n1", made.gang({"n1": [0]}, "n1", uid=uid, command=["sleep", "600"]))
        await until(begun.is_set, "the launch being under way")
        if master_is_away:
            await made.stop_master()
        (page_file,) = made.directory.glob(f"r-n1/**/{uid}*/**/*page*")
        with closing(Page.open(str(page_file), writable=False, mapped=False)) as page:
            first = page.get(Word.LEASE_UNTIL)
            await until(lambda: now_ns() > first, "the first lease having ended")
            may_go_on.set()
            if master_is_away:
                await until(lambda: page.get(Word.PID) and is_stopped(page.get(Word.PID)), "the rank standing still")
                await made.start()
        await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))

    run(story)


def test_a_user_the_daemon_cannot_become_is_refused_by_name() -> None:
    async def story(made: Cluster) -> None:
        await made.daemon("n1")
        gang = made.gang({"n1": [0]}, "n1", uid=str(uuid.uuid4()), user="another-user")
        await made.master.want("n1", gang)
        ended = await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))
        assert ended.outcome.kind == 7
        assert "CANNOT_SWITCH_USER" in ended.outcome.message
        own = made.gang({"n1": [0]}, "n1", uid=str(uuid.uuid4()), epoch=2, steps=3, user=str(os.geteuid()))
        await made.master.want("n1", own)
        done = await made.master.until("n1", 2, in_phase(Observed.PHASE_ENDED))
        assert done.outcome.kind == 1

    run(story)


def test_master_is_told_of_jobs_that_do_not_get_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_rate, "HANG_S", 2.0)
    monkeypatch.setattr(step_rate, "_HANG_PAUSES", 1.0)
    monkeypatch.setattr(step_rate, "IDLE_S", 1.0)
    monkeypatch.setattr(step_rate, "_PROCESSES_S", 0.2)

    async def story(made: Cluster) -> None:
        await made.daemon("n1")
        await made.daemon("n2")
        told = made.master.progress
        await made.master.want("n1", made.gang({"n1": [0]}, "n1", uid=str(uuid.uuid4()), command=["sleep", "600"]))
        await until(lambda: 1 in told and "less than 1 % of a processor" in told[1].stall_reason, "an idle job")
        await made.master.want("n2", made.gang({"n2": [0]}, "n2", uid=str(uuid.uuid4()), epoch=2))
        running = await made.master.until("n2", 2, in_phase(Observed.PHASE_RUNNING))
        await until(lambda: 2 in told and told[2].step > 0, "steps")
        os.kill(running.ranks[0].pid, signal.SIGSTOP)
        await until(lambda: "no step for" in told[2].stall_reason, "a hang")
        os.kill(running.ranks[0].pid, signal.SIGCONT)
        await until(lambda: not told[2].stall_reason, "its end")

    run(story)


def test_a_python_role_beside_one_that_is_none_reports_its_steps() -> None:
    async def story(made: Cluster) -> None:
        await made.daemon("n1")
        gang = made.gang({"n1": [0, 1]}, "n1", uid=str(uuid.uuid4()), steps=100_000)
        del gang.spec.roles[:], gang.claim.tasks[:]
        gang.spec.roles.add(name="cache", tasks=1).shape.millicores = 100
        gang.spec.roles.add(name="worker", tasks=1).shape.gpus = 1
        gang.spec.role_programs.add(role="cache", command=["/bin/sleep", "600"])
        gang.claim.tasks.extend([1, 1])
        await made.master.want("n1", gang)
        await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        await until(lambda: made.master.progress[1].step > 3 if 1 in made.master.progress else False, "steps")
        # It is stopped wherever it is.
        await made.master.want("n1", with_changes(gang, 2, stop_sequence=2, **PAUSE))
        parked = await made.master.until("n1", 1, in_phase(Observed.PHASE_PARKED))
        assert parked.progress.step > 3
        await made.master.want("n1", with_changes(gang, 3, intent=Intents.INTENT_STOP))
        await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))

    run(story)
