"""Merge modules into one: `PYTHONPATH=tools python -m restructure.merge_modules TARGET=MODULE,MODULE ...`.

The modules of a group become one module of the name TARGET; imports, attributes of imported modules and dotted names in
strings, documentation and `pyproject.toml` follow. A group is refused, with the reason, where the text does not show
what to do: two public names that are equal, a name that is imported as two things, a module that is a program, or an
import circle that the merge would close. Private names that are equal get the name of their module in front; equal
definitions are kept once. Commit before; afterwards run `ruff check --fix --select I,F401,RUF022 .` and `ruff format`.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from graphlib import CycleError, TopologicalSorter

from guards.module_map import module_of
from guards.source_files import PACKAGES, REPOSITORY, tracked_files

from restructure.move_modules import dotted, file_of, imported_as

_TEXTS = (".py", ".md", ".toml", ".txt", ".sh", "Makefile")
_HISTORY = ("docs/design/", "CHANGELOG.md", "tests/contracts/test_guards.py", "tests/contracts/test_move_modules.py")
_OWN = tuple(f"{one}/" for one in (*PACKAGES, "benchmarks", "experiments", "tests", "examples"))


class MergeRefusedError(Exception):
    """The text alone does not show how to merge a group."""


@dataclass
class Part:
    """One module of a group. `imports`: lines, one name each. `typing_imports`: those below TYPE_CHECKING. `body`: the
    source behind the imports. `bound`: what each imported name stands for."""

    module: str
    docstring: str
    imports: list[str] = field(default_factory=list)
    typing_imports: list[str] = field(default_factory=list)
    bound: dict[str, str] = field(default_factory=dict)
    body: str = ""
    defined: dict[str, str] = field(default_factory=dict)
    needs: set[str] = field(default_factory=set)
    # Name in this part to name in the merged module.
    renames: dict[str, str] = field(default_factory=dict)


def parse(module: str, source: str, group: Collection[str]) -> Part:
    """Take a module apart; MergeRefusedError if it is a program or imports in the middle."""
    tree = ast.parse(source)
    lines = source.splitlines(keepends=True)
    part = Part(module, ast.get_docstring(tree, clean=True) or "")
    statements = tree.body[1:] if ast.get_docstring(tree) is not None else list(tree.body)
    at = 0
    for at, node in enumerate(statements):  # noqa: B007
        if isinstance(node, ast.Import | ast.ImportFrom):
            _imported(part, node, group, part.imports)
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            if node.orelse:
                raise MergeRefusedError(f"{module} has an else of TYPE_CHECKING")
            for one in node.body:
                if not isinstance(one, ast.Import | ast.ImportFrom):
                    raise MergeRefusedError(f"{module} defines names for type checking only")
                _imported(part, one, group, part.typing_imports)
        else:
            break
    else:
        at = len(statements)
    rest = statements[at:]
    if any(isinstance(node, ast.Import | ast.ImportFrom) for node in rest):
        raise MergeRefusedError(f"{module} imports behind its first definition")
    if any("__name__" in ast.unparse(node.test) for node in rest if isinstance(node, ast.If)):
        raise MergeRefusedError(f"{module} is a program")
    if at == 0:
        end = statements[0].lineno - 1 if statements else len(lines)
    else:
        last = statements[at - 1].end_lineno
        assert last is not None
        end = last
    if ast.get_docstring(tree) is not None and at == 0:
        end = tree.body[0].end_lineno or 0
    part.body = "".join(lines[end:]).strip("\n")
    for node in rest:
        for name in _defined(node):
            part.defined[name] = ast.unparse(node)
    return part


def _imported(part: Part, node: ast.Import | ast.ImportFrom, group: Collection[str], to: list[str]) -> None:
    for one in node.names:
        known = one.asname or one.name
        alias = f" as {one.asname}" if one.asname else ""
        if isinstance(node, ast.Import):
            if one.name in group:
                raise MergeRefusedError(f"{part.module} imports {one.name} by its whole name")
            to.append(f"import {one.name}{alias}")
            part.bound[known.partition(".")[0] if not one.asname else known] = one.name if one.asname else "import"
            continue
        base = _base_of(node, part.module.rpartition(".")[0])
        if base in group:
            if one.name == "*":
                raise MergeRefusedError(f"{part.module} imports all of {base}")
            part.needs.add(base)
            part.renames[known] = f"{base}:{one.name}"
            continue
        if f"{base}.{one.name}" in group:
            part.needs.add(f"{base}.{one.name}")
            part.renames[known] = f"{base}.{one.name}:"
            continue
        to.append(f"from {base} import {one.name}{alias}")
        part.bound[known] = f"{base}.{one.name}"


def _base_of(node: ast.ImportFrom, package: str) -> str:
    """Return the module or package that an import of a module in `package` names."""
    if not node.level:
        return node.module or ""
    parents = package.split(".")
    return ".".join([*parents[: len(parents) - node.level + 1], *([node.module] if node.module else [])])


def _module_of_file(name: str) -> str:
    if name.startswith(tuple(f"{one}/" for one in PACKAGES)):
        return imported_as(module_of(name))
    return imported_as(name.removesuffix(".py").removesuffix("/__init__").replace("/", "."))


def _defined(node: ast.stmt) -> Iterable[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            yield from [one.id for one in ast.walk(target) if isinstance(one, ast.Name)]
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
    elif isinstance(node, ast.If | ast.Try | ast.With | ast.For):
        for one in ast.walk(node):
            if isinstance(one, ast.Assign | ast.AnnAssign | ast.FunctionDef | ast.ClassDef) and one is not node:
                yield from _defined(one)


def _replaced(source: str, places: Iterable[tuple[int, int, int, str]]) -> str:
    """Replace byte ranges: line, first and last column, text."""
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    for line, first, last, text in sorted(set(places), reverse=True):
        lines[line - 1] = lines[line - 1][:first] + text.encode() + lines[line - 1][last:]
    return b"".join(lines).decode()


def renamed(source: str, names: Mapping[str, str], modules: Mapping[str, Mapping[str, str]]) -> str:
    """Rename globals of a module, and replace `module.name` by the name that it has here.

    `names`: global name to new name. `modules`: name of an imported module to its names, old to new; a name that is not
    there keeps its own. A function that has a variable of the old name of its own is left alone.
    """
    places: list[tuple[int, int, int, str]] = []

    def visit(node: ast.AST, hidden: frozenset[str]) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            own = {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}
            body = node.body if isinstance(node.body, list) else [node.body]
            outside: set[str] = set()
            for part in body:
                for one in ast.walk(part):
                    if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store | ast.Del):
                        own.add(one.id)
                    elif isinstance(one, ast.Global | ast.Nonlocal):
                        outside.update(one.names)
            for decorator in getattr(node, "decorator_list", []):
                visit(decorator, hidden)
            for one in [*node.args.defaults, *[one for one in node.args.kw_defaults if one is not None]]:
                visit(one, hidden)
            for arg in [one for one in ast.walk(node.args) if isinstance(one, ast.arg)]:
                if arg.annotation is not None:
                    visit(arg.annotation, hidden)
            if getattr(node, "returns", None) is not None:
                visit(node.returns, hidden)  # type: ignore[union-attr,arg-type]
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in names and not hidden_in(node):
                column = node.col_offset + (10 if isinstance(node, ast.AsyncFunctionDef) else 4)
                places.append((node.lineno, column, column + len(node.name), names[node.name]))
            for part in body:
                visit(part, hidden | frozenset(own - outside))
            return
        if isinstance(node, ast.ClassDef) and node.name in names and not hidden_in(node):
            column = node.col_offset + 6
            places.append((node.lineno, column, column + len(node.name), names[node.name]))
        if isinstance(node, ast.Global) and (set(node.names) & set(names)):
            raise MergeRefusedError("a global statement")
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in modules
            and node.value.id not in hidden
        ):
            if node.end_lineno != node.value.lineno:
                raise MergeRefusedError("an attribute over two lines")
            assert node.end_col_offset is not None
            new = modules[node.value.id].get(node.attr, node.attr)
            places.append((node.lineno, node.value.col_offset, node.end_col_offset, new))
            return
        if isinstance(node, ast.Name) and node.id not in hidden:
            if node.id in modules:
                raise MergeRefusedError(f"module {node.id} used as a value")
            if node.id in names:
                assert node.end_col_offset is not None
                places.append((node.lineno, node.col_offset, node.end_col_offset, names[node.id]))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names:
            assert node.end_col_offset is not None
            if node.end_lineno == node.lineno:
                places.append((node.lineno, node.col_offset + 1, node.end_col_offset - 1, names[node.value]))
        for child in ast.iter_child_nodes(node):
            visit(child, hidden)

    tops: set[int] = set()
    tree = ast.parse(source)
    tops.update(id(node) for node in tree.body)

    def hidden_in(node: ast.AST) -> bool:
        return id(node) not in tops

    for node in tree.body:
        visit(node, frozenset())
    return _replaced(source, places)


def merged(target: str, sources: Mapping[str, str]) -> tuple[str, dict[str, dict[str, str]]]:
    """Return the source of the merged module and, by old module, the names that changed. `sources`: by module name."""
    parts = {module: parse(module, source, sources.keys()) for module, source in sources.items()}
    try:
        order = list(TopologicalSorter({module: sorted(part.needs) for module, part in parts.items()}).static_order())
    except CycleError as error:
        raise MergeRefusedError(f"an import circle within the group: {error.args[1]}") from None
    first = target if target in parts else max(parts, key=lambda one: len(parts[one].body))
    taken: dict[str, str] = {}
    changed: dict[str, dict[str, str]] = {module: {} for module in parts}
    dropped: dict[str, set[str]] = {module: set() for module in parts}
    bound: dict[str, str] = {}
    for part in parts.values():
        for name, what in part.bound.items():
            if bound.setdefault(name, what) != what:
                raise MergeRefusedError(f"{name} is imported as {what} and as {bound[name]}")
    for module in sorted(order, key=lambda one: one != first):
        part = parts[module]
        for name, text in part.defined.items():
            if name in bound and name not in part.bound:
                raise MergeRefusedError(f"{name} is defined in {module} and imported beside it")
            if name not in taken:
                taken[name] = text
            elif taken[name] == text:
                dropped[module].add(name)
            elif name.startswith("_") and not name.startswith("__"):
                tail = module.rpartition(".")[2].removeprefix("_")
                new = (
                    f"_{tail.upper()}{name}"
                    if name.isupper()
                    else (
                        f"_{''.join(word.capitalize() for word in tail.split('_'))}{name[1:]}"
                        if name[1].isupper()
                        else f"_{tail}{name}"
                    )
                )
                changed[module][name] = new
                taken[new] = text
            else:
                raise MergeRefusedError(f"{name} is defined twice")
    bodies = []
    for module in order:
        part = parts[module]
        names = dict(changed[module])
        modules: dict[str, dict[str, str]] = {}
        for known, what in part.renames.items():
            base, _, name = what.partition(":")
            if name:
                new = changed[base].get(name, name)
                if new != known:
                    names[known] = new
            else:
                modules[known] = changed[base]
        body = part.body
        if dropped[module]:
            body = _without(body, dropped[module])
        bodies.append(renamed(body, names, modules).strip("\n"))
    texts = [parts[first].docstring, *[parts[one].docstring for one in order if one != first]]
    imports = sorted({line for part in parts.values() for line in part.imports})
    plain = set(imports)
    typing_imports = sorted({line for part in parts.values() for line in part.typing_imports} - plain)
    head = [
        '"""'
        + "\n\n".join(filter(None, texts))
        + ('\n"""' if len(list(filter(None, texts))) > 1 or "\n" in texts[0] else '"""'),
        "",
    ]
    head += [line for line in imports if line.startswith("from __future__")]
    head += [line for line in imports if not line.startswith("from __future__")]
    if typing_imports:
        head += ["if TYPE_CHECKING:", *[f"    {line}" for line in typing_imports]]
    return "\n".join(head) + "\n\n" + "\n\n\n".join(filter(None, bodies)) + "\n", changed


