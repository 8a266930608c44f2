"""The control page of one rank and epoch: a 4 KiB file in a tmpfs directory, touched by daemon, launcher and job. A
word is written whole. Records are published by their first word written last; readers read it first and check it again.
Words of the job are untrusted numbers to the daemon."""

from __future__ import annotations

import math
import os
import struct
import sys
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ganger.injob.page_access import Access, FilePage, MappedPage, PageError, Words
from ganger.injob.page_layout import (
    CHECKPOINT_BIT,
    MAGIC,
    METRIC_LINES,
    METRICS_FIRST,
    PAGE_BYTES,
    VERSION,
    Error,
    Flag,
    Opaque,
    PageOrderKind,
    PagePhase,
    PageState,
    Word,
)
from ganger.injob.process_identity import start_ticks
from ganger.protocol.stop_rules import RankPoint

_WORD_LIMIT = (1 << 64) - 1
# Numbers of a job above these are nonsense; they are cut, so that arithmetic on them stays harmless.
_STEP_LIMIT = (1 << 62) - 1
# No daemon asks for threads more often than this, or for more of them.
_COUNT_LIMIT = (1 << 31) - 1
_THREADS_LIMIT = 65_536
# Looks at words that may be changing, before what was seen last is taken, or nothing.
_LOOKS = 8
# Words of one line, as `Access.read` counts them.
_LINE = 8


class PageMismatchError(PageError):
    """The page was made by another version of Ganger, if its first word can be believed."""

    def __init__(self, path: str, version: int) -> None:
        super().__init__(
            f"control page {path} has version {version}, this Ganger reads version {VERSION}: "
            "use the same version of Ganger in the job and in the daemon"
        )
        self.path = path


class PageIdentity(NamedTuple):
    """Line 0 of a page: whose it is. ``start_ticks`` is the kernel's start time of ``pid``; 0 before the fork."""

    epoch: int
    rank: int
    world: int
    local_rank: int
    pid: int
    start_ticks: int
    flags: int


class PageOrder(NamedTuple):
    """One order; ``deadline_ns`` is a time of CLOCK_BOOTTIME, 0 for never."""

    seq: int
    order: int
    stop_seq: int
    level: int
    deadline_ns: int


class RawPoint(NamedTuple):
    """Where a rank is, whatever the agreement: what daemons relay to each other."""

    step: int
    ack_seq: int
    ack_step: int
    done: bool


class PageProgress(NamedTuple):
    """Everything a job reports, range-checked. Times are ns of CLOCK_BOOTTIME, sizes are bytes; 0 means not yet.

    A value outside its range reads as the nearest legal one; ``loss`` may be any float64, NaN before the first."""

    step: int
    samples: int
    step_time_ns: int
    loss: float
    data_wait_ns: int
    training_epoch: int
    training_epochs: int
    phase: int
    first_step_time_ns: int
    evaluated: int
    evaluated_time_ns: int
    evaluated_before: int
    state: int
    ack_seq: int
    ack_step: int
    reached_seq: int
    reached_step: int
    arena_filled: int
    arena_size: int
    capabilities: int
    device_bytes: int
    peak_device_bytes: int
    offloaded_bytes: int
    exit_code: int | None
    checkpoint_done: int
    checkpoint_step: int
    checkpoint_failed: int
    restored_step: int
    hello_time_ns: int
    threads_applied: int
    error: int
    resize_divides: int
    opaque: int


# Greatest legal values of those that are no steps, times or sizes.
_LIMITS = {
    **dict.fromkeys(("ack_seq", "checkpoint_done", "checkpoint_failed"), _WORD_LIMIT),
    "phase": PagePhase.DONE,
    "state": PageState.EXITING,
    "threads_applied": _THREADS_LIMIT,
    "error": Error.STORAGE_FAILED,
    "resize_divides": _COUNT_LIMIT,
    "opaque": Opaque.AGENT_FAILED,
}
_PROGRESS = [
    (int(vars(Word)[field.removesuffix("_ns").upper()]), _LIMITS.get(field, _STEP_LIMIT))
    for field in PageProgress._fields
]


def now_ns() -> int:
    """Return the clock all pages of this machine use: ns since boot, suspended time included."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def page_path(directory: str, rank: int) -> str:
    """Return where a rank's page, or its mirror, lies among the pages of its gang."""
    return os.path.join(directory, f"rank-{rank}.page")


