"""No job waits for ever: a gang of the whole cluster starts soon after a week though jobs of one GPU keep coming."""

from __future__ import annotations

import numpy as np
import pytest
from ganger_master.policies.orders import WEEK_S
from ganger_master.simulator.inputs import ReplayOptions
from ganger_master.simulator.run import simulate
from ganger_master.simulator.traces.servers import servers_from_flags
from ganger_master.simulator.traces.workload import Workload, workload

DAY_S, EVERY_S = 86_400.0, 3_600.0
SERVERS = servers_from_flags(nodes=2, gpus_per_node=4)


def stream(days: int) -> Workload:
    """Small jobs that offer 0.83 of the cluster from the first to the last hour, and one large gang."""
    dice = np.random.default_rng(3)
    count = int(days * DAY_S / EVERY_S)
    names = ["large", *[f"small-{number}" for number in range(count)]]
    return workload(
        names,
        [DAY_S, *(EVERY_S * np.arange(count))],
        [8, *[1] * count],
        [3_600.0, *dice.exponential(0.83 * SERVERS.gpus * EVERY_S, count)],
    )


@pytest.mark.parametrize(
    "policy",
    ["fifo-backfill", "tetris", "tetris-cos", "tetris-oracle", "las"]
    + [f"fifo-backfill+{part}" for part in ("best-fit", "elastic", "defrag")]
    + [pytest.param(policy, marks=pytest.mark.chaos) for policy in ("optimus", "fifo-backfill+proportional")],
)
def test_a_gang_of_the_whole_cluster_starts_though_small_jobs_keep_coming(policy: str) -> None:
    jobs = stream(10)
    large = simulate(jobs, SERVERS, policy, ReplayOptions()).outcomes.take(np.array([jobs.job_ids.index("large")]))
    # Those that run by then end first.
    assert large.start_delay_s[0] < WEEK_S + DAY_S


@pytest.mark.parametrize("policy", ["fifo-backfill", "tetris", "tetris-cos"])
def test_without_this_rule_the_gang_waits_until_no_more_jobs_come(policy: str) -> None:
    """So the test above can fail."""
    jobs = stream(12)
    run = simulate(jobs, SERVERS, policy, ReplayOptions(ideal=True))
    assert run.outcomes.start_delay_s[jobs.job_ids.index("large")] > 10 * DAY_S


def test_jobs_preempted_for_a_gang_do_not_start_in_its_place() -> None:
    """Under Optimus the smallest is placed first: stopped ones came back every five minutes, and the gang never."""
    small, every_s = 60, 1_800.0
    jobs = workload(
        ["large", *[f"small-{number}" for number in range(small)]],
        [7_200.0, *(every_s * np.arange(small))],
        [4, *[1] * small],
        [3_600.0, *[3.0 * every_s] * small],
    )
    found = simulate(jobs, SERVERS, "optimus", ReplayOptions()).outcomes
    assert found.start_delay_s[jobs.job_ids.index("large")] < 3_600.0
    assert found.preemptions.sum() <= 2


@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize("policy", [pytest.param("ftf", marks=pytest.mark.chaos), "tiresias-gittins", "ganger"])
def test_a_job_that_waits_too_long_has_a_kept_place_beside_preempted_jobs(policy: str, seed: int) -> None:
    """In one pass: holdings have been released and claimed again when the places are computed."""
    dice = np.random.default_rng(seed)
    arrivals = np.sort(dice.integers(0, 2_000_000, 24))
    gpus = dice.choice([1, 1, 2, 3, 4, 8, 12], 24)
    jobs = workload([str(number) for number in range(24)], arrivals, gpus, dice.choice([3e4, 3e5, 9e5], 24))
    # Plans an hour apart: nothing comes to pass in most of those between.
    run = simulate(jobs, servers_from_flags(nodes=3, gpus_per_node=4), policy, ReplayOptions(plan_every_s=3_600.0))
    assert run.outcomes.finished.all()
    assert run.outcomes.preemptions.any()
