"""Restore of a script by replay: the base of scripts with a loop of their own and of those with a trainer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Callable, NoReturn

import torch

from ganger.injob import bootstrap
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
    """One process of a script under the agent. Subclasses have the trained objects, the position of the loop, and the
    reason why the script cannot be restored there."""

    # Noun for messages; name of the form on the page; page of the documentation.
    what = form = documentation = ""
    # Begins the message for a state that cannot be restored.
    refusal_text = ""
    capability = 0
    # Set by `attach_page`.
    _keeper: StateKeeper
    _progress: ProgressReporter

    def __init__(self, output_replay: OutputReplay | None, outside: OutsideChanges) -> None:
        self._output_replay = output_replay
        self._outside = outside
        self._control: Control | None = None
        self._reasons: list[str] = []
        self._capabilities = 0
        self._is_refined = False
        # Whether the agent has failed and only counts steps.
        self._is_aside = False
        self._samples = 0
        # Restored position, saved again if a checkpoint comes before the next boundary.
        self._restored_position: dict[str, Any] | None = None

    @property
    def control(self) -> Control:
        assert self._control is not None, "the page is taken before a loop begins"
        return self._control

    @property
    @abstractmethod
    def is_replaying(self) -> bool:
        """Whether the script has not reached its restored position yet."""

    @abstractmethod
    def objects(self) -> TrainingObjects:
        """Return what is trained."""

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors beside the objects."""
        return []

    @abstractmethod
    def loop_position(self) -> dict[str, Any]:
        """Return the position of the loop, as it is saved."""

    @abstractmethod
    def why_not_restorable(self) -> str:
        """Return why the script cannot be restored at its present position; empty if it can."""

    def release_page(self) -> None:
        """Release the page, where that is possible."""

    # -- the page

    def attach_page(self, control: Control) -> None:
        """Obey the orders on this rank's page."""
        self._control = control
        keep_default_group()
        self._keeper = StateKeeper(control, self.objects, self._position)
        handlers = self._keeper.handlers()
        control.handlers = handlers._replace(on_checkpoint=self._checkpoint, by_image=control.by_image)
        self._progress = ProgressReporter(control, TrainingObjects, self._keeper)

    def start(self) -> dict[str, Any] | None:
        """Report the start of training, or return the position to restore."""
        control = self.control
        if not self.is_replaying:
            control.hello(Capability.PAUSE, torch=str(torch.__version__), form=self.form)
            control.start(0)
            return None
        self._capabilities = Capability.PAUSE | Capability.OFFLOAD | Capability.CHECKPOINT | self.capability
        control.hello(self._capabilities, torch=str(torch.__version__), form=self.form)
        control.phase(PagePhase.REPLAY)
        return self._keeper.position_at_start()

    def refuse_reasons(self, target: dict[str, Any]) -> None:
        """End the restore of a state that cannot be restored."""
        # A state at OFFLOAD can migrate although the script cannot be replayed.
        if target["reasons"]:
            self.control.give_up_restore(f"{self.refusal_text}: {'; '.join(target['reasons'])}")

    def step_aside(self, problem: Exception) -> None:
        """Let training continue without the agent, after a failure of the agent. A script under replay is ended
        instead: it would train from a wrong state."""
        text = failure_text(problem)
        if self.is_replaying:
            self.give_up_replay(text)
        tell(f"{text}; training goes on")
        if self._is_aside or self._control is None:
            self.release_page()
        else:
            self._is_aside = True
            self._control.step_aside(Opaque.AGENT_FAILED, text)

    def guarded(self, act: Callable[..., object], *arguments: Any) -> None:
        """Call `act` for the agent; step aside if it raises."""
        try:
            act(*arguments)
        except Exception as problem:
            self.step_aside(problem)

    def give_up_replay(self, text: str) -> NoReturn:
        """Report why the replay failed, and end the process."""
        if self._output_replay is not None:
            self._output_replay.give_up()
        message = f"{self.refusal_text}: {text}"
        tell(message)
        if self._control is not None:
            self._control.give_up_restore(message)
        bootstrap.leave_now(EXIT_NO_STATE)

    # -- what can be kept

    def note_reason(self, reason: str) -> None:
        """Record why the script cannot be restored in a new process."""
        # Not needed where a process image is saved.
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
            helps = f"see {self.documentation}"
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
        self.note_reason(self.why_not_restorable())
        self._is_refined = True
        self._tell_capabilities()

    def _checkpoint(self, request: StopRequest) -> bool:
        """Save the state if a replay would return to this position. Return whether device memory was freed for the
        replay that checks it before this process ends."""
        self.note_reason(self.why_not_restorable())
        if self._reasons:
            raise CannotKeepError(Error.STATE_UNSAVEABLE, "; ".join(self._reasons))
        may_free = self._capabilities & Capability.OFFLOAD and self._capabilities & Capability.REPLAY
        frees = bool(request.exiting and not request.offloaded and may_free)
        self._keeper.checkpoint(request, frees=frees)
        return frees

    def _position(self) -> dict[str, Any]:
        if self._restored_position is not None:
            return self._restored_position
        return {"samples": self._samples, "reasons": list(self._reasons), **self.loop_position()}

    # -- restore

    def restore_objects(self) -> Restored:
        """Restore the trained objects from the assigned state."""
        restored = self._keeper.restore_at_start()
        assert restored is not None, "a replay has a state assigned"
        self._samples = restored.position["samples"]
        return restored

    def resume_training(self, restored: Restored) -> None:
        """Resume training: the replay is at its position and all objects are restored."""
        self._is_refined = True
        self._restored_position = restored.position
        self._progress.training = weakly(self.objects(), self.tensors)
        if self._output_replay is not None:
            self._output_replay.end()
        tell(restored.notice)
        self.control.phase(PagePhase.TRAINING)
        self.control.start(restored.step)
        self._restored_position = None


def reason_of(problem: Exception) -> str:
    """Return why a state cannot be kept: it is of a kind that cannot be, or the agent has failed, by a fault of its
    own. Then the reason names its place in the code."""
    return str(problem) if isinstance(problem, StateNotSupportedError) else failure_text(problem)