class Page:
    """One control page. Each word has one writer (see `Word`); a 64-bit word is never seen half written.

    ``words`` is for hot paths; all else goes through the methods. A reader of a page as a file (see `page_access`)
    gets PageError from all of them once its job has truncated the file."""

    def __init__(self, path: str, access: Access) -> None:
        self.path = path
        self._access = access
        self.words: Words = access.words

    @classmethod
    def create(
        cls,
        path: str,
        *,
        epoch: int,
        rank: int,
        world: int,
        local_rank: int = 0,
        threads: int = 0,
        mapped: bool = True,
        owner: tuple[int, int] | None = None,
    ) -> Page:
        """Make the page of ``rank``; it appears under ``path`` complete, readable by its owner only. ``owner``: uid and
        gid; None: this process's.

        Raises FileExistsError if there is one (an epoch's page is made once), OSError if the file system is full."""
        if sys.byteorder != "little":
            raise PageError("control pages are little-endian; this machine is not")
        temporary = f"{path}.{os.getpid()}.tmp"
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            try:
                # Without the blocks behind it, the first store on a full tmpfs would be a SIGBUS.
                os.posix_fallocate(descriptor, 0, PAGE_BYTES)
            except OSError:
                os.close(descriptor)
                raise
            page = cls(path, MappedPage(descriptor) if mapped else FilePage(path, descriptor))
            page.set(Word.EPOCH, epoch)
            page.set(Word.RANK, rank)
            page.set(Word.WORLD, world)
            page.set(Word.LOCAL_RANK, local_rank)
            # As the rank is launched: there is nothing to apply, and a number of the script's own stands.
            page.set(Word.THREADS, threads)
            page.set(Word.THREADS_APPLIED, threads)
            page.set(Word.MAGIC, MAGIC << 16 | VERSION)
            if owner is not None:
                os.chown(temporary, *owner)
            os.link(temporary, path)
        finally:
            os.unlink(temporary)
        return page

    @classmethod
    def open(cls, path: str, *, writable: bool = True, mapped: bool = True) -> Page:
        """Open an existing page. Raises FileNotFoundError, PageMismatchError, PageError (no page, or damaged)."""
        flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # A pipe in its place is not waited for
        descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | flags)
        size = os.fstat(descriptor).st_size
        if size != PAGE_BYTES:
            os.close(descriptor)
            raise PageError(f"control page {path} has {size} bytes instead of {PAGE_BYTES}: it is damaged")
        page = cls(path, MappedPage(descriptor, writable) if mapped else FilePage(path, descriptor))
        try:
            found = page.get(Word.MAGIC)
            if found >> 16 != MAGIC:
                raise PageError(f"{path} is no control page: it begins with {found >> 16:#x}, not {MAGIC:#x}")
            if found != MAGIC << 16 | VERSION:
                raise PageMismatchError(path, found & 0xFFFF)
        except PageError:
            page.close()
            raise
        return page

    def damage(self, epoch: int, rank: int, world: int) -> str:
        """Say what is wrong with a page that was whole once, or "": its job may write anything into it."""
        try:
            words = self._access.read(0, 3 * _LINE)
        except PageError as error:
            return str(error)
        whole = (MAGIC << 16 | VERSION, epoch, rank, world)
        if (words[Word.MAGIC], words[Word.EPOCH], words[Word.RANK], words[Word.WORLD]) != whole:
            return f"control page {self.path} was overwritten by its job"
        asked = words[Word.CHECKPOINT_SEQ]
        if (
            words[Word.PID] > _COUNT_LIMIT
            or words[Word.START_TICKS] > _STEP_LIMIT
            or words[Word.THREADS] > _THREADS_LIMIT
            or words[Word.RETUNE_SEQ] > _COUNT_LIMIT
            or (asked and not CHECKPOINT_BIT < asked <= CHECKPOINT_BIT | _COUNT_LIMIT)
        ):
            return f"the orders in control page {self.path} were overwritten by its job"
        return ""

    def close(self) -> None:
        """Let go of the file; it stays."""
        self._access.close()

    def get(self, word: int) -> int:
        return self.words[word]

    def set(self, word: int, value: int) -> None:
        """Set a word. Raises ValueError for a number that does not fit."""
        if not 0 <= value <= _WORD_LIMIT:
            raise ValueError(f"word {word} of {self.path} cannot hold {value}")
        self.words[word] = value

    def set_float(self, word: int, value: float) -> None:
        (self.words[word],) = struct.unpack("<Q", struct.pack("<d", value))

    def set_loss(self, value: float) -> None:
        # Zero bits are those of a page without a loss.
        self.set_float(Word.LOSS, value or -0.0)

    # What the daemon writes.

    def write_order(self, seq: int, order: int, *, stop_seq: int = 0, level: int = 0, deadline_ns: int = 0) -> None:
        """Publish an order. The same one again changes nothing; raises ValueError for a sequence number gone by."""
        if (order == PageOrderKind.STOP) != (stop_seq != 0) or stop_seq & CHECKPOINT_BIT:
            raise ValueError(f"order {seq}: a stop has a stop sequence number below 2^62, other orders have none")
        # The only writer: a record without its number is one that a former daemon did not come to publish.
        current = self._order_seen()
        wanted = PageOrder(seq, order, stop_seq, level, deadline_ns)
        if current == wanted:
            return
        if seq <= current.seq:
            raise ValueError(f"order {seq} comes after order {current.seq} in {self.path}: numbers only rise")
        # Zero while the words change: a reader in between looks again instead of mixing two orders.
        self.words[Word.ORDER_SEQ] = 0
        self.words[Word.ORDER] = order
        self.words[Word.STOP_SEQ] = stop_seq
        self.words[Word.LEVEL] = level
        self.words[Word.DEADLINE] = deadline_ns
        self.words[Word.ORDER_SEQ] = seq

    def extend_lease(self, until_ns: int) -> None:
        """Let the rank step until then (0: for ever). A fenced page stays fenced."""
        if not self.fenced:
            self.set(Word.LEASE_UNTIL, until_ns)

    def fence(self) -> None:
        """End this epoch: the rank leaves with EXIT_FENCED at its next boundary."""
        self.words[Word.FLAGS] |= Flag.FENCED
        # Any lease is over too, so that the job needs to look at the flag only when its lease has run out.
        self.words[Word.LEASE_UNTIL] = 1

    @property
    def fenced(self) -> bool:
        return bool(self.words[Word.FLAGS] & Flag.FENCED)

    def retune(self, seq: int, threads: int) -> None:
        """Ask for ``threads`` computing threads."""
        self.set(Word.THREADS, threads)
        self.set(Word.RETUNE_SEQ, seq)

    def request_checkpoint(self, number: int) -> int:
        """Ask for a checkpoint at the next agreed boundary; return the CHECKPOINT_SEQ that names the agreement.

        Not while a stop is on: a rank that obeys the stop drops the request."""
        if not 0 < number < CHECKPOINT_BIT:
            raise ValueError(f"checkpoint request {number} is out of range")
        seq = number | CHECKPOINT_BIT
        self.set(Word.CHECKPOINT_SEQ, seq)
        return seq

    def let_leave(self, seq: int) -> None:
        """Say that the checkpoint of order ``seq`` is published; before that a rank that saved for it stays."""
        self.set(Word.LEAVE_SEQ, max(seq, self.get(Word.LEAVE_SEQ)))

    def mirror(self, point: RawPoint) -> None:
        """Store what was relayed of a rank on another node. An older point than the one here changes nothing."""
        step = min(point.step, _STEP_LIMIT)
        if step < self.words[Word.STEP]:
            return
        if point.ack_seq and self.words[Word.ACK_SEQ] != point.ack_seq:
            self.publish_ack(point.ack_seq, min(point.ack_step, _STEP_LIMIT))
        self.words[Word.STEP] = step
        self.words[Word.PHASE] = PagePhase.DONE if point.done else PagePhase.TRAINING

    # What the job writes.

    def publish_ack(self, seq: int, step: int) -> None:
        # Zero in between, so that no reader combines the old number with the new step.
        self.words[Word.ACK_SEQ] = 0
        self.words[Word.ACK_STEP] = step
        self.words[Word.ACK_SEQ] = seq

    # What both read.

    def identity(self) -> PageIdentity:
        words = self.words
        return PageIdentity(
            epoch=words[Word.EPOCH],
            rank=words[Word.RANK],
            world=words[Word.WORLD],
            local_rank=words[Word.LOCAL_RANK],
            pid=words[Word.PID],
            start_ticks=words[Word.START_TICKS],
            flags=words[Word.FLAGS],
        )

    def is_of_this_process(self) -> bool:
        """Return whether the launcher made this very process the rank. True for a page that no launcher filled in
        (tests).

        The pid alone does not say so: it may be used again, or stand for another process in a container. A restored
        process does not know the pid that it has outside its unit."""
        pid, ticks = self.words[Word.PID], self.words[Word.START_TICKS]
        if self.words[Word.FLAGS] & Flag.RESTORED:
            return ticks in (0, start_ticks(os.getpid()))
        return pid == 0 or (pid == os.getpid() and ticks in (0, start_ticks(pid)))

    def read_order(self) -> PageOrder:
        """Return the order that stands; all zero before the first. Waits out a writer in the middle of one."""
        for _ in range(1000):
            order = self._order_seen()
            if self.words[Word.ORDER_SEQ] == order.seq and (order.seq or not order.order):
                return order
            time.sleep(0.0001)
        # A writer died between two words: its successor writes a whole order again.
        return PageOrder(0, 0, 0, 0, 0)

    def _order_seen(self) -> PageOrder:
        words = self.words
        seq = words[Word.ORDER_SEQ]
        return PageOrder(seq, words[Word.ORDER], words[Word.STOP_SEQ], words[Word.LEVEL], words[Word.DEADLINE])

    def raw_point(self) -> RawPoint:
        """Return step and ack as a pair that was true; a rank that is done is seen with its last step."""
        words = self.words
        step, done = 0, False
        for _ in range(_LOOKS):
            done = words[Word.PHASE] == PagePhase.DONE
            step = min(words[Word.STEP], _STEP_LIMIT)
            ack_seq = words[Word.ACK_SEQ]
            ack_step = words[Word.ACK_STEP]
            if words[Word.ACK_SEQ] == ack_seq:
                return RawPoint(step, ack_seq, min(ack_step, _STEP_LIMIT), done)
        # No rank acknowledges so often: the process that writes this tries to keep the reader in the loop.
        return RawPoint(step, 0, 0, done)

    def point(self, agreement: int) -> RankPoint:
        """Return what this rank has published about the agreement of that number (a STOP_SEQ or CHECKPOINT_SEQ)."""
        raw = self.raw_point()
        return RankPoint(raw.step, raw.ack_step if raw.ack_seq == agreement else None, raw.done)

    def progress(self) -> PageProgress:
        # Line by line in this order: a step before the ack that belongs to it, a state before what it leaves behind.
        steps = self._access.read(Word.STEP, _LINE)
        boundary = self._steady(Word.ACK_SEQ, _LINE)
        job = self._steady(Word.CAPABILITIES, Word.CHECKPOINT_FAILED + 1 - Word.CAPABILITIES)
        # Estimates follow from these, so they may be of two moments.
        evaluation = self._access.read(Word.EVALUATED, Word.EVALUATED_BEFORE + 1 - Word.EVALUATED)
        raw = (*(0,) * Word.ACK_SEQ, *boundary, *steps, *job, *evaluation)
        exit_word = raw[Word.EXIT_CODE]
        return PageProgress(*[raw[word] if raw[word] < limit else limit for word, limit in _PROGRESS])._replace(
            # A loss of zero comes as -0.0.
            loss=0.0 + struct.unpack("<d", struct.pack("<Q", raw[Word.LOSS]))[0] if raw[Word.LOSS] else math.nan,
            capabilities=raw[Word.CAPABILITIES] & 0xFFFF,
            exit_code=exit_word - 1 if 1 <= exit_word <= 256 else None,
        )

    def metric_words(self) -> Sequence[int]:
        """The lines of `metrics`, as they stood together."""
        return self._steady(METRICS_FIRST, METRIC_LINES * _LINE)

    def _steady(self, first: int, count: int) -> Sequence[int]:
        """Words of several records, as they stood together: read until two looks agree."""
        seen = self._access.read(first, count)
        for _ in range(_LOOKS):
            again, seen = seen, self._access.read(first, count)
            if again == seen:
                break
        return seen


