"""A data loader whose position is known: a plain torch DataLoader per pass, over the samples still to come.

The samples are `permutation(seed, pass)[global_index + rank :: world]`: the state has constant size, a restart slices
instead of replaying, and neither the number of ranks nor of loader workers changes which samples form a global batch. A
pass may change its number of ranks, or its batch, at any of its samples: each is taken once all the same.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

_MASK = (1 << 63) - 1


@dataclass(frozen=True)
class SampleRange:
    """The part of a dataset one rank reads. Batches are known by the sample they begin at, counted over all ranks."""

    length: int
    global_batch: int
    rank: int
    world: int
    shuffle: bool
    drop_last: bool

    def __post_init__(self) -> None:
        if self.global_batch < 1 or self.global_batch % self.world:
            raise ValueError(
                f"global_batch={self.global_batch} must be a positive multiple of the number of ranks ({self.world})"
            )

    def order(self, seed: int, number: int) -> Sequence[int]:
        """Sample indices of pass `number`, for all ranks."""
        if not self.shuffle:
            return range(self.length)
        generator = torch.Generator().manual_seed(mixed(seed, number))
        indices: list[int] = torch.randperm(self.length, generator=generator).tolist()
        return indices

    def starts(self, start: int = 0) -> range:
        """Where the batches of a pass begin, from the one at `start` on."""
        rest = (self.length - start) % self.global_batch if self.drop_last else 0
        return range(start, self.length - rest, self.global_batch)

    def batch(self, order: Sequence[int], start: int) -> list[int]:
        """This rank's samples of the global batch at `start`: every sample is one rank's, so of a short last batch some
        ranks get one more than others. Only where it has fewer samples than there are ranks, the pass's first ones are
        taken again, for a rank without a sample could not step."""
        whole = list(order[start : start + self.global_batch])
        whole += [order[index % self.length] for index in range(self.world - len(whole))]
        return whole[self.rank :: self.world]

    def count(self, start: int) -> int:
        """Samples of this rank in the global batch at `start`."""
        return -(-(max(self.world, min(self.global_batch, self.length - start)) - self.rank) // self.world)


def mixed(*numbers: int) -> int:
    """A well-spread seed from several numbers (splitmix64's finalizer, Steele et al. 2014)."""
    value = 0
    for number in numbers:
        value = (value + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        value ^= value >> 31
    return value & _MASK


class SeededBatch(list[int]):
    """Indices of one batch, with the seed for whatever a loader worker draws while it makes the batch."""

    seed: int = 0

    def __reduce__(self) -> Any:
        return _seeded_batch, (list(self), self.seed)


def _seeded_batch(indices: list[int], seed: int) -> SeededBatch:
    batch = SeededBatch(indices)
    batch.seed = seed
    return batch


class Batches:
    """The batch sampler of one pass from the global batch at `start` on."""

    def __init__(self, cut: SampleRange, seed: int, number: int, start: int) -> None:
        self._cut = cut
        self._seed = seed
        self._number = number
        self._start = start

    def __len__(self) -> int:
        return len(self._cut.starts(self._start))

    def __iter__(self) -> Iterator[SeededBatch]:
        order = self._cut.order(self._seed, self._number)
        for start in self._cut.starts(self._start):
            seed = mixed(self._seed, self._number, start, self._cut.rank, 1)
            yield _seeded_batch(self._cut.batch(order, start), seed)


class SeededDataset:
    """A map-style dataset whose random augmentation in loader workers depends on the batch, not on the worker.

    So a restart need not repeat what the workers drew before, and their number may change. In the main process
    (num_workers=0) the script's own generators are used, which are part of the saved state.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, batch: list[int]) -> list[Any]:
        if isinstance(batch, SeededBatch) and torch.utils.data.get_worker_info() is not None:
            seed_everything(batch.seed)
        many = getattr(self.dataset, "__getitems__", None)
        return list(many(list(batch))) if many is not None else [self.dataset[index] for index in batch]


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's (if imported) and torch's generators."""
    import random
    import sys

    random.seed(seed)
    torch.manual_seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


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
