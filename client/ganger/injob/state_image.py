"""The state image, and the arena, the memfd in which a parked state waits. A preamble with all sizes, a JSON header,
64-byte aligned data, and a trailer with one digest per chunk, written front to back: every prefix is final and can be
streamed. No pickle anywhere: an image may come from another user."""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

_xxh3_64: Any
try:
    from xxhash import xxh3_64 as _xxh3_64
except ImportError:  # The user's environment need not have it
    _xxh3_64 = None

MAGIC = b"GANGERST"
VERSION = 1
ALIGNMENT = 64
PREAMBLE = struct.Struct("<8sIIQQQQQQ")
PREAMBLE_BYTES = PREAMBLE.size
CHUNK_BYTES = 16 << 20
# An image states the sizes of its parts, and memory is allocated by them. Larger sizes than these are rejected.
MAX_HEADER_BYTES = 1 << 30
MAX_CHUNK_BYTES = 1 << 30

XXH3 = 1
CRC32 = 2


class ImageError(Exception):
    """The bytes are not a usable state image. `reason`: MAGIC, VERSION, TRUNCATED, HEADER or DIGEST."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Preamble:
    digest_kind: int
    header_bytes: int
    total_bytes: int
    data_offset: int
    trailer_offset: int
    header_digest: int
    chunk_bytes: int

    @property
    def data_bytes(self) -> int:
        return self.trailer_offset - self.data_offset

    @property
    def chunks(self) -> int:
        return -(-self.data_bytes // self.chunk_bytes)

    @property
    def trailer_bytes(self) -> int:
        return 8 * (self.chunks + 1)

    def pack(self) -> bytes:
        return PREAMBLE.pack(
            MAGIC,
            VERSION,
            self.digest_kind,
            self.header_bytes,
            self.total_bytes,
            self.data_offset,
            self.trailer_offset,
            self.header_digest,
            self.chunk_bytes,
        )


def aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def preferred_digest() -> int:
    """The fastest digest this interpreter can compute."""
    return CRC32 if _xxh3_64 is None else XXH3


class Digest:
    """A running digest of one kind. Raises ImageError (DIGEST) where the kind cannot be computed here."""

    def __init__(self, kind: int) -> None:
        if kind == XXH3 and _xxh3_64 is None:
            raise ImageError("DIGEST", "the image was hashed with xxh3; install xxhash in this environment to read it")
        if kind not in (XXH3, CRC32):
            raise ImageError("DIGEST", f"unknown digest kind {kind}; write the image with this version of ganger")
        self._state: Any = _xxh3_64() if kind == XXH3 else None
        self._crc = 0

    def update(self, data: Any) -> None:
        if self._state is not None:
            self._state.update(data)
        else:
            self._crc = zlib.crc32(data, self._crc)

    def value(self) -> int:
        return int(self._state.intdigest()) if self._state is not None else self._crc


def digest_of(kind: int, data: Any) -> int:
    digest = Digest(kind)
    digest.update(data)
    return digest.value()


class ChunkDigests:
    """Digests of consecutive chunks of a byte stream that is fed in pieces of any size."""

    def __init__(self, kind: int, chunk_bytes: int) -> None:
        self._kind = kind
        self._chunk_bytes = chunk_bytes
        self._digest = Digest(kind)
        self._inside = 0
        self._values: list[int] = []

    def update(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        position = 0
        while position < len(view):
            piece = view[position : position + self._chunk_bytes - self._inside]
            self._digest.update(piece)
            self._inside += len(piece)
            position += len(piece)
            if self._inside == self._chunk_bytes:
                self._close()

    def _close(self) -> None:
        self._values.append(self._digest.value())
        self._digest = Digest(self._kind)
        self._inside = 0

    def trailer(self) -> bytes:
        """The digests of all chunks and the digest of those."""
        if self._inside:
            self._close()
        words = struct.pack(f"<{len(self._values)}Q", *self._values)
        return words + struct.pack("<Q", digest_of(self._kind, words))


def lay_out(header: dict[str, Any], data_bytes: int, digest_kind: int) -> tuple[Preamble, bytes]:
    """The preamble and the encoded header of an image with `data_bytes` of data (a multiple of 64)."""
    encoded = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
    if len(encoded) > MAX_HEADER_BYTES:
        raise ImageError("HEADER", f"the state has {len(encoded)} bytes beside its tensors; at most {MAX_HEADER_BYTES}")
    # Filled up with blanks, so that the header's digest leaves no byte before the data unprotected.
    encoded = encoded.ljust(aligned(len(encoded)))
    data_offset = PREAMBLE_BYTES + len(encoded)
    chunks = -(-data_bytes // CHUNK_BYTES)
    preamble = Preamble(
        digest_kind=digest_kind,
        header_bytes=len(encoded),
        total_bytes=data_offset + data_bytes + 8 * (chunks + 1),
        data_offset=data_offset,
        trailer_offset=data_offset + data_bytes,
        header_digest=0,
        chunk_bytes=CHUNK_BYTES,
    )
    return replace(preamble, header_digest=_header_digest(preamble, encoded)), encoded


def _header_digest(preamble: Preamble, encoded: Any) -> int:
    """Return the digest of the preamble, with 0 in place of this digest, and the encoded header."""
    digest = Digest(preamble.digest_kind)
    digest.update(replace(preamble, header_digest=0).pack())
    digest.update(encoded)
    return digest.value()


def parse_preamble(data: Any) -> Preamble:
    """Read and check the first 64 bytes. Raises ImageError: MAGIC, VERSION, TRUNCATED, HEADER."""
    if len(data) < PREAMBLE_BYTES:
        raise ImageError("TRUNCATED", f"a state image has at least {PREAMBLE_BYTES} bytes, this one {len(data)}")
    magic, version, kind, header, total, data_at, trailer_at, header_digest, chunk = PREAMBLE.unpack(
        bytes(data[:PREAMBLE_BYTES])
    )
    if magic != MAGIC:
        raise ImageError("MAGIC", f"not a state image: it begins with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise ImageError("VERSION", f"state image of version {version}; this ganger reads version {VERSION}")
    preamble = Preamble(kind, header, total, data_at, trailer_at, header_digest, chunk)
    consistent = (
        0 < chunk <= MAX_CHUNK_BYTES
        and header <= MAX_HEADER_BYTES
        and data_at == PREAMBLE_BYTES + header
        and data_at % ALIGNMENT == 0
        and trailer_at >= data_at
        and total == trailer_at + preamble.trailer_bytes
    )
    if not consistent:
        raise ImageError("HEADER", "the sizes in the image's preamble contradict each other: it was overwritten")
    return preamble


def check_header(preamble: Preamble, encoded: Any) -> None:
    """Raise ImageError (TRUNCATED, DIGEST) if the encoded header does not match its size or digest."""
    if len(encoded) != preamble.header_bytes:
        raise ImageError("TRUNCATED", f"the header has {preamble.header_bytes} bytes, {len(encoded)} are there")
    if _header_digest(preamble, encoded) != preamble.header_digest:
        raise ImageError("DIGEST", "the image's header does not match its digest")


def parse_header(preamble: Preamble, encoded: Any) -> dict[str, Any]:
    """Decode the JSON header. Raises ImageError: TRUNCATED, HEADER, DIGEST."""
    check_header(preamble, encoded)
    try:
        header = json.loads(bytes(encoded))
    except (ValueError, RecursionError) as error:
        raise ImageError("HEADER", f"the image's header is not JSON: {error}") from error
    if not isinstance(header, dict) or not isinstance(header.get("tensors"), list) or "tree" not in header:
        raise ImageError("HEADER", "the image's header lacks its tensor table or its tree")
    for number, entry in enumerate(header["tensors"]):
        try:
            offset, size = entry["offset"], entry["bytes"]
            inside = offset >= 0 and size >= 0 and offset + size <= preamble.data_bytes
        except (TypeError, KeyError) as error:
            raise ImageError("HEADER", f"entry {number} of the image's tensor table is malformed") from error
        if not inside:
            raise ImageError("HEADER", f"entry {number} of the image's tensor table points outside its data")
    return header


def check_trailer(computed: bytes, found: bytes) -> None:
    """Raise ImageError (DIGEST), naming the first chunk that differs."""
    if computed == found:
        return
    bad: int | None = next((i for i in range(0, len(found), 8) if found[i : i + 8] != computed[i : i + 8]), None)
    where = "its last" if bad is None or bad == len(found) - 8 else f"chunk {bad // 8} of its"
    raise ImageError("DIGEST", f"the image is damaged: {where} digest does not match the data")


VARIABLE = "GANGER_ARENA"


def make_arena(existing: int | None, name: str, size: int) -> int:
    """Return a memfd of at least ``size`` bytes, the existing one if there is one. Raises OSError."""
    if existing is None:
        existing = os.memfd_create(_memfd_name(name), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(existing, size)
        # A job that shrank it would kill the daemon that streams from it.
        fcntl.fcntl(existing, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    elif os.fstat(existing).st_size < size:
        os.ftruncate(existing, size)
    return existing


def is_sealed(descriptor: int) -> bool:
    """Return whether a descriptor is of memory that cannot be cut short: only a sealed memfd has this seal."""
    try:
        return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False


def recover_arena(pid: int, name: str) -> int | None:
    """Find the arena of a rank that another launcher started, among the rank's own descriptors; None without one."""
    for path in _memfds(pid, f"{_memfd_name(name)} (deleted)"):
        with suppress(OSError):
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    return None


