"""The loops of an attached script: its data loader, which samples come next, and where in its loops it is.

The loader is a plain torch DataLoader per pass, over the samples still to come. They are `permutation(seed,
pass)[global_index + rank :: world]`: the state has constant size, a restart slices instead of replaying, and neither
the number of ranks nor of loader workers changes which samples form a global batch. A pass may change its number of
ranks, or its batch, at any of its samples: each is taken once all the same.

A restart enters the epoch again that training was in and continues with the pass that was being read. So the steps of a
pass's last batch have their boundary when the epoch is over: before, a restart would find nothing left to read, and
come to the end of the epoch without what the body of the loop makes.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from ganger.injob.control import Control
from ganger.protocol.metric_series import EPOCH

# Of loader workers: as many as there are cores for.
AUTO = "auto"
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
        """Return the first positions of the global batches of a pass, in samples, from `start` on."""
        rest = (self.length - start) % self.global_batch if self.drop_last else 0
        return range(start, self.length - rest, self.global_batch)

    def batches(self, seed: int, number: int, start: int) -> Iterator[SeededBatch]:
        """Yield this rank's batches of pass `number` from the global batch at `start` on."""
        order = self.order(seed, number)
        for at in self.starts(start):
            yield SeededBatch(self.batch(order, at), mixed(seed, number, at, self.rank, 1))

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

    def __init__(self, indices: list[int], seed: int) -> None:
        super().__init__(indices)
        self.seed = seed


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
    random.seed(seed)
    torch.manual_seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


class LoaderEvents(Protocol):
    """Events that a loader reports to its job."""

    def took_batch(self, loader: ElasticLoader, samples: int, waited_ns: int, is_last: bool) -> None: ...

    def ended_pass(self, loader: ElasticLoader) -> None: ...

    def resumed_pass(self, loader: ElasticLoader) -> None: ...

    def only_looked(self) -> None: ...

    def has_gone_on(self) -> bool: ...


# Stands for the loop that was reading before a restart.
_BEFORE_RESTART = object()


class ElasticLoader:
    """Iterating it makes one pass. After a restart the pass that was being read continues where it was."""

    def __init__(
        self,
        dataset: Any,
        cut: SampleRange,
        seed: int,
        num_workers: int | str,
        options: dict[str, Any],
        events: LoaderEvents,
    ) -> None:
        self.dataset = dataset
        self._cut = cut
        self._seed = seed
        self._workers = num_workers
        # Workers are made for each pass, whose loader is new.
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
            # The loop over that pass still holds its iterator, but the script begins another pass.
            self._end_pass()
        reader = self._reader = object()
        began_at = self._taken
        starts = self._cut.starts(began_at)
        batches = iter(self._batches()) if starts else iter(())
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
                    # A look at the first batch before the loop.
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

    def _batches(self) -> Any:
        batches = self._cut.batches(self._seed, self._pass, self._taken)
        # An own generator: making an iterator must not draw from the script's.
        own = {"generator": torch.Generator().manual_seed(mixed(self._seed, self._pass)), **self._options}
        # Without any worker random numbers would come from the script's own generators.
        workers = max(1, len(os.sched_getaffinity(0)) - 1) if self._workers == AUTO else self._workers
        return DataLoader(SeededDataset(self.dataset), batch_sampler=batches, num_workers=workers, **own)  # type: ignore[arg-type]

    def position(self) -> dict[str, Any]:
        """Return the position of training, as numbers that are valid for any number of ranks and workers."""
        return {"pass": self._pass, "samples": self._taken, "active": self.is_being_read}

    def go_to(self, position: dict[str, Any]) -> None:
        """Let the next pass begin at `position`, which other batch sizes may have reached. Iterators in use do, too."""
        self._pass = int(position["pass"])
        self._taken = int(position["samples"])
        self._is_resuming = bool(position["active"])
        self._reader = _BEFORE_RESTART if self._is_resuming else None

    def follow(self, earlier: ElasticLoader) -> None:
        """Begin where `earlier`, which the script has replaced, would have begun its next pass."""
        self._pass = earlier._pass + earlier.is_being_read


class EpochClock:
    """The time of each epoch, without stops and over moves, for the job's series."""

    def __init__(self, control: Control | None) -> None:
        self._control = control
        # Begin (Unix seconds), first step, seconds before this process; None between two epochs.
        self._number = 0
        self._begin: tuple[float, int, float] | None = None
        self._since_ns = 0

    def resume(self, position: Any) -> None:
        """Continue with the epoch of a saved `position`; None: of a state without."""
        if position is not None:
            self._number = int(position["number"])
            self._begin = (float(position["begin"]), int(position["first"]), float(position["active"]))
            self._since_ns = self._active_ns()

    def begin(self, number: int) -> None:
        """Epoch `number` begins, or continues as it was resumed."""
        if self._control is not None and (self._begin is None or self._number != number):
            self._number = number
            self._begin = (time.time(), self._step(), 0.0)
            self._since_ns = self._active_ns()

    def end(self) -> None:
        """Log the epoch, which the script is done with."""
        if self._begin is not None and self._control is not None and self._control.series is not None:
            begin_s, first, _ = self._begin
            self._control.series.add(EPOCH, self._step(), float(self._number), begin_s, float(first), self._active_s())
        self._begin = None

    def position(self) -> dict[str, Any] | None:
        """Return what `resume` needs."""
        if self._begin is None:
            return None
        begin_s, first, _ = self._begin
        return {"number": self._number, "begin": begin_s, "first": first, "active": self._active_s()}

    def _step(self) -> int:
        # The last step of an epoch has its boundary later.
        return 0 if self._control is None else self._control.step + self._control.is_step_owed

    def _active_ns(self) -> int:
        return time.monotonic_ns() - (0 if self._control is None else self._control.rested_ns)

    def _active_s(self) -> float:
        before_s = 0.0 if self._begin is None else self._begin[2]
        return before_s + (self._active_ns() - self._since_ns) / 1e9


