"""Checkpoints on nodes' own disks: fetched whole and verified, by names that lead nowhere else, and removed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from daemon.test_checkpoints import write_shards
from ganger.injob.launcher.process_record import publish
from ganger_daemon.checkpoints.node_checkpoints import (
    CheckpointFile,
    Fetcher,
    FetchError,
    KeptCheckpoint,
    kept,
    remove,
)
from ganger_daemon.checkpoints.storage import MANIFEST, ShardCollection, directories, manifest
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
