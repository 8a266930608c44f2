"""One log stream per rank: offsets go on across epochs, and what is missing is said."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pytest
from ganger_daemon.node import log_store as logs
from ganger_daemon.node.log_store import LogStore


def write(store: LogStore, epoch: int, text: str) -> Path:
    path = store.begin("job", 0, epoch)
    with open(path, "a") as file:
        file.write(text)
    return path


def text_of(store: LogStore, offset: int = 0) -> str:
    return b"".join(chunk.data for chunk in store.read("job", 0, offset)).decode()


def test_segments_of_several_epochs_read_as_one_stream(tmp_path: Path) -> None:
    store = LogStore(tmp_path / "here")
    write(store, 1, "one\n")
    write(store, 5, "two\n")
    assert text_of(store) == "one\ntwo\n"
    assert text_of(store, 2) == "e\ntwo\n"
    assert text_of(store, 4) == "two\n"
    assert store.end("job", 0) == 8


def test_another_node_reads_what_was_sealed_from_storage(tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    storage.mkdir()
    first, second = LogStore(tmp_path / "a", storage), LogStore(tmp_path / "b", storage)
    write(first, 1, "from a\n")
    first.mirror("job", 0, 1, sealed=True)
    write(second, 2, "from b\n")
    assert text_of(second) == "from a\nfrom b\n"
    first.forget("job")
    assert list((tmp_path / "a").iterdir()) == [], "nothing is left of it"
    assert text_of(first).startswith("from a\n")


def test_the_tail_a_lost_node_had_not_copied_is_reported_as_lost(tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    storage.mkdir()
    lost, other = LogStore(tmp_path / "a", storage), LogStore(tmp_path / "b", storage)
    path = write(lost, 1, "copied\n")
    lost.mirror("job", 0, 1)
    (storage / "job" / "logs" / path.name).write_text("copi")
    write(other, 2, "next\n")
    chunks = list(other.read("job", 0, 0))
    assert [(chunk.data, chunk.lost_bytes) for chunk in chunks] == [(b"copi", 0), (b"next\n", 3)]
    assert chunks[1].offset == 7


def test_a_segment_over_its_limit_loses_its_oldest_bytes_and_says_how_many(tmp_path: Path) -> None:
    store = LogStore(tmp_path / "here", limit_bytes=64 << 10)
    write(store, 1, "".join(f"{number:015d}\n" for number in range(8192)))
    store.mirror("job", 0, 1)
    chunks = list(store.read("job", 0, 0))
    dropped = chunks[0].lost_bytes
    assert dropped == chunks[0].offset > 0
    assert dropped + sum(len(chunk.data) for chunk in chunks) == 8192 * 16 == store.end("job", 0)
    assert chunks[0].data.startswith(f"{dropped // 16:015d}".encode())


def test_what_storage_does_not_have_whole_stays_with_all_that_is_known_of_it(tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    storage.mkdir()
    store = LogStore(tmp_path / "here")
    write(store, 1, "before there was storage\n")
    store.storage = storage
    write(store, 2, "copied\n")
    store.mirror("job", 0, 2, sealed=True)
    store.forget("job")
    assert {path.name for path in (tmp_path / "here" / "job").iterdir()} == {"rank-0.1.log", "rank-0.json"}
    assert text_of(store) == "before there was storage\ncopied\n"


def test_logs_go_once_they_were_kept_but_for_those_of_jobs_that_are_here(tmp_path: Path) -> None:
    store = LogStore(tmp_path)
    for uid in ("old", "here", "fresh"):
        store.begin(uid, 0, 1)
    for uid in ("old", "here"):
        for path in (*(tmp_path / uid).iterdir(), tmp_path / uid):
            os.utime(path, (100.0, 100.0))
    now = (tmp_path / "fresh").stat().st_mtime
    assert store.sweep({"here"}, now) == (), "the retention time is not set yet"
    store.kept_s = now - 100.0
    assert store.sweep({"here"}, now) == ()
    assert store.sweep({"here"}, now + 1.0) == ("old",)
    assert {path.name for path in tmp_path.iterdir()} == {"here", "fresh"}


def test_a_log_that_is_still_written_to_is_not_old(tmp_path: Path) -> None:
    store = LogStore(tmp_path)
    path = store.begin("job", 0, 1)
    os.utime(tmp_path / "job", (100.0, 100.0))
    store.kept_s = 60.0
    assert store.sweep((), path.stat().st_mtime + 59.0) == ()


def test_an_unknown_log_has_no_segments(tmp_path: Path) -> None:
    assert LogStore(tmp_path).segments("job", 0) == ()


def test_a_log_that_its_job_stretched_to_a_tebibyte_costs_neither_writes_nor_space(tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    storage.mkdir()
    here, other = LogStore(tmp_path / "a", storage), LogStore(tmp_path / "b", storage)
    path = write(here, 1, "before\n")
    os.truncate(path, 1 << 40)
    with open(path, "a") as file:
        file.write("after\n")
    before = written_bytes()
    for sealed in (False, True):
        here.mirror("job", 0, 1, sealed)
    assert written_bytes() - before < 1 << 20
    copy = storage / "job" / "logs" / path.name
    assert (copy.stat().st_size, copy.stat().st_blocks * 512 < 1 << 20) == (path.stat().st_size, True)
    for store in (here, other):
        chunks = list(store.read("job", 0, 0))
        assert sum(len(chunk.data) for chunk in chunks) < 1 << 20
        assert b"".join(chunk.data for chunk in chunks).replace(b"\0", b"").endswith(b"after\n")
        assert chunks[-1].offset + len(chunks[-1].data) == store.end("job", 0) == (1 << 40) + 6
        assert sum(chunk.lost_bytes + len(chunk.data) for chunk in chunks) == (1 << 40) + 6


@pytest.mark.parametrize(
    "option", [("--keep-size",), ("--keep-size", "--offset", "8G"), ()], ids=["behind the end", "far behind", "longer"]
)
@pytest.mark.parametrize("place", ["disk", "/dev/shm"])
def test_blocks_that_a_job_allocates_in_its_log_count_to_the_limit(
    tmp_path: Path, place: str, option: tuple[str, ...]
) -> None:
    here = tmp_path if place == "disk" else Path(tempfile.mkdtemp(dir=place))
    store = LogStore(here, limit_bytes=64 << 10)
    try:
        path = write(store, 1, "before\n")
        assert not store.is_too_large("job", [0], 1)
        subprocess.run(["fallocate", *option, "--length", "4M", path], check=True)
        with open(path, "a") as file:
            file.write("after\n")
        assert store.is_too_large("job", [0], 1)
        store.mirror("job", 0, 1)
        assert not store.is_too_large("job", [0], 1)
        assert path.stat().st_blocks * 512 <= 64 << 10
        assert text_of(store).replace("\0", "").endswith("before\nafter\n" if option else "after\n")
    finally:
        shutil.rmtree(here)


def test_a_job_that_fills_the_hole_in_its_log_gains_nothing(tmp_path: Path) -> None:
    store = LogStore(tmp_path, limit_bytes=64 << 10)
    path = write(store, 1, "x" * (256 << 10))
    store.mirror("job", 0, 1)
    with open(path, "r+b") as file:
        file.write(bytes(128 << 10))
    assert store.is_too_large("job", [0], 1)
    store.mirror("job", 0, 1)
    assert not store.is_too_large("job", [0], 1)
    assert text_of(store) == "x" * (32 << 10)


def written_bytes() -> int:
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["wchar"])


def test_a_log_that_grows_fast_is_copied_in_portions_and_whole_once_it_is_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "PORTION_BYTES", 1 << 20)
    storage = tmp_path / "storage"
    storage.mkdir()
    store = LogStore(tmp_path / "a", storage)
    path = write(store, 1, "0123456789abcde\n" * (3 << 16))
    copy, sizes = storage / "job" / "logs" / path.name, []
    for sealed in (False, False, True):
        store.mirror("job", 0, 1, sealed)
        sizes.append(copy.stat().st_size)
    assert sizes == [1 << 20, 2 << 20, 3 << 20]
    assert copy.read_bytes() == path.read_bytes()


def test_a_copy_that_ends_late_does_not_cut_what_a_later_one_has_brought(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = tmp_path / "storage"
    storage.mkdir()
    store = LogStore(tmp_path / "a", storage)
    path = write(store, 1, "first\n")
    extents = logs.extents

    def overtaken(file: BinaryIO, start: int, end: int) -> Iterator[tuple[int, int]]:
        yield from extents(file, start, end)
        monkeypatch.setattr(logs, "extents", extents)
        write(store, 1, "second\n")
        store.mirror("job", 0, 1)

    monkeypatch.setattr(logs, "extents", overtaken)
    store.mirror("job", 0, 1)
    assert (storage / "job" / "logs" / path.name).read_text() == "first\nsecond\n"


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_a_copy_that_a_job_has_replaced_is_neither_waited_for_nor_followed(tmp_path: Path, kind: str) -> None:
    storage = tmp_path / "storage"
    store = LogStore(tmp_path / "a", storage)
    storage.mkdir()
    path = write(store, 1, "text\n")
    copy, elsewhere = storage / "job" / "logs" / path.name, tmp_path / "elsewhere"
    elsewhere.write_text("mine")
    assert copy.parent.is_dir()
    os.mkfifo(copy) if kind == "pipe" else copy.symlink_to(elsewhere)
    with pytest.raises(OSError, match=path.name):
        store.mirror("job", 0, 1)
    assert elsewhere.read_text() == "mine"


def test_the_series_of_attempts_on_two_nodes_are_one_on_storage_and_a_link_is_not_read(tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    first, second = (LogStore(tmp_path / node, storage) for node in ("n0", "n1"))
    written = tmp_path / "rank-0.series"
    written.write_text("0 1 @start 0.0\n10 2 loss 3.0\n20 3 loss 2.0\n")
    first.mirror_series("uid", 1, written)
    written.write_text("10 4 @start 0.0\n15 5 loss 2.5\n")
    second.mirror_series("uid", 2, written)
    # The first node is late, with what it has copied before.
    first.mirror_series("uid", 1, tmp_path / "missing")

    def losses(logs: LogStore) -> list[tuple[int, float]]:
        return [(point.step, point.values[0]) for point in logs.series("uid").of("loss")]

    assert losses(second) == [(10, 3.0), (15, 2.5)]
    assert losses(first) == losses(LogStore(tmp_path / "n2", storage)) == losses(second)
    secret = tmp_path / "secret"
    secret.write_text("99 9 loss 9.0\n")
    written.unlink()
    written.symlink_to(secret)
    assert not LogStore(tmp_path / "n3").series("uid", [(3, written)]).points
