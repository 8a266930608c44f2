"""An image of processes as one file."""

from __future__ import annotations

import os
import tarfile
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from ganger.injob import state_image
from ganger_daemon.checkpoints.storage import describe_shard
from ganger_daemon.images.contract import ImageFacts, ImageRefusedError, Machine, OpenFile, write_facts
from ganger_daemon.images.packing import facts_of, fill_directories, pack, unpack

FACTS = ImageFacts(
    root_pid=1000,
    processes=2,
    logs=(OpenFile("/jobs/7/log", 12, True),),
    files=(OpenFile("/data/train.csv", 99, False),),
    own_directories=("/dev/shm",),
    machine=Machine("x86_64", ("avx2",), "6.1", "criu 4.2"),
)
FIELDS = {"step": 40, "rank": 1, "world": 2}


def image(directory: Path, pages: bytes) -> Path:
    directory.mkdir()
    (directory / "pages-1.img").write_bytes(pages)
    (directory / "core-1000.img").write_bytes(b"core")
    (directory / "own-0.tar").write_bytes(bytes(1024))
    (directory / "empty.img").write_bytes(b"")
    (directory / "dump.log").write_text("not needed elsewhere")
    write_facts(directory, FACTS)
    return directory


def packed(directory: Path, file: Path) -> int:
    target = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        return pack(directory, FIELDS, target, is_durable=True)
    finally:
        os.close(target)


def unpacked(file: Path, directory: Path) -> ImageFacts:
    directory.mkdir(exist_ok=True)
    source = os.open(file, os.O_RDONLY)
    try:
        return unpack(source, directory)
    finally:
        os.close(source)


@pytest.mark.parametrize("size", [0, 1, 64, state_image.CHUNK_BYTES - 192, state_image.CHUNK_BYTES + 5])
def test_a_packed_image_has_the_same_files_and_facts_after_unpacking(tmp_path: Path, size: int) -> None:
    pages = os.urandom(size)
    count = packed(image(tmp_path / "image", pages), tmp_path / "shard")

    assert (tmp_path / "shard").stat().st_size == count
    assert unpacked(tmp_path / "shard", tmp_path / "again") == FACTS
    names = {path.name for path in (tmp_path / "again").iterdir()}
    assert names == {"pages-1.img", "core-1000.img", "own-0.tar", "empty.img", "facts.json"}
    assert (tmp_path / "again" / "pages-1.img").read_bytes() == pages
    assert (tmp_path / "again" / "core-1000.img").read_bytes() == b"core"


def test_checkpoints_describe_a_packed_image_as_any_shard(tmp_path: Path) -> None:
    packed(image(tmp_path / "image", b"pages"), tmp_path / "shard")

    found = describe_shard(tmp_path / "shard")

    assert (found.step, found.rank, found.world) == (40, 1, 2)
    assert found.size_bytes == (tmp_path / "shard").stat().st_size


def test_the_facts_name_a_shard_that_is_an_image_of_processes(tmp_path: Path) -> None:
    packed(image(tmp_path / "image", b"pages"), tmp_path / "shard")
    preamble, encoded = state_image.lay_out({"tensors": [], "tree": {"note": "process_image"}}, 0, state_image.XXH3)
    trailer = state_image.ChunkDigests(state_image.XXH3, state_image.CHUNK_BYTES).trailer()
    (tmp_path / "other").write_bytes(preamble.pack() + encoded + trailer)

    assert facts_of(tmp_path / "shard") == FACTS
    assert facts_of(tmp_path / "other") is None
    with pytest.raises(ImageRefusedError, match="no image of processes"):
        unpacked(tmp_path / "other", tmp_path / "again")


@pytest.mark.parametrize("where", ["first byte of the data", "last byte of the data", "padding", "header"])
def test_a_changed_byte_is_found(tmp_path: Path, where: str) -> None:
    packed(image(tmp_path / "image", b"pages"), tmp_path / "shard")
    content = bytearray((tmp_path / "shard").read_bytes())
    preamble = state_image.parse_preamble(content)
    # The first file in the table is core-1000.img with four bytes.
    places = {
        "first byte of the data": preamble.data_offset,
        "last byte of the data": preamble.trailer_offset - 1,
        "padding": preamble.data_offset + 5,
        "header": preamble.data_offset - 1,
    }
    content[places[where]] ^= 1
    (tmp_path / "shard").write_bytes(content)

    with pytest.raises(state_image.ImageError, match="digest"):
        unpacked(tmp_path / "shard", tmp_path / "again")


def test_a_file_that_is_no_state_image_is_refused(tmp_path: Path) -> None:
    count = packed(image(tmp_path / "image", b"pages"), tmp_path / "shard")
    (tmp_path / "shard").write_bytes(bytes(count))

    with pytest.raises(state_image.ImageError, match="not a state image"):
        unpacked(tmp_path / "shard", tmp_path / "again")


