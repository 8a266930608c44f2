"""The unit of one gang's restored processes, and the names by which the job's processes find their page, socket and
temporary files wherever they are restored. The names are in `LINKS`, which all daemons of a machine share; each daemon
that starts removes those of dead ones, too."""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ganger.failpoints import hit
from ganger.injob.launcher.client import ForkedTree, Launcher, LauncherError
from ganger.injob.launcher.namespaces import LINKS, TEMPORARY, Unit, bind, give_places, make_links, unbind
from ganger.injob.process_identity import family
from ganger.text import os_failure

from ganger_daemon.devices.inventory import VIRTUAL_DRIVER
from ganger_daemon.gang.gang_context import GangContext, OfGang
from ganger_daemon.images.contract import PID_FILE, ImageFacts, ImageRefusedError
from ganger_daemon.images.criu import PORT_IN_USE
from ganger_daemon.images.process_tree import foreign_process, mounts_of
from ganger_daemon.node.accounts import give_directory, seen_by
from ganger_daemon.node.daemon_files import LOCK, GangPaths, make_directory, remove_tree
from ganger_daemon.node.process_identity import ENDING_S, NO_PROCESS, ProcessId, end

log = logging.getLogger(__name__)

_PAGE_ENDING = ".page"
# From here on are the descriptors at which the program that restores an image finds new pages and logs.
_FIRST_DESCRIPTOR = 96

Mappings = Mapping[int, Mapping[str, Any]]


class GangUnit(OfGang):
    """Unit of one gang. `init`: its first process; NO_PROCESS while the processes have no unit; `names`: names by which
    they find their files, in a unit or outside."""

    def __init__(self, context: GangContext) -> None:
        super().__init__(context)
        self.init = NO_PROCESS
        self.names = JobNames(context.paths, context.host.paths.temporary)

    def recall(self, fields: Mapping[str, Any]) -> None:
        """Take over what a former daemon noted."""
        self.init = ProcessId(*map(int, fields.get("init", (0, 0))))
        self.names.directory, self.names.shared = str(fields.get("names", "")), dict(fields.get("shared", {}))

    def journal(self) -> dict[str, Any]:
        return {"names": self.names.directory, "shared": self.names.shared, "init": list(self.init)}

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
    ) -> dict[int, ProcessId]:
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
                self._check(found, is_stopped)
            except ImageRefusedError as error:
                # Virtual nodes share a machine, and so its ports.
                is_shared = PORT_IN_USE in str(error) and self._host.inventory.driver == VIRTUAL_DRIVER
                if is_shared and not has_network:
                    has_network = True
                elif is_moved or not seen_by(self._paths.account, partial(cut_back, facts, str(error))):
                    raise
            else:
                hit("image-restored")
                return dict(zip(mappings, found.ranks, strict=True))

    def _check(self, found: ForkedTree, is_stopped: bool) -> None:
        """Let processes of an account run, which were restored stopped, unless they are to wait. Raises
        ImageRefusedError for one that has more than the account's rights, and ends them all."""
        account = self._paths.account
        if account is None:
            return
        if why := foreign_process(found.root.pid, account):
            self._end()
            raise ImageRefusedError(f"{why}, once it was restored")
        for pid in () if is_stopped else family(found.root.pid):
            with suppress(OSError):
                os.kill(pid, signal.SIGCONT)

    def _end(self) -> None:
        if not end(self.init, ENDING_S):
            log.warning("unit not ended", extra={"group": self._paths.group, "pid": self.init.pid})

    def _make(self, launcher: Launcher, procs: Sequence[str], has_network: bool) -> None:
        self._end()
        names = self.names
        names.make_files()
        places = [names.temporary, *([TEMPORARY] if self._paths.has_places else [])]
        binds = [(str(names.files), place) for place in places]
        unit = Unit(self._paths.group, names.directory, names.links, binds, has_network)
        self.init = launcher.make_unit({**unit._asdict(), "cgroup_procs": list(procs)})
        self._context.write_notes()

    def _restore(
        self,
        launcher: Launcher,
        launches: Sequence[tuple[Mapping[str, Any], int]],
        directory: Path,
        replaced: Mapping[str, str],
        is_stopped: bool,
    ) -> ForkedTree:
        images, account = self._host.images, self._paths.account
        images.fill(self.init.pid, directory, account)
        numbers = dict(zip(replaced, itertools.count(_FIRST_DESCRIPTOR), strict=False))
        stands_still = is_stopped or account is not None
        command = images.restore_arguments(directory, numbers, is_stopped=stands_still, account=account)
        opened = {number: replaced[path] for path, number in numbers.items()}
        try:
            return launcher.restore(launches, command, opened, str(directory / PID_FILE))
        except LauncherError as error:
            why = images.restore_failure(directory) if error.reason == "RESTORE" else ""
            raise ImageRefusedError(why or str(error)) from error

    def _replaced(self, mappings: Mappings, facts: ImageFacts) -> dict[str, str]:
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


# Files in shared memory that multiprocessing and PyTorch make: no other job has been given their names.
_OF_LIBRARIES = ("sem.mp-", "torch_")


