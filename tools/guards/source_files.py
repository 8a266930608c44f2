"""The files that guards read: what git tracks, without generated code."""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
# Directories of the three installed packages.
PACKAGES = ("client", "master", "daemon")
_GENERATED = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def tracked_files(
    root: Path = REPOSITORY, under: Collection[str] = (), suffixes: Collection[str] = (".py",)
) -> Iterator[str]:
    """Yield tracked files relative to `root`, below the directories `under` (all, if empty), with one of `suffixes`."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    for name in sorted(filter(None, listed.split("\0"))):
        is_chosen = name.endswith(tuple(suffixes)) and (not under or name.split("/", 1)[0] in under)
        # A file that is deleted and not yet committed is still tracked.
        if is_chosen and not name.endswith(_GENERATED) and (root / name).is_file():
            yield name
