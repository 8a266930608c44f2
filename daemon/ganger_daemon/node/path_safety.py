"""Accounts that can change where a path leads: a directory is private only if no other account can replace it."""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path

_MOST_LINKS = 40


def path_trouble(path: Path) -> str:
    """Return what lets another account replace ``path`` or what is in it, for people; empty if nothing does.

    Each existing component, and each symbolic link on the way, has to belong to this user or to root. Others may write
    into a directory only where it is sticky (/tmp, /dev/shm), and not into the last one. What does not exist is made
    by this process.
    """
    current, waiting, links = Path("/"), list(Path(os.path.abspath(path)).parts[1:]), 0
    while waiting:
        step = current / waiting.pop(0)
        try:
            status = step.lstat()
        except FileNotFoundError:
            return ""
        except OSError as error:
            return f"{step} cannot be looked at: {error.strerror}"
        if status.st_uid not in (0, os.geteuid()):
            return f"{step} belongs to {_user(status.st_uid)}"
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > _MOST_LINKS:
                return f"{path} has too many symbolic links"
            target = Path(os.path.normpath(current / step.readlink()))
            current, waiting = Path("/"), [*target.parts[1:], *waiting]
            continue
        if not stat.S_ISDIR(status.st_mode):
            return f"{step} is no directory"
        if status.st_mode & 0o022 and (not waiting or not status.st_mode & stat.S_ISVTX):
            return f"others may write into {step} (mode {stat.S_IMODE(status.st_mode):04o})"
        current = step
    return ""


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"
