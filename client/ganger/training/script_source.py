"""The source of a script: where it reads its loaders, what its statements set and call, which of them may have run."""

from __future__ import annotations

import ast
import linecache
import os
import sys
import types
from collections.abc import Iterator
from typing import Any, Union

from ganger.training.replay import Path, is_own, is_own_file, is_standard_file

LOOPS = (ast.For, ast.While)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
Block = Union[ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda]
_GENERATOR = 0x20
MOST_MODULES = 200
# Frames of these packages only call the script's main function.
_CALLERS = frozenset({"absl", "click", "fire", "hydra", "typer", "ganger", "torch"})
# What is handed to them stays as it is.
_LEAVES_ALONE = frozenset(
    {"print", "len", "str", "isinstance", "format", "range", "to", "iter", "enumerate", "zip", "sum", "min", "max"}
    | {"float", "int", "tqdm", "trange", "list", "tuple"}
)


class NotHarmlessError(Exception):
    """A script cannot be shown to go the same way in a second run; with the reason."""


class Passes:
    """Where a script reads its loaders: the functions and lines that lead there. `frames` are the script's."""

    def __init__(self, frames: list[Any]) -> None:
        self.values: dict[str, Any] = {}
        for frame in frames:
            self.values.update(frame.f_globals)
            self.values.update(frame.f_locals)
        self.functions: dict[str, list[Any]] = {}
        self.files: dict[str, ast.Module] = {}
        # lines of passes, and of calls that lead to them, in each function
        self.lines: dict[Block, set[int]] = {}
        self.now: dict[Block, int] = {}
        self._names: dict[Block, str] = {}
        # the loops whose bodies are bodies of passes; True: several passes may be read in one
        self.regions: dict[ast.AST, bool] = {}
        # set by statements outside of a loop that read a pass
        self.read_elsewhere: set[str] = set()
        names = [name for name in list(sys.modules) if is_own(name)]
        if len(names) > MOST_MODULES:
            raise NotHarmlessError(f"it has more than {MOST_MODULES} modules of its own")
        for name in names:
            file = getattr(sys.modules[name], "__file__", None)
            if file and file.endswith(".py"):
                self._tree(file)

    # -- where the passes are

    def _tree(self, file: str) -> ast.Module:
        if file not in self.files:
            try:
                tree = ast.parse("".join(linecache.getlines(file)))
            except (SyntaxError, ValueError) as problem:
                raise NotHarmlessError(f"its source cannot be read ({file})") from problem
            self.files[file] = tree
            for node in ast.walk(tree):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    self.functions.setdefault(node.name, []).append(node)
                elif isinstance(node, ast.ClassDef):
                    makers = [inner for inner in node.body if getattr(inner, "name", "") in ("__init__", "__call__")]
                    self.functions.setdefault(node.name, []).extend(makers)
        return self.files[file]

    def _node(self, code: types.CodeType) -> Block:
        tree = self._tree(code.co_filename)
        if code.co_name == "<module>" and tree.body:
            return tree
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == code.co_name:
                if min([node.lineno, *(one.lineno for one in node.decorator_list)]) == code.co_firstlineno:
                    return node
            elif isinstance(node, ast.Lambda) and code.co_name == "<lambda>" and node.lineno == code.co_firstlineno:
                return node
        raise NotHarmlessError(f"the source of {code.co_name} ({code.co_filename}) cannot be found")

    def add(self, path: Path, *, is_current: bool) -> None:
        is_found = is_several = False
        for code, line in path:
            if code.co_name in ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>"):
                continue
            if not is_own_file(code.co_filename):
                self._pass_library(code, is_found)
                continue
            node = self._node(code)
            self.lines.setdefault(node, set()).add(line)
            self._names[node] = os.path.basename(code.co_filename)
            if is_current:
                self.now[node] = line
            if not is_found:
                self._note_region(node, line, is_several)
                is_several |= bool(code.co_flags & _GENERATOR)
                is_found = not code.co_flags & _GENERATOR

    def _pass_library(self, code: types.CodeType, is_found: bool) -> None:
        if not is_found and code.co_flags & _GENERATOR:
            return  # a progress bar
        package = code.co_filename.rpartition("-packages" + os.sep)[2].partition(os.sep)[0]
        if not (is_found and (is_standard_file(code.co_filename) or package in _CALLERS)):
            raise NotHarmlessError(f"its passes are made by {package or code.co_name}")

    def _note_region(self, node: Block, line: int, is_several: bool) -> None:
        around = [inner for inner in loops_in(node) if inner.lineno <= line <= (inner.end_lineno or 0)]
        around.sort(key=lambda loop: loop.lineno)
        if around and isinstance(around[-1], ast.For) and line <= (around[-1].iter.end_lineno or 0):
            self.regions[around[-1]] = self.regions.get(around[-1], False) or is_several
        elif around and not has_comprehension(node, line):
            self.regions[around[-1]] = True
        else:
            # read outside of a loop, or in a comprehension: what it comes to is a result
            for statement in statements_at(node, line):
                self.read_elsewhere.update(stored(statement))

    def between(self, block: Block) -> list[Any]:
        """The statements of a function that may have run since its first pass began."""
        return list(since(body_of(block), self.lines[block], self.now.get(block)))

    def at(self, node: Any, block: Any) -> str:
        file = self._names.get(block)
        if file is None:
            file = next((os.path.basename(f) for f, tree in self.files.items() if block in ast.walk(tree)), "?")
        return f"{file}:{node.lineno}"


