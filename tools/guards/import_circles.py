"""Report circles of imports: `PYTHONPATH=tools python -m guards.import_circles`.

A circle is a set of modules that import each other, directly or through others of the set. Imports under
`TYPE_CHECKING` and inside functions count. Exit code 1 for a circle that `KNOWN_CIRCLES` does not name, and for one
that it names although there is none left.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping

import grimp

ROOT_PACKAGES = ("ganger", "ganger_daemon", "ganger_master")
# Circles that a later step of docs/design/009-one-scheduler.md takes apart. Delete a line with its circle.
KNOWN_CIRCLES: frozenset[frozenset[str]] = frozenset()


def circles(imports: Mapping[str, Collection[str]]) -> list[frozenset[str]]:
    """Return the sets of modules that import each other, in the order of their first module.

    `imports`: by module the modules that it imports. Each module is in one set at most: the sets are the strongly
    connected components with several modules (Kosaraju's algorithm)."""
    importers: dict[str, list[str]] = {}
    for module, imported in imports.items():
        for other in imported:
            importers.setdefault(other, []).append(module)
    left = set(imports)
    found = []
    for module in reversed(_by_end(imports)):
        if module in left:
            members = _reachable(module, importers, left)
            left -= members
            if len(members) > 1:
                found.append(frozenset(members))
    return sorted(found, key=min)


def _by_end(imports: Mapping[str, Collection[str]]) -> list[str]:
    """Return all modules, each after those that it reaches, but for those of its own circle."""
    begun: set[str] = set()
    ended: list[str] = []
    for first in imports:
        stack = [(first, iter(imports[first]))] if first not in begun else []
        begun.add(first)
        while stack:
            module, others = stack[-1]
            following = next((other for other in others if other not in begun), None)
            if following is None:
                stack.pop()
                ended.append(module)
            else:
                begun.add(following)
                stack.append((following, iter(imports.get(following, ()))))
    return ended


def _reachable(start: str, edges: Mapping[str, Iterable[str]], within: Collection[str]) -> set[str]:
    found, ahead = {start}, [start]
    while ahead:
        for other in edges.get(ahead.pop(), ()):
            if other in within and other not in found:
                found.add(other)
                ahead.append(other)
    return found


def imports_of(packages: Iterable[str]) -> dict[str, set[str]]:
    """Return by module of the installed packages the modules of them that it imports."""
    graph = grimp.build_graph(*packages, exclude_type_checking_imports=False)
    return {module: graph.find_modules_directly_imported_by(module) for module in sorted(graph.modules)}


def report(found: Collection[frozenset[str]], known: frozenset[frozenset[str]]) -> str:
    """Return one line for each circle that is not known and each known one that is gone, and a line with the number."""
    new = [f"circle of imports: {', '.join(sorted(circle))}" for circle in found if circle not in known]
    gone = [f"no circle any more, delete it from KNOWN_CIRCLES: {', '.join(sorted(one))}" for one in known - set(found)]
    return "\n".join([*new, *gone, f"circles of imports: {len(found)}, of which {len(found) - len(new)} are known"])


if __name__ == "__main__":
    FOUND = circles(imports_of(ROOT_PACKAGES))
    print(report(FOUND, KNOWN_CIRCLES))
    sys.exit(set(FOUND) != KNOWN_CIRCLES)
