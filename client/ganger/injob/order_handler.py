"""The slow path of a boundary, behind `Control.boundary`: it obeys the orders on a rank's control page. It never
decides alone on partial knowledge: while in doubt it waits, and looks again."""

from __future__ import annotations

import errno
import json
import os
import traceback
from typing import Any, Callable, NamedTuple, NoReturn

from ganger.injob import bootstrap
from ganger.injob.job_socket import Backoff, JobSocketClient
from ganger.injob.page import GangPages, Page, PageOrder, now_ns
from ganger.injob.page_layout import (
    CHECKPOINT_BIT,
    EXIT_FENCED,
    EXIT_NO_STATE,
    EXIT_YIELDED,
    Capability,
    Error,
    PageOrderKind,
    PageParkLevel,
    PagePhase,
    PageState,
    Word,
)
from ganger.protocol.stop_rules import BoundaryDecision, decide, stops_at_epoch_end
from ganger.text import os_failure, os_reason

# No order has this number, so the hot path comes here at its next boundary whatever the page says.
FIRST_LOOK = -1

# Known to a boundary that was passed: ORDER_SEQ, CHECKPOINT_SEQ, RETUNE_SEQ, and until when the socket can wait.
Known = tuple[int, int, int, int]

# What is withdrawn with a level.
_OFFERED_WITH = {
    "OFFLOAD": Capability.OFFLOAD,
    "CHECKPOINT": Capability.CHECKPOINT | Capability.RESIZE | Capability.RESHARD | Capability.REPLAY,
}

_TEND_EVERY_NS = 1_000_000_000
# What kept a state from coming back may pass; but a gang that waits for ever holds its devices for nothing.
_RESTORE_AGAIN_NS = 1_000_000_000
_RESTORE_PATIENCE_NS = 30_000_000_000


class StopRequest(NamedTuple):
    """What a handler is asked to do at a boundary. ``details`` is the content of the order's file; ``offloaded``: the
    state is in the arena and not on the device; ``exiting``: the process may end once the handler returns, so its work
    must be durable by then."""

    seq: int
    step: int
    level: int
    details: dict[str, Any]
    offloaded: bool
    exiting: bool


class Handlers(NamedTuple):
    """What a framework can do; None where it cannot. Each is called in the training thread, at a boundary.

    on_stop(step): let the device finish. on_offload: state to the arena, free device memory; returns the bytes freed.
    on_restore: bring it back. on_checkpoint: write this rank's shard; True: its memory is freed until on_restore, which
    is called only if the rank is to continue. on_hand_over: state into the arena.
    on_retune(threads): 0 leaves the number as it is. by_image: CHECKPOINT and HAND_OVER are process images,
    which the daemon takes while the rank waits."""

    on_stop: Callable[[int], None] | None = None
    on_offload: Callable[[StopRequest], int] | None = None
    on_restore: Callable[[StopRequest | None], None] | None = None
    on_checkpoint: Callable[[StopRequest], bool | None] | None = None
    on_hand_over: Callable[[StopRequest], None] | None = None
    on_retune: Callable[[int], None] | None = None
    by_image: bool = False


