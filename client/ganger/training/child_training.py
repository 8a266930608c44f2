"""Training in a process that the rank started: behind a shell script, torchrun, or a multiprocessing pool.

Such a process is not controlled. Stopped at a boundary of its own, its parent and its brothers would go on; started
again, the rank's command begins at its first line; and its exit code reaches its parent, which may ignore it. The first
optimizer step there makes the rank opaque: it is paused by freezing all of its processes, and offers nothing else.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, Callable

from ganger.injob import exit_code as exitcode
from ganger.injob.control import Control
from ganger.injob.page import EXIT_NO_STATE, Error, Opaque, Page, PageError, Word
from ganger.injob.process_identity import start_ticks

CHILD = (
    "it trains in a process that its command started, not in the command's own: "
    "submit the training script itself, or let the command become it (exec python train.py)"
)
SEVERAL = "several of its processes train"

_watched_pid = 0
_is_forked = False


def is_child() -> bool:
    """Whether this process inherited a rank's environment, and is not the rank."""
    if not os.environ.get("GANGER_PAGE"):
        return False
    if _is_forked:
        return True
    try:
        page = Page.open(os.environ["GANGER_PAGE"], writable=False)
    except (OSError, PageError):
        return False
    try:
        return not page.is_of_this_process()
    finally:
        page.close()


def watch() -> None:
    """Wait for the first optimizer step of this process, for which `is_child` holds. Idempotent; imports torch."""
    global _watched_pid
    if _watched_pid != os.getpid() and os.environ.get("GANGER_AGENT") != "none":
        _watched_pid = os.getpid()
        _ChildTraining().watch()


def watch_after_fork() -> None:
    """Do the same in a process that was forked from a rank."""
    global _is_forked
    _is_forked = True
    watch()


def _end_rank(page: Page) -> None:
    """Send the rank SIGTERM: its command may ignore how its child ended, and report success."""
    pid = page.get(Word.PID)
    if pid and page.get(Word.START_TICKS) == start_ticks(pid):
        os.kill(pid, signal.SIGTERM)


class _ChildTraining:
    """One process. Its steps are published if no other process of the rank trains."""

    def __init__(self) -> None:
        self._control: Control | None = None
        self._stepping: object = None
        self._stop_waiting: Callable[[], None] = lambda: None

    def watch(self) -> None:
        """Wait for the first optimizer step of this process."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._stop_waiting = register_optimizer_step_pre_hook(self._first_step).remove

    def _first_step(self, optimizer: Any, *_: Any) -> None:
        self._stop_waiting()
        try:
            self._begin(optimizer)
        except Exception as problem:  # in the user's optimizer.step()
            print(f"ganger: this process trains without control: {problem}", file=sys.stderr, flush=True)

    def _begin(self, optimizer: Any) -> None:
        control = Control(Page.open(os.environ["GANGER_PAGE"]), job_dir=os.environ.get("GANGER_JOB_DIR", ""))
        is_first = control.claim()
        control.step_aside(*((Opaque.TRAINS_IN_CHILD, CHILD) if is_first else (Opaque.SEVERAL_TRAIN, SEVERAL)))
        if os.environ.get("GANGER_RESTORE"):
            message = f"cannot restore: {CHILD if is_first else SEVERAL}, and a state can only be brought back there"
            control.error(Error.STATE_UNREADABLE, message)
            _end_rank(control.page)
            exitcode.leave_now(EXIT_NO_STATE)
        if not is_first:
            control.close()
            return
        from torch.optim.optimizer import register_optimizer_step_post_hook

        # of several optimizers one: a step of each of them is one step of training
        self._control, self._stepping = control, optimizer
        register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if optimizer is self._stepping and self._control is not None:
            self._control.boundary()
