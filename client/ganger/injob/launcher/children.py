"""The processes that a launcher looks after: their starts, their ends, recorded durably before they are reported, and
their leases: ranks that do not stop by themselves are frozen when their lease ends, also where their daemon is dead.
Only the daemon thaws them, once the master has answered it."""

from __future__ import annotations

import math
import os
import selectors
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Callable

from ganger.injob.launcher import child_process
from ganger.injob.launcher.orphan_reaper import ReaperNotes
from ganger.injob.launcher.process_record import (
    ExitRecord,
    Launch,
    LaunchError,
    from_code,
    from_page,
    is_recorded,
    record,
)
from ganger.injob.launcher.rank_tree import RankTree, zombie_status
from ganger.injob.page import Page, now_ns
from ganger.injob.page_access import PageError
from ganger.injob.page_layout import Capability, PageOrderKind, Word
from ganger.injob.process_identity import FREEZE_WORDS, ProcessId, family, stands_still, start_ticks
from ganger.protocol.stop_rules import NEVER, expired, must_be_frozen


class LauncherChild:
    """One process: a rank, the parent of ranks, a rendezvous store, an init or a helper. ``adopted``: another process
    is its parent; ``tree``: of the rank, if it has a parent with others."""

    def __init__(
        self,
        name: str,
        kind: str,
        pid: int,
        page: str = "",
        exit_path: str = "",
        *,
        adopted: bool = False,
        ticks: int | None = None,
        pidfd: int | None = None,
        keeper: LeaseKeeper | None = None,
        tree: RankTree | None = None,
    ) -> None:
        self.name, self.kind, self.pid = name, kind, pid
        self.page, self.exit_path = page, exit_path
        self.adopted = adopted
        self.keeper = keeper
        self.tree = tree
        self.pidfd = os.pidfd_open(pid) if pidfd is None else pidfd
        self.start_ticks = (start_ticks(pid) or 0) if ticks is None else ticks
        self.settle: Callable[[], None] | None = None  # reads whether it could begin, once; None after that
        self.launch_error: dict[str, str] = {}
        self.port = 0  # of a store
        self.ended: Callable[[Any], None] | None = None  # called with how it ended


class LauncherChildren:
    """The processes of one launcher, which its selector watches. ``forget``: called with the name of an ended rank;
    ``notes``: for the reaper that looks after ranks once this launcher is killed."""

    def __init__(
        self, selector: selectors.BaseSelector, forget: Callable[[str], None], notes: ReaperNotes | None = None
    ) -> None:
        self._notes = notes
        self._selector = selector
        self._forget = forget
        self._children: dict[int, LauncherChild] = {}
        self._unrecorded: list[tuple[str, ExitRecord]] = []

    def __iter__(self) -> Iterator[LauncherChild]:
        return iter(self._children.values())

    def __bool__(self) -> bool:
        return bool(self._children)

    @property
    def has_unrecorded(self) -> bool:
        """Whether the end of a rank is still to be recorded."""
        return bool(self._unrecorded)

    def is_running(self, name: str) -> bool:
        """Return whether there is a rank of this name."""
        return any(other.name == name and other.kind == "rank" for other in self)

    def add(self, new: LauncherChild) -> LauncherChild:
        self._children[new.pidfd] = new
        self._selector.register(new.pidfd, selectors.EVENT_READ, lambda: self._gone(new))
        return new

    def add_rank(self, launch: Launch, pid: int, tree: RankTree | None = None) -> LauncherChild:
        keeper = LeaseKeeper(launch.name, pid, launch.page, launch.freezer, launch.cgroup_procs)
        page, path = launch.page, launch.exit_path
        is_below = tree is not None
        if self._notes is not None:
            self._notes.add(ProcessId(pid, start_ticks(pid) or 0), launch.name, path)
        return self.add(LauncherChild(launch.name, "rank", pid, page, path, adopted=is_below, keeper=keeper, tree=tree))

    def add_ranks(self, root: LauncherChild, found: list[tuple[Launch, int]]) -> list[LauncherChild]:
        """Look after ranks below a parent. Raises LaunchError if one is gone with that parent."""
        tree = RankTree(root.pid, [launch.name for launch, _ in found])
        try:
            return [self.add_rank(launch, pid, tree) for launch, pid in found]
        except OSError as error:
            raise LaunchError("CHILD_DIED", f"a rank was killed as it was started: {error}") from error

    def settle_later(self, new: LauncherChild, read_end: int, settled: Callable[[], None]) -> None:
        """Call ``settled`` once a child has begun its program or written into this pipe why it could not."""

        def settle() -> None:
            if new.settle is None:
                return  # read already: its end was noticed at the same moment
            new.settle = None
            new.launch_error = child_process.error_of_child(read_end, f"{new.name} was killed as it was started") or {}
            self._selector.unregister(read_end)
            os.close(read_end)
            settled()

        new.settle = settle
        self._selector.register(read_end, selectors.EVENT_READ, settle)

    def _gone(self, one: LauncherChild) -> None:
        result = None
        if not one.adopted:
            result = os.waitid(os.P_PIDFD, one.pidfd, os.WEXITED | os.WNOHANG)
            if result is None:
                return
        if one.settle is not None:
            one.settle()  # what it wrote before it died is part of how it ended
        self._selector.unregister(one.pidfd)
        del self._children[one.pidfd]
        os.close(one.pidfd)
        if one.ended is not None:
            one.ended(result)
        if one.kind != "rank":
            return
        if one.keeper is not None:
            one.keeper.close()
        if self._notes is not None:
            self._notes.remove(one.pid)
        self._forget(one.name)
        end = _end_of(one, result)
        if end is not None:
            if one.launch_error:
                end = end._replace(source="launch", message=one.launch_error["message"])
            self.record(one.exit_path, end)
        if one.tree is not None:
            one.tree.note_end(one.name)

    def record_again(self) -> None:
        waiting, self._unrecorded = self._unrecorded, []
        for exit_path, end in waiting:
            self.record(exit_path, end, is_again=True)

    def record(self, exit_path: str, end: ExitRecord, is_again: bool = False) -> None:
        """Record the end of a process; if that fails and its directory is there, it is tried again later."""
        try:
            record(exit_path, end)
        except OSError as error:
            if not is_again:
                print(f"ganger launcher: cannot record the end of {end.name}: {error}", file=sys.stderr)
            if os.path.isdir(os.path.dirname(exit_path)):
                self._unrecorded.append((exit_path, end))


def _end_of(one: LauncherChild, result: Any) -> ExitRecord | None:
    """Return how a rank ended; None where a reaper has recorded it. ``result``: of the wait for it, as far as this
    process is its parent."""
    if result is not None:
        code = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        return from_code(one.name, one.pid, one.start_ticks, code)
    # Its parent, or the reaper that has it since then, leaves it a zombie until its end is recorded.
    status = zombie_status(one.pid, one.start_ticks)
    if status is not None:
        return from_code(one.name, one.pid, one.start_ticks, os.waitstatus_to_exitcode(status))
    if is_recorded(one.exit_path, one.pid):
        return None
    return from_page(one.name, one.pid, one.start_ticks, one.page)


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
            if not self._is_over(now_ns()) and self._word(Word.ORDER, PageOrderKind.RUN) != PageOrderKind.STOP:
                if not self._write(1):
                    _signal(self._members(), signal.SIGCONT)
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

    def _word(self, word: int, otherwise: int) -> int:
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
