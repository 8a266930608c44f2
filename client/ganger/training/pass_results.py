"""Whether what a script does between its passes depends on what the passes come to.

A second run gives one batch to every pass that is over, so sums, means, lists and weights are others until the state is
put back. That does no harm where such values are only computed, printed and kept. It leads elsewhere where they decide:
early stopping, a check that raises, an evaluation made only for a better model, a variable that a pass defines only now
and then, a mean over a list that must not be so short.

This reads the source of the functions that lead to the passes. A value is a result if the body of a pass sets it, or if
it is computed from one. Of names and attributes, only the name counts. What is not known to be harmless is refused.
One decision is let through: a counter that ends the loop which is still running, `if step >= steps: break` or `while
step < steps`. It is never further in a second run than it was in the first.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ganger.training.script_frames import Path, package_of
from ganger.training.script_source import (
    DEFINITIONS,
    FUNCTIONS,
    LOOPS,
    STATEMENTS,
    NotHarmlessError,
    Passes,
    body_of,
    called,
    changed_base,
    changed_in,
    contains,
    expressions_of,
    given_to,
    in_scope,
    innermost_loop,
    is_count,
    is_number,
    is_sure_index,
    loops_in,
    name_of,
    stored,
    stored_deep,
    stored_target,
    values_of,
    walked,
)

# Calls that report or keep a value, whatever it is.
_REPORTS = frozenset(
    {"print", "write", "writerow", "writelines", "flush", "log", "log_metrics", "info", "debug", "warning", "error"}
    | {"critical", "add_scalar", "add_scalars", "set_description", "set_description_str", "set_postfix", "format"}
    | {"set_postfix_str", "append", "appendleft", "extend", "state_dict", "item", "save", "dump", "dumps", "clone"}
    | {"detach", "cpu", "float", "int", "str", "round", "abs", "min", "max", "sum", "len", "bool", "items", "values"}
    | {"keys", "get", "hex", "tolist", "copy", "isnan", "isinf", "isfinite", "repr", "train", "eval", "zero_grad"}
)
# The same, but they change what the script trains: not where a result decides whether they are called.
_HARMLESS = (
    _REPORTS
    | {"step", "update", "parameters", "named_parameters", "get_last_lr", "list", "tuple", "dict", "set", "sorted"}
    | {"zip", "enumerate", "range", "isinstance", "any", "all", "deepcopy", "load_state_dict", "barrier", "all_reduce"}
    | {"reset", "close", "read", "add", "deque", "Counter"}
)
_RAISING = frozenset({"pop", "popitem", "remove", "index", "exit", "_exit", "abort", "quit", "kill"})
_EXITS = frozenset({"exit", "_exit", "abort", "quit"})


def decided_by_results(paths: Iterable[Path], current: Path, frames: list[Any]) -> str:
    """Return what a second run may decide otherwise than the first; '' if nothing.

    `paths` lead to all passes so far, `current` to the present one, in `frames`.
    """
    try:
        _Results(paths, current, frames).examine()
    except NotHarmlessError as reason:
        return str(reason)
    except RecursionError:
        return "its source is too deeply nested to be understood"
    return ""


class _Results(Passes):
    """What depends on the results of the passes."""

    def __init__(self, paths: Iterable[Path], current: Path, frames: list[Any]) -> None:
        super().__init__(paths, current, frames)
        self._results = set(self.read_elsewhere)
        # Functions that are given results, and of them those to check.
        self._examined: set[Any] = set()
        self._followed: set[Any] = set()
        self._pending: list[Any] = []
        # Set where a result decides whether they are.
        self._guarded: set[str] = set()
        self._always: set[str] = set()
        self._seldom: set[str] = set()

    def examine(self) -> None:
        """Raise NotHarmlessError where a second run may decide otherwise."""
        for region in self.regions:
            for inner in region.body:
                self._results |= changed_in(inner, self.values)
            if isinstance(region, ast.For):
                self._results |= stored_target(region.target)
        before = -1
        while len(self._results) != before:
            before = len(self._results)
            for statement, _ in self.between():
                self._spread(statement)
            for function in list(self._examined):
                for statement in body_of(function):
                    self._spread(statement)
        for region, is_several in self.regions.items():
            self._check_region(region, is_several)
        self._check_definitions()
        for statement, block in self.between():
            self._check(statement, block)
        while self._pending:
            function = self._pending.pop()
            for statement in body_of(function):
                self._check(statement, function, is_leaf=True)

    # -- what depends on them

    def _is_result(self, node: ast.AST | None) -> bool:
        return node is not None and any(
            name_of(inner) in self._results or (isinstance(inner, ast.Call) and self._leads_to_pass(inner))
            for inner in walked([node], lambda one: isinstance(one, DEFINITIONS))
        )

    def _leads_to_pass(self, call: ast.Call) -> bool:
        return any(getattr(block, "name", None) == called(call) for block in self.lines)

    def _spread(self, node: ast.AST, is_guarded: bool = False) -> None:
        if node in self.regions or isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            return
        if isinstance(node, (ast.If, ast.While)):
            is_guarded = is_guarded or self._is_result(node.test)
        elif isinstance(node, ast.For):
            is_guarded = is_guarded or self._is_result(node.iter)
            if is_guarded:
                self._results |= stored(node)
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
            if is_guarded:
                self._guarded |= stored(node)
            if is_guarded or self._is_result(node.value):
                self._results |= stored(node)
        elif isinstance(node, ast.withitem) and (is_guarded or self._is_result(node.context_expr)):
            self._results |= stored_target(node.optional_vars)
        elif isinstance(node, ast.Call):
            self._spread_call(node)
        for inner in ast.iter_child_nodes(node):
            self._spread(inner, is_guarded)

    def _spread_call(self, call: ast.Call) -> None:
        tainted = [self._is_result(one) for one in given_to(call)]
        if not any(tainted) and not self._is_result(call.func):
            return
        if any(tainted) and isinstance(call.func, ast.Attribute) and called(call) not in ("format", "write", "print"):
            self._results |= changed_base(call.func.value, self.values)
        for function in self.functions.get(called(call), ()):
            self._examined.add(function)
            names = [one.arg for one in [*function.args.posonlyargs, *function.args.args]]
            if names[:1] in (["self"], ["cls"]):
                names = names[1:]
            by_keyword = zip((keyword.arg for keyword in call.keywords), tainted[len(call.args) :])
            self._results |= {name for name, is_result in (*zip(names, tainted), *by_keyword) if is_result and name}

    # -- what is not harmless

    def _fail(self, node: Any, what: str) -> None:
        raise NotHarmlessError(
            f"{what} at {self.place_of(node)} depends on results of its passes, which a second run lacks"
        )

    def _check_region(self, region: Any, is_several: bool) -> None:
        block: Any = next(block for block in self.lines if region in loops_in(block))
        if region.orelse and any(isinstance(inner, ast.Break) for inner in ast.walk(region)):
            self._fail(region, "the else of the loop")
        if isinstance(region, ast.While):
            self._check_ending_test(region.test, region, region, block, is_leaving=False)
        yields = any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in ast.walk(block))
        if isinstance(block, ast.Module) or not yields:
            for inner in region.body:
                self._check_leaving(inner, region, block, is_several, None)

    def _check_leaving(self, node: Any, region: Any, block: Any, is_several: bool, test: ast.expr | None) -> None:
        """A way out of the loop around a pass, or of the script, in the body of the pass."""
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            return
        if isinstance(node, ast.ExceptHandler) and "StopIteration" in ast.dump(node.type or ast.Pass()):
            return
        is_exit = isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and called(node) in _EXITS)
        is_out = isinstance(node, ast.Return) or (isinstance(node, ast.Break) and is_several)
        if is_exit or (is_out and not is_several):
            self._fail(node, "what ends the pass")
        if is_out:
            self._check_ending_test(test, region, node, block, is_leaving=True)
        if isinstance(node, ast.Assert):
            assigned = {name for inner in region.body for name in stored_deep(inner)}
            if any(isinstance(inner, ast.Name) and inner.id in assigned for inner in ast.walk(node.test)):
                self._fail(node, "a check")
        if isinstance(node, LOOPS):
            is_several = is_several and not any(isinstance(inner, ast.Break) for inner in ast.walk(node))
        if isinstance(node, ast.If):
            test = node.test
        for inner in ast.iter_child_nodes(node):
            self._check_leaving(inner, region, block, is_several, test)

    def _check_ending_test(self, test: ast.expr | None, loop: Any, node: Any, block: Any, *, is_leaving: bool) -> None:
        is_running = block in self.now and contains(loop, self.now[block])
        if test is None or not is_running or not self._counts(test, is_leaving):
            self._fail(node, "what ends the loop")

    def _counts(self, test: ast.expr, is_leaving: bool) -> bool:
        """Return whether `test` holds no sooner (`is_leaving`), or no less long, in a second run."""
        if isinstance(test, ast.BoolOp):
            return all(self._counts(one, is_leaving) for one in test.values)
        if not self._is_result(test):
            return True
        if not isinstance(test, ast.Compare) or len(test.ops) != 1:
            return False
        left, right = test.left, test.comparators[0]
        if self._is_result(right):
            left, right, is_leaving = right, left, not is_leaving
        kinds = (ast.Gt, ast.GtE) if is_leaving else (ast.Lt, ast.LtE)
        if self._is_result(right) or not isinstance(test.ops[0], kinds):
            return False
        if isinstance(left, ast.BinOp) and isinstance(left.op, ast.Add) and isinstance(left.right, ast.Constant):
            left = left.left
        return self._is_counter(name_of(left))

    def _is_counter(self, name: str) -> bool:
        """Return whether every batch adds to the value, and nothing else is done to it but to begin anew."""
        if name == ".last_epoch":
            return True
        if not name or name in self._guarded:
            return False
        for region in self.regions:
            for inner in (choice for choice in ast.walk(region) if isinstance(choice, ast.If)):
                if name in stored_deep(inner) and not any(isinstance(part, ast.Mod) for part in ast.walk(inner.test)):
                    return False
        return all(_counts_up(inner, name) for inner in self._where_set(name))

    def _where_set(self, name: str) -> Iterator[Any]:
        """Nodes among which are all that may set the variable, or the attribute, of that name."""
        if name.startswith("."):
            for tree in self.files.values():
                yield from ast.walk(tree)
        else:
            for block in {*self.lines, *self._examined}:
                yield from in_scope(block, name)

    def _check_definitions(self) -> None:
        """A name that is only set now and then in passes may be missing after one batch."""
        for block in self.lines:
            self._sort_definitions(body_of(block), False, False)
            if not isinstance(block, ast.Module):
                self._always.update(one.arg for one in ast.walk(block.args) if isinstance(one, ast.arg))
        for statement, _ in self.between():
            for inner in walked([statement], lambda node: node in self.regions or isinstance(node, DEFINITIONS)):
                is_read = isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load)
                if is_read and inner.id in self._seldom - self._always:
                    self._fail(inner, f"whether {inner.id} is defined")

    def _sort_definitions(self, body: list[Any], is_inside: bool, is_seldom: bool) -> None:
        for node in body:
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.For, ast.With)):
                (self._seldom if is_seldom else self._always).update(stored(node))
            is_choice = isinstance(node, (ast.If, ast.While, ast.Try)) and node not in self.regions
            by_result = isinstance(node, ast.If) and self._is_result(node.test)
            inside = is_inside or node in self.regions
            under = is_seldom or (is_choice and (is_inside or by_result))
            handled = [handler.body for handler in getattr(node, "handlers", [])]
            for inner in (*(getattr(node, field, []) for field in ("body", "orelse", "finalbody")), *handled):
                self._sort_definitions(inner, inside, under)

    def _check(self, node: Any, block: Any, *, is_leaf: bool = False, is_guarded: bool = False) -> None:
        """Raise if `node`, between two passes, may do something else, or fail, with other results."""
        if node in self.regions and is_guarded:
            self._fail(node, "whether a pass is made")
        if node in self.regions or isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            return
        if isinstance(node, ast.If) and self._is_result(node.test) and not is_guarded:
            if not self._ends_running_loop(node, block):
                self._check_expression(node.test, is_guarded)
                for inner in [*node.body, *node.orelse]:
                    self._check(inner, block, is_leaf=is_leaf, is_guarded=True)
            return
        if isinstance(node, ast.While) and self._is_result(node.test):
            self._check_ending_test(node.test, node, node, block, is_leaving=False)
        is_guarded = is_guarded or (isinstance(node, ast.For) and self._is_result(node.iter))
        if isinstance(node, ast.Assert) and self._is_result(node.test):
            self._fail(node, "a check")
        if is_guarded and isinstance(node, (ast.With, ast.Try, ast.Delete, ast.Import, ast.ImportFrom, ast.Global)):
            self._fail(node, "what is done")
        is_way_out = isinstance(node, (ast.Break, ast.Continue, ast.Return)) and not is_leaf
        if is_guarded and (isinstance(node, ast.Raise) or is_way_out):
            self._fail(node, "where it goes on")
        self._check_expression(node, is_guarded)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, STATEMENTS):
                self._check(child, block, is_leaf=is_leaf, is_guarded=is_guarded or type(node).__name__ == "Match")

    def _ends_running_loop(self, node: ast.If, block: Any) -> bool:
        last = node.body[-1]
        if node.orelse or not isinstance(last, (ast.Break, ast.Return)) or not self._counts(node.test, True):
            return False
        if block not in self.now or isinstance(last, ast.Return):
            return block in self.now
        loop = innermost_loop(block, node.lineno)
        return loop is not None and contains(loop, self.now[block])

    def _check_expression(self, node: Any, is_guarded: bool) -> None:
        for inner in expressions_of(node):
            for call in self._calls_by_result(inner):
                self._check_call(call, True)
            if isinstance(inner, ast.Call):
                self._check_call(inner, is_guarded)
            elif isinstance(inner, ast.BinOp) and self._may_fail(inner):
                self._fail(inner, "a division")
            elif isinstance(inner, ast.Subscript) and isinstance(inner.ctx, ast.Load) and self._is_result(inner.value):
                if not is_sure_index(inner.slice):
                    self._fail(inner, "an index")
            elif isinstance(inner, (ast.Yield, ast.YieldFrom, ast.Await)) and is_guarded:
                self._fail(inner, "what is done")

    def _calls_by_result(self, node: ast.AST) -> list[ast.Call]:
        """The calls in an expression that are made or not by a result: `value < best and stop()`."""
        parts: list[ast.AST] = []
        if isinstance(node, ast.IfExp) and self._is_result(node.test):
            parts = [node.body, node.orelse]
        elif isinstance(node, ast.BoolOp):
            first = next((at for at, value in enumerate(node.values) if self._is_result(value)), len(node.values))
            parts = [*node.values[first + 1 :]]
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp)):
            decides = [one for part in node.generators for one in (part.iter, *part.ifs)]
            parts = [node.elt] if any(map(self._is_result, decides)) else []
        return [call for part in parts for call in ast.walk(part) if isinstance(call, ast.Call)]

    def _may_fail(self, node: ast.BinOp) -> bool:
        if not isinstance(node.op, (ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)) or not self._is_result(node.right):
            return False
        is_text = isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)
        return not (is_text or isinstance(node.left, ast.JoinedStr) or self._is_never_zero(node.right))

    def _is_never_zero(self, node: ast.expr) -> bool:
        """Return whether every batch adds to the value, or it is the length of what every batch adds to."""
        if isinstance(node, ast.Call):
            if called(node) == "len" and len(node.args) == 1:
                return self._is_never_zero(node.args[0]) or not self._is_result(node.args[0])
            return called(node) == "max" and any(is_number(one) for one in node.args)
        name = name_of(node)
        for statement in (statement for region in self.regions for statement in region.body if name):
            if isinstance(statement, ast.AugAssign) and name in stored(statement):
                return isinstance(statement.op, ast.Add) and is_count(statement.value)
            call: Any = getattr(statement, "value", None)
            is_append = isinstance(call, ast.Call) and name_of(call.func) == ".append"
            if is_append and name in changed_base(call.func.value, {}):
                return True
        return False

    def _check_call(self, call: ast.Call, is_guarded: bool) -> None:
        name = called(call)
        if is_guarded and name in _EXITS:
            self._fail(call, "what ends the script")
        if not is_guarded and not any(map(self._is_result, (call.func, *given_to(call)))):
            self._follow(call, only_if_results=True)
        elif self._leads_to_pass(call):
            if is_guarded:
                self._fail(call, "whether a pass is made")
        elif name in _RAISING:
            self._fail(call, f"{name}()")
        elif not self._follow(call, only_if_results=False):
            is_harmless = name in _REPORTS if is_guarded else name in _HARMLESS or self._is_of_torch(call)
            if not is_harmless:
                self._fail(call, f"{name or 'a call'}()")

    def _follow(self, call: ast.Call, *, only_if_results: bool) -> bool:
        """Have the functions of the script that are called examined too; returns whether there are any."""
        functions = self.functions.get(called(call), [])
        for function in functions:
            is_known = function in self._followed or function in self.lines
            if not is_known and (not only_if_results or any(map(self._is_result, body_of(function)))):
                self._examined.add(function)
                self._followed.add(function)
                self._pending.append(function)
        return bool(functions)

    def _is_of_torch(self, call: ast.Call) -> bool:
        """A function of torch or numpy, a method of tensors, a module: they fail for shapes, and not for values."""
        root: Any = call.func
        while isinstance(root, ast.Attribute):
            root = root.value
        owner = self.values.get(name_of(root))
        if isinstance(call.func, ast.Attribute):
            is_package = isinstance(owner, types.ModuleType) and package_of(owner.__name__) in ("torch", "numpy")
            return is_package or hasattr(torch.Tensor, call.func.attr)
        return isinstance(owner, torch.nn.Module) or package_of(getattr(owner, "__module__", "")) in ("torch", "numpy")


def _counts_up(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.AugAssign) and name in stored(node):
        return isinstance(node.op, ast.Add) and is_count(node.value)
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and name in stored(node):
        return all(is_number(part) for part in values_of(node, name))
    return not (isinstance(node, ast.For) and name in stored(node))
