"""Checkpoints on nodes' own disks: fetched whole and verified, by names that lead nowhere else, and removed."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from daemon.test_checkpoints import write_shards
from ganger.injob.launcher.process_record import publish
from ganger.injob.page_layout import CHECKPOINT_BIT
from ganger_daemon.checkpoints import node_checkpoints
from ganger_daemon.checkpoints.gang_checkpoints import GangCheckpoints, OnNode
from ganger_daemon.checkpoints.node_checkpoints import (
    CheckpointFile,
    Fetcher,
    FetchError,
    KeptCheckpoint,
    kept,
    remove,
    sweep,
)
from ganger_daemon.checkpoints.storage import MANIFEST, Shard, ShardCollection, ShardReport, directories, manifest
from ganger_daemon.transfer.state_stream import StreamError, StreamRequest
from ganger_daemon.transfer.stream_server import StreamServer

UID, PATH = "5f0c8f6e-8f43-4d0e-9a0b-111111111111", "checkpoints/7-2"


def published(disk: Path, step: int = 7, epoch: int = 2) -> Path:
    tmp, final = directories(disk, UID, epoch, step)
    shards = write_shards(tmp.parent, step, epoch, 2)
    publish(str(tmp), str(final), manifest(ShardCollection(2, step).add(step, shards), UID, epoch, 1.0))
    return final


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (disk := tmp_path / "source").mkdir()
    published(disk)
    return disk


@pytest.fixture
def stream(source: Path) -> Iterator[str]:
    server = StreamServer(partial(CheckpointFile, source), "t")
    server.start()
    yield server.address
    server.close()


@pytest.fixture
def fetcher(tmp_path: Path) -> Fetcher:
    (disk := tmp_path / "disk").mkdir()
    return Fetcher(disk, "t")


def test_a_checkpoint_is_fetched_whole(source: Path, stream: str, fetcher: Fetcher) -> None:
    assert fetcher.checkpoint([stream], UID, PATH, None).step == 7
    here, there = fetcher.directory / UID / PATH, source / UID / PATH
    assert {path.name: path.read_bytes() for path in here.iterdir()} == {
        path.name: path.read_bytes() for path in there.iterdir()
    }
    assert kept(fetcher.directory) == (KeptCheckpoint(UID, PATH),)
    # Nothing is left of the way, and what is here is not fetched again.
    assert not any((fetcher.directory / ".incoming").iterdir())
    assert fetcher.checkpoint([], UID, PATH, None).step == 7


def test_a_damaged_checkpoint_is_not_taken_and_the_next_node_is_asked(
    source: Path, stream: str, fetcher: Fetcher, tmp_path: Path
) -> None:
    shard = source / UID / PATH / "rank-1.shard"
    content = bytearray(shard.read_bytes())
    content[-20] ^= 1
    shard.write_bytes(content)
    with pytest.raises(FetchError, match="damaged") as caught:
        fetcher.checkpoint([stream], UID, PATH, None)
    assert caught.value.is_lasting
    assert kept(fetcher.directory) == ()
    (whole := tmp_path / "whole").mkdir()
    published(whole)
    second = StreamServer(partial(CheckpointFile, whole), "t")
    second.start()
    try:
        assert fetcher.checkpoint([stream, second.address], UID, PATH, None).step == 7
    finally:
        second.close()


def test_a_damaged_copy_on_the_own_disk_is_replaced(source: Path, stream: str, fetcher: Fetcher) -> None:
    own = published(fetcher.directory)
    (own / "rank-0.shard").write_bytes(b"x")
    assert fetcher.checkpoint([stream], UID, PATH, None).step == 7
    assert (own / "rank-0.shard").read_bytes() == (source / UID / PATH / "rank-0.shard").read_bytes()


def test_a_node_that_does_not_answer_may_answer_later(fetcher: Fetcher) -> None:
    with pytest.raises(FetchError) as caught:
        fetcher.checkpoint(["127.0.0.1:1"], UID, PATH, None)
    assert not caught.value.is_lasting
    with pytest.raises(FetchError, match="no node that has it is there"):
        fetcher.checkpoint([], UID, PATH, None)


@pytest.mark.parametrize(
    "file",
    [
        "checkpoints/7-2/../../../secret",
        "../secret",
        "checkpoints/../secret",
        "/etc/passwd",
        f"checkpoints/7-2/{MANIFEST}/x",
        "checkpoints/7-2/rank-0.shard\0",
        "logs/7-2/rank-0.shard",
        "checkpoints/7-2/other",
        "",
    ],
)
def test_only_files_of_checkpoints_are_served(source: Path, file: str) -> None:
    with pytest.raises(StreamError):
        CheckpointFile(source, StreamRequest("t", UID, 0, 0, 0, 0, file))


@pytest.mark.parametrize("uid", ["..", "", "a/b", "."])
def test_only_directories_of_jobs_are_served(source: Path, uid: str) -> None:
    with pytest.raises(StreamError):
        CheckpointFile(source, StreamRequest("t", uid, 0, 0, 0, 0, f"{PATH}/{MANIFEST}"))


@pytest.mark.parametrize("step", ["checkpoints", "checkpoints/7-2", "checkpoints/7-2/rank-0.shard"])
def test_a_link_in_the_place_of_a_step_is_not_followed(source: Path, tmp_path: Path, step: str) -> None:
    path = source / UID / step
    path.rename(moved := tmp_path / "moved")
    path.symlink_to(moved)
    with pytest.raises(StreamError, match="not here"):
        CheckpointFile(source, StreamRequest("t", UID, 0, 0, 0, 0, f"{PATH}/rank-0.shard"))


async def _yes(report: ShardReport) -> bool:
    return True


def _unused(tmp: Path, final: Path, fields: dict[str, object]) -> None:
    raise AssertionError("only the leader publishes")


def _publish(tmp: Path, final: Path, fields: dict[str, object]) -> None:
    publish(str(tmp), str(final), fields)


def _collect(tmp: Path, shards: Collection[Shard]) -> None:
    """All shards are of the leader's own ranks."""


