"""Prolog and epilog of gangs, and health checks of nodes, as real programs under real daemons."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from daemon.kit import PATIENCE, Cluster, Intents, Observed, in_phase, run, with_changes
from ganger.agent.v1 import agent_pb2
from ganger.v1 import job_pb2
from ganger_daemon.app import Daemon
from ganger_daemon.claimed_directories import DaemonError
from ganger_daemon.cli import daemon as daemon_command
from ganger_daemon.node.hooks import NodeHooks, hook_trouble
from kit.waiting import eventually

pytestmark = pytest.mark.system

Outcome = agent_pb2.Outcome


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def notes(directory: Path) -> list[str]:
    """What hooks and jobs have noted, in order."""
    path = directory / "notes"
    return path.read_text().splitlines() if path.exists() else []


def noting(directory: Path, name: str, then: str = "") -> Path:
    return script(directory / name, f'echo "$GANGER_HOOK $GANGER_JOB_ID" >> {directory}/notes\n{then}')


async def with_hooks(made: Cluster, prolog: str = "", epilog: str = "", timeout_s: float = 60.0) -> Daemon:
    """A daemon with hooks that note that they ran, and then do this."""
    programs = [noting(made.directory, name, then) for name, then in (("prolog", prolog), ("epilog", epilog))]
    return await made.daemon("n1", hooks=NodeHooks(*programs, timeout_s))


def plain_job(made: Cluster, command: str, **changes: Any) -> agent_pb2.DesiredGang:
    gang = made.gang({"n1": [0]}, "n1", uid=str(uuid.uuid4()), command=["/bin/sh", "-c", command], **changes)
    gang.spec.agent = job_pb2.JobSpec.AGENT_NONE
    return gang


def test_the_prolog_runs_before_the_first_process_and_the_epilog_after_the_last() -> None:
    async def story(made: Cluster) -> None:
        await with_hooks(made)
        await made.master.want("n1", plain_job(made, f"echo job >> {made.directory}/notes"))
        ended = await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))
        assert (ended.outcome.kind, ended.outcome.node_fault) == (Outcome.KIND_DONE, "")
        # The steps of a program without an agent are not counted: it may have made some.
        assert ended.has_stepped
        assert notes(made.directory) == ["prolog 1", "job", "epilog 1"]

    run(story)


def test_a_hook_finds_the_job_and_its_devices_in_its_environment_and_nothing_of_the_daemons() -> None:
    async def story(made: Cluster) -> None:
        daemon = await made.daemon("n1", hooks=NodeHooks(script(made.directory / "p", f"env > {made.directory}/env")))
        gang = plain_job(made, "true")
        gang.claim.device_mask = 0b110
        await made.master.want("n1", gang)
        await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))
        found = dict(line.split("=", 1) for line in (made.directory / "env").read_text().splitlines())
        assert (found["GANGER_HOOK"], found["GANGER_NODE"], found["GANGER_GPUS"]) == ("prolog", "n1", "1,2")
        assert daemon.host.devices.environment(0b110).items() <= found.items()
        assert "HOME" not in found

    run(story)


def test_a_prolog_that_fails_keeps_the_gang_from_the_node_and_its_last_line_is_the_nodes_fault() -> None:
    async def story(made: Cluster) -> None:
        await with_hooks(made, prolog="printf '\\033[31mno scratch disk\\033[0m\\n' >&2; exit 3")
        await made.master.want("n1", plain_job(made, f"echo job >> {made.directory}/notes"))
        ended = await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))
        assert ended.outcome.kind == Outcome.KIND_LAUNCH_FAILED
        assert ended.outcome.node_fault == "prolog exited with code 3: no scratch disk"
        assert not ended.has_stepped
        assert ended.outcome.exit_code == 0, "the command is not to blame"
        assert notes(made.directory) == ["prolog 1", "epilog 1"]

    run(story)


def test_an_epilog_that_fails_changes_no_outcome_and_is_the_nodes_fault() -> None:
    async def story(made: Cluster) -> None:
        await with_hooks(made, epilog="echo cannot unmount; exit 1")
        await made.master.want("n1", plain_job(made, "true"))
        ended = await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))
        assert ended.outcome.kind == Outcome.KIND_DONE
        assert ended.outcome.node_fault == "epilog exited with code 1: cannot unmount"

    run(story)


def test_a_prolog_that_does_not_end_is_killed_and_has_failed() -> None:
    async def story(made: Cluster) -> None:
        await with_hooks(made, prolog=f"sleep 600 & echo $! > {made.directory}/child; wait", timeout_s=0.5)
        await made.master.want("n1", plain_job(made, "true"))
        ended = await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))
        assert ended.outcome.node_fault == "prolog did not end within 0.5 s and was killed"
        await asyncio.to_thread(
            eventually, lambda: not os.path.exists(f"/proc/{(made.directory / 'child').read_text().strip()}")
        )

    run(story)


def test_of_a_long_output_the_last_line_is_kept() -> None:
    async def story(made: Cluster) -> None:
        await with_hooks(made, prolog="yes | head -c 3000000; echo no disk; exit 3")
        await made.master.want("n1", plain_job(made, "true"))
        ended = await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))
        assert ended.outcome.node_fault == "prolog exited with code 3: no disk"

    run(story)


def test_an_output_without_end_is_bounded_at_once() -> None:
    async def story(made: Cluster) -> None:
        await with_hooks(made, prolog="yes", timeout_s=1.0)
        gang = plain_job(made, "true")
        await made.master.want("n1", gang)
        ended = await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))
        assert ended.outcome.node_fault == "prolog did not end within 1 s and was killed: y"
        left = [*(made.directory / "n1" / "jobs" / gang.job_uid / "1" / "hooks" / "prolog").iterdir()]
        assert sum(path.lstat().st_size for path in left) < 1.1 * (1 << 20)

    run(story)


def test_what_a_hook_leaves_running_keeps_neither_its_end_nor_its_reason() -> None:
    async def story(made: Cluster) -> None:
        await with_hooks(made, prolog=f"sleep 600 & echo $! > {made.directory}/child; echo no disk; exit 3")
        await made.master.want("n1", plain_job(made, "true"))
        ended = await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))
        assert ended.outcome.node_fault == "prolog exited with code 3: no disk"
        os.kill(int((made.directory / "child").read_text()), signal.SIGKILL)

    run(story)


def test_while_a_prolog_runs_the_daemon_starts_other_gangs_and_a_stop_ends_the_prolog() -> None:
    async def story(made: Cluster) -> None:
        await with_hooks(made, prolog='[ "$GANGER_GPUS" = 1 ] || sleep 600')
        waits, goes = plain_job(made, "true"), plain_job(made, "true", epoch=2)
        goes.claim.device_mask = 0b10
        await made.master.want("n1", waits)
        await asyncio.to_thread(eventually, lambda: notes(made.directory) == ["prolog 1"])
        await made.master.want("n1", goes)
        await made.master.until("n1", 2, in_phase(Observed.PHASE_ENDED))
        await made.master.want("n1", with_changes(waits, 2, intent=Intents.INTENT_STOP))
        stopped = await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))
        assert stopped.outcome.kind == Outcome.KIND_STOPPED
        assert notes(made.directory)[-1] == "epilog 1"

    run(story)


def test_a_gang_starts_on_devices_only_after_the_epilog_of_the_gang_before() -> None:
    async def story(made: Cluster) -> None:
        await with_hooks(made, epilog=f"while ! [ -e {made.directory}/go ]; do sleep 0.01; done")
        first, second = plain_job(made, "true"), plain_job(made, "true", epoch=2)
        await made.master.want("n1", first)
        await asyncio.to_thread(eventually, lambda: "epilog 1" in notes(made.directory))
        assert made.master.book("n1").observed[1].phase != Observed.PHASE_ENDED
        await made.master.want("n1", second)
        waiting = await made.master.until("n1", 2, lambda _: True)
        assert waiting.phase == Observed.PHASE_STARTING
        assert notes(made.directory) == ["prolog 1", "epilog 1"]
        (made.directory / "go").touch()
        await made.master.until("n1", 2, in_phase(Observed.PHASE_ENDED))
        assert notes(made.directory) == ["prolog 1", "epilog 1", "prolog 1", "epilog 1"]

    run(story)


def test_no_suspend_in_place_and_no_resume_runs_a_hook() -> None:
    async def story(made: Cluster) -> None:
        await with_hooks(made)
        gang = made.gang({"n1": [0]}, "n1", uid=str(uuid.uuid4()))
        await made.master.want("n1", gang)
        await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        level = job_pb2.SUSPEND_LEVEL_OFFLOAD
        parks = with_changes(gang, 2, intent=Intents.INTENT_PARK, level=level, stop_sequence=2)
        await made.master.want("n1", parks)
        await made.master.until("n1", 1, in_phase(Observed.PHASE_PARKED))
        await made.master.want("n1", with_changes(gang, 3))
        await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        assert notes(made.directory) == ["prolog 1"]

    run(story)


@pytest.mark.parametrize("hook", ["prolog", "epilog"])
def test_the_next_daemon_waits_for_a_hook_that_a_killed_one_has_begun_and_does_not_run_it_again(hook: str) -> None:
    async def story(made: Cluster) -> None:
        waits = {hook: f"while ! [ -e {made.directory}/go ]; do sleep 0.01; done"}
        daemon = await with_hooks(made, **waits)
        await made.master.want("n1", plain_job(made, f"echo job >> {made.directory}/notes"))
        await asyncio.to_thread(eventually, lambda: f"{hook} 1" in notes(made.directory))
        hooks = daemon.host.hooks
        await made.stop_daemon("n1")
        (made.directory / "go").touch()
        await made.daemon("n1", hooks=hooks)
        ended = await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))
        assert ended.outcome.kind == Outcome.KIND_DONE
        assert notes(made.directory) == ["prolog 1", "job", "epilog 1"]

    run(story)


def test_a_daemon_killed_while_a_prolog_runs_leaves_it_to_the_next_one() -> None:
    async def story(made: Cluster) -> None:
        prolog = noting(made.directory, "prolog", f"while ! [ -e {made.directory}/go ]; do sleep 0.01; done")
        environment = {"GANGER_DAEMON_PROLOG": str(prolog)}
        with pytest.MonkeyPatch.context() as patched:
            for name, value in environment.items():
                patched.setenv(name, value)
            process = await made.daemon_process("n1")
            await made.until_session("n1")
            await made.master.want("n1", plain_job(made, "true"))
            await asyncio.to_thread(eventually, lambda: notes(made.directory) == ["prolog 1"])
            process.kill()
            await process.wait()
            await made.daemon_process("n1")
        (made.directory / "go").touch()
        ended = await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED), patience=2 * PATIENCE)
        assert ended.outcome.kind == Outcome.KIND_DONE
        assert notes(made.directory) == ["prolog 1"]

    run(story)


def test_a_hook_that_others_could_replace_is_refused(tmp_path: Path) -> None:
    good = script(tmp_path / "good", "true")
    assert hook_trouble(good) == ""
    good.chmod(0o777)
    assert "others may write to" in hook_trouble(good)
    good.chmod(0o644)
    assert "make it an executable file" in hook_trouble(good)
    assert "no such file" in hook_trouble(tmp_path / "missing")
    assert "no absolute path" in hook_trouble(Path(os.path.relpath(script(tmp_path / "good", "true"))))


@pytest.mark.parametrize(("mode", "told"), [(0o755, ""), (0o777, "others may write into")])
def test_a_hook_reached_by_links_is_refused_if_one_of_them_could_be_replaced(
    tmp_path: Path, mode: int, told: str
) -> None:
    script(tmp_path / "good", "true")
    between = tmp_path / "between"
    between.mkdir()
    between.chmod(mode)
    (between / "link").symlink_to(tmp_path / "good")
    (tmp_path / "hook").symlink_to(between / "link")
    trouble = hook_trouble(tmp_path / "hook")
    assert trouble.startswith(f"{told} {between}" if told else "")
    assert bool(trouble) == bool(told)


def test_a_daemon_does_not_start_with_a_hook_that_it_cannot_run() -> None:
    async def story(made: Cluster) -> None:
        with pytest.raises(DaemonError, match=r"--epilog: .*no such file"):
            await made.daemon("n1", hooks=NodeHooks(epilog=made.directory / "missing"))

    run(story)


@pytest.mark.parametrize("flag", ["--hook-timeout", "--health-check-every"])
def test_times_of_hooks_are_longer_than_nothing(flag: str) -> None:
    found = CliRunner().invoke(daemon_command, ["--node", "n1", flag, "0s"])
    assert (found.exit_code, flag in found.output, "must be longer than nothing" in found.output) == (2, True, True)


def checking(made: Cluster) -> NodeHooks:
    """A check that passes unless there is a file with its words, and notes that it ran."""
    broken = made.directory / "broken"
    text = f"echo check >> {made.directory}/notes\n[ ! -e {broken} ] || {{ cat {broken}; exit 1; }}"
    check = script(made.directory / "check", text)
    return NodeHooks(health_check=check, health_check_every_s=0.02)


async def until_faults(made: Cluster, holds: Callable[[dict[str, str]], bool]) -> None:
    await asyncio.to_thread(eventually, lambda: holds(made.master.book("n1").faults))


def test_a_node_that_fails_its_check_is_reported_with_the_reason_until_it_has_passed_often_enough() -> None:
    async def story(made: Cluster) -> None:
        daemon = await made.daemon("n1", hooks=checking(made))
        assert made.master.book("n1").faults == {}
        (made.directory / "broken").write_text("no InfiniBand\n")
        failed = "health check exited with code 1: no InfiniBand"
        await until_faults(made, lambda faults: faults == {"health_check": failed})
        before = len(notes(made.directory))
        (made.directory / "broken").unlink()
        await until_faults(made, lambda faults: not faults)
        assert len(notes(made.directory)) - before >= 3
        assert daemon.health.faults == {}

    run(story)


def test_what_checks_have_shown_outlives_the_daemon() -> None:
    async def story(made: Cluster) -> None:
        hooks = checking(made)
        (made.directory / "broken").write_text("no InfiniBand\n")
        await made.daemon("n1", hooks=hooks)
        await until_faults(made, bool)
        await made.stop_daemon("n1")
        (made.directory / "broken").unlink()
        await made.daemon("n1", hooks=replace(hooks, health_check_every_s=600.0))
        await until_faults(made, lambda faults: "it has passed 1 of the 3 checks" in faults.get("health_check", ""))
        await made.stop_daemon("n1")
        await made.daemon("n1")
        await until_faults(made, lambda faults: not faults)

    run(story)


def test_a_check_that_went_with_its_machine_is_no_failure() -> None:
    async def story(made: Cluster) -> None:
        begun = made.directory / "n1" / "health-check"
        begun.mkdir(parents=True)
        (begun / "pid").write_text("1")
        daemon = await made.daemon("n1", hooks=checking(made))
        assert daemon.health.is_known.is_set()
        assert made.master.book("n1").faults == {}

    run(story)


def test_a_node_without_gangs_is_checked_before_its_master_hears_of_it() -> None:
    async def story(made: Cluster) -> None:
        (made.directory / "broken").write_text("no InfiniBand\n")
        await made.daemon("n1", hooks=checking(made))
        assert "no InfiniBand" in made.master.book("n1").faults["health_check"]

    run(story)


def test_a_device_that_is_slowed_down_is_reported_until_it_is_not() -> None:
    async def story(made: Cluster) -> None:
        daemon = await made.daemon("n1")
        for warnings in ({1: "it is too hot"}, {}):
            daemon.host.devices.warnings = lambda warnings=warnings: warnings  # type: ignore[method-assign, misc]
            await asyncio.to_thread(eventually, lambda wanted=warnings: made.master.book("n1").warnings == wanted)

    run(story)
