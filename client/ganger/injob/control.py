"""The job's side of its control page: cheap step boundaries, and the orders of the daemon carried out at them.

Independent of frameworks: `Handlers` offload and save. Outside Ganger there is no control: `Control.from_environment`
returns None. When the daemon requests it in the page, a thread prints the stacks of the rank into its log; not by a
signal, since every signal that has a handler belongs to the user's program.

Environment: GANGER_PAGE (control page of this rank), GANGER_JOB_DIR (this epoch's directory), GANGER_SOCKET,
GANGER_RESTORE (path of a JSON file, see `RestoreOrder`), GANGER_ARENA (descriptor of the arena, see `arena`)."""

from __future__ import annotations

import atexit
import faulthandler
import fcntl
import json
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from typing import Any, Callable, NamedTuple, NoReturn

from ganger.injob import bootstrap, metrics, state_image
from ganger.injob.job_socket import JobSocketClient
from ganger.injob.order_handler import FIRST_LOOK, Handlers, Known, OrderHandler, StopRequest
from ganger.injob.page import GangPages, Page, now_ns
from ganger.injob.page_access import PageError, Words
from ganger.injob.page_layout import (
    EXIT_NO_STATE,
    PAGE_BYTES,
    Capability,
    Error,
    Flag,
    Opaque,
    PagePhase,
    PageState,
    Word,
)
from ganger.text import os_reason

_LOOK_EVERY_S = 1.0


