"""Passes of a trainer over its training loader: how many batches were fetched, and how a pass is gone on with.

Trainers fetch ahead: accelerate's loaders take one batch more than they hand out, to know which is the last. A pass is
gone on with behind the batches that training has used; those that were fetched ahead of it are fetched again, with the
random numbers of the first time.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Callable

from torch.utils.data import DataLoader

from ganger.training.loops import creation_state, set_creation_state, skip_batches
from ganger.training.state import capture_random, restore_random

# More are not fetched ahead in the process that trains.
_MOST_AHEAD = 8


class TrainerPass:
    """The iterator of one pass over the training loader. `target`: what `position` returned when training stopped in
    this pass; `restore` puts the random generators to where they were then. `is_ahead`: batches are fetched ahead."""

    def __init__(
        self,
        loader: Any,
        original: Callable[[Any], Any],
        target: dict[str, Any] | None = None,
        restore: Callable[[], None] = lambda: None,
        *,
        is_ahead: bool = True,
    ) -> None:
        self.loader = loader
        self.taken = 0
        self._restore = restore
        self._drawn: deque[Any] = deque(maxlen=_MOST_AHEAD)
        self._ahead: deque[Any] = deque()
        self._is_here = is_ahead and not loader.num_workers
        if target is not None:
            set_creation_state(loader, target["at creation"])
        self.at_creation = creation_state(loader) if target is None else target["at creation"]
        self._iterator = original(loader)
        if target is not None:
            self.taken = int(target["used"])
            self._ahead.extend(target["ahead"])
            skip_batches(loader, self._iterator, self.taken)
            restore()

    def __iter__(self) -> TrainerPass:
        return self

    def __next__(self) -> Any:
        if self._ahead:
            drawn = self._ahead.popleft()
            restore_random(drawn)
            batch = next(self._iterator)
            self._restore()
        elif self._is_here:
            drawn = capture_random(has_devices=False)
            batch = next(self._iterator)
        else:
            drawn, batch = None, next(self._iterator)
        self.taken += 1
        self._drawn.append(drawn)
        return batch

    def __len__(self) -> int:
        return len(self._iterator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_iterator"], name)

    def position(self, used: int) -> dict[str, Any]:
        """Return where the pass is, when training has used so many of its batches."""
        ahead = self.taken - used
        drawn = list(self._drawn)[len(self._drawn) - ahead :] if self._is_here and ahead else []
        return {"used": used, "ahead": drawn, "at creation": self.at_creation}

    def refusal(self, used: int) -> str:
        """Return why the pass cannot be gone on with; '' if it can."""
        if self.loader.num_workers and getattr(self.loader, "persistent_workers", False):
            return "its DataLoader(persistent_workers=True) keeps random numbers in its workers"
        if not 0 <= self.taken - used <= _MOST_AHEAD:
            return "it fetches batches in a way of its own"
        return ""


def hook_passes(make: Callable[[Any, Callable[[Any], Any]], Any]) -> None:
    """Let `make(loader, original)` make the iterators of all DataLoaders of this process."""
    original = DataLoader.__iter__

    def begin(loader: Any) -> Any:
        return make(loader, original)

    DataLoader.__iter__ = begin  # type: ignore[method-assign]