def _without(source: str, names: Collection[str]) -> str:
    """Drop top-level statements that define only these names."""
    lines = source.splitlines(keepends=True)
    for node in reversed(ast.parse(source).body):
        own = set(_defined(node))
        if own and own <= set(names):
            first = min([node.lineno, *[one.lineno for one in getattr(node, "decorator_list", [])]])
            while first > 1 and lines[first - 2].startswith("#"):
                first -= 1
            del lines[first - 1 : node.end_lineno]
    return "".join(lines)


def follow(source: str, file: str, group: Mapping[str, str], changed: Mapping[str, Mapping[str, str]]) -> str:
    """Rewrite the imports of one file. `group`: merged module to target, as files import them."""
    tree = ast.parse(source)
    package = _module_of_file(file).rpartition(".")[0]
    uses: dict[str, tuple[str, str]] = {}
    edits: list[tuple[int, int, list[str]]] = []
    others: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                if one.name in group:
                    raise MergeRefusedError(f"{file} imports {one.name} by its whole name")
        if not isinstance(node, ast.ImportFrom):
            others.update(_bindings(node))
            continue
        indent = " " * node.col_offset
        base = _base_of(node, package)
        new, kept = [], []
        for one in node.names:
            known = one.asname or one.name
            whole = f"{base}.{one.name}"
            if base in group:
                name = changed[base].get(one.name, one.name)
                alias = f" as {known}" if known != name else ""
                new.append(f"{indent}from {group[base]} import {name}{alias}\n")
            elif whole in group:
                package, _, tail = group[whole].rpartition(".")
                uses[known] = (whole, tail)
                new.append(f"{indent}from {package} import {tail}\n")
            else:
                kept.append(one.name + (f" as {one.asname}" if one.asname else ""))
                others.add(known)
        if new:
            if kept:
                new.insert(0, f"{indent}from {base} import {', '.join(kept)}\n")
            assert node.end_lineno is not None
            edits.append((node.lineno, node.end_lineno, list(dict.fromkeys(new))))
    clashes = {known for known, (_, tail) in uses.items() if tail != known and {tail, known} & others}
    places = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in uses:
            whole, tail = uses[node.value.id]
            assert node.end_col_offset is not None
            assert node.end_lineno is not None
            new_name = changed[whole].get(node.attr)
            if new_name:
                places.append((node.end_lineno, node.end_col_offset - len(node.attr), node.end_col_offset, new_name))
        if isinstance(node, ast.Name) and node.id in uses and node.id not in clashes:
            assert node.end_col_offset is not None
            places.append((node.lineno, node.col_offset, node.end_col_offset, uses[node.id][1]))
    text = _replaced(source, places)
    lines = text.splitlines(keepends=True)
    for first, last, new in sorted(edits, reverse=True):
        fixed = []
        for line in new:
            tail = line.strip().rpartition(" import ")[2]
            package = line.strip().removeprefix("from ").partition(" import ")[0]
            for known in clashes:
                whole, its = uses[known]
                if tail == its and group[whole] == f"{package}.{tail}":
                    line = line.rstrip("\n") + f" as {known}\n"
                    break
            fixed.append(line)
        lines[first - 1 : last] = fixed
    return "".join(lines)


