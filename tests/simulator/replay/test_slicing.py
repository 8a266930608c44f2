"""The policy gandiva in a replay: more gangs than GPUs take turns, fairly, and no job waits longer than a quantum."""

from __future__ import annotations

import numpy as np
import pytest
from ganger_master.core.commands import ProposePlan
from ganger_master.simulator.inputs import ReplayOptions, SwitchCosts
from ganger_master.simulator.run import _Replay, simulate
from ganger_master.simulator.traces.servers import Servers, servers_from_flags
from ganger_master.simulator.traces.workload import Workload, workload

QUANTUM_S = 60.0
COSTS = SwitchCosts(start_s=5.0)


def cluster(nodes: int = 1) -> Servers:
    return servers_from_flags(nodes=nodes, gpus_per_node=4)


def jobs(*each: tuple[float, int, float]) -> Workload:
    arrivals, gpus, durations = zip(*each, strict=True)
    return workload(
        [str(at) for at in range(len(each))],
        arrivals,
        gpus,
        durations,
        # No two of these gain anything on one device.
        labels={"model": ["resnext50"] * len(each)},
    )


@pytest.mark.parametrize("options", [ReplayOptions(costs=COSTS), ReplayOptions(ideal=True)])
def test_six_equal_jobs_on_four_gpus_get_two_thirds_each(options: ReplayOptions) -> None:
    found = simulate(jobs(*[(0.0, 1, 3600.0)] * 6), cluster(), "gandiva", options).outcomes
    shares = 3600.0 / found.jct_s
    assert shares == pytest.approx(np.full(6, 4 / 6), rel=0.03)
    jain = shares.sum() ** 2 / (6 * (shares**2).sum())
    assert jain > 0.999
    # A switch costs a second of sixty for the two that change places, and they pay a move at times.
    assert found.overhead_s.sum() / found.service_s.sum() < 0.02


@pytest.mark.parametrize("options", [ReplayOptions(ideal=True), ReplayOptions(rates="profiles")])
def test_parked_jobs_fit_where_the_size_of_memory_is_not_modelled(options: ReplayOptions) -> None:
    found = simulate(jobs(*[(0.0, 1, 3600.0)] * 6), cluster(), "gandiva", options).outcomes
    assert found.preemptions.min() > 10
    assert found.start_delay_s.max() <= QUANTUM_S + options.costs.start_s + COSTS.offload_s + COSTS.restore_s


def test_a_gang_that_wants_everything_gets_its_turn_in_an_ideal_replay() -> None:
    rows = jobs((0.0, 1, 4000.0), (0.0, 1, 4000.0), (100.0, 8, 900.0))
    found = simulate(rows, cluster(2), "gandiva", ReplayOptions(ideal=True)).outcomes
    assert found.start_delay_s[2] <= QUANTUM_S
    assert found.overhead_s.sum() == 0.0


def test_a_newcomer_gets_its_first_batches_within_a_quantum() -> None:
    many = [(0.0, 1, 20_000.0)] * 4 + [(1000.0 + 130.0 * at, 1, 600.0) for at in range(4)]
    found = simulate(jobs(*many), cluster(), "gandiva", ReplayOptions(costs=COSTS)).outcomes
    first_come = simulate(jobs(*many), cluster(), "fifo", ReplayOptions(costs=COSTS)).outcomes
    switch = COSTS.offload_s + COSTS.restore_s
    assert found.start_delay_s[4:].max() <= QUANTUM_S + switch
    assert first_come.start_delay_s[4:].min() > 10_000.0


def test_a_gang_that_wants_everything_gets_its_turn_and_is_whole() -> None:
    found = simulate(jobs((0.0, 1, 4000.0), (0.0, 1, 4000.0), (100.0, 8, 900.0)), cluster(2), "gandiva").outcomes
    assert found.finished.all()
    assert found.start_delay_s[2] < 2 * QUANTUM_S
    assert found.jct_s[2] < 4000.0


def test_a_quantum_is_as_long_as_fifty_switches_take_and_as_a_round_if_there_are_rounds() -> None:
    slow = ReplayOptions(costs=SwitchCosts(offload_s=2.0, restore_s=3.0))
    replay = _Replay(jobs((0.0, 1, 60.0)), cluster(), "gandiva", slow, None)
    assert replay.planning.quantum_s == 250.0
    rounds = ReplayOptions(round_s=300.0)
    found = simulate(jobs(*[(0.0, 1, 3000.0)] * 6), cluster(), "gandiva", rounds).outcomes
    assert set(found.first_start_s % 300.0) <= {0.0, COSTS.offload_s}


def test_no_job_is_preempted_for_a_lower_priority() -> None:
    rows = jobs((0.0, 4, 2000.0), (10.0, 4, 500.0)).with_columns(priority=[1, 0])
    found = simulate(rows, cluster(), "gandiva").outcomes
    assert found.preemptions[0] == 0
    assert found.first_start_s[1] > 2000.0


def test_no_quantum_is_planned_while_all_jobs_have_room() -> None:
    replay = _Counted(jobs((0.0, 2, 5000.0), (5.0, 2, 5000.0)), cluster(), "gandiva", ReplayOptions(), None)
    replay.run()
    assert replay.plans == 2


class _Counted(_Replay):
    plans = 0

    def send(self, command: object) -> object:  # type: ignore[override]
        self.plans += isinstance(command, ProposePlan)
        return super().send(command)  # type: ignore[arg-type]


class _Watched(_Replay):
    """Compares what modelled nodes know with what the core wants of them."""

    matrices = 0

    def _settle(self) -> None:
        super()._settle()
        for number, group in self.state.gangs.sets.items():
            if group.coming is not None and number in self.nodes._groups:
                self.matrices += 1
                assert group.coming.version in self.nodes._groups[number].matrices, f"at {self.clock.now}"


@pytest.mark.parametrize("seed", range(2))
def test_modelled_nodes_know_each_new_matrix_at_once(seed: int) -> None:
    draw = np.random.default_rng(seed)
    crowd = workload(
        [str(job) for job in range(60)],
        np.sort(draw.uniform(0.0, 600.0, 60)),
        draw.choice([1, 1, 2, 4], 60),
        np.exp(draw.normal(3.5, 1.0, 60)),
    )
    options = ReplayOptions(quantum_s=20.0, plan_every_s=5.0)
    replay = _Watched(crowd, cluster(2), "gandiva", options, None)
    replay.run()
    assert replay.matrices > 10