async def _copied(path: str) -> tuple[tuple[str, ...], str]:
    return ("n3",), ""


def test_a_restarted_daemon_of_a_member_reports_its_shard_again(tmp_path: Path) -> None:
    directory, on_node = tmp_path / UID / "checkpoints", OnNode("n2", _collect, _copied)

    async def story() -> None:
        def keeper() -> GangCheckpoints:
            return GangCheckpoints(UID, 1, 2, False, _unused, _yes, lambda: None, on_node=on_node)

        write_shards(directory, 9, 1, 2)
        for member in (keeper(), keeper()):
            await member.durable(tmp_path, 5, 9, (1,))
            assert (member.is_settled(5), member.refusal(5)) == (True, "")
        write_shards(directory, 12, 1, 2)
        await keeper().durable(tmp_path, 6, 12, (1,))

    asyncio.run(story())
    # That of the checkpoint before has gone.
    assert [path.name for path in directory.iterdir()] == ["12-1.tmp"]


@pytest.mark.parametrize(("agreement", "waits"), [(5, True), (CHECKPOINT_BIT | 5, False)])
def test_only_ranks_that_are_to_end_wait_for_the_copy(tmp_path: Path, agreement: int, waits: bool) -> None:
    async def story() -> None:
        is_begun, may_end = asyncio.Event(), asyncio.Event()
        changes: asyncio.Queue[None] = asyncio.Queue()

        async def copy(path: str) -> tuple[tuple[str, ...], str]:
            is_begun.set()
            await may_end.wait()
            return await _copied(path)

        on_node = OnNode("n1", _collect, copy)
        keeper = GangCheckpoints(UID, 1, 1, True, _publish, _yes, lambda: changes.put_nowait(None), on_node=on_node)
        shards = write_shards(tmp_path / UID / "checkpoints", 9, 1, 1)
        gathering = asyncio.ensure_future(keeper.gather(tmp_path, agreement, 9, shards))
        await is_begun.wait()
        assert keeper.published is not None
        done, _ = await asyncio.wait([gathering], timeout=0.05 if waits else None)
        assert (bool(done), keeper.is_settled(agreement)) == (not waits, not waits)
        assert keeper.published.nodes == ("n1",)
        may_end.set()
        await gathering
        while keeper.published.nodes != ("n1", "n3"):
            await changes.get()
        assert keeper.is_settled(agreement)

    asyncio.run(story())


def test_what_gangs_that_are_gone_have_left_is_swept(fetcher: Fetcher) -> None:
    disk, other = fetcher.directory, UID.replace("1", "2")
    left, fresh = (disk / UID / "checkpoints" / name for name in ("8-2.tmp", "9-2.tmp"))
    published(disk)
    for path in (left, fresh):
        path.mkdir()
        (path / "rank-1.shard").write_bytes(b"x")
    empty = disk / other / "checkpoints"
    empty.mkdir(parents=True)
    for path in (left, empty, disk / other):
        os.utime(path, (1.0, 1.0))
    sweep(disk, {UID})
    assert left.exists()
    sweep(disk, ())
    assert sorted(path.name for path in (disk / UID / "checkpoints").iterdir()) == ["7-2", "9-2.tmp"]
    assert not (disk / other).exists()


