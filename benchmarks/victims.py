"""Victims of kills that a storm does not start itself: ranks and launchers.

`run`: the directory that has the run directories of all nodes; `storage`: what all nodes see."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from ganger.injob.launcher.client import Launcher, LauncherError
from ganger.injob.page import Page
from ganger.injob.page_access import PageError
from ganger.injob.process_identity import start_ticks
from ganger_daemon.checkpoints.storage import checkpoints_directory, complete


@dataclass(frozen=True)
class Victim:
    """A process to kill. `what`: its name in stories; `uid`: of its job, if it belongs to one."""

    what: str
    pid: int
    start_ticks: int
    uid: str = ""

    def kill(self) -> bool:
        return self.signal(signal.SIGKILL)

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal; return whether the process was there. Another process with its process id gets none."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            if start_ticks(self.pid) != self.start_ticks:
                return False
            signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(handle)
        return True


def ranks(run: Path) -> list[Victim]:
    """Return the live ranks of all jobs, by process id."""
    found = []
    for path in run.glob("*/*/*/rank-*.page"):
        try:
            page = Page.open(str(path), writable=False)
        except (FileNotFoundError, PageError):
            continue  # it is being made, or taken away
        identity = page.identity()
        page.close()
        if identity.pid and start_ticks(identity.pid) == identity.start_ticks:
            node, uid, epoch, rank = path.parts[-4:]
            what = f"{rank.removesuffix('.page')} of attempt {epoch} on {node}"
            found.append(Victim(what, identity.pid, identity.start_ticks, uid))
    return sorted(found, key=lambda one: one.pid)


def launchers(run: Path) -> list[Victim]:
    """Return the launchers that listen, also while they are too busy to answer."""
    found = []
    for path in sorted(run.glob("*/launchers/*.sock")):
        try:
            with Launcher(str(path)) as launcher:
                pid = launcher.pid
        except LauncherError:
            continue
        if ticks := start_ticks(pid):
            found.append(Victim(f"launcher of {path.parts[-3]}", pid, ticks))
    return found


def of_jobs(run: Path) -> set[int]:
    """Return the process ids of the launchers' children that belong to a job: ranks and rendezvous stores."""
    found: set[int] = set()
    for path in run.glob("*/launchers/*.sock"):
        try:
            with Launcher(str(path)) as launcher:
                found |= {int(child["pid"]) for child in launcher.list() if child["kind"] != "helper"}
        except LauncherError:
            continue
    return found


def newest_checkpoint(storage: Path, uid: str) -> int:
    """Return the step of the newest complete checkpoint of a job; zero if there is none."""
    return max((name.step for name in complete(checkpoints_directory(storage, uid))), default=0)
