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
        self._taken = 0
        self._active = False
        self._resuming = False

    def __len__(self) -> int:
        """Batches of a whole pass."""
        return self._cut.batches

    def __iter__(self) -> Iterator[Any]:
        resuming, self._resuming = self._resuming, False
        if not resuming:
            if self._active:
                # the script left the last pass early
                self._pass += 1
            self._taken = 0
        self._active = True
        number, start = self._pass, self._taken
        batches = iter(self._one_pass(number, start)) if start < len(self) else iter(())
        if resuming:
            self._events.resumed_pass()
        for batch in range(start, len(self)):
            began = time.perf_counter_ns()
            content = next(batches)
            waited = time.perf_counter_ns() - began
            self._taken = batch + 1
            self._events.took_batch(self._samples(batch), waited)
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

    def _samples(self, batch: int) -> int:
        size = min(self._cut.global_batch, self._cut.length - batch * self._cut.global_batch)
        return -(-size // self._cut.world)

    def position(self) -> dict[str, Any]:
        """Where training is, in numbers that mean the same for any number of ranks and workers."""
        return {"pass": self._pass, "samples": self._taken * self._cut.global_batch, "active": self._active}

    def go_to(self, position: dict[str, Any]) -> None:
        """The next pass begins at `position`. Raises ValueError if it lies inside a batch of the present size."""
        batches, rest = divmod(int(position["samples"]), self._cut.global_batch)
        if rest:
            raise ValueError(
                f"training was at sample {position['samples']}, which is no multiple of global_batch="
                f"{self._cut.global_batch}: change the batch size at the end of an epoch"
            )
        self._pass = int(position["pass"])
        self._taken = batches
        self._active = self._resuming = bool(position["active"])
