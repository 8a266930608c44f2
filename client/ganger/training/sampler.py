"""Which samples come next: a permutation of (seed, pass), cut by global index, so that a position is three numbers.

`permutation(seed, pass)[global_index + rank :: world]`: the state has constant size, a restart slices instead of
replaying, and neither the number of ranks nor of loader workers changes which samples form a global batch. A pass may
change its number of ranks, or its batch, at any of its samples: each is taken once all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

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
