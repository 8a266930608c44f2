"""The five-line form: `attach`, a data loader, the epochs, and one call per step.

Outside Ganger everything here still works and nothing is controlled: a script runs alone with the same numbers.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Iterable, Iterator
from typing import Any, Callable

import torch

from ganger.injob import metrics
from ganger.injob.control import Control, failure_text
from ganger.injob.page_layout import Capability, Opaque, Word
from ganger.training import agent, rank_processes
from ganger.training.attached_loops import (
    AUTO,
    ElasticLoader,
    EpochClock,
    LoopPosition,
    SampleRange,
    mixed,
    seed_everything,
)
from ganger.training.progress_reporter import ProgressReporter, counted_step
from ganger.training.rank_processes import keep_default_group, rank_and_world
from ganger.training.state import (
    Restored,
    TrainingObjects,
    UnclaimedObject,
    apply_object,
    capture_random,
    named_objects,
    restore_random,
)
from ganger.training.state_codec import tell
from ganger.training.state_keeper import StateKeeper
from ganger.training.state_parts import keep_shard, size_offer

# Process and page of the call that has the job; a process forked from it may have one of its own.
_attached: tuple[int, str] | None = None

# Steps until the next publication, where there is to be none.
_NEVER = 1 << 62

_IN_ANOTHER_PROCESS = Capability.CHECKPOINT | Capability.RESIZE | Capability.RESHARD
FIVE_LINE = Capability.PAUSE | Capability.OFFLOAD | Capability.CHECKPOINT | Capability.FIVE_LINE


def attach(
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    *,
    seed: int = 0,
    shard: Iterable[torch.Tensor] | None = None,
) -> TrainingJob:
    """Register what is trained and restore it if a state is assigned to this job. Call it before the training loop.

    Each argument may be one object, a list or a dictionary of them; names must be the same in every run. `seed` decides
    the order of samples in this job's loaders. `shard`: the parameters of the model that this rank keeps, as a
    parameter server does, where the ranks of its role keep all of them together; the others are not saved here.
    TypeError for what has no state, ValueError for a shard that is in no model, RuntimeError for a second call in one
    job: of two only one would be saved. Ends the process with EXIT_NO_STATE if an assigned state is unreadable.
    """
    global _attached
    agent.stand_down()
    training = TrainingObjects(
        models=named_objects(model, "model"),
        optimizers=named_objects(optimizer, "optimizer"),
        schedulers=named_objects(scheduler, "scheduler"),
        scalers=named_objects(scaler, "scaler"),
    )
    if shard is not None:
        keep_shard(training, shard)
    is_child = rank_processes.is_child()
    if is_child:
        rank_processes.watch()
    control = None if is_child else Control.from_environment()
    if control is not None and not control.claim():
        # A helper process of a script: the one that trains has the page.
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
        try:
            job._start(control)
        except Exception as problem:
            # A failure of the agent ends the script only where a state is to be restored.
            if control.restore is not None:
                control.give_up_restore(f"cannot restore: {failure_text(problem)}")
            job.step_aside(problem)
    return job


class TrainingJob:
    """One rank of a training job. Make it with `attach`."""

    def __init__(self, training: TrainingObjects, control: Control | None, seed: int) -> None:
        self._training = training
        self._control = control
        self._seed = seed
        self._progress: ProgressReporter | None = None
        self._loaders: list[ElasticLoader] = []
        # Of them, those made so far in this run of the script; one that is made in every epoch is the same again.
        self._made = 0
        self._place = LoopPosition()
        self._clock = EpochClock(control)
        self._reasons: list[str] = []
        # The agent has failed: steps are counted, no order is obeyed.
        self._is_aside = False
        self._epoch = 0
        self._steps = 0
        self._samples = 0
        self._waited_ns = 0
        self._held = 0
        self._untold_steps: Callable[[], int] = lambda: 0
        self._tell_at_next_step: Callable[[], None] = lambda: None
        self._restored: Restored | None = None
        self._position_at_start: dict[str, Any] | None = None
        # Of whose scale the state is, until `on_resize` has been told.
        self._old_world = 0
        # It was not there before, and starts from the state of another rank.
        self._is_new_rank = False
        # What training drew from at the boundary is due once the script is back there.
        self._is_random_due = False
        # Its loaders continue from here; before they may be looked into as in the first run.
        self._is_back_in_loop = True

    def _start(self, control: Control) -> None:
        keep_default_group()
        control.hello(FIVE_LINE, torch=str(torch.__version__))
        if self._training.is_shard:
            self._offer_resize(control, 0)
        keeper = StateKeeper(control, lambda: self._training, self._position)
        keeper.when_stopped = self._show
        control.handlers = keeper.handlers()
        self._progress = ProgressReporter(control, lambda: self._training, keeper)
        restored = keeper.restore_at_start()
        if restored is not None:
            self._restored = restored
            self._is_random_due = True
            self._is_back_in_loop = not restored.position.get("in loop")
            tell(restored.notice)
            if restored.position.get("reasons"):
                control.give_up_restore(f"training cannot go on from here: {'; '.join(restored.position['reasons'])}")
            self._steps = restored.position["steps"]
            self._epoch = restored.position["epoch"]
            self._clock.resume(restored.position.get("clock"))
            first, former = _former_role(control, restored)
            self._is_new_rank = restored.rank - first != control.role_rank
            # Of this rank, as if there had always been so many of its role.
            self._samples = restored.position["samples"] * former // control.role_size
            self._old_world = restored.position.get("old world", former)
            # What is saved before the first step is what was restored: the script has made no loaders yet, registered
            # nothing, and has its own numbers to draw before it is back in its loop.
            drawn_next = capture_random()
            self._restore_random(restored)
            self._training.objects = {name: UnclaimedObject(saved) for name, saved in restored.unclaimed.items()}
            self._position_at_start = {**restored.position, "samples": self._samples, "old world": self._old_world}
            control.start(restored.step)
            self._position_at_start = None
            self._training.objects = {}
            restore_random(drawn_next)
        else:
            control.start(0)
        hot_path = counted_step(self._tell, self._holds_step, control.boundary, self.step_aside)
        self.step, self._untold_steps, self._tell_at_next_step = hot_path  # type: ignore[method-assign]

    def step_aside(self, problem: Exception) -> None:
        """Obey no order from now on, after a failure of the agent; training continues."""
        text = failure_text(problem)
        tell(f"{text}; training goes on")
        if self._control is not None:
            self._is_aside = True
            self._control.step_aside(Opaque.AGENT_FAILED, text)

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
        return rank_and_world(self._control)[0]

    @property
    def world(self) -> int:
        return rank_and_world(self._control)[1]

    # -- what a script calls

    def dataloader(
        self,
        dataset: Any,
        *,
        global_batch: int | Callable[[int], int],
        shuffle: bool = False,
        num_workers: int | str = 0,
        drop_last: bool = False,
        mesh: Any = None,
        **options: Any,
    ) -> ElasticLoader:
        """A loader of this rank's share of `dataset` that continues where training was.

        `global_batch` samples over all ranks form one step, whatever their number; ValueError if the ranks do not
        divide it. A function says how many for a number of ranks, for jobs that are to take more with more of them.
        `mesh`: the data-parallel dimension of a device mesh (`mesh["dp"]`), where ranks of another share their samples.
        Call it in the same order in every run. `options` go to torch's DataLoader. Position counts the batches the loop
        has taken, not those prefetched. `num_workers`: "auto" makes as many as the rank has cores beside its own when
        a pass begins; the batches are the same with any number of workers. ValueError for another text.
        """
        if isinstance(num_workers, str) and num_workers != AUTO:
            raise ValueError(f'num_workers is a number or "auto", not {num_workers!r}')
        rank, ranks = rank_and_world(self._control)
        world = ranks
        if mesh is not None:
            rank, world = mesh.get_local_rank(), mesh.size()
        number = self._made
        self._made += 1
        whole = global_batch if isinstance(global_batch, int) else global_batch(world)
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise TypeError(f"{type(dataset).__name__} is no map-style dataset; the elastic loader needs len() and []")
        cut = SampleRange(len(dataset), whole, rank, world, shuffle, drop_last)
        loader = ElasticLoader(dataset, cut, mixed(self._seed, number), num_workers, options, self)
        if number < len(self._loaders):
            loader.follow(self._loaders[number])
        elif self._is_back_in_loop:
            self._go_on(number, loader)
        self._loaders[number:] = [loader, *self._loaders[number + 1 :]]
        if self._control is not None:
            # Of a role whose ranks share the samples, the number of its ranks is to divide it.
            ranks = self._control.role_size
            self._offer_resize(self._control, whole * ranks // world if whole == global_batch else 0)
        return loader

    def epochs(self, count: int) -> Iterator[int]:
        """0 .. count-1, without the epochs that a restored state has behind it.

        The last step of an epoch's pass has its boundary when the epoch is over, and what the script does after the
        pass is done; that of the last epoch has none, as training is over.
        """
        first = self._enter_loop(counts_steps=False)
        made_before = self._made
        if self._control is not None:
            self._control.page.set(Word.TRAINING_EPOCHS, max(0, count))
            self._control.declare_epochs(True)
        for self._epoch in range(first, count):
            self._clock.begin(self._epoch)
            if self._place.held:
                self._boundary()
            elif self._epoch > first and self._control is not None:
                # Its steps had their boundaries before it was known that the epoch ends.
                self._control.declare_epochs(False)
            self._made = made_before
            self._place.begin_epoch()
            if self._control is not None:
                self._control.page.set(Word.TRAINING_EPOCH, self._epoch)
            try:
                yield self._epoch
            except GeneratorExit:
                self._place.leave_loop()
                raise
            self._place.end_epoch()
            self._clock.end()
        self._finish()

    def steps(self, count: int | None = None) -> Iterator[int]:
        """0 .. count-1, or for ever, without the steps that a restored state has behind it: instead of `epochs`, where
        it follows from the number of the step what is to be done in it. Call `step` once in each."""
        self._enter_loop(counts_steps=True)
        for number in itertools.count(self.step_count):
            if count is not None and number >= count:
                break
            if number + 1 == count:
                self._place.take_last_number()
                self._tell_at_next_step()
            try:
                yield number
            except GeneratorExit:
                self._place.leave_loop()
                raise
        self._finish()

    def step(self, loss: Any = None) -> None:
        """Say that one optimizer step and all that belongs to it are done: the boundary.

        Here a job may be paused, parked, saved or ended (exit code 75). Gradients that are not None are part of the
        state, as more may be added to them; `zero_grad` before this call makes it smaller.
        """
        self._steps += 1

    def log(self, **values: Any) -> None:
        """Log figures by name: `job.log(loss=0.31, accuracy=0.93)`. `ganger plot` draws them by step, `ganger show` has
        the newest, and the stop rule of a job array goes by them. Only rank 0 is listened to; at most eight names.

        Raises ValueError for a name that is none, TypeError for what is no number."""
        numbers = metrics.checked(values)
        if self._control is not None:
            self._control.log(numbers)

    # Its name before there were series.
    report = log

    def register(self, name: str, item: Any, *, position: bool = False) -> Any:
        """Make `item` part of the state: a tensor, a torch.Generator, or anything with state_dict/load_state_dict.

        Restores it at once if there is a saved state of that name. Returns `item`. `position`: it knows which batches
        of an epoch are done, and takes the others after a restart, for scripts with a data loader of their own.
        """
        if not isinstance(item, (torch.Tensor, torch.Generator)) and not hasattr(item, "load_state_dict"):
            kind = type(item).__name__
            raise TypeError(f"cannot register {name}: a {kind} has no state_dict() and load_state_dict()")
        if name in self._training.objects:
            raise ValueError(f"{name!r} is registered already; choose another name")
        self._training.objects[name] = item
        self._place.has_own_position |= position
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
        """Call it in something long without steps, in an evaluation after each mini-batch: the job is seen to be alive,
        and gets the cores that evaluation needs."""
        if self._control is not None:
            self._control.evaluated()

    def on_resize(self, callback: Callable[[int, int], None]) -> Callable[[int, int], None]:
        """Decorator: call `callback(old_world, new_world)` when training continues with another number of ranks.

        In a job of several roles these are numbers of ranks of its role."""
        world = self.world if self._control is None else self._control.role_size
        if self._restored is not None and self._old_world != world:
            callback(self._old_world, world)
        return callback

    # -- told by the loaders

    def took_batch(self, loader: ElasticLoader, samples: int, waited_ns: int, is_last: bool) -> None:
        self._samples += samples
        self._waited_ns += waited_ns
        if self._place.take_batch(loader, self.step_count, is_last):
            self._tell_at_next_step()

    def ended_pass(self, loader: ElasticLoader) -> None:
        self._place.end_pass(loader, self.step_count)
        self._tell_at_next_step()

    def resumed_pass(self, loader: ElasticLoader) -> None:
        """The loader was being read at the boundary, and is about to continue."""
        self._place.resume_pass(loader)
        self._set_random()

    def only_looked(self) -> None:
        """The loader that was about to continue was only looked into: what was drawn for that is not to count."""
        self._is_random_due = True

    def has_gone_on(self) -> bool:
        """Return whether a step was made in this process."""
        return self._restored is None or self.step_count > self._restored.position["steps"]

    # -- inside

    def _tell(self, passed: int, loss: Any) -> int:
        self._steps += passed
        if self._is_aside or self._progress is None:
            return _NEVER
        return self._progress.publish(passed, self._samples, self._waited_ns, loss)

    def _show(self) -> None:
        if self._progress is not None:
            self._progress.show(self._samples, self._waited_ns)

    def _offer_resize(self, control: Control, global_batch: int) -> None:
        """Another number of ranks can continue from here: from the state of each, or from the shards of all of them."""
        page = control.page
        if self._reasons:
            return
        offered = page.get(Word.CAPABILITIES)
        if not offered & (Capability.RESIZE | Capability.RESHARD):
            try:
                capability, why_not = size_offer(self._training)
            except Exception as problem:
                capability, why_not = 0, failure_text(problem)
            if not capability:
                tell(f"this job cannot go on with another number of ranks: {why_not}")
                return
            offered |= capability
        page.set(Word.RESIZE_DIVIDES, math.gcd(page.get(Word.RESIZE_DIVIDES), global_batch))
        page.set(Word.CAPABILITIES, offered)

    def _enter_loop(self, *, counts_steps: bool) -> int:
        if not self._place.enter_loop(counts_steps=counts_steps):
            return 0
        if not self._is_back_in_loop:
            self._is_back_in_loop = True
            for number, loader in enumerate(self._loaders):
                self._go_on(number, loader)
        if self._restored is not None and not self._restored.position.get("in pass", True):
            self._set_random()
        return self._epoch

    def _go_on(self, number: int, loader: ElasticLoader) -> None:
        if self._restored is not None and number < len(self._restored.position["loaders"]):
            loader.go_to(self._restored.position["loaders"][number])

    def _set_random(self) -> None:
        # Not in attach: what the script draws before its loop (splits, weights) must come out as in the first run.
        if self._restored is not None and self._is_random_due:
            self._is_random_due = False
            self._restore_random(self._restored)

    def _restore_random(self, restored: Restored) -> None:
        if not self._is_new_rank:
            restore_random(restored.random)
        else:
            # A rank that was not there before starts from the state of another, but must not draw what that one draws.
            seed_everything(mixed(self._seed, restored.step, self.rank))

    def _boundary(self) -> None:
        """The one of the last step of an epoch, which was held back until here."""
        self._place.held = 0
        if self._control is not None:
            self._control.is_step_owed = False
            try:
                self._control.epoch_boundary()
            except Exception as problem:
                self.step_aside(problem)

    def _finish(self) -> None:
        self._place.leave_loop()
        self._place.held = 0
        if self._control is not None:
            self._show()
            self._control.finish()

    def _holds_step(self) -> bool:
        """Return whether the step that was made is no boundary, or none yet."""
        assert self._control is not None
        if self._held:
            return True
        if self._is_aside:
            return False
        self._control.is_step_owed = self._place.holds_step()
        if not self._control.is_step_owed:
            self._look_around(self._control)
        return self._control.is_step_owed

    def _look_around(self, control: Control) -> None:
        """Offer no checkpoint once there was a boundary that a restart would not find back to."""
        reason = self._place.why_not_found_again()
        if not reason or reason in self._reasons:
            return
        self._reasons.append(reason)
        able = control.page.get(Word.CAPABILITIES) & ~_IN_ANOTHER_PROCESS
        control.hello(able, reason="; ".join(self._reasons))
        if control.rank == 0:
            tell(f"this job can be paused, but neither moved nor saved: {reason}")

    def _position(self) -> dict[str, Any]:
        if self._position_at_start is not None:
            return self._position_at_start
        if self._control is not None and self.step_count > 0:
            self._look_around(self._control)
        return {
            "epoch": self._epoch,
            "clock": self._clock.position(),
            "in loop": self._place.is_in_loop,
            "in pass": self._place.is_in_pass,
            # Needed on restore: a state at OFFLOAD can migrate to other nodes.
            "reasons": list(self._reasons),
            # Not the image's step: inside no_suspend steps are made that are no boundaries.
            "steps": self.step_count,
            "samples": self._samples,
            "loaders": [loader.position() for loader in self._loaders],
        }


def _former_role(control: Control, restored: Restored) -> tuple[int, int]:
    """Return the first rank that the role of this rank had in the world that saved, and how many ranks."""
    order = control.restore
    if order is not None and order.ranks:
        return order.first, order.ranks
    if control.role_size == control.world:
        return 0, restored.world
    return control.rank - control.role_rank, control.role_size
