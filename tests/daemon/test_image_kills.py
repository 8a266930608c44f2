"""Daemons and launchers that die while they take, move or restore a process image, and moves that are given up."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import uuid
from pathlib import Path

import pytest
from daemon.image_kit import (
    CHECKPOINT,
    PAUSE,
    begun,
    counts,
    ended,
    expected,
    from_image,
    goes_on,
    handed_over,
    kinds_at_points,
    moved_in,
    moves_while_a_daemon_dies,
    needs_images,
    one_after_the_other,
    opaque,
    prepared,
    programs,
    restores_while_its_launcher_dies,
    saved,
    saves_while_its_daemon_dies,
    saves_while_its_launcher_dies,
    until,
)
from daemon.kit import Cluster, Intents, Observed, in_phase, log_of, run, with_changes
from ganger.failpoints import OF_DEVICES, OF_IMAGES
from ganger.injob.launcher.client import Launcher
from ganger_daemon.gang import process_image

pytestmark = [pytest.mark.system, needs_images]

SAVE_POINTS = ("image-dumped", "image-packed", "after-rename")
MOVE_POINTS = (("image-dumped", "n1"), ("image-packed", "n1"), ("image-unpacked", "n2"), ("image-restored", "n2"))


def test_every_failpoint_of_images_is_tried() -> None:
    # those of devices: test_taken_devices
    assert {point for point, _ in MOVE_POINTS} | set(SAVE_POINTS) >= OF_IMAGES - OF_DEVICES


@pytest.mark.parametrize(("kind", "point"), kinds_at_points(SAVE_POINTS))
def test_a_daemon_that_dies_while_it_saves_an_image_loses_nothing(kind: str, point: str) -> None:
    run(lambda made: saves_while_its_daemon_dies(made, kind, point))


@pytest.mark.parametrize("criu_dies", [False, True])
def test_a_daemon_that_dies_after_its_consent_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, criu_dies: bool
) -> None:
    """CRIU ends the processes only after a while, as it does where their memory is large, or dies before."""
    flock = tmp_path / "flock"
    at = tmp_path / "at"
    waits = f"echo $PPID > {at}.new; mv {at}.new {at}; while [ ! -e {tmp_path}/go ]; do sleep 0.02; done"
    flock.write_text(f'#!/bin/sh\n{shutil.which("flock")} "$@" || exit 1\n[ "$3" = grep ] && {{ {waits}; }}\nexit 0\n')
    flock.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon_process("n1")
        await made.until_session("n1")
        gang = await begun(made, "opaque", uid)
        await made.master.want("n1", with_changes(gang, 2, stop_sequence=2, **CHECKPOINT))
        await until(at.exists, "the daemon's consent")
        made.processes["n1"].kill()
        await made.processes["n1"].wait()
        if criu_dies:
            os.kill(int(at.read_text()), signal.SIGKILL)
        await made.daemon_process("n1")
        await made.until_session("n1")
        (tmp_path / "go").touch()
        parked = await saved(made, "n1", gang)
        before = counts(made, "n1", uid)
        await made.master.forget("n1", 1)
        await made.master.want("n1", from_image(made, gang, parked, "n1", 2))
        await goes_on(made, "n1", uid, 2)
        after = counts(made, "n1", uid, 2)
        assert one_after_the_other(before[: after[0] - 1], after)
        # what ran on without CRIU was not in the image, and is done again
        assert criu_dies or len(before) == after[0] - 1

    run(story)


@pytest.mark.parametrize(("kind", "place"), kinds_at_points(MOVE_POINTS))
def test_a_move_in_which_a_daemon_dies_never_runs_the_job_twice(kind: str, place: tuple[str, str]) -> None:
    run(lambda made: moves_while_a_daemon_dies(made, kind, *place))


def test_a_launcher_that_dies_before_it_has_recorded_what_it_restored_leaves_nothing(tmp_path: Path) -> None:
    def launcher(made: Cluster) -> int:
        (path,) = made.directory.glob("r-n1/launchers/*.sock")
        with Launcher(str(path)) as found:
            return found.pid

    run(lambda made: restores_while_its_launcher_dies(made, tmp_path / "criu", launcher))


def test_a_launcher_that_dies_while_an_image_is_taken_loses_nothing(tmp_path: Path) -> None:
    run(lambda made: saves_while_its_launcher_dies(made, tmp_path / "criu"))


def test_a_move_whose_image_is_lost_with_a_launcher_ends_with_the_reason() -> None:
    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon("n1")
        await made.daemon("n2")
        gang = await begun(made, "opaque", uid)
        new = await expected(made, gang)
        (path,) = (made.directory / "r-n2" / "launchers").glob("*.sock")
        with Launcher(str(path)) as launcher:
            os.kill(int(launcher.info()["pid"]), signal.SIGKILL)
        await handed_over(made, gang)
        refused = await made.master.until("n2", 2, lambda seen: bool(seen.trouble))
        assert "its image is gone with the launcher that held it" in refused.trouble
        await made.master.want("n2", with_changes(new, 2, intent=Intents.INTENT_STOP))
        await made.master.want("n1", with_changes(gang, 3))
        before = len(counts(made, "n1", uid, 1))
        await until(lambda: len(counts(made, "n1", uid, 1)) > before + 2)
        assert one_after_the_other(counts(made, "n1", uid, 1))

    run(story)


@programs
def test_a_move_that_is_given_up_leaves_the_job_where_it_was(kind: str) -> None:
    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon("n1")
        await made.daemon("n2")
        gang = await begun(made, kind, uid)
        new = await moved_in(made, gang)
        await made.master.want("n2", with_changes(new, 2, intent=Intents.INTENT_STOP))
        await made.master.until("n2", 2, in_phase(Observed.PHASE_ENDED))
        before = len(counts(made, "n1", uid, 1))
        await made.master.want("n1", with_changes(gang, 3))
        await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        await until(lambda: len(counts(made, "n1", uid, 1)) > before + 2)
        assert one_after_the_other(counts(made, "n1", uid, 1))
        assert counts(made, "n2", uid, 2) == []

    run(story)


def test_a_job_runs_on_if_its_move_is_given_up_while_no_daemon_of_its_node_lives() -> None:
    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon_process("n1", "image-packed")
        await made.daemon("n2")
        await made.until_session("n1")
        gang = await begun(made, "opaque", uid)
        await expected(made, gang)
        await handed_over(made, gang)
        async with asyncio.timeout(60):
            await made.processes["n1"].wait()
        await made.master.want("n1", with_changes(gang, 3))
        await made.daemon_process("n1")
        await goes_on(made, "n1", uid)
        assert one_after_the_other(counts(made, "n1", uid))

    run(story)


def test_a_job_that_runs_after_its_move_has_its_grace_from_the_next_daemon_too() -> None:
    saves = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: print('saves itself', flush=True))\n"

    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon("n1")
        await made.daemon_process("n2")
        await made.until_session("n2")
        gang = await begun(made, "opaque", uid, opaque(saves))
        new = await moved_in(made, gang)
        await made.master.want("n2", with_changes(new, 2, intent=Intents.INTENT_RUN))
        await goes_on(made, "n2", uid, 2)
        stop = with_changes(new, 3, intent=Intents.INTENT_STOP)
        stop.grace.FromSeconds(3600)
        await made.master.want("n2", stop)
        await until(lambda: "saves itself" in log_of(made.directory, "n2", uid, 0, 2), "the signal before the end")
        made.processes["n2"].kill()
        await made.processes["n2"].wait()
        await made.daemon_process("n2")
        await made.until_session("n2")
        await made.master.until("n2", 2, in_phase(Observed.PHASE_STOPPING))
        await goes_on(made, "n2", uid, 2)

    run(story)


@pytest.mark.parametrize("cgroups", ["none", "auto"])
def test_a_paused_job_whose_move_is_given_up_can_be_suspended_on_its_image(cgroups: str) -> None:
    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon("n1", cgroups=cgroups)
        await made.daemon("n2", cgroups=cgroups)
        gang = await begun(made, "opaque", uid)
        await made.master.want("n1", with_changes(gang, 2, stop_sequence=2, **PAUSE))
        await made.master.until("n1", 1, in_phase(Observed.PHASE_PARKED))
        new = prepared(made, gang, "n2", 2)
        await made.master.want("n2", new)
        await made.master.until("n2", 2, in_phase(Observed.PHASE_READY))
        await ended(made, "n2", new)
        parked = await saved(made, "n1", gang, sequence=3, stop_sequence=2)
        before = counts(made, "n1", uid)
        await made.master.forget("n1", 1)
        await made.master.want("n1", from_image(made, gang, parked, "n1", 3))
        await goes_on(made, "n1", uid, 3)
        assert one_after_the_other(before, counts(made, "n1", uid, 3))

    run(story)


def test_a_destination_that_cannot_use_an_image_reports_why_and_tries_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def unpack(source: int, directory: Path) -> None:
        tried.append(source)
        raise KeyError("names")

    monkeypatch.setattr(process_image, "unpack", unpack)

    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon("n1")
        await made.daemon("n2")
        gang = await begun(made, "opaque", uid)
        new = await expected(made, gang)
        await handed_over(made, gang)
        troubled = await made.master.until("n2", 2, lambda seen: bool(seen.trouble))
        assert "names" in troubled.trouble
        await ended(made, "n2", new)
        assert len(tried) == 1

    run(story)
