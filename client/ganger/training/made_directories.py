"""Directories that a script looks for before it makes them, such as its output directory.

A script that is run again must not find them, although they are there by then. The first run marks such a directory by
an extended attribute with the number of its job. While a script is run again, a marked directory of its job and all in
it is not there, until the script makes it. The attribute travels with the directory to every node that sees it. On a
file system without such attributes a directory is not marked.

A start of the job that restores nothing may find what an earlier one made: it takes the mark away, for its own second
run is to find that, too.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

ATTRIBUTE = "user.ganger.made_by"


class NotThereError(FileNotFoundError):
    """What the script looks for was not there in its first run."""


class MadeDirectories:
    """Of one process. Paths are absolute."""

    def __init__(self) -> None:
        self._job = os.environ.get("GANGER_JOB_ID", "")
        self._attempt = os.environ.get("GANGER_ATTEMPT", "1")
        self._has_others = os.environ.get("WORLD_SIZE", "1") != "1"
        self._shown: set[str] = set()
        # The attempt of this job that has made a directory; "" for none.
        self._makers: dict[str, str] = {}

    def mark(self, path: str) -> bool:
        """Mark a directory that was looked for before; False where that cannot be."""
        if not self._job:
            return False
        try:
            os.setxattr(path, ATTRIBUTE, f"{self._job} {self._attempt}".encode())
        except OSError:
            return False
        return True

    def show(self, path: str) -> bool:
        """The script makes this directory, which is there from now on. Return whether it was marked before."""
        is_first = path not in self._shown
        self._shown.add(path)
        return is_first and bool(self._maker_of(path))

    def hide(self, path: str) -> None:
        """Raise NotThereError for a path that the first run did not find."""
        for directory in _upwards(path):
            if directory in self._shown:
                return
            if self._maker_of(directory):
                raise NotThereError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def made_before(self, path: str, own: set[str]) -> str:
        """Return the directory of `path` that another rank of this attempt has made; "" for none. Directories that this
        process has made are in `own`; the marks of earlier attempts are taken away."""
        if not self._job:
            return ""
        for directory in _upwards(path):
            if directory in own:
                return ""
            maker = self._maker_of(directory)
            if maker == self._attempt and self._has_others:
                return directory
            if maker:
                self._makers[directory] = ""
                try:
                    os.removexattr(directory, ATTRIBUTE)
                except OSError:
                    continue
        return ""

    def _maker_of(self, directory: str) -> str:
        maker = self._makers.get(directory)
        if maker is None:
            try:
                job, _, attempt = os.getxattr(directory, ATTRIBUTE).decode(errors="replace").partition(" ")
            except OSError:
                return ""
            maker = self._makers[directory] = attempt if job == self._job else ""
        return maker


def _upwards(path: str) -> Iterator[str]:
    """Yield the path and the directories that it is in, up to the root."""
    while True:
        yield path
        above = os.path.dirname(path)
        if above == path:
            return
        path = above
