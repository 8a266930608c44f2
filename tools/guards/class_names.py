"""Report public class names that exist more than once: `PYTHONPATH=tools python -m guards.class_names [DIRECTORY ...]`.

A reader who searches for a class finds one (PLAIN, §1.9). Counted are classes at the top level of a module whose name
does not begin with an underscore. Exit code 1 if a name exists more than once.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from guards.source_files import PACKAGES, REPOSITORY, tracked_files


class ClassDefinition(NamedTuple):
    file: str
    line: int


def public_classes(source: str) -> dict[str, int]:
    """Return the lines of the public top-level classes of a module, by name."""
    statements = ast.parse(source).body
    classes = [node for node in statements if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    return {node.name: node.lineno for node in classes}


def repeated_classes(sources: Iterable[tuple[str, str]]) -> dict[str, list[ClassDefinition]]:
    """Return the definitions of every public class name that several of the modules (file, source) define."""
    found: defaultdict[str, list[ClassDefinition]] = defaultdict(list)
    for file, source in sources:
        for name, line in public_classes(source).items():
            found[name].append(ClassDefinition(file, line))
    return {name: found[name] for name in sorted(found) if len(found[name]) > 1}


def repeated_in(root: Path, under: Collection[str]) -> dict[str, list[ClassDefinition]]:
    """Return the repeated public classes of the tracked Python files below the directories `under` of `root`."""
    return repeated_classes((name, (root / name).read_text()) for name in tracked_files(root, under))


def report(repeated: Mapping[str, Iterable[ClassDefinition]]) -> str:
    """Return one line for each repeated name, and a last line with their number."""
    lines = [
        f"{name}: " + ", ".join(f"{one.file}:{one.line}" for one in definitions)
        for name, definitions in repeated.items()
    ]
    return "\n".join([*lines, f"public class names that exist more than once: {len(lines)}"])


if __name__ == "__main__":
    REPEATED = repeated_in(REPOSITORY, sys.argv[1:] or PACKAGES)
    print(report(REPEATED))
    sys.exit(bool(REPEATED))
