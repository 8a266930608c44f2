"""A script that is run again up to where it was: what one with a loop of its own and one with a trainer's share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Callable, NoReturn

import torch

from ganger.injob import exit_code as exitcode
from ganger.injob.control import Control, StopRequest, failure_text
from ganger.injob.page_layout import EXIT_NO_STATE, Capability, Error, Opaque, PagePhase
from ganger.training.outside_changes import OutsideChanges
from ganger.training.progress_reporter import ProgressReporter
from ganger.training.rank_processes import keep_default_group
from ganger.training.replay import OutputReplay
from ganger.training.script_objects import weakly
from ganger.training.state import Restored, TrainingObjects, capture
from ganger.training.state_codec import StateNotSupportedError, tell
from ganger.training.state_keeper import CannotKeepError, StateKeeper


class ReplayedRun(ABC):
    """One process. Subclasses say what is trained, where the script is, and why it cannot be brought back there."""

    what = form = documentation = ""
    # Of what cannot be brought back.
    refusal_text = ""
    capability = 0
    # Set with the page.
    _keeper: StateKeeper
    _progress: ProgressReporter

    def __init__(self, diversion: OutputReplay | None, outside: OutsideChanges) -> None:
        self._diversion = diversion
        self._outside = outside
        self._control: Control | None = None
        self._reasons: list[str] = []
        self._capabilities = 0
        self._is_refined = False
        # The agent has failed: steps are counted, no order is obeyed.
        self._is_aside = False
        self._samples = 0
        # What is saved before the next boundary is what was restored.
        self._arriving: dict[str, Any] | None = None

    @property
    def control(self) -> Control:
        assert self._control is not None, "the page is taken before a loop begins"
        return self._control

    @property
    @abstractmethod
    def is_going_back(self) -> bool:
        """Whether the script has not come back to its place yet."""

    @abstractmethod
    def objects(self) -> TrainingObjects:
        """Return what is trained."""

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors beside the objects."""
        return []

    @abstractmethod
    def place(self) -> dict[str, Any]:
        """Return where the script is."""

    @abstractmethod
    def look(self) -> str:
        """Return why the script cannot be brought back to where it is now; '' if it can."""

    def retire(self) -> None:
        """Let go of the page, where that is possible."""

    # -- the page

    def take(self, control: Control) -> None:
        self._control = control
        keep_default_group()
        self._keeper = StateKeeper(control, self.objects, self._position)
        handlers = self._keeper.handlers()
        control.handlers = handlers._replace(on_checkpoint=self._checkpoint, by_image=control.by_image)
        self._progress = ProgressReporter(control.page, TrainingObjects, self._keeper)

    def start(self) -> dict[str, Any] | None:
        """Begin to train, or return the position to go back to."""
        control = self.control
        if not self.is_going_back:
            control.hello(Capability.PAUSE, torch=str(torch.__version__), form=self.form)
            control.start(0)
            return None
        self._capabilities = Capability.PAUSE | Capability.OFFLOAD | Capability.CHECKPOINT | self.capability
        control.hello(self._capabilities, torch=str(torch.__version__), form=self.form)
        control.phase(PagePhase.REPLAY)
        return self._keeper.position_at_start()

    def refuse_reasons(self, target: dict[str, Any]) -> None:
        # a state parked for a pause can move to other nodes without the rank
        if target["reasons"]:
            self.control.give_up_restore(f"{self.refusal_text}: {'; '.join(target['reasons'])}")

    def step_aside(self, problem: Exception) -> None:
        """Let training go on without the agent, after a failure of the agent. A script on its way back to a state is
        ended instead: it would train from a wrong one."""
        text = failure_text(problem)
        if self.is_going_back:
            self.give_up_replay(text)
        tell(f"{text}; training goes on")
        if self._is_aside or self._control is None:
            self.retire()
        else:
            self._is_aside = True
            self._control.step_aside(Opaque.AGENT_FAILED, text)

    def guarded(self, act: Callable[..., object], *arguments: Any) -> None:
        """Do something for the agent: no failure of it ends the script."""
        try:
            act(*arguments)
        except Exception as problem:
            self.step_aside(problem)

    def give_up_replay(self, text: str) -> NoReturn:
        if self._diversion is not None:
            self._diversion.give_up()
        message = f"{self.refusal_text}: {text}"
        tell(message)
        if self._control is not None:
            self._control.give_up_restore(message)
        exitcode.leave_now(EXIT_NO_STATE)

    # -- what can be kept

    def note_reason(self, reason: str) -> None:
        """It cannot be brought back in a new process."""
        # A process that is saved as it is need not be.
        if reason and reason not in self._reasons and not (self._control is not None and self._control.by_image):
            self._reasons.append(reason)
            if self._is_refined and self._capabilities & Capability.CHECKPOINT:
                self._tell_capabilities()

    def _tell_capabilities(self) -> None:
        reason = "; ".join(self._reasons)
        if reason:
            self._capabilities &= ~(Capability.CHECKPOINT | self.capability)
            if self.capability == Capability.ADAPTER:
                self.control.explain("ADAPTER", reason)
        self.control.hello(self._capabilities, form=self.form, reason=reason)
        if reason and self.control.rank == 0:
            helps = f"{self.documentation} says what helps"
            tell(f"this {self.what} can be paused, but neither moved nor saved: {reason}. {helps}")

    def _refine(self) -> None:
        """Find out after the first step what the script supports, and report it as capabilities."""
        training = self.objects()
        self._progress.training = weakly(training, self.tensors)
        self._capabilities = Capability.PAUSE | Capability.CHECKPOINT | self.capability
        try:
            capture(training, {})
            self._capabilities |= Capability.OFFLOAD if training.models else 0
        except Exception as problem:
            self.note_reason(reason_of(problem))
        if not training.models:
            self.note_reason("it has no torch.nn.Module")
        if self.control.by_image:
            # The process is saved as it is: what a second run could not repeat does not matter.
            self._capabilities = self._capabilities & ~self.capability | Capability.IMAGE
            self._reasons.clear()
        self.note_reason(self.look())
        self._is_refined = True
        self._tell_capabilities()

    def _checkpoint(self, request: StopRequest) -> bool:
        """Save, if a second run comes back here as of now. Return whether memory was freed for that run, which is made
        before this process ends at a stop."""
        self.note_reason(self.look())
        if self._reasons:
            raise CannotKeepError(Error.STATE_UNSAVEABLE, "; ".join(self._reasons))
        may_free = self._capabilities & Capability.OFFLOAD and self._capabilities & Capability.REPLAY
        frees = bool(request.exiting and not request.offloaded and may_free)
        self._keeper.checkpoint(request, frees=frees)
        return frees

    def _position(self) -> dict[str, Any]:
        if self._arriving is not None:
            return self._arriving
        return {"samples": self._samples, "reasons": list(self._reasons), **self.place()}

    # -- going back

    def put_objects_back(self) -> Restored:
        restored = self._keeper.restore_at_start()
        assert restored is not None, "going back means that a state was assigned"
        self._samples = restored.position["samples"]
        return restored

    def go_on(self, restored: Restored) -> None:
        """The script is where it was, and all is put back."""
        self._is_refined = True
        self._arriving = restored.position
        self._progress.training = weakly(self.objects(), self.tensors)
        if self._diversion is not None:
            self._diversion.end()
        tell(restored.notice)
        self.control.phase(PagePhase.TRAINING)
        self.control.start(restored.step)
        self._arriving = None


def reason_of(problem: Exception) -> str:
    """Return why a state cannot be kept: it is of a kind that cannot be, or the agent has failed, by a fault of its
    own. Then the reason names its place in the code."""
    return str(problem) if isinstance(problem, StateNotSupportedError) else failure_text(problem)