def allocated_arena_bytes(pids: Iterable[int]) -> int:
    """Return the bytes allocated of the arenas that processes have open, each counted once; a process that cannot be
    read has none. A rank from a process image has an arena of its first attempt's name, so all names count."""
    found: dict[int, int] = {}
    for pid in pids:
        for path in _memfds(pid, _memfd_name("")):
            with suppress(OSError):
                status = os.stat(path)
                found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())


def _memfds(pid: int, beginning: str) -> Iterator[str]:
    """Yield the paths in /proc of a process's memory files whose names begin so."""
    with suppress(OSError):
        for entry in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{entry}"
            with suppress(OSError):  # Closed since it was listed
                if os.readlink(path).startswith(f"/memfd:{beginning}"):
                    yield path


def arena_variable(descriptor: int) -> str:
    """Return the value of GANGER_ARENA for a process that inherits ``descriptor``: number, device and inode."""
    status = os.fstat(descriptor)
    return f"{descriptor}:{status.st_dev}:{status.st_ino}"


def inherited_arena(value: str, *, is_restored: bool = False) -> int | None:
    """Return the descriptor that ``value`` of GANGER_ARENA names; None if this process did not inherit the arena.

    ``is_restored``: the process comes from a process image, so its memory files are others than when it started."""
    try:
        descriptor, device, inode = map(int, value.split(":"))
        status = os.fstat(descriptor)
        is_whole = is_sealed(descriptor)
    except (ValueError, OSError, OverflowError):
        return None
    if is_restored:
        is_arena = os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"/memfd:{_memfd_name('')}")
    else:
        is_arena = (status.st_dev, status.st_ino) == (device, inode)
    return descriptor if is_whole and is_arena else None


