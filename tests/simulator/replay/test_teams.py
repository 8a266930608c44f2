"""Teams in a replay: whatever the policy, GPU-seconds follow the weights while all teams request enough."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from ganger_master.core.accounting import gpu_s_since, used_until
from ganger_master.core.tenancy import Team
from ganger_master.policies import NAMES, policy_named
from ganger_master.simulator.inputs import ReplayOptions
from ganger_master.simulator.report.outcomes import Outcomes
from ganger_master.simulator.run import _Replay, simulate
from ganger_master.simulator.time_slices import EPOCH_S
from ganger_master.simulator.traces.workload import Workload, workload
from hypothesis import given, settings
from hypothesis import strategies as some
from simulator.replay.test_promises import ROWS, Watched
from simulator.replay.test_quotas import EVERY, SERVERS, WAYS, jobs_of, possible

TEAMS = {"vision": Team(("ann",), 2.0), "others": Team(("*",))}
HOUR_S = 3_600.0


class Metered(_Replay):
    """Sums what each user has used by `until_s`, in seconds from the beginning."""

    def __init__(self, jobs: Workload, policy: str, options: ReplayOptions, until_s: float) -> None:
        self.until_s = EPOCH_S + until_s
        self.used: dict[str, float] = {}
        super().__init__(jobs, SERVERS, policy, options, None)

    def _finish(self) -> None:
        super()._finish()
        if self.clock.now <= self.until_s:
            for usage in self.state.usage.values():
                now = used_until(usage, self.until_s, self.settings.usage_half_life_s)
                self.used[usage.user] = gpu_s_since(now, 0)


def backlog(jobs: int = 80, at_once: bool = False) -> Workload:
    """Two users with more work than twelve GPUs can do in an hour; ann's jobs are all submitted after bob's, or all
    jobs at once."""
    dice = np.random.default_rng(7)
    return workload(
        [str(job) for job in range(jobs)],
        np.zeros(jobs) if at_once else np.arange(jobs) / 10,
        dice.choice([1, 1, 2], jobs),
        dice.uniform(300.0, 1_500.0, jobs),
        labels={"user": ["bob"] * (jobs // 2) + ["ann"] * (jobs - jobs // 2)},
    )


# Time slices and sizes of jobs do not follow the shares of teams.
@pytest.mark.parametrize("policy", sorted({*NAMES, "las+packs"} - {"optimus", "gandiva"}))
def test_gpu_seconds_follow_the_weights_while_both_teams_request_enough(policy: str) -> None:
    # Without preemption the jobs that came first keep their GPUs.
    jobs = backlog(at_once=not policy_named(policy).order.preempts)
    replay = Metered(jobs, policy, ReplayOptions(teams=TEAMS, usage_half_life_s=HOUR_S), HOUR_S)
    replay.run()
    share = replay.used["ann"] / sum(replay.used.values())
    assert share == pytest.approx(2 / 3, abs=0.1)
    assert replay.ledger.outcomes().finished.all()


def test_without_teams_a_replay_counts_no_use() -> None:
    replay = Metered(backlog(20), "fifo-backfill", ReplayOptions(), HOUR_S)
    replay.run()
    assert not replay.state.usage


@pytest.mark.parametrize("policy", ["las", "srtf", "ganger", "gandiva", "drf", "las+packs"])
def test_a_single_team_of_one_user_changes_no_outcome(policy: str) -> None:
    jobs = workload(
        [str(job) for job in range(20)],
        np.arange(20.0) * 30,
        [1, 2, 4, 1] * 5,
        [200.0, 700.0, 400.0, 90.0] * 5,
        labels={"user": ["ann"] * 20},
    )
    without = simulate(jobs, SERVERS, policy, ReplayOptions(plan_every_s=20.0))
    within = simulate(jobs, SERVERS, policy, ReplayOptions(plan_every_s=20.0, teams={"a": Team(("ann",))}))
    for column in fields(Outcomes):
        np.testing.assert_array_equal(getattr(without.outcomes, column.name), getattr(within.outcomes, column.name))


@settings(max_examples=40, deadline=None)
@given(
    policy=some.sampled_from(EVERY),
    way=some.sampled_from(sorted(WAYS)),
    rows=ROWS,
    limit=some.sampled_from([None, 4, 6]),
    elastic=some.sampled_from([1, 3]),
)
def test_every_job_ends_and_the_core_counts_what_runs(
    policy: str, way: str, rows: list[tuple[int, int, int, str, int]], limit: int | None, elastic: int
) -> None:
    teams = {"vision": Team(("ann",), 2.0, limit), "others": Team(("*",))}
    rows = [*rows, (5, 2, 40, "ann", 0)]
    jobs = jobs_of(rows, 4, elastic)
    replay = Watched(jobs, SERVERS, possible(policy, way), replace(WAYS[way], teams=teams))
    replay.run()
    assert replay.ledger.outcomes().finished.all()
    assert sum(usage.gpus for usage in replay.state.usage.values()) == 0.0


def test_under_gandiva_the_team_with_the_larger_share_starts_its_jobs_first() -> None:
    """Twelve jobs fill the cluster, each as long as all others; the time slices come for those after them."""
    jobs = workload(
        [str(job) for job in range(24)], [0.0] * 24, [1] * 24, [50.0] * 24, labels={"user": ["bob", "ann"] * 12}
    )
    options = ReplayOptions(teams=TEAMS, quantum_s=1_000.0)
    run = simulate(jobs, SERVERS, "gandiva", options)
    first = np.argsort(run.outcomes.first_start_s, kind="stable")[:12] % 2
    assert first.sum() == 8, "two of three are ann's"
