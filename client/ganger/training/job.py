"""The five-line form: `attach`, a data loader, the epochs, and one call per step.

Outside Ganger everything here still works and nothing is controlled: a script runs alone with the same numbers.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any, Callable

import torch

from ganger.injob import metrics
from ganger.injob.control import Control
from ganger.injob.page import Capability, Phase, Word
from ganger.training import agent
from ganger.training.ending import keep_default_group
from ganger.training.hardware import tell
from ganger.training.loader import ElasticLoader
from ganger.training.offload import StateKeeper
from ganger.training.progress import Progress
from ganger.training.randomness import restore_random
from ganger.training.replicas import why_not_replicated
from ganger.training.sampler import mixed, seed_everything
from ganger.training.state import Restored, Training, apply_object

# Process and page of the call that has the job; a process forked from it may have one of its own.
_attached: tuple[int, str] | None = None

FIVE_LINE = Capability.PAUSE | Capability.OFFLOAD | Capability.CHECKPOINT | Capability.FIVE_LINE


def attach(
    model: Any = None, optimizer: Any = None, scheduler: Any = None, scaler: Any = None, *, seed: int = 0
) -> TrainingJob:
    """Register what is trained and restore it if a state is assigned to this job. Call it before the training loop.

    Each argument may be one object, a list or a dictionary of them; names must be the same in every run. `seed` decides
    the order of samples in this job's loaders. TypeError for what has no state, RuntimeError for a second call in one
    job: of two only one would be saved. Ends the process with EXIT_NO_STATE if an assigned state is unreadable.
    """
    global _attached
    agent.stand_down()
    training = Training(
        models=_named(model, "model"),
        optimizers=_named(optimizer, "optimizer"),
        schedulers=_named(scheduler, "scheduler"),
        scalers=_named(scaler, "scaler"),
    )
    control = Control.from_environment()
    if control is not None and not control.claim():
        # a helper process of a script: the one that trains has the page
        control.close()
        control = None
    if control is not None:
        here = (os.getpid(), control.page.path)
        if _attached == here:
            control.close()
            raise RuntimeError(
                "attach was called twice in one job: name all models and optimizers in one call,"
                " attach(model={'generator': g, 'discriminator': d}, optimizer=[...])"
            )
        _attached = here
    job = TrainingJob(training, control, seed)
    if control is not None:
        job._start(control)
    return job


def _named(given: Any, kind: str) -> dict[str, Any]:
    named = _by_name(given, kind)
    for name, item in named.items():
        if not hasattr(item, "state_dict") or not hasattr(item, "load_state_dict"):
            raise TypeError(
                f"attach: {kind} {name!r} is a {type(item).__name__}, which has no state_dict() and load_state_dict()"
            )
    return named


def _by_name(given: Any, kind: str) -> dict[str, Any]:
    if given is None:
        return {}
    if isinstance(given, dict):
        return {str(name): item for name, item in given.items()}
    if isinstance(given, (list, tuple)):
        return {f"{kind}{number}": item for number, item in enumerate(given)}
    return {kind: given}


class TrainingJob:
    """One rank of a training job. Make it with `attach`."""

    def __init__(self, training: Training, control: Control | None, seed: int) -> None:
        self._training = training
        self._control = control
        self._seed = seed
        self._keeper: StateKeeper | None = None
        self._progress: Progress | None = None
        self._loaders: list[ElasticLoader] = []
        self._epoch = 0
        self._steps = 0
        self._samples = 0
        self._waited_nanoseconds = 0
        self._held = 0
        self._untold_steps: Callable[[], int] = lambda: 0
        self._tell_at_next_step: Callable[[], None] = lambda: None
        self._restored: Restored | None = None

    def _start(self, control: Control) -> None:
        keep_default_group()
        control.hello(FIVE_LINE, torch=str(torch.__version__))
        keeper = StateKeeper(control, lambda: self._training, self._position)
        keeper.when_stopped = self._show
        self._keeper = keeper
        control.handlers = keeper.handlers()
        self._progress = Progress(control.page, lambda: self._training, keeper)
        restored = keeper.restore_at_start()
        if restored is not None:
            self._restored = restored
            tell(restored.notice)
            self._steps = restored.position["steps"]
            self._epoch = restored.position["epoch"]
            # of this rank, as if there had always been so many
            self._samples = restored.position["samples"] * restored.world // control.world
        control.start(0 if restored is None else restored.step)
        hot_path = _managed_step(self, control.boundary)
        self.step, self._untold_steps, self._tell_at_next_step = hot_path  # type: ignore[method-assign]

    # -- what a script may ask

    @property
    def managed(self) -> bool:
        """Whether this process is controlled by Ganger."""
        return self._control is not None

    @property
    def step_count(self) -> int:
        """Steps done, those before a restart included."""
        return self._steps + self._untold_steps()

    @property
    def rank(self) -> int:
        return _rank_and_world(self._control)[0]

    @property
    def world(self) -> int:
        return _rank_and_world(self._control)[1]

    # -- what a script calls

    def dataloader(
        self,
        dataset: Any,
        *,
        global_batch: int | Callable[[int], int],
        shuffle: bool = False,
        num_workers: int = 0,
        drop_last: bool = False,
        **options: Any,
    ) -> ElasticLoader:
        """A loader of this rank's share of `dataset` that goes on where training was.

        `global_batch` samples over all ranks form one step, whatever their number; ValueError if the ranks do not
        divide it. A function says how many for a number of ranks, for jobs that are to take more with more of them.
        Call it in the same order in every run. `options` go to torch's DataLoader. Position counts the batches the loop
        has taken, not those prefetched.
        """
        rank, world = _rank_and_world(self._control)
        number = len(self._loaders)
        is_constant = isinstance(global_batch, int)
        global_batch = global_batch if isinstance(global_batch, int) else global_batch(world)
        loader = ElasticLoader(
            dataset,
            global_batch=global_batch,
            shuffle=shuffle,
            drop_last=drop_last,
            rank=rank,
            world=world,
            seed=self._seed,
            number=number,
            num_workers=num_workers,
            options=options,
            events=self,
        )
        self._loaders.append(loader)
        if self._control is not None:
            self._offer_resize(self._control, global_batch if is_constant else 0)
        if self._restored is not None and number < len(self._restored.position["loaders"]):
            loader.go_to(self._restored.position["loaders"][number])
        return loader

    def epochs(self, count: int) -> Iterator[int]:
        """0 .. count-1, without the epochs that a restored state has behind it."""
        if self._restored is not None and not any(part["active"] for part in self._restored.position["loaders"]):
            self._set_random()
        if self._control is not None:
            self._control.page.set(Word.TRAINING_EPOCHS, max(0, count))
        for epoch in range(self._epoch, count):
            self._epoch = epoch
            if self._control is not None:
                self._control.page.set(Word.TRAINING_EPOCH, epoch)
            yield epoch
        if self._control is not None:
            self._show()
            self._control.finish()

    def step(self, loss: Any = None) -> None:
        """Say that one optimizer step and all that belongs to it are done: the boundary.

        Here a job may be paused, parked, saved or ended (exit code 75). Gradients that are not None are part of the
        state, as more may be added to them; `zero_grad` before this call makes it smaller.
        """
        self._steps += 1

    def report(self, **values: Any) -> None:
        """Tell how well it does, by name: `job.report(accuracy=0.93, epoch=4)`. Shown by `ganger show`; what the stop
        rule of a job array goes by. Only rank 0 is listened to, about once a second; at most eight names.

        Raises ValueError for a name that is none, TypeError for what is no number."""
        numbers = metrics.checked(values)
        if self._control is not None:
            metrics.write(self._control.page, numbers)

    def register(self, name: str, item: Any) -> Any:
        """Make `item` part of the state: a tensor, a torch.Generator, or anything with state_dict/load_state_dict.

        Restores it at once if there is a saved state of that name. Returns `item`.
        """
        if not isinstance(item, (torch.Tensor, torch.Generator)) and not hasattr(item, "load_state_dict"):
            raise TypeError(
                f"cannot register {name}: a {type(item).__name__} has no state_dict() and load_state_dict()"
            )
        if name in self._training.objects:
            raise ValueError(f"{name!r} is registered already; choose another name")
        self._training.objects[name] = item
        if self._restored is not None and name in self._restored.unclaimed:
            apply_object(item, self._restored.unclaimed.pop(name))
        return item

    @contextlib.contextmanager
    def no_suspend(self) -> Iterator[None]:
        """Inside, steps are counted but are no boundaries. Every rank must enter and leave at the same step."""
        self._held += 1
        self._tell_at_next_step()
        try:
            yield
        finally:
            self._held -= 1

    def safe_point(self) -> None:
        """Call it now and then in something long without steps (evaluation): the job is seen to be alive."""
        if self._control is not None:
            self._control.phase(Phase.EVALUATION)
            self._control.safe_point()

    def on_resize(self, callback: Callable[[int, int], None]) -> Callable[[int, int], None]:
        """Decorator: call `callback(old_world, new_world)` when training goes on with another number of ranks."""
        if self._restored is not None and self._restored.world != self.world:
            callback(self._restored.world, self.world)
        return callback

    # -- told by the loaders

    def took_batch(self, samples: int, waited_nanoseconds: int) -> None:
        self._samples += samples
        self._waited_nanoseconds += waited_nanoseconds

    def resumed_pass(self) -> None:
        """The loader that was being read at the boundary is about to go on."""
        self._set_random()

    def worker_hint(self) -> int | None:
        return None if self._keeper is None else self._keeper.workers

    # -- inside

    def _tell(self, passed: int, loss: Any) -> int:
        """Publish what the steps `passed` since the last call came to; returns after how many to call again."""
        assert self._progress is not None
        self._steps += passed
        return self._progress.publish(passed, self._samples, self._waited_nanoseconds, loss)

    def _show(self) -> None:
        if self._progress is not None:
            self._progress.show(self._samples, self._waited_nanoseconds)

    def _offer_resize(self, control: Control, global_batch: int) -> None:
        """Another number of ranks can go on from here: each has all of the state, and the loaders know their place."""
        page = control.page
        if not page.get(Word.CAPABILITIES) & Capability.RESIZE:
            why_not = why_not_replicated(self._training)
            if why_not:
                tell(f"this job cannot go on with another number of ranks: {why_not}")
                return
        page.set(Word.RESIZE_DIVIDES, math.gcd(page.get(Word.RESIZE_DIVIDES), global_batch))
        page.set(Word.CAPABILITIES, page.get(Word.CAPABILITIES) | Capability.RESIZE)

    def _set_random(self) -> None:
        # not in attach: what the script draws before its loop (splits, weights) must come out as in the first run
        restored = self._restored
        if restored is None:
            return
        if restored.rank == self.rank:
            restore_random(restored.random)
        else:
            # A rank that was not there before starts from the state of another, but must not draw what that one draws.
            seed_everything(mixed(self._seed, restored.step, self.rank))

    def _position(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            # not the image's step: inside no_suspend steps are made that are no boundaries
            "steps": self.step_count,
            "samples": self._samples,
            "loaders": [loader.position() for loader in self._loaders],
        }


def _managed_step(
    job: TrainingJob, boundary: Callable[[], None]
) -> tuple[Callable[..., None], Callable[[], int], Callable[[], None]]:
    """TrainingJob.step under control, as a closure: it is called in every step, and most have nothing to tell.

    It only counts down to the step at which to tell. The second function says how many steps are not told of yet; the
    third makes the next step tell, whatever the first one thought.
    """
    tell_after = countdown = 0

    def step(loss: Any = None) -> None:
        nonlocal tell_after, countdown
        countdown -= 1
        if countdown <= 0:
            tell_after = countdown = job._tell(tell_after - countdown, loss)
            if job._held:
                tell_after = countdown = 0
                return
        boundary()

    def untold_steps() -> int:
        return tell_after - countdown

    def tell_at_next_step() -> None:
        nonlocal tell_after, countdown
        tell_after, countdown = tell_after - countdown, 0

    return step, untold_steps, tell_at_next_step


def _rank_and_world(control: Control | None) -> tuple[int, int]:
    if control is not None:
        return control.rank, control.world
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
