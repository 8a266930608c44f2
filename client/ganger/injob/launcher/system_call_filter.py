"""A filter of system calls for jobs whose processes are to be dumped: no io_uring.

A ring is shared between a process and the kernel, and cannot be part of an image. Programs that use rings use other
calls where the kernel has none, which is what the filter makes the kernel answer.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

# The same number on all architectures that Linux had in 5.1, but alpha.
_IO_URING_SETUP = 425
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SET_MODE_FILTER = 1
# No mitigation of speculative execution beyond what the process has: older kernels slow filtered processes down.
_SPEC_ALLOW = 4
_RETURN_ERROR, _RETURN_ALLOW = 0x00050000, 0x7FFF0000
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_PR_SET_NO_NEW_PRIVS = 38


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def refuse_io_uring() -> None:
    """Let io_uring_setup fail with ENOSYS in this thread and all processes that it starts. For a process of one
    thread, as root; another one gives up setuid programs for it. Raises OSError where the kernel has no filters."""
    number = _SECCOMP.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, f"no filter of system calls on {os.uname().machine}")
    instructions = b"".join(
        struct.pack("=HBBI", *instruction)
        for instruction in (
            (_LOAD, 0, 0, 0),  # the call's number
            (_JUMP_IF_EQUAL, 0, 1, _IO_URING_SETUP),
            (_RETURN, 0, 0, _RETURN_ERROR | errno.ENOSYS),
            (_RETURN, 0, 0, _RETURN_ALLOW),
        )
    )
    held = ctypes.create_string_buffer(instructions, len(instructions))
    program = _Program(len(instructions) // 8, ctypes.addressof(held))
    libc = ctypes.CDLL(None, use_errno=True)

    def install() -> int:
        done: int = libc.syscall(
            ctypes.c_long(number), ctypes.c_ulong(_SET_MODE_FILTER), ctypes.c_ulong(_SPEC_ALLOW), ctypes.byref(program)
        )
        return 0 if done == 0 else ctypes.get_errno()

    problem = install()
    if problem == errno.EACCES and libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0:
        problem = install()
    if problem:
        raise OSError(problem, f"the kernel takes no filter of system calls: {os.strerror(problem)}")