def test_what_is_removed_is_named_and_the_rest_stays(fetcher: Fetcher) -> None:
    disk = fetcher.directory
    for step in (7, 8):
        published(disk, step)
    remove(disk, [KeptCheckpoint(UID, PATH), KeptCheckpoint("..", "checkpoints/1-1"), KeptCheckpoint(UID, "../x")], ())
    assert kept(disk) == (KeptCheckpoint(UID, "checkpoints/8-2"),)
    # A gang of the job is here, and may be writing the next one.
    remove(disk, [KeptCheckpoint(UID, "checkpoints/8-2")], {UID})
    assert (disk / UID / "checkpoints").is_dir()
    published(disk, 9)
    remove(disk, [KeptCheckpoint(UID, "checkpoints/9-2")], ())
    assert not (disk / UID).exists()


def test_two_that_want_one_checkpoint_fetch_it_once(
    source: Path, stream: str, fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_is_at_it, both_are_there = threading.Event(), threading.Event()
    receive, received = Fetcher._receive, []

    def slow(self: Fetcher, *args: object) -> int:
        received.append(args)
        one_is_at_it.set()
        assert both_are_there.wait(20)
        return receive(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Fetcher, "_receive", slow)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(fetcher.checkpoint, [stream], UID, PATH, None)
        assert one_is_at_it.wait(20)
        second = pool.submit(fetcher.checkpoint, [stream], UID, PATH, None)
        both_are_there.set()
        assert first.result(20).step == second.result(20).step == 7
    assert len(received) == 3


def test_a_source_that_cannot_open_a_file_just_now_may_answer_later(
    source: Path, stream: str, fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(base: Path, name: str) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(node_checkpoints, "_opened", none_left)
        with pytest.raises(StreamError) as caught:
            CheckpointFile(source, StreamRequest("t", UID, 0, 0, 0, 0, f"{PATH}/{MANIFEST}"))
    assert caught.value.retry


def test_a_copy_that_is_lost_does_not_stand_for_one_whose_node_is_away(stream: str, fetcher: Fetcher) -> None:
    path = "checkpoints/9-2"
    with pytest.raises(FetchError, match="not here") as caught:
        fetcher.checkpoint([stream], UID, path, None)
    assert caught.value.is_lasting
    for away in ("127.0.0.1:1", ""):
        with pytest.raises(FetchError, match="not here") as caught:
            fetcher.checkpoint([stream, away], UID, path, None)
        assert not caught.value.is_lasting


def test_a_shard_of_an_earlier_stop_at_the_same_step_is_fetched_anew(tmp_path: Path, fetcher: Fetcher) -> None:
    (disk := tmp_path / "member").mkdir()
    tmp, _ = directories(disk, UID, 2, 7)
    shards = write_shards(tmp.parent, 7, 2, 2)
    unfinished, _ = directories(fetcher.directory, UID, 2, 7)
    write_shards(unfinished.parent, 7, 2, 2)
    stale = unfinished / "rank-1.shard"
    content = stale.read_bytes()
    stale.write_bytes(content[:-20] + bytes([content[-20] ^ 1]) + content[-19:])
    server = StreamServer(partial(CheckpointFile, disk), "t")
    server.start()
    try:
        fetcher.shard(server.address, UID, unfinished, shards[1], None)
        assert stale.read_bytes() == content
        with pytest.raises(StreamError, match="not the one that its node reported"):
            fetcher.shard(server.address, UID, unfinished, replace(shards[1], digest="another"), None)
    finally:
        server.close()


def test_a_file_that_its_job_cuts_off_on_the_way_ends_the_stream(
    source: Path, fetcher: Fetcher, tmp_path: Path
) -> None:
    class Cut(CheckpointFile):
        def progress(self) -> tuple[int, int]:
            size, filled = super().progress()
            return size + 1, filled + 1

    server = StreamServer(partial(Cut, source), "t")
    server.start()
    try:
        with pytest.raises(FetchError, match="closed the connection before the file was complete"):
            fetcher.checkpoint([server.address], UID, PATH, None)
    finally:
        server.close()
