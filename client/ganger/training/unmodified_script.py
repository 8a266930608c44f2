"""An unmodified script under control: where its boundaries are, what they hold, and how it finds back to one.

Live, every top-level loop over a DataLoader has a number. A position is (loop, batches taken). After a restart the
script runs again from its first line: finished loops get one batch each, the batches already taken of the current loop
are skipped, then the complete state is put back and the script continues as if nothing had happened.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, Callable

import torch
from torch.utils.data import DataLoader

from ganger.injob.control import Control
from ganger.injob.page_layout import Capability
from ganger.training.loops import Loop, OneBatch, Resumed, counts, divert_enumerate, wrapped_by
from ganger.training.outside_changes import OutsideChanges
from ganger.training.pass_results import decided_by_results
from ganger.training.replay import OutputReplay
from ganger.training.replayed_run import ReplayedRun, reason_of
from ganger.training.script_frames import Path, fetch_place, frames, loops_inside_pass, path
from ganger.training.script_objects import Discovery, note_saved_files
from ganger.training.script_variables import Variables
from ganger.training.state import TrainingObjects, restore_random

# Evaluation loops make no steps, so one pass without a step proves little; this many batches prove it.
BATCHES_BEFORE_OPAQUE = 1000
STEPS_WITHOUT_LOADER = 3
# It may take tenths of a second where there are many values.
VALUES_EVERY_S = 10.0
NO_LOADER = "its batches come from no DataLoader, or from one it began to read before it had an optimizer"


class UnmodifiedScript(ReplayedRun):
    """One process. Inert until a loop begins in the process of the rank with an optimizer alive."""

    what, form, documentation = "script", "unmodified", "docs/explanation/unmodified.md"
    refusal_text = "this script cannot be run again to its position"
    capability = Capability.REPLAY

    def __init__(self, output_replay: OutputReplay | None, outside: OutsideChanges) -> None:
        super().__init__(output_replay, outside)
        self._retired = False
        # The state is of a trainer that the script is still to call.
        self._is_for_adapter = False
        self._discovery = Discovery()
        self._loops = 0
        self._alive: list[weakref.ref[Loop]] = []
        self._last: weakref.ref[Loop] | None = None
        self._stepping: weakref.ref[Loop] | None = None
        self._has_stepped = False
        self._fetched = 0
        self._waited_ns = 0
        self._untold = 0
        self._told_after = 1
        self._stop_waiting_for_step: Callable[[], None] = lambda: None
        self._steps_without_loader = 0
        self._variables = Variables(lambda: [(loop.number, loop.loader) for loop in self._living()])
        self._examined: weakref.ref[Loop] | None = None
        self._examined_paths: set[Path] = set()
        # Of loops whose batches are counted by `enumerate`.
        self._counted_paths: set[Path] = set()
        # Of passes that may be given one batch by a second run, in the order in which they were first begun.
        self._paths: dict[Path, None] = {}
        self._judged: set[tuple[int, Path]] = set()
        self._looked_at_values = float("-inf")
        self._boundary_loop: Loop | None = None
        self._going_back = output_replay is not None
        self._target: dict[str, Any] = {}
        self._kept_batches: dict[int, Any] = {}

    def hook(self) -> None:
        """Once per process: note optimizers, look at loops and steps."""
        self._discovery.watch()
        script = self
        original = DataLoader.__iter__

        def begin(loader: Any) -> Any:
            return script._begin(loader, original) if script._is_concerned() else original(loader)

        DataLoader.__iter__ = begin  # type: ignore[method-assign]
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self._stop_waiting_for_step = register_optimizer_step_pre_hook(self._before_step).remove
        register_optimizer_step_post_hook(self._after_step)
        note_saved_files(lambda: self._going_back and not self._retired, self._outside)
        if self._going_back:
            divert_enumerate(True)
        os.register_at_fork(after_in_child=self._forget_in_child)

    def make_way(self) -> bool:
        """Leave the page to an adapter, which begins to train. False where the script has made steps by itself."""
        if not self._is_for_adapter:
            if self._retired or self._is_aside or (self._control is not None and self._control.step > 0):
                return False
            self.release_page()
        return True

    def release_page(self) -> None:
        """Let go of the page; the hooks stay and do nothing."""
        self._retired = True
        divert_enumerate(False)
        if self._control is not None:
            self._control.close()
            self._control = None

    def _forget_in_child(self) -> None:
        # The control looks after itself; what is at the page stays the parent's.
        self._retired = True
        self._control = None

    @property
    def is_replaying(self) -> bool:
        return self._going_back

    def _is_concerned(self) -> bool:
        is_main = threading.current_thread() is threading.main_thread()
        return not (self._retired or self._is_aside) and is_main and self._discovery.has_optimizer

    # -- hooks

    def _begin(self, loader: Any, original: Any) -> Any:
        try:
            return self._begin_loop(loader, original)
        except Exception as problem:  # No failure of the agent ends the script
            # The loader first: its own errors are for the script to handle.
            plain = None if self._going_back else original(loader)
            self.step_aside(problem)
            return plain

    def _begin_loop(self, loader: Any, original: Any) -> Any:
        if self._control is None and not self._take_page():
            return original(loader)
        if not self._variables.noted and not self.control.by_image:
            self._outside.is_in_setup = False
            try:
                self._variables.note()
            except Exception as problem:
                self.note_reason(reason_of(problem))
        is_inner = any(loop.is_being_read for loop in self._living())
        number = -1 if is_inner else self._loops
        if not is_inner:
            self._note_pass(path(), number)
        if self._going_back:
            self._loops += not is_inner
            return self._replayed(loader, original, number)
        if self._has_stepped and (self._stepping is None or self._stepping() is None) and not is_inner:
            # The loop that made the last step was left early: this is the first place after it.
            self._boundary(None)
        self._loops += not is_inner
        return self._watched(Loop(self, loader, original, number))

    def _note_pass(self, place: Path, number: int) -> None:
        """Pass `number` is read at `place`: does what the script did since its first pass began depend on results?"""
        self._paths.setdefault(place)
        case = (len(self._paths), place)
        if number < 1 or self._going_back or case in self._judged:
            return
        self._judged.add(case)
        try:
            self.note_reason(decided_by_results(self._paths, place, frames()))
        except Exception as problem:
            self.note_reason(reason_of(problem))

    def _watched(self, loop: Loop) -> Loop:
        self._alive = [reference for reference in self._alive if reference() is not None]
        self._alive.append(loop.reference)
        return loop

    def _living(self) -> Iterator[Loop]:
        return (loop for reference in self._alive if (loop := reference()) is not None)

    def _before_step(self, *_: Any) -> None:
        if self._control is None and self._is_concerned() and not self._going_back and self._last is None:
            # No loader so far: from now on the optimizer's steps are the boundaries.
            self.guarded(self._take_page)

    def _after_step(self, *_: Any) -> None:
        if self._control is not None and not self._going_back:
            self.guarded(self._stepped, self._control)

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
                self.guarded(self._boundary, loop)
        elif self._is_refined:
            if loop.taken and self._control is not None and not self._is_aside:
                self.guarded(self._note_evaluation, self._control, loop)
        else:
            self._fetched += 1
            if self._fetched == BATCHES_BEFORE_OPAQUE and self._control is not None:
                self._control.hello(Capability.OPAQUE, reason="no optimizer of torch.optim ever stepped")

    def _note_evaluation(self, control: Control, loop: Loop) -> None:
        """`loop` fetches again without a step: so does an evaluation, and training that adds up gradients."""
        if loop.evaluates is None:
            loop.evaluates = self._discovery.is_evaluating
        if loop.evaluates:
            control.evaluated()

    def after_fetch(self, loop: Loop, waited_ns: int) -> None:
        self._last = loop.reference
        self._samples += loop.batch_size
        self._waited_ns += waited_ns

    def show(self) -> None:
        """Publish what was read, when the script stops, or has no more batches: perhaps its last."""
        self._progress.show(self._samples, self._waited_ns)

    # -- boundaries

    def _take_page(self) -> bool:
        control = Control.from_environment()
        if control is None or not control.claim():
            if control is not None:
                control.close()
            self._retired = True
            return False
        self.attach_page(control)
        self._stop_waiting_for_step()
        self._keeper.when_stopped = self.show
        target = self.start()
        if target is not None:
            if "trainer" in target:
                self._is_for_adapter = True
                self.release_page()
                return False
            self._target = target
            self.refuse_reasons(target)
        return True

    def _boundary(self, loop: Loop | None) -> None:
        self._has_stepped = False
        self._boundary_loop = loop
        if self._outside.reason or self._outside.held:
            self.note_reason(self._outside.check())
        if loop is not None and self._examined is not loop.reference and not self.control.by_image:
            self._examine(loop)
        if not self._is_refined:
            if loop is None and self._last is None:
                self.note_reason(NO_LOADER)
            self._refine()
        self._untold += 1
        if self._untold >= self._told_after:
            passed, self._untold = self._untold, 0
            self._told_after = self._progress.publish(passed, self._samples, self._waited_ns, None)
        self.control.boundary()
        self._boundary_loop = None

    def _examine(self, loop: Loop) -> None:
        """Once in every pass: can it be brought back to a place like this one?"""
        self._examined = loop.reference
        if time.monotonic() - self._looked_at_values > VALUES_EVERY_S:
            self.note_reason(self.why_not_restorable())
        if loop.number >= 0 and loop.fetched_first_at:
            self._note_pass(loop.fetched_first_at, loop.number)
        if loop.number < 0 or any(other is not loop and other.is_being_read for other in self._living()):
            self.note_reason("it takes batches from several loaders at once")
        if loops_inside_pass(loop.begun):
            self.note_reason("it fetches batches inside a for loop of its own; write that one as a while loop")
        elif not loop.ahead and loop.fetched_first_at not in (None, fetch_place()):
            self.note_reason("it fetches batches ahead of the steps they are for")
        if loop.keeps_workers:
            self.note_reason("its DataLoader(persistent_workers=True) keeps random numbers in its workers")
        if loop.path not in self._examined_paths:
            # A search of the heap: once for each loop in the script's text.
            self._examined_paths.add(loop.path)
            if wrapper := wrapped_by(loop):
                self.note_reason(f"its batches go through {wrapper}, whose position cannot be set")
            elif counts(loop):
                self._counted_paths.add(loop.path)

    def why_not_restorable(self) -> str:
        self._looked_at_values = time.monotonic()
        try:
            return self._variables.lost() if self._variables.noted else ""
        except Exception as problem:
            return reason_of(problem)

    def objects(self) -> TrainingObjects:
        return self._discovery.training()

    def tensors(self) -> list[torch.Tensor]:
        return self._variables.tensors()

    def loop_position(self) -> dict[str, Any]:
        loop = self._boundary_loop
        return {
            "loops": self._loops,
            "loop": self._loops if loop is None else loop.number,
            "taken": 0 if loop is None else loop.taken - loop.ahead,
            "ahead": 0 if loop is None else loop.ahead,
            "at creation": None if loop is None else loop.at_creation,
            "counts": [] if loop is None or loop.path not in self._counted_paths else counts(loop),
            # Where its checkpoint is for a second run of it, and not an image of its process.
            "variables": self._variables.changed() if self._capabilities & Capability.REPLAY else {},
            "made": self._variables.made,
        }

    # -- going back

    def _replayed(self, loader: Any, original: Any, number: int) -> Any:
        if number < 0 or number < self._target["loop"]:
            return self._watched(OneBatch(self, loader, original, number))
        if self._target["taken"] == 0:
            # Between two loops: this one has not begun.
            self.arrive()
            return self._watched(Loop(self, loader, original, number))
        return self._watched(Resumed(self, loader, original, number, self._target))

    def kept_batch(self, loader: Any, original: Any) -> Any:
        """One batch of a loader, fetched once: what finished loops are given."""
        if id(loader) not in self._kept_batches:
            # The loader is kept too, so that its id stays its own.
            self._kept_batches[id(loader)] = (loader, next(original(loader)))
        return self._kept_batches[id(loader)][1]

    def arrive(self) -> None:
        """The script is where it was: put the state back and continue."""
        restored = self.restore_objects()
        self._has_stepped = False
        self._going_back = False
        self._kept_batches.clear()
        if name := self._variables.made_otherwise(restored.position.get("made", {})):
            self.give_up_replay(f"its second run has made another {name} before its first pass; give a seed")
        if missing := self._variables.put_back(restored.position["variables"]):
            self.give_up_replay(f"{missing} is not there, or is no object as it was")
        restore_random(restored.random)
        self._outside.before_repeating = None
        divert_enumerate(False)
        self.resume_training(restored)
