"""A filter of device files for one group of the v2 tree, which has no controller for them: a BPF program that the
kernel asks before any process of the group opens a device. It stays with the group until that is removed."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Sequence
from pathlib import Path

# Number of the bpf system call, by machine.
_SYS_BPF = {"x86_64": 321, "aarch64": 280}
_PROG_LOAD, _PROG_ATTACH = 5, 8
_TYPE_CGROUP_DEVICE, _ATTACH_CGROUP_DEVICE = 15, 6
# The group has one program, which the next one replaces; those of groups above it count as well.
_ONE = 0
# Fields of struct bpf_cgroup_dev_ctx, which register 1 points to.
_MAJOR, _MINOR = 4, 8
_LOAD_WORD, _JUMP_NOT_EQUAL, _SET, _EXIT = 0x61, 0x55, 0xB7, 0x95
_DENIED, _ALLOWED = 0, 1


def program(denied: Sequence[tuple[int, int]]) -> bytes:
    """Return the instructions of a filter that denies these devices, by major and minor number, and allows others."""
    code = [_instruction(_LOAD_WORD, 2, 1, _MAJOR), _instruction(_LOAD_WORD, 3, 1, _MINOR)]
    for major, minor in denied:
        code += [
            _instruction(_JUMP_NOT_EQUAL, 2, offset=3, value=major),
            _instruction(_JUMP_NOT_EQUAL, 3, offset=2, value=minor),
            _instruction(_SET, 0, value=_DENIED),
            _instruction(_EXIT),
        ]
    return b"".join([*code, _instruction(_SET, 0, value=_ALLOWED), _instruction(_EXIT)])


def _instruction(code: int, target: int = 0, source: int = 0, offset: int = 0, value: int = 0) -> bytes:
    return struct.pack("<BBhi", code, source << 4 | target, offset, value)


def attach(group: Path, denied: Sequence[tuple[int, int]]) -> None:
    """Deny devices to all processes that are in a group or below it, for as long as it exists. Raises OSError."""
    code, licence = ctypes.create_string_buffer(program(denied)), ctypes.create_string_buffer(b"GPL")
    count = len(program(denied)) // 8
    load = struct.pack("<IIQQ", _TYPE_CGROUP_DEVICE, count, ctypes.addressof(code), ctypes.addressof(licence))
    loaded = _bpf(_PROG_LOAD, load.ljust(128, b"\0"))
    try:
        directory = os.open(group, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _bpf(_PROG_ATTACH, struct.pack("<IIII", directory, loaded, _ATTACH_CGROUP_DEVICE, _ONE))
        finally:
            os.close(directory)
    finally:
        os.close(loaded)


def _bpf(command: int, attributes: bytes) -> int:
    if platform.machine() not in _SYS_BPF:
        raise OSError(f"no BPF on {platform.machine()}")
    libc, held = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(attributes, len(attributes))
    call = ctypes.c_long(_SYS_BPF[platform.machine()])
    done = libc.syscall(call, ctypes.c_long(command), held, ctypes.c_ulong(len(attributes)))
    if done < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"the kernel takes no filter of devices: {os.strerror(number)}")
    return int(done)
