"""Descriptors of a process tree that its image would cut, cannot hold or restores wrong: connections that lead outside
it, some others, and timers. The kernel's tables name the two ends of a TCP connection by address, those of a Unix
connection by inode."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

from ganger_daemon.images.contract import ImageRefusedError

TABLES = ("tcp", "tcp6", "udp", "udp6", "packet")
_SOCKET = re.compile(r"socket:\[(\d+)\]")
_LISTENING = "0A"
_CLOSED = "07"


@dataclass(frozen=True, slots=True)
class SocketOwner:
    """One descriptor of one process."""

    inode: int
    descriptor: int
    pid: int
    program: str

    def __str__(self) -> str:
        return f"descriptor {self.descriptor} of {self.program}, pid {self.pid}"


@dataclass(frozen=True, slots=True)
class InternetSocket:
    """One line of the kernel's tables of TCP and UDP sockets. `inode` is zero if no process holds it."""

    protocol: str
    local: str
    remote: str
    state: str
    inode: int

    @property
    def is_connected(self) -> bool:
        return self.state != _LISTENING and not self.remote.endswith(":0")


@dataclass(frozen=True, slots=True)
class UnixSocket:
    """`peer`: inode of the other end, zero without one. `name`: path it is bound to, empty without one."""

    peer: int
    name: str


@dataclass(frozen=True, slots=True)
class OutsideConnections:
    """Reasons in plain words: TCP connections, which may be closed if the user allows it, and all others."""

    tcp: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    # Whether processes of the tree have TCP connections among themselves.
    has_inner_tcp: bool = False

    def refusal(self, is_outside_closed: bool) -> str:
        """Return why no image can be made; empty if these connections allow one."""
        reasons = [*self.others]
        if self.tcp and not is_outside_closed:
            reasons += [*self.tcp[:-1], f"{self.tcp[-1]}; --close-connections would allow it to be closed"]
        elif self.tcp and self.has_inner_tcp:
            reasons += [
                f"{reason}; it cannot be closed alone, as the job has connections inside" for reason in self.tcp
            ]
        more = f" and {len(reasons) - _MOST} more" if len(reasons) > _MOST else ""
        return "; ".join(reasons[:_MOST]) + more


_MOST = 5


@dataclass(frozen=True, slots=True)
class SocketTables:
    """Sockets of a network namespace by inode, as the kernel lists them."""

    internet: tuple[InternetSocket, ...] = ()
    packet: frozenset[int] = frozenset()
    unix: Mapping[int, UnixSocket] = field(default_factory=dict)


def owners_of(descriptors: Mapping[int, str], pid: int, program: str) -> list[SocketOwner]:
    """Return the sockets among a process's descriptors. `descriptors`: what each points to, as in /proc/PID/fd."""
    matches = ((number, _SOCKET.fullmatch(target)) for number, target in sorted(descriptors.items()))
    return [SocketOwner(int(match.group(1)), number, pid, program) for number, match in matches if match]


_NVIDIA = "/dev/nvidia"
# What a descriptor points to that no image can hold, by the beginning of its link in /proc.
_UNSAVABLE = (
    ("anon_inode:[io_uring]", "uses io_uring"),
    (_NVIDIA, "uses a GPU"),
    ("/dev/kfd", "uses a GPU"),
    ("/dev/infiniband/", "uses RDMA"),
    ("/dev/fuse", "serves a file system"),
    ("anon_inode:[perf_event]", "measures performance"),
    ("anon_inode:bpf-", "uses BPF"),
    ("anon_inode:[userfaultfd]", "uses userfaultfd"),
)

_TERMINALS, _SIGNALS = frozenset({"/dev/ptmx", "/dev/pts/ptmx"}), "anon_inode:[signalfd]"


def unsavable(descriptors: Mapping[int, str], pid: int, program: str, gpu_obstacle: str) -> tuple[str, ...]:
    """Return what of a process's descriptors no image can hold. `descriptors`: as the links in /proc/PID/fd name it.
    `gpu_obstacle`: why the GPU's driver cannot close what belongs to it; empty if it can."""
    found = tuple(
        f"{text} ({target}, descriptor {number} of {program}, pid {pid}){': ' + gpu_obstacle if is_gpu else ''}"
        for number, target in sorted(descriptors.items())
        for beginning, text in _UNSAVABLE
        for is_gpu in (beginning == _NVIDIA,)
        if target.startswith(beginning) and not (is_gpu and not gpu_obstacle)
    )
    # Of util-linux: it ends when its poll is interrupted, as CRIU does it also to processes that go on.
    if _SIGNALS in descriptors.values() and not _TERMINALS.isdisjoint(descriptors.values()):
        found += (f"runs a program on a terminal, as `script` does, and would end ({program}, pid {pid})",)
    return found


