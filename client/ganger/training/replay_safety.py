"""Whether running a script again brings its own loops back to where they were, and which modules are the script's.

A restart repeats the body of every finished pass over a loader once, so a `for epoch in ...` around the passes comes
out right, and the pass it stopped in goes on in the middle. A `for` that runs inside one pass does not: nothing can set
its counter. `for step in range(n): batch = next(batches)` is the common case; written as `while step < n` it is fine,
as plain variables are put back.

Imports no torch: the agent uses this before the first line of a script, which may set variables that torch reads when
it is imported.
"""

from __future__ import annotations

import dis
import functools
import gc
import inspect
import itertools
import os
import sys
import sysconfig
import types
from typing import Any

_STANDARD = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")})
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def is_own(name: Any) -> bool:
    """Whether the module of that name belongs to the script."""
    if name == "__main__":
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    return isinstance(file, str) and package_of(name) not in ("ganger", "torch", "sitecustomize") and _is_own_file(file)


def package_of(name: Any) -> str:
    return str(name).partition(".")[0]


@functools.lru_cache(maxsize=1 << 14)
def _is_own_file(file: str) -> bool:
    return not file.startswith(_STANDARD) and not any(part in file for part in _INSTALLED)


_COUNTING = (itertools.islice, zip, map, itertools.chain, itertools.zip_longest)

Place = tuple[int, frozenset[int]]
"""A frame, by its number, and the for loops (by offset in its code) that are around what it is doing."""


def places() -> tuple[Place, ...]:
    """Where the script is, innermost frame first."""
    return tuple((id(frame), _loops_around(frame)) for frame in _frames())


def fetch_place() -> tuple[tuple[types.CodeType, int], ...] | None:
    """Where the script fetches; None in the handler of the StopIteration that began the pass, which leads back there.

    A restart goes on at the first fetch of a pass. Where later ones are made elsewhere, batches are fetched ahead
    of their steps, and the one in hand would be lost.
    """
    if sys.exc_info()[0] is StopIteration:
        return None
    # by line: the offset of a call changes when the interpreter specialises it
    return tuple((frame.f_code, frame.f_lineno) for frame in _frames())


def site() -> tuple[types.CodeType, int]:
    """The line of the script that is being run."""
    frame = _caller(None)
    return frame.f_code, frame.f_lineno


def loops_inside_pass(begun: tuple[Place, ...]) -> bool:
    """Whether a fetch made here is inside a for loop that began after the pass did, at `begun`."""
    around_begin = dict(begun)
    is_hidden = False
    for frame in _frames():
        if is_hidden:
            # code that calls next() on a generator continues across passes
            if _loops_around(frame):
                return True
        elif frame.f_code.co_flags & inspect.CO_GENERATOR:
            is_hidden = not _is_iterating(_caller(frame))
        elif _loops_around(frame) - around_begin.get(id(frame), frozenset()):
            return True
    return False


def counted_by(iterator: Any) -> str:
    """The name of what counts or joins the batches on their way to the script and cannot be set; else ''."""
    holders = gc.get_referrers(iterator)
    tuples = [holder for holder in holders if type(holder) is tuple]
    # zip and map hold their iterators in a tuple
    for holder in [*holders, *(gc.get_referrers(*tuples) if tuples else ())]:
        if isinstance(holder, _COUNTING):
            return type(holder).__name__
    return ""


def _frames() -> list[Any]:
    found = []
    frame = _caller(None)
    while frame is not None:
        found.append(frame)
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
            break
        frame = _caller(frame)
    return found


def _caller(frame: Any) -> Any:
    """The next frame outwards that is not ours or torch's."""
    frame = inspect.currentframe() if frame is None else frame.f_back
    while frame is not None and package_of(frame.f_globals.get("__name__")) in ("ganger", "torch"):
        frame = frame.f_back
    return frame


def _is_iterating(frame: Any) -> bool:
    """Whether the frame waits for the next item of a for loop, and not for a call."""
    return frame is not None and frame.f_lasti in _for_loops(frame.f_code)


def _loops_around(frame: Any) -> frozenset[int]:
    at = frame.f_lasti
    return frozenset(start for start, end in _for_loops(frame.f_code).items() if start < at < end)


@functools.lru_cache(maxsize=256)
def _for_loops(code: types.CodeType) -> dict[int, int]:
    """Start and end of every for loop's body, by offset. Handlers of exceptions may lie elsewhere: of a pass that began
    in one, fewer loops are seen around its beginning, and so it is refused."""
    return {step.offset: int(step.argval) for step in dis.get_instructions(code) if step.opname == "FOR_ITER"}
