"""The writer recorded: what it decided is decided again, and nothing that befalls the recording befalls the master."""

from __future__ import annotations

import asyncio
import gzip
import resource
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from decision_log.kit import SECRET, rerun_of
from ganger.cluster.resources import Role, TaskShape
from ganger.wire.errors import AlreadyRecording, Internal, NotReady
from ganger_master.core.answers import JobAnswer
from ganger_master.core.commands import CancelJob, SubmitJob
from ganger_master.core.decide import decide
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.settings import CoreSettings
from ganger_master.decision_log import recorder
from ganger_master.decision_log.log_file import RecordingError
from ganger_master.decision_log.recorder import DecisionRecording, Recorded
from ganger_master.decision_log.rerun import Begun, Broke, Ended
from ganger_master.runtime.writer import Writer
from ganger_master.store.tables import Problem, StoreBatch, StoreError
from kit.memory_store import MemoryStore

LONG = 60.0


def submission(number: int) -> SubmitJob:
    spec = JobSpec(("run", SECRET), (Role("worker", 1, TaskShape(1)),), environment={"TOKEN": SECRET})
    return SubmitJob(spec, f"uid-{number}", "ann", f"request-{number}")


class FailingStore(MemoryStore):
    """Memory that is full as often as told."""

    failures = 0

    def commit(self, batch: StoreBatch) -> None:
        if self.failures:
            self.failures -= 1
            raise StoreError(Problem.FULL, "told to fail")
        super().commit(batch)


def told(directory: Path, story: Callable[[Writer], Awaitable[None]], **options: Any) -> Recorded:
    """What came of recording a writer while a story is told, ended by hand."""

    async def tell() -> Recorded:
        writer = Writer(FailingStore(), CoreSettings(storage_token=SECRET), asyncio.get_running_loop().time)
        await writer.start()
        assert await writer.submit(submission(1)) == JobAnswer(1)
        recording = DecisionRecording(directory, "test", **options)
        asked = asyncio.ensure_future(recorder.record(writer, recording, LONG))
        await asyncio.sleep(0)
        try:
            await story(writer)
            writer.end_recording("told to end")
            return await asked
        finally:
            # Whatever became of the recording, the master takes jobs.
            assert isinstance(await writer.submit(submission(1_000)), JobAnswer)
            await writer.close()

    return asyncio.run(asyncio.wait_for(tell(), 30.0))


async def submit_some(writer: Writer, count: int = 20) -> None:
    await asyncio.gather(*(writer.submit(submission(number)) for number in range(2, count + 2)))
    await writer.submit(CancelJob(3))
    # A repeated submission is recognised by its description, hidden or not.
    assert await writer.submit(submission(5)) == JobAnswer(5)


