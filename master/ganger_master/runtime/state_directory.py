"""The master's directory: one master at a time, where it listens, and the token that opens it.

STATE_DIR/master.lock is held by the running master; endpoint.json says where it listens and is there only while a
master serves or was killed; token is a secret of the directory's owner, kept across restarts.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from enum import Enum
from pathlib import Path
from typing import Final

from ganger.wire import endpoints

LOCK: Final = "master.lock"
STORAGE_TOKEN: Final = ".ganger-token"


class MasterObstacle(Enum):
    """What kind of thing keeps a master from starting."""

    SETTING = "it was told something that cannot be"
    STATE = "something is in use, full or of another version"
    UNREACHABLE = "its database does not answer"
    RIGHTS = "it may not use what it needs"


class StartError(Exception):
    """The master cannot start; the message says why and what to do."""

    def __init__(self, message: str, obstacle: MasterObstacle = MasterObstacle.STATE) -> None:
        super().__init__(message)
        self.obstacle = obstacle


class StateDirectory:
    """An exclusively held state directory. Closing it, or the end of the process, frees it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.chmod(0o700)
            self._lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartError(f"cannot use state directory {path}: {error.strerror}", obstacle_of(error)) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._lock, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._lock)
            raise StartError(
                f"another master (pid {holder}) uses {path}: stop it, or give this one another --state-dir"
            ) from error
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        # What a killed master left behind would send clients to a dead address.
        self.remove_endpoint()

    def token(self) -> str:
        """The start-up token, made at the first start."""
        try:
            return endpoints.ensure_token(self.path)[0]
        except (endpoints.EndpointError, OSError) as error:
            raise StartError(str(error), obstacle_of(error)) from error

    def write_endpoint(self, address: str) -> None:
        """Tells clients on this machine where the master listens; call it once requests are served."""
        endpoints.write_endpoint(self.path, address, self.path / endpoints.TOKEN_FILE)

    def remove_endpoint(self) -> None:
        endpoints.remove_endpoint(self.path)

    def close(self) -> None:
        os.close(self._lock)


def storage_token(storage: Path) -> str:
    """The content of the storage's token file, made if it is not there. Raises StartError if it cannot be used."""
    path = storage / STORAGE_TOKEN
    try:
        storage.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _write_new(path, secrets.token_hex(16) + "\n")
        token = path.read_text().strip()
    except OSError as error:
        raise StartError(f"cannot use storage {storage}: {error.strerror}", obstacle_of(error)) from error
    if not token:
        raise StartError(f"{path} is empty: delete it if no other cluster uses this storage")
    return token


def obstacle_of(error: BaseException) -> MasterObstacle:
    """RIGHTS where missing rights are behind an error, else STATE."""
    denied = isinstance(error, PermissionError) or isinstance(error.__cause__, PermissionError)
    return MasterObstacle.RIGHTS if denied else MasterObstacle.STATE


def _write_new(path: Path, text: str) -> None:
    # Linked into place whole, so that of two masters on one storage both read the one token that won.
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        temporary.unlink()
