"""What ended jobs leave on storage goes in time; what may still be wanted never does."""

from __future__ import annotations

import asyncio
import json
import math
import os
import uuid
from pathlib import Path

import pytest
from ganger.job_state import JobState
from ganger.v1.job_service_pb2 import CancelJobRequest
from ganger.wire.times import seconds
from ganger_master.app import Master
from ganger_master.config import Config, ConfigError, load
from ganger_master.core.commands import RecordedEnd
from ganger_master.runtime.state_directory import (
    CHECKPOINTS,
    LOGS,
    expired,
    known_ends,
    may_go,
    note_ended,
    noted_ends,
    remove,
)
from hypothesis import given
from hypothesis import strategies as st
from rpc.kit import Speaker, serving, until

DAY = 86400.0
ENDED, ALIVE, STRANGE = (str(uuid.UUID(int=number)) for number in (1, 2, 3))


def left_by(storage: Path, uid: str) -> Path:
    """What a job has on storage."""
    job = storage / uid
    (job / LOGS).mkdir(parents=True)
    (job / LOGS / "rank-0.1.log").write_text("a line\n")
    (job / CHECKPOINTS / "7-1").mkdir(parents=True)
    (job / CHECKPOINTS / "7-1" / "MANIFEST.json").write_text(json.dumps({}))
    return job


def swept(storage: Path, ends: dict[str, float], now: float, logs: float | None, checkpoints: float | None) -> None:
    note_ended(storage, known_ends(ends, {}))
    for part in expired(storage, ends, {LOGS: logs, CHECKPOINTS: checkpoints}, now):
        remove(part)


@pytest.mark.parametrize(
    ("ended", "kept", "goes"),
    [(0.0, DAY, True), (9 * DAY, DAY, False), (math.inf, 0.0, False), (None, 0.0, False), (0.0, None, False)],
)
def test_what_is_over_goes_once_it_was_kept(ended: float | None, kept: float | None, goes: bool) -> None:
    assert may_go(ended, kept, now=10 * DAY) is goes


def test_logs_and_checkpoints_go_each_in_its_time_and_with_the_last_the_directory(tmp_path: Path) -> None:
    job, alive = left_by(tmp_path, ENDED), left_by(tmp_path, ALIVE)
    ends = {ENDED: 100.0, ALIVE: math.inf}
    swept(tmp_path, ends, 100.0 + DAY, logs=2 * DAY, checkpoints=4 * DAY)
    assert {path.name for path in job.iterdir()} == {LOGS, CHECKPOINTS, "ended"}
    swept(tmp_path, ends, 101.0 + 2 * DAY, logs=2 * DAY, checkpoints=4 * DAY)
    assert {path.name for path in job.iterdir()} == {CHECKPOINTS, "ended"}
    swept(tmp_path, ends, 101.0 + 4 * DAY, logs=2 * DAY, checkpoints=4 * DAY)
    assert not job.exists()
    assert {path.name for path in alive.iterdir()} == {LOGS, CHECKPOINTS}


def test_checkpoints_that_were_begun_go_as_soon_as_their_job_has_ended_and_not_before(tmp_path: Path) -> None:
    job, alive = left_by(tmp_path, ENDED), left_by(tmp_path, ALIVE)
    for directory in (job, alive):
        for name in ("9-1.tmp", ".trash-5-1", "8-2.tmp"):
            (directory / CHECKPOINTS / name).mkdir()
            (directory / CHECKPOINTS / name / "rank-0.shard.part").write_bytes(b"1234")
    swept(tmp_path, {ENDED: 100.0, ALIVE: math.inf}, 101.0, logs=None, checkpoints=None)
    assert [path.name for path in (job / CHECKPOINTS).iterdir()] == ["7-1"]
    assert len(list((alive / CHECKPOINTS).iterdir())) == 4


def test_files_of_a_noted_job_go_though_the_master_has_dropped_it_and_those_of_an_unknown_job_stay(
    tmp_path: Path,
) -> None:
    noted, strange = left_by(tmp_path, ENDED), left_by(tmp_path, STRANGE)
    note_ended(tmp_path, known_ends({ENDED: 100.0, STRANGE: math.inf}, {}))
    swept(tmp_path, {}, 100.0 + 1_000 * DAY, logs=DAY, checkpoints=DAY)
    assert not noted.exists()
    assert (strange / CHECKPOINTS / "7-1" / "MANIFEST.json").exists()


