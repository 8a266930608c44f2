"""A data loader whose position is known: a plain torch DataLoader per pass, over the samples still to come."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from ganger.training.sampler import Batches, SeededDataset, Slice, mixed


class LoaderEvents(Protocol):
    """What a loader tells the job it belongs to."""

    def took_batch(self, samples: int, waited_nanoseconds: int) -> None: ...

    def resumed_pass(self) -> None: ...

    def worker_hint(self) -> int | None: ...


class ElasticLoader:
    """Iterating it makes one pass; the first pass after a restart begins where training was."""

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
        self._cut = Slice(len(dataset), global_batch, rank, world, shuffle, drop_last)
        self._seed = mixed(seed, number)
        self._workers = num_workers
        # workers are made for each pass anyway, as their number may have changed
        self._options = {name: value for name, value in options.items() if name != "persistent_workers"}
        self._events = events
        self._pass = 0
        # Samples of the present pass that all ranks together are past.
        self._taken = 0
        self._active = False
        self._resuming = False

    def __len__(self) -> int:
        """Batches of a whole pass."""
        return len(self._cut.starts())

    @property
    def global_batch(self) -> int:
        return self._cut.global_batch

    def __iter__(self) -> Iterator[Any]:
        resuming, self._resuming = self._resuming, False
        if not resuming:
            if self._active:
                # the script left the last pass early
                self._pass += 1
            self._taken = 0
        self._active = True
        number, starts = self._pass, self._cut.starts(self._taken)
        batches = iter(self._one_pass(number, self._taken)) if starts else iter(())
        if resuming:
            self._events.resumed_pass()
        for start in starts:
            began = time.perf_counter_ns()
            content = next(batches)
            waited = time.perf_counter_ns() - began
            self._taken = min(start + self._cut.global_batch, self._cut.length)
            self._events.took_batch(self._cut.count(start), waited)
            yield content
        # only now is the pass over: at a boundary inside the last batch's step it was not
        if self._pass == number and self._active:
            self._pass += 1
            self._taken = 0
            self._active = False

    def _one_pass(self, number: int, start: int) -> Any:
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
        return {"pass": self._pass, "samples": self._taken, "active": self._active}

    def go_to(self, position: dict[str, Any]) -> None:
        """The next pass begins at `position`, which may have been reached with other batches."""
        self._pass = int(position["pass"])
        self._taken = int(position["samples"])
        self._active = self._resuming = bool(position["active"])
