"""Rename classes by part B of the tables of docs/design/009: `PYTHONPATH=tools python -m restructure.rename_classes`.

A class is renamed where it is defined, where it is imported by name, where it is read as `module.Class`, and in
`__all__`; a file that imports it under a name of its own keeps that name. Prose is not changed. Rows whose class is not
there are passed over.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Collection, Mapping

from guards.module_map import TABLE, module_of
from guards.source_files import PACKAGES, REPOSITORY, tracked_files

_PART = re.compile(r"^## B\..*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
# A field of an f-string, and a name that is no attribute.
_FIELD = re.compile(r"(?<!\{)\{[^{}]+\}")
_NAME = re.compile(r"(?<![\w.'\"])[A-Za-z_]\w*")
_ROW = re.compile(r"^\|[^|]*\| `([\w.]+)\.(\w+)` \| `(\w+)`", re.MULTILINE)


def renames_of(text: str) -> dict[tuple[str, str], str]:
    """Return new names by module and class, of the rows that give one."""
    part = _PART.search(text)
    rows = _ROW.findall(part.group()) if part else []
    return {(module, name): new for module, name, new in rows if new != name}


def bindings_of(
    source: str, module: str, renames: Mapping[tuple[str, str], str], modules: Collection[str]
) -> tuple[dict[str, str], dict[str, str], dict[int, dict[str, str]]]:
    """Return what a file calls the renamed classes, its names of modules, and the imports to change, by line.

    The first maps names in the file to new names, the second local names to modules.
    """
    names = {name: new for (home, name), new in renames.items() if home == module}
    aliases: dict[str, str] = {}
    imported: dict[int, dict[str, str]] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: -node.level]
                base = ".".join([*parents, *([base] if base else [])])
            for one in node.names:
                if f"{base}.{one.name}" in modules:
                    aliases[one.asname or one.name] = f"{base}.{one.name}"
                elif (base, one.name) in renames:
                    new = renames[base, one.name]
                    for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                        imported.setdefault(line, {})[one.name] = new
                    if one.asname is None:
                        names[one.name] = new
    return names, aliases, imported


def import_lines(source: str) -> set[int]:
    """Return the lines of `from` imports."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    return {line for node in nodes for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def export_lines(source: str) -> set[int]:
    """Return the lines of `__all__`, whose strings are names."""
    nodes = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign)
        and any(isinstance(one, ast.Name) and one.id == "__all__" for one in node.targets)
    ]
    return {line for node in nodes for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def in_fields(token: tokenize.TokenInfo, names: Mapping[str, str]) -> list[tuple[int, int, int, str]]:
    """Return the edits (line, column, length, new) for names in the fields of an f-string on one line."""
    line, column = token.start
    fields = list(_FIELD.finditer(token.string)) if token.end[0] == line else []
    found = [word for field in fields for word in _NAME.finditer(token.string, field.start(), field.end())]
    return [
        (line, column + word.start(), len(word.group()), names[word.group()]) for word in found if word.group() in names
    ]


def with_reexports(renames: Mapping[tuple[str, str], str], sources: Mapping[str, str]) -> dict[tuple[str, str], str]:
    """Return the renames with those of modules from which others import a class that they import themselves."""
    found = dict(renames)
    imports = [
        (module, node.module, one.name, one.asname or one.name)
        for module, source in sources.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
        for one in node.names
    ]
    before = -1
    while before != len(found):
        before = len(found)
        for module, home, name, own in imports:
            if (home, name) in found and own == name:
                found.setdefault((module, name), found[home, name])
    return found


def renamed(source: str, module: str, renames: Mapping[tuple[str, str], str], modules: Collection[str]) -> str:
    """Return the source with new names for the classes of `renames` (by module and class)."""
    names, aliases, imported = bindings_of(source, module, renames, modules)
    imports, exported = import_lines(source), export_lines(source)
    lines = source.splitlines(keepends=True)
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    edits: list[tuple[int, int, int, str]] = []
    for at, token in enumerate(tokens):
        if token.type == tokenize.STRING and token.start[0] in exported and token.string[1:-1] in names:
            edits.append((token.start[0], token.start[1] + 1, len(token.string) - 2, names[token.string[1:-1]]))
        if token.type == tokenize.STRING and "f" in token.string.partition(token.string[-1])[0].lower():
            edits += in_fields(token, names)
        if token.type != tokenize.NAME:
            continue
        line, column = token.start
        is_attribute = at > 0 and tokens[at - 1].string == "."
        new = None
        if line in imported and token.string in imported[line]:
            is_own_name = at > 0 and tokens[at - 1].string == "as"
            new = None if is_own_name else imported[line][token.string]
        elif is_attribute:
            is_plain = at > 1 and (at < 3 or tokens[at - 3].string != ".")
            home = aliases.get(tokens[at - 2].string) if is_plain else None
            new = renames.get((home, token.string)) if home is not None else None
        elif line in imports:
            new = None
        else:
            new = names.get(token.string)
        if new is not None:
            edits.append((line, column, len(token.string), new))
    for line, column, length, new in sorted(edits, reverse=True):
        text = lines[line - 1]
        lines[line - 1] = text[:column] + new + text[column + length :]
    return "".join(lines)


def main() -> int:
    """Rename in all Python files of the repository; print how many classes and files changed."""
    modules = {module_of(name): (REPOSITORY / name).read_text() for name in tracked_files(REPOSITORY, PACKAGES)}
    own = renames_of((REPOSITORY / TABLE).read_text())
    renames = with_reexports(own, modules)
    changed = 0
    for name in tracked_files(REPOSITORY):
        path = REPOSITORY / name
        is_own = name.startswith(tuple(f"{one}/" for one in PACKAGES))
        module = module_of(name) if is_own else name.removesuffix(".py").replace("/", ".")
        before = path.read_text()
        after = renamed(before, module, renames, modules.keys())
        if after != before:
            path.write_text(after)
            changed += 1
    print(f"{len(own)} classes renamed, {changed} files changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
