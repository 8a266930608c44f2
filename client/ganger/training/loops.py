"""The iterators of an unmodified script's loops: one that is watched, one that is over already, one gone on with.

Batches reach the script through other iterators, too. Python's `enumerate` tells its count and cannot be given one. So
while a script is run again, the `enumerate` that its own code calls is `Enumeration`, whose count is set when the
script is back at its place. Any other iterator has a position that is not known.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import gc
import itertools
import sys
import time
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Callable, NoReturn, Protocol

from torch.utils.data import IterableDataset

from ganger.training.script_frames import IS_GENERATOR, Path, fetch_place, frames, is_own, path, places
from ganger.training.script_variables import set_state_of_loader, state_of_loader
from ganger.training.state import capture_random, restore_random

# What an iterator holds its source in.
_HOLDERS = (tuple, dict, types.MethodType, functools.partial)
_MOST_HOLDERS_BETWEEN = 3
_clock = time.perf_counter_ns
_enumerate = builtins.enumerate


class Script(Protocol):
    """What a loop tells the script it belongs to."""

    def before_fetch(self, loop: Loop) -> None: ...

    def after_fetch(self, loop: Loop, waited_ns: int) -> None: ...

    def show(self) -> None: ...

    def kept_batch(self, loader: Any, original: Any) -> Any: ...

    def arrive(self) -> None: ...

    def give_up_replay(self, text: str) -> NoReturn: ...

    def step_aside(self, problem: Exception) -> None: ...


class Pass:
    """The iterator of one pass over a loader, around that of the loader."""

    _iterator: Any

    def __iter__(self) -> Any:
        return self

    def __len__(self) -> int:
        return len(self._iterator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_iterator"], name)


class Loop(Pass):
    """The iterator of one pass over a loader, as the script sees it. `ahead`: batches that were fetched, and not handed
    to the script yet, whenever the next one is fetched."""

    def __init__(self, script: Script, loader: Any, original: Any, number: int) -> None:
        self._script = script
        self._before_fetch: Callable[[Loop], None] = Loop._first_fetch
        self.fetched_first_at: Path | None = None
        self._after_fetch = script.after_fetch
        self.reference = weakref.ref(self)
        self.number = number
        self.loader = loader
        self.taken = 0
        self.exhausted = False
        # None until its second fetch
        self.evaluates: bool | None = None
        self.batch_size = int(getattr(loader, "batch_size", None) or 0)
        self.keeps_workers = bool(loader.num_workers and getattr(loader, "persistent_workers", False))
        self.ahead = batches_ahead()
        self.begun = places()
        self.path = path()
        self.at_creation = creation_state(loader)
        self._iterator = self._make_iterator(loader, original)

    @property
    def is_being_read(self) -> bool:
        """Whether batches were taken and it is not over: a holder of the iterator may take more."""
        return self.taken > 0 and not self.exhausted

    def _make_iterator(self, loader: Any, original: Any) -> Any:
        return original(loader)

    def _first_fetch(self) -> None:
        try:
            self.fetched_first_at = fetch_place()
        except Exception as problem:
            self._script.step_aside(problem)
        self._before_fetch = self._script.before_fetch
        self._before_fetch(self)

    def __next__(self) -> Any:
        self._before_fetch(self)
        began = _clock()
        try:
            batch = next(self._iterator)
        except StopIteration:
            self.exhausted = True
            self._script.show()
            raise
        self.taken += 1
        self._after_fetch(self, _clock() - began)
        return batch


class OneBatch(Loop):
    """A loop that is finished already: its body runs once, so that the script's variables exist."""

    def __init__(self, script: Script, loader: Any, original: Any, number: int) -> None:
        super().__init__(script, loader, original, number)
        self._before_fetch = lambda _: None
        self._after_fetch = lambda *_: None

    def _make_iterator(self, loader: Any, original: Any) -> Any:
        def one() -> Iterator[Any]:
            with contextlib.suppress(StopIteration):  # A loader without batches
                yield self._script.kept_batch(loader, original)

        return one()


class Resumed(Loop):
    """The loop in which the boundary was: continues with the batch after it."""

    def __init__(self, script: Script, loader: Any, original: Any, number: int, target: dict[str, Any]) -> None:
        self._target_taken = int(target["taken"])
        self._ahead = int(target.get("ahead", 0))
        self._counts = [int(count) for count in target.get("counts", ())]
        self._has_arrived = False
        # A pass that was at its end runs its body once, as any finished one, so that what the body makes is there.
        self._first = [script.kept_batch(loader, original)] if self._target_taken >= _length(loader) else []
        set_creation_state(loader, target["at creation"])
        super().__init__(script, loader, original, number)
        self.at_creation = target["at creation"]
        skip_batches(loader, self._iterator, self._target_taken)

    def __next__(self) -> Any:
        if self._has_arrived:
            return super().__next__()
        if self._first:
            self.taken = 1
            return self._first.pop()
        if self._ahead:
            # The code that holds it gets it back with its variables: it was drawn with other random numbers.
            self._ahead -= 1
            self.taken = self._target_taken
            return next(self._iterator)
        self.taken = self._target_taken + self.ahead
        self._has_arrived = True
        if self._counts and not set_counts(self, self._counts):
            self._script.give_up_replay("what counts its batches is no enumerate() of its own")
        self._script.arrive()
        return super().__next__()


def batches_ahead() -> int:
    """Return how many batches the code that begins a pass here has fetched ahead whenever it fetches one: accelerate's
    loaders fetch one, to know which is the last."""
    frame: Any = next(iter(frames()), None)
    is_shard = frame is not None and frame.f_globals.get("__name__") == "accelerate.data_loader"
    return int(is_shard and type(frame.f_locals.get("self")).__name__ == "DataLoaderShard")


def _length(loader: Any) -> float:
    """Batches of a pass; infinite where unknown: its sampler need not have a length."""
    try:
        return float("inf") if isinstance(loader.dataset, IterableDataset) else len(loader)
    except TypeError:
        return float("inf")


def skip_batches(loader: Any, iterator: Any, count: int) -> None:
    """Pass over batches: only their indices are drawn where nothing else depends on them."""
    indices = getattr(iterator, "_sampler_iter", None)
    if loader.num_workers or indices is None or isinstance(loader.dataset, IterableDataset):
        # What workers draw for later batches follows from the earlier ones, so they make them all.
        indices = iterator
    for _ in range(count):
        next(indices)


def creation_state(loader: Any) -> dict[str, Any]:
    """What the order of a pass follows from."""
    return {"random": capture_random(), "loader": state_of_loader(loader)}


def set_creation_state(loader: Any, state: dict[str, Any]) -> None:
    restore_random(state["random"])
    set_state_of_loader(loader, state["loader"])


# -- the iterators that hand the batches of a pass on to the script


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


def divert_enumerate(is_on: bool) -> None:
    """Let the script's `enumerate` be one whose count can be set, or Python's again."""
    builtins.enumerate = Enumeration if is_on else _enumerate  # type: ignore[assignment, misc]


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
    waiting = list(itertools.takewhile(lambda frame: frame.f_code.co_flags & IS_GENERATOR, frames()))
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
