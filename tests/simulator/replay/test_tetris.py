"""Tetris, replayed: jobs with little work left start before earlier ones, unless only the angle counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from ganger_master.core.commands import Command
from ganger_master.simulator import run as replay
from ganger_master.simulator.inputs import ReplayOptions
from ganger_master.simulator.run import simulate
from ganger_master.simulator.traces.servers import Servers, servers_from_flags
from ganger_master.simulator.traces.workload import Workload, workload
from msgspec import structs


@pytest.mark.parametrize(("policy", "first_of_the_queue"), [("tetris-oracle", "short"), ("tetris-cos", "long")])
def test_work_left_decides_between_gangs_alike_only_with_the_srtf_term(policy: str, first_of_the_queue: str) -> None:
    jobs = workload(["running", "long", "short"], [0, 10, 20], [4, 4, 4], [1000, 5000, 50])
    run = simulate(jobs, servers_from_flags(nodes=1, gpus_per_node=4), policy, ReplayOptions())
    starts = dict(zip(run.outcomes.job_ids, run.outcomes.first_start_s.tolist(), strict=True))
    assert starts["running"] == 0
    assert min(("long", "short"), key=starts.__getitem__) == first_of_the_queue
    assert not run.outcomes.preemptions.any()


DECLARED = {"disk_mb_per_s": 1_500.0, "net_mb_per_s": 1_500.0}


def readers_and_senders(count: int = 120, seed: int = 0) -> Workload:
    """Half of the jobs read much, the others send much, on clusters where their GPUs alone would fit."""
    random = np.random.default_rng(seed)
    gpus, reads = random.choice([1, 1, 2, 4], count), random.random(count) < 0.5
    much, little = (
        np.minimum(1_400, gpus * random.uniform(*bounds, count)).round() for bounds in ((200, 500), (0, 60))
    )
    return workload(
        [str(number) for number in range(count)],
        np.cumsum(random.exponential(45.0, count)),
        gpus,
        random.uniform(100, 4_000, count),
        numbers={"disk_mb_per_s": np.where(reads, much, little), "net_mb_per_s": np.where(reads, little, much)},
    )


class _Watched(replay._Replay):
    """Notes the most bandwidth that gangs hold together on a node."""

    most = np.zeros(2)

    def send(self, command: Command) -> object:
        answer = super().send(command)
        for node in self.state.nodes:
            held = [claim.bandwidth for claim in self.state.gangs.held_on(node) if claim.bandwidth]
            type(self).most = np.maximum(self.most, np.sum(held, axis=0) if held else 0)
        return answer


def test_jobs_never_hold_more_bandwidth_than_nodes_declare_and_tetris_packs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    base = servers_from_flags(nodes=4, gpus_per_node=8)
    groups = [
        replace(one, configuration_set=structs.replace(one.configuration_set, dimensions=DECLARED))
        for one in base.groups
    ]
    servers, jobs, jct_s = Servers(tuple(groups)), readers_and_senders(), {}
    monkeypatch.setattr(replay, "_Replay", _Watched)
    for policy in ("fifo", "tetris-oracle"):
        run = simulate(jobs, servers, policy, ReplayOptions())
        assert np.isfinite(run.outcomes.end_s).all()
        jct_s[policy] = float(run.outcomes.jct_s.mean())
    assert (_Watched.most <= 1_500).all()
    assert (_Watched.most > 1_300).all(), "bandwidth is what they wait for"
    # Seen: 0.48.
    assert jct_s["tetris-oracle"] < 0.6 * jct_s["fifo"]
