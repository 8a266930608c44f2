"""Scripts whose training loop is a trainer's: the trainers that the agent knows, and what their adapters share.

The script is run again up to its call of the trainer, whose loop begins at the place where training stopped; there the
state is put back. The trainer's loop is not run again, so what it writes is not repeated: its checkpoints, its logs.
What comes before the call is repeated, and refused where that would change anything (`outside_changes`).

Of a trainer's own objects every plain value is kept, for a second run comes to another place in them before its state
is put back. Of the script only what has changed since training began, as for any unmodified script.

Trainers fetch ahead: accelerate's loaders take one batch more than they hand out, to know which is the last. A pass is
gone on with behind the batches that training has used; those that were fetched ahead of it are fetched again, with the
random numbers of the first time.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from typing import Any, Callable

from torch.utils.data import DataLoader

from ganger.injob.control import Control
from ganger.injob.page_layout import Capability, Word
from ganger.training.attached_loops import EpochClock
from ganger.training.loops import Pass, creation_state, set_creation_state, skip_batches
from ganger.training.outside_changes import OutsideChanges
from ganger.training.replay import OutputReplay
from ganger.training.replayed_run import ReplayedRun
from ganger.training.script_frames import frames, is_own, package_of
from ganger.training.script_variables import Scope, Variables, scopes_of_script, with_inner
from ganger.training.state import TrainingObjects, capture_random, restore_random
from ganger.training.state_codec import StateNotSupportedError, tell

# By the module with the trainer's class: ours for it.
KNOWN = {
    "transformers.trainer": "huggingface_trainer",
    "lightning.pytorch.trainer.trainer": "lightning_trainer",
    "pytorch_lightning.trainer.trainer": "lightning_trainer",
}
# The scope of the model: of its plain values those are kept that change.
MODEL = "model"
CALLBACKS = "callbacks"
# What a script keeps of these is not part of the state: datasets, tokenizers, configurations.
_LIBRARIES = frozenset(
    [
        *("accelerate", "datasets", "huggingface_hub", "peft"),
        *("lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning"),
        *("safetensors", "sentencepiece", "tokenizers", "torchmetrics", "torchvision", "transformers", "trl"),
    ]
)
# Another node's clock shows another time.
_CLOCKS = frozenset(
    [
        *("start_time", "_start_time", "_end_time", "_last_time_checked", "_last_val_time", "_train_start_time"),
        *("start_t", "last_print_t", "_last_time"),
    ]
)
# It may take tenths of a second where there are many values.
_LOST_EVERY_S = 30.0
# More batches are not fetched ahead in the process that trains.
_MOST_AHEAD = 8


class TrainerAdapter(ABC):
    """One call of a trainer. `form`: the trainer's name. Values of classes of `packages` are looked into."""

    form = ""
    packages: frozenset[str] = frozenset()
    # Whether batches are fetched ahead in this process.
    is_ahead = True

    def __init__(self) -> None:
        self.run: Any = None
        self.variables = TrainerVariables(self)
        self._pass: TrainerPass | None = None
        # Of the pass that is made next.
        self._target: dict[str, Any] | None = None

    @abstractmethod
    def unsupported(self) -> str:
        """Return why this trainer's state cannot be kept; '' if it can."""

    @abstractmethod
    def without_checkpoint(self, arguments: Any, options: Any) -> tuple[Any, Any]:
        """Return what the trainer is called with where the state comes from another place than its own checkpoint."""

    @abstractmethod
    def hooked(self) -> Any:
        """While the trainer trains, its methods report where it is."""

    @abstractmethod
    def objects(self) -> TrainingObjects:
        """Return what is trained."""

    @abstractmethod
    def loop_position(self) -> dict[str, Any]:
        """Return where its loop is."""

    @abstractmethod
    def refusal(self) -> str:
        """Return why its loop cannot begin at the place where it is now; '' if it can."""

    @abstractmethod
    def scopes(self) -> list[Scope]:
        """Return the trainer's own objects by name."""

    @abstractmethod
    def skipped(self) -> frozenset[int]:
        """Return the ids of objects that are not looked into."""

    @abstractmethod
    def loaders(self) -> list[Any]:
        """Return the loaders that it trains with."""

    def make_pass(self, loader: Any, plain: Callable[[Any], Any]) -> Any:
        """Make the iterator of a DataLoader."""
        if not any(loader is one for one in self.loaders()):
            return plain(loader)
        target, self._target = self._target, None
        self._pass = TrainerPass(loader, plain, target, self.run.restore_random if self.is_ahead else None)
        return self._pass


