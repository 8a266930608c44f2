"""A data loader whose position is known: a plain torch DataLoader per pass, over the samples still to come."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from ganger.training.sampler import Batches, SampleRange, SeededDataset, mixed


class LoaderEvents(Protocol):
    """What a loader tells the job it belongs to."""

    def took_batch(self, loader: ElasticLoader, samples: int, waited_ns: int, is_last: bool) -> None: ...

    def ended_pass(self, loader: ElasticLoader) -> None: ...

    def resumed_pass(self, loader: ElasticLoader) -> None: ...

    def only_looked(self) -> None: ...

    def has_gone_on(self) -> bool: ...

    def worker_hint(self) -> int | None: ...


# Stands for the loop that was reading before a restart.
_BEFORE_RESTART = object()


class ElasticLoader:
    """Iterating it makes one pass. After a restart the pass that was being read goes on where it was."""

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch: int,
        shuffle: bool,
        drop_last: bool,
        rank: int,
        world: int,
        seed: int,
        number: int,
        num_workers: int,
        options: dict[str, Any],
        events: LoaderEvents,
    ) -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise TypeError(f"{type(dataset).__name__} is no map-style dataset; the elastic loader needs len() and []")
        self.dataset = dataset
        self._cut = SampleRange(len(dataset), global_batch, rank, world, shuffle, drop_last)
        self._seed = mixed(seed, number)
        self._workers = num_workers
        # workers are made for each pass anyway, as their number may have changed
        self._options = {name: value for name, value in options.items() if name != "persistent_workers"}
        self._events = events
        self._pass = 0
        # Samples of the present pass that all ranks together are past.
        self._taken = 0
        # Whose loop reads the present pass; None between two passes.
        self._reader: object = None
        self._is_resuming = False

    def __len__(self) -> int:
        """Batches of a whole pass."""
        return len(self._cut.starts())

    @property
    def global_batch(self) -> int:
        return self._cut.global_batch

    @property
    def is_being_read(self) -> bool:
        """Whether a loop is inside a pass. One that was left by `break` is not, once its iterator is freed."""
        return self._reader is not None

    def __iter__(self) -> Iterator[Any]:
        is_elsewhere = True
        while is_elsewhere:
            is_elsewhere = yield from self._read()

    def _read(self) -> Generator[Any, None, bool]:
        """One pass, or what is left of it. Returns whether the loader's position was changed during the pass."""
        is_resuming, self._is_resuming = self._is_resuming, False
        if not is_resuming and self._reader is not None:
            # the loop over that pass still holds its iterator, but the script begins another pass
            self._end_pass()
        reader = self._reader = object()
        began_at = self._taken
        starts = self._cut.starts(began_at)
        batches = iter(self._batches(self._pass, began_at)) if starts else iter(())
        if is_resuming:
            self._events.resumed_pass(self)
        try:
            for start in starts:
                began = time.perf_counter_ns()
                content = next(batches)
                waited = time.perf_counter_ns() - began
                if self._reader is reader:
                    self._taken = min(start + self._cut.global_batch, self._cut.length)
                self._events.took_batch(self, self._cut.count(start), waited, start == starts[-1])
                yield content
                if self._is_resuming and self._reader is not reader:
                    return True
            is_resuming = False
        finally:
            # Here, and not with the last batch: at a boundary inside that one's step the pass was not over. A loop that
            # is left early closes its generator.
            if self._reader is reader:
                if is_resuming and not self._events.has_gone_on():
                    # a look at the first batch before the loop
                    self._taken, self._is_resuming = began_at, True
                    self._events.only_looked()
                else:
                    self._end_pass()
        return False

    def _end_pass(self) -> None:
        self._pass += 1
        self._taken = 0
        self._reader = None
        self._events.ended_pass(self)

    def _batches(self, number: int, start: int) -> Any:
        hint = self._events.worker_hint()
        options = dict(self._options)
        # an own generator: making an iterator must not draw from the script's
        options.setdefault("generator", torch.Generator().manual_seed(mixed(self._seed, number)))
        return DataLoader(
            SeededDataset(self.dataset),  # type: ignore[arg-type]
            batch_sampler=Batches(self._cut, self._seed, number, start),
            num_workers=self._workers if hint is None or not self._workers else hint,
            **options,
        )

    def position(self) -> dict[str, Any]:
        """Where training is, in numbers that mean the same for any number of ranks and workers."""
        return {"pass": self._pass, "samples": self._taken, "active": self.is_being_read}

    def go_to(self, position: dict[str, Any]) -> None:
        """The next pass begins at `position`, which may have been reached with other batches; an iterator that is
        still held continues from there."""
        self._pass = int(position["pass"])
        self._taken = int(position["samples"])
        self._is_resuming = bool(position["active"])
        self._reader = _BEFORE_RESTART if self._is_resuming else None

    def follow(self, earlier: ElasticLoader) -> None:
        """Begin where `earlier`, which the script made anew, would have begun its next pass."""
        self._pass = earlier._pass + earlier.is_being_read
