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

from ganger.training.replay import Path, package_of
from ganger.training.script_source import (
    FUNCTIONS,
    LOOPS,
    NotHarmlessError,
    Passes,
    body_of,
    called,
    changed_base,
    changed_in,
    expressions_of,
    in_scope,
    is_count,
    is_generator,
    is_number,
    is_sure_index,
    loops_in,
    outside_regions,
    stored,
    stored_deep,
    stored_target,
    values_of,
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
        passes = Passes(frames)
        for path in paths:
            passes.add(path, is_current=path == current)
        _Results(passes).examine()
    except NotHarmlessError as reason:
        return str(reason)
    except RecursionError:
        return "its source is too deeply nested to be understood"
    return ""


class _Results:
    """What depends on results in a script whose `passes` are known."""

    def __init__(self, passes: Passes) -> None:
        self._passes = passes
        self._values = passes.values
        self._functions = passes.functions
        self._lines = passes.lines
        self._now = passes.now
        self._regions = passes.regions
        self._results: set[str] = set(passes.read_elsewhere)
        self._examined: set[Any] = set()
        self._followed: set[Any] = set()
        self._pending: list[Any] = []
        # set where a result decides whether they are
        self._guarded: set[str] = set()

    # -- what depends on them

    def examine(self) -> None:
        for region in self._regions:
            for inner in region.body if isinstance(region, LOOPS) else []:
                self._results.update(changed_in(inner, self._values))
            if isinstance(region, ast.For):
                self._results.update(stored_target(region.target))
        before = -1
        while len(self._results) != before:
            before = len(self._results)
            for block in self._lines:
                for statement in self._passes.between(block):
                    self._spread(statement, False)
            for function in list(self._examined):
                for statement in body_of(function):
                    self._spread(statement, False)
        for region, is_several in self._regions.items():
            self._check_region(region, is_several)
        self._check_definitions()
        for block in self._lines:
            for statement in self._passes.between(block):
                self._check(statement, block, is_leaf=False, is_guarded=False)
        while self._pending:
            function = self._pending.pop()
            for statement in body_of(function):
                self._check(statement, function, is_leaf=True, is_guarded=False)

    def _is_result(self, node: ast.AST | None) -> bool:
        if node is None:
            return False
        for inner in outside_regions(node, ()):
            if isinstance(inner, ast.Name) and inner.id in self._results:
                return True
            if isinstance(inner, ast.Attribute) and f".{inner.attr}" in self._results:
                return True
            if isinstance(inner, ast.Call) and self._leads_to_pass(inner):
                return True
        return False

    def _leads_to_pass(self, call: ast.Call) -> bool:
        name = called(call)
        return any(getattr(block, "name", None) == name for block in self._lines)

    def _spread(self, node: ast.AST, is_guarded: bool) -> None:
        """Note what `node` makes a result."""
        if node in self._regions:
            return
        if isinstance(node, (ast.If, ast.While)):
            is_guarded = is_guarded or self._is_result(node.test)
        elif isinstance(node, ast.For):
            is_guarded = is_guarded or self._is_result(node.iter)
            if is_guarded:
                self._results.update(stored_target(node.target))
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
            if is_guarded:
                self._guarded.update(stored(node))
            if is_guarded or self._is_result(node.value):
                self._results.update(stored(node))
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            if is_guarded or self._is_result(node.context_expr):
                self._results.update(stored_target(node.optional_vars))
        elif isinstance(node, ast.Call):
            self._spread_call(node)
        elif isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            return
        for inner in ast.iter_child_nodes(node):
            self._spread(inner, is_guarded)

    def _spread_call(self, call: ast.Call) -> None:
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        tainted = [self._is_result(one) for one in given]
        if not any(tainted) and not self._is_result(call.func):
            return
        if any(tainted) and isinstance(call.func, ast.Attribute) and called(call) not in ("format", "write", "print"):
            self._results.update(changed_base(call.func.value, self._values))
        for function in self._functions.get(called(call), ()):
            self._examined.add(function)
            names = [one.arg for one in [*function.args.posonlyargs, *function.args.args]]
            if names[:1] in (["self"], ["cls"]):
                names = names[1:]
            self._results.update(name for name, is_result in zip(names, tainted) if is_result)
            positional = len(call.args)
            for keyword, is_result in zip(call.keywords, tainted[positional:]):
                if is_result and keyword.arg is not None:
                    self._results.add(keyword.arg)

    # -- what is not harmless

    def _fail(self, node: Any, block: Any, what: str) -> None:
        raise NotHarmlessError(
            f"{what} at {self._passes.at(node, block)} depends on results of its passes, which a second run lacks"
        )

    def _check_region(self, region: Any, is_several: bool) -> None:
        block = next(block for block in self._lines if region in loops_in(block))
        if region.orelse and any(isinstance(inner, ast.Break) for inner in ast.walk(region)):
            self._fail(region, block, "the else of the loop")
        if isinstance(region, ast.While):
            self._check_ending_test(region.test, region, region, block, is_leaving=False)
        if block in self._lines and not isinstance(block, ast.Module) and is_generator(block):
            return
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
            self._fail(node, block, "what ends the pass")
        if is_out:
            self._check_ending_test(test, region, node, block, is_leaving=True)
        if isinstance(node, ast.Assert) and any(
            isinstance(inner, ast.Name) and inner.id in self._assigned_in(region) for inner in ast.walk(node.test)
        ):
            self._fail(node, block, "a check")
        if isinstance(node, LOOPS):
            is_several = is_several and not any(isinstance(inner, ast.Break) for inner in ast.walk(node))
        if isinstance(node, ast.If):
            test = node.test
        for inner in ast.iter_child_nodes(node):
            self._check_leaving(inner, region, block, is_several, test)

    def _assigned_in(self, region: Any) -> set[str]:
        return {name for inner in region.body for name in stored_deep(inner)}

    def _check_ending_test(self, test: ast.expr | None, loop: Any, node: Any, block: Any, *, is_leaving: bool) -> None:
        is_running = self._now.get(block) is not None and (
            not isinstance(loop, LOOPS) or loop.lineno <= self._now[block] <= (loop.end_lineno or 0)
        )
        if test is None or not is_running or not self._counts(test, is_leaving):
            self._fail(node, block, "what ends the loop")

    def _counts(self, test: ast.expr, is_leaving: bool) -> bool:
        """Return whether `test` holds no sooner (`is_leaving`), or no less long, in a second run."""
        if isinstance(test, ast.BoolOp):
            return all(self._counts(one, is_leaving) for one in test.values)
        if not self._is_result(test):
            return True
        if not isinstance(test, ast.Compare) or len(test.ops) != 1:
            return False
        left, right, kind = test.left, test.comparators[0], type(test.ops[0])
        if self._is_result(right):
            mirrored: dict[type, type] = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE}
            left, right, kind = right, left, mirrored.get(kind, kind)
        if self._is_result(right):
            return False
        if isinstance(left, ast.BinOp) and isinstance(left.op, ast.Add) and isinstance(left.right, ast.Constant):
            left = left.left
        return kind in ((ast.Gt, ast.GtE) if is_leaving else (ast.Lt, ast.LtE)) and self._is_counter(left)

    def _is_counter(self, node: ast.expr) -> bool:
        """Return whether every batch adds to the value, and nothing else is done to it but to begin anew."""
        if isinstance(node, ast.Attribute) and node.attr == "last_epoch":
            return True
        if not isinstance(node, (ast.Name, ast.Attribute)):
            return False
        name = node.id if isinstance(node, ast.Name) else f".{node.attr}"
        if name in self._guarded:
            return False
        for region in self._regions:
            for inner in (choice for choice in ast.walk(region) if isinstance(choice, ast.If)):
                if name in stored_deep(inner) and not any(isinstance(part, ast.Mod) for part in ast.walk(inner.test)):
                    return False
        return all(_counts_up(inner, name) for inner in self._where_set(name))

    def _where_set(self, name: str) -> Iterator[Any]:
        """Nodes among which are all that may set the variable, or the attribute, of that name."""
        if name.startswith("."):
            for tree in self._passes.files.values():
                yield from ast.walk(tree)
            return
        for block in {*self._lines, *self._examined}:
            yield from in_scope(block, name)

    def _check_definitions(self) -> None:
        """A name that is only set now and then in passes may be missing after one batch."""
        always: set[str] = set()
        seldom: dict[str, Any] = {}
        for block in self._lines:
            self._sort_definitions(body_of(block), False, False, always, seldom)
            if isinstance(block, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                always.update(one.arg for one in ast.walk(block.args) if isinstance(one, ast.arg))
        for block in self._lines:
            for statement in self._passes.between(block):
                for inner in outside_regions(statement, self._regions):
                    is_read = isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load)
                    if is_read and inner.id in seldom.keys() - always:
                        self._fail(inner, block, f"whether {inner.id} is defined")

    def _sort_definitions(
        self, body: list[Any], is_inside: bool, is_seldom: bool, always: set[str], seldom: dict[str, Any]
    ) -> None:
        for node in body:
            names = stored(node) if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) else set()
            if isinstance(node, ast.For):
                names = stored_target(node.target)
            if isinstance(node, ast.With):
                names = {n for item in node.items if item.optional_vars for n in stored_target(item.optional_vars)}
            for name in names:
                (seldom.__setitem__(name, node) if is_seldom else always.add(name))
            inside = is_inside or node in self._regions
            under = is_seldom
            if isinstance(node, (ast.If, ast.While, ast.Try)) and node not in self._regions:
                under = under or is_inside or (isinstance(node, ast.If) and self._is_result(node.test))
            for field in ("body", "orelse", "finalbody"):
                self._sort_definitions(getattr(node, field, []), inside, under, always, seldom)
            for handler in getattr(node, "handlers", []):
                self._sort_definitions(handler.body, inside, under, always, seldom)

    def _check(self, node: Any, block: Any, *, is_leaf: bool, is_guarded: bool) -> None:
        """Raise if `node`, between two passes, may do something else, or fail, with other results."""
        if is_guarded and node in self._regions:
            self._fail(node, block, "whether a pass is made")
        if node in self._regions or isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            return
        if isinstance(node, ast.If) and self._is_result(node.test) and not is_guarded:
            if self._ends_running_loop(node, block):
                return
            self._check_expression(node.test, block, is_leaf, is_guarded)
            for inner in [*node.body, *node.orelse]:
                self._check(inner, block, is_leaf=is_leaf, is_guarded=True)
            return
        if isinstance(node, (ast.While, ast.For)):
            decides = node.test if isinstance(node, ast.While) else node.iter
            if self._is_result(decides):
                if isinstance(node, ast.While):
                    self._check_ending_test(node.test, node, node, block, is_leaving=False)
                else:
                    is_guarded = True
        if isinstance(node, ast.Assert) and self._is_result(node.test):
            self._fail(node, block, "a check")
        if is_guarded and isinstance(node, (ast.With, ast.Try, ast.Delete, ast.Import, ast.ImportFrom, ast.Global)):
            self._fail(node, block, "what is done")
        is_way_out = isinstance(node, ast.Raise) or (
            isinstance(node, (ast.Break, ast.Continue, ast.Return)) and not is_leaf
        )
        if is_guarded and is_way_out:
            self._fail(node, block, "where it goes on")
        self._check_expression(node, block, is_leaf, is_guarded)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.stmt, ast.ExceptHandler)) or type(child).__name__ == "match_case":
                self._check(child, block, is_leaf=is_leaf, is_guarded=is_guarded or type(node).__name__ == "Match")

    def _ends_running_loop(self, node: ast.If, block: Any) -> bool:
        last = node.body[-1]
        if node.orelse or not isinstance(last, (ast.Break, ast.Return)) or not self._counts(node.test, True):
            return False
        now = self._now.get(block)
        if now is None:
            return False
        around = [loop for loop in loops_in(block) if loop.lineno <= node.lineno <= (loop.end_lineno or 0)]
        loop = max(around, key=lambda one: one.lineno, default=None)
        return isinstance(last, ast.Return) or (loop is not None and loop.lineno <= now <= (loop.end_lineno or 0))

    def _check_expression(self, node: Any, block: Any, is_leaf: bool, is_guarded: bool) -> None:
        for inner in expressions_of(node):
            for call in self._calls_by_result(inner):
                self._check_call(call, block, True)
            if isinstance(inner, ast.Call):
                self._check_call(inner, block, is_guarded)
            elif isinstance(inner, ast.BinOp) and self._may_fail(inner):
                self._fail(inner, block, "a division")
            elif isinstance(inner, ast.Subscript) and isinstance(inner.ctx, ast.Load) and self._is_result(inner.value):
                if not is_sure_index(inner.slice):
                    self._fail(inner, block, "an index")
            elif isinstance(inner, (ast.Yield, ast.YieldFrom, ast.Await)) and is_guarded:
                self._fail(inner, block, "what is done")

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
        is_text = isinstance(node.left, ast.JoinedStr) or (
            isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)
        )
        return not is_text and not self._is_never_zero(node.right)

    def _is_never_zero(self, node: ast.expr) -> bool:
        """Return whether every batch adds to the value, or it is the length of what every batch adds to."""
        if isinstance(node, ast.Call):
            if called(node) == "len" and len(node.args) == 1:
                return self._is_never_zero(node.args[0]) or not self._is_result(node.args[0])
            return called(node) == "max" and any(is_number(one) for one in node.args)
        if not isinstance(node, (ast.Name, ast.Attribute)):
            return False
        name = node.id if isinstance(node, ast.Name) else f".{node.attr}"
        for region in self._regions:
            for statement in getattr(region, "body", []):
                if isinstance(statement, ast.AugAssign) and name in stored(statement):
                    return isinstance(statement.op, ast.Add) and is_count(statement.value)
                call: Any = getattr(statement, "value", None)
                is_append = isinstance(call, ast.Call) and called(call) == "append"
                if is_append and isinstance(call.func, ast.Attribute) and name in changed_base(call.func.value, {}):
                    return True
        return False

    def _check_call(self, call: ast.Call, block: Any, is_guarded: bool) -> None:
        name = called(call)
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        if is_guarded and name in _EXITS:
            self._fail(call, block, "what ends the script")
        if not is_guarded and not self._is_result(call.func) and not any(self._is_result(one) for one in given):
            self._follow(call, only_if_results=True)
            return
        if self._leads_to_pass(call):
            if is_guarded:
                self._fail(call, block, "whether a pass is made")
            return
        if name in _RAISING:
            self._fail(call, block, f"{name}()")
        if self._follow(call, only_if_results=False):
            return
        if name not in (_REPORTS if is_guarded else _HARMLESS) and (is_guarded or not self._is_of_torch(call)):
            self._fail(call, block, f"{name or 'a call'}()")

    def _follow(self, call: ast.Call, *, only_if_results: bool) -> bool:
        """Have the functions of the script that are called examined too; returns whether there are any."""
        functions = self._functions.get(called(call), ())
        for function in functions:
            if function in self._followed or function in self._lines:
                continue
            if only_if_results and not any(self._is_result(statement) for statement in body_of(function)):
                continue
            self._examined.add(function)
            self._followed.add(function)
            self._pending.append(function)
        return bool(functions)

    def _is_of_torch(self, call: ast.Call) -> bool:
        """A function of torch or numpy, a method of tensors, a module: they fail for shapes, and not for values."""
        if isinstance(call.func, ast.Attribute):
            if hasattr(torch.Tensor, call.func.attr):
                return True
            root: Any = call.func
            while isinstance(root, ast.Attribute):
                root = root.value
            owner = self._values.get(root.id) if isinstance(root, ast.Name) else None
            return isinstance(owner, types.ModuleType) and package_of(owner.__name__) in ("torch", "numpy")
        value = self._values.get(call.func.id) if isinstance(call.func, ast.Name) else None
        return isinstance(value, torch.nn.Module) or package_of(getattr(value, "__module__", "")) in ("torch", "numpy")


def _counts_up(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.AugAssign) and name in stored(node):
        return isinstance(node.op, ast.Add) and is_count(node.value)
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and name in stored(node):
        return all(is_number(part) for part in values_of(node, name))
    return not (isinstance(node, ast.For) and name in stored_target(node.target))