class TrainerRun(ReplayedRun):
    """The rank's process. One call of a trainer after the other has it; only the first can be gone on with."""

    what, documentation = "trainer", "docs/how-to/mechanisms.md"
    refusal_text = "this trainer cannot be brought back to its place"
    capability = Capability.ADAPTER

    def __init__(self, control: Control, output_replay: OutputReplay | None, outside: OutsideChanges) -> None:
        super().__init__(output_replay, outside)
        self._adapter: Any = None
        self._calls = 0
        self._is_owed = False
        self._random: dict[str, Any] = {}
        self._clock = EpochClock(control)
        # Where the trainer's loop is to begin, until it has.
        self.target: dict[str, Any] | None = None if control.restore is None else {}
        self.attach_page(control)

    def begin(self, adapter: TrainerAdapter) -> None:
        """A trainer is about to train. Its script's part before is over."""
        self._adapter = adapter
        self._calls += 1
        self._outside.settle()
        if self._calls > 1:
            self.note_reason("it trains in more than one call of a trainer")
            return
        self.form = adapter.form
        target = self.start()
        if target is not None:
            if target.get("trainer") != adapter.form:
                self.control.give_up_restore(f"the state is not one of {adapter.form}")
            self.refuse_reasons(target)
            # Version 0.2 saved none.
            self._clock.resume(target.get("clock"))
            self.target = target["place"]

    @property
    def is_replaying(self) -> bool:
        return self.target is not None

    # -- the trainer's loop

    def loop_begins(self) -> None:
        """The trainer is set up, and its loop begins: from here on the script's variables are compared."""
        if not self._adapter.variables.noted:
            try:
                self._adapter.variables.note()
            except StateNotSupportedError as error:
                self.note_reason(str(error))

    def stepped(self, samples: int) -> None:
        """A step of the optimizer was made; its boundary comes with the next `boundary`."""
        self._is_owed = True
        self.control.is_step_owed = True
        self._samples += samples

    def epoch_begins(self, number: int, count: int) -> None:
        """Epoch `number` of `count` begins, or is the one that a restored state continues. `count`: 0 if the trainer
        has no number of epochs; then its job reports none."""
        if self._is_aside:
            return
        self._clock.begin(number)
        self.control.page.set(Word.TRAINING_EPOCH, number)
        self.control.page.set(Word.TRAINING_EPOCHS, count)
        self.control.declare_epochs(count > 0)

    def epoch_ends(self) -> None:
        """The trainer is between two epochs, and has done all that belongs to the first: evaluation, checkpoint."""
        self._clock.end()
        self.boundary(ends_epoch=True)

    def training_ends(self) -> None:
        """The trainer is done. After the last epoch there is no boundary, as no step follows."""
        self._clock.end()
        if self.control.series is not None:
            self.control.series.flush()

    def boundary(self, *, ends_epoch: bool = False) -> None:
        """The trainer is between two steps, with all that belongs to the last one done."""
        if not self._is_owed or self.is_replaying:
            return
        self._is_owed = False
        self.control.is_step_owed = False
        if not self._is_aside:
            if not self._is_refined:
                self._refine()
            self.note_reason(self.why_not_restorable(is_due=False))
            self._progress.publish(1, self._samples, 0, None)
        (self.control.epoch_boundary if ends_epoch else self.control.boundary)()

    def safe_point(self) -> None:
        """The trainer evaluates."""
        if not self._is_aside:
            self.control.evaluated()

    def report_loss(self, loss: float) -> None:
        self._progress.report_loss(loss)

    def note_reason(self, reason: str) -> None:
        if reason and self.is_replaying:
            self.give_up_replay(reason)
        super().note_reason(reason)

    # -- for the state

    def objects(self) -> TrainingObjects:
        found: TrainingObjects = self._adapter.objects()
        return found

    def loop_position(self) -> dict[str, Any]:
        is_kept = not self._reasons
        return {
            "trainer": self.form,
            "clock": self._clock.position(),
            "place": self._adapter.loop_position() if is_kept else {},
            "variables": self._adapter.variables.changed() if is_kept else {},
        }

    def why_not_restorable(self, is_due: bool = True) -> str:
        return self._outside.check() or self._adapter.refusal() or self._adapter.variables.reason(is_due=is_due)

    def arrive(self, prepare: Callable[[dict[str, Any]], None] = lambda _: None) -> None:
        """The trainer's loop is where it was: put the state back and continue. `prepare` is called with the place, its
        tensors included, before the values are put back."""
        restored = self.restore_objects()
        prepare(restored.position["place"])
        if missing := self._adapter.variables.put_back(restored.position["variables"]):
            self.give_up_replay(f"{missing} is not there, or is no object as it was")
        self._random = restored.random
        self.restore_random()
        self.target = None
        self.resume_training(restored)

    def restore_random(self) -> None:
        """Put the random generators to where they were when training stopped."""
        restore_random(self._random)


