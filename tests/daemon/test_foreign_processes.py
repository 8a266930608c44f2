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
from ganger_daemon.gang.launch_plan import LaunchRefusedError
from ganger_daemon.gang.replay_check import kill_first
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


def test_only_processes_of_the_account_are_killed_first_for_want_of_memory() -> None:
    def score(process: ProcessId) -> str:
        return Path(f"/proc/{process.pid}/oom_score_adj").read_text().strip()

    with process_of(0, 0, 0) as roots, process_of(STRANGER, STRANGER, STRANGER) as own:
        before = score(roots)
        with pytest.raises(LaunchRefusedError, match=f"process {roots.pid} of rank 1 does not run as ann"):
            kill_first({0: own, 1: roots}, ANN)
        assert (score(own), score(roots)) == ("1000", before)
        kill_first({1: roots}, None)
        assert score(roots) == "1000", "jobs run as the daemon's own user"
