"""Names by which the processes of a job find their page, socket and temporary files.

They stay the same wherever the processes are restored, and lead to the directories of the present epoch. Each job
whose image may be taken has a directory of names in `LINKS`, which all daemons of a machine share. A daemon that was
killed for good removes nothing, so each daemon that starts removes the names of dead ones, too.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ganger.injob.launcher.namespaces import LINKS, bind, make_links, unbind

from ganger_daemon.node.daemon_files import LOCK, GangPaths, make_directory, remove_tree

log = logging.getLogger(__name__)

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

    def make(self) -> str:
        """Make names for processes that start here. Return why that cannot be done; empty if it is done. Blocks."""
        self.directory = f"{LINKS}/{self._paths.group}"
        try:
            make_directory(self.files)
            make_links(self.directory, self.links)
            bind(str(self.files), self.temporary)
        except OSError as error:
            # as in a container that may not mount: the job starts, and is saved in other ways
            self.directory = ""
            log.warning("no process images of a gang", extra={"group": self._paths.group, "cause": str(error)})
            return f"its directories cannot be named: {error}"
        return ""

    def give(self, mapping: dict[str, Any]) -> dict[str, Any]:
        """Return a launcher's request for a rank that finds its files by names; without names the request itself."""
        if not self.directory:
            return mapping
        environment = dict(mapping["env"])
        environment["GANGER_PAGE"] = str(self.page(Path(mapping["page"])))
        environment["GANGER_JOB_DIR"] = f"{self.directory}/job"
        environment["GANGER_SOCKET"] = f"{self.directory}/run/{self._paths.socket.name}"
        environment.setdefault("TMPDIR", self.temporary)
        # the address of this node is not that of another one
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        # for an agent, which any command may turn out to have
        environment["GANGER_IMAGE"] = "1"
        return {**mapping, "env": environment, "no_io_uring": True}

    def page(self, page: Path) -> Path:
        """Return the name by which a process that is started here finds its page."""
        return Path(f"{LINKS}/{self._paths.group}/run/{page.name}")

    @property
    def links(self) -> dict[str, str]:
        """Where the names lead now."""
        return {"run": str(self._paths.run), "job": str(self._paths.job)}

    @property
    def temporary(self) -> str:
        """The path at which the processes have their temporary files."""
        return f"{self.directory}/tmp"

    def remove(self) -> None:
        """Remove the names that were made here, the temporary files, and those in shared memory. Blocks."""
        for path, inode in self.shared.items():
            with suppress(OSError):
                if os.path.basename(path).startswith(_OF_LIBRARIES) and os.lstat(path).st_ino == inode:
                    os.unlink(path)
        if self.directory:
            own = f"{LINKS}/{self._paths.group}"
            unbind(f"{own}/tmp")
            remove_tree(Path(own))
            remove_tree(self.files)


def sweep_names(run: Path, links: Path = Path(LINKS)) -> None:
    """Remove the names of gangs that are no more: of this daemon, whose run directory is given, and of daemons that are
    dead. Blocks."""
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
    """Return whether a daemon with this run directory lives."""
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