def _memfd_name(name: str) -> str:
    # The kernel allows 249 bytes; slashes are fine.
    return f"ganger {name}"[:240]


_MADV_DONTNEED = 4
_MADV_POPULATE_WRITE = 23
# One call keeps the process from mapping anything else meanwhile, so from allocating too: a few milliseconds each.
_AT_ONCE_BYTES = 16 << 20

# By ctypes, as mmap.madvise keeps the interpreter's lock.
_libc = ctypes.CDLL(None)


def enter_pages(mapping: mmap.mmap, size: int) -> None:
    """Enter the first `size` bytes of a writable mapping into the page table, allocated if they are not there yet.

    Others continue meanwhile. Kernels before 5.14 cannot do it, and memory may lack: then the faults come later."""
    _advise(mapping, size, _MADV_POPULATE_WRITE)


def leave_pages(mapping: mmap.mmap) -> None:
    """Take a shared mapping's pages out of the page table, so that closing it takes no time. The data stay."""
    _advise(mapping, len(mapping), _MADV_DONTNEED)


def _advise(mapping: mmap.mmap, size: int, advice: int) -> None:
    # While it lives, the mapping cannot be closed.
    first = ctypes.c_ubyte.from_buffer(mapping)
    start = ctypes.addressof(first)
    for offset in range(0, size, _AT_ONCE_BYTES):
        length = min(_AT_ONCE_BYTES, size - offset)
        if _libc.madvise(ctypes.c_void_p(start + offset), ctypes.c_size_t(length), ctypes.c_int(advice)):
            return
