"""The filter of system calls that keeps io_uring from jobs whose processes are dumped."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Prints the error of io_uring_setup without parameters, and that of a child; ENOSYS is 38.
ASKING = """
import ctypes, os, sys
from ganger.injob.launcher.namespaces import refuse_io_uring
libc = ctypes.CDLL(None, use_errno=True)
def error():
    result = libc.syscall(ctypes.c_long(425), ctypes.c_long(1), ctypes.c_long(0))
    return ctypes.get_errno() if result < 0 else 0
if len(sys.argv) > 1:
    os.setresuid(*[int(sys.argv[1])] * 3)
before = error()
refuse_io_uring()
sys.stdout.write(f"{before} {error()} ")
sys.stdout.flush()
if os.fork() == 0:
    sys.stdout.write(f"{error()}")
    sys.stdout.flush()
    os._exit(0)
os.wait()
"""


def errors(*arguments: str) -> list[int]:
    done = subprocess.run(
        [sys.executable, "-c", ASKING, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


def test_io_uring_fails_as_on_a_kernel_without_it_in_the_process_and_its_children() -> None:
    before, after, child = errors()
    assert (after, child) == (38, 38)
    if before == 38:
        pytest.skip("this kernel has no io_uring")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_a_process_without_rights_can_have_the_filter_too() -> None:
    assert errors("65534")[1:] == [38, 38]