def outside_connections(owners: Iterable[SocketOwner], tables: SocketTables) -> OutsideConnections:
    """Return which sockets of a tree lead outside it. A socket that several processes hold is named once."""
    held: dict[int, SocketOwner] = {}
    for each in owners:
        held.setdefault(each.inode, each)
    ends = {(one.protocol[:3], one.local, one.remote): one.inode for one in tables.internet}
    listening = {one.local for one in tables.internet if one.state == _LISTENING and one.inode in held}
    tcp, others, has_inner = [], [], False
    for one in tables.internet:
        owner = held.get(one.inode)
        if owner is None or not one.is_connected or (one.state == _CLOSED and one.protocol.startswith("tcp")):
            continue
        peer = ends.get((one.protocol[:3], one.remote, one.local))
        # A connection that the tree's own listener has not accepted yet has an end without an inode.
        if peer in held or (peer == 0 and _listens(listening, one.remote)):
            has_inner = has_inner or one.protocol.startswith("tcp")
            continue
        if one.protocol.startswith("tcp"):
            tcp.append(f"connected to {one.remote} ({owner})")
        else:
            others.append(f"connected to {one.remote} by UDP ({owner})")
    others += [f"has a packet socket ({held[inode]})" for inode in held.keys() & tables.packet]
    for inode, each in held.items():
        found = tables.unix.get(inode)
        if found is not None and found.peer and found.peer not in held:
            peer_socket = tables.unix.get(found.peer)
            name = (peer_socket.name if peer_socket else "") or found.name or "a program outside the job"
            others.append(f"connected to {name} ({each})")
    return OutsideConnections(tuple(tcp), tuple(others), has_inner)


def _listens(listening: set[str], address: str) -> bool:
    port = address.rpartition(":")[2]
    return not listening.isdisjoint((address, f"0.0.0.0:{port}", f"[::]:{port}"))


def parse_internet(protocol: str, text: str) -> list[InternetSocket]:
    """Parse /proc/net/tcp, tcp6, udp or udp6; lines that are none are left out."""
    found = []
    for line in text.splitlines()[1:]:
        fields = line.split()
        try:
            local, remote = _address(fields[1]), _address(fields[2])
            found.append(InternetSocket(protocol, local, remote, fields[3], int(fields[9])))
        except (IndexError, ValueError):
            continue
    return found


def parse_packet(text: str) -> frozenset[int]:
    """Return the inodes in /proc/net/packet."""
    return frozenset(int(line.split()[-1]) for line in text.splitlines()[1:] if line.split())


def _address(word: str) -> str:
    """Convert "0100007F:1538" to "127.0.0.1:5432". An IPv4 address in an IPv6 socket is written as IPv4."""
    host, _, port = word.partition(":")
    # The kernel prints words of 32 bits in the machine's order.
    packed = b"".join(struct.pack("=I", int(host[at : at + 8], 16)) for at in range(0, len(host), 8))
    address = ipaddress.ip_address(packed)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    name = f"[{address}]" if address.version == 6 else str(address)
    return f"{name}:{int(port, 16)}"


def read_tables(net: Path) -> SocketTables:
    """Read the tables of a network namespace. `net`: /proc/PID/net of a process in it; its Unix sockets are those of
    this process's own namespace, where units live. Raises OSError."""
    texts = {name: (net / name).read_text() for name in TABLES if (net / name).exists()}
    internet = [one for name, text in texts.items() if name != "packet" for one in parse_internet(name, text)]
    return SocketTables(tuple(internet), parse_packet(texts.get("packet", "")), unix_peers())


# -- Unix sockets: /proc does not name the other end -------------------------------------------------------------------

_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20
_DUMP_REQUEST = 0x301
_ERROR, _DONE = 2, 3
_SHOW_NAME, _SHOW_PEER = 1, 4
_NAME, _PEER = 0, 2
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBHIIIII")
_ENTRY = struct.Struct("=BBBBIII")


def unix_peers() -> dict[int, UnixSocket]:
    """Ask the kernel for all Unix sockets of this network namespace, by inode. Raises OSError."""
    found: dict[int, UnixSocket] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as diagnosis:
        request = _REQUEST.pack(socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, _SHOW_NAME | _SHOW_PEER, 0, 0)
        header = _HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _DUMP_REQUEST, 1, 0)
        diagnosis.send(header + request)
        while parse_unix(diagnosis.recv(1 << 18), found):
            pass
    return found


def parse_unix(data: bytes, found: dict[int, UnixSocket]) -> bool:
    """Add the sockets in one answer of the kernel to `found`. Return whether more follow. Raises OSError."""
    position = 0
    while position + _HEADER.size <= len(data):
        size, kind, _, _, _ = _HEADER.unpack_from(data, position)
        body = data[position + _HEADER.size : position + size]
        if kind == _DONE or size < _HEADER.size:
            return False
        if kind == _ERROR:
            raise OSError(-struct.unpack_from("=i", body)[0], "the kernel does not list Unix sockets")
        inode = _ENTRY.unpack_from(body)[4]
        fields = dict(_attributes(body[_ENTRY.size :]))
        peer = struct.unpack("=I", fields[_PEER])[0] if _PEER in fields else 0
        name = fields.get(_NAME, b"").rstrip(b"\0").replace(b"\0", b"@").decode(errors="replace")
        found[inode] = UnixSocket(peer, name)
        position += (size + 3) & ~3
    return True


def _attributes(data: bytes) -> Iterable[tuple[int, bytes]]:
    position = 0
    while position + 4 <= len(data):
        size, kind = struct.unpack_from("=HH", data, position)
        if size < 4:
            return
        yield kind, data[position + 4 : position + size]
        position += (size + 3) & ~3


# -- timers (timerfd) --------------------------------------------------------------------------------------------------

# CRIU stores the time that is left, and the expirations that were not read. It arms a timer again with the time that is
# left: a periodic one that has expired has none before it is read, and so never expires again. To an absolute timer it
# adds the whole seconds of the clock: it expires up to a second too early, a disarmed one as well.
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
