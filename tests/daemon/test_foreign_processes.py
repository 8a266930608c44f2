"""Processes that an account's launcher names but that another user runs, or that have another user's rights, too: no
action of root reaches them."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ganger.injob.process_identity import start_ticks
from ganger_daemon.gang.exit_watcher import ExitWatcher
from ganger_daemon.node.accounts import Account
from ganger_daemon.node.daemon_files import GangPaths
from ganger_daemon.node.launchers import children_of
from ganger_daemon.node.process_identity import ProcessId
from kit.accounts import STRANGER, needs_a_stranger

pytestmark = needs_a_stranger
ANN = Account("ann", STRANGER, STRANGER, (), "/")


@contextmanager
def process_of(*uids: int) -> Iterator[ProcessId]:
    """A process with these real, effective and saved uids."""
    process = subprocess.Popen(["sleep", "60"], preexec_fn=lambda: os.setresuid(*uids))
    try:
        yield ProcessId(process.pid, start_ticks(process.pid) or 0)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("uids", [(0, STRANGER, 0), (STRANGER, 0, 0), (STRANGER + 1, 0, 0)])
def test_a_process_with_the_uids_of_several_users_is_no_rank_of_an_account(
    tmp_path: Path, uids: tuple[int, ...]
) -> None:
    paths = GangPaths(tmp_path / "job", tmp_path / "run", "uid", 1)
    paths.account = ANN

    async def watched(process: ProcessId) -> tuple[ProcessId, ...]:
        exits = ExitWatcher(paths, lambda: None)
        exits.watch(0, process)
        found = exits.live()
        exits.close()
        return found

    with process_of(*uids) as strange, process_of(STRANGER, STRANGER, STRANGER) as own:
        named = {"own": own, "strange": strange}

        class Naming:
            uid, pid = STRANGER, os.getpid()

            def list(self) -> list[dict[str, Any]]:
                return [{"name": name, "kind": "rank", **one._asdict()} for name, one in named.items()]

        assert children_of(Naming()).keys() == {"own"}  # type: ignore[arg-type]
        assert asyncio.run(watched(own)) == (own,)
        assert asyncio.run(watched(strange)) == ()
