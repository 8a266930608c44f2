"""Small file systems that a test can fill."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(directory: Path, size: str) -> Iterator[Path]:
    """A file system of its own at a directory, and a file in it that fills it."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(directory)], check=False).returncode:
        pytest.skip("no right to mount")
    try:
        yield directory / "fill"
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def fill(path: Path) -> None:
    with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
