"""A server with canned answers, and the commands that ask it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from ganger.cli.main import run
from kit.canned import Call, CannedMaster


@pytest.fixture
def master(tmp_path: Path) -> Iterator[CannedMaster]:
    with CannedMaster(tmp_path) as master:
        yield master


@pytest.fixture
def call(master: CannedMaster, monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.setenv("XDG_STATE_HOME", str(master.directory))
    return lambda *arguments: run(["--master", str(master.directory), *arguments])
