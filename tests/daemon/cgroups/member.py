"""A process to put into groups: it enters before it does anything, as a forked rank does, and obeys lines on stdin."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ganger_daemon.cgroups.contract import Cgroups

SCRIPT = """
import mmap, os, signal, sys, threading
for path in sys.argv[1:]:
    with open(path, "wb", buffering=0) as file:
        file.write(b"0")
gate = threading.Event()
print(os.getpid(), flush=True)
for line in sys.stdin:
    word, _, value = line.strip().partition(" ")
    if word == "threads":
        for _ in range(int(value)):
            threading.Thread(target=gate.wait, daemon=True).start()
    elif word == "pin":
        os.sched_setaffinity(0, {int(value)})
    elif word == "hold":
        held = bytearray(b"x") * int(value)
    elif word == "read":
        with open(value, "rb", buffering=0) as file:
            while file.read(1 << 20):
                pass
    elif word == "child":
        if os.fork() == 0:
            gate.wait()
    elif word == "count":
        # SIGTERM is trapped; a thread counts in the file from now on
        signal.signal(signal.SIGTERM, lambda *_: None)
        file = open(value, "r+b")
        counted = memoryview(mmap.mmap(file.fileno(), 8)).cast("Q")
        def count():
            while True:
                counted[0] += 1
        threading.Thread(target=count, daemon=True).start()
    elif word == "burn":
        total = 0
        for i in range(int(value)):
            total += i
    print("done", flush=True)
"""


class Member:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid = process.pid

    @property
    def gone(self) -> bool:
        return self._process.poll() is not None

    @property
    def code(self) -> int | None:
        return self._process.poll()

    def do(self, order: str) -> bool:
        """Whether it lived to say that it is done."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.tell(order)
        return self._process.stdout.readline() == "done\n"

    def tell(self, order: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()


@contextmanager
def member_of(cgroups: Cgroups, group: str) -> Iterator[Member]:
    files: Sequence[str] = cgroups.join_files(group)
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", SCRIPT, *files],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline().strip() == str(process.pid)
        cgroups.track(group, process.pid)
        yield Member(process)
    finally:
        process.kill()
        process.stdin.close()
        process.stdout.close()
        process.wait(10)
