"""Names by which jobs find their files, as daemons left them: what is over is removed.

Each job whose image may be taken has a directory of names in `LINKS`, which all daemons of a machine share. A daemon
that was killed for good removes nothing, so each daemon that starts removes the names of dead ones, too.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ganger.injob.launcher.namespaces import LINKS, unbind

from ganger_daemon.node.daemon_files import LOCK, remove_tree


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
