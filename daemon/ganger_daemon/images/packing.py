"""An image of processes as one file: a state image whose data are the files of the image's directory, so that
checkpoints and the state stream carry it as any shard. It is written front to back: every prefix is final. Among the
files are the unit's own directories, each as one tar file."""

from __future__ import annotations

import mmap
import os
import tarfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from ganger.injob import state_image
from ganger.text import os_failure

from ganger_daemon.images.contract import (
    FACTS,
    SHARED_MEMORY,
    ImageFacts,
    ImageRefusedError,
    UnitProcesses,
    read_facts,
    write_facts,
)
from ganger_daemon.node.accounts import seen_by

FIELD = "process_image"
# A piece stays in the processor's cache between its digest and its copy.
_PIECE_BYTES = 1 << 20
_PADDING = bytes(state_image.ALIGNMENT)


def image_files(directory: Path) -> tuple[Path, ...]:
    """The files of an image but for its facts, by name."""
    return tuple(sorted(path for path in directory.iterdir() if path.suffix in (".img", ".tar")))


def pack_directories(unit: UnitProcesses, image: Path, shared: Collection[str]) -> None:
    """Write the directories of a job into an image, with its account's rights on files. Sockets are left out. Raises
    ImageRefusedError.

    `shared`: without a unit other jobs use /dev/shm, too, and only these paths are taken, each by itself, with the
    directories above them."""
    for number, inside in enumerate(unit.own_directories):
        source = from_outside(unit.sight, inside)
        is_shared = inside == SHARED_MEMORY and not unit.init_pid
        try:
            with (image / _tar(number)).open("wb") as file:
                seen_by(unit.account, partial(_write_tar, file, source, shared if is_shared else None))
        except (OSError, tarfile.TarError) as error:
            raise ImageRefusedError(f"the files in {inside} cannot be saved: {os_failure(error)}") from error


def _write_tar(file: BinaryIO, source: Path, shared: Collection[str] | None) -> None:
    names = sorted(os.listdir(source)) if shared is None else _with_parents(shared)
    with tarfile.TarFile(fileobj=file, mode="w", copybufsize=_PIECE_BYTES) as tar:
        for name in names:
            # of shared ones some may be another job's, which has removed it
            with nullcontext() if shared is None else suppress(FileNotFoundError):
                tar.add(source / name, name, recursive=shared is None)


def _with_parents(paths: Collection[str]) -> list[str]:
    names = [Path(path).relative_to(SHARED_MEMORY) for path in paths if Path(path).is_relative_to(SHARED_MEMORY)]
    return sorted({str(one) for name in names for one in (name, *name.parents[:-1])})


def fill_directories(init_pid: int, directories: Sequence[str], image: Path) -> None:
    """Write the files of an image into a new unit's directories. Raises OSError and ImageRefusedError."""
    for number, inside in enumerate(directories):
        target = from_outside(init_pid, inside)
        target.mkdir(parents=True, exist_ok=True)
        try:
            with tarfile.TarFile(image / _tar(number), "r", copybufsize=_PIECE_BYTES) as tar:
                # Links come last: nothing is written through one.
                members = sorted(tar, key=tarfile.TarInfo.issym)
                tar.extractall(target, members, numeric_owner=True, filter=_as_it_was)
        except tarfile.TarError as error:
            raise ImageRefusedError(f"the image's files of {inside} cannot be restored: {error}") from error


def _as_it_was(member: tarfile.TarInfo, target: str) -> tarfile.TarInfo:
    """Refuse what would leave the directory, and take setuid and setgid away: storage is no safer than its
    directories. All other bits of the mode stay.

    Names alone are checked: `target` leads into a unit by a link of /proc, and to look at it would find the links of
    this machine's directory of that name."""
    names = (member.name, member.linkname) if member.islnk() else (member.name,)
    if any(name.startswith("/") or ".." in name.split("/") for name in names):
        raise tarfile.OutsideDestinationError(member, member.name)
    return member.replace(mode=member.mode & 0o1777, deep=False)


def from_outside(pid: int, inside: str) -> Path:
    """Return the path here of what a process has at a path; 0: this process."""
    return Path(f"/proc/{pid}/root{inside}" if pid else inside)


def _tar(number: int) -> str:
    return f"own-{number}.tar"


def packed_bytes(directory: Path, fields: Mapping[str, Any]) -> int:
    """Return the size of an image's directory once it is packed. Raises as `pack`."""
    return _lay_out(directory, fields, True)[2].total_bytes


def _lay_out(
    directory: Path, fields: Mapping[str, Any], has_files: bool
) -> tuple[tuple[Path, ...], list[dict[str, Any]], state_image.Preamble, bytes]:
    facts = read_facts(directory)
    files = image_files(directory) if has_files else ()
    table: list[dict[str, Any]] = []
    offset = 0
    for file in files:
        size = file.stat().st_size
        table.append({"name": file.name, "offset": offset, "bytes": size})
        offset = state_image.aligned(offset + size)
    header = {**fields, FIELD: msgspec.to_builtins(facts), "tensors": table, "tree": None}
    preamble, encoded = state_image.lay_out(header, offset, state_image.preferred_digest())
    return files, table, preamble, encoded