class JobNames:
    """Names of one gang. `directory`: that of the names which its processes know, of their first epoch; empty without
    any. `files`: the directory with their temporary files. `shared`: files in shared memory, with their inodes, that
    the processes had at an image: ended by it, they remove none."""

    def __init__(self, paths: GangPaths, temporary: Path) -> None:
        self._paths = paths
        self.directory = ""
        self.files = temporary / paths.group
        self.shared: dict[str, int] = {}

    def make(self, launcher_pid: int) -> str:
        """Make names for processes that a launcher starts here. Return why it failed; empty if it is done. Blocks."""
        self.directory = f"{LINKS}/{self._paths.group}"
        try:
            self.make_files()
            make_links(self.directory, self.links)
            bind(str(self.files), self.temporary)
            # An account's launcher has mounts of its own.
            if not os.path.samefile(self.files, f"/proc/{launcher_pid}/root{self.temporary}"):
                raise OSError(errno.ENOENT, f"its launcher does not see {self.temporary}")
        except OSError as error:
            # As in a container that may not mount: the job starts, and is saved in other ways.
            self.directory = ""
            log.warning("no process images of a gang", extra={"group": self._paths.group, "cause": str(error)})
            return f"its directories cannot be named: {os_failure(error)}"
        return ""

    def give_places(self, launcher_pid: int) -> str:
        """Have the temporary files be /tmp, and /dev/shm be empty, for processes that a launcher starts. Return another
        gang that needs that launcher's places; empty if it is done. Blocks. Raises OSError."""
        self.make_files()
        try:
            with mounts_of(launcher_pid) as mounts:
                return give_places(mounts, self._paths.group, str(self.files))
        except (OSError, ImageRefusedError) as error:
            raise OSError(errno.EPERM, f"it gets no /tmp and /dev/shm of its own: {os_failure(error)}") from error

    def make_files(self) -> None:
        """Make the directory with the temporary files. Raises OSError."""
        if self._paths.account is None:
            make_directory(self.files)
        else:
            give_directory(self.files.parent, self.files.name, self._paths.account, 0o700, is_its=True)

    def give(self, mapping: dict[str, Any]) -> dict[str, Any]:
        """Return a launcher's request for a rank that finds its files by names; without names the request itself."""
        if not self.directory:
            return mapping
        environment = dict(mapping["env"])
        environment["GANGER_PAGE"] = str(self.page(Path(mapping["page"])))
        environment["GANGER_JOB_DIR"] = f"{self.directory}/job"
        environment["GANGER_SOCKET"] = f"{self.directory}/run/{self._paths.socket.name}"
        if "GANGER_ORDERS" in environment:
            environment["GANGER_ORDERS"] = f"{self.directory}/run/{self._paths.orders.name}"
        environment.setdefault("TMPDIR", self.temporary)
        # The address of this node is not that of another one.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        # For an agent, which any command may turn out to have.
        environment["GANGER_IMAGE"] = "1"
        return {**mapping, "env": environment, "no_io_uring": True}

    def page(self, page: Path) -> Path:
        """Return the name by which a process that is started here finds its page."""
        return Path(f"{LINKS}/{self._paths.group}/run/{page.name}")

    @property
    def links(self) -> dict[str, str]:
        """Where the names lead now."""
        return {"run": str(self._paths.run), "job": str(self._paths.work)}

    @property
    def temporary(self) -> str:
        """The path at which the processes have their temporary files."""
        return f"{self.directory}/tmp"

    def remove(self) -> None:
        """Remove the names that were made here, the temporary files, and those in shared memory. Blocks."""
        # Those of an account are in mounts of its own, which end with its launchers.
        for path, inode in self.shared.items() if self._paths.account is None else ():
            with suppress(OSError):
                if os.path.basename(path).startswith(_OF_LIBRARIES) and os.lstat(path).st_ino == inode:
                    os.unlink(path)
        if self.directory:
            own = f"{LINKS}/{self._paths.group}"
            unbind(f"{own}/tmp")
            remove_tree(Path(own))
        remove_tree(self.files)


def sweep_names(run: Path, links: Path = Path(LINKS)) -> None:
    """Remove the names of past gangs: of this daemon, whose run directory is given, and of dead daemons. Blocks."""
    dead: dict[Path, Path] = {}
    for names in links.glob("*"):
        with suppress(OSError):
            target = Path(os.readlink(names / "run"))
            if not target.is_relative_to(run):
                dead[names] = target
            elif not target.exists():
                _remove(names)
    # The ranks of a dead daemon may live, and the next daemon of its run directory will find them.
    directories = {target.parent.parent for target in dead.values()}
    is_held = {directory: _is_held(directory) for directory in directories}
    left = {names: target for names, target in dead.items() if not is_held[target.parent.parent]}
    for names in left.keys() - _in_use(left):
        _remove(names)


def _remove(names: Path) -> None:
    unbind(f"{names}/tmp")
    with suppress(OSError):
        remove_tree(names)


def _is_held(run: Path) -> bool:
    try:
        lock = os.open(run / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def _in_use(left: dict[Path, Path]) -> set[Path]:
    """Return the names that some process may know: from its environment, or because it has mapped its page."""
    found: set[Path] = set()
    for content in _contents() if left else ():
        found |= {
            names for names, target in left.items() if os.fsencode(f"{names}/") in content or bytes(target) in content
        }
    return found


def _contents() -> Iterator[bytes]:
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            yield Path(f"/proc/{name}/environ").read_bytes() + Path(f"/proc/{name}/maps").read_bytes()
