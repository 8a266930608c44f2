"""Ranks with one common parent, so that one image has all of them, and the restore of images into units. The parent
executes a program that does nothing, so it has no memory worth saving, and never waits for its children: they stay
zombies, from which the launcher reads how they ended. A restored root is the launcher's child, too."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Callable, NamedTuple, NoReturn

from ganger.injob.launcher import child_process
from ganger.injob.launcher.child_process import fill_page
from ganger.injob.launcher.namespaces import Unit, pid_outside
from ganger.injob.launcher.process_record import Launch, LaunchError, parse_launch
from ganger.injob.process_identity import START_FIELD, family, stat_fields

_IDLE = "import signal\nwhile True: signal.pause()"
_EXIT_CODE_FIELD = 49  # of `stat_fields`, whose first is the third of /proc/PID/stat


def tree_name(first: str) -> str:
    """Return the launcher's name of the parent of ranks, by the name of the first of them."""
    return f"{first}/root"


class TreeRequest(NamedTuple):
    """Ranks to start below one parent. ``port``: of the rendezvous store, 0 without one."""

    launches: Sequence[Launch]
    port: int

    @classmethod
    def parse(cls, contents: Sequence[Mapping[str, Any]], port: int) -> TreeRequest:
        """Read the ranks' launches; with a store they get its port. Raises LaunchError(INVALID_LAUNCH)."""
        given = {"MASTER_PORT": str(port)} if port else {}
        launches = [parse_launch({**content, "env": {**content["env"], **given}}) for content in contents]
        if not launches:
            raise LaunchError("INVALID_LAUNCH", "a tree has at least one rank")
        return cls(launches, port)

    @property
    def name(self) -> str:
        return tree_name(self.launches[0].name)


class TreeMember(NamedTuple):
    """What runs below the parent: ``start`` becomes it, in a forked child that keeps these ``descriptors``."""

    start: Callable[[], NoReturn]
    descriptors: Sequence[int]


def tree_members(
    wanted: TreeRequest,
    arenas: Sequence[int | None],
    write_ends: Sequence[int],
    may_fork: bool,
    host: str,
    listener: socket.socket | None,
) -> list[TreeMember]:
    """Return the ranks of a tree with their arenas and the pipes for their failures, and their store if there is a
    ``listener`` for it. ``may_fork``: scripts need not be executed."""
    members = [
        TreeMember(
            partial(child_process.start, launch, may_fork, arena, write_end),
            [write_end] if arena is None else [write_end, arena],
        )
        for launch, arena, write_end in zip(wanted.launches, arenas, write_ends)
    ]
    if listener is not None:
        held = listener.dup()
        members.append(TreeMember(partial(child_process.run_store, "", host, held), [held.fileno()]))
    return members


def be_root(
    members: Sequence[TreeMember], ranks: int, enter: Callable[[], None], report: int, foreign: Sequence[int]
) -> NoReturn:
    """Be the parent, in a forked child: start the members, write the pids of the first ``ranks`` of them as JSON into
    ``report``, and idle. ``enter`` takes this process into control groups and identity of the ranks, and may raise
    LaunchError. ``foreign``: descriptors of the launcher."""
    os.setsid()
    for descriptor in foreign:
        os.close(descriptor)
    pids: list[int] = []
    for member in members:
        pid = os.fork()
        if pid == 0:
            others = {one for other in members for one in other.descriptors} | {report}
            for descriptor in others - set(member.descriptors):
                os.close(descriptor)
            member.start()
        pids.append(pid)
    answer: dict[str, Any] = {"pids": pids[:ranks]}
    try:
        enter()
    except LaunchError as error:
        answer = {"reason": error.reason, "message": str(error)}
    os.write(report, json.dumps(answer).encode())
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    os.close(nothing)
    os.chdir("/")
    # It ends by SIGKILL alone, whatever a job sends to its parent. No image can hold a SIGCONT that waits.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - {signal.SIGCONT})
    os.execve(sys.executable, [sys.executable, "-I", "-S", "-c", _IDLE], {})


def read_pids(report: int) -> list[int]:
    """Return what `be_root` has written. Raises LaunchError."""
    try:
        answer = json.loads(os.read(report, 1 << 16))
    except (ValueError, RecursionError):
        raise LaunchError("CHILD_DIED", "the parent of the ranks was killed as it was started") from None
    if "reason" in answer:
        raise LaunchError(answer["reason"], answer["message"])
    return [int(pid) for pid in answer["pids"]]


class RankTree:
    """The parent of some ranks, for the launcher: ``pid``, and the names of the ranks that have not ended."""

    def __init__(self, pid: int, names: Sequence[str]) -> None:
        self.pid = pid
        self._left = set(names)

    def note_end(self, name: str) -> None:
        """A rank's end was read. After the last one, the parent is killed with all that is left below it."""
        self._left.discard(name)
        if not self._left:
            end_family(self.pid)


def end_family(pid: int) -> None:
    for one in family(pid):
        try:
            os.kill(one, signal.SIGKILL)
        except ProcessLookupError:
            pass


def listener_port(listener: socket.socket | None) -> int:
    return 0 if listener is None else int(listener.getsockname()[1])


def zombie_status(pid: int, ticks: int) -> int | None:
    """Return the wait status of a process that has ended and was not waited for; None if there is none. ``ticks``:
    when it started; 0: unknown."""
    fields = stat_fields(pid)
    if len(fields) <= _EXIT_CODE_FIELD or fields[0] not in (b"Z", b"X") or ticks not in (0, int(fields[START_FIELD])):
        return None
    return int(fields[_EXIT_CODE_FIELD])


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
    """Return the pid of the restored root, named in its page if it is a rank. Raises LaunchError(RESTORE)."""
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
    """Return the ranks below a restored root, and their pids, named in their pages. Raises LaunchError(RESTORE)."""
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
