"""The iterators that hand the batches of a pass on to the script: which they are, and the count of `enumerate`.

Python's `enumerate` tells its count and cannot be given one. So while a script is run again, the `enumerate` that its
own code calls is `Enumeration`, whose count is set when the script is back at its place. Any other iterator has a
position that is not known.
"""

from __future__ import annotations

import builtins
import functools
import gc
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from ganger.training.replay import IS_GENERATOR, caller_of, is_own

# What an iterator holds its source in.
_HOLDERS = (tuple, dict, types.MethodType, functools.partial)
_MOST_HOLDERS_BETWEEN = 3
_enumerate = builtins.enumerate


class Enumeration:
    """`enumerate` with a count that can be set. For code that is not the script's own it is Python's."""

    __class_getitem__: Any = classmethod(types.GenericAlias)

    def __new__(cls, iterable: Iterable[Any], start: int = 0) -> Any:
        if not is_own(sys._getframe(1).f_globals.get("__name__")):
            return _enumerate(iterable, start)
        return super().__new__(cls)

    def __init__(self, iterable: Iterable[Any], start: int = 0) -> None:
        self._source = iter(iterable)
        self.count = start

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return self

    def __next__(self) -> tuple[int, Any]:
        item = next(self._source)
        self.count += 1
        return self.count - 1, item


_ENUMERATIONS = (_enumerate, Enumeration)


def divert_enumerate() -> None:
    """Let the script's `enumerate` be one whose count can be set."""
    builtins.enumerate = Enumeration  # type: ignore[assignment, misc]


def end_diversion() -> None:
    """Let it be Python's again. Idempotent."""
    builtins.enumerate = _enumerate  # type: ignore[misc]


def wrapped_by(iterator: Any) -> str:
    """Return the name of what hands on the batches on their way to the script, other than `enumerate` and generators
    that now fetch one; '' if nothing does. Such an iterator (`zip`, `cycle`, a class with `__next__`) has a position of
    its own.

    To be called while the script fetches from `iterator`, as `counts` is. Searches the heap."""
    return next((type(one).__name__ for one in _iterators_over(iterator) if type(one) not in _ENUMERATIONS), "")


def counts(iterator: Any) -> list[int]:
    """Return the counts of the enumerations that hand on the batches, the innermost first."""
    found = [one for one in _iterators_over(iterator) if type(one) in _ENUMERATIONS]
    return [one.count if type(one) is Enumeration else int(one.__reduce__()[1][1]) for one in found]


def set_counts(iterator: Any, wanted: list[int]) -> bool:
    """Set what `counts` returned at the same place in another process. Return whether that was possible."""
    found = [one for one in _iterators_over(iterator) if type(one) in _ENUMERATIONS]
    if len(found) != len(wanted) or not all(type(one) is Enumeration for one in found):
        return False
    for one, count in zip(found, wanted):
        one.count = count
    return True


def _iterators_over(iterator: Any) -> list[Any]:
    """Return the iterators that hold this one, the innermost first, but for generators that now fetch from it. What
    holds an iterator that is no enumeration is not looked for."""
    waiting = _fetching_generators()
    chain = [iterator]
    if waiting:
        found = [item for item in gc.get_objects() if type(item) is types.GeneratorType]
        chain += [item for item in found if any(item.gi_frame is frame for frame in waiting)]
    known = {id(item) for item in chain}
    over: list[Any] = []
    between = 0
    while chain and between < _MOST_HOLDERS_BETWEEN:
        holders = [item for item in gc.get_referrers(*chain) if id(item) not in known]
        iterators = [item for item in holders if hasattr(type(item), "__next__")]
        over += iterators
        known.update(map(id, iterators))
        between = 0 if iterators else between + 1
        if any(type(item) not in _ENUMERATIONS for item in iterators):
            break
        # `holders` is not among them: it is a list
        chain = iterators or [item for item in holders if type(item) in _HOLDERS and item is not globals()]
    return over


def _fetching_generators() -> list[Any]:
    """The frames of the generators that are waiting for the fetch in progress, innermost first."""
    found = []
    frame = caller_of(None)
    while frame is not None and frame.f_code.co_flags & IS_GENERATOR:
        found.append(frame)
        frame = caller_of(frame)
    return found
