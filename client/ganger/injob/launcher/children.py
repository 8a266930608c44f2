"""The processes that a launcher looks after: how their starts went, and their ends.

Every end of a rank is recorded durably before it is reported.
"""

from __future__ import annotations

import os
import selectors
import sys
from collections.abc import Iterator
from typing import Any, Callable

from ganger.injob.launcher import child_process
from ganger.injob.launcher.lease_keeper import LeaseKeeper
from ganger.injob.launcher.process_record import (
    ExitRecord,
    Launch,
    LaunchError,
    from_page,
    from_status,
    from_wait,
    record,
)
from ganger.injob.launcher.rank_tree import RankTree, zombie_status
from ganger.injob.process_identity import start_ticks


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
    """The processes of one launcher, which its selector watches. ``ended``: called with the end of a rank once it is
    recorded, or could not be for now; ``forget``: called with the name of a rank that has ended."""

    def __init__(
        self, selector: selectors.BaseSelector, ended: Callable[[ExitRecord], None], forget: Callable[[str], None]
    ) -> None:
        self._selector = selector
        self._report = ended
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
        return self.add(LauncherChild(launch.name, "rank", pid, page, path, adopted=is_below, keeper=keeper, tree=tree))

    def add_ranks(self, root: LauncherChild, found: list[tuple[Launch, int]]) -> list[LauncherChild]:
        """Look after ranks below a parent. Raises LaunchError if one is gone with that parent, as nothing waits for
        it."""
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
        self._forget(one.name)
        status = zombie_status(one.pid) if one.tree is not None else None
        if result is not None:
            end = from_wait(one.name, one.pid, one.start_ticks, result)
        elif status is not None:
            end = from_status(one.name, one.pid, one.start_ticks, status)
        else:
            end = from_page(one.name, one.pid, one.start_ticks, one.page)
        if one.launch_error:
            end = end._replace(source="launch", message=one.launch_error["message"])
        self.note_end(one.exit_path, end)
        if one.tree is not None:
            one.tree.note_end(one.name)

    def note_end(self, exit_path: str, end: ExitRecord) -> None:
        self._record(exit_path, end)
        self._report(end)

    def record_again(self) -> None:
        waiting, self._unrecorded = self._unrecorded, []
        for exit_path, end in waiting:
            self._record(exit_path, end, is_again=True)

    def _record(self, exit_path: str, end: ExitRecord, is_again: bool = False) -> None:
        """Record the end of a process; if that fails and its directory is there, it is tried again later."""
        try:
            record(exit_path, end)
        except OSError as error:
            if not is_again:
                print(f"ganger launcher: cannot record the end of {end.name}: {error}", file=sys.stderr)
            if os.path.isdir(os.path.dirname(exit_path)):
                self._unrecorded.append((exit_path, end))