def _bindings(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return {node.id}
    if isinstance(node, ast.arg):
        return {node.arg}
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    return set()


def _package_of(file: str) -> str:
    module = _module_of_file(file)
    return module if file.endswith("/__init__.py") else module.rpartition(".")[0]


@cache
def _imports_of(source: str, package: str) -> frozenset[str]:
    """Names that may be modules that a source imports when it is imported itself."""
    found = set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.ImportFrom):
                base = _base_of(child, package)
                # The package itself is imported, too, but it is no part of a circle for this.
                found.update([base, *[f"{base}.{one.name}" for one in child.names]])
            elif isinstance(child, ast.Import):
                found.update(one.name for one in child.names)
            visit(child)

    visit(ast.parse(source))
    return frozenset(found)


def closes_circle(group: Collection[str], graph: Mapping[str, Collection[str]]) -> str:
    """Return a way that leads out of the group and back; empty if there is none."""
    start = {out for module in group for out in graph.get(module, ()) if out not in group}
    come: dict[str, str] = dict.fromkeys(start, "")
    queue = list(start)
    while queue:
        at = queue.pop()
        for out in graph.get(at, ()):
            if out in group:
                way = [out, at]
                while come[way[-1]]:
                    way.append(come[way[-1]])
                return " < ".join(way)
            if out not in come:
                come[out] = at
                queue.append(out)
    return ""


