"""Times of slice orders and page states in a benchmark's cluster, and the parts of its switches."""

from __future__ import annotations

import datetime
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from ganger.injob.page import Page, now_ns
from ganger.injob.page_access import PageError
from ganger.injob.page_layout import PageOrderKind, PageState, Word
from ganger.program_setup import read_line
from ganger_daemon.node.process_identity import anonymous_bytes

from benchmarks.bench_cluster import BenchCluster

# Between two looks.
POLL_S = 0.0005

_Self = TypeVar("_Self", bound="Watch")


class Watch(ABC):
    """Looks from `with` to its end."""

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self.look, name="pages", daemon=True)

    def __enter__(self: _Self) -> _Self:
        self._thread.start()
        return self

    def __exit__(self, *reason: object) -> None:
        self._is_over.set()
        self._thread.join()

    def goes_on(self) -> bool:
        """After a moment, whether to look once more."""
        return not self._is_over.wait(POLL_S)

    @abstractmethod
    def look(self) -> None:
        """In the thread, until it does not go on."""


# Each from the last of the one to the other: within a page, or from whatever page of its device.
_PARTS = (
    ("wait_for_k", "ordered", "stopped", True),
    ("offload", "stopped", "offloaded", True),
    ("release_seen", "offloaded", "told", False),
    ("restore", "told", "runs", True),
    ("first_step", "runs", "stepped", True),
)


class PageChange(NamedTuple):
    """`moment`: ns of the clock of pages; `device`: of the page, as a number of its own."""

    moment: int
    page: int
    device: int
    what: str


def parts(seen: Iterable[PageChange], switched: Sequence[int]) -> dict[str, list[float]]:
    """In seconds, one after the other: the leader's order to the order on a page that is to stop (`switched`: moments
    of the former), that to its rank at K, K to the state off the device, that to the order of the next one (the release
    is seen), that order to its state on the device, and that to its first step's end."""
    found: dict[str, list[float]] = {}
    at: dict[tuple[str, int], int] = {}
    for moment, page, device, what in sorted(seen):
        if what == "ordered":
            former = max((one for one in switched if one <= moment), default=0)
            if former:
                found.setdefault("order", []).append((moment - former) / 1e9)
        for name, begin, end, is_own in _PARTS:
            key = (begin, page if is_own else -1 - device)
            if what == end and key in at:
                found.setdefault(name, []).append((moment - at.pop(key)) / 1e9)
        at[(what, page)] = at[(what, -1 - device)] = moment
    return found


def switched(cluster: BenchCluster) -> list[int]:
    """When the leaders of its node sets ordered another row, to the millisecond of their logs."""
    ahead = time.time_ns() - now_ns()
    return sorted(switch.moment - ahead for switch in switches_of(cluster))


def slowest_switch(cluster: BenchCluster) -> float:
    """Seconds that a leader took a switch to cost when it ordered the last one; zero before any was measured."""
    return max(switches_of(cluster), default=SwitchTiming(0, 0.0)).seconds


class SwitchTiming(NamedTuple):
    """`moment`: ns since 1970."""

    moment: int
    seconds: float


def switches_of(cluster: BenchCluster) -> list[SwitchTiming]:
    """Return the slice switches that the logs of its daemons report, which they do with --verbose."""
    lines = [line for path in cluster.logs() for line in path.read_text(errors="replace").splitlines()]
    return [switch for line in lines if (switch := switch_of(line)) is not None]


def switch_of(line: str) -> SwitchTiming | None:
    """What a line of a daemon's log tells of a switch; None if it is about something else."""
    if "row switched" not in line:
        return None
    fields = read_line(line)
    try:
        milliseconds = int(datetime.datetime.fromisoformat(str(fields["time"])).timestamp() * 1000)
        return SwitchTiming(milliseconds * 1_000_000, float(fields.get("switch_seconds", 0.0)))
    except (ValueError, KeyError, TypeError):
        return None


class PageWatch(Watch):
    """When orders and states of pages changed, by polling; what was reported and seen freed at the last offload."""

    def __init__(self, cluster: BenchCluster) -> None:
        super().__init__()
        self.freed_bytes = 0
        self.seen_freed = 0
        self._cluster = cluster
        # (ns, page, what)
        self._seen: list[tuple[int, int, str]] = []
        self._epochs: list[int] = []
        self._switched: list[int] = []

    def __exit__(self, *reason: object) -> None:
        super().__exit__(*reason)
        self._switched = switched(self._cluster)

    def parts(self, device_of: Mapping[int, int]) -> dict[str, list[float]]:
        """As `parts` has them. `device_of`: by epoch, without jobs that have a device alone."""
        seen = [
            PageChange(moment, page, device_of[self._epochs[page]], what)
            for moment, page, what in self._seen
            if self._epochs[page] in device_of
        ]
        return parts(seen, self._switched)

    def look(self) -> None:
        pages = []
        for path in self._cluster.pages().values():
            try:
                pages.append(Page.open(str(path), writable=False))
            except (OSError, PageError):
                continue
        self._epochs.extend(page.identity().epoch for page in pages)
        before = [(page.get(Word.ORDER), page.get(Word.STATE), page.get(Word.FIRST_STEP_TIME)) for page in pages]
        memory = [0] * len(pages)
        while self.goes_on():
            for index, page in enumerate(pages):
                order, state = page.get(Word.ORDER), page.get(Word.STATE)
                first = page.get(Word.FIRST_STEP_TIME)
                was_order, was_state, was_first = before[index]
                moment = now_ns()
                if order != was_order:
                    self._note(moment, index, "ordered" if order == PageOrderKind.STOP else "told")
                    if order == PageOrderKind.STOP:
                        memory[index] = anonymous_bytes(page.identity().pid) or 0
                if state != was_state:
                    if state == PageState.SAVING:
                        self._note(moment, index, "stopped")
                    elif state == PageState.OFFLOADED:
                        self._note(moment, index, "offloaded")
                        self.freed_bytes = page.get(Word.OFFLOADED_BYTES)
                        left = anonymous_bytes(page.identity().pid) or 0
                        self.seen_freed = max(self.seen_freed, memory[index] - left)
                    elif state == PageState.RUNNING:
                        self._note(moment, index, "runs")
                if first and first != was_first:
                    self._note(moment, index, "stepped")
                before[index] = (order, state, first)
        for page in pages:
            page.close()

    def _note(self, moment: int, page: int, what: str) -> None:
        self._seen.append((moment, page, what))