def body_of(block: Any) -> list[Any]:
    return block.body if isinstance(block.body, list) else [block.body]


def loops_in(block: Any) -> list[Any]:
    found: list[Any] = []
    open_ = list(body_of(block))
    while open_:
        node = open_.pop()
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            continue
        if isinstance(node, LOOPS):
            found.append(node)
        open_.extend(ast.iter_child_nodes(node))
    return found


def is_generator(block: Any) -> bool:
    return any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in ast.walk(block))


def statements_at(block: Any, line: int) -> list[Any]:
    """The statements without a body that are on the line."""
    return [
        node
        for node in ast.walk(block)
        if isinstance(node, ast.stmt)
        and not hasattr(node, "body")
        and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]


def has_comprehension(block: Any, line: int) -> bool:
    return any(isinstance(node, COMPREHENSIONS) for at in statements_at(block, line) for node in ast.walk(at))


def contains(node: Any, line: int) -> bool:
    return bool(node.lineno <= line <= (node.end_lineno or node.lineno))


def since(body: list[Any], lines: set[int], now: int | None) -> Iterator[Any]:
    """The statements of a block from the first pass on, and to the present line; all of a loop around them."""
    has_begun = False
    for node in body:
        is_first = not has_begun and any(contains(node, line) for line in lines)
        has_begun = has_begun or is_first
        if not has_begun:
            continue
        is_now = now is not None and contains(node, now)
        if (is_first or is_now) and isinstance(node, (ast.If, ast.With, ast.Try)):
            for field in ("body", "orelse", "finalbody"):
                yield from since(getattr(node, field, []), lines if is_first else {node.lineno, *lines}, now)
        else:
            yield node
        if is_now:
            return


def outside_regions(node: Any, regions: Any) -> Iterator[Any]:
    if node in regions or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return
    yield node
    for inner in ast.iter_child_nodes(node):
        yield from outside_regions(inner, regions)


