"""Where in its own loops an attached script is: whether a step may be a boundary, and whether a restart finds back.

A restart enters the epoch again that training was in and goes on with the pass that was being read. So the steps of a
pass's last batch have their boundary when the epoch is over: before, a restart would find nothing left to read, and
come to the end of the epoch without what the body of the loop makes. Pure: told what happens, it says what follows.
"""

from __future__ import annotations

# Steps after an epoch's pass (what is left of a sum of gradients); more are training of their own.
MOST_HELD_AFTER_PASS = 16

NO_LOADER = (
    "its batches come from no job.dataloader, and a restart would take those again that are done; take them from there,"
    " or `for step in job.steps(n)` where the number of the step says which they are, or register what knows"
    " (job.register(name, item, position=True))"
)
SEVERAL_PASSES = "it makes steps in more than one pass of an epoch, and a restart would make the first ones again"
SEVERAL_LOOPS = "it trains in more than one loop of job.epochs or job.steps, and a restart would enter the first again"


class _Pass:
    """One pass over a loader: the steps made when it began and when a batch of it was taken last."""

    def __init__(self, began_at: int, is_of_epoch: bool) -> None:
        self.began_at = self.read_at = began_at
        self.is_of_epoch = is_of_epoch


class LoopPosition:
    """The loops of one script, as they are told: `job.epochs` or `job.steps` around passes over loaders."""

    def __init__(self) -> None:
        self.has_own_position = False
        # Steps whose boundary is still to come.
        self.held = 0
        self._loops = 0
        self._is_in_epoch = False
        self._is_counting = False
        self._is_between = False
        # Of passes that are over in this epoch.
        self._has_read = self._has_trained = False
        # Whose last batch is in hand; `self` for the last step of `job.steps`.
        self._last_of: object = None
        # The passes that are being read, in the order in which they began, by loader.
        self._passes: dict[int, _Pass] = {}

    # -- what happens

    def enter_loop(self, *, counts_steps: bool) -> None:
        """`job.epochs` or `job.steps` begins."""
        self._loops += 1
        self._is_counting = counts_steps

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
        """The pass that is about to go on was being read before a restart: steps were made in it."""
        self._passes[id(loader)] = _Pass(-1, self._is_in_epoch)

    def take_batch(self, loader: object, steps: int, is_last: bool) -> bool:
        """`steps` were made before it. Returns whether the next step is perhaps none that simply has its boundary."""
        is_first = id(loader) not in self._passes
        reading = self._passes.setdefault(id(loader), _Pass(steps, self._is_in_epoch))
        reading.read_at = steps
        if self.held:
            # never two in a row without a boundary
            self._last_of = None
        elif is_last and self._is_in_epoch and reading is self._outermost(steps):
            self._last_of = loader
        return is_first or self._last_of is not None

    def _outermost(self, steps: int) -> _Pass | None:
        """Return the pass around the others of this step. A loader that restarts beside it does not count."""
        return next((one for one in self._passes.values() if one.is_of_epoch and one.read_at == steps), None)

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

    # -- what follows

    @property
    def is_entered(self) -> bool:
        """Whether there was any loop so far."""
        return self._loops > 0

    @property
    def is_in_pass(self) -> bool:
        """Whether a restart is back here when a pass goes on, and not as soon as it is in its loop."""
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
            # that many are training of their own
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
