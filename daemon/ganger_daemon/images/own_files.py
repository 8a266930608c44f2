"""The files of a unit's own directories, as tar files in an image."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Sequence
from pathlib import Path

from ganger_daemon.images.contract import ImageRefusedError

_BUFFER_BYTES = 1 << 20


def pack_directories(init_pid: int, directories: Sequence[str], image: Path) -> str:
    """Write a unit's directories into an image. Return what went wrong, or an empty text. Sockets are left out."""
    for number, inside in enumerate(directories):
        try:
            with tarfile.TarFile(image / _name(number), "w", copybufsize=_BUFFER_BYTES) as tar:
                for entry in sorted(os.scandir(_from_outside(init_pid, inside)), key=lambda entry: entry.name):
                    tar.add(entry.path, entry.name)
        except (OSError, tarfile.TarError) as error:
            return f"the files in {inside} cannot be saved: {error}"
    return ""


def fill_directories(init_pid: int, directories: Sequence[str], image: Path) -> None:
    """Write the files of an image into a new unit's directories. Raises OSError and ImageRefusedError."""
    for number, inside in enumerate(directories):
        target = _from_outside(init_pid, inside)
        target.mkdir(parents=True, exist_ok=True)
        try:
            with tarfile.TarFile(image / _name(number), "r", copybufsize=_BUFFER_BYTES) as tar:
                # The filter refuses what would leave the directory: storage is no safer than its directories.
                tar.extractall(target, numeric_owner=True, filter="tar")
        except tarfile.TarError as error:
            raise ImageRefusedError(f"the image's files of {inside} cannot be restored: {error}") from error


def _from_outside(init_pid: int, inside: str) -> Path:
    return Path(f"/proc/{init_pid}/root{inside}")


def _name(number: int) -> str:
    return f"own-{number}.tar"
