"""Checkpoints on nodes' own disks: fetched whole and verified, by names that lead nowhere else, and removed."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from daemon.test_checkpoints import write_shards
from ganger.agent.v1 import agent_pb2, peer_pb2
from ganger.injob.launcher.process_record import publish
from ganger.injob.page_layout import CHECKPOINT_BIT
from ganger.v1 import job_pb2
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
from ganger_daemon.checkpoints.storage import (
    MANIFEST,
    Shard,
    ShardCollection,
    ShardReport,
    directories,
    give_storage,
    manifest,
)
from ganger_daemon.gang.checkpointing import copy_to_first
from ganger_daemon.gang.gang_context import LocalPart
from ganger_daemon.gang.launch_plan import restore_from_nodes
from ganger_daemon.node.accounts import Account
from ganger_daemon.node.daemon_files import remove_tree
from ganger_daemon.transfer.state_stream import StreamError, StreamRequest
from ganger_daemon.transfer.stream_server import StreamServer
from grpc.aio import AioRpcError, Metadata
from kit.accounts import STRANGER, needs_a_stranger

UID, PATH = "5f0c8f6e-8f43-4d0e-9a0b-111111111111", "checkpoints/7-2"
# Ranks of each node of the gang that saves.
BY_NODE = [[0], [1]]


def published(disk: Path, step: int = 7, epoch: int = 2) -> Path:
    tmp, final = directories(disk, UID, epoch, step)
    shards = write_shards(tmp.parent, step, epoch, 2)
    content = manifest(ShardCollection(2, step).add(step, shards), UID, epoch, 1.0, by_node=BY_NODE)
    publish(str(tmp), str(final), content)
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
    return Fetcher(disk, "t", patience_s=0.0)


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


def test_a_member_fetches_the_shards_of_its_ranks_alone_and_has_no_copy(
    source: Path, stream: str, fetcher: Fetcher
) -> None:
    older, newer = (fetcher.directory / UID / "checkpoints" / name for name in ("5-1.tmp", "9-3.tmp"))
    older.mkdir(parents=True)
    newer.mkdir()
    found = fetcher.part([stream], UID, PATH, (1,), BY_NODE, None)
    assert sorted(path.name for path in found.iterdir()) == [MANIFEST, "rank-1.shard"]
    assert (found / "rank-1.shard").read_bytes() == (source / UID / PATH / "rank-1.shard").read_bytes()
    assert kept(fetcher.directory) == ()
    # What earlier attempts have left goes, what a present one writes stays.
    assert not older.exists()
    assert newer.exists()
    desired = agent_pb2.DesiredGang(job_uid=UID, epoch=3, spec=job_pb2.JobSpec())
    desired.restore.checkpoint_path, desired.restore.step = PATH, 7
    desired.restore.checkpoint_streams.append(stream)
    for ranks in BY_NODE:
        desired.members.add(ranks=ranks)
    member, leader = LocalPart((1,), (2,), 2, leads=False), LocalPart((0,), (1,), 2, leads=True)
    assert restore_from_nodes(desired, fetcher, member, "n2", None).path == str(found)
    # The leader has all of it: a further copy.
    assert restore_from_nodes(desired, fetcher, leader, "n2", None).path == str(fetcher.directory / UID / PATH)
    assert kept(fetcher.directory) == (KeptCheckpoint(UID, PATH),)
    assert restore_from_nodes(desired, fetcher, member, "n2", None).path == str(fetcher.directory / UID / PATH)


@pytest.mark.parametrize("by_node", [[[0, 1], [2]], [[1], [0]], [[0, 1], []]])
def test_ranks_that_are_divided_over_nodes_otherwise_have_all_shards(
    stream: str, fetcher: Fetcher, by_node: list[list[int]]
) -> None:
    """Their number is another one, or a script that shards over the ranks of each node reads shards of others."""
    found = fetcher.part([stream], UID, PATH, (1,), by_node, None)
    assert sorted(path.name for path in found.iterdir()) == [MANIFEST, "rank-0.shard", "rank-1.shard"]


def test_a_shard_that_a_member_has_saved_itself_is_not_fetched(
    stream: str, fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shards(fetcher.directory / UID / "checkpoints", 7, 2, 2)
    receive, fetched = Fetcher._receive, []

    def noted(self: Fetcher, stream: str, request: StreamRequest, *rest: object) -> int:
        fetched.append(request.file)
        return receive(self, stream, request, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Fetcher, "_receive", noted)
    own = fetcher.part([stream], UID, PATH, (0, 1), BY_NODE, None)
    assert fetched == [f"{PATH}/{MANIFEST}"]
    (own / "rank-1.shard").write_bytes(b"damaged")
    fetcher.part([stream], UID, PATH, (0, 1), BY_NODE, None)
    assert fetched[1:] == [f"{PATH}/{MANIFEST}", f"{PATH}/rank-1.shard"]


def test_a_node_that_is_being_restarted_is_asked_again_with_growing_pauses(
    source: Path, fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    former = StreamServer(partial(CheckpointFile, source), "t")
    address = former.address
    former.start()
    former.close()
    pauses: list[float] = []
    servers: list[StreamServer] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            port = int(address.rpartition(":")[2])
            servers.append(StreamServer(partial(CheckpointFile, source), "t", port=port))
            servers[0].start()

    clock = SimpleNamespace(sleep=pause, monotonic=time.monotonic, time=time.time)
    monkeypatch.setattr(node_checkpoints, "time", clock)
    try:
        assert replace(fetcher, patience_s=60.0).checkpoint([address], UID, PATH, None).step == 7
    finally:
        for server in servers:
            server.close()
    assert pauses == [0.1, 0.2, 0.4]


def test_a_connection_that_breaks_is_gone_on_with_after_a_pause(
    source: Path, fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    offsets: list[int] = []

    class Broken(CheckpointFile):
        """Ends the first connection behind half of the second shard."""

        def __init__(self, directory: Path, request: StreamRequest) -> None:
            super().__init__(directory, request)
            self._is_cut = "rank-1" in request.file and not offsets
            self._looks = 0
            if "rank-1" in request.file:
                offsets.append(request.offset)

        def progress(self) -> tuple[int, int]:
            size, filled = super().progress()
            return size, filled // 2 if self._is_cut else filled

        def valid(self) -> bool:
            # Before the answer, and before each piece.
            self._looks += 1
            return not self._is_cut or self._looks < 3

    pauses: list[float] = []
    clock = SimpleNamespace(sleep=pauses.append, monotonic=time.monotonic, time=time.time)
    monkeypatch.setattr(node_checkpoints, "time", clock)
    server = StreamServer(partial(Broken, source), "t")
    server.start()
    try:
        assert fetcher.checkpoint([server.address], UID, PATH, None).step == 7
    finally:
        server.close()
    size = (source / UID / PATH / "rank-1.shard").stat().st_size
    assert offsets == [0, size // 2]
    assert pauses == [0.1]


@needs_a_stranger
def test_what_is_fetched_for_an_account_is_its_own(stream: str, fetcher: Fetcher) -> None:
    account = Account("stranger", STRANGER, STRANGER, (STRANGER,), "/")
    os.chmod(fetcher.directory, 0o711)
    fetcher.checkpoint([stream], UID, PATH, account)
    part = fetcher.part([stream], UID, "checkpoints/7-2", (0,), BY_NODE, account)
    assert part.name == "7-2", "the whole one is there"
    remove_tree(part)
    part = fetcher.part([stream], UID, PATH, (0,), BY_NODE, account)
    for path in (part.parent, part, *part.iterdir()):
        status = path.stat()
        assert (status.st_uid, status.st_gid, status.st_mode & 0o077) == (STRANGER, STRANGER, 0), path
    # Its logs and process images stay this process's.
    assert (fetcher.directory / UID / "images").stat().st_uid == 0


@needs_a_stranger
def test_process_images_that_a_member_fetches_for_an_account_are_out_of_its_reach(
    source: Path, stream: str, fetcher: Fetcher
) -> None:
    account = Account("stranger", STRANGER, STRANGER, (STRANGER,), "/")
    (source / UID / "checkpoints").rename(source / UID / "images")
    part = fetcher.part([stream], UID, "images/7-2", (1,), BY_NODE, account)
    assert {path.stat().st_uid for path in (part.parent, part, *part.iterdir())} == {0}


@needs_a_stranger
def test_a_link_that_an_account_has_put_in_the_place_of_an_unfinished_checkpoint_is_not_followed(
    stream: str, fetcher: Fetcher, tmp_path: Path
) -> None:
    account = Account("stranger", STRANGER, STRANGER, (STRANGER,), "/")
    give_storage(fetcher.directory, UID, account)
    (foreign := tmp_path / "foreign").mkdir()
    (fetcher.directory / UID / "checkpoints" / "7-2.tmp").symlink_to(foreign)
    with pytest.raises(FetchError):
        fetcher.part([stream], UID, PATH, (0,), BY_NODE, account)
    assert not list(foreign.iterdir())
    assert foreign.stat().st_uid == 0


class _Peers:
    """Daemons by address: their node, or why they keep no copy."""

    def __init__(self, answers: dict[str, str]) -> None:
        self._answers = answers
        self.asked: list[str] = []

    def stub(self, address: str) -> SimpleNamespace:
        return SimpleNamespace(KeepCheckpoint=partial(self._keep, address))

    async def _keep(self, address: str, request: peer_pb2.KeepCheckpointRequest) -> peer_pb2.KeepCheckpointResponse:
        self.asked.append(address)
        answer = self._answers[address]
        if answer.startswith("nodes/"):
            return peer_pb2.KeepCheckpointResponse(node=answer)
        raise AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata(), answer)


@pytest.mark.parametrize(
    ("answers", "nodes", "trouble"),
    [
        ({"a:1": "it is full", "b:1": "nodes/n3", "c:1": "nodes/n4"}, ("n3",), ""),
        (
            {"a:1": "it is full", "b:1": "away"},
            (),
            "COPY_MISSING: the checkpoint is on one node only: a:1: it is full; b:1: away",
        ),
        ({}, (), ""),
    ],
    ids=["the second can", "none can", "none is named"],
)
def test_the_first_daemon_that_can_keeps_a_copy_and_without_one_the_reasons_are_reported(
    answers: dict[str, str], nodes: tuple[str, ...], trouble: str
) -> None:
    peers = _Peers(answers)
    found = asyncio.run(copy_to_first(peers, list(answers), peer_pb2.KeepCheckpointRequest()))  # type: ignore[arg-type]
    assert found == (nodes, trouble)
    assert peers.asked == list(answers)[: 2 if nodes else len(answers)]