def test_notes_of_ended_jobs_are_read_also_those_of_an_older_master_and_beside_a_damaged_one(
    tmp_path: Path,
) -> None:
    left_by(tmp_path, ENDED)
    (left_by(tmp_path, ALIVE) / "ended").write_text("12.5\n")
    (left_by(tmp_path, STRANGE) / "ended").write_bytes(b"\xff\xfe")
    note_ended(tmp_path, {ENDED: RecordedEnd(JobState.CANCELLED, 100.0)})
    found = noted_ends(tmp_path, [ENDED, ALIVE, STRANGE])
    assert found == {ENDED: RecordedEnd(JobState.CANCELLED, 100.0), ALIVE: RecordedEnd(None, 12.5)}


def test_what_is_not_a_jobs_is_left_alone(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    elsewhere = left_by(outside, ENDED)
    storage = tmp_path / "storage"
    storage.mkdir()
    (storage / ENDED).symlink_to(elsewhere)
    (storage / "datasets" / LOGS).mkdir(parents=True)
    (storage / ".ganger-token").write_text("token")
    job = left_by(storage, ALIVE)
    (job / "mine.txt").write_text("put there by hand")
    (storage / STRANGE).mkdir()
    (storage / STRANGE / LOGS).symlink_to(elsewhere / LOGS)
    swept(storage, {ENDED: 1.0, ALIVE: 1.0, STRANGE: 1.0}, 10 * DAY, logs=0.0, checkpoints=0.0)
    assert (elsewhere / LOGS / "rank-0.1.log").exists()
    assert (storage / "datasets" / LOGS).exists()
    assert {path.name for path in job.iterdir()} == {"mine.txt", "ended"}


def test_an_interrupted_removal_continues(tmp_path: Path) -> None:
    job = left_by(tmp_path, ENDED)
    os.rename(job / CHECKPOINTS, job / ".trash-checkpoints")
    swept(tmp_path, {ENDED: 1.0}, 10 * DAY, logs=DAY, checkpoints=DAY)
    assert not job.exists()


@given(
    st.dictionaries(
        st.uuids().map(str), st.one_of(st.none(), st.just(math.inf), st.floats(0.0, 20 * DAY)), min_size=1, max_size=5
    ),
    st.one_of(st.none(), st.floats(0.0, 20 * DAY)),
)
def test_only_files_of_jobs_that_ended_long_enough_ago_are_removed(
    tmp_path_factory: pytest.TempPathFactory, ends: dict[str, float | None], kept: float | None
) -> None:
    storage, now = tmp_path_factory.mktemp("storage"), 20 * DAY
    for uid in ends:
        left_by(storage, uid)
    swept(storage, {uid: ended for uid, ended in ends.items() if ended is not None}, now, logs=kept, checkpoints=None)
    gone = {uid for uid in ends if not (storage / uid / LOGS).exists()}
    assert gone == {uid for uid, ended in ends.items() if may_go(ended, kept, now)}
    assert all((storage / uid / CHECKPOINTS / "7-1").exists() for uid in ends)


def test_a_master_removes_what_ended_jobs_left_when_it_starts(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            ended, waiting = await served.submit(), await served.submit()
            storage = served.master.config.storage_path
            for job in (ended, waiting):
                left_by(storage, job.uid)
            number = int(ended.name.removeprefix("jobs/"))
            await served.jobs.CancelJob(CancelJobRequest(name=ended.name))
            assert served.master.writer.committed.jobs[number].state.is_finished
        config = Config(
            state_dir=tmp_path / "state",
            listen=f"unix:{tmp_path}/s2",
            scheduler_host=False,
            policy="fifo-backfill",
            logs_kept_s=0.0,
            checkpoints_kept_s=None,
        )
        master = Master(config)
        await master.start()
        try:
            await until(lambda: not (storage / ended.uid / LOGS).exists())
            assert (storage / ended.uid / CHECKPOINTS).exists()
            assert (storage / waiting.uid / LOGS).exists()
        finally:
            await master.stop()

    asyncio.run(story())


@pytest.mark.parametrize("kept", [7 * DAY, None])
def test_daemons_are_told_how_long_logs_are_kept(tmp_path: Path, kept: float | None) -> None:
    async def story() -> None:
        async with serving(tmp_path, logs_kept_s=kept) as served:
            session = await Speaker(served, "n1").open()
            assert (seconds(session.log_retention) if session.HasField("log_retention") else None) == kept

    asyncio.run(story())


def test_how_long_is_said_as_other_durations_are() -> None:
    config = load({"state_dir": "/s"}, {"GANGER_MASTER_LOGS_KEPT": "7d"}, 'checkpoints_kept = "never"\n')
    assert (config.logs_kept_s, config.checkpoints_kept_s) == (7 * DAY, None)
    default = load({"state_dir": "/s"}, {})
    assert (default.logs_kept_s, default.checkpoints_kept_s) == (30 * DAY, 30 * DAY)
    with pytest.raises(ConfigError, match="logs_kept: 'long' is not a duration"):
        load({"state_dir": "/s"}, {"GANGER_MASTER_LOGS_KEPT": "long"})
