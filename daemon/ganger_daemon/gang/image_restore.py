"""The restore of one process image: its ranks, and the files of the present epoch that replace those in it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ganger.injob.launcher.client import Forked, Launcher, LauncherError

from ganger_daemon.images.contract import PID_FILE, ImageFacts, ImageRefusedError, ProcessImages

_PAGE_ENDING = ".page"
# From here on are the descriptors at which the program that restores an image finds new pages and logs.
_FIRST_DESCRIPTOR = 96


class ImageRestore(NamedTuple):
    """The image in a directory, with its facts. `mappings`: the launches of its ranks in the present epoch; `run`: the
    directory of their pages."""

    images: ProcessImages
    launcher: Launcher
    mappings: Mapping[int, Mapping[str, Any]]
    directory: Path
    facts: ImageFacts
    run: Path

    def into(self, init_pid: int, *, is_stopped: bool) -> dict[int, Forked]:
        """Restore the ranks into a new unit with this init, stopped or not. Blocks. Raises LauncherError, OSError,
        ImageRefusedError."""
        self.images.fill(init_pid, self.directory)
        pids = {one.rank: one.pid for one in self.facts.ranks} or {min(self.mappings): 0}
        if pids.keys() != self.mappings.keys():
            raise ImageRefusedError(f"it is of the ranks {sorted(pids)}, and not of {sorted(self.mappings)}")
        replaced = self._replaced()
        numbers = dict(zip(replaced, itertools.count(_FIRST_DESCRIPTOR), strict=False))
        command = self.images.restore_arguments(self.directory, numbers, is_stopped=is_stopped)
        opened = {number: replaced[path] for path, number in numbers.items()}
        ranks = [({**mapping, "init": init_pid}, pids[rank]) for rank, mapping in self.mappings.items()]
        try:
            restored = self.launcher.restore(ranks, command, opened, str(self.directory / PID_FILE))
            return dict(zip(self.mappings, restored.ranks, strict=True))
        except LauncherError as error:
            why = self.images.restore_failure(self.directory) if error.reason == "RESTORE" else ""
            raise ImageRefusedError(why or str(error)) from error

    def _replaced(self) -> dict[str, str]:
        """Return the files that the processes get in place of those in their image."""
        first = str(self.mappings[min(self.mappings)]["log"])
        logs = {path: str(self.mappings[one.rank]["log"]) for one in self.facts.ranks for path in one.logs}
        files = {log.path: logs.get(log.path, first) for log in self.facts.logs}
        pages = [Path(file.path) for file in self.facts.files if file.path.endswith(_PAGE_ENDING)]
        return files | {str(path): str(self.run / path.name) for path in pages}