Begin = Callable[[TrainerAdapter, str], "TrainerRun | None"]


class Trainers:
    """Of one process. `make_way` lets go of the page for an adapter, or returns False; `stand_aside` reports a failure
    before there is a run, and ends a rank with a state to bring back."""

    def __init__(
        self,
        make_way: Callable[[], bool],
        stand_aside: Callable[[Exception], None],
        output_replay: OutputReplay | None,
        outside: OutsideChanges,
    ) -> None:
        self._make_way, self._stand_aside = make_way, stand_aside
        self._output_replay = output_replay
        self._outside = outside
        self._run: TrainerRun | None = None
        self._pid = os.getpid()

    def hook(self, name: str) -> None:
        """`name` has been imported. No failure of this ends the import."""
        try:
            importlib.import_module(f"ganger.training.{KNOWN[name]}").hook(sys.modules[name], self.begin)
        except Exception as problem:
            tell(f"{name} is not known in this version: {problem}")

    def begin(self, adapter: TrainerAdapter, refusal: str) -> TrainerRun | None:
        """A trainer is about to train. Returns what controls it; None where nothing does, as its process is saved as
        it is, or is not the rank, or trains otherwise too. `refusal`: why the adapter cannot be of use."""
        if os.getpid() != self._pid or os.environ.get("GANGER_IMAGE"):
            return None
        try:
            if self._run is None:
                control = Control.from_environment()
                if control is None:
                    return None
                if refusal:
                    control.explain("ADAPTER", refusal)
                # The page first: what made way does not come back.
                if refusal or not control.claim() or not self._make_way():
                    control.close()
                    return None
                self._run = TrainerRun(control, self._output_replay, self._outside)
            self._run.begin(adapter)
            return self._run
        except Exception as problem:
            (self._stand_aside if self._run is None else self._run.step_aside)(problem)
            return None


def hook_calls(trainer: Any, name: str, make: Callable[[Any], TrainerAdapter], begin: Begin) -> None:
    """Let every call of this method of a class of trainers be controlled, and the passes over DataLoaders in it."""
    current: list[TrainerAdapter] = []
    original, plain = getattr(trainer, name), DataLoader.__iter__

    def iterate(loader: Any) -> Any:
        return current[-1].make_pass(loader, plain) if current else plain(loader)

    @functools.wraps(original)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        training = make(self)
        training.run = None if current else begin(training, training.unsupported())
        if training.run is None:
            return original(self, *arguments, **options)
        if training.run.is_replaying:
            arguments, options = training.without_checkpoint(arguments, options)
        current.append(training)
        try:
            with training.hooked():
                result = original(self, *arguments, **options)
            training.run.guarded(training.run.training_ends)
            return result
        finally:
            current.pop()

    DataLoader.__iter__ = iterate  # type: ignore[method-assign]
    setattr(trainer, name, call)


@contextlib.contextmanager
def replaced(methods: list[tuple[Any, str, Callable[..., Any]]]) -> Iterator[None]:
    """Let (object, name, wrapper) have each wrapper called with the object's own method, and with its arguments."""
    present = [(holder, name, wrapper) for holder, name, wrapper in methods if hasattr(holder, name)]
    for holder, name, wrapper in present:
        setattr(holder, name, functools.partial(wrapper, getattr(holder, name)))
    try:
        yield
    finally:
        for holder, name, _ in present:
            vars(holder).pop(name, None)


