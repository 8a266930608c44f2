"""Directories that are made for accounts, below directories of root. No link on the way is followed: each step is
opened from the one before, and its owner is looked at, so that no account leads the daemon elsewhere."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from ganger_daemon.node.accounts import Account

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Others may go through a step, and not list it.
_STEP_MODE = 0o711


def give_directory(base: Path, name: str, account: Account, mode: int, *, is_its: bool) -> Path:
    """Make the directory `name` below `base` for an account, and return its path. Idempotent.

    `name`: one or more steps, all but the last of which are this process's. `is_its`: the last one belongs to the
    account; otherwise to this process, with the account's primary group. Raises OSError: EPERM where an account has put
    something in the place of a step."""
    owner, group = (account.uid if is_its else os.geteuid()), account.gid
    *steps, last = Path(name).parts
    descriptor = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for step in steps:
        descriptor = _enter(descriptor, step, (os.geteuid(), -1), _STEP_MODE)
    os.close(_enter(descriptor, last, (owner, group), mode))
    return base / name


def _enter(parent: int, name: str, owner: tuple[int, int], mode: int) -> int:
    """Open a directory in a parent, which is closed; make it if there is none."""
    try:
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except FileExistsError:
            pass
        found = os.open(name, _OPEN, dir_fd=parent)
    finally:
        os.close(parent)
    try:
        status = os.fstat(found)
        # one of root's becomes the account's; what is another account's was put there
        if status.st_uid not in (owner[0], os.geteuid()):
            raise OSError(errno.EPERM, f"belongs to user {status.st_uid}", name)
        if status.st_uid != owner[0] or owner[1] not in (-1, status.st_gid):
            os.fchown(found, *owner)
        if stat.S_IMODE(status.st_mode) != mode:
            os.fchmod(found, mode)
    except OSError:
        os.close(found)
        raise
    return found


def closed_step(path: Path) -> str:
    """Return why accounts cannot reach a path; empty if they can: every directory on the way lets others through."""
    for step in [*reversed(path.resolve().parents), path.resolve()]:
        try:
            mode = step.stat().st_mode
        except FileNotFoundError:
            return ""
        if stat.S_ISDIR(mode) and not mode & 0o001:
            return f"{step} is closed to other accounts (mode {stat.S_IMODE(mode):04o})"
    return ""
