"""Report functions of more than 60 lines: `PYTHONPATH=tools python -m guards.function_length`.

Counted are the lines of a function or method of the three packages, from `def` to its last one, with those of functions
inside. Exit code 1 for a long function.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from guards.source_files import PACKAGES, REPOSITORY, tracked_files

MOST_LINES = 60


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
    faults = list(found)
    for one in faults:
        print(f"{one.file}:{one.line}: {one.name} has {one.lines} lines, at most {MOST_LINES} are allowed: split it")
    print(f"functions over {MOST_LINES} lines: {len(faults)}")
    return int(bool(faults))


if __name__ == "__main__":
    FILES = tracked_files(REPOSITORY, PACKAGES)
    sys.exit(main(one for name in FILES for one in long_functions(name, (REPOSITORY / name).read_text())))