class GangPages:
    """The pages of a gang of ``world`` ranks in ``directory``, opened when first needed, read-only.

    Pages that are open already are handed in as ``known`` and stay their owner's to close. A page that is
    not there yet is looked for again at every call; one of another version raises PageMismatchError."""

    def __init__(self, directory: str, world: int, known: Iterable[Page] = ()) -> None:
        self._directory = directory
        self._world = world
        self._known = {page.get(Word.RANK): page for page in known}
        self._pages: dict[int, Page] = dict(self._known)

    def page(self, rank: int) -> Page | None:
        found = self._pages.get(rank)
        if found is None:
            try:
                found = Page.open(page_path(self._directory, rank), writable=False)
            except FileNotFoundError:
                return None
            if found.get(Word.RANK) != rank or found.get(Word.WORLD) != self._world:
                identity = found.identity()
                found.close()
                raise PageError(
                    f"{page_path(self._directory, rank)} belongs to rank {identity.rank} of {identity.world}, "
                    f"not to rank {rank} of {self._world}"
                )
            self._pages[rank] = found
        return found

    def points(self, agreement: int) -> tuple[RankPoint, ...] | None:
        """Return what every rank has published about an agreement, by rank; None while a page is missing."""
        points = []
        for rank in range(self._world):
            page = self.page(rank)
            if page is None:
                return None
            points.append(page.point(agreement))
        return tuple(points)

    def close(self) -> None:
        """Unmap all but the pages that were handed in."""
        for rank, page in self._pages.items():
            if rank not in self._known:
                page.close()
        self._pages.clear()
