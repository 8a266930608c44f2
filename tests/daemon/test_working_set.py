"""A gang's measured memory: the working set, its peak as it is reported, and files that are read again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
from ganger_daemon.cgroups.controllers import MemoryUse
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
    found = WorkingSet(cast(NodeContext, host), "gang")
    for one in samples:
        found.measure(0.0 if one is None else one[0])
    assert (found.bytes_now, found.peak_bytes, found.refault_bytes_per_s) == (now, peak, refaults_per_s)
