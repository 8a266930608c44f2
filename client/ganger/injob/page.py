"""The control page: one 4 KiB file per rank and epoch, in a tmpfs directory, mapped by daemon and job.

Orders go down, progress comes up; a word is 64 bits, little-endian, and written whole. Lines of eight words have one
writer each. Multi-word records are published by their first word written last; readers read it first and
check it again. Words of the job are untrusted numbers to the daemon. Times are nanoseconds of CLOCK_BOOTTIME.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from typing import NamedTuple

from ganger.injob.boundary import Point

PAGE_BYTES = 4096
MAGIC = 0x5245474E4147  # "GANGER"
VERSION = 1

# Set in every CHECKPOINT_SEQ, so that it never equals a STOP_SEQ: both name agreements in ACK_SEQ.
CHECKPOINT_BIT = 1 << 62

_WORDS = PAGE_BYTES // 8
_WORD_LIMIT = (1 << 64) - 1
# Numbers of a job above these are nonsense; they are cut, so that arithmetic on them stays harmless.
_STEP_LIMIT = (1 << 62) - 1
# No daemon asks for threads more often than this, or for more of them.
_COUNT_LIMIT = (1 << 31) - 1
_THREADS_LIMIT = 65_536


class Word:
    """Index of each word. D: written by the daemon, L: by the launcher, J: by the job."""

    # line 0: identity, filled before the user's code starts
    MAGIC = 0  # D: MAGIC << 16 | VERSION
    EPOCH = 1  # D
    RANK = 2  # D
    WORLD = 3  # D
    PID = 4  # L
    START_TICKS = 5  # L
    FLAGS = 6  # D: see Flag
    LOCAL_RANK = 7  # D

    # line 1: the order; ORDER_SEQ is written last
    ORDER_SEQ = 8  # D: raised with every new order
    ORDER = 9  # D: see Order
    STOP_SEQ = 10  # D: identifies the boundary agreement of a stop; 0 with RUN
    LEVEL = 11  # D: see Level
    DEADLINE = 12  # D: when the daemon escalates; 0 never
    LEASE_UNTIL = 13  # D: stop at a boundary once past; 0 never. Changes without ORDER_SEQ
    CHECKPOINT_SEQ = 14  # D: raised to ask for a checkpoint to storage at the next agreed boundary, going on afterwards
    ARENA_AVAILABLE = 15  # D: bytes of state received into the arena so far (destination of a move)

    # line 2: cores
    RETUNE_SEQ = 16  # D: raised after THREADS and WORKERS are written
    THREADS = 17  # D
    WORKERS = 18  # D: hint for data loaders
    LEAVE_SEQ = 19  # D: highest ORDER_SEQ whose checkpoint is published: a rank that saved for it may end now

    # line 3: the boundary
    ACK_SEQ = 24  # J: STOP_SEQ acked; written after ACK_STEP
    ACK_STEP = 25  # J: acks never change
    STATE = 26  # J: see State
    REACHED_SEQ = 27  # J: highest ORDER_SEQ fully carried out
    REACHED_STEP = 28  # J: step at which it stopped (K)
    ARENA_FILLED = 29  # J: bytes of state in the arena so far (grows while it is being filled)
    ARENA_SIZE = 30  # J: bytes of the complete state image; 0 until known
    RETUNE_DONE = 31  # J: highest RETUNE_SEQ applied

    # line 4: progress
    STEP = 32  # J: boundaries passed; written after ack words
    SAMPLES = 33  # J
    STEP_TIME = 34  # J: time of the last boundary
    LOSS = 35  # J: float64 bits
    DATA_WAIT = 36  # J: ns spent waiting for data so far
    TRAINING_EPOCH = 37  # J
    PHASE = 38  # J: see Phase
    FIRST_STEP_TIME = 39  # J: time of the first boundary after the last start or resume

    # line 5: what the job is
    CAPABILITIES = 40  # J: see Capability
    LOCK = 41  # J: pid of the process whose optimizer steps; the first one wins
    DEVICE_BYTES = 42  # J: device memory in use by the framework (virtual device: bytes of live tensor storages)
    PEAK_DEVICE_BYTES = 43  # J
    OFFLOADED_BYTES = 44  # J: device bytes freed by the last OFFLOAD
    EXIT_CODE = 45  # J: exit code + 1, for when no launcher is there to record it; 0 unknown
    CHECKPOINT_DONE = 46  # J: highest CHECKPOINT_SEQ whose shard is durable
    CHECKPOINT_STEP = 47  # J: its step
    RESTORED_STEP = 48  # J: step from which this epoch started
    HELLO_TIME = 49  # J: when the agent attached; 0 not yet
    THREADS_APPLIED = 50  # J
    ERROR = 51  # J: see Error; details in rank-K.error.json


class Flag:
    FENCED = 1  # this epoch is over: exit with EXIT_FENCED at the next boundary


class Order:
    RUN = 1
    STOP = 2  # stop at an agreed boundary, at LEVEL
    WAIT = 3  # do not step yet (destination of a move): restore, then wait for RUN


class Level:
    PAUSE = 1
    OFFLOAD = 2
    CHECKPOINT = 3  # write shard, rest until LEAVE_SEQ, then exit with EXIT_YIELDED
    HAND_OVER = 4  # state into the arena, tensors may stay; wait


class State:
    INIT = 0
    RUNNING = 1
    WAITING = 2  # acked, waits for the others or for RUN
    PAUSED = 3
    OFFLOADED = 4
    HANDED_OVER = 5
    SAVING = 6
    RESTORING = 7
    READY = 8  # restored, waits for RUN
    EXITING = 9


class Phase:
    START = 0  # before the first boundary
    TRAINING = 1
    EVALUATION = 2
    COMPILATION = 3
    REPLAY = 4  # the zero-line agent goes back to its position
    DONE = 5  # left its loop: acks at its last step


class Capability:
    PAUSE = 1
    OFFLOAD = 2
    CHECKPOINT = 4
    FIVE_LINE = 8  # the script attached by itself
    OPAQUE = 16  # the agent gave up on this script


class Error:
    NONE = 0
    STATE_UNREADABLE = 1
    STATE_UNSAVEABLE = 2
    ARENA_TOO_SMALL = 3
    STORAGE_FULL = 4
    STORAGE_FAILED = 5


EXIT_YIELDED = 75
EXIT_FENCED = 76
EXIT_NO_STATE = 77  # what it was told to restore cannot be read


class PageError(Exception):
    """A control page cannot be used; the message says which and why."""


class PageMismatchError(PageError):
    """The page was made by another version of Ganger."""


class Identity(NamedTuple):
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


class Progress(NamedTuple):
    """Everything a job reports, range-checked. Times are ns of CLOCK_BOOTTIME, sizes are bytes; 0 means not yet.

    A value outside its range reads as the nearest legal one; ``loss`` may be any float64, NaN included.
    """

    step: int
    samples: int
    step_time_ns: int
    loss: float
    data_wait_ns: int
    training_epoch: int
    phase: int
    first_step_time_ns: int
    state: int
    ack_seq: int
    ack_step: int
    reached_seq: int
    reached_step: int
    arena_filled: int
    arena_size: int
    retune_done: int
    capabilities: int
    device_bytes: int
    peak_device_bytes: int
    offloaded_bytes: int
    exit_code: int | None
    checkpoint_done: int
    checkpoint_step: int
    restored_step: int
    hello_time_ns: int
    threads_applied: int
    error: int
    lock_pid: int


def now_ns() -> int:
    """Return the clock all pages of this machine use: ns since boot, suspended time included."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def page_path(directory: str, rank: int) -> str:
    """Return where a rank's page, or its mirror, lies among the pages of its gang."""
    return os.path.join(directory, f"rank-{rank}.page")


