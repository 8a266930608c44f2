"""The unit of one gang's restored processes: its init, the names in it, and the restore of an image into it."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ganger.failpoints import hit
from ganger.injob.launcher.client import Forked, Launcher, LauncherError
from ganger.injob.launcher.namespaces import Unit

from ganger_daemon.devices.contract import VIRTUAL_DRIVER
from ganger_daemon.gang.gang_context import GangContext
from ganger_daemon.gang.job_names import JobNames
from ganger_daemon.images.contract import PID_FILE, ImageFacts, ImageRefusedError
from ganger_daemon.images.criu import PORT_IN_USE
from ganger_daemon.node.daemon_files import make_directory
from ganger_daemon.node.process_identity import ENDING_S, NO_PROCESS, ProcessId, end

log = logging.getLogger(__name__)

_PAGE_ENDING = ".page"
# From here on are the descriptors at which the program that restores an image finds new pages and logs.
_FIRST_DESCRIPTOR = 96

Mappings = Mapping[int, Mapping[str, Any]]


class GangUnit:
    """`init`: of the unit; NO_PROCESS while the processes have none; `names`: by which they find their files, in a unit
    or outside."""

    def __init__(self, context: GangContext) -> None:
        self._context = context
        self._host = context.host
        self._paths = context.paths
        self.init = NO_PROCESS
        self.names = JobNames(context.paths, context.host.paths.temporary)

    def recall(self, fields: Mapping[str, Any]) -> None:
        """Take over what a former daemon noted."""
        self.init = ProcessId(*map(int, fields.get("init", (0, 0))))
        self.names.directory, self.names.shared = str(fields.get("names", "")), dict(fields.get("shared", {}))

    def journal(self) -> dict[str, Any]:
        return {
            "names": self.names.directory,
            "shared": self.names.shared,
            "init": [self.init.pid, self.init.start_ticks],
        }

    def clean(self) -> None:
        """End the unit with all in it, and remove the names and temporary files of its gang. Blocks."""
        self._end()
        self.names.remove()

    def restore(
        self,
        launcher: Launcher,
        mappings: Mappings,
        directory: Path,
        facts: ImageFacts,
        procs: Sequence[str],
        *,
        is_moved: bool,
        is_stopped: bool,
    ) -> dict[int, Forked]:
        """Restore the ranks from the image in a directory into a new unit. Blocks.

        `mappings`: their launches in the present epoch; `procs`: the files by which the unit enters its cgroups;
        `is_moved`: no file was written to since the image was taken; `is_stopped`: they stand still until SIGCONT.
        Raises LauncherError, OSError, ImageRefusedError."""
        pids = {one.rank: one.pid for one in facts.ranks} or {min(mappings): 0}
        if pids.keys() != mappings.keys():
            raise ImageRefusedError(f"it is of the ranks {sorted(pids)}, and not of {sorted(mappings)}")
        has_network = False
        while True:
            self._make(launcher, procs, has_network)
            launches = [({**mapping, "init": self.init.pid}, pids[rank]) for rank, mapping in mappings.items()]
            try:
                found = self._restore(launcher, launches, directory, self._replaced(mappings, facts), is_stopped)
            except ImageRefusedError as error:
                # Virtual nodes share a machine, and so its ports.
                is_shared = PORT_IN_USE in str(error) and self._host.inventory.driver == VIRTUAL_DRIVER
                if is_shared and not has_network:
                    has_network = True
                elif is_moved or not cut_back(facts, str(error)):
                    raise
            else:
                hit("image-restored")
                return dict(zip(mappings, found, strict=True))

    def _end(self) -> None:
        if not end(self.init, ENDING_S):
            log.warning("unit not ended", extra={"group": self._paths.group, "pid": self.init.pid})

    def _make(self, launcher: Launcher, procs: Sequence[str], has_network: bool) -> None:
        self._end()
        names = self.names
        make_directory(names.files)
        unit = Unit(self._paths.group, names.directory, names.links, [(str(names.files), names.temporary)], has_network)
        made = launcher.make_unit({**unit._asdict(), "cgroup_procs": list(procs)})
        self.init = ProcessId(made.pid, made.start_ticks)
        self._context.write_notes()

    def _restore(
        self,
        launcher: Launcher,
        launches: Sequence[tuple[Mapping[str, Any], int]],
        directory: Path,
        replaced: Mapping[str, str],
        is_stopped: bool,
    ) -> Sequence[Forked]:
        images = self._host.images
        images.fill(self.init.pid, directory)
        numbers = dict(zip(replaced, itertools.count(_FIRST_DESCRIPTOR), strict=False))
        command = images.restore_arguments(directory, numbers, is_stopped=is_stopped)
        opened = {number: replaced[path] for path, number in numbers.items()}
        try:
            return launcher.restore(launches, command, opened, str(directory / PID_FILE)).ranks
        except LauncherError as error:
            why = images.restore_failure(directory) if error.reason == "RESTORE" else ""
            raise ImageRefusedError(why or str(error)) from error

    def _replaced(self, mappings: Mappings, facts: ImageFacts) -> dict[str, str]:
        """Return the files of the present epoch that the processes get in place of those in their image."""
        first = str(mappings[min(mappings)]["log"])
        logs = {path: str(mappings[one.rank]["log"]) for one in facts.ranks for path in one.logs}
        files = {log.path: logs.get(log.path, first) for log in facts.logs}
        pages = [Path(file.path) for file in facts.files if file.path.endswith(_PAGE_ENDING)]
        return files | {str(path): str(self._paths.run / path.name) for path in pages}


def cut_back(facts: ImageFacts, why: str) -> bool:
    """Cut the file for which a restore failed back to its size in the image; return whether there was one.

    The job has written on after an image was taken that it did not end with; what it wrote, it writes again. CRIU
    demands the same size of files that are written at a position, and not of those that are appended to, which others
    may append to. `why`: the failure, which names the file first."""
    for file in facts.files:
        if file.is_written and why.startswith(f"{file.path} has ") and Path(file.path).stat().st_size > file.size_bytes:
            log.info("file cut back to its size in a process image", extra={"path": file.path})
            os.truncate(file.path, file.size_bytes)
            return True
    return False
