"""Report names with a second form of a unit: `PYTHONPATH=tools python -m guards.unit_suffixes`.

A unit is a suffix with one form: `_s`, `_ms`, `_ns`, `_bytes`, `_millicores` (PLAIN, §1.8). Read are the names that
the three packages, benchmarks and experiments define (functions, parameters, variables, attributes, constants) and the
fields of protos. Exit code 1 for any such name.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from guards.source_files import PACKAGES, REPOSITORY, tracked_files

SUFFIXES = ("seconds", "secs", "sec", "milliseconds", "millis", "msec", "nanoseconds", "nanos", "nsec", "mebibytes")
_DIRECTORIES = (*PACKAGES, "benchmarks", "experiments", "protos")
# GPU-seconds and core-seconds are units of their own.
_LONG = re.compile(rf"(?<!gpu)(?<!core)_({'|'.join(SUFFIXES)})$", re.IGNORECASE)
_FIELD = re.compile(r"^\s*(?:repeated |optional )?[\w.<>, ]+ (\w+) = \d+", re.MULTILINE)


class DefinedName(NamedTuple):
    file: str
    line: int
    name: str


def defined_in_python(file: str, source: str) -> Iterator[DefinedName]:
    """Yield every name that a module defines: functions, parameters, and targets of assignments with attributes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield DefinedName(file, node.lineno, node.name)
        elif isinstance(node, ast.arg):
            yield DefinedName(file, node.lineno, node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield DefinedName(file, node.lineno, node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield DefinedName(file, node.lineno, node.attr)


def defined_in_proto(file: str, source: str) -> Iterator[DefinedName]:
    """Yield the fields of a proto."""
    for match in _FIELD.finditer(source):
        yield DefinedName(file, source.count("\n", 0, match.start(1)) + 1, match[1])


def with_long_units(names: Iterable[DefinedName]) -> list[DefinedName]:
    """Return the names that end with a unit in another form than the one agreed on."""
    return sorted({one for one in names if _LONG.search(one.name)})


def names_of(root: Path) -> Iterator[DefinedName]:
    """Yield all names that the tracked files of `root` define."""
    for file in tracked_files(root, _DIRECTORIES, (".py", ".proto")):
        read = defined_in_python if file.endswith(".py") else defined_in_proto
        yield from read(file, (root / file).read_text())


def main() -> int:
    faults = with_long_units(names_of(REPOSITORY))
    for one in faults:
        print(f"{one.file}:{one.line}: {one.name}: write the unit as _s, _ms or _ns")
    print(f"names with a second form of a unit: {len(faults)}")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
