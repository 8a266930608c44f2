"""Tetris, replayed: jobs with little work left start before earlier ones, unless only the angle counts."""

from __future__ import annotations

import pytest
from ganger_master.simulator.inputs import ReplayOptions
from ganger_master.simulator.run import simulate
from ganger_master.simulator.traces.servers import servers_from_flags
from ganger_master.simulator.traces.workload import workload


@pytest.mark.parametrize(("policy", "first_of_the_queue"), [("tetris-oracle", "short"), ("tetris-cos", "long")])
def test_work_left_decides_between_gangs_alike_only_with_the_srtf_term(policy: str, first_of_the_queue: str) -> None:
    jobs = workload(["running", "long", "short"], [0, 10, 20], [4, 4, 4], [1000, 5000, 50])
    run = simulate(jobs, servers_from_flags(nodes=1, gpus_per_node=4), policy, ReplayOptions())
    starts = dict(zip(run.outcomes.job_ids, run.outcomes.first_start_s.tolist(), strict=True))
    assert starts["running"] == 0
    assert min(("long", "short"), key=starts.__getitem__) == first_of_the_queue
    assert not run.outcomes.preemptions.any()
