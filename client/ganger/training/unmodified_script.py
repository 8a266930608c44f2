"""An unmodified script under control: where its boundaries are, what they hold, and how it finds back to one.

Live, every top-level loop over a DataLoader has a number. A position is (loop, batches taken). After a restart the
script runs again from its first line: finished loops get one batch each, the batches already taken of the current loop
are skipped, then the complete state is put back and the script goes on as if nothing had happened.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, Callable, NoReturn

import torch
from torch.utils.data import DataLoader

from ganger.injob import exit_code as exitcode
from ganger.injob.control import Control, StopRequest, failure_text
from ganger.injob.page_layout import EXIT_NO_STATE, Capability, Error, Opaque, PagePhase
from ganger.training.batch_iterators import counts, divert_enumerate, end_diversion, wrapped_by
from ganger.training.loops import Loop, OneBatch, Resumed
from ganger.training.outside_changes import OutsideChanges
from ganger.training.pass_results import decided_by_results
from ganger.training.progress_reporter import ProgressReporter
from ganger.training.rank_processes import keep_default_group
from ganger.training.replay import OutputReplay, Path, fetch_place, frames, loops_inside_pass, path
from ganger.training.script_objects import Discovery, note_saved_files, weakly
from ganger.training.script_variables import Variables
from ganger.training.state import TrainingObjects, capture, restore_random
from ganger.training.state_codec import StateNotSupportedError, tell
from ganger.training.state_keeper import CannotKeepError, StateKeeper

# Evaluation loops make no steps, so one pass without a step proves little; this many batches prove it.
BATCHES_BEFORE_OPAQUE = 1000
STEPS_WITHOUT_LOADER = 3
# It may take tenths of a second where there are many values.
VALUES_EVERY_S = 10.0
NO_LOADER = "its batches come from no DataLoader, or from one it began to read before it had an optimizer"


class UnmodifiedScript:
    """One process. Inert until a loop begins in the process of the rank with an optimizer alive."""

    def __init__(self, diversion: OutputReplay | None, outside: OutsideChanges) -> None:
        self._diversion = diversion
        self._outside = outside
        self._retired = False
        # The agent has failed: steps are counted, no order is obeyed.
        self._is_aside = False
        # The state is of a trainer that the script is still to call.
        self._is_for_adapter = False
        self._discovery = Discovery()
        self._control: Control | None = None
        self._keeper: StateKeeper | None = None
        self._progress: ProgressReporter | None = None
        self._reasons: list[str] = []
        self._capabilities = 0
        self._refined = False
        # loops
        self._loops = 0
        self._alive: list[weakref.ref[Loop]] = []
        self._last: weakref.ref[Loop] | None = None
        self._stepping: weakref.ref[Loop] | None = None
        self._has_stepped = False
        self._fetched = 0
        self._samples = 0
        self._waited_ns = 0
        self._untold = 0
        self._told_after = 1
        self._stop_waiting_for_step: Callable[[], None] = lambda: None
        self._steps_without_loader = 0
        self._variables = Variables(lambda: [(loop.number, loop.loader) for loop in self._living() if loop is not None])
        self._examined: weakref.ref[Loop] | None = None
        self._examined_paths: set[Path] = set()
        # of loops whose batches are counted by `enumerate`
        self._counted_paths: set[Path] = set()
        # of passes that may be given one batch by a second run, in the order in which they were first begun
        self._paths: dict[Path, None] = {}
        self._judged: set[tuple[int, Path]] = set()
        self._looked_at_values = float("-inf")
        self._boundary_loop: Loop | None = None
        # going back
        self._going_back = diversion is not None
        self._target: dict[str, Any] | None = None
        self._arriving_at: dict[str, Any] | None = None
        self._kept_batches: dict[int, Any] = {}

    def hook(self) -> None:
        """Once per process: note optimizers, look at loops and steps."""
        self._discovery.watch()
        script = self
        original = DataLoader.__iter__

        def begin(loader: Any) -> Any:
            if script._is_concerned():
                return script._begin(loader, original)
            return original(loader)

        DataLoader.__iter__ = begin  # type: ignore[method-assign]
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self._stop_waiting_for_step = register_optimizer_step_pre_hook(self._before_step).remove
        register_optimizer_step_post_hook(self._after_step)
        note_saved_files(lambda: self._going_back and not self._retired, self._outside)
        if self._going_back:
            divert_enumerate()
        os.register_at_fork(after_in_child=self._forget_in_child)

    def make_way(self) -> bool:
        """Leave the page to an adapter, which begins to train. False where the script has made steps by itself."""
        if not self._is_for_adapter:
            if self._retired or self._is_aside or (self._control is not None and self._control.step > 0):
                return False
            self.retire()
        return True

    def retire(self) -> None:
        """Let go of the page; the hooks stay and do nothing."""
        self._retired = True
        end_diversion()
        if self._control is not None:
            self._control.close()
            self._control = None

    def _forget_in_child(self) -> None:
        # the control looks after itself; what is at the page stays the parent's
        self._retired = True
        self._control = None

    def step_aside(self, problem: Exception) -> None:
        """Let training go on without the agent, after a failure of the agent. A script on its way back to a state is
        ended instead: it would train from a wrong one."""
        text = failure_text(problem)
        if self._going_back:
            self.give_up_replay(text)
        tell(f"{text}; training goes on")
        if self._is_aside or self._control is None:
            self.retire()
            return
        self._is_aside = True
        self._control.step_aside(Opaque.AGENT_FAILED, text)

    def give_up_replay(self, text: str) -> NoReturn:
        if self._diversion is not None:
            self._diversion.give_up()
        message = f"this script cannot be run again to its position: {text}"
        tell(message)
        if self._control is not None:
            self._control.give_up_restore(message)
        exitcode.leave_now(EXIT_NO_STATE)

    def _is_concerned(self) -> bool:
        return (
            not (self._retired or self._is_aside)
            and threading.current_thread() is threading.main_thread()
            and self._discovery.has_optimizer
        )

    # -- hooks

    def _begin(self, loader: Any, original: Any) -> Any:
        try:
            return self._begin_loop(loader, original)
        except Exception as problem:  # no failure of the agent ends the script
            # The loader first: its own errors are for the script to handle.
            plain = None if self._going_back else original(loader)
            self.step_aside(problem)
            return plain

    def _begin_loop(self, loader: Any, original: Any) -> Any:
        if self._control is None and not self._take_page():
            return original(loader)
        if not self._variables.noted and not (self._control is not None and self._control.by_image):
            self._note_variables()
        is_inner = any(loop is not None and loop.is_being_read for loop in self._living())
        number = -1 if is_inner else self._loops
        if not is_inner:
            self._note_pass(path(), number)
            self._loops += 1
        if self._going_back:
            return self._replayed(loader, original, number)
        if self._has_stepped and (self._stepping is None or self._stepping() is None) and not is_inner:
            # the loop that made the last step was left early: this is the first place after it
            self._loops -= 1
            self._boundary(None)
            self._loops += 1
        return self._watched(Loop(self, loader, original, number))

    def _note_pass(self, place: Path, number: int) -> None:
        """Pass `number` is read at `place`: does what the script did since its first pass began depend on results?"""
        self._paths.setdefault(place)
        case = (len(self._paths), place)
        if number < 1 or self._going_back or case in self._judged:
            return
        self._judged.add(case)
        try:
            reason = decided_by_results(self._paths, place, frames())
        except Exception as problem:
            reason = failure_text(problem)
        if reason:
            self.note_reason(reason)

    def _watched(self, loop: Loop) -> Loop:
        self._alive = [reference for reference in self._alive if reference() is not None]
        self._alive.append(loop.reference)
        return loop

    def _living(self) -> Iterator[Loop | None]:
        return (reference() for reference in self._alive)

    def _before_step(self, *_: Any) -> None:
        if self._control is None and self._is_concerned() and not self._going_back and self._last is None:
            # no loader so far: from now on the optimizer's steps are the boundaries
            try:
                self._take_page()
            except Exception as problem:
                self.step_aside(problem)

    def _after_step(self, *_: Any) -> None:
        if self._control is None or self._going_back:
            return
        try:
            self._stepped(self._control)
        except Exception as problem:
            self.step_aside(problem)

    def _stepped(self, control: Control) -> None:
        if self._is_aside:
            control.boundary()
            return
        self._has_stepped = True
        self._stepping = self._last
        if self._last is None:
            self._steps_without_loader += 1
            if self._steps_without_loader >= STEPS_WITHOUT_LOADER:
                self.note_reason(NO_LOADER)
            self._boundary(None)

    def before_fetch(self, loop: Loop) -> None:
        """`loop` is about to fetch: a boundary if it has made a step since its last fetch."""
        if self._has_stepped:
            if self._stepping is loop.reference and not self._is_aside:
                try:
                    self._boundary(loop)
                except Exception as problem:
                    self.step_aside(problem)
        elif not self._refined:
            self._fetched += 1
            if self._fetched == BATCHES_BEFORE_OPAQUE and self._control is not None:
                self._control.hello(Capability.OPAQUE, reason="no optimizer of torch.optim ever stepped")

    def after_fetch(self, loop: Loop, waited_ns: int) -> None:
        self._last = loop.reference
        self._samples += loop.batch_size
        self._waited_ns += waited_ns

    def ended(self, loop: Loop) -> None:
        """`loop` has no more batches: perhaps the script's last."""
        self._show()

    def _show(self) -> None:
        if self._progress is not None:
            self._progress.show(self._samples, self._waited_ns)

    # -- boundaries

    def _take_page(self) -> bool:
        control = Control.from_environment()
        if control is None or not control.claim():
            if control is not None:
                control.close()
            self._retired = True
            return False
        self._control = control
        keep_default_group()
        self._stop_waiting_for_step()
        self._keeper = StateKeeper(control, self._training, self._position)
        self._keeper.when_stopped = self._show
        handlers = self._keeper.handlers()
        control.handlers = handlers._replace(on_checkpoint=self._checkpoint, by_image=control.by_image)
        self._progress = ProgressReporter(control.page, TrainingObjects, self._keeper)
        if self._going_back:
            self._capabilities = Capability.PAUSE | Capability.OFFLOAD | Capability.CHECKPOINT
            control.hello(self._capabilities | Capability.REPLAY, torch=str(torch.__version__), form="unmodified")
            control.phase(PagePhase.REPLAY)
            self._target = self._keeper.position_at_start()
            if "trainer" in self._target:
                self._is_for_adapter = True
                self.retire()
                return False
            if self._target["reasons"]:
                control.give_up_restore(
                    f"this script cannot be run again to its position: {'; '.join(self._target['reasons'])}"
                )
            return True
        control.hello(Capability.PAUSE, torch=str(torch.__version__), form="unmodified")
        control.start(0)
        return True

    def _boundary(self, loop: Loop | None) -> None:
        assert self._control is not None
        assert self._progress is not None
        self._has_stepped = False
        self._boundary_loop = loop
        if self._outside.reason or self._outside.held:
            self._note_outside_changes()
        if not self._refined:
            self._refine(loop)
        if loop is not None and self._examined is not loop.reference:
            self._examine(loop)
        self._untold += 1
        if self._untold >= self._told_after:
            passed, self._untold = self._untold, 0
            self._told_after = self._progress.publish(passed, self._samples, self._waited_ns, None)
        self._control.boundary()
        self._boundary_loop = None

    def _refine(self, loop: Loop | None) -> None:
        """Find out after the first step what the script supports, and report it as capabilities."""
        assert self._control is not None
        assert self._progress is not None
        training = self._training()
        self._progress.training = weakly(training, self._variables.tensors)
        can_offload = True
        try:
            capture(training, {})
        except StateNotSupportedError as error:
            can_offload = False
            self.note_reason(str(error))
        except Exception as problem:
            can_offload = False
            self.note_reason(failure_text(problem))
        if not training.models:
            can_offload = False
            self.note_reason("it has no torch.nn.Module")
        self._capabilities = Capability.PAUSE | Capability.CHECKPOINT
        if can_offload:
            self._capabilities |= Capability.OFFLOAD
        if self._control.by_image:
            # The process is saved as it is: what a second run could not repeat does not matter.
            self._capabilities |= Capability.IMAGE
            self._reasons.clear()
        elif loop is None and self._last is None:
            self.note_reason(NO_LOADER)
        self._examine(loop)
        self._refined = True
        self._tell_capabilities()

    def _examine(self, loop: Loop | None) -> None:
        """Once in every pass: can it be brought back to a place like this one?"""
        if loop is None or (self._control and self._control.by_image):
            return
        self._examined = loop.reference
        if time.monotonic() - self._looked_at_values > VALUES_EVERY_S:
            self._note_lost_values()
        if loop.number >= 0 and loop.fetched_first_at:
            self._note_pass(loop.fetched_first_at, loop.number)
        if loop.number < 0 or self._is_mixed(loop):
            self.note_reason("it takes batches from several loaders at once")
        if loops_inside_pass(loop.begun):
            self.note_reason("it fetches batches inside a for loop of its own; write that one as a while loop")
        elif not loop.ahead and loop.fetched_first_at not in (None, fetch_place()):
            self.note_reason("it fetches batches ahead of the steps they are for")
        if loop.keeps_workers:
            self.note_reason("its DataLoader(persistent_workers=True) keeps random numbers in its workers")
        if loop.path not in self._examined_paths:
            # a search of the heap: once for each loop in the script's text
            self._examined_paths.add(loop.path)
            if wrapper := wrapped_by(loop):
                self.note_reason(f"its batches go through {wrapper}, whose position cannot be set")
            elif counts(loop):
                self._counted_paths.add(loop.path)

    def _checkpoint(self, request: StopRequest) -> bool:
        """Save, if a second run comes back here as of now. Return whether memory was freed for that run, which is made
        before this process ends at a stop."""
        assert self._keeper is not None
        self._note_lost_values()
        if self._reasons:
            raise CannotKeepError(Error.STATE_UNSAVEABLE, "; ".join(self._reasons))
        frees = request.exiting and not request.offloaded and bool(self._capabilities & Capability.OFFLOAD)
        self._keeper.checkpoint(request, frees=frees)
        return frees

    @property
    def _is_run_again(self) -> bool:
        """Whether its checkpoint is for a second run of it, and not an image of its process."""
        return bool(Capability.CHECKPOINT & self._capabilities and not Capability.IMAGE & self._capabilities)

    def _note_lost_values(self) -> None:
        self._looked_at_values = time.monotonic()
        try:
            reason = self._variables.lost() if self._variables.noted else ""
        except StateNotSupportedError as error:
            reason = str(error)
        if reason:
            self.note_reason(reason)

    def _tell_capabilities(self) -> None:
        assert self._control is not None
        if self._reasons:
            self._capabilities &= ~Capability.CHECKPOINT
        replay = Capability.REPLAY if self._is_run_again else 0
        self._control.hello(self._capabilities | replay, form="unmodified", reason="; ".join(self._reasons))
        if self._reasons and self._control.rank == 0:
            tell(
                f"this script can be paused, but neither moved nor saved: {'; '.join(self._reasons)}. "
                "docs/explanation/unmodified.md says what helps"
            )

    def note_reason(self, reason: str) -> None:
        if self._control is not None and self._control.by_image:
            return
        if reason not in self._reasons:
            self._reasons.append(reason)
            if self._refined and self._capabilities & Capability.CHECKPOINT:
                self._tell_capabilities()

    def _note_outside_changes(self) -> None:
        if reason := self._outside.check():
            self.note_reason(reason)

    def _note_variables(self) -> None:
        self._outside.is_in_setup = False
        try:
            self._variables.note()
        except Exception as problem:
            self.note_reason(str(problem) if isinstance(problem, StateNotSupportedError) else failure_text(problem))

    def _is_mixed(self, loop: Loop) -> bool:
        return any(other is not None and other is not loop and other.is_being_read for other in self._living())

    def _training(self) -> TrainingObjects:
        return self._discovery.training()

    def _position(self) -> dict[str, Any]:
        if self._arriving_at is not None:
            return self._arriving_at
        loop = self._boundary_loop
        position: dict[str, Any] = {
            "samples": self._samples,
            "loops": self._loops,
            "loop": self._loops if loop is None else loop.number,
            "taken": 0 if loop is None else loop.taken - loop.ahead,
            "ahead": 0 if loop is None else loop.ahead,
            "at creation": None if loop is None else loop.at_creation,
            "counts": [] if loop is None or loop.path not in self._counted_paths else counts(loop),
            # needed on restore: a state parked for a pause can move to other nodes without the rank
            "reasons": list(self._reasons),
            "variables": self._variables.changed() if self._is_run_again else {},
            "made": self._variables.made,
        }
        return position

    # -- going back

    def _replayed(self, loader: Any, original: Any, number: int) -> Any:
        assert self._target is not None
        if number < 0 or number < self._target["loop"]:
            return self._watched(OneBatch(self, loader, original, number))
        if self._target["taken"] == 0:
            # between two loops: this one has not begun
            self.arrive()
            return self._watched(Loop(self, loader, original, number))
        return self._watched(Resumed(self, loader, original, number, self._target))

    def kept_batch(self, loader: Any, original: Any) -> Any:
        """One batch of a loader, fetched once: what finished loops are given."""
        if id(loader) not in self._kept_batches:
            iterator = original(loader)
            # the loader is kept too, so that its id stays its own
            self._kept_batches[id(loader)] = (loader, next(iterator))
        return self._kept_batches[id(loader)][1]

    def arrive(self) -> None:
        """The script is where it was: put the state back and go on."""
        assert self._control is not None
        assert self._keeper is not None
        assert self._target is not None
        restored = self._keeper.restore_at_start()
        assert restored is not None, "going back means that a state was assigned"
        self._samples = restored.position["samples"]
        self._has_stepped = False
        self._refined = True
        self._going_back = False
        self._kept_batches.clear()
        if name := self._variables.made_otherwise(restored.position.get("made", {})):
            self.give_up_replay(f"its second run has made another {name} before its first pass; give a seed")
        if missing := self._variables.put_back(restored.position["variables"]):
            self.give_up_replay(f"{missing} is not there, or is no object as it was")
        # what is saved before the next boundary is what was restored
        restore_random(restored.random)
        self._arriving_at = restored.position
        assert self._progress is not None
        self._progress.training = weakly(self._training(), self._variables.tensors)
        self._outside.before_repeating = None
        end_diversion()
        if self._diversion is not None:
            self._diversion.end()
        tell(restored.notice)
        self._control.phase(PagePhase.TRAINING)
        self._control.start(restored.step)
        self._arriving_at = None
