"""Identity of processes. A job may have written the file that names a process, so a name counts only if the kernel
confirms it: the process is in the gang's cgroup, or a launcher's child that it reports as this rank, or has this rank's
log as its output, or maps its page. So no process of another job is ever signalled."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from ganger.injob.process_identity import ProcessId as ProcessId
from ganger.injob.process_identity import start_ticks, stat_fields, user_of

NO_PROCESS = ProcessId(0, 0)
# What was killed is gone within milliseconds, but for one that hangs in a driver.
ENDING_S = 5.0


def is_alive(process: ProcessId) -> bool:
    return process.pid > 0 and process.start_ticks > 0 and start_ticks(process.pid) == process.start_ticks


def has_other_user(pid: int, uid: int) -> bool:
    """Return whether a process runs as another user than this, or also as another. One that is gone does not; its pid
    may be another process's later, so ask again where that counts."""
    return user_of(pid) not in (None, uid)


def send_signal(process: ProcessId, number: signal.Signals) -> bool:
    """Signals exactly this process, never a later one of the same pid; False when it is gone."""
    try:
        fd = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        if not is_alive(process):
            return False
        signal.pidfd_send_signal(fd, number)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def end(process: ProcessId, within_s: float) -> bool:
    """Send SIGKILL to exactly this process, and wait until it is gone: the init of a PID namespace with all in it.
    Blocks. Return whether it is gone; one that hangs in a driver may not be for long."""
    try:
        fd = os.pidfd_open(process.pid)
    except OSError:
        return not is_alive(process)
    try:
        if not is_alive(process):
            return True
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        watched = select.poll()
        watched.register(fd, select.POLLIN)
        return bool(watched.poll(within_s * 1000.0))
    except OSError:
        return not is_alive(process)
    finally:
        os.close(fd)


def anonymous_bytes(pid: int) -> int | None:
    """Anonymous resident memory of a process; None when it is gone."""
    try:
        for line in Path(f"/proc/{pid}/status").read_bytes().splitlines():
            if line.startswith(b"RssAnon:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


@dataclass(frozen=True, slots=True)
class RankProcess:
    """Process of a rank as its launcher reports it. `is_own`: the kernel names the launcher as its parent, or
    a child of the launcher that is the parent of several ranks."""

    process: ProcessId
    is_own: bool


@dataclass(frozen=True, slots=True)
class FoundProcesses:
    """A rank's process, alive or not, or NO_PROCESS. `stranger`: a live process that only a file names."""

    process: ProcessId
    stranger: ProcessId | None = None

    @property
    def is_lost(self) -> bool:
        """Whether only a stranger is known, and no process of the rank."""
        return self.stranger is not None and not self.process.pid


def recognise(
    child: RankProcess | None, noted: Collection[ProcessId], belongs: Callable[[ProcessId], bool]
) -> FoundProcesses:
    """Return a rank's process: its launcher's child, else the first of `noted` that `belongs` confirms.

    `noted`: processes that files name, the most credible first. A dead one needs no proof: it receives no signal."""
    adopted = [child.process] if child is not None and not child.is_own else []
    named = [process for process in (*adopted, *noted) if process.pid > 0]
    strangers = [process for process in named if is_alive(process) and not belongs(process)]
    proved = [process for process in named if process not in strangers]
    if child is not None and child.is_own:
        proved.insert(0, child.process)
    return FoundProcesses(proved[0] if proved else NO_PROCESS, strangers[0] if strangers else None)


def strays(page_paths: Collection[Path], inject: str, page_names: Collection[Path] = ()) -> frozenset[int]:
    """Pids of processes that came from a gang's ranks and left their sessions and parents: by the environment they were
    started with, which is the rank's; or the launcher's (it has `inject`), and then they still map a control page.
    Looks at every process that may be looked at.

    `page_names`: other names of the pages, which a process keeps that was restored in a unit, as another gang's."""
    names = [b"GANGER_PAGE=" + bytes(path) for path in page_paths]
    shared_names = [b"GANGER_PAGE=" + bytes(path) for path in page_names]
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue
        variables, pid = environment.split(b"\0"), int(entry.name)
        is_forked = os.fsencode(inject) in environment and any(_maps(pid, path) for path in page_paths)
        is_named = any(name in variables for name in shared_names) and not _is_in_unit(pid)
        if is_forked or is_named or any(name in variables for name in names):
            found.add(pid)
    return frozenset(found)


def _is_in_unit(pid: int) -> bool:
    """Return whether a process has another PID namespace than this one."""
    try:
        return not Path(f"/proc/{pid}/ns/pid").samefile("/proc/self/ns/pid")
    except OSError:
        return False


def stranger_text(rank: int, found: FoundProcesses) -> str:
    pid = found.stranger.pid if found.stranger is not None else 0
    return f"the files of rank {rank} name process {pid}, which is none of this gang: it is left alone"


def parent_of(pid: int) -> int:
    """Return the pid of a process's parent; 0 when there is no such process."""
    fields = stat_fields(pid)
    return int(fields[1]) if fields else 0


def holds_files_of_rank(pid: int, log: Path, page: Path) -> bool:
    """Return whether a process writes its output to this log, or maps this control page. False if unseen."""
    if any(_are_one(Path(f"/proc/{pid}/fd/{output}"), log) for output in (1, 2)):
        return True
    return _maps(pid, page)


def _maps(pid: int, file: Path) -> bool:
    try:
        maps = Path(f"/proc/{pid}/maps").read_bytes()
    except OSError:
        return False
    # Mapped for writing: a process that only reads a page is no rank.
    ends = (b" " + bytes(file), b" " + bytes(file) + b" (deleted)")
    return any(b" rw-s " in line and line.endswith(ends) for line in maps.splitlines())


def _are_one(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:
        return False
