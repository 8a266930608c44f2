"""Scripts whose training loop is a trainer's: the trainers that the agent knows, and what their adapters share.

The script is run again up to its call of the trainer, whose loop begins at the place where training stopped; there the
state is put back. The trainer's loop is not run again, so what it writes is not repeated: its checkpoints, its logs.
What comes before the call is repeated, and refused where that would change anything (`outside_changes`).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import torch

from ganger.injob.control import Control, StopRequest, failure_text
from ganger.injob.page_layout import Capability, Error, Opaque, PagePhase
from ganger.training.outside_changes import OutsideChanges
from ganger.training.progress_reporter import ProgressReporter
from ganger.training.rank_processes import keep_default_group
from ganger.training.replay import OutputReplay
from ganger.training.script_objects import weakly
from ganger.training.state import TrainingObjects, capture, restore_random
from ganger.training.state_codec import StateNotSupportedError, tell
from ganger.training.state_keeper import CannotKeepError, StateKeeper
from ganger.training.trainer_variables import TrainerVariables

# By the module with the trainer's class: ours for it.
KNOWN = {
    "transformers.trainer": "huggingface_trainer",
    "lightning.pytorch.trainer.trainer": "lightning_trainer",
    "pytorch_lightning.trainer.trainer": "lightning_trainer",
}

_ALL = Capability.PAUSE | Capability.OFFLOAD | Capability.CHECKPOINT | Capability.ADAPTER


class TrainerAdapter(Protocol):
    """One call of a trainer. `form`: the trainer's name. `variables`: what it keeps beside its objects."""

    form: str
    variables: TrainerVariables

    def objects(self) -> TrainingObjects:
        """Return what is trained."""

    def place(self) -> dict[str, Any]:
        """Return where its loop is."""

    def refusal(self) -> str:
        """Return why its loop cannot begin at the place where it is now; '' if it can."""


