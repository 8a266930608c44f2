"""Report modules that a table of renames lacks or no longer finds: `PYTHONPATH=tools python -m guards.module_map`.

The table is `docs/design/009-one-scheduler-renames.md`: rows `| old | new | note |` with module names in backquotes
under headings of its part A. Every module of the three packages stands in it once, until the scripted moves begin.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from guards.source_files import PACKAGES, REPOSITORY, tracked_files

TABLE = "docs/design/009-one-scheduler-renames.md"
_PART = re.compile(r"^## A\..*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_ROW = re.compile(r"^\| `([\w.]+)` \| ([^|]*) \|", re.MULTILINE)


class MapFaults(NamedTuple):
    """Modules that the table lacks, that it names though there are none, and that it names more than once."""

    lacking: list[str]
    unknown: list[str]
    repeated: list[str]


def module_of(file: str) -> str:
    """Return the dotted name of `client/ganger/x.py` or `master/ganger_master/y/__init__.py`."""
    return file.split("/", 1)[1].removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def moves_of(text: str) -> list[tuple[str, tuple[str, ...]]]:
    """Return old module and new ones, row by row; no new one: the module is deleted."""
    part = _PART.search(text)
    rows = _ROW.findall(part.group()) if part else []
    return [(old, tuple(re.findall(r"`([\w.]+)`", new))) for old, new in rows]


def faults_of(modules: Iterable[str], named: Iterable[str]) -> MapFaults:
    """Compare the modules of the repository with those that a table names."""
    present, counted = set(modules), Counter(named)
    repeated = sorted(name for name, times in counted.items() if times > 1)
    return MapFaults(sorted(present - counted.keys()), sorted(counted.keys() - present), repeated)


if __name__ == "__main__":
    NAMED = [old for old, _ in moves_of((REPOSITORY / TABLE).read_text())]
    FAULTS = faults_of(map(module_of, tracked_files(REPOSITORY, PACKAGES)), NAMED)
    for KIND, NAMES in FAULTS._asdict().items():
        print("\n".join(f"{KIND}: {NAME}" for NAME in NAMES) or f"{KIND}: none")
    sys.exit(any(FAULTS))
