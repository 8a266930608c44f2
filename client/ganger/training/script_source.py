"""The source of a script: where it reads its loaders, what its statements set and call, which of them may have run."""

from __future__ import annotations

import ast
import linecache
import os
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any, Callable, Union

from ganger.training.script_frames import IS_GENERATOR, Path, is_own, is_own_file, is_standard_file

LOOPS = (ast.For, ast.While)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# What a statement has statements in; Python 3.9 has no match_case.
STATEMENTS: tuple[Any, ...] = (ast.stmt, ast.ExceptHandler, getattr(ast, "match_case", ast.stmt))
Block = Union[ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda]
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
    """Where a script reads its loaders: the functions and lines that lead there.

    `paths` lead to all passes so far, `current` to the present one, in `frames`. Raises NotHarmlessError."""

    def __init__(self, paths: Iterable[Path], current: Path, frames: list[Any]) -> None:
        self.values: dict[str, Any] = {}
        for frame in frames:
            self.values.update(frame.f_globals)
            self.values.update(frame.f_locals)
        self.functions: dict[str, list[Any]] = {}
        self.files: dict[str, ast.Module] = {}
        # Lines of passes, and of calls that lead to them, in each function.
        self.lines: dict[Block, set[int]] = {}
        self.now: dict[Block, int] = {}
        # The loops whose bodies are bodies of passes; True: several passes may be read in one.
        self.regions: dict[Any, bool] = {}
        # Set by statements outside of a loop that read a pass.
        self.read_elsewhere: set[str] = set()
        names = [name for name in list(sys.modules) if is_own(name)]
        if len(names) > MOST_MODULES:
            raise NotHarmlessError(f"it has more than {MOST_MODULES} modules of its own")
        for name in names:
            file = getattr(sys.modules[name], "__file__", None)
            if file and file.endswith(".py"):
                self._tree(file)
        for path in paths:
            self._add(path, is_current=path == current)

    def _tree(self, file: str) -> ast.Module:
        if file not in self.files:
            try:
                tree = self.files[file] = ast.parse("".join(linecache.getlines(file)))
            except (SyntaxError, ValueError) as problem:
                raise NotHarmlessError(f"its source cannot be read ({file})") from problem
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
            if isinstance(node, FUNCTIONS):
                first = min(one.lineno for one in (node, *getattr(node, "decorator_list", ())))
                if (getattr(node, "name", "<lambda>"), first) == (code.co_name, code.co_firstlineno):
                    return node
        raise NotHarmlessError(f"the source of {code.co_name} ({code.co_filename}) cannot be found")

    def _add(self, path: Path, *, is_current: bool) -> None:
        is_found = is_several = False
        for code, line in path:
            if code.co_name in ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>"):
                continue
            is_generator = bool(code.co_flags & IS_GENERATOR)
            if not is_own_file(code.co_filename):
                package = code.co_filename.rpartition("-packages" + os.sep)[2].partition(os.sep)[0]
                is_caller = is_found and (is_standard_file(code.co_filename) or package in _CALLERS)
                # A generator of a library: a progress bar.
                if not is_caller and (is_found or not is_generator):
                    raise NotHarmlessError(f"its passes are made by {package or code.co_name}")
                continue
            node = self._node(code)
            self.lines.setdefault(node, set()).add(line)
            if is_current:
                self.now[node] = line
            if not is_found:
                self._note_region(node, line, is_several)
                is_several |= is_generator
                is_found = not is_generator

    def _note_region(self, node: Block, line: int, is_several: bool) -> None:
        around = innermost_loop(node, line)
        statements = [at for at in ast.walk(node) if isinstance(at, ast.stmt) and not hasattr(at, "body")]
        statements = [at for at in statements if contains(at, line)]
        if isinstance(around, ast.For) and line <= (around.iter.end_lineno or 0):
            self.regions[around] = self.regions.get(around, False) or is_several
        elif around and not any(isinstance(inner, COMPREHENSIONS) for at in statements for inner in ast.walk(at)):
            self.regions[around] = True
        else:
            # Read outside of a loop, or in a comprehension: what it comes to is a result.
            for statement in statements:
                self.read_elsewhere.update(stored(statement))

    def between(self) -> list[tuple[Any, Block]]:
        """Return the statements that may have run since the first pass began, each with its function."""
        return [
            (node, block)
            for block, lines in self.lines.items()
            for node in _since(body_of(block), lines, self.now.get(block))
        ]

    def place_of(self, node: Any) -> str:
        file = next((os.path.basename(file) for file, tree in self.files.items() if node in ast.walk(tree)), "?")
        return f"{file}:{node.lineno}"


def body_of(block: Any) -> list[Any]:
    return block.body if isinstance(block.body, list) else [block.body]


def contains(node: Any, line: int) -> bool:
    return bool(node.lineno <= line <= node.end_lineno)


def _since(body: list[Any], lines: set[int], now: int | None) -> Iterator[Any]:
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
                yield from _since(getattr(node, field, []), lines if is_first else {node.lineno, *lines}, now)
        else:
            yield node
        if is_now:
            return


