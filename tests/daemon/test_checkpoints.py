"""Checkpoints on storage: what exists, what can be trusted, what is taken instead, what goes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from ganger.agent.v1 import agent_pb2
from ganger.injob import state_image
from ganger.injob.launcher.process_record import publish as publish_here
from ganger.v1 import resources_pb2
from ganger_daemon.checkpoints import gang_checkpoints as keeper_module
from ganger_daemon.checkpoints.gang_checkpoints import (
    GangCheckpoints,
    StorageError,
    collect,
    collect_abandoned,
)
from ganger_daemon.checkpoints.storage import (
    CheckpointName,
    Manifest,
    Shard,
    ShardCollection,
    ShardReport,
    Unreadable,
    complete,
    describe_shard,
    manifest,
    room_missing,
    verify,
)
from ganger_daemon.gang.gang_context import LocalPart
from ganger_daemon.gang.launch_plan import (
    LaunchRefusedError,
    StateOutdatedError,
    StateUnreadableError,
    restore_plan,
    role_place,
    source_of,
)
from ganger_daemon.node.node_context import Storage

UID = "2f1c7c9e-5f4e-4a8e-9d55-1f1f4e1d2b10"


def make(directory: Path, step: int, epoch: int = 1, world: int = 2, roles: dict[str, int] | None = None) -> Path:
    shards = write_shards(directory, step, epoch, world)
    tmp, final = directory / f"{step}-{epoch}.tmp", directory / f"{step}-{epoch}"
    content = manifest(ShardCollection(world, step).add(step, shards), "job", epoch, 0.0, roles)
    publish_here(str(tmp), str(final), content)
    return final


def write_shards(directory: Path, step: int, epoch: int, world: int) -> tuple[Shard, ...]:
    tmp = directory / f"{step}-{epoch}.tmp"
    tmp.mkdir(parents=True)
    shards = []
    for rank in range(world):
        header = {"format": 1, "step": step, "rank": rank, "world": world, "tensors": [], "tree": None}
        header["device_model"] = f"model {rank}"
        kind = state_image.preferred_digest()
        data = bytes([rank]) * 4096
        preamble, encoded = state_image.lay_out(header, len(data), kind)
        digests = state_image.ChunkDigests(kind, state_image.CHUNK_BYTES)
        digests.update(data)
        path = tmp / f"rank-{rank}.shard"
        path.write_bytes(preamble.pack() + encoded + data + digests.trailer())
        shards.append(describe_shard(path))
    return tuple(shards)


def test_a_manifest_names_the_devices_that_shards_were_saved_on(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, 7, 1, 2)
    files = manifest(ShardCollection(2, 7).add(7, shards), "uid", 1, 2.0)["files"]
    assert {name: entry["device_model"] for name, entry in files.items()} == {
        "rank-0.shard": "model 0",
        "rank-1.shard": "model 1",
    }


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def test_a_published_checkpoint_verifies(tmp_path: Path) -> None:
    found = verify(make(tmp_path, 7))
    assert isinstance(found, Manifest)
    assert (found.step, found.world) == (7, 2)


def test_one_wrong_bit_makes_it_unreadable_and_names_the_file(tmp_path: Path) -> None:
    path = make(tmp_path, 9)
    damage(path / "rank-1.shard")
    found = verify(path)
    assert isinstance(found, Unreadable)
    assert found.why.startswith("rank-1.shard")
    # a node that does not restore rank 1 has no need to read it
    assert isinstance(verify(path, ranks=(0,)), Manifest)


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
    collect(tmp_path, CheckpointName(4, 2), [CheckpointName(1, 1), CheckpointName(3, 1)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1-1", "3-1", "4-2", "6-2.tmp"]
    assert complete(tmp_path) == (CheckpointName(1, 1), CheckpointName(3, 1), CheckpointName(4, 2))


def test_a_deep_tree_that_a_job_has_put_among_its_checkpoints_is_removed_with_few_descriptors(tmp_path: Path) -> None:
    place, (soft, hard) = tmp_path / "job", resource.getrlimit(resource.RLIMIT_NOFILE)
    make(place, 1)
    (place / "1-1.tmp").mkdir()
    deepest = os.open(place / "1-1.tmp", os.O_PATH)
    for _ in range(3000):
        os.mkdir("deeper", dir_fd=deepest)
        above, deepest = deepest, os.open("deeper", os.O_PATH, dir_fd=deepest)
        os.close(above)
    os.close(deepest)
    try:
        few = max(map(int, os.listdir("/proc/self/fd"))) + 20
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
        assert collect(place, CheckpointName(1, 1)) == ("1-1.tmp",)
        assert [path.name for path in place.iterdir()] == ["1-1"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        subprocess.run(["rm", "-rf", str(place)], check=True)


def test_abandoned_checkpoints_are_removed_unless_a_rank_still_writes_them(tmp_path: Path) -> None:
    for name in ("5-1.tmp", "6-1.tmp", "6-2.tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "6-1.tmp" / "rank-0.shard.part").touch()
    collect_abandoned(tmp_path, epoch=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["6-1.tmp", "6-2.tmp"]


def test_storage_counts_only_with_its_token(tmp_path: Path) -> None:
    storage = Storage()

    def proved(path: str, token: str) -> bool:
        storage.configure(path, token)
        return storage.proved

    assert not proved(str(tmp_path), "token")
    (tmp_path / ".ganger-token").write_text("token\n")
    assert proved(str(tmp_path), "token")
    assert not proved(str(tmp_path), "")
    assert not proved("", "token")


def test_room_is_asked_for_before_it_is_needed(tmp_path: Path) -> None:
    assert room_missing(tmp_path, 0) == 0
    assert room_missing(tmp_path, 1 << 60) > 0


def test_a_checkpoint_that_storage_rejects_is_not_retried_before_a_new_request(tmp_path: Path) -> None:
    directory = tmp_path / UID / "checkpoints"
    last = make(directory, 7, world=1)
    tried: list[Path] = []

    def publish(tmp: Path, final: Path, fields: dict[str, object]) -> None:
        tried.append(final)
        if len(tried) == 1:
            raise StorageError("STORAGE_FULL", "no space left")
        publish_here(str(tmp), str(final), fields)

    async def story() -> None:
        keeper = GangCheckpoints(UID, 1, 1, True, publish, no_leader, lambda: None)
        write_shards(directory, 9, 1, 1)
        for _ in range(2):
            await keeper.durable(tmp_path, 5, 9, (0,))
        assert keeper.refusal(5).startswith("STORAGE_FULL: the checkpoint at step 9 cannot be published")
        assert (len(tried), keeper.is_settled(5), keeper.published) == (1, False, None)
        assert isinstance(verify(last), Manifest), "the last one is untouched"
        keeper.abandon(5)
        await keeper.durable(tmp_path, 5, 9, (0,))
        assert keeper.is_settled(5)
        assert keeper.refusal(5) == ""

    asyncio.run(story())


def test_that_a_checkpoint_cannot_be_published_yet_is_told_at_once_and_once(tmp_path: Path) -> None:
    told: list[str] = []

    def publish(tmp: Path, final: Path, fields: dict[str, object]) -> None:
        raise OSError("storage is away")

    async def story() -> None:
        keeper = GangCheckpoints(UID, 1, 1, True, publish, no_leader, lambda: told.append(keeper.trouble))
        shards = write_shards(tmp_path / UID / "checkpoints", 9, 1, 1)
        for _ in range(2):
            await keeper.gather(tmp_path, 5, 9, shards)

    asyncio.run(story())
    assert told == ["the checkpoint at step 9 is not published yet: storage is away"]


def test_a_member_that_gives_up_waiting_does_not_have_the_checkpoint_published_twice(tmp_path: Path) -> None:
    published: list[str] = []

    async def story() -> None:
        is_begun, may_end = asyncio.Event(), asyncio.Event()

        async def run(function: Callable[..., object], *args: object) -> object:
            published.append(function.__name__)
            is_begun.set()
            await may_end.wait()
            return function(*args)

        keeper = GangCheckpoints(UID, 1, 1, True, publish_here, no_leader, lambda: None, run=run)
        shards = write_shards(tmp_path / UID / "checkpoints", 9, 1, 1)
        first = asyncio.create_task(keeper.gather(tmp_path, 5, 9, shards))
        await is_begun.wait()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        again = asyncio.create_task(keeper.gather(tmp_path, 5, 9, shards))
        await asyncio.sleep(0)
        may_end.set()
        await again
        assert keeper.is_settled(5)

    asyncio.run(story())
    assert published == ["_publish_now"]


def test_a_member_is_done_only_when_the_leader_has_published(tmp_path: Path) -> None:
    answers = [False, True]

    async def report(report: ShardReport) -> bool:
        assert (report.agreement, report.step, [shard.rank for shard in report.shards], report.refusal) == (
            5,
            9,
            [1],
            "",
        )
        return answers.pop(0)

    async def story() -> None:
        keeper = GangCheckpoints(UID, 1, 2, False, unused, report, lambda: None)
        write_shards(tmp_path / UID / "checkpoints", 9, 1, 2)
        await keeper.durable(tmp_path, 5, 9, (1,))
        assert not keeper.is_settled(5)
        while answers:
            await keeper.durable(tmp_path, 5, 9, (1,))
            await asyncio.sleep(0)
        assert keeper.handed == {5: 9}

    asyncio.run(story())


def test_a_member_tells_the_leader_that_a_shard_cannot_be_written_until_it_has_heard_and_then_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keeper_module, "_RETRY_S", 0.0)
    told: list[tuple[int, str]] = []

    async def report(report: ShardReport) -> bool:
        told.append((report.agreement, report.refusal))
        if len(told) == 1:
            raise OSError("the leader is away")
        return False

    async def story() -> None:
        keeper = GangCheckpoints(UID, 1, 2, False, unused, report, lambda: None)
        for _ in range(3):
            await keeper.refuse(5, "STORAGE_FULL: rank 1: no space left")
        assert (keeper.refusal(5), keeper.trouble) == ("STORAGE_FULL: rank 1: no space left",) * 2

    asyncio.run(story())
    assert told == [(5, "STORAGE_FULL: rank 1: no space left")] * 2


def unused(tmp: Path, final: Path, fields: dict[str, object]) -> None:
    raise AssertionError("only the leader publishes")


async def no_leader(report: ShardReport) -> bool:
    raise AssertionError("the leader reports to no other node")


def test_a_node_starts_from_just_the_checkpoint_it_is_told_and_reads_its_own_shards(tmp_path: Path) -> None:
    newer = make(tmp_path / UID / "checkpoints", 9)
    make(tmp_path / UID / "checkpoints", 7)
    damage(newer / "rank-1.shard")
    (tmp_path / ".ganger-token").write_text("token\n")
    restore = agent_pb2.Restore(checkpoint_path="checkpoints/9-1", step=9)
    desired = agent_pb2.DesiredGang(job_uid=UID, restore=restore)
    assert restore_plan(desired, tmp_path, LocalPart((0,), (1,), 2, True)).path == str(newer)
    with pytest.raises(StateUnreadableError, match=f"checkpoint {newer} cannot be restored: rank-1.shard"):
        restore_plan(desired, tmp_path, LocalPart((1,), (1,), 2, False))
    with pytest.raises(StateUnreadableError, match="is of step 9 and 2 ranks"):
        restore_plan(desired, tmp_path, LocalPart((0,), (1,), 1, True))


def test_each_rank_starts_from_a_shard_of_its_role_where_the_tasks_of_roles_have_changed(tmp_path: Path) -> None:
    saved = make(tmp_path / UID / "checkpoints", 9, world=3, roles={"ps": 1, "worker": 2})
    desired = agent_pb2.DesiredGang(job_uid=UID, restore=agent_pb2.Restore(checkpoint_path="checkpoints/9-1", step=9))
    roles = [resources_pb2.Role(name="ps", tasks=3, tasks_max=3), resources_pb2.Role(name="worker", tasks=4)]
    desired.spec.roles.extend(roles)
    part = LocalPart(tuple(range(7)), (0,) * 7, 7, True, roles={"ps": 3, "worker": 4})
    plan = restore_plan(desired, tmp_path, part)
    assert (plan.world, plan.roles) == (3, {"ps": 1, "worker": 2})
    found = [source_of(plan, rank, role_place(desired.spec, part, rank)) for rank in range(7)]
    assert [one["rank"] for one in found] == [0, 0, 0, 1, 2, 1, 2]
    assert [(one["first"], one["ranks"]) for one in found] == [(0, 1)] * 3 + [(1, 2)] * 4
    # A server may need parts of any shard.
    damage(saved / "rank-2.shard")
    (tmp_path / ".ganger-token").write_text("token\n")
    with pytest.raises(StateUnreadableError, match=r"rank-2\.shard"):
        restore_plan(desired, tmp_path, LocalPart((0,), (1,), 7, False, roles={"ps": 3, "worker": 4}))


def test_shards_belong_to_roles_in_the_order_of_the_job_whatever_their_names(tmp_path: Path) -> None:
    make(tmp_path / UID / "checkpoints", 9, world=3, roles={"worker": 2, "ps": 1})
    desired = agent_pb2.DesiredGang(job_uid=UID, restore=agent_pb2.Restore(checkpoint_path="checkpoints/9-1", step=9))
    desired.spec.roles.extend([resources_pb2.Role(name="worker", tasks=2), resources_pb2.Role(name="ps", tasks=2)])
    part = LocalPart((0, 1, 2, 3), (0,) * 4, 4, True, roles={"worker": 2, "ps": 2})
    plan = restore_plan(desired, tmp_path, part)
    found = [source_of(plan, rank, role_place(desired.spec, part, rank)) for rank in range(4)]
    assert [(one["rank"], one["first"]) for one in found] == [(0, 0), (1, 0), (2, 2), (2, 2)]


@pytest.mark.parametrize("roles", [None, {"server": 1, "worker": 1}])
def test_a_checkpoint_of_other_roles_is_not_started_from(tmp_path: Path, roles: dict[str, int] | None) -> None:
    make(tmp_path / UID / "checkpoints", 9, roles=roles)
    (tmp_path / ".ganger-token").write_text("token\n")
    desired = agent_pb2.DesiredGang(job_uid=UID, restore=agent_pb2.Restore(checkpoint_path="checkpoints/9-1", step=9))
    with pytest.raises(StateUnreadableError, match="is of step 9 and 2 ranks"):
        restore_plan(desired, tmp_path, LocalPart((0,), (1,), 3, True, roles={"ps": 1, "worker": 2}))


def test_storage_that_went_away_is_no_damaged_checkpoint(tmp_path: Path) -> None:
    restore = agent_pb2.Restore(checkpoint_path="checkpoints/9-1", step=9)
    with pytest.raises(LaunchRefusedError, match="cannot be read now") as refused:
        restore_plan(agent_pb2.DesiredGang(job_uid=UID, restore=restore), tmp_path, LocalPart((0,), (1,), 1, True))
    assert not isinstance(refused.value, StateUnreadableError)


def gang_from(path: str, step: int, epoch: int, *unreadable: str) -> agent_pb2.DesiredGang:
    restore = agent_pb2.Restore(checkpoint_path=path, step=step, unreadable_paths=unreadable) if path else None
    return agent_pb2.DesiredGang(job_uid=UID, epoch=epoch, restore=restore)


def test_a_newer_checkpoint_on_the_own_disk_is_reported_as_that_of_this_node(tmp_path: Path) -> None:
    make(tmp_path / UID / "checkpoints", 8, 2)
    with pytest.raises(StateOutdatedError) as refused:
        restore_plan(gang_from("", 0, 3), tmp_path, LocalPart((0,), (1,), 2, True, on_nodes=True), ("n1",))
    assert [(one.path, one.nodes) for one in refused.value.found] == [("checkpoints/8-2", ("n1",))]


def test_the_leader_reports_a_newer_checkpoint_of_an_earlier_attempt_and_its_members_do_not_look(
    tmp_path: Path,
) -> None:
    for step, epoch in ((9, 1), (7, 2), (8, 2), (99, 3)):
        make(tmp_path / UID / "checkpoints", step, epoch)
    leader, member = LocalPart((0,), (1,), 2, True), LocalPart((1,), (1,), 2, False)
    for desired in (gang_from("checkpoints/9-1", 9, 3), gang_from("", 0, 3)):
        with pytest.raises(StateOutdatedError, match="newer checkpoint, checkpoints/8-2") as refused:
            restore_plan(desired, tmp_path, leader)
        assert [one.path for one in refused.value.found] == [
            "checkpoints/8-2", "checkpoints/7-2", "checkpoints/9-1",
        ]  # fmt: skip
    for desired in (
        gang_from("checkpoints/8-2", 8, 3),
        gang_from("checkpoints/7-2", 7, 3, "checkpoints/8-2"),
    ):
        assert restore_plan(desired, tmp_path, leader).step == desired.restore.step
    assert restore_plan(gang_from("checkpoints/9-1", 9, 3), tmp_path, member).step == 9


def test_what_else_is_on_storage_is_reported_with_a_checkpoint_that_cannot_be_read(tmp_path: Path) -> None:
    for step in (7, 8, 9):
        make(tmp_path / UID / "checkpoints", step, 1)
    damage(tmp_path / UID / "checkpoints" / "9-1" / "rank-1.shard")
    (tmp_path / ".ganger-token").write_text("token\n")
    with pytest.raises(StateUnreadableError) as refused:
        restore_plan(gang_from("checkpoints/9-1", 9, 2), tmp_path, LocalPart((1,), (1,), 2, False))
    assert [(one.step, one.size_bytes > 8192) for one in refused.value.found] == [(9, True), (8, True), (7, True)]


def test_no_checkpoint_goes_that_the_master_wants_and_none_at_all_while_it_is_not_known_what_it_wants(
    tmp_path: Path,
) -> None:
    directory = tmp_path / UID / "checkpoints"

    async def story(wanted: frozenset[CheckpointName] | None, steps: range) -> list[int]:
        keeper = GangCheckpoints(UID, 1, 1, True, publish_here, no_leader, lambda: None, wanted)
        for step in steps:
            write_shards(directory, step, 1, 1)
            await keeper.durable(tmp_path, step, step, (0,))
        return [name.step for name in complete(directory)]

    assert asyncio.run(story(None, range(1, 5))) == [1, 2, 3, 4]
    wanted = frozenset({CheckpointName(1, 1), CheckpointName(2, 1)})
    assert asyncio.run(story(wanted, range(5, 8))) == [1, 2, 3, 6, 7]


def test_files_of_two_ranks_that_were_swapped_are_found_out_with_an_older_manifest_too(tmp_path: Path) -> None:
    for step, is_old in ((1, False), (2, True)):
        path = make(tmp_path, step)
        manifest_path = path / "MANIFEST.json"
        fields = json.loads(manifest_path.read_text())
        one, two = path / "rank-0.shard", path / "rank-1.shard"
        one.rename(path / "other")
        two.rename(one)
        (path / "other").rename(two)
        digests = [fields["files"][name]["digest"] for name in ("rank-1.shard", "rank-0.shard")]
        for name, digest in zip(("rank-0.shard", "rank-1.shard"), digests, strict=True):
            fields["files"][name]["digest"] = digest  # as if their data were alike
            if is_old:
                del fields["files"][name]["header_digest"]
        manifest_path.write_text(json.dumps(fields))
        found = verify(path)
        assert isinstance(found, Unreadable)
        assert found.why == (
            f"rank-0.shard is rank 1 of 2 at step {step}, MANIFEST.json says rank 0 of 2 at step {step}"
        )


def test_a_header_of_another_attempt_and_a_directory_of_another_name_are_found_out(tmp_path: Path) -> None:
    one, other = make(tmp_path, 7, epoch=1), make(tmp_path, 7, epoch=2)
    fields = json.loads((other / "MANIFEST.json").read_text())
    fields["files"]["rank-0.shard"]["header_digest"] = "xxh3_64:0000000000000000"
    (other / "MANIFEST.json").write_text(json.dumps(fields))
    found = verify(other)
    assert isinstance(found, Unreadable)
    assert "header of digest" in found.why
    found = verify(one.rename(tmp_path / "9-1"))
    assert isinstance(found, Unreadable)
    assert found.why == "MANIFEST.json is of step 7 and epoch 1, its directory is 9-1"


def rewritten(shard: Path, **words: int) -> None:
    """Give the preamble of a shard other sizes."""
    content = shard.read_bytes()
    preamble = dataclasses.replace(state_image.parse_preamble(content[:64]), **words)
    shard.write_bytes(preamble.pack() + content[64:])


def hostile_fifo(path: Path) -> None:
    for name in ("MANIFEST.json", "rank-0.shard", "rank-1.shard"):
        (path / name).rename(path / f"{name}.was")
        os.mkfifo(path / name)


def hostile_shard_fifo(path: Path) -> None:
    (path / "rank-0.shard").unlink()
    os.mkfifo(path / "rank-0.shard")


def hostile_link(path: Path) -> None:
    (path / "rank-0.shard").rename(path.parent / "elsewhere")
    (path / "rank-0.shard").symlink_to(path.parent / "elsewhere")


def hostile_directory(path: Path) -> None:
    path.rename(path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere")


def hostile_world(path: Path) -> None:
    fields = json.loads((path / "MANIFEST.json").read_text())
    (path / "MANIFEST.json").write_text(json.dumps({**fields, "world": 20_000_000}))


def hostile_manifest(path: Path) -> None:
    (path / "MANIFEST.json").write_text('{"step": 9, "world": 2, "files": ' + "[" * 15_000_000)


def hostile_large_manifest(path: Path) -> None:
    os.truncate(path / "MANIFEST.json", 1 << 40)


def hostile_numbers(path: Path) -> None:
    (path / "MANIFEST.json").write_text('{"step": 1e999, "world": "2", "files": {"a": {"rank": 9999999999999999999}}}')


def hostile_header(path: Path) -> None:
    """28 MB of nested lists: as objects of Python they would take thirty times as much."""
    header = {"step": 9, "rank": 0, "world": 2, "tensors": [], "tree": [[]] * 7_000_000}
    preamble, encoded = state_image.lay_out(header, 0, state_image.preferred_digest())
    digests = state_image.ChunkDigests(state_image.preferred_digest(), state_image.CHUNK_BYTES)
    (path / "rank-0.shard").write_bytes(preamble.pack() + encoded + digests.trailer())


def hostile_size(path: Path) -> None:
    """A file without data whose preamble promises a TiB of it."""
    data, chunks = 1 << 40, (1 << 40) // state_image.CHUNK_BYTES
    offset = state_image.parse_preamble((path / "rank-0.shard").read_bytes()[:64]).data_offset
    rewritten(path / "rank-0.shard", trailer_offset=offset + data, total_bytes=offset + data + 8 * (chunks + 1))


def hostile_chunks(path: Path) -> None:
    """A digest for every byte."""
    shard = path / "rank-0.shard"
    data, offset = 1 << 36, state_image.parse_preamble(shard.read_bytes()[:64]).data_offset
    total = offset + data + 8 * (data + 1)
    rewritten(shard, chunk_bytes=1, trailer_offset=offset + data, total_bytes=total)
    os.truncate(shard, total)


HOSTILE = [
    hostile_fifo, hostile_shard_fifo, hostile_link, hostile_directory, hostile_world, hostile_manifest,
    hostile_large_manifest, hostile_numbers, hostile_header, hostile_size, hostile_chunks,
]  # fmt: skip


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda one: one.__name__)
def test_a_checkpoint_that_a_job_has_spoilt_is_unreadable_at_little_cost(
    tmp_path: Path, hostile: Callable[[Path], None]
) -> None:
    path = make(tmp_path, 9)
    hostile(path)
    if hostile in (hostile_header, hostile_chunks):
        fields = json.loads((path / "MANIFEST.json").read_text())
        fields["files"]["rank-0.shard"]["bytes"] = (path / "rank-0.shard").stat().st_size
        (path / "MANIFEST.json").write_text(json.dumps(fields))
    code = (
        "import resource, sys; from pathlib import Path; from ganger_daemon.checkpoints.storage import verify;"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "found = verify(Path(sys.argv[1])); after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "print(type(found).__name__, getattr(found, 'is_lasting', False), (after - before) >> 10)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 0, done.stderr
    kind, is_lasting, mebibytes = done.stdout.split()
    assert (kind, is_lasting) == ("Unreadable", "True")
    assert int(mebibytes) < 100


def test_a_checkpoint_is_due_by_time_or_by_request_once() -> None:
    keeper = GangCheckpoints(UID, 1, 1, True, unused, no_leader, lambda: None)
    keeper.note_request(100.0, 0)
    assert not keeper.due(150.0, 60.0, 0)
    assert keeper.due(160.0, 60.0, 0)
    assert not keeper.due(1e9, 0.0, 0)
    assert keeper.due(101.0, 0.0, 1)
    keeper.note_request(101.0, 1)
    assert not keeper.due(102.0, 0.0, 1)
