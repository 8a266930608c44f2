"""The iterators of an unmodified script's loops: one that is watched, one that is over already, one gone on with."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from typing import Any, Callable, NoReturn, Protocol

from torch.utils.data import IterableDataset

from ganger.training.batch_iterators import set_counts
from ganger.training.replay import Path, caller_of, fetch_place, path, places
from ganger.training.script_variables import set_state_of_loader, state_of_loader
from ganger.training.state import capture_random, restore_random

_clock = time.perf_counter_ns


class Script(Protocol):
    """What a loop tells the script it belongs to."""

    def before_fetch(self, loop: Loop) -> None: ...

    def after_fetch(self, loop: Loop, waited_ns: int) -> None: ...

    def ended(self, loop: Loop) -> None: ...

    def kept_batch(self, loader: Any, original: Any) -> Any: ...

    def arrive(self) -> None: ...

    def give_up_replay(self, text: str) -> NoReturn: ...

    def note_reason(self, reason: str) -> None: ...

    def step_aside(self, problem: Exception) -> None: ...


class Loop:
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

    def __iter__(self) -> Loop:
        return self

    def __next__(self) -> Any:
        self._before_fetch(self)
        began = _clock()
        try:
            batch = next(self._iterator)
        except StopIteration:
            self.exhausted = True
            self._script.ended(self)
            raise
        self.taken += 1
        self._after_fetch(self, _clock() - began)
        return batch

    def __len__(self) -> int:
        return len(self._iterator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_iterator"], name)


class OneBatch(Loop):
    """A loop that is finished already: its body runs once, so that the script's variables exist."""

    def _make_iterator(self, loader: Any, original: Any) -> Any:
        def one() -> Iterator[Any]:
            try:
                yield self._script.kept_batch(loader, original)
            except StopIteration:
                return

        return one()

    def __next__(self) -> Any:
        try:
            batch = next(self._iterator)
        except StopIteration:
            self.exhausted = True
            raise
        self.taken += 1
        return batch


class Resumed(Loop):
    """The loop in which the boundary was: goes on with the batch after it."""

    def __init__(self, script: Script, loader: Any, original: Any, number: int, target: dict[str, Any]) -> None:
        self._target_taken = int(target["taken"])
        self._ahead = int(target.get("ahead", 0))
        self._counts = [int(count) for count in target.get("counts", ())]
        self._has_arrived = False
        # A pass that was at its end runs its body once, as any finished one, so that what the body makes is there.
        self._is_at_end = not _is_iterable(loader) and self._target_taken >= _length(loader)
        self._first = [script.kept_batch(loader, original)] if self._is_at_end else []
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
    frame = caller_of(None)
    is_shard = frame is not None and frame.f_globals.get("__name__") == "accelerate.data_loader"
    return int(is_shard and type(frame.f_locals.get("self")).__name__ == "DataLoaderShard")


def _length(loader: Any) -> float:
    """Batches of a pass; infinite where unknown: its sampler need not have a length."""
    try:
        return len(loader)
    except TypeError:
        return float("inf")


def _is_iterable(loader: Any) -> bool:
    return isinstance(loader.dataset, IterableDataset)


def skip_batches(loader: Any, iterator: Any, count: int) -> None:
    """Pass over batches: only their indices are drawn where nothing else depends on them."""
    indices = getattr(iterator, "_sampler_iter", None)
    if loader.num_workers == 0 and indices is not None and not _is_iterable(loader):
        for _ in range(count):
            next(indices)
        return
    # what workers draw for later batches follows from the earlier ones, so they make them all
    for _ in range(count):
        next(iterator)


def creation_state(loader: Any) -> dict[str, Any]:
    """What the order of a pass follows from."""
    return {"random": capture_random(), "loader": state_of_loader(loader)}


def set_creation_state(loader: Any, state: dict[str, Any]) -> None:
    restore_random(state["random"])
    set_state_of_loader(loader, state["loader"])
