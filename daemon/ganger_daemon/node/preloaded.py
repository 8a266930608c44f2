"""Which code a launcher has in it: launchers outlive daemons and upgrades, and must never run ranks with yesterday's
library."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

import ganger

_PARTS = ("injob", "protocol", "training")


def code_of(package: Path | None = None) -> str:
    """Eight hex digits that change with any source file a launcher imports ahead of time.

    Looks at every file's size and time at each call, and at the contents only when one of those changed.
    """
    root = package or Path(ganger.__file__).parent
    files = sorted([root / "__init__.py", *(path for part in _PARTS for path in (root / part).rglob("*.py"))])
    facts = []
    for path in files:
        try:
            state = path.stat()
        except OSError:
            continue  # it went between the listing and the look: the next call sees that
        facts.append((path, state.st_size, state.st_mtime_ns))
    return _digest(root, tuple(facts))


@lru_cache(maxsize=4)
def _digest(root: Path, facts: tuple[tuple[Path, int, int], ...]) -> str:
    found = hashlib.sha256()
    for path, _, _ in facts:
        found.update(str(path.relative_to(root)).encode() + b"\0")
        try:
            found.update(path.read_bytes())
        except OSError:
            found.update(b"\0")
    return found.hexdigest()[:8]