class StackPrinter:
    """A thread that looks at the page once a second; it prints nothing in processes forked from this one."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(words[Word.STACKS_SEQ],), daemon=True)
        self._thread.name = "ganger-stacks"
        self._thread.start()

    def close(self) -> None:
        """Let go of the page."""
        self._is_over.set()
        self._thread.join()

    def _watch(self, seen: int) -> None:
        while not self._is_over.wait(_LOOK_EVERY_S):
            requested = self._words[Word.STACKS_SEQ]
            if requested != seen:
                seen = requested
                try:
                    faulthandler.dump_traceback(2, all_threads=True)
                except OSError:
                    pass  # The program has closed its standard error


__all__ = ["Control", "Handlers", "RestoreOrder", "StopRequest"]

_MESSAGE_CHARACTERS = 4000
# Longest time between two publications of the step of a rank that obeys no orders.
_COUNT_EVERY_NS = 1_000_000_000


class RestoreOrder(NamedTuple):
    """Where the first step starts from: a checkpoint directory (``path``), or the arena, of which the job has been
    promised the memory of ``size`` bytes (0: what comes is there, and no more may be touched).

    A state older than ``step`` is not to be accepted. ``rank``: whose shard, where the world was another one.
    ``first``, ``ranks``: the first rank of its role there, and their number; 0 where roles have no ranges."""

    kind: str
    path: str
    step: int
    size: int
    rank: int
    first: int = 0
    ranks: int = 0


class Control:
    """One rank's connection to its daemon. Not thread-safe: all calls come from the thread that trains.

    ``boundary()`` says that one more mini-batch is done; it obeys what is ordered, so it may take as long as a suspend
    lasts, and it may end the process (EXIT_YIELDED, EXIT_FENCED)."""

    boundary: Callable[[], None]

    def __init__(self, page: Page, *, job_dir: str = "", socket_path: str = "", arena_fd: int | None = None) -> None:
        identity = page.identity()
        self.page = page
        self.epoch = identity.epoch
        self.rank = identity.rank
        self.world = identity.world
        # Its number in its role, and how many there are; a job may have several roles.
        self.role_rank, self.role_size = self.rank, self.world
        self.local_rank = identity.local_rank
        self.job_dir = job_dir
        self.arena_fd = arena_fd
        self.restore: RestoreOrder | None = None
        self._socket = JobSocketClient(socket_path)
        pages = GangPages(os.path.dirname(page.path), self.world, [page])
        # The job's series; only rank 0 has one.
        self.series = metrics.series_of(page, job_dir)
        self._obedience = OrderHandler(page, pages, job_dir, self._socket, self.error, self._withdraw, self._rejoin)
        # What has failed once, as `Capability` bits: it is not offered again.
        self._withdrawn = 0
        # The daemon can take images of this process: a script that is not attached needs no other saving.
        self.by_image = bool(os.environ.get("GANGER_IMAGE"))
        self._offered, self._facts = 0, dict[str, Any]()
        hot_path = _make_boundary(page.words, self._obedience.attend)
        self.boundary = hot_path.boundary
        self._set_step, self._get_step = hot_path.set_step, hot_path.get_step
        self._detach, self._replace_attend = hot_path.detach, hot_path.replace_attend
        self._started = False
        self._stacks: StackPrinter | None = None
        # A step was made whose boundary is still to come.
        self.is_step_owed = False
        _live.add(self)

    @classmethod
    def from_environment(cls) -> Control | None:
        """Return the control of this process. None outside Ganger, and in a process that did not inherit the arena of
        its rank: it would park its state in another file.

        Raises PageMismatchError for a daemon of another version, PageError for an environment that makes no sense."""
        path = os.environ.get("GANGER_PAGE", "")
        if not path:
            return None
        try:
            page = Page.open(path)
        except OSError as error:
            raise PageError(f"GANGER_PAGE names {path}, which cannot be opened: {os_reason(error)}") from error
        arena_value = os.environ.get(state_image.VARIABLE, "")
        arena_fd = state_image.inherited_arena(arena_value, is_restored=bool(page.get(Word.FLAGS) & Flag.RESTORED))
        if arena_value and arena_fd is None:
            print(
                "ganger: this process did not inherit the arena of its rank, so it trains without control:"
                " start it by exec, or with open descriptors (subprocess: close_fds=False)",
                file=sys.stderr,
            )
            page.close()
            return None
        control = cls(
            page,
            job_dir=os.environ.get("GANGER_JOB_DIR", ""),
            socket_path=os.environ.get("GANGER_SOCKET", ""),
            arena_fd=arena_fd,
        )
        control.restore = _read_restore(os.environ.get("GANGER_RESTORE", ""), control.rank)
        control.role_rank = int(os.environ.get("GANGER_ROLE_RANK", control.rank))
        control.role_size = int(os.environ.get("GANGER_ROLE_SIZE", control.world))
        return control

    @property
    def handlers(self) -> Handlers:
        return self._obedience.handlers

    @handlers.setter
    def handlers(self, handlers: Handlers) -> None:
        self._obedience.handlers = handlers

    @property
    def step(self) -> int:
        """Boundaries passed, those before a restore included."""
        return self._get_step()

    def claim(self) -> bool:
        """Take the page for this process; False if another one has it. The first process whose optimizer steps wins."""
        descriptor = os.open(self.page.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if self.page.get(Word.LOCK) == 0:
                self.page.set(Word.LOCK, os.getpid())
            return self.page.get(Word.LOCK) == os.getpid()
        finally:
            os.close(descriptor)

    def hello(self, capabilities: int, **facts: Any) -> None:
        """Report what this job can do (see `Capability`); ``facts`` go to the daemon's log.

        ``reason`` among the facts: why no checkpoint is offered, for people."""
        capabilities &= ~self._withdrawn
        if facts.get("reason") and not capabilities & Capability.CHECKPOINT:
            self.explain("CHECKPOINT", facts["reason"])
        self._offered, self._facts = capabilities, facts
        self.page.set(Word.CAPABILITIES, capabilities)
        now = now_ns()
        if self.page.get(Word.HELLO_TIME) == 0:
            self.page.set(Word.HELLO_TIME, now)
        message = {"event": "hello", "rank": self.rank, "epoch": self.epoch, "pid": os.getpid()}
        message.update(capabilities=capabilities, python=sys.version.split()[0], **facts)
        self._socket.hello(message, now)
        if self._stacks is None:
            self._stacks = StackPrinter(self.page.words)

    def _rejoin(self, step: int) -> None:
        self.epoch = self.page.get(Word.EPOCH)
        self.page.set(Word.LOCK, os.getpid())
        self.page.set(Word.RESTORED_STEP, step)
        self.page.set(Word.PHASE, PagePhase.TRAINING)
        self.hello(self._offered, **self._facts)

    def start(self, step: int = 0) -> None:
        """End of attach: ``step`` boundaries are behind us (restored ones). Returns when the rank may step.

        Obeys as a boundary does: waits for RUN with everything ready (State.READY), acknowledges a stop with ``step``.
        """
        self.page.set(Word.RESTORED_STEP, step)
        self._set_step(step)
        if self.series is not None:
            self.series.start(step)
        self._obedience.begin(step)
        if not self._started:
            self._started = True
            atexit.register(self._at_exit)

    def declare_epochs(self, are_boundaries: bool) -> None:
        """The loop that begins has epochs. ``are_boundaries``: their ends are passed by `epoch_boundary`."""
        self._obedience.has_epoch_ends = are_boundaries
        self._set_step(self.step)  # So that the next boundary looks at its order

    def epoch_boundary(self) -> None:
        """Pass the boundary of an epoch's last step, where orders are carried out that wait for one."""
        self._set_step(self.step)
        self._obedience.is_epoch_end = True
        try:
            self.boundary()
        finally:
            self._obedience.is_epoch_end = False

    def safe_point(self) -> None:
        """Look at what needs no agreement, in the middle of something long: the fence, the cores, the socket."""
        self._obedience.look(now_ns())

    def log(self, values: dict[str, float]) -> None:
        """Report figures by name: the newest of each in the page, all in the series. Raises ValueError for a ninth."""
        metrics.write(self.page, values)
        if self.series is not None:
            self.series.log(self.page.words[Word.STEP], values)

    @property
    def rested_ns(self) -> int:
        """How long this process has rested at boundaries so far."""
        return self._obedience.rested_ns

    def phase(self, phase: int) -> None:
        """Say what the rank does between boundaries (see `Phase`); the next boundary says TRAINING again."""
        self.page.set(Word.PHASE, phase)
        self._set_step(self.step)

    def evaluated(self) -> None:
        """Count a mini-batch of an evaluation, and look at what needs no agreement. The next boundary ends it."""
        count = self.page.get(Word.EVALUATED)
        if self.page.get(Word.PHASE) != PagePhase.EVALUATION:
            self.page.set(Word.EVALUATED_BEFORE, count)
        self.phase(PagePhase.EVALUATION)
        self.page.set(Word.EVALUATED_TIME, now_ns())
        self.page.set(Word.EVALUATED, count + 1)
        self.safe_point()

    def finish(self) -> None:
        """The training loop is left: from now on this rank counts as stopped at its last step.

        A step whose boundary is owed is counted, unless a stop under way would be there: ranks do not stop there."""
        if self.is_step_owed and not self._obedience.has_acknowledged():
            self._set_step(self.step + 1)
            self.page.set(Word.STEP, self.step)
        self.is_step_owed = False
        if self.series is not None:
            self.series.flush()
        self.phase(PagePhase.DONE)

    def error(self, error: int, message: str) -> None:
        """Report what went wrong (see `Error`): in the page, in rank-K.error.json, and to the daemon."""
        reason = next((name for name, value in vars(Error).items() if value == error), "UNKNOWN")
        fields = {"reason": reason, "message": message[:_MESSAGE_CHARACTERS]}
        if self.job_dir:
            self._write_beside("error", fields)
        self.page.set(Word.ERROR, error)
        self._socket.send({"event": "error", "rank": self.rank, **fields}, now_ns())

    def give_up_restore(self, message: str) -> NoReturn:
        """Report that the state assigned to this rank cannot be brought back, and end the process: EXIT_NO_STATE."""
        self.error(Error.STATE_UNREADABLE, message)
        bootstrap.leave_now(EXIT_NO_STATE)

    def step_aside(self, why: int, message: str) -> None:
        """Obey no order from now on, and report why (see `Opaque`); boundaries continue to publish the step."""
        self.explain("BOUNDARIES", message)
        if self.page.get(Word.OPAQUE) != Opaque.SEVERAL_TRAIN:
            self.page.set(Word.OPAQUE, why)
        self.page.set(Word.CAPABILITIES, self.page.get(Word.CAPABILITIES) | Capability.OPAQUE)
        if self.page.get(Word.HELLO_TIME) == 0:
            self.page.set(Word.HELLO_TIME, now_ns())
        self._replace_attend(self._count)

    def _count(self, step: int, now: int) -> Known:
        words = self.page.words
        if not words[Word.FIRST_STEP_TIME]:
            words[Word.FIRST_STEP_TIME] = now
        words[Word.PHASE] = PagePhase.TRAINING
        words[Word.STATE] = PageState.RUNNING
        words[Word.STEP] = step
        words[Word.STEP_TIME] = now
        return words[Word.ORDER_SEQ], words[Word.CHECKPOINT_SEQ], words[Word.RETUNE_SEQ], now + _COUNT_EVERY_NS

    def _withdraw(self, capability: int, level: str, why: str) -> None:
        self.explain(level, f"it failed once: {why}")
        self._withdrawn |= capability
        self.page.set(Word.CAPABILITIES, self.page.get(Word.CAPABILITIES) & ~capability)

    def explain(self, what: str, message: str) -> None:
        """Write down why something is not offered: rank-K.no-WHAT.json."""
        if self.job_dir:
            self._write_beside(f"no-{what}", {"message": message[:_MESSAGE_CHARACTERS]})

    def _write_beside(self, name: str, content: dict[str, Any]) -> None:
        path = os.path.join(self.job_dir, f"rank-{self.rank}.{name}.json")
        temporary = f"{path}.{os.getpid()}.tmp"
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump(content, file)
            os.replace(temporary, path)
        except OSError as problem:
            print(f"ganger: cannot write {path}: {os_reason(problem)}", file=sys.stderr)

    def note(self, message: str, **facts: Any) -> None:
        """Tell the daemon something for its log."""
        self._socket.send({"event": "note", "rank": self.rank, "message": message, **facts}, now_ns())

    def checkpoint_durable(self, seq: int, step: int) -> None:
        """The shard asked for by ``seq`` (`StopRequest.seq`) is on storage and synced."""
        self.page.set(Word.CHECKPOINT_STEP, step)
        self.page.set(Word.CHECKPOINT_DONE, seq)
        self._socket.send({"event": "checkpoint", "rank": self.rank, "seq": seq, "step": step}, now_ns())

    def checkpoint_failed(self, seq: int, error: int, message: str) -> None:
        """The shard asked for by ``seq`` cannot be written. Training continues; the next request tries anew."""
        self.error(error, message)
        self.page.set(Word.CHECKPOINT_FAILED, seq)

    def close(self) -> None:
        """Let go of the page and the socket (tests, and a process that turns out not to be the one that trains)."""
        self._detach()
        if self._stacks is not None:
            self._stacks.close()
        self._socket.close()
        self._obedience.pages.close()
        if self._started:
            atexit.unregister(self._at_exit)
        _live.discard(self)
        self.page.close()

    def _at_exit(self) -> None:
        # A rank that fails has not finished: the others must not believe that training ended here.
        if not bootstrap.has_failed() and self.step > 0:
            self.finish()
        self.page.set(Word.STATE, PageState.EXITING)
        self._socket.close()

    def _forget_in_child(self) -> None:
        self._detach()
        self._socket.close()
        self._stacks = None
        self._obedience.handlers = Handlers()
        atexit.unregister(self._at_exit)


