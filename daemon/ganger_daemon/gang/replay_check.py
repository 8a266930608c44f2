"""Check of a replay checkpoint, before the ranks that saved it end. Beside each parked rank a second process is started
from its shard. If all arrive at its place, the checkpoint is good; else it is refused, and the ranks continue. The
second processes are killed first if the job's memory is short."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ganger.injob.launcher.client import Launcher, LauncherError
from ganger.injob.page import PageOrder, page_path
from ganger.injob.page_layout import PageOrderKind, PageState
from ganger.injob.process_identity import family
from ganger.text import os_failure

from ganger_daemon.gang.control_pages import ControlPages
from ganger_daemon.gang.gang_context import GangContext, OfGang, summary_of
from ganger_daemon.gang.launch_gate import gate_of, make_log
from ganger_daemon.gang.launch_plan import LaunchRefusedError, check_owner, for_account, free_port
from ganger_daemon.node.accounts import Account
from ganger_daemon.node.daemon_files import GangPaths, read_json, remove_tree, write_json
from ganger_daemon.node.launchers import children_of
from ganger_daemon.node.process_identity import ProcessId, is_alive

_LOOK_S = 0.02
# Longest second run (the script's setup, and the batches that it skips): a move is given as long.
_LONGEST_S = 600.0
# What was killed is gone within milliseconds, but for one that hangs in a driver.
_KILLED_S = 10.0
_LOG_TAIL_BYTES = 4096
_FIRST_TO_BE_KILLED = "1000"


class ReplayCheck(OfGang):
    """The check for one gang's local ranks. `launcher` returns their launcher, if one runs, and may block."""

    def __init__(self, context: GangContext, launcher: Callable[[], Launcher | None]) -> None:
        super().__init__(context)
        self._launcher = launcher
        self._agreement = 0
        self._task: asyncio.Task[str] | None = None
        self._is_given_up = False

    @property
    def is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    async def of(self, agreement: int, step: int, shards: Path) -> str | None:
        """Return why a second run does not arrive at the place of the shards in a directory: empty if it does, None
        while it runs. Begins it at the first call for an agreement."""
        if self._agreement != agreement:
            await self.give_up()
            self._agreement, self._is_given_up = agreement, False
            self._task = asyncio.create_task(self._check(step, shards))
        return self._task.result() if self._task is not None and self._task.done() else None

    async def give_up(self) -> None:
        """End the second processes, also those that a former daemon has started. Idempotent."""
        self._agreement, self._is_given_up = 0, True
        task, self._task = self._task, None
        if task is not None:
            await asyncio.wait((task,))
        elif self._second.run.exists():
            await asyncio.to_thread(self._end)

    async def _check(self, step: int, shards: Path) -> str:
        pages = ControlPages(self._second.run, self._context.pages.epoch, self._context.part.world, self._ranks)
        try:
            await asyncio.to_thread(self._end)
            processes = await asyncio.to_thread(self._start, pages, step, shards)
            return await self._outcome(pages, processes, step)
        except (LaunchRefusedError, LauncherError, OSError) as error:
            return f"REPLAY_REFUSED: the script cannot be started beside the ranks that are to end: {os_failure(error)}"
        finally:
            pages.close()
            await asyncio.to_thread(self._end)
            self._context.wake()

    def _start(self, pages: ControlPages, step: int, shards: Path) -> dict[int, ProcessId]:
        launcher = self._launcher()
        if launcher is None:
            raise OSError("its launcher is gone")
        second, account = self._second, self._paths.account
        second.make_for(account)
        mappings = [self._mapping(rank, step, shards) for rank in self._ranks]
        pages.create(
            {rank: int(one["threads"]) for rank, one in zip(self._ranks, mappings, strict=True)}, account=account
        )
        pages.write_order(PageOrder(1, PageOrderKind.WAIT, 0, 0, 0))
        groups = self._host.cgroups.join_files(self._group)
        with gate_of(second, groups, mappings):
            found = dict(zip(self._ranks, launcher.fork_all(mappings), strict=True))
        kill_first(found, account)
        return found

    def _mapping(self, rank: int, step: int, shards: Path) -> dict[str, Any]:
        """Return the launcher's request: that of the rank itself, with files of its own."""
        second, log = self._second, self._log(rank)
        restore = second.restore(rank)
        fields = {"kind": "checkpoint", "path": str(shards), "step": step, "size": 0, "rank": rank}
        write_json(restore, fields, mode=second.read_mode)
        former = read_json(self._paths.launch(rank))
        page = page_path(str(second.run), rank)
        own = {
            "GANGER_SOCKET": "",
            "GANGER_PAGE": page,
            "GANGER_JOB_DIR": str(second.work),
            "GANGER_RESTORE": str(restore),
        }
        environment = {**former["env"], **own, **_rendezvous(former["env"], self._agreement)}
        if second.account is not None:
            environment["GANGER_ORDERS"] = str(second.orders)
            make_log(log, second.account)
            former |= for_account(second)
        return {
            **former,
            "name": self._name(rank),
            "env": environment,
            "page": page,
            "log": str(log),
            "exit_path": str(second.exit(rank)),
            "freezer": "",
            "arena": None,
            "touched_bytes": 0,
        }

    async def _outcome(self, pages: ControlPages, processes: Mapping[int, ProcessId], step: int) -> str:
        begun = time.monotonic()
        while not self._is_given_up:
            if not pages.readable:
                return f"REPLAY_REFUSED: {pages.damage()}"
            found = {rank: pages.progress(rank) for rank in processes}
            if all(progress.state == PageState.READY for progress in found.values()):
                steps = {progress.reached_step for progress in found.values()}
                return "" if steps == {step} else f"{_DEVIATED.format(step)}: it came to {sorted(steps)} instead"
            for rank, process in processes.items():
                if not is_alive(process):
                    return f"{_DEVIATED.format(step)}: rank {rank}: {await asyncio.to_thread(self._cause, rank)}"
            if time.monotonic() - begun > _LONGEST_S:
                return f"REPLAY_REFUSED: run again, the script was not at step {step} within {_LONGEST_S:.0f} s"
            await asyncio.sleep(_LOOK_S)
        return "REPLAY_REFUSED: given up"

    def _cause(self, rank: int) -> str:
        """Return why a second process has ended, in one line: as its agent reports, else by its exit and its log."""
        if message := read_json(self._second.error(rank)).get("message"):
            return summary_of(str(message))
        deadline = time.monotonic() + 1.0
        while not (ending := read_json(self._second.exit(rank))) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        number = ending.get("signal")
        if number == signal.SIGKILL:
            return "it was killed; the memory of the job may not do for a second process"
        how = f"was ended by signal {number}" if number else f"exited with code {ending.get('code', 'unknown')}"
        with suppress(OSError), self._log(rank).open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _LOG_TAIL_BYTES))
            return f"it {how}: {summary_of(log.read().decode(errors='replace'))}"
        return f"it {how}"

    def _end(self) -> None:
        launcher = self._launcher()
        names = {self._name(rank) for rank in self._ranks}
        children = children_of(launcher) if launcher is not None else {}
        left = [child.process for name, child in children.items() if name in names and is_alive(child.process)]
        for process in left:
            for pid in family(process.pid):
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + _KILLED_S
        while any(map(is_alive, left)) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        for path in (self._second.run, self._second.work):
            remove_tree(path)

    @property
    def _second(self) -> GangPaths:
        return self._paths.second("replay-check")

    def _name(self, rank: int) -> str:
        return f"{self._paths.name(rank)}/replay-check"

    def _log(self, rank: int) -> Path:
        return self._second.run / f"rank-{rank}.log"


def kill_first(processes: Mapping[int, ProcessId], account: Account | None) -> None:
    """Have the kernel kill these processes, by rank, before others when memory is short. Raises LaunchRefusedError for
    one that does not run as the account whose launcher has named it."""
    for rank, process in processes.items():
        with suppress(OSError), Path(f"/proc/{process.pid}/oom_score_adj").open("w") as score:
            # Checked once it is open: the file is of this process, and of no later one of its pid.
            check_owner({rank: process}, account)
            score.write(_FIRST_TO_BE_KILLED)


_DEVIATED = "STATE_UNSAVEABLE: run again, the script did not come back to step {}"


def _rendezvous(environment: Mapping[str, str], agreement: int) -> dict[str, str]:
    """Return the variables by which second processes meet each other, and not the ranks: in the same store under names
    of their own, or at another port where rank 0 opens the store."""
    if "TORCHELASTIC_USE_AGENT_STORE" in environment:
        return {"GANGER_RENDEZVOUS": f"replay-check-{agreement}"}
    host = environment.get("MASTER_ADDR", "")
    return {"MASTER_PORT": str(free_port(host))} if host else {}
