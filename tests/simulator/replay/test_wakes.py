"""When a replay tells the core that time has passed: no oftener than the core asks, and nothing is other for it."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import numpy as np
import pytest
from ganger_master.core import placement_leases
from ganger_master.core.commands import Command, Tick
from ganger_master.core.state import State
from ganger_master.simulator.inputs import ReplayOptions
from ganger_master.simulator.run import _Replay
from ganger_master.simulator.time_slices import Clock
from ganger_master.simulator.traces.servers import servers_from_flags
from ganger_master.simulator.traces.workload import Workload, workload

JOBS = 80
AT = Clock.at


class _Told(_Replay):
    """Keeps what the core was told and when."""

    def __init__(self, policy: str) -> None:
        self.commands: list[tuple[float, Command]] = []
        super().__init__(crowd(), servers_from_flags(nodes=3, gpus_per_node=4), policy, ReplayOptions(), None)

    def send(self, command: Command) -> object:
        self.commands.append((self.clock.now, command))
        return super().send(command)

    @property
    def ticks(self) -> int:
        return sum(isinstance(command, Tick) for _, command in self.commands)

    @property
    def all_but_ticks(self) -> list[tuple[float, Command]]:
        return [(time, command) for time, command in self.commands if not isinstance(command, Tick)]


def crowd() -> Workload:
    """Now more work than the cluster can do, now less."""
    draw = np.random.default_rng(5)
    return workload(
        [str(job) for job in range(JOBS)],
        np.sort(draw.uniform(0.0, 40_000.0, JOBS)),
        draw.choice([1, 1, 2, 4, 8], JOBS),
        np.exp(draw.normal(7.0, 1.3, JOBS)),
    )


def at_whatever_became_of_it(
    clock: Clock, time: float, act: Callable[[], None], is_void: Callable[[], bool] | None = None
) -> None:
    """The core is told at every time that it ever asked for."""
    AT(clock, time, act, None if act.__name__ == "_tick" else is_void)


@pytest.mark.parametrize("policy", ["fifo", "fifo-backfill"])
def test_a_used_lease_causes_no_wake_up(policy: str) -> None:
    some = _Told(policy)
    some.run()
    with patch.object(Clock, "at", at_whatever_became_of_it):
        every = _Told(policy)
        every.run()
    assert some.all_but_ticks == every.all_but_ticks
    assert some.ticks < 0.2 * every.ticks
    assert some.events < every.events, "not even the time comes of what is not to happen"


def looked_for_in_the_whole_window(state: State, now: float) -> float | None:
    """The naive twin of `queue.next_time`."""
    passed = [
        placement_leases._next_lease_at(state, number)
        for number in placement_leases._window(state)
        if number in state.queue.passed
    ]
    leases = [turn.expires + placement_leases._JUST_AFTER for turn in state.leases.values()]
    return min([*leases, *[time for time in passed if time > now]], default=None)


@pytest.mark.parametrize("policy", ["fifo", "fifo-backfill"])
def test_the_next_time_is_that_of_the_whole_window(policy: str) -> None:
    found = []
    of_the_queue = placement_leases.next_time

    def twice(state: State, now: float) -> float | None:
        found.append((of_the_queue(state, now), looked_for_in_the_whole_window(state, now)))
        return found[-1][0]

    with patch.object(placement_leases, "next_time", twice):
        _Told(policy).run()
    assert all(one == other for one, other in found)
    assert len({one for one, _ in found}) > JOBS