Attend = Callable[[int, int], Known]


class _HotPath(NamedTuple):
    """The functions around one boundary, which share its variables.

    ``replace_attend`` exchanges what looks at the page; ``detach`` lets a forked process reach the page no more."""

    boundary: Callable[[], None]
    set_step: Callable[[int], None]
    get_step: Callable[[], int]
    detach: Callable[[], None]
    replace_attend: Callable[[Attend], None]


def _make_boundary(words: Words, attend: Attend) -> _HotPath:
    """Build the hot path as a closure over plain variables: no attribute lookups, one load, two stores, one clock.

    Only ORDER_SEQ is looked at each time; lease (a fence ends it), cores and checkpoint requests 1 ms after the last
    look: at every boundary of steps worth the name, for nearly nothing in shorter ones."""
    order_word, checkpoint_word, retune_word = Word.ORDER_SEQ, Word.CHECKPOINT_SEQ, Word.RETUNE_SEQ
    lease_word, step_word, time_word = Word.LEASE_UNTIL, Word.STEP, Word.STEP_TIME
    clock, boottime = time.clock_gettime_ns, time.CLOCK_BOOTTIME
    step = 0
    order, checkpoint, retune, tend_at = FIRST_LOOK, 0, 0, 0
    look_at = 0

    def boundary() -> None:
        nonlocal step, order, checkpoint, retune, tend_at, look_at
        step += 1
        now = clock(boottime)
        if words[order_word] != order:
            order, checkpoint, retune, tend_at = attend(step, now)
            return
        if now >= look_at:
            look_at = now + 1_000_000
            is_expired = now > words[lease_word] > 0  # 0: there is no lease to end
            if is_expired or now > tend_at or words[checkpoint_word] != checkpoint or words[retune_word] != retune:
                order, checkpoint, retune, tend_at = attend(step, now)
                return
        words[step_word] = step
        words[time_word] = now

    def set_step(value: int) -> None:
        nonlocal step, order
        step = value
        order = FIRST_LOOK

    def get_step() -> int:
        return step

    def detach() -> None:
        # A process forked from this one shares the page; what the child does must not reach the daemon.
        nonlocal words, attend
        words = memoryview(bytearray(PAGE_BYTES)).cast("Q")
        attend = _never_attend

    def replace_attend(other: Attend) -> None:
        nonlocal attend, order
        attend, order = other, FIRST_LOOK

    return _HotPath(boundary, set_step, get_step, detach, replace_attend)