def walked(nodes: Iterable[ast.AST], is_closed: Callable[[ast.AST], bool]) -> Iterator[Any]:
    """Yield the nodes and those in them, but none that is closed, nor what is in it."""
    for node in nodes:
        if not is_closed(node):
            yield node
            yield from walked(ast.iter_child_nodes(node), is_closed)


def loops_in(block: Any) -> list[Any]:
    inside = walked(body_of(block), lambda node: isinstance(node, (*FUNCTIONS, ast.ClassDef)))
    return [node for node in inside if isinstance(node, LOOPS)]


def innermost_loop(block: Any, line: int) -> Any:
    """Return the loop of a function that is around the line; None for none."""
    return max((loop for loop in loops_in(block) if contains(loop, line)), key=lambda loop: loop.lineno, default=None)


def expressions_of(node: Any) -> Iterator[Any]:
    """The nodes of a statement, without those of statements in it."""
    return walked(ast.iter_child_nodes(node), lambda inner: isinstance(inner, STATEMENTS))


def in_scope(block: Any, name: str) -> Iterator[Any]:
    """The nodes of a function, with those of functions in it that set the variable `name` of its own."""

    def is_apart(node: ast.AST) -> bool:
        shared = (inner for inner in ast.walk(node) if isinstance(inner, (ast.Global, ast.Nonlocal)))
        return isinstance(node, FUNCTIONS) and not any(name in inner.names for inner in shared)

    return walked(body_of(block), is_apart)


def called(call: ast.Call) -> str:
    return name_of(call.func).lstrip(".")


def given_to(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def name_of(node: Any) -> str:
    """Return the name of a variable, or of an attribute with a dot before it; '' of all else."""
    return node.id if isinstance(node, ast.Name) else f".{node.attr}" if isinstance(node, ast.Attribute) else ""


def stored_target(target: Any) -> set[str]:
    if isinstance(target, (ast.Subscript, ast.Starred)):
        return stored_target(target.value)
    if isinstance(target, (ast.Tuple, ast.List)):
        return {name for part in target.elts for name in stored_target(part)}
    return {name_of(target)} - {""}


def stored(node: Any) -> set[str]:
    """What a statement sets, without the statements in it."""
    targets: list[Any] = [item.optional_vars for item in node.items] if isinstance(node, ast.With) else []
    targets += node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {name for target in targets for name in stored_target(target)}


def stored_deep(node: ast.AST) -> set[str]:
    kinds = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr)
    return {name for inner in ast.walk(node) if isinstance(inner, kinds) for name in stored(inner)}


def changed_base(node: ast.AST, values: dict[str, Any]) -> set[str]:
    """The name of an object that a call may change; none for a number or a string."""
    while isinstance(node, (ast.Subscript, ast.Call)):
        node = node.value if isinstance(node, ast.Subscript) else node.func
    value = values.get(name_of(node))
    kinds = (int, float, str, bytes, types.ModuleType, types.FunctionType, type)
    return set() if isinstance(value, kinds) and value == value else {name_of(node)} - {""}


def changed_in(node: ast.AST, values: dict[str, Any]) -> set[str]:
    """What the body of a pass may change: what it sets, and the objects whose methods it calls or that it hands on."""
    found = stored_deep(node)
    for inner in ast.walk(node):
        if isinstance(inner, (ast.For, ast.comprehension)):
            found |= stored_target(inner.target)
        if isinstance(inner, ast.withitem):
            found |= stored_target(inner.optional_vars)
        if isinstance(inner, ast.Call):
            if isinstance(inner.func, ast.Attribute) and called(inner) not in ("to", "format", "cuda", "cpu"):
                found |= changed_base(inner.func.value, values)
            if called(inner) not in _LEAVES_ALONE:
                for one in given_to(inner):
                    if isinstance(one, (ast.Name, ast.Attribute)):
                        found |= changed_base(one, values)
    return found


def values_of(node: Any, name: str) -> list[Any]:
    """What an assignment gives to `name`, part by part where it assigns tuples."""
    if not isinstance(node, ast.Assign):
        return [node.value]
    found: list[Any] = []
    for target in node.targets:
        if isinstance(target, (ast.Tuple, ast.List)) and isinstance(node.value, (ast.Tuple, ast.List)):
            found += [value for part, value in zip(target.elts, node.value.elts) if name in stored_target(part)]
        elif name in stored_target(target):
            found.append(node.value)
    return found


def is_number(node: Any) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float))


def is_count(node: Any) -> bool:
    """Return whether the expression is a positive number whatever the batch: a constant, a length, a size."""
    if is_number(node):
        return bool(node.value > 0)
    if isinstance(node, ast.Call):
        return called(node) in ("len", "size", "numel")
    return isinstance(node, ast.Subscript) and name_of(node.value) == ".shape"


def is_sure_index(node: Any) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return isinstance(node.operand, ast.Constant) and node.operand.value == 1
    is_first_or_key = isinstance(node, ast.Constant) and (node.value == 0 or isinstance(node.value, str))
    return isinstance(node, ast.Slice) or is_first_or_key
