"""The launcher keeps the leases of its ranks: those that do not stop by themselves are frozen when their lease ends,
also where their daemon is dead or hangs.

Only the daemon thaws them: it extends the lease once the master has answered it, and thaws then.
"""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Iterable, Sequence

from ganger.injob.page import Page, now_ns
from ganger.injob.page_access import PageError
from ganger.injob.page_layout import Capability, PageOrderKind, Word
from ganger.injob.process_identity import family, stands_still
from ganger.protocol.stop_rules import NEVER, expired, must_be_frozen

# Files of the kernel that freeze a control group, by name: what is written to freeze it, and to thaw it.
FREEZE_WORDS = {"cgroup.freeze": ("1", "0"), "freezer.state": ("FROZEN", "THAWED")}
# Between two looks at a group that does not stand still yet.
_AGAIN_S = 0.05
_SWEEPS = 8


class LeaseKeeper:
    """Keeps the lease of one rank. ``freezer``: the file that freezes its control group, "" where there is none;
    ``procs``: the ``cgroup.procs`` files of its group."""

    def __init__(self, name: str, pid: int, page_path: str, freezer: str = "", procs: Sequence[str] = ()) -> None:
        self._name = name
        self._pid = pid
        self._freezer = freezer if os.path.basename(freezer) in FREEZE_WORDS else ""
        self._procs = procs
        self._until = NEVER
        self._kept = NEVER  # the lease for which the group stands still already
        self._page: Page | None = None
        try:
            # never mapped, and held open: a job that removes its page goes on under the lease that it had
            self._page = Page.open(page_path, writable=False, mapped=False) if page_path else None
        except (OSError, PageError) as error:
            print(f"ganger launcher: the lease of {name} is not kept: {error}", file=sys.stderr)

    def close(self) -> None:
        if self._page is not None:
            self._page.close()
            self._page = None

    def look(self) -> float:
        """Freeze the group if that is due. Return after how many seconds the next look is due, infinite if none."""
        if self._page is None:
            return math.inf
        now = now_ns()
        if not self._is_over(now):
            return math.inf if self._until == NEVER else (self._until - now) / 1e9
        if self._kept == self._until or not self._is_due():
            return math.inf
        if not self._is_frozen():
            print(f"ganger launcher: {self._name} is frozen: its lease has ended", file=sys.stderr)
            self._freeze()
            # If the daemon extended the lease meanwhile, it may not have seen that the group is frozen. An order to
            # stop, which it writes before, it carries out itself.
            if not self._is_over(now_ns()) and self._order() != PageOrderKind.STOP:
                self._thaw()
                return 0.0
            if not self._is_frozen():
                return _AGAIN_S
        self._kept = self._until
        return math.inf

    def _is_over(self, now: int) -> bool:
        self._until = self._word(Word.LEASE_UNTIL, self._until)
        return expired(self._until, now)

    def _is_due(self) -> bool:
        is_opaque = self._word(Word.CAPABILITIES, 0) & Capability.OPAQUE or self._word(Word.OPAQUE, 0)
        return must_be_frozen(self._word(Word.HELLO_TIME, 0) != 0, bool(is_opaque))

    def _order(self) -> int:
        return self._word(Word.ORDER, PageOrderKind.RUN)

    def _word(self, word: int, otherwise: int) -> int:
        """Return a word of the page, or ``otherwise`` if its job has truncated the page."""
        assert self._page is not None, "looked at only while it is open"
        try:
            return self._page.get(word)
        except (OSError, PageError):
            return otherwise

    def _is_frozen(self) -> bool:
        if self._freezer:
            try:
                with open(self._freezer) as file:
                    return file.read().strip() == self._words[0]
            except OSError:
                pass
        return all(map(stands_still, self._members()))

    def _freeze(self) -> None:
        if self._write(0):
            return
        found: set[int] = set()
        # A stopped process does not fork: once a look finds no other, all have the signal.
        for _ in range(_SWEEPS):
            new = self._members() - found
            if not new:
                return
            found |= new
            _signal(new, signal.SIGSTOP)

    def _thaw(self) -> None:
        if not self._write(1):
            _signal(self._members(), signal.SIGCONT)

    @property
    def _words(self) -> tuple[str, str]:
        return FREEZE_WORDS[os.path.basename(self._freezer)]

    def _write(self, which: int) -> bool:
        if not self._freezer:
            return False
        try:
            with open(self._freezer, "w") as file:
                file.write(self._words[which])
        except OSError as error:
            print(f"ganger launcher: {self._freezer} cannot be written: {error}; signals now", file=sys.stderr)
            return False
        return True

    def _members(self) -> set[int]:
        found = family(self._pid)
        for path in self._procs:
            try:
                with open(path) as file:
                    found.update(int(line) for line in file.read().split())
            except (OSError, ValueError):
                continue
        return found - {0, os.getpid()}


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except OSError:
            continue