def expressions_of(node: Any) -> Iterator[Any]:
    """The expressions of a statement, without those of statements in it."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, (ast.stmt, ast.ExceptHandler)) or type(inner).__name__ == "match_case":
            continue
        if isinstance(inner, (ast.expr, ast.withitem, ast.keyword, ast.comprehension)):
            yield inner
        yield from expressions_of(inner)


def in_scope(block: Any, name: str) -> Iterator[Any]:
    """The nodes of a function, with those of functions in it that set the variable `name` of its own."""
    open_ = list(body_of(block))
    while open_:
        node = open_.pop()
        if isinstance(node, FUNCTIONS):
            shared = [inner for inner in ast.walk(node) if isinstance(inner, (ast.Global, ast.Nonlocal))]
            if not any(name in inner.names for inner in shared):
                continue
        yield node
        open_.extend(ast.iter_child_nodes(node))


def called(call: ast.Call) -> str:
    if isinstance(call.func, ast.Name):
        return call.func.id
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def stored_target(target: ast.AST) -> set[str]:
    if isinstance(target, ast.Name):
        return {target.id}
    if isinstance(target, ast.Attribute):
        return {f".{target.attr}"}
    if isinstance(target, (ast.Subscript, ast.Starred)):
        return stored_target(target.value)
    if isinstance(target, (ast.Tuple, ast.List)):
        return {name for part in target.elts for name in stored_target(part)}
    return set()


def stored(node: Any) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {name for target in targets if target is not None for name in stored_target(target)}


def stored_deep(node: ast.AST) -> set[str]:
    kinds = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr)
    return {name for inner in ast.walk(node) if isinstance(inner, kinds) for name in stored(inner)}


def changed_base(node: ast.AST, values: dict[str, Any]) -> set[str]:
    """The name of an object that a call may change; none for a number or a string."""
    while isinstance(node, (ast.Subscript, ast.Call)):
        node = node.value if isinstance(node, ast.Subscript) else node.func
    if isinstance(node, ast.Attribute):
        return {f".{node.attr}"}
    if not isinstance(node, ast.Name):
        return set()
    value = values.get(node.id)
    is_fixed = (
        isinstance(value, (int, float, str, bytes, types.ModuleType, types.FunctionType, type)) and value == value
    )
    return set() if is_fixed else {node.id}


def changed_in(node: ast.AST, values: dict[str, Any]) -> set[str]:
    """What the body of a pass may change: what it sets, and the objects whose methods it calls or that it hands on."""
    found = stored_deep(node)
    for inner in ast.walk(node):
        if isinstance(inner, (ast.For, ast.comprehension)):
            found |= stored_target(inner.target)
        if isinstance(inner, ast.withitem) and inner.optional_vars is not None:
            found |= stored_target(inner.optional_vars)
        if isinstance(inner, ast.Call):
            if isinstance(inner.func, ast.Attribute) and called(inner) not in ("to", "format", "cuda", "cpu"):
                found |= changed_base(inner.func.value, values)
            if called(inner) not in _LEAVES_ALONE:
                for one in [*inner.args, *(keyword.value for keyword in inner.keywords)]:
                    if isinstance(one, (ast.Name, ast.Attribute)):
                        found |= changed_base(one, values)
    return found


def values_of(node: Any, name: str) -> list[Any]:
    """What an assignment gives to `name`, part by part where it assigns tuples."""
    if isinstance(node, ast.Assign):
        found: list[Any] = []
        for target in node.targets:
            if isinstance(target, (ast.Tuple, ast.List)) and isinstance(node.value, (ast.Tuple, ast.List)):
                pairs = zip(target.elts, node.value.elts)
                found += [value for part, value in pairs if name in stored_target(part)]
            elif name in stored_target(target):
                found.append(node.value)
        return found
    return [node.value]


def is_number(node: Any) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float))


def is_count(node: Any) -> bool:
    """Return whether the expression is a positive number whatever the batch: a constant, a length, a size."""
    if is_number(node):
        return bool(node.value > 0)
    if isinstance(node, ast.Call):
        return called(node) in ("len", "size", "numel")
    return isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "shape"


def is_sure_index(node: Any) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return isinstance(node.operand, ast.Constant) and node.operand.value == 1
    if isinstance(node, (ast.Slice, ast.Name, ast.Attribute)):
        return isinstance(node, ast.Slice)
    return isinstance(node, ast.Constant) and (node.value == 0 or isinstance(node.value, str))