def pack(
    directory: Path,
    fields: Mapping[str, Any],
    target: int,
    *,
    is_durable: bool = False,
    has_files: bool = True,
    filled: Callable[[int], None] = lambda count: None,
) -> int:
    """Write an image's directory to a file from its current position on. Return the bytes written. Blocks.

    `fields`: of the header, as `step`, `rank` and `world`. Without its files it stands for a rank whose process is in
    the image of another one. `filled` is called with the bytes that are final so far.
    Raises OSError, and ImageRefusedError for a directory without facts."""
    files, table, preamble, encoded = _lay_out(directory, fields, has_files)
    digests = state_image.ChunkDigests(preamble.digest_kind, preamble.chunk_bytes)
    _write(target, preamble.pack() + encoded)
    written = preamble.data_offset
    filled(written)
    piece = memoryview(bytearray(_PIECE_BYTES))
    for file, entry in zip(files, table, strict=True):
        left = entry["bytes"]
        with file.open("rb", buffering=0) as source:
            while left:
                count = source.readinto(piece[: min(left, _PIECE_BYTES)])
                if not count:
                    raise OSError(f"{file} became shorter while it was read")
                digests.update(piece[:count])
                _write(target, piece[:count])
                left -= count
                written += count
                filled(written)
        padding = _PADDING[: -entry["bytes"] % state_image.ALIGNMENT]
        digests.update(padding)
        _write(target, padding)
        written += len(padding)
    trailer = digests.trailer()
    _write(target, trailer)
    if is_durable:
        os.fsync(target)
    filled(written + len(trailer))
    return written + len(trailer)


def unpack(source: int, directory: Path, wait: Callable[[int], None] = lambda count: None) -> ImageFacts:
    """Write the files of a packed image, from the start of `source`, into an empty directory, and check all digests.

    `wait` is called with the bytes that are needed next: of an image that still arrives in a file of its size. Return
    the facts. Blocks. Raises OSError, state_image.ImageError for a damaged file, ImageRefusedError for one that is no
    image of processes; the directory is worthless then."""
    wait(state_image.PREAMBLE_BYTES)
    if not os.fstat(source).st_size:
        raise state_image.ImageError("TRUNCATED", "the image's file is empty")
    with mmap.mmap(source, 0, access=mmap.ACCESS_READ) as mapping, memoryview(mapping) as whole:
        # A copy: a view that an error holds would keep the mapping from being closed, and hide the error.
        preamble = state_image.parse_preamble(bytes(whole[: state_image.PREAMBLE_BYTES]))
        if len(whole) < preamble.total_bytes:
            raise state_image.ImageError(
                "TRUNCATED", f"the image has {preamble.total_bytes} bytes, its file {len(whole)}"
            )
        wait(preamble.data_offset)
        header = state_image.parse_header(preamble, bytes(whole[state_image.PREAMBLE_BYTES : preamble.data_offset]))
        facts = _facts_in(header)
        digests = state_image.ChunkDigests(preamble.digest_kind, preamble.chunk_bytes)
        position = 0
        for entry in header["tensors"]:
            position = _copy(whole, preamble.data_offset, position, entry, directory, digests, wait)
        wait(preamble.total_bytes)
        digests.update(whole[preamble.data_offset + position : preamble.trailer_offset])
        state_image.check_trailer(digests.trailer(), bytes(whole[preamble.trailer_offset : preamble.total_bytes]))
    write_facts(directory, facts)
    return facts


@contextmanager
def opened(descriptor: int) -> Iterator[int]:
    """Close the descriptor of an arena afterwards; it is at its start now."""
    try:
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


def facts_of(path: Path) -> ImageFacts | None:
    """Return the facts of a shard that is an image of processes; None for any other. Raises OSError, ImageError."""
    with path.open("rb") as file:
        preamble = state_image.parse_preamble(file.read(state_image.PREAMBLE_BYTES))
        encoded = file.read(preamble.header_bytes)
    state_image.check_header(preamble, encoded)
    if FIELD.encode() not in encoded:
        return None
    header = state_image.parse_header(preamble, encoded)
    return _facts_in(header) if FIELD in header else None


def _facts_in(header: Mapping[str, Any]) -> ImageFacts:
    if FIELD not in header:
        raise ImageRefusedError("this state was saved by a script or its agent; it is no image of processes")
    try:
        return msgspec.convert(header[FIELD], ImageFacts)
    except (ValueError, RecursionError) as error:
        raise ImageRefusedError(f"the facts of the process image cannot be read: {error}") from error


def _copy(
    whole: memoryview,
    data_offset: int,
    position: int,
    entry: Mapping[str, Any],
    directory: Path,
    digests: state_image.ChunkDigests,
    wait: Callable[[int], None],
) -> int:
    """Copy one file of the table, which begins at `position` of the data or after it. Return the end of the file."""
    name = str(entry.get("name"))
    if Path(name).name != name or name in ("", ".", "..", FACTS) or entry["offset"] < position:
        raise state_image.ImageError("HEADER", f"{name!r} is not a file of a process image, or out of order")
    wait(data_offset + entry["offset"])
    digests.update(whole[data_offset + position : data_offset + entry["offset"]])
    begin, end = data_offset + entry["offset"], data_offset + entry["offset"] + entry["bytes"]
    target = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        while begin < end:
            until = min(begin + _PIECE_BYTES, end)
            wait(until)
            with whole[begin:until] as piece:
                digests.update(piece)
                _write(target, piece)
                begin += len(piece)
    finally:
        os.close(target)
    return int(entry["offset"] + entry["bytes"])


def _write(target: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while len(view):
        view = view[os.write(target, view) :]