# -- where in its loops a script is

# Steps after an epoch's pass (what is left of a sum of gradients); more are training of their own.
MOST_HELD_AFTER_PASS = 16

NO_LOADER = (
    "its batches come from no job.dataloader, and a restart would take those again that are done; take them from there,"
    " or `for step in job.steps(n)` where the number of the step says which they are, or register what knows"
    " (job.register(name, item, position=True))"
)
SEVERAL_PASSES = "it makes steps in more than one pass of an epoch, and a restart would make the first ones again"
SEVERAL_LOOPS = "it trains in more than one loop of job.epochs or job.steps, and a restart would enter the first again"


@dataclass
class _Pass:
    """One pass over a loader: the steps made when it began and when a batch of it was taken last."""

    began_at: int
    is_of_epoch: bool
    read_at: int = -1


class LoopPosition:
    """The loops of one script, as it declares them: `job.epochs` or `job.steps` around passes over loaders."""

    def __init__(self) -> None:
        self.has_own_position = False
        # Steps whose boundary is still to come.
        self.held = 0
        self._loops = 0
        self._is_in_epoch = self._is_counting = self._is_between = False
        # Of passes that are over in this epoch.
        self._has_read = self._has_trained = False
        # Whose last batch is in hand; `self` for the last step of `job.steps`.
        self._last_of: object = None
        # The passes that are being read, in the order in which they began, by loader.
        self._passes: dict[int, _Pass] = {}

    def enter_loop(self, *, counts_steps: bool) -> bool:
        """`job.epochs` or `job.steps` begins. Return whether it is the first."""
        self._loops += 1
        self._is_counting = counts_steps
        return self._loops == 1

    def begin_epoch(self) -> None:
        self._is_in_epoch, self._is_between = True, False
        self._has_read = self._has_trained = False
        for reading in self._passes.values():
            reading.is_of_epoch = False

    def end_epoch(self) -> None:
        """The script is done with it, what it does after its passes included."""
        self._is_in_epoch, self._is_between = False, True
        self._last_of = None

    def leave_loop(self) -> None:
        self._is_in_epoch = self._is_counting = self._is_between = False
        self._last_of = None

    def resume_pass(self, loader: object) -> None:
        """The pass that is about to continue was being read before a restart: steps were made in it."""
        self._passes[id(loader)] = _Pass(-1, self._is_in_epoch)

    def take_batch(self, loader: object, steps: int, is_last: bool) -> bool:
        """`steps` were made before it. Returns whether the next step is perhaps none that simply has its boundary."""
        is_first = id(loader) not in self._passes
        reading = self._passes.setdefault(id(loader), _Pass(steps, self._is_in_epoch))
        reading.read_at = steps
        if self.held:
            # Never two in a row without a boundary.
            self._last_of = None
        elif is_last and self._is_in_epoch:
            # The pass around the others of this step; a loader that restarts beside it does not count.
            of_step = (one for one in self._passes.values() if one.is_of_epoch and one.read_at == steps)
            if reading is next(of_step, None):
                self._last_of = loader
        return is_first or self._last_of is not None

    def take_last_number(self) -> None:
        """`job.steps` has no step after this one."""
        self._last_of = self

    def end_pass(self, loader: object, steps: int) -> None:
        """It is over, or was left."""
        if self._last_of is loader:
            self._last_of = None
        ended = self._passes.pop(id(loader), None)
        if ended is not None and self._is_in_epoch and not self._passes:
            self._has_read = True
            self._has_trained |= steps > ended.began_at

    @property
    def is_in_pass(self) -> bool:
        """Whether a restart is back here when a pass continues, and not as soon as it is in its loop."""
        return bool(self._passes) and not self._is_between and not self._is_counting

    @property
    def is_in_loop(self) -> bool:
        """Whether a restart comes back through `job.epochs` or `job.steps`."""
        return self._is_in_epoch or self._is_counting or self._is_between

    def holds_step(self) -> bool:
        """A step is done: whether its boundary has to wait."""
        is_after_pass = self._has_read and not self._passes and self._is_in_epoch
        if self._last_of is not None or (is_after_pass and self.held < MOST_HELD_AFTER_PASS):
            self.held += 1
            return True
        self.held = 0
        if is_after_pass:
            # That many are training of their own.
            self._has_read = False
        return False

    def why_not_found_again(self) -> str:
        """Why a restart would not come back to a boundary here; empty if it does."""
        if self._loops > 1:
            return SEVERAL_LOOPS
        if self._is_between or self._is_counting:
            return ""
        if self._passes:
            return SEVERAL_PASSES if self._has_trained else ""
        return "" if self._is_in_epoch and self.has_own_position else NO_LOADER