class TrainerRun:
    """The rank's process. One call of a trainer after the other has it; only the first can be gone on with."""

    def __init__(self, control: Control, diversion: OutputReplay | None, outside: OutsideChanges) -> None:
        self._control = control
        self._diversion = diversion
        self._outside = outside
        self._adapter: TrainerAdapter | None = None
        self._calls = 0
        self._reasons: list[str] = []
        self._capabilities = 0
        self._is_aside = False
        self._is_refined = False
        self._is_owed = False
        self._samples = 0
        self._arriving: dict[str, Any] | None = None
        self._random: dict[str, Any] = {}
        # Where the trainer's loop is to begin, until it has.
        self.target: dict[str, Any] | None = None
        self._keeper = StateKeeper(control, self._objects, self._position)
        control.handlers = self._keeper.handlers()._replace(on_checkpoint=self._checkpoint)
        self._progress = ProgressReporter(control.page, TrainingObjects, self._keeper)

    def begin(self, adapter: TrainerAdapter) -> None:
        """A trainer is about to train. Its script's part before is over."""
        self._adapter = adapter
        self._calls += 1
        self._outside.settle()
        if self._calls > 1:
            self.note_reason("it trains in more than one call of a trainer")
            return
        keep_default_group()
        if self._control.restore is None:
            self._control.hello(Capability.PAUSE, torch=str(torch.__version__), form=adapter.form)
            self._control.start(0)
            return
        self._capabilities = _ALL
        self._control.hello(_ALL, torch=str(torch.__version__), form=adapter.form)
        self._control.phase(PagePhase.REPLAY)
        target = self._keeper.position_at_start()
        if target.get("trainer") != adapter.form:
            self._control.give_up_restore(f"the state is not one of {adapter.form}")
        if target["reasons"]:
            self._control.give_up_restore(f"training cannot go on from here: {'; '.join(target['reasons'])}")
        self.target = target["place"]

    # -- the trainer's loop

    def guarded(self, act: Callable[[], None]) -> None:
        """Do something for the agent: no failure of it ends the script."""
        try:
            act()
        except Exception as problem:
            self.step_aside(problem)

    def loop_begins(self) -> None:
        """The trainer is set up, and its loop begins: from here on the script's variables are compared."""
        if self._adapter is not None and not self._adapter.variables.noted:
            try:
                self._adapter.variables.note()
            except StateNotSupportedError as error:
                self.note_reason(str(error))

    def stepped(self, samples: int) -> None:
        """A step of the optimizer was made; its boundary comes with the next `boundary`."""
        self._is_owed = True
        self._control.is_step_owed = True
        self._samples += samples

    def boundary(self) -> None:
        """The trainer is between two steps, with all that belongs to the last one done."""
        if not self._is_owed or self.target is not None:
            return
        self._is_owed = False
        self._control.is_step_owed = False
        if self._is_aside:
            self._control.boundary()
            return
        if not self._is_refined:
            self._refine()
        if reason := self._refusal():
            self.note_reason(reason)
        self._progress.publish(1, self._samples, 0, None)
        self._control.boundary()

    def safe_point(self) -> None:
        """The trainer evaluates."""
        if not self._is_aside:
            self._control.evaluated()

    def report_loss(self, loss: float) -> None:
        self._progress.publish(0, self._samples, 0, loss)

    def note_reason(self, reason: str) -> None:
        """It cannot be brought back in a new process."""
        if reason in self._reasons:
            return
        self._reasons.append(reason)
        if self.target is not None:
            self.give_up(reason)
        if self._is_refined and self._capabilities & Capability.CHECKPOINT:
            self._tell_capabilities()

    # -- going back

    def arrive(self, prepare: Callable[[dict[str, Any]], None] = lambda _: None) -> None:
        """The trainer's loop is where it was: put the state back and go on. `prepare` is called with the place, its
        tensors included, before the values are put back."""
        assert self._adapter is not None
        restored = self._keeper.restore_at_start()
        assert restored is not None, "going back means that a state was assigned"
        prepare(restored.position["place"])
        self._samples = restored.position["samples"]
        if missing := self._adapter.variables.put_back(restored.position["variables"]):
            self.give_up(f"{missing} is not there, or is no object as it was")
        self._random = restored.random
        self.restore_random()
        self.target = None
        self._is_refined = True
        self._arriving = restored.position
        self._progress.training = weakly(self._adapter.objects(), list)
        if self._diversion is not None:
            self._diversion.end()
        tell(restored.notice)
        self._control.phase(PagePhase.TRAINING)
        self._control.start(restored.step)
        self._arriving = None

    def restore_random(self) -> None:
        """Put the random generators to where they were when training stopped."""
        restore_random(self._random)

    def step_aside(self, problem: Exception) -> None:
        """Let training go on without the agent; a script on its way back to a state is ended instead."""
        text = failure_text(problem)
        if self.target is not None:
            self.give_up(text)
        tell(f"{text}; training goes on")
        if not self._is_aside:
            self._is_aside = True
            self._control.step_aside(Opaque.AGENT_FAILED, text)

    def give_up(self, text: str) -> NoReturn:
        if self._diversion is not None:
            self._diversion.give_up()
        message = f"this trainer cannot be brought back to its place: {text}"
        tell(message)
        self._control.give_up_restore(message)

    # -- helpers

    def _objects(self) -> TrainingObjects:
        assert self._adapter is not None
        return self._adapter.objects()

    def _position(self) -> dict[str, Any]:
        if self._arriving is not None:
            return self._arriving
        assert self._adapter is not None
        is_kept = not self._reasons
        return {
            "trainer": self._adapter.form,
            "samples": self._samples,
            "place": self._adapter.place() if is_kept else {},
            # a state parked for a pause can move to other nodes without the rank
            "reasons": list(self._reasons),
            "variables": self._adapter.variables.changed() if is_kept else {},
        }

    def _refusal(self, *, is_due: bool = False) -> str:
        assert self._adapter is not None
        return self._outside.check() or self._adapter.refusal() or self._adapter.variables.reason(is_due=is_due)

    def _refine(self) -> None:
        """Find out after the first step what can be kept, and report it."""
        assert self._adapter is not None
        training = self._adapter.objects()
        self._progress.training = weakly(training, list)
        self._capabilities = _ALL
        try:
            capture(training, {})
        except StateNotSupportedError as error:
            self._capabilities &= ~Capability.OFFLOAD
            self.note_reason(str(error))
        if reason := self._refusal(is_due=True):
            self.note_reason(reason)
        self._is_refined = True
        self._tell_capabilities()

    def _tell_capabilities(self) -> None:
        assert self._adapter is not None
        reason = "; ".join(self._reasons)
        if reason:
            self._capabilities &= ~(Capability.CHECKPOINT | Capability.ADAPTER)
            self._control.explain("ADAPTER", reason)
        self._control.hello(self._capabilities, form=self._adapter.form, reason=reason)
        if reason and self._control.rank == 0:
            tell(
                f"this trainer can be paused, but neither moved nor saved: {reason}. "
                "docs/how-to/mechanisms.md says what helps"
            )

    def _checkpoint(self, request: StopRequest) -> None:
        if reason := self._refusal(is_due=True):
            self.note_reason(reason)
        if self._reasons:
            raise CannotKeepError(Error.STATE_UNSAVEABLE, "; ".join(self._reasons))
        self._keeper.checkpoint(request)


class Trainers:
    """Of one process. `make_way` lets go of the page for an adapter, or returns False."""

    def __init__(self, make_way: Callable[[], bool], diversion: OutputReplay | None, outside: OutsideChanges) -> None:
        self._make_way = make_way
        self._diversion = diversion
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
            return self._begun(adapter, refusal)
        except Exception as problem:
            tell(f"{adapter.form} trains without control: {problem}")
            return None

    def _begun(self, adapter: TrainerAdapter, refusal: str) -> TrainerRun | None:
        if self._run is None:
            control: Any = Control.from_environment()
            if control is None:
                return None
            if refusal:
                control.explain("ADAPTER", refusal)
            if refusal or (control.restore is None and not self._make_way()) or not control.claim():
                control.close()
                return None
            if control.restore is not None and not self._make_way():
                control.close()
                return None
            self._run = TrainerRun(control, self._diversion, self._outside)
        self._run.begin(adapter)
        return self._run
