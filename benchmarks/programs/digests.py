"""Print the digests of all files below a directory, as one JSON object. Runs in the programs' environment.

Files that hold times of day by their format are read: what is in a database, an archive and a TensorBoard log.
"""

import hashlib
import importlib
import json
import re
import sqlite3
import sys
import zipfile
from pathlib import Path

_EVENTS = re.compile(r"events\.out\.tfevents\.")


def _of_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _of_database(path: Path) -> str:
    with sqlite3.connect(path) as opened:
        return _of_bytes("\n".join(opened.iterdump()).encode())


def _of_events(path: Path) -> dict[str, str]:
    """Return the digest of what was recorded under each tag."""
    loader = importlib.import_module("tensorboard.backend.event_processing.event_file_loader")
    found: dict[str, list[str]] = {}
    for event in loader.LegacyEventFileLoader(str(path)).Load():
        for value in event.summary.value:
            found.setdefault(value.tag, []).append(f"{event.step} {value.SerializeToString(deterministic=True).hex()}")
    return {tag: _of_bytes("\n".join(values).encode()) for tag, values in found.items()}


def digests_of(top: Path) -> dict[str, str]:
    """Return the digest of each file by its path, in which seconds of the epoch are TIME. TensorBoard's files are named
    without host and process."""
    found: dict[str, str] = {}
    for path in sorted(top.rglob("*")):
        if not path.is_file() or path.is_symlink():
            continue
        name = re.sub(r"(?<!\d)1\d{9}(?!\d)", "TIME", str(path.relative_to(top)))
        if _EVENTS.search(path.name):
            name = re.sub(r"\.tfevents\..*?(\.\d+)?$", r".tfevents\1", name)
            found.update((f"{name}/{tag}", digest) for tag, digest in _of_events(path).items())
        elif path.suffix in (".db", ".sqlite", ".sqlite3"):
            found[name] = _of_database(path)
        elif path.suffix == ".zip":
            with zipfile.ZipFile(path) as opened:
                found.update((f"{name}/{member}", _of_bytes(opened.read(member))) for member in opened.namelist())
        else:
            found[name] = _of_bytes(path.read_bytes())
    return found


if __name__ == "__main__":
    json.dump(digests_of(Path(sys.argv[1])), sys.stdout)
