"""Checkpoints on storage: what exists, what can be trusted, what is taken instead, what goes."""

from __future__ import annotations

import json
from pathlib import Path

from ganger.injob import image
from ganger_daemon.checkpoints.collect import collect, collect_abandoned
from ganger_daemon.checkpoints.keeper import publish_here
from ganger_daemon.checkpoints.layout import CheckpointName, complete
from ganger_daemon.checkpoints.publish import Gathering, Shard, manifest
from ganger_daemon.checkpoints.storage import proved, room_missing
from ganger_daemon.checkpoints.verify import Unreadable, Verified, describe_shard, verify


def make(directory: Path, step: int, epoch: int = 1, world: int = 2) -> Path:
    tmp = directory / f"{step}-{epoch}.tmp"
    tmp.mkdir(parents=True)
    shards = []
    for rank in range(world):
        header = {"format": 1, "step": step, "rank": rank, "world": world, "tensors": [], "tree": None}
        kind = image.preferred_digest()
        data = bytes([rank]) * 4096
        preamble, encoded = image.lay_out(header, len(data), kind)
        digests = image.ChunkDigests(kind, image.CHUNK_BYTES)
        digests.update(data)
        path = tmp / f"rank-{rank}.shard"
        path.write_bytes(preamble.pack() + encoded + data + digests.trailer())
        shards.append(Shard(rank, path.name, *describe_shard(path)))
    final = directory / f"{step}-{epoch}"
    publish_here(tmp, final, manifest(Gathering(world, step).add(step, tuple(shards)), "job", epoch, 0.0))
    return final


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def test_a_published_checkpoint_verifies(tmp_path: Path) -> None:
    found = verify(make(tmp_path, 7))
    assert isinstance(found, Verified)
    assert (found.step, found.world) == (7, 2)


def test_one_wrong_bit_makes_it_unreadable_and_names_the_file(tmp_path: Path) -> None:
    path = make(tmp_path, 9)
    damage(path / "rank-1.shard")
    found = verify(path)
    assert isinstance(found, Unreadable)
    assert found.why.startswith("rank-1.shard")
    # a node that does not restore rank 1 has no need to read it
    assert isinstance(verify(path, ranks=(0,)), Verified)


def test_a_missing_shard_a_short_shard_and_a_broken_manifest_are_named(tmp_path: Path) -> None:
    one, two, three = (make(tmp_path, step) for step in (1, 2, 3))
    (one / "rank-0.shard").unlink()
    (two / "rank-0.shard").write_bytes(b"short")
    (three / "MANIFEST.json").write_text(json.dumps({"files": []}))
    for path in (one, two, three):
        assert isinstance(verify(path), Unreadable)


def test_old_checkpoints_dead_leftovers_and_trash_go_and_living_ones_stay(tmp_path: Path) -> None:
    for step, epoch in ((1, 1), (2, 1), (3, 1), (4, 2)):
        make(tmp_path, step, epoch)
    for name in ("5-1.tmp", "3-2.tmp", "6-2.tmp", ".trash-0-1"):
        (tmp_path / name).mkdir()
    collect(tmp_path, CheckpointName(4, 2), restored=CheckpointName(1, 1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1-1", "3-1", "4-2", "6-2.tmp"]
    assert complete(tmp_path) == (CheckpointName(1, 1), CheckpointName(3, 1), CheckpointName(4, 2))


def test_what_was_begun_and_given_up_goes_unless_somebody_writes_it(tmp_path: Path) -> None:
    for name in ("5-1.tmp", "6-1.tmp", "6-2.tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "6-1.tmp" / "rank-0.shard.part").touch()
    collect_abandoned(tmp_path, epoch=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["6-1.tmp", "6-2.tmp"]


def test_storage_counts_only_with_its_token(tmp_path: Path) -> None:
    assert not proved(tmp_path, "token")
    (tmp_path / ".ganger-token").write_text("token\n")
    assert proved(tmp_path, "token")
    assert not proved(tmp_path, "")
    assert not proved(None, "token")


def test_room_is_asked_for_before_it_is_needed(tmp_path: Path) -> None:
    assert room_missing(tmp_path, 0) == 0
    assert room_missing(tmp_path, 1 << 60) > 0
