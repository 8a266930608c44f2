"""Report functions of more than 60 lines: `PYTHONPATH=tools python -m guards.function_length`.

Counted are the lines of a function or method of the three packages, from `def` to its last one, with those of functions
inside. Exit code 1 for a long function that `KNOWN_LONG` does not name, and for one that it names although it is short
or gone.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from guards.source_files import PACKAGES, REPOSITORY, tracked_files

MOST_LINES = 60
# Delete a line with the function that is split; add none.
KNOWN_LONG: frozenset[tuple[str, str]] = frozenset(
    {
        # The tables of the first schema, which is never edited again.
        ("master/ganger_master/store/migrations/versions/v0001_initial.py", "upgrade"),
    }
)


class LongFunction(NamedTuple):
    file: str
    name: str
    line: int
    lines: int


def long_functions(file: str, source: str, most: int = MOST_LINES) -> Iterator[LongFunction]:
    """Yield the functions of a module with more than `most` lines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > most:
                yield LongFunction(file, node.name, node.lineno, lines)


def main(found: Iterable[LongFunction]) -> int:
    found = list(found)
    faults = [one for one in found if (one.file, one.name) not in KNOWN_LONG]
    stale = sorted(KNOWN_LONG - {(one.file, one.name) for one in found})
    for one in faults:
        print(f"{one.file}:{one.line}: {one.name} has {one.lines} lines, at most {MOST_LINES} are allowed: split it")
    for file, name in stale:
        print(f"KNOWN_LONG: {file} has no long function {name} any more: delete the entry")
    print(f"functions over {MOST_LINES} lines: {len(faults)}, exceptions: {len(KNOWN_LONG)}")
    return int(bool(faults or stale))


if __name__ == "__main__":
    FILES = tracked_files(REPOSITORY, PACKAGES)
    sys.exit(main(one for name in FILES for one in long_functions(name, (REPOSITORY / name).read_text())))
