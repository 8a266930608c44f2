"""Co-located gangs: which gang waits for which, and the reported use of each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from ganger.v1 import resources_pb2
from ganger_daemon.gang import step_rate
from ganger_daemon.gang.step_rate import UtilizationMeter
from ganger_daemon.node.node_context import NodeContext
from ganger_daemon.node.slice_rotation import collide


@pytest.mark.parametrize(
    ("one", "other", "waits"),
    [
        ((0b0011, 0), (0b1100, 0), False),
        ((0b0011, 0), (0b0010, 0), True),
        ((0b0011, 0b0011), (0b0011, 0b0011), False),
        # Only one of them knows of it: the other one is still to be parked, or to be told.
        ((0b0011, 0b0011), (0b0011, 0), True),
        ((0b0011, 0), (0b0011, 0b0011), True),
        ((0b0011, 0b0001), (0b0011, 0b0011), True),
        ((0b0011, 0b0001), (0b0001, 0b0001), False),
    ],
)
def test_a_gang_waits_for_devices_that_it_and_another_do_not_both_share(
    one: tuple[int, int], other: tuple[int, int], waits: bool
) -> None:
    claims = [resources_pb2.Claim(device_mask=mask, shared_mask=shared) for mask, shared in (one, other)]
    gangs: list[Any] = [SimpleNamespace(master_desired=SimpleNamespace(claim=claim)) for claim in claims]
    assert collide(*gangs) is waits
    assert collide(*reversed(gangs)) is waits


class Node:
    """What is asked of a host."""

    def __init__(self, cores: float, use: float | None = None) -> None:
        self.device_cores = cores
        self.used = 0.0
        self.cgroups = SimpleNamespace(cpu_s=lambda group: self.used, pids=lambda group: (7,))
        self.devices = SimpleNamespace(use_by=lambda pids, mask: use)


def test_of_bound_devices_a_gang_uses_its_share_of_their_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=10.0)
    monkeypatch.setattr(step_rate.time, "monotonic", lambda: clock.now)
    node = Node(cores=0.5)
    gang = UtilizationMeter(cast(NodeContext, node), "group", 0b11)
    assert gang.measure(0.9) is None
    clock.now, node.used = 12.0, 1.0
    assert gang.measure(0.9) == 0.5
    clock.now, node.used = 13.0, 9.0
    assert gang.measure(0.9) == 1.0
    assert gang.measure(0.9) is None, "no time has passed"


@pytest.mark.parametrize(("use", "found"), [(0.25, 0.25), (0.0, 0.0), (None, 0.6)])
def test_utilization_is_the_drivers_figure_or_else_the_time_not_waiting_for_data(
    use: float | None, found: float
) -> None:
    assert UtilizationMeter(cast(NodeContext, Node(0.0, use)), "group", 0b1).measure(0.4) == found


def test_a_gang_without_devices_uses_none() -> None:
    assert UtilizationMeter(cast(NodeContext, Node(0.5)), "group", 0).measure(0.0) is None
