"""The launcher of one gang's local ranks, which started them or has taken them over, and their arenas."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ganger.injob.launcher.client import Launcher, LauncherError
from ganger.injob.page import page_path

from ganger_daemon.gang.exit_watcher import ExitWatcher
from ganger_daemon.gang.gang_context import GangContext
from ganger_daemon.gang.launch_plan import arena_name, image_arena_name
from ganger_daemon.node.daemon_files import read_json
from ganger_daemon.node.launchers import children_of, interpreter_of
from ganger_daemon.node.node_context import NodeContext
from ganger_daemon.node.process_identity import is_alive

# The launcher's reason where it has no arena of a name.
_NO_ARENA = "NO_ARENA"


class GangLauncher:
    """`key`: of the launcher, empty before the launch; `arena_bytes`: size of each rank's arena; `image_arena_bytes`:
    of the arena for the image of a process, which is made only when one is moved."""

    def __init__(self, context: GangContext, exits: ExitWatcher) -> None:
        self._host = context.host
        self._paths = context.paths
        self._part = context.part
        self._exits = exits
        self.key = ""
        self.arena_bytes = 0
        self.image_arena_bytes = 0

    def recall(self, left: Mapping[str, Any]) -> None:
        self.key = str(left.get("launcher", ""))
        self.arena_bytes = int(left.get("arena_bytes", 0))
        self.image_arena_bytes = int(left.get("image_arena_bytes", 0))

    def journal(self) -> dict[str, Any]:
        sizes = {"arena_bytes": self.arena_bytes, "image_arena_bytes": self.image_arena_bytes}
        return {"launcher": self.key, **sizes}

    def running(self) -> Launcher | None:
        """Blocks for a moment. None when it is not there now."""
        return self._host.launchers.running(self.key) if self.key else None

    def lives(self) -> bool:
        return self.running() is not None

    def open_arena(self, rank: int) -> int:
        """A descriptor of a rank's arena, the caller's to close. Raises OSError when no launcher has it."""
        launcher = self.running() or self.adopt_anew()
        name = arena_name(self._paths, rank)
        try:
            try:
                return launcher.arena(name)
            except LauncherError:
                # a launcher that other gangs had started in place of a dead one does not have these ranks yet
                self.adopt_all(launcher)
                return launcher.arena(name)
        except LauncherError as error:
            raise OSError(str(error)) from error

    def open_image_arena(self, rank: int, *, is_made: bool = True) -> int:
        """A descriptor of the arena for a rank's process image; `is_made`: made if there is none. Raises OSError."""
        launcher = self.running() or self.adopt_anew()
        try:
            return launcher.arena(image_arena_name(self._paths, rank), self.image_arena_bytes if is_made else 0)
        except LauncherError as error:
            why = "its image is gone with the launcher that held it" if error.reason == _NO_ARENA else str(error)
            raise OSError(why) from error

    def drop_arenas(self) -> None:
        """Release the arenas of ended ranks. Blocks."""
        launcher = self.running()
        if launcher is None:
            return
        with suppress(LauncherError):
            for rank in self._part.ranks:
                launcher.drop_arena(arena_name(self._paths, rank))
                launcher.drop_arena(image_arena_name(self._paths, rank))

    def adopt_anew(self) -> Launcher:
        """The launcher died: a new one takes over its ranks, and finds their arenas by their descriptors."""
        fields = read_json(self._paths.launch(self._part.ranks[0]))
        environment = {str(name): str(value) for name, value in fields.get("env", {}).items()}
        interpreter = interpreter_of(tuple(fields.get("argv", ["python"])), environment, str(fields.get("cwd", "/")))
        try:
            launcher = self._host.launchers.get(self.key, interpreter, _without_injection(environment, self._host))
        except LauncherError as error:
            raise OSError(str(error)) from error
        self.adopt_all(launcher)
        return launcher

    def adopt_all(self, launcher: Launcher) -> None:
        """Register the live ranks with a launcher that does not have them. Blocks."""
        known = children_of(launcher)
        for rank, process in self._exits.processes.items():
            name = self._paths.name(rank)
            if name in known or not is_alive(process):
                continue
            launcher.adopt(
                name,
                process.pid,
                process.start_ticks,
                page=page_path(str(self._paths.run), rank),
                exit_path=str(self._paths.exit(rank)),
                arena_name=name,
                freezer=self._host.cgroups.freezer_file(self._paths.group),
                cgroup_procs=self._host.cgroups.join_files(self._paths.group),
            )

    def revive(self) -> None:
        """Blocks. Ranks live and their launcher does not: start one, so that their exits are recorded."""
        if self.key and self.running() is None:
            self.adopt_anew()


def _without_injection(environment: Mapping[str, str], host: NodeContext) -> dict[str, str]:
    """The environment a launcher of these ranks had: what was added per rank is taken off again."""
    base = {name: value for name, value in environment.items() if not name.startswith("GANGER_")}
    parts = [part for part in base.get("PYTHONPATH", "").split(os.pathsep) if part and part != host.launchers.inject]
    if parts:
        base["PYTHONPATH"] = os.pathsep.join(parts)
    else:
        base.pop("PYTHONPATH", None)
    return base
