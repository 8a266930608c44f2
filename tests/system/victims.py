"""Victims of kills that the tests do not start themselves: ranks and launchers."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from ganger.injob.launcher.client import Launcher, LauncherError
from ganger.injob.page import Page
from ganger.injob.page_access import PageError
from ganger.injob.process_identity import start_ticks
from ganger_daemon.checkpoints.storage import checkpoints_directory, complete
from kit.cluster import Cluster


@dataclass(frozen=True)
class Process:
    """`what` it is called in stories; `uid`: of whose job it is, if of one."""

    what: str
    pid: int
    start_ticks: int
    uid: str = ""

    def kill(self) -> bool:
        """Whether it was there to be killed: another process that has its number now is left alone."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            if start_ticks(self.pid) != self.start_ticks:
                return False
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        except ProcessLookupError:
            return False
        finally:
            os.close(handle)
        return True


def ranks(cluster: Cluster) -> list[Process]:
    """All that were ever started on nodes that have their pages still; many have ended."""
    found = []
    for path in cluster.run_directory.glob("*/*/*/rank-*.page"):
        try:
            page = Page.open(str(path), writable=False)
        except (FileNotFoundError, PageError):
            continue  # it is being made, or taken away
        identity = page.identity()
        page.close()
        if identity.pid and start_ticks(identity.pid) == identity.start_ticks:
            node, uid, epoch, rank = path.parts[-4:]
            what = f"{rank.removesuffix('.page')} of attempt {epoch} on {node}"
            found.append(Process(what, identity.pid, identity.start_ticks, uid))
    return sorted(found, key=lambda one: one.pid)


def launchers(cluster: Cluster) -> list[Process]:
    found = []
    for path in sorted(cluster.run_directory.glob("*/launchers/*.sock")):
        try:
            with Launcher(str(path)) as launcher:
                said = launcher.info()
        except LauncherError:
            continue
        found.append(Process(f"launcher of {path.parts[-3]}", int(said["pid"]), int(said["start_ticks"])))
    return found


def newest_checkpoint(cluster: Cluster, uid: str) -> int:
    """Step of the newest complete one; zero if there is none."""
    return max((name.step for name in complete(checkpoints_directory(cluster.storage, uid))), default=0)