class TrainerPass(Pass):
    """The iterator of one pass over the training loader. `target`: what `position` returned when training stopped in
    this pass; `restore` puts the random generators to where they were then. None where no batches are fetched ahead."""

    def __init__(
        self, loader: Any, original: Any, target: dict[str, Any] | None, restore: Callable[[], None] | None
    ) -> None:
        self.loader = loader
        self.taken = 0
        self._restore = restore or (lambda: None)
        self._drawn: deque[Any] = deque(maxlen=_MOST_AHEAD)
        self._ahead: deque[Any] = deque()
        self._is_here = restore is not None and not loader.num_workers
        if target is not None:
            set_creation_state(loader, target["at creation"])
        self.at_creation = creation_state(loader) if target is None else target["at creation"]
        self._iterator = original(loader)
        if target is not None:
            self.taken = int(target["used"])
            self._ahead.extend(target["ahead"])
            skip_batches(loader, self._iterator, self.taken)
            self._restore()

    def __next__(self) -> Any:
        drawn = None
        if self._ahead:
            drawn = self._ahead.popleft()
            restore_random(drawn)
            batch = next(self._iterator)
            self._restore()
        else:
            if self._is_here:
                drawn = capture_random(has_devices=False)
            batch = next(self._iterator)
        self.taken += 1
        self._drawn.append(drawn)
        return batch

    def position(self, used: int) -> dict[str, Any]:
        """Return where the pass is, when training has used so many of its batches."""
        ahead = self.taken - used
        drawn = list(self._drawn)[len(self._drawn) - ahead :] if self._is_here and ahead else []
        return {"used": used, "ahead": drawn, "at creation": self.at_creation}

    def refusal(self, used: int) -> str:
        """Return why the pass cannot be gone on with; '' if it can."""
        if self.loader.num_workers and getattr(self.loader, "persistent_workers", False):
            return "its DataLoader(persistent_workers=True) keeps random numbers in its workers"
        return "" if 0 <= self.taken - used <= _MOST_AHEAD else "it fetches batches in a way of its own"


class TrainerVariables(Variables):
    """What a trainer and its script keep beside the models: counters, logs, callbacks, variables of the script."""

    def __init__(self, adapter: TrainerAdapter) -> None:
        super().__init__()
        self._adapter = adapter
        self._looked_at = float("-inf")

    def note(self) -> None:
        super().note()
        names = {scope.path for scope in self._adapter.scopes()} - {MODEL}
        self._before = {path: values for path, values in self._before.items() if path.partition(".")[0] not in names}

    def put_back(self, saved: dict[str, dict[Any, Any]]) -> str:
        # A trainer makes some of its own objects only in its loop.
        made_later = {scope.path for scope in self._adapter.scopes()} - {MODEL, CALLBACKS}
        present = {scope.path for scope in self._look()}
        known = {path for path in saved if path in present or path.partition(".")[0] not in made_later}
        return super().put_back({path: saved[path] for path in known})

    def reason(self, *, is_due: bool) -> str:
        """Return why the values cannot be kept; '' if they can. Looks now and then, or if it `is_due`."""
        now = time.monotonic()
        if not self.noted or (not is_due and now < self._looked_at + _LOST_EVERY_S):
            return ""
        self._looked_at = now
        try:
            return self.lost()
        except StateNotSupportedError as error:
            return str(error)

    def _look(self) -> list[Scope]:
        running = [frame for frame in frames()[::-1] if is_own(frame.f_globals.get("__name__"))]
        own = {package_of(frame.f_globals.get("__name__")) for frame in running} | {"__main__", "tqdm"}
        skipped = self._adapter.skipped()
        of_trainer = with_inner(self._adapter.scopes(), own | self._adapter.packages, skipped)
        # What is there already is not looked at again by way of the script's variables.
        seen = skipped | {id(value) for scope in of_trainer for _, value in scope.items if hasattr(value, "__dict__")}
        of_script = with_inner(scopes_of_script(running), own, seen)
        for scope in (*of_trainer, *of_script):
            scope.foreign = [
                (name, value) for name, value in scope.foreign if package_of(type(value).__module__) not in _LIBRARIES
            ]
        for scope in of_trainer:
            scope.items = [(name, value) for name, value in scope.items if name not in _CLOCKS]
        return [*of_trainer, *of_script]


def scope_of(name: str, item: Any, skipped: frozenset[str] = frozenset()) -> Scope:
    """Return the attributes of an object as values by the name of the object."""
    items = [(key, value) for key, value in vars(item).items() if key not in skipped and not callable(value)]
    return Scope(name, items, lambda key, value: object.__setattr__(item, key, value))