@pytest.mark.parametrize("size", [-1, 63, 0])
def test_a_file_that_ends_too_early_is_refused(tmp_path: Path, size: int) -> None:
    count = packed(image(tmp_path / "image", b"pages"), tmp_path / "shard")
    os.truncate(tmp_path / "shard", size % count)

    with pytest.raises(state_image.ImageError, match=r"has|is empty"):
        unpacked(tmp_path / "shard", tmp_path / "again")


@pytest.mark.parametrize("name", ["../escaped.img", "/tmp/escaped.img", "..", "", "facts.json"])
def test_a_table_cannot_name_files_outside_the_directory(tmp_path: Path, name: str) -> None:
    table = [{"name": name, "offset": 0, "bytes": 64}]
    header = {"process_image": msgspec.to_builtins(FACTS), "tensors": table, "tree": None}
    preamble, encoded = state_image.lay_out(header, 64, state_image.XXH3)
    digests = state_image.ChunkDigests(state_image.XXH3, state_image.CHUNK_BYTES)
    digests.update(bytes(64))
    (tmp_path / "shard").write_bytes(preamble.pack() + encoded + bytes(64) + digests.trailer())

    with pytest.raises(state_image.ImageError, match="is not a file of a process image"):
        unpacked(tmp_path / "shard", tmp_path / "again")
    assert not (tmp_path / "escaped.img").exists()


def test_all_that_was_reported_as_filled_is_final(tmp_path: Path) -> None:
    directory = image(tmp_path / "image", os.urandom(3 << 20))
    prefixes: list[bytes] = []
    target = os.open(tmp_path / "shard", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        pack(directory, FIELDS, target, filled=lambda count: prefixes.append(os.pread(target, count, 0)))
        whole = os.pread(target, 1 << 30, 0)
    finally:
        os.close(target)

    assert len(prefixes) > 3
    assert prefixes[-1] == whole
    assert all(whole.startswith(prefix) for prefix in prefixes)


def test_an_image_is_refused_where_the_processor_lacks_instructions(tmp_path: Path) -> None:
    here = Machine("x86_64", ("avx2", "sse2"), "6.1", "criu 4.2")

    assert FACTS.machine.obstacle(here) == ""
    assert "avx2" in FACTS.machine.obstacle(Machine("x86_64", ("sse2",), "6.1", "criu 4.2"))
    assert "aarch64" in FACTS.machine.obstacle(Machine("aarch64", ("avx2",), "6.1", "criu 4.2"))


def test_an_image_is_unpacked_while_it_arrives(tmp_path: Path) -> None:
    pages = os.urandom(3 << 20)
    size = packed(image(tmp_path / "image", pages), tmp_path / "shard")
    (tmp_path / "again").mkdir()
    arriving = os.open(tmp_path / "arriving", os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(arriving, size)
    content = (tmp_path / "shard").read_bytes()
    there = 0

    def arrive(count: int) -> None:
        # Only now, and no byte more.
        nonlocal there
        os.pwrite(arriving, content[there:count], there)
        there = max(there, count)

    try:
        assert unpack(arriving, tmp_path / "again", arrive) == FACTS
    finally:
        os.close(arriving)
    assert there == size
    assert (tmp_path / "again" / "pages-1.img").read_bytes() == pages


def filled(tmp_path: Path, *members: tuple[str, bytes, str]) -> Path:
    """Restore a job's directory from members: name, type, and what a link names. Return it."""
    with tarfile.TarFile(tmp_path / "own-0.tar", "w") as tar:
        for name, kind, linked in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.mode = kind, linked, 0o4755
            tar.addfile(member)
    directory = tmp_path / "own"
    fill_directories(0, [str(directory)], tmp_path)
    return directory


def test_links_come_back_whatever_they_name_and_nothing_is_written_through_one(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    link, file, directory = tarfile.SYMTYPE, tarfile.REGTYPE, tarfile.DIRTYPE
    made = filled(
        tmp_path, ("d", directory, ""), ("d/l", link, str(outside)), ("m", link, str(outside)), ("n", file, "")
    )
    assert (made / "d" / "l").readlink() == (made / "m").readlink() == outside
    assert (made / "n").stat().st_mode & 0o7777 == 0o755
    hostile = tmp_path / "hostile"
    hostile.mkdir()
    with suppress(ImageRefusedError, OSError):
        filled(hostile, ("x", link, str(outside)), ("x/written", file, ""))
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize(
    "member",
    [("../x", tarfile.REGTYPE, ""), ("/tmp/x", tarfile.REGTYPE, ""), ("x", tarfile.LNKTYPE, "../../etc/passwd")],
)
def test_members_outside_the_directory_are_refused(tmp_path: Path, member: tuple[str, bytes, str]) -> None:
    with pytest.raises(ImageRefusedError, match="cannot be restored"):
        filled(tmp_path, member)