def main(arguments: Sequence[str]) -> int:
    """Merge the groups one after the other; print what each became, or why it was left."""
    refused = 0
    for argument in arguments:
        target, _, listed = argument.partition("=")
        modules = listed.split(",")
        try:
            print(merge(target, modules))
        except MergeRefusedError as error:
            refused += 1
            print(f"LEFT {target}: {error}")
    return int(bool(refused))


def merge(target: str, modules: Sequence[str]) -> str:
    """Merge one group in the working tree; return a line about it."""
    files = {imported_as(module): file_of(module, False) for module in modules}
    names = [imported_as(module) for module in modules]
    known = imported_as(target)
    texts = {}
    for name in tracked_files(REPOSITORY, suffixes=_TEXTS):
        if not name.startswith(_HISTORY):
            texts[name] = (REPOSITORY / name).read_text()
    by_module = {_module_of_file(name): name for name in texts if name.endswith(".py") and name.startswith(_OWN)}
    if known in by_module and known not in names:
        raise MergeRefusedError(f"{known} is there, and not of the group")
    graph = {
        module: _imports_of(texts[file], _package_of(file)) & by_module.keys() for module, file in by_module.items()
    }
    way = closes_circle(names, graph)
    if way:
        raise MergeRefusedError(f"it would close the circle {way}")
    source, changed = merged(known, {name: texts[files[name]] for name in names})
    moves = {name: known for name in names if name != known}
    pattern = dotted(moves, set())
    paths = {files[name]: file_of(target, False) for name in names if name != known}
    by_path = re.compile("|".join(re.escape(one) + r"(?![\w/])" for one in sorted(paths, key=len, reverse=True)))
    results = {}
    group = dict.fromkeys(names, known)
    for name, text in texts.items():
        if name in files.values():
            continue
        after = text
        if name.endswith(".py") and any(one.rpartition(".")[2] in text for one in names):
            after = follow(text, name, group, changed)
        after = pattern.sub(lambda found: moves[found.group()], after)
        after = by_path.sub(lambda found: paths[found.group()], after)
        if after != text:
            results[name] = after
    for name, after in results.items():
        (REPOSITORY / name).write_text(after)
    for file in paths:
        (REPOSITORY / file).unlink()
    source = pattern.sub(lambda found: moves[found.group()], source)
    (REPOSITORY / file_of(target, False)).write_text(source)
    subprocess.run(["git", "add", "--all", "."], cwd=REPOSITORY, check=True)
    new = Counter({old: len(ones) for old, ones in changed.items() if ones})
    return f"{target}: {len(modules)} modules, {len(results)} files follow" + (
        f", private names {dict(changed)}" if new else ""
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
