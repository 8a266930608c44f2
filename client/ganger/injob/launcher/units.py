"""Requests for units of a launcher, and for the restore of process images into them.

What restores an image is the launcher's child, and makes the image's root its sibling: so the root is the launcher's
child too, waited for and recorded like a rank that it has forked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ganger.injob.launcher.child_process import fill_page
from ganger.injob.launcher.namespaces import Unit, pid_outside
from ganger.injob.launcher.process_record import Launch, LaunchError, parse_launch


class RestoredRank(NamedTuple):
    """A rank in a process image. ``pid``: in the unit; 0: it is the image's root."""

    launch: Launch
    pid: int


class RestoreRequest(NamedTuple):
    """A process image to restore: its ranks, the command, files by descriptor for the command to open, and the file in
    which the command writes the root's pid in the unit."""

    ranks: Sequence[RestoredRank]
    command: Sequence[str]
    files: Mapping[int, str]
    pid_file: str

    @property
    def launch(self) -> Launch:
        """The first rank's."""
        return self.ranks[0].launch

    @property
    def is_tree(self) -> bool:
        """Whether its root is the parent of its ranks."""
        return bool(self.ranks[0].pid)

    @classmethod
    def parse(cls, request: Mapping[str, Any]) -> RestoreRequest:
        """Read a request. Raises LaunchError(INVALID_LAUNCH)."""
        ranks = [RestoredRank(parse_launch(one["launch"]), int(one["pid"])) for one in request["ranks"]]
        command, pid_file = request["command"], request["pid_file"]
        files = {int(number): str(path) for number, path in dict(request.get("files") or {}).items()}
        have_units = bool(ranks) and all(rank.launch.init for rank in ranks)
        have_pids = len(ranks) == 1 or all(rank.pid for rank in ranks)
        if not have_units or not have_pids or not command or not all(isinstance(part, str) for part in command):
            raise LaunchError("INVALID_LAUNCH", "a restore needs a unit, a command, and the pids of several ranks")
        return cls(ranks, command, files, str(pid_file))


def parse_unit(content: Mapping[str, Any]) -> tuple[Unit, list[str]]:
    """Return a unit, and the files by which its init enters its cgroups, from the fields of the `Unit` and
    ``cgroup_procs``. Raises LaunchError(INVALID_LAUNCH)."""
    fields = dict(content)
    procs = [str(path) for path in fields.pop("cgroup_procs", ())]
    try:
        return Unit(**fields), procs
    except TypeError as error:
        raise LaunchError("INVALID_LAUNCH", f"a unit has other fields: {error}") from error


def restored_root(request: RestoreRequest) -> int:
    """Return the pid of the root that was just restored, named in its page if it is a rank. Raises
    LaunchError(RESTORE)."""
    try:
        with open(request.pid_file, encoding="ascii") as file:
            inside = int(file.read())
    except (OSError, ValueError) as error:
        raise LaunchError("RESTORE", f"the restored process cannot be found: {error}") from error
    root = _found(request.launch, inside)
    if not request.is_tree and request.launch.page:
        fill_page(request.launch.page, root)
    return root


def restored_ranks(request: RestoreRequest) -> list[tuple[Launch, int]]:
    """Return the ranks below a root that was just restored, and their pids, named in their pages. Raises
    LaunchError(RESTORE)."""
    found = [(launch, _found(launch, inside)) for launch, inside in request.ranks]
    for launch, pid in found:
        if launch.page:
            fill_page(launch.page, pid)
    return found


def _found(launch: Launch, inside: int) -> int:
    try:
        pid = pid_outside(launch.init, inside)
    except OSError as error:
        raise LaunchError("RESTORE", f"the restored process cannot be found: {error}") from error
    if not pid:
        raise LaunchError("RESTORE", "the restored process has ended")
    return pid
