"""A state that records no orders or history decides the same."""

from __future__ import annotations

import pytest
from ganger_master.core.commands import Command
from ganger_master.simulator.inputs import ReplayOptions
from ganger_master.simulator.run import _Replay
from ganger_master.simulator.traces.servers import servers_from_flags
from simulator.replay.test_vain_plans import crowd


class _Heard(_Replay):
    def __init__(self, policy: str, tells: bool) -> None:
        self.said: list[tuple[float, Command]] = []
        super().__init__(crowd(), servers_from_flags(nodes=3, gpus_per_node=4), policy, ReplayOptions(), None)
        self.state.unstored.is_kept = tells

    def send(self, command: Command) -> object:
        self.said.append((self.clock.now, command))
        return super().send(command)


@pytest.mark.parametrize("policy", ["fifo", "fifo-backfill", "ganger", "las+defrag", "gandiva", "optimus"])
def test_decisions_do_not_depend_on_whether_orders_and_history_are_recorded(policy: str) -> None:
    untold, told = _Heard(policy, tells=False), _Heard(policy, tells=True)
    untold.run()
    told.run()
    assert untold.said == told.said
    assert not untold.state.take_changes().puts
    assert untold.state.counters.next_event == 1, "it records no history"
    assert told.state.take_changes().puts
    assert told.state.counters.next_event > len(told.jobs)
    assert told.state.desired
