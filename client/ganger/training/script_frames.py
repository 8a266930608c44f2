"""Running frames of a script: its own code, the loops around it, and the variables that are still live.

A restart repeats the body of every finished pass over a loader once, so a `for epoch in ...` around the passes is
restored, and the interrupted pass continues in the middle. A `for` inside one pass is not restored, since nothing can
set its counter. `for step in range(n): batch = next(batches)` is the common case; written as `while step < n` it is
fine, as plain variables are restored.

Imports no torch: the agent uses this before the first line of a script, which may set variables that torch reads when
it is imported.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
import sysconfig
import types
from typing import Any

_STANDARD = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")})
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def is_own(name: Any) -> bool:
    """Return whether the module of that name belongs to the script."""
    if name == "__main__":
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    return isinstance(file, str) and package_of(name) not in ("ganger", "torch", "sitecustomize") and is_own_file(file)


def package_of(name: Any) -> str:
    return str(name).partition(".")[0]


@functools.lru_cache(maxsize=1 << 14)
def is_own_file(file: str) -> bool:
    return not file.startswith(_STANDARD) and not any(part in file for part in _INSTALLED)


@functools.lru_cache(maxsize=1 << 14)
def is_standard_file(file: str) -> bool:
    """Return whether code in `file` is part of the standard library."""
    return file.startswith("<frozen ") or (file.startswith(_STANDARD) and not any(part in file for part in _INSTALLED))


# `inspect.CO_GENERATOR`: every process of a job imports this module, and `inspect` takes long to import.
IS_GENERATOR = 0x20

Path = tuple[tuple[types.CodeType, int], ...]


def frames() -> list[Any]:
    """Return the frames of the script and of libraries that it called, without those of Ganger and torch; innermost
    first."""
    found = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        if package_of(frame.f_globals.get("__name__")) not in ("ganger", "torch"):
            found.append(frame)
            if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
                break
        frame = frame.f_back
    return found


def places() -> dict[int, frozenset[int]]:
    """Return the for loops around the present instruction of each frame of the script, by offset, by the frame's id."""
    return {id(frame): _loops_around(frame) for frame in frames()}


def path() -> Path:
    """Return code and line of each frame of the script, innermost first."""
    # By line: the offset of a call changes when the interpreter specialises it.
    return tuple((frame.f_code, frame.f_lineno) for frame in frames())


def fetch_place() -> Path | None:
    """Return the path to the line that fetches a batch.

    None while the StopIteration that began the pass is handled, as that path is the same for every pass. A restart
    continues at the first fetch of a pass. If later fetches are elsewhere, batches are fetched before their steps, and
    a restart would lose one.
    """
    return None if sys.exc_info()[0] is StopIteration else path()


def loops_inside_pass(begun: dict[int, frozenset[int]]) -> bool:
    """Return whether a fetch made here is inside a for loop that began after the pass did, at the places `begun`."""
    is_hidden = False
    for frame, caller in zip(found := frames(), [*found[1:], None]):
        if is_hidden:
            # A generator that is called by next() lives across passes, so its loops cannot be restored,
            if _loops_around(frame):
                return True
        elif frame.f_code.co_flags & IS_GENERATOR:
            # Unless a for loop of its caller drives it.
            is_hidden = caller is None or caller.f_lasti not in _for_loops(caller.f_code)
        elif _loops_around(frame) - begun.get(id(frame), frozenset()):
            return True
    return False


def _loops_around(frame: Any) -> frozenset[int]:
    return frozenset(start for start, end in _for_loops(frame.f_code).items() if start < frame.f_lasti < end)


@functools.lru_cache(maxsize=256)
def _for_loops(code: types.CodeType) -> dict[int, int]:
    """Return start and end of every for loop's body, by offset. Handlers of exceptions may lie elsewhere: a pass that
    begins in one seems to be in fewer loops, so it is refused, which is safe."""
    return {step.offset: int(step.argval) for step in dis.get_instructions(code) if step.opname == "FOR_ITER"}


_ENDS = frozenset({"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"})
_JUMPS = frozenset({"JUMP_FORWARD", "JUMP_ABSOLUTE", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"})
_JUMPING = frozenset({*dis.hasjrel, *dis.hasjabs})


@functools.lru_cache(maxsize=512)
def live_names(code: types.CodeType, offset: int) -> frozenset[str]:
    """Return the live variables after `offset`, the present instruction (liveness analysis): names that later code may
    read before it sets them. The others are left over from the last batch: outputs, activations, results of libraries.

    Variables of closures and globals that inner functions read count as live.
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
            # A handler of exceptions may be entered before the value is set.
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
