"""A gang's measured memory: the working set, its peak as it is reported, and files that are read again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest
from ganger.injob.state_image import allocated_arena_bytes, make_arena
from ganger_daemon.cgroups.controllers import MemoryUse
from ganger_daemon.gang.exit_watcher import ExitWatcher
from ganger_daemon.gang.gang_context import GangContext
from ganger_daemon.gang.gang_launcher import GangLauncher
from ganger_daemon.gang.gang_memory import WorkingSet, rounded_up
from ganger_daemon.node.node_context import NodeContext

MIB = 1 << 20


@pytest.mark.parametrize(
    ("size", "reported"),
    [(0, 0), (1, 64), (64, 64), (65, 128), (1000, 1024), (1024, 1024), (1025, 1152), (40 << 10, 40 << 10)],
)
def test_a_peak_is_reported_in_steps_of_an_eighth(size: int, reported: int) -> None:
    assert rounded_up(size * MIB) == reported * MIB


@pytest.mark.parametrize(
    ("samples", "now", "peak", "refaults_per_s"),
    [
        # (seconds, working set, bytes read again so far)
        ([], 0, 0, None),
        ([None], 0, 0, None),
        ([(1.0, 5, None), (2.0, 3, None)], 3, 5, None),
        ([(1.0, 5, 100)], 5, 5, None),
        ([(1.0, 5, 100), (3.0, 7, 160)], 7, 7, 30.0),
        ([(1.0, 5, 100), (3.0, 7, 160), (4.0, 2, 160)], 2, 7, 0.0),
        # A group made anew counts from zero.
        ([(1.0, 5, 100), (3.0, 1, 10)], 1, 5, 0.0),
        ([(1.0, 5, None), (3.0, 1, 10)], 1, 5, None),
    ],
)
def test_the_working_set_its_peak_and_the_rate_of_files_read_again(
    samples: list[tuple[float, int, int | None] | None], now: int, peak: int, refaults_per_s: float | None
) -> None:
    uses = iter([None if one is None else MemoryUse(*one[1:]) for one in samples])
    host = SimpleNamespace(cgroups=SimpleNamespace(memory_use=lambda group: next(uses)))
    found = WorkingSet(cast(NodeContext, host), "gang", lambda: 0)
    for one in samples:
        found.measure(0.0 if one is None else one[0])
    assert (found.bytes_now, found.peak_bytes, found.refault_bytes_per_s) == (now, peak, refaults_per_s)


@pytest.fixture
def arena() -> Iterator[int]:
    descriptor = make_arena(None, "gang-7/0", 64 * MIB)
    yield descriptor
    os.close(descriptor)


def test_what_is_allocated_of_an_arena_counts_once_and_not_its_size(arena: int) -> None:
    pids = (os.getpid(), os.getpid())
    before = allocated_arena_bytes(pids)
    os.posix_fallocate(arena, 0, 24 * MIB)
    assert allocated_arena_bytes(pids) - before == 24 * MIB
    assert allocated_arena_bytes([]) == 0


@pytest.mark.parametrize(
    ("claimed", "peak", "used"),
    [
        (40, 0, 0),  # the whole arena is claimed beside the working set
        (16, 0, 8),  # what an arena has beyond its claim is the job's own
        (0, 10, 13),  # the master claims a tenth more than the peak, once it is reported
        (0, 0, 24),
    ],
)
def test_a_working_set_has_no_arena_that_is_claimed_beside_it(arena: int, claimed: int, peak: int, used: int) -> None:
    os.posix_fallocate(arena, 0, 24 * MIB)
    page = SimpleNamespace(peak_device_bytes=peak * MIB)
    part = SimpleNamespace(ranks=(0,))
    pages = SimpleNamespace(readable=True, progress=lambda rank: page)
    cgroups = SimpleNamespace(memory_use=lambda group: MemoryUse(24 * MIB, None))
    host, paths = SimpleNamespace(cgroups=cgroups), SimpleNamespace(group="gang")
    context = cast(GangContext, SimpleNamespace(host=host, paths=paths, part=part, pages=pages))
    exits = cast(ExitWatcher, SimpleNamespace(live=lambda: (SimpleNamespace(pid=os.getpid()),)))
    launcher = GangLauncher(context, exits)
    found = WorkingSet(cast(NodeContext, host), "gang", lambda: launcher.used_arena_bytes(claimed * MIB))
    found.measure(1.0)
    assert (found.bytes_now, found.peak_bytes) == (used * MIB, used * MIB)