def _never_attend(step: int, now: int) -> Known:
    return 0, 0, 0, now + (1 << 62)


def failure_text(problem: Exception) -> str:
    """Return one line for the user about a failure of the agent, with its place in the code, so that it cannot be taken
    for a reason that a script gives.

    Raises `problem` again if a signal handler of the script has raised it: that may run in the middle of the agent."""
    if _is_of_signal_handler(problem):
        raise problem
    lines = str(problem).strip().splitlines()
    what = f"{type(problem).__name__}{': ' + lines[0][:300] if lines else ''}"
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(problem.__traceback__)]
    place = f" (at {os.path.basename(places[-1][0])}:{places[-1][1]}, please report it)" if places else ""
    return f"the agent met what it cannot handle: {what}{place}"


def _is_of_signal_handler(problem: Exception) -> bool:
    codes = set()
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        handler = getattr(handler, "func", handler)  # Of functools.partial
        if callable(handler):
            codes.add(getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None))
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(problem.__traceback__))


_live: weakref.WeakSet[Control] = weakref.WeakSet()


def _forget_all_in_child() -> None:
    for control in list(_live):
        control._forget_in_child()
    _live.clear()


os.register_at_fork(after_in_child=_forget_all_in_child)


def _read_restore(path: str, own_rank: int) -> RestoreOrder | None:
    if not path:
        return None
    try:
        with open(path, encoding="utf-8") as file:
            content: dict[str, Any] = json.load(file)
        kind = str(content["kind"])
        step, size = int(content.get("step", 0)), int(content.get("size", 0))
        directory = str(content["path"]) if kind == "checkpoint" else ""
        rank = int(content.get("rank", own_rank))
        first, ranks = int(content.get("first", 0)), int(content.get("ranks", 0))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PageError(f"GANGER_RESTORE names {path}, which cannot be read: {os_reason(error)}") from error
    if kind not in ("checkpoint", "arena"):
        raise PageError(f"{path} asks to restore from {kind!r}: this Ganger knows checkpoint and arena")
    return RestoreOrder(kind, directory, step, size, rank, first, ranks)