class OrderHandler:
    """Obeys the orders on one control page. ``report(error, message)`` is called when a handler fails;
    ``withdraw(capability, name of the level, why)`` when a level failed that must not be offered again;
    ``rejoin(step)`` in a process that was restored from an image, for the page is then another epoch's."""

    def __init__(
        self,
        page: Page,
        pages: GangPages,
        job_dir: str,
        socket: JobSocketClient,
        report: Callable[[int, str], None],
        withdraw: Callable[[int, str, str], None],
        rejoin: Callable[[int], None],
    ) -> None:
        self.handlers = Handlers()
        self.pages = pages
        self._withdraw = withdraw
        self._rejoin = rejoin
        self._page = page
        self._words = page.words
        self._rank = page.get(Word.RANK)
        # with a daemon of another user they are no files of this job
        self._orders = os.environ.get("GANGER_ORDERS") or os.path.join(job_dir, "orders")
        self._socket = socket
        self._report = report
        self._failure = (Error.NONE, "")  # What the last handler that failed met
        self._held = False  # Stopped at a boundary since the last RUN
        self._held_at_ns = 0
        # Whether the script's loop has epochs that end at a boundary, and whether the present boundary is such an end.
        self.has_epoch_ends = self.is_epoch_end = False
        self.rested_ns = 0
        self._offloaded = False
        self._is_on_storage = False  # Saved and freed at a stop: the state is in the shard alone
        self._read_page_anew()

    def _read_page_anew(self) -> None:
        """Forget what was done under the orders of another epoch's page."""
        self._epoch = self._page.get(Word.EPOCH)
        self._order = self._page.read_order()
        self._agreed: tuple[int, BoundaryDecision] = (0, BoundaryDecision(0, None, False))
        self._checkpoint_seen = 0
        self._checkpoint_handled = 0
        self._attempted = 0  # ORDER_SEQ last carried out or failed at
        self._failed_restore = (0, 0, 0)  # ORDER_SEQ under which the state did not come back, first and last time
        self._saved = (0, 0)  # (STOP_SEQ, step) whose shard is durable
        self._fresh = True  # No boundary passed since the last start or resume

    def attend(self, step: int, now: int) -> Known:
        """Pass boundary ``step``; return what is known now: the hot path comes back when the page says otherwise."""
        words = self._words
        words[Word.PHASE] = PagePhase.TRAINING
        if self._fresh:
            self._fresh = False
            words[Word.FIRST_STEP_TIME] = now
            words[Word.STATE] = PageState.RUNNING
        seen = self._pass(step, now)
        return seen, self._checkpoint_seen, words[Word.RETUNE_DONE], now_ns() + _TEND_EVERY_NS

    def begin(self, step: int) -> None:
        """Stand at ``step`` before the first boundary: like a boundary, but no step was made."""
        self._fresh = True
        self._pass(step, 0)

    def look(self, now: int) -> None:
        """See to what needs no agreement."""
        if self._page.fenced:
            self._leave(EXIT_FENCED)
        self._retune()
        self._socket.tend(now)

    def has_acknowledged(self) -> bool:
        """Return whether this rank has reported its step for a stop or checkpoint that is still to come."""
        agreement = self._agreement(self._read_order())
        return bool(agreement) and self._words[Word.ACK_SEQ] == agreement

    def _pass(self, step: int, now: int) -> int:
        """Return the ORDER_SEQ this boundary was passed under, or FIRST_LOOK if the next one needs a look anyway."""
        backoff = Backoff()
        is_published = False
        while True:
            if self._words[Word.EPOCH] != self._epoch:
                self._go_on_in_new_epoch(step)
            self.look(now_ns() if is_published else now)
            order = self._read_order()
            agreement = self._agreement(order)
            # Publish the ack before the step: a reader of this step must find the ack that precedes it.
            if agreement and self._words[Word.ACK_SEQ] != agreement:
                self._page.publish_ack(agreement, step)
            if not is_published:
                is_published = True
                self._words[Word.STEP] = step
                if now:
                    self._words[Word.STEP_TIME] = now
            if agreement:
                passed_under = self._pass_agreed(order, agreement, step, backoff)
            else:
                passed_under = self._pass_freely(order, backoff)
            # An image may have been taken between two lines: what was read then is of the old page.
            if passed_under is not None and self._words[Word.EPOCH] == self._epoch:
                return passed_under

    def _go_on_in_new_epoch(self, step: int) -> None:
        self._read_page_anew()
        self._words[Word.ACK_SEQ] = 0  # An order read before the image may have been acknowledged here after it
        self._rejoin(step)
        self._words[Word.STEP] = self._words[Word.REACHED_STEP] = step  # Before the state that it belongs to
        self._words[Word.STATE] = PageState.READY if self._order.order == PageOrderKind.WAIT else self._at_rest()

    def _at_rest(self) -> int:
        return PageState.OFFLOADED if self._offloaded else PageState.PAUSED

    def _pass_agreed(self, order: PageOrder, agreement: int, step: int, backoff: Backoff) -> int | None:
        """Return as `_pass` does if the boundary is passed under an agreement, or None after a wait or a stop."""
        decision = self._decide(agreement)
        is_due = decision.stop_step is not None and step >= decision.stop_step
        at_epoch_end = stops_at_epoch_end(agreement)
        if decision.finished or (is_due and at_epoch_end and self.has_epoch_ends and not self.is_epoch_end):
            if self._is_able(order) and self._may_step(order):
                return order.seq
        elif is_due:
            is_agreed = at_epoch_end or step == decision.stop_step
            assert is_agreed, f"step {step} lies beyond the agreed stop {decision.stop_step}"
            self._stop_here(order, agreement, step, backoff)
            return None
        elif step < decision.limit and self._is_able(order) and self._may_step(order):
            return FIRST_LOOK
        self._wait(backoff)
        return None

    def _stop_here(self, order: PageOrder, agreement: int, step: int, backoff: Backoff) -> None:
        if agreement & CHECKPOINT_BIT:
            self._save_and_go_on(agreement, step)
            backoff.reset()
        elif order.seq != self._attempted:
            self._hold(order, step)
            backoff.reset()
        else:
            is_saved = self._words[Word.REACHED_SEQ] == order.seq <= self._words[Word.LEAVE_SEQ]
            # Only once the whole checkpoint is published: a shard alone is nothing, and until then all can continue.
            if order.level == PageParkLevel.CHECKPOINT and is_saved:
                self._leave(EXIT_YIELDED)
            backoff.until_message(self._socket)

    def _pass_freely(self, order: PageOrder, backoff: Backoff) -> int | None:
        """Return as `_pass` does if the boundary is passed without an agreement, or None after a wait."""
        if order.order == PageOrderKind.WAIT:
            self._wait_ready(order)
            backoff.until_message(self._socket)
            return None
        if not self._is_able(order):
            self._wait(backoff)
            return None
        # Running needs no agreement, so the order is obeyed as soon as the state is in place.
        if order.seq and self._words[Word.REACHED_SEQ] != order.seq:
            self._words[Word.REACHED_SEQ] = order.seq
        self._socket.resume(now_ns())
        if not self._may_step(order):
            backoff.sleep()
            return None
        return FIRST_LOOK if self._fresh else order.seq

    def _wait(self, backoff: Backoff) -> None:
        if not self._held and self._words[Word.STATE] == PageState.RUNNING:
            self._words[Word.STATE] = PageState.WAITING
        backoff.sleep()

    def _read_order(self) -> PageOrder:
        order = self._page.read_order()
        if order.seq:  # Else its writer died in the middle of one: the last whole one stands
            self._order = order
        return self._order

    def _agreement(self, order: PageOrder) -> int:
        """Return the number of the agreement this rank takes part in now; 0 for none."""
        requested = self._checkpoint_seen = self._words[Word.CHECKPOINT_SEQ]
        if order.order == PageOrderKind.STOP:
            # A rank that reads the stop first would miss the checkpoint request, so no rank serves it any more.
            self._checkpoint_handled = requested
            return order.stop_seq
        if order.order == PageOrderKind.RUN and requested != self._checkpoint_handled and not self._held:
            return requested
        return 0

    def _decide(self, agreement: int) -> BoundaryDecision:
        if self._agreed[0] == agreement:
            # Once known it holds: ranks with the order to run on may have overwritten their acks since.
            return self._agreed[1]
        points = self.pages.points(agreement)
        if points is None:
            return BoundaryDecision(self._words[Word.ACK_STEP] + 1, None, False)
        decision = decide(points, self._rank)
        if decision.stop_step is not None or decision.finished:
            self._agreed = (agreement, decision)
        return decision

    def _may_step(self, order: PageOrder) -> bool:
        lease = self._words[Word.LEASE_UNTIL]
        if lease and now_ns() > lease:
            return False
        self._words[Word.STATE] = PageState.RUNNING
        return True

    def _is_able(self, order: PageOrder) -> bool:
        """Leave a held stop, for a RUN or for a newer stop further on; False if the state cannot be brought back."""
        if not self._held:
            return True
        if (self._offloaded or self._is_on_storage) and not self._bring_back_in_time(order):
            return False
        self._held = False
        self.rested_ns += now_ns() - self._held_at_ns
        self._fresh = True
        self._words[Word.FIRST_STEP_TIME] = 0
        self._words[Word.STATE] = PageState.RUNNING
        return True

    def _bring_back_in_time(self, order: PageOrder) -> bool:
        """Bring the state back, trying again for a while; a rank that cannot continue ends, and its gang with it."""
        seq, first, last = self._failed_restore
        now = now_ns()
        if seq != order.seq:
            first = now
        elif now - last < _RESTORE_AGAIN_NS:
            return False
        if self._bring_back():
            return True
        self._failed_restore = (order.seq, first, now_ns())
        if now - first >= _RESTORE_PATIENCE_NS:
            self._leave(EXIT_NO_STATE)
        return False

    def _bring_back(self) -> bool:
        self._words[Word.STATE] = PageState.RESTORING

        def restore() -> None:
            if self.handlers.on_restore is None:
                raise RuntimeError("no process can restore what was offloaded")
            self.handlers.on_restore(None)

        if not self._try(restore, Error.STATE_UNREADABLE):
            self._words[Word.STATE] = self._at_rest()
            return False
        self._offloaded = self._is_on_storage = False
        return True

    def _wait_ready(self, order: PageOrder) -> None:
        if self._words[Word.REACHED_SEQ] != order.seq:
            self._words[Word.REACHED_STEP] = self._words[Word.STEP]
            if not self._held:
                self._words[Word.STATE] = PageState.READY
            self._words[Word.REACHED_SEQ] = order.seq
            self._socket.send({"event": "ready", "rank": self._rank, "seq": order.seq}, now_ns())

    def _hold(self, order: PageOrder, step: int) -> None:
        self._attempted = order.seq
        if not self._held:
            self._held = True
            self._held_at_ns = now_ns()
            self._settle(step)
        if not self._enter(order, step):
            self._words[Word.STATE] = self._at_rest()
            return
        self._words[Word.REACHED_STEP] = step
        self._words[Word.REACHED_SEQ] = order.seq
        message = {"event": "reached", "rank": self._rank, "seq": order.seq, "step": step, "level": order.level}
        self._socket.send(message, now_ns())

    def _enter(self, order: PageOrder, step: int) -> bool:
        words, handlers = self._words, self.handlers
        exiting = order.level == PageParkLevel.CHECKPOINT
        if handlers.by_image and order.level in (PageParkLevel.CHECKPOINT, PageParkLevel.HAND_OVER):
            return self._await_image(order, step)
        self._socket.resume(now_ns())
        is_saved = exiting and self._saved == (order.stop_seq, step)
        if self._is_on_storage and not is_saved and not self._bring_back():
            return False
        if not exiting:
            # The daemon that orders this discards the earlier shard, which may be gone when it is requested again.
            self._saved = (0, 0)
        request = StopRequest(order.seq, step, order.level, self._details(str(order.seq)), self._offloaded, exiting)
        if order.level == PageParkLevel.PAUSE:
            if self._offloaded and not self._bring_back():
                return False
            words[Word.STATE] = PageState.PAUSED
            return True
        if not self._offloaded:
            # Before the state says SAVING: what an earlier stop left in the arena is not this one's, and the daemon
            # serves as much as is said to be filled.
            words[Word.ARENA_FILLED] = 0
            words[Word.ARENA_SIZE] = 0
        words[Word.STATE] = PageState.SAVING
        if order.level == PageParkLevel.OFFLOAD:
            return self._enter_offload(order, request)
        if order.level == PageParkLevel.HAND_OVER:
            hand_over = handlers.on_hand_over
            if hand_over is None:
                return self._refuse(order)
            if not self._try_to_save(lambda: hand_over(request), "OFFLOAD", "CHECKPOINT"):
                return False
            words[Word.STATE] = PageState.HANDED_OVER
            return True
        save = handlers.on_checkpoint
        if save is None or order.level != PageParkLevel.CHECKPOINT:
            return self._refuse(order)
        if not is_saved:
            freed: list[object] = []
            if not self._try_to_save(lambda: freed.append(save(request)), "CHECKPOINT"):
                return False
            self._saved = (order.stop_seq, step)
            self._is_on_storage = freed[0] is True
        words[Word.CHECKPOINT_STEP] = step
        words[Word.STATE] = self._at_rest()
        return True

    def _enter_offload(self, order: PageOrder, request: StopRequest) -> bool:
        words, offload = self._words, self.handlers.on_offload
        if not self._offloaded:
            if offload is None:
                return self._refuse(order)
            freed = []
            if not self._try_to_save(lambda: freed.append(offload(request)), "OFFLOAD"):
                return False
            self._offloaded = True
            words[Word.OFFLOADED_BYTES] = freed[0]
        words[Word.STATE] = PageState.OFFLOADED
        return True

    def _await_image(self, order: PageOrder, step: int) -> bool:
        words = self._words
        self._socket.suspend()
        if order.level == PageParkLevel.CHECKPOINT:
            words[Word.CHECKPOINT_STEP] = step
        words[Word.STATE] = PageState.HANDED_OVER if order.level == PageParkLevel.HAND_OVER else self._at_rest()
        return True

    def _be_imaged_and_go_on(self, agreement: int, step: int) -> None:
        """Stand still until the daemon has taken an image of this process, or given it up. A process that is restored
        from the image comes here in another epoch."""
        words, backoff = self._words, Backoff()
        self._settle(step)
        words[Word.STATE] = PageState.SAVING
        self._socket.suspend()
        words[Word.CHECKPOINT_STEP] = step
        words[Word.CHECKPOINT_DONE] = agreement
        while words[Word.EPOCH] == self._epoch and words[Word.IMAGED_SEQ] != agreement:
            self.look(now_ns())
            backoff.sleep()
        if words[Word.EPOCH] == self._epoch:
            self._socket.resume(now_ns())
            words[Word.STATE] = PageState.RUNNING
        else:
            self._held = True
            self._held_at_ns = now_ns()

    def _save_and_go_on(self, agreement: int, step: int) -> None:
        self._checkpoint_handled = agreement
        if self.handlers.by_image:
            self._be_imaged_and_go_on(agreement, step)
            return
        save = self.handlers.on_checkpoint
        if save is None:
            self._report(Error.STATE_UNSAVEABLE, "this job cannot be saved: no handler for checkpoints")
            self._words[Word.CHECKPOINT_FAILED] = agreement
            return
        self._settle(step)
        self._words[Word.STATE] = PageState.SAVING
        details = self._details(f"checkpoint-{agreement & ~CHECKPOINT_BIT}")
        request = StopRequest(agreement, step, PageParkLevel.CHECKPOINT, details, False, False)
        if not self._try_to_save(lambda: save(request), "CHECKPOINT"):
            self._words[Word.CHECKPOINT_FAILED] = agreement
        self._words[Word.STATE] = PageState.RUNNING

    def _retune(self) -> None:
        words = self._words
        wanted = words[Word.RETUNE_SEQ]
        if wanted == words[Word.RETUNE_DONE]:
            return
        threads = words[Word.THREADS]
        if words[Word.RETUNE_SEQ] != wanted:
            return  # Being written; the next look sees it whole
        retune = self.handlers.on_retune
        # A retune that fails is answered too, with the old number of threads: asking again would not help.
        if retune is None or self._try(lambda: retune(threads), Error.NONE):
            words[Word.THREADS_APPLIED] = threads
        words[Word.RETUNE_DONE] = wanted

    def _settle(self, step: int) -> None:
        on_stop = self.handlers.on_stop
        if on_stop is not None:
            self._try(lambda: on_stop(step), Error.STATE_UNSAVEABLE)

    def _refuse(self, order: PageOrder) -> bool:
        self._report(Error.STATE_UNSAVEABLE, f"this job cannot stop at level {order.level}: it can only pause")
        return False

    def _try_to_save(self, save: Callable[[], object], *levels: str) -> bool:
        """Run a handler of a level; where the state itself is what cannot be saved, it is offered no more."""
        if self._try(save, Error.STATE_UNSAVEABLE):
            return True
        if self._failure[0] == Error.STATE_UNSAVEABLE:
            for level in levels:
                self._withdraw(_OFFERED_WITH[level], level, self._failure[1])
        return False

    def _try(self, action: Callable[[], object], error: int) -> bool:
        """Run a handler; a failure is reported and False is returned, so that the daemon decides what is next."""
        try:
            action()
        except Exception as problem:  # Whatever a framework raises, the rank has to stay where it is and say so
            if isinstance(problem, OSError) and error == Error.STATE_UNSAVEABLE:
                is_full = problem.errno in (errno.ENOSPC, errno.EDQUOT)
                error = Error.STORAGE_FULL if is_full else Error.STORAGE_FAILED
            error = getattr(problem, "ganger_error", error)
            self._failure = (error, os_failure(problem))
            self._report(error, "".join(traceback.format_exception(type(problem), problem, problem.__traceback__)))
            return False
        return True

    def _details(self, name: str) -> dict[str, Any]:
        try:
            with open(os.path.join(self._orders, f"{name}.json"), encoding="utf-8") as file:
                content = json.load(file)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as problem:
            self._report(Error.STORAGE_FAILED, f"the details of order {name} cannot be read: {os_reason(problem)}")
            return {}
        return content if isinstance(content, dict) else {}

    def _leave(self, code: int) -> NoReturn:
        self._words[Word.STATE] = PageState.EXITING
        self._words[Word.EXIT_CODE] = code + 1
        self._socket.close()
        bootstrap.leave_now(code)
