"""Units for the tests of process images."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HOST = Path(__file__).with_name("unit_host.py")


class UnitHost:
    """The launcher of the tests: makes units, and starts roots and restores in them."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HOST)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._inits: list[int] = []

    def make_unit(self) -> int:
        init: int = self._ask(do="unit")
        self._inits.append(init)
        return init

    def start(self, init: int, argv: list[str], log: Path) -> int:
        """Start a root in a unit; return its process id."""
        return int(self._ask(do="run", init=init, argv=argv, log=str(log), logs={}, first=1000))

    def restore(self, init: int, argv: list[str], log: Path, logs: dict[str, int]) -> int:
        """Run a command of a restore in a unit; return the root's process id, or 0 if the command fails."""
        before = set(self._ask(do="children"))
        command = self._ask(do="run", init=init, argv=argv, log=str(log), logs=logs, first=0)
        if self.wait(command):
            return 0
        (root,) = set(self._ask(do="children")) - before
        return int(root)

    def wait(self, pid: int) -> int:
        """Wait for the end of a child; return its exit code, negative for a signal."""
        return int(self._ask(do="wait", pid=pid))

    def end(self, init: int) -> None:
        """End a unit with all its processes."""
        self._ask(do="end", init=init)
        self._inits.remove(init)

    def close(self) -> None:
        for init in tuple(self._inits):
            self.end(init)
        self._process.communicate(timeout=30)

    def _ask(self, **command: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert "error" not in answer, answer
        return answer["is"]


@pytest.fixture
def host() -> Iterator[UnitHost]:
    if os.geteuid():
        pytest.skip("units need root")
    found = UnitHost()
    yield found
    found.close()
