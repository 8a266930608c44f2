"""Which variables of a running function are still needed: read on some way on from where it is, before they are set.

The others are left over from the last batch: outputs, activations, what a library returned.
"""

from __future__ import annotations

import dis
import functools
import types
from typing import Any

_ENDS = frozenset({"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"})
_JUMPS = frozenset({"JUMP_FORWARD", "JUMP_ABSOLUTE", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"})
_JUMPING = frozenset({*dis.hasjrel, *dis.hasjabs})


@functools.lru_cache(maxsize=512)
def live_names(code: types.CodeType, offset: int) -> frozenset[str]:
    """Return the names that code after the instruction at `offset`, the one that is being run, may read.

    Those shared with functions inside of it are among them, and global names that its functions read.
    """
    steps = list(dis.get_instructions(code))
    index = {step.offset: number for number, step in enumerate(steps)}
    always = frozenset({*code.co_cellvars, *code.co_freevars, *_inner_names(code)})
    if offset not in index:
        return always | frozenset({*code.co_varnames, *code.co_names})
    following = _following(code, steps, index)
    reads = [_uses(step, ("LOAD", "DELETE")) for step in steps]
    sets = [_uses(step, ("STORE",)) for step in steps]
    live: list[frozenset[str]] = [frozenset()] * len(steps)
    has_changed = True
    while has_changed:
        has_changed = False
        for number in range(len(steps) - 1, -1, -1):
            after = frozenset().union(*(live[to] for to in following[number]))
            # a handler of exceptions may be entered before the value is set
            now = reads[number] | (after - sets[number])
            if now != live[number]:
                live[number], has_changed = now, True
    return always.union(*(live[to] for to in following[index[offset]]))


def _following(code: types.CodeType, steps: list[Any], index: dict[int, int]) -> list[list[int]]:
    found: list[list[int]] = []
    for number, step in enumerate(steps):
        to = [] if step.opname in _ENDS or step.opname in _JUMPS else [number + 1]
        if step.opcode in _JUMPING and step.argval in index:
            to.append(index[step.argval])
        found.append([one for one in to if one < len(steps)])
    for entry in getattr(dis.Bytecode(code), "exception_entries", ()):
        for number, step in enumerate(steps):
            if entry.start <= step.offset < entry.end and entry.target in index:
                found[number].append(index[entry.target])
    return found


def _uses(step: Any, kinds: tuple[str, ...]) -> frozenset[str]:
    """The variables that an instruction uses in that way; several for those that do two things at once."""
    parts = step.opname.split("_")
    if not {"FAST", "NAME", "GLOBAL", "DEREF", "CLASSDEREF"} & set(parts):
        return frozenset()
    names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    ways = [part for part in parts if part in ("LOAD", "STORE", "DELETE")]
    if len(names) > 1 and len(ways) == 2:
        return frozenset(str(name) for name, way in zip(names, ways) if way in kinds)
    return frozenset(map(str, names)) if ways[:1] and ways[0] in kinds else frozenset()


def _inner_names(code: types.CodeType) -> set[str]:
    found: set[str] = set()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= {*constant.co_names, *constant.co_freevars} | _inner_names(constant)
    return found