class Page:
    """One mapped control page. Each word has one writer (see `Word`); a 64-bit word is never seen half written.

    ``words`` (and ``floats``, the same memory) are for hot paths; everything else goes through the methods.
    """

    def __init__(self, path: str, memory: mmap.mmap) -> None:
        self.path = path
        self._memory = memory
        self._bytes = memoryview(memory)
        self.words = self._bytes.cast("Q")
        self.floats = self._bytes.cast("d")

    @classmethod
    def create(
        cls,
        path: str,
        *,
        epoch: int,
        rank: int,
        world: int,
        local_rank: int = 0,
        uid: int | None = None,
        gid: int | None = None,
        threads: int = 0,
        workers: int = 0,
    ) -> Page:
        """Make the page of ``rank`` and map it; it appears under ``path`` complete, readable by its owner only.

        Raises FileExistsError if there is one (an epoch's page is made once), OSError if the file system is full.
        """
        if sys.byteorder != "little":
            raise PageError("control pages are little-endian; this machine is not")
        temporary = f"{path}.{os.getpid()}.tmp"
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Without the blocks behind it, the first store on a full tmpfs would be a SIGBUS.
            os.posix_fallocate(descriptor, 0, PAGE_BYTES)
            if uid is not None or gid is not None:
                os.fchown(descriptor, -1 if uid is None else uid, -1 if gid is None else gid)
            page = cls(path, mmap.mmap(descriptor, PAGE_BYTES))
            page.set(Word.EPOCH, epoch)
            page.set(Word.RANK, rank)
            page.set(Word.WORLD, world)
            page.set(Word.LOCAL_RANK, local_rank)
            if threads or workers:
                page.retune(1, threads, workers)
            page.set(Word.MAGIC, MAGIC << 16 | VERSION)
            os.link(temporary, path)
        finally:
            os.close(descriptor)
            os.unlink(temporary)
        return page

    @classmethod
    def open(cls, path: str, *, writable: bool = True) -> Page:
        """Map an existing page. Raises FileNotFoundError, PageMismatchError, PageError (no page, or damaged)."""
        descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            size = os.fstat(descriptor).st_size
            if size != PAGE_BYTES:
                raise PageError(f"control page {path} has {size} bytes instead of {PAGE_BYTES}: it is damaged")
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            page = cls(path, mmap.mmap(descriptor, PAGE_BYTES, access=access))
        finally:
            os.close(descriptor)
        found = page.get(Word.MAGIC)
        if found != MAGIC << 16 | VERSION:
            page.close()
            if found >> 16 != MAGIC:
                raise PageError(f"{path} is no control page: it begins with {found >> 16:#x}, not {MAGIC:#x}")
            raise PageMismatchError(
                f"control page {path} has version {found & 0xFFFF}, this Ganger reads version {VERSION}: "
                "use the same version of Ganger in the job and in the daemon"
            )
        return page

    @property
    def is_whole(self) -> bool:
        """Whether the file still has all its bytes: one call of the kernel."""
        return self._memory.size() >= PAGE_BYTES

    def damage(self, epoch: int, rank: int, world: int) -> str:
        """Say what is wrong with a page that was whole once, or "". Its job may write anything into it, and cut it off:
        a daemon that then touched it would end by SIGBUS."""
        if not self.is_whole:
            return f"control page {self.path} was cut off by its job"
        words = self.words
        whole = (MAGIC << 16 | VERSION, epoch, rank, world)
        if (words[Word.MAGIC], words[Word.EPOCH], words[Word.RANK], words[Word.WORLD]) != whole:
            return f"control page {self.path} was overwritten by its job"
        if words[Word.THREADS] > _THREADS_LIMIT or words[Word.RETUNE_SEQ] > _COUNT_LIMIT:
            return f"the orders in control page {self.path} were overwritten by its job"
        return ""

    def close(self) -> None:
        """Unmap; the file stays."""
        self.words.release()
        self.floats.release()
        self._bytes.release()
        self._memory.close()

    def get(self, word: int) -> int:
        return self.words[word]

    def set(self, word: int, value: int) -> None:
        """Store one word. Raises ValueError for what does not fit into 64 bits without sign."""
        if not 0 <= value <= _WORD_LIMIT:
            raise ValueError(f"word {word} of {self.path} cannot hold {value}")
        self.words[word] = value

    def get_float(self, word: int) -> float:
        return self.floats[word]

    def set_float(self, word: int, value: float) -> None:
        self.floats[word] = value

    # What the daemon writes.

    def write_order(self, seq: int, order: int, *, stop_seq: int = 0, level: int = 0, deadline_ns: int = 0) -> None:
        """Publish an order. The same one again changes nothing; raises ValueError for a sequence number gone by."""
        if (order == Order.STOP) != (stop_seq != 0) or stop_seq & CHECKPOINT_BIT:
            raise ValueError(f"order {seq}: a stop has a stop sequence number below 2^62, other orders have none")
        current = self.read_order()
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

    def unfence(self) -> None:
        """Take a fence back (a parked source re-armed under a new epoch); the lease has to be extended next."""
        self.words[Word.FLAGS] &= ~Flag.FENCED & _WORD_LIMIT

    @property
    def fenced(self) -> bool:
        return bool(self.words[Word.FLAGS] & Flag.FENCED)

    def retune(self, seq: int, threads: int, workers: int) -> None:
        """Ask for ``threads`` computing threads and ``workers`` loader processes (0: as they are)."""
        self.set(Word.THREADS, threads)
        self.set(Word.WORKERS, workers)
        self.set(Word.RETUNE_SEQ, seq)

    def request_checkpoint(self, number: int) -> int:
        """Ask for a checkpoint at the next agreed boundary; return the CHECKPOINT_SEQ that names the agreement.

        Not while a stop is on: a rank that obeys the stop drops the request.
        """
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
        self.words[Word.PHASE] = Phase.DONE if point.done else Phase.TRAINING

    # What the job writes.

    def publish_ack(self, seq: int, step: int) -> None:
        # Zero in between: nobody may read the old number with the new step.
        self.words[Word.ACK_SEQ] = 0
        self.words[Word.ACK_STEP] = step
        self.words[Word.ACK_SEQ] = seq

    # What both read.

    def identity(self) -> Identity:
        words = self.words
        return Identity(
            epoch=words[Word.EPOCH],
            rank=words[Word.RANK],
            world=words[Word.WORLD],
            local_rank=words[Word.LOCAL_RANK],
            pid=words[Word.PID],
            start_ticks=words[Word.START_TICKS],
            flags=words[Word.FLAGS],
        )

    def read_order(self) -> PageOrder:
        """Return the order that stands; all zero before the first. Waits out a writer in the middle of one."""
        words = self.words
        for _ in range(1000):
            seq = words[Word.ORDER_SEQ]
            order = PageOrder(seq, words[Word.ORDER], words[Word.STOP_SEQ], words[Word.LEVEL], words[Word.DEADLINE])
            if words[Word.ORDER_SEQ] == seq and (seq or not order.order):
                return order
            time.sleep(0.0001)
        # A writer died between two words: its successor writes a whole order again.
        return PageOrder(0, 0, 0, 0, 0)

    def raw_point(self) -> RawPoint:
        """Return step and ack as a pair that was true; a rank that is done is seen with its last step."""
        words = self.words
        while True:
            done = words[Word.PHASE] == Phase.DONE
            step = words[Word.STEP]
            ack_seq = words[Word.ACK_SEQ]
            ack_step = words[Word.ACK_STEP]
            if words[Word.ACK_SEQ] == ack_seq:
                return RawPoint(min(step, _STEP_LIMIT), ack_seq, min(ack_step, _STEP_LIMIT), done)

    def point(self, agreement: int) -> Point:
        """Return what this rank has published about the agreement of that number (a STOP_SEQ or CHECKPOINT_SEQ)."""
        raw = self.raw_point()
        return Point(raw.step, raw.ack_step if raw.ack_seq == agreement else None, raw.done)

    def progress(self) -> Progress:
        def number(word: int) -> int:
            return min(self.words[word], _STEP_LIMIT)

        exit_word = self.words[Word.EXIT_CODE]
        return Progress(
            step=number(Word.STEP),
            samples=number(Word.SAMPLES),
            step_time_ns=number(Word.STEP_TIME),
            loss=self.floats[Word.LOSS],
            data_wait_ns=number(Word.DATA_WAIT),
            training_epoch=number(Word.TRAINING_EPOCH),
            phase=min(self.words[Word.PHASE], Phase.DONE),
            first_step_time_ns=number(Word.FIRST_STEP_TIME),
            state=min(self.words[Word.STATE], State.EXITING),
            ack_seq=self.words[Word.ACK_SEQ],
            ack_step=number(Word.ACK_STEP),
            reached_seq=number(Word.REACHED_SEQ),
            reached_step=number(Word.REACHED_STEP),
            arena_filled=number(Word.ARENA_FILLED),
            arena_size=number(Word.ARENA_SIZE),
            retune_done=number(Word.RETUNE_DONE),
            capabilities=self.words[Word.CAPABILITIES] & 0xFFFF,
            device_bytes=number(Word.DEVICE_BYTES),
            peak_device_bytes=number(Word.PEAK_DEVICE_BYTES),
            offloaded_bytes=number(Word.OFFLOADED_BYTES),
            exit_code=exit_word - 1 if 1 <= exit_word <= 256 else None,
            checkpoint_done=self.words[Word.CHECKPOINT_DONE],
            checkpoint_step=number(Word.CHECKPOINT_STEP),
            restored_step=number(Word.RESTORED_STEP),
            hello_time_ns=number(Word.HELLO_TIME),
            threads_applied=min(self.words[Word.THREADS_APPLIED], _THREADS_LIMIT),
            error=min(self.words[Word.ERROR], Error.STORAGE_FAILED),
            lock_pid=number(Word.LOCK),
        )
