"""Rename and move modules by the table of docs/design/009: `PYTHONPATH=tools python -m restructure.move_modules OLD`.

OLD stands for prefixes of module names (`ganger.cluster`, `ganger_daemon`). A module that will be merged or split
goes to the room of its (first) new module; merging is another step. Paths, imports, dotted names in strings,
documentation and `pyproject.toml` are changed, and data beside a package goes along; the code between them is not.
Commit
before, so that `git restore` undoes it; afterwards run `ruff check --fix --select I .` and `ruff format .`.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

from guards.module_map import TABLE, module_of, moves_of
from guards.source_files import PACKAGES, REPOSITORY, tracked_files

# Directory of each root package.
_ROOTS = {"ganger": "client", "ganger_master": "master", "ganger_daemon": "daemon"}
_TEXTS = (".py", ".md", ".toml", ".txt", ".sh", "Makefile")
# They tell how it was, or what a script makes of names.
_HISTORY = ("docs/design/", "CHANGELOG.md", "tests/contracts/test_guards.py", "tests/contracts/test_move_modules.py")
# Names until the merge that the table means. The scan serves placement until there is one engine; dataclasses with
# slots
# cannot be in `ganger.protocol`, which Python 3.9 imports, too.
_UNTIL_MERGED = {
    "ganger.cluster.scan": "ganger.cluster.scan",
    "ganger.cluster.scanned": "ganger.cluster.scanned",
    "ganger_daemon.core.orders": "ganger_daemon.core.orders",
    "ganger_daemon.core.relay": "ganger_daemon.core.relay",
    "ganger_daemon.core.rotation": "ganger_daemon.core.rotation",
    "ganger_daemon.core.turns": "ganger_daemon.core.turns",
    "ganger_master.estimators.server_speed": "ganger_master.estimators.server_speed",
    "ganger_master.runtime.store_access": "ganger_master.runtime.store_access",
}


def first_names(rows: Iterable[tuple[str, tuple[str, ...]]], packages: Collection[str]) -> dict[str, str]:
    """Return the name that each module gets by a move alone, before any merge or split.

    A new name goes to the module that has it already, else to one of the same last name, else to the first to which the
    table gives it. The others come to the same room under their old last name, with that of their old package before it
    where it is taken. Packages get their new names, also where two become one. A module directly under a root package
    stays until it is merged, and one that is to be deleted goes with its package.
    """
    rows = list(rows)
    names = {old: targets[0] for old, targets in rows if old in packages and targets}
    rows = [
        (old, targets or (f"{names[package]}.{tail}",))
        for old, targets in rows
        for package, _, tail in [old.rpartition(".")]
        if targets or package in names
    ]
    rooms = set(names.values())
    rows = [(old, targets) for old, targets in rows if old not in packages]
    names |= {old: old for old, targets in rows if old in targets}
    taken = set(names.values())
    alike = [row for row in rows if row[0].rpartition(".")[2] == row[1][0].rpartition(".")[2]]
    for old, targets in (*alike, *rows):
        if old not in names and len(targets) == 1 and targets[0] not in taken:
            names[old] = targets[0]
            taken.add(targets[0])
    for old, targets in rows:
        if old in names:
            continue
        package, _, tail = old.rpartition(".")
        room = targets[0] if targets[0] in rooms else targets[0].rpartition(".")[0]
        new = f"{room}.{tail}"
        if new in taken:
            new = f"{room}.{package.rpartition('.')[2]}_{tail}" if "." in package else old
        assert new not in taken, f"no name for {old}"
        names[old] = new
        taken.add(new)
    return names


def planned_moves(names: Mapping[str, str], prefixes: Collection[str], present: Collection[str]) -> dict[str, str]:
    """Return old to new name for the modules that are there, are under one of `prefixes`, and change their name."""
    return {
        old: new
        for old, new in names.items()
        if new != old and old in present and any(old == one or old.startswith(f"{one}.") for one in prefixes)
    }


def imported_as(module: str) -> str:
    """Return the name by which a module is imported: tests are on the path themselves."""
    return module.removeprefix("tests.")


def file_of(module: str, is_package: bool) -> str:
    """Return the file of a module relative to the repository."""
    root = _ROOTS.get(module.partition(".")[0], ".")
    path = module.replace(".", "/") + ("/__init__.py" if is_package else ".py")
    return path if root == "." else f"{root}/{path}"


def dotted(moves: Mapping[str, str], packages: Collection[str]) -> re.Pattern[str]:
    """Return a pattern for the old names; of a package only where no submodule follows."""
    names = sorted(moves, key=len, reverse=True)
    parts = [re.escape(name) + (r"(?!\.?\w)" if name in packages else r"(?!\w)") for name in names]
    return re.compile(r"(?<![\w.])(?:" + "|".join(parts) + ")")


def _statements(source: str) -> Iterator[ast.ImportFrom]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            yield node


def rewritten_imports(
    source: str, module: str, is_package: bool, moves: Mapping[str, str], modules: Collection[str]
) -> str:
    """Rewrite `from package import submodule` and relative imports of one file."""
    lines = source.splitlines(keepends=True)
    for node in sorted(_statements(source), key=lambda one: one.lineno, reverse=True):
        base = node.module or ""
        if node.level:
            parents = module.split(".")[: None if is_package else -1]
            parents = parents[: len(parents) - node.level + 1]
            base = ".".join([*parents, *([base] if base else [])])
        submodules = [one for one in node.names if f"{base}.{one.name}" in modules]
        moved = [one for one in submodules if f"{base}.{one.name}" in moves]
        if not moved and not (node.level and (module in moves or base in moves)):
            continue
        indent = " " * node.col_offset
        new = []
        rest = [one for one in node.names if one not in moved]
        if rest:
            names = ", ".join(one.name + (f" as {one.asname}" if one.asname else "") for one in rest)
            new.append(f"{indent}from {base} import {names}\n")
        for one in moved:
            package, _, tail = imported_as(moves[f"{base}.{one.name}"]).rpartition(".")
            known = one.asname or one.name
            new.append(f"{indent}from {package} import {tail}" + (f" as {known}" if known != tail else "") + "\n")
        assert node.end_lineno is not None
        lines[node.lineno - 1 : node.end_lineno] = new
    return "".join(lines)


def move_files(files: Mapping[str, str]) -> None:
    """Move files; data beside a package marker goes along. Of two markers that become one the longer stays."""
    git = partial(subprocess.run, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    everything = dict(files)
    for source, target in files.items():
        if source.endswith("/__init__.py"):
            beside = git(["git", "ls-files", "--", str(Path(source).parent)]).stdout.split()
            data = [one for one in beside if not one.endswith(".py") and Path(one).parent == Path(source).parent]
            everything |= {one: str(Path(target).parent / Path(one).name) for one in data}
    texts = [(target, (REPOSITORY / source).read_bytes()) for source, target in everything.items()]
    for source in everything:
        git(["git", "rm", "-q", "-f", "--", source])
    for name, text in texts:
        path = REPOSITORY / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not (path.name == "__init__.py" and path.exists() and path.stat().st_size > len(text)):
            path.write_bytes(text)
    for directory in sorted({Path(name).parent for name, _ in texts}):
        marker = REPOSITORY / directory / "__init__.py"
        if not marker.exists() and directory.parts[0] in PACKAGES:
            marker.write_text("")
    git(["git", "add", "--all", "."])


def main(prefixes: list[str]) -> int:
    """Move the modules under the prefixes; print their number and how many files changed."""
    modules = {module_of(name): name for name in tracked_files(REPOSITORY, PACKAGES)}
    packages = {name for name, path in modules.items() if path.endswith("/__init__.py")}
    rows = moves_of((REPOSITORY / TABLE).read_text())
    names = first_names(rows, packages | {old for old, _ in rows if any(one.startswith(f"{old}.") for one, _ in rows)})
    moves = planned_moves(names | _UNTIL_MERGED, prefixes, modules)
    clashes = [
        f"{old}: {new} is there"
        for old, new in moves.items()
        if new in modules and new not in moves and new not in packages
    ]
    if clashes:
        print("\n".join(clashes))
        return 1
    pattern = dotted(moves, packages)
    paths = {
        str(Path(modules[old]).parent if old in packages else modules[old]): str(
            Path(file_of(new, True)).parent if old in packages else file_of(new, False)
        )
        for old, new in moves.items()
    }
    by_path = re.compile("|".join(re.escape(one) + r"(?![\w/])" for one in sorted(paths, key=len, reverse=True)))
    changed = lines = 0
    for name in list(tracked_files(REPOSITORY, suffixes=_TEXTS)):
        if name.startswith(_HISTORY):
            continue
        path = REPOSITORY / name
        before = after = path.read_text()
        if name.endswith(".py"):
            is_own = name.startswith(tuple(f"{one}/" for one in PACKAGES))
            module = module_of(name) if is_own else name.removesuffix(".py").replace("/", ".")
            after = rewritten_imports(after, module, name.endswith("/__init__.py"), moves, modules.keys())
        after = pattern.sub(lambda found: imported_as(moves[found.group()]), after)
        after = by_path.sub(lambda found: paths[found.group()], after)
        if after != before:
            path.write_text(after)
            changed += 1
            lines += sum(a != b for a, b in zip(before.splitlines(), after.splitlines(), strict=False))
    move_files({modules[old]: file_of(new, old in packages) for old, new in moves.items()})
    print(f"{len(moves)} modules moved, {changed} files changed, about {lines} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