@pytest.mark.parametrize("with_environment", [False, True])
def test_what_was_decided_is_decided_again_and_secrets_are_kept_only_if_asked_for(
    tmp_path: Path, with_environment: bool
) -> None:
    # What a master left that was killed while it recorded.
    (tmp_path / "captures").mkdir(0o700)
    (tmp_path / "captures" / "old.jsonl.gz.partial").touch()
    found = told(tmp_path / "captures", submit_some, with_environment=with_environment)
    replayed = rerun_of(found.path)
    assert replayed.differences == []
    assert found.commands == len(replayed.decided) == 22
    assert found.reason == "told to end"
    text = gzip.decompress(found.path.read_bytes()).decode()
    assert (SECRET in text) is with_environment
    assert text.count(f'"storage_token":"{SECRET}"') == 0
    assert stat.S_IMODE(found.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(found.path.parent.stat().st_mode) == 0o700
    assert [path.name for path in found.path.parent.iterdir()] == [found.path.name]


def test_a_state_that_is_read_from_the_store_again_is_where_the_rerun_goes_on(tmp_path: Path) -> None:
    async def story(writer: Writer) -> None:
        await submit_some(writer)
        writer._store.failures = 1  # type: ignore[attr-defined]
        with pytest.raises(NotReady):
            await writer.submit(submission(100))
        while True:
            try:
                await writer.submit(submission(101))
                return
            except NotReady:
                await asyncio.sleep(0.01)

    found = told(tmp_path, story)
    replayed = rerun_of(found.path)
    assert replayed.differences == []
    assert [one.cause for one in replayed.happened if isinstance(one, Begun)] == [
        "the recording began",
        "the state was read from the store",
    ]


def test_a_core_that_breaks_breaks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = decide

    def broken(state: Any, command: Any, now: float) -> Any:
        assert not isinstance(command, CancelJob), "a bug"
        return whole(state, command, now)

    async def story(writer: Writer) -> None:
        with pytest.raises(Internal):
            await writer.submit(CancelJob(1))
        while True:
            try:
                await writer.submit(submission(2))
                return
            except NotReady:
                await asyncio.sleep(0.01)

    monkeypatch.setattr("ganger_master.core.machine.decide", broken)
    found = told(tmp_path, story)
    replayed = rerun_of(found.path)
    assert replayed.differences == []
    (broke,) = [one for one in replayed.happened if isinstance(one, Broke)]
    assert (broke.command, broke.error.splitlines()[0]) == (CancelJob(1), "AssertionError: a bug")
    monkeypatch.undo()
    # Mended, it does what it should have done, and the rerun says so.
    assert next(one.now for one in rerun_of(found.path).differences) == "the core did not fail"


def test_a_disk_that_is_full_ends_the_recording_and_leaves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ended = asyncio.Event()

    async def story(writer: Writer) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4_096, hard))
        recording = writer._recording._present
        assert recording is not None
        number = 2
        while not recording.ending.is_set():
            await asyncio.gather(*(writer.submit(submission(number + more)) for more in range(100)))
            number += 100
        ended.set()

    try:
        with pytest.raises(RecordingError, match=r"cannot record into .*: file too large"):
            told(tmp_path, story)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert ended.is_set()
    assert list(tmp_path.iterdir()) == []
    assert "recording failed" in caplog.text


def test_a_file_that_has_its_size_is_ended_and_whole(tmp_path: Path) -> None:
    async def story(writer: Writer) -> None:
        recording = writer._recording._present
        assert recording is not None
        number = 2
        while not recording.ending.is_set():
            await asyncio.gather(*(writer.submit(submission(number + more)) for more in range(100)))
            number += 100
        await recording.done

    found = told(tmp_path, story, most_bytes=40_000)
    assert found.reason == "it has 40000 bytes"
    replayed = rerun_of(found.path)
    assert replayed.differences == []
    assert isinstance(replayed.happened[-1], Ended)


def test_a_recording_leaves_room_on_the_disk(tmp_path: Path) -> None:
    async def story(writer: Writer) -> None:
        assert writer._recording._present is not None
        await writer._recording._present.ending.wait()

    with pytest.raises(RecordingError, match=r"the disk has less than .* bytes left before the state is written"):
        told(tmp_path, story, left_bytes=1 << 60)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "captures").write_text("a file")

    async def story(writer: Writer) -> None:
        assert writer._recording._present is not None
        await writer._recording._present.ending.wait()

    with pytest.raises(RecordingError, match=r"cannot record into .*captures"):
        told(tmp_path / "captures", story)


def test_there_is_one_recording_at_a_time_and_it_ends_with_its_time_or_its_asker_or_its_master(tmp_path: Path) -> None:
    async def story() -> None:
        writer = Writer(MemoryStore(), CoreSettings(), asyncio.get_running_loop().time)
        await writer.start()
        short = await recorder.record(writer, DecisionRecording(tmp_path, "test"), 0.05)
        assert short.reason == "its time was over"
        first = DecisionRecording(tmp_path, "test")
        asked = asyncio.ensure_future(recorder.record(writer, first, LONG))
        await asyncio.sleep(0)
        with pytest.raises(AlreadyRecording):
            await recorder.record(writer, DecisionRecording(tmp_path, "test"), LONG)
        await writer.submit(submission(1))
        asked.cancel()
        assert (await first.done).reason == "the client that started it went away"
        last = DecisionRecording(tmp_path, "test")
        asked = asyncio.ensure_future(recorder.record(writer, last, LONG))
        await asyncio.sleep(0)
        await writer.submit(submission(2))
        await writer.close()
        # A master that stops waits until the file is complete.
        assert last.done.done()
        assert (await asked).reason == "the master stopped"
        for recorded in (short, await first.done, await asked):
            assert rerun_of(recorded.path).differences == []

    asyncio.run(asyncio.wait_for(story(), 30.0))
