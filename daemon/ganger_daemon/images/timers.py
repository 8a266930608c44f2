"""Timers behind descriptors (timerfd) in an image of CRIU, which restores some of them wrong.

CRIU stores the time that is left and the expirations that were not read. It arms a timer again with the time that is
left: a periodic one that has expired has none before it is read, and so never expires again. To an absolute timer it
adds the whole seconds of the clock: it expires up to a second too early, a disarmed one as well."""

from __future__ import annotations

import os
import struct
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

from ganger_daemon.images.contract import ImageRefusedError

_FILES = "files.img"
# Two words that name the kind of the image; then entries, each behind its length.
_MAGIC_BYTES = 8
_LENGTH = struct.Struct("=I")
_ABSOLUTE = 1
# Of CRIU's message `timerfd_entry`, in the order of their numbers; the others are kept as they are.
_FIRST_NUMBER, _FIELDS = 5, ("ticks", "settime_flags", "vsec", "vnsec", "isec", "insec")
_TIMER_NUMBER = 12  # in CRIU's message `file_entry`


class ArmedTimer(NamedTuple):
    """How a timer is set: `ticks`: expirations that were not read; `flags`: of timerfd_settime; seconds and nanoseconds
    that are left (zero: it is disarmed or has expired) and of its interval."""

    ticks: int
    flags: int
    left: tuple[int, int]
    interval: tuple[int, int]

    def restorable(self) -> ArmedTimer:
        """Return how CRIU has to set it: to the time that is left, or to the next interval."""
        has_expired = self.left == (0, 0) != self.interval and self.ticks > 0
        return self._replace(flags=self.flags & ~_ABSOLUTE, left=self.interval if has_expired else self.left)


def mend_timers(image: Path) -> None:
    """Change the timers in the directory of an image. Raises OSError, and ImageRefusedError for an image in another
    format."""
    path = image / _FILES
    content = path.read_bytes()
    mended, at = bytearray(content[:_MAGIC_BYTES]), _MAGIC_BYTES
    try:
        while at < len(content):
            (size,) = _LENGTH.unpack_from(content, at)
            at += _LENGTH.size
            entry = _mended(content[at : at + size])
            at += size
            mended += _LENGTH.pack(len(entry)) + entry
    except (struct.error, message.DecodeError) as error:
        raise ImageRefusedError(f"CRIU has written its open files in another format: {error}") from error
    if mended != content:
        new = path.with_suffix(".new")
        new.write_bytes(mended)
        os.replace(new, path)


def _mended(entry: bytes) -> bytes:
    found = _file_entry()()
    found.ParseFromString(entry)
    if not found.HasField("tfd"):
        return entry
    timer = found.tfd
    is_set = ArmedTimer(timer.ticks, timer.settime_flags, (timer.vsec, timer.vnsec), (timer.isec, timer.insec))
    new = is_set.restorable()
    timer.settime_flags, (timer.vsec, timer.vnsec) = new.flags, new.left
    return bytes(found.SerializeToString())


@cache
def _file_entry() -> Any:
    """Return the class of CRIU's message for an open file, with the fields of timers; it keeps all others."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="criu.proto", package="criu", syntax="proto2")
    timer, entry = file.message_type.add(name="timerfd_entry"), file.message_type.add(name="file_entry")
    for number, name in enumerate(_FIELDS, _FIRST_NUMBER):
        timer.field.add(name=name, number=number, type=kinds.TYPE_UINT64, label=kinds.LABEL_OPTIONAL)
    entry.field.add(
        name="tfd",
        number=_TIMER_NUMBER,
        type=kinds.TYPE_MESSAGE,
        type_name=".criu.timerfd_entry",
        label=kinds.LABEL_OPTIONAL,
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("criu.file_entry"))
