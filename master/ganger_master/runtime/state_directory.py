"""The master's directory: one master at a time, where it listens, and the token that opens it.

STATE_DIR/master.lock is held by the running master; endpoint.json says where it listens and is there only while a
master serves or was killed; token is a secret of the directory's owner, kept across restarts.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Final

LOCK: Final = "master.lock"
ENDPOINT: Final = "endpoint.json"
TOKEN: Final = "token"
STORAGE_TOKEN: Final = ".ganger-token"


class StartError(Exception):
    """The master cannot start; the message says why and what to do."""


class StateDirectory:
    """An exclusively held state directory. Closing it, or the end of the process, frees it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.chmod(0o700)
            self._lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartError(f"cannot use state directory {path}: {error.strerror}") from error
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
        return _secret_in(self.path / TOKEN)

    def write_endpoint(self, address: str, more: Mapping[str, object]) -> None:
        """Tells clients on this machine where the master listens; call it once requests are served."""
        endpoint = {"address": address, "token_file": str(self.path / TOKEN), "pid": os.getpid(), **more}
        write_durably(self.path / ENDPOINT, json.dumps(endpoint, indent=1) + "\n")

    def remove_endpoint(self) -> None:
        (self.path / ENDPOINT).unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._lock)


def storage_token(storage: Path) -> str:
    """The content of the storage's token file, made if it is not there. Raises StartError if it cannot be used."""
    try:
        storage.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _secret_in(storage / STORAGE_TOKEN)
    except OSError as error:
        raise StartError(f"cannot use storage {storage}: {error.strerror}") from error


def write_durably(path: Path, text: str) -> None:
    """Replaces a file of mode 0600 as one step, surviving a crash right after."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, text.encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    temporary.rename(path)
    parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)


def _secret_in(path: Path) -> str:
    try:
        found = path.read_text().strip()
    except FileNotFoundError:
        found = ""
    if found:
        return found
    made = secrets.token_urlsafe(32)
    write_durably(path, made + "\n")
    return made
