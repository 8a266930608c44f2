"""Quotas in a replay: whatever the policy, no user holds more at any time, and jobs over quota block no other job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, replace

import numpy as np
import pytest
from ganger_master.core.accounting import by_user
from ganger_master.policies import NAMES, Tune, policy_named
from ganger_master.simulator.inputs import FREE, ReplayOptions, SwitchCosts
from ganger_master.simulator.report.outcomes import Outcomes
from ganger_master.simulator.run import simulate
from ganger_master.simulator.traces.servers import Servers, servers_from_flags
from ganger_master.simulator.traces.workload import Workload, workload
from hypothesis import given, settings
from hypothesis import strategies as some
from simulator.replay.test_promises import POLICIES, ROWS, Watched

SERVERS = servers_from_flags(nodes=3, gpus_per_node=4, nodes_per_rack=2)
EVERY = (*POLICIES, "las+packs", "ganger+defrag", "drf+elastic", "las2d+synergy-tune", "fifo-backfill+defrag")
YEAR_S = 365 * 86_400.0
COSTS = SwitchCosts(start_s=2.0, suspend_s=1.5, resume_s=1.0)
WAYS = {
    "plans often": ReplayOptions(costs=COSTS, plan_every_s=20.0),
    "ideal": ReplayOptions(ideal=True),
    "in rounds": ReplayOptions(round_s=30.0),
    "ideal, in rounds": ReplayOptions(ideal=True, round_s=30.0),
}


class Bounded(Watched):
    """Counts what users hold after every batch, by the gangs there are."""

    def __init__(
        self, jobs: Workload, policy: str, options: ReplayOptions, quotas: Mapping[str, int], servers: Servers = SERVERS
    ) -> None:
        self.most: Counter[str] = Counter()
        self.limits = by_user(quotas)
        super().__init__(jobs, servers, policy, replace(options, quotas=quotas))

    def _finish(self) -> None:
        super()._finish()
        held: Counter[str] = Counter()
        for number in self.state.jobs.live:
            job = self.state.jobs[number]
            gangs = [self.state.gangs[epoch] for epoch in (job.epoch, job.next_epoch) if epoch in self.state.gangs]
            held[job.user] += max([gang.devices for gang in gangs], default=0)
        for user, devices in held.items():
            assert devices <= self.limits.get(user, self.limits.get("", devices)), f"{user!r} holds {devices}"
            self.most[user] = max(self.most[user], devices)


def possible(policy: str, way: str) -> str:
    """An ideal cluster has nothing to place by, or to tune."""
    named = policy_named(policy)
    return named.order.name if WAYS[way].ideal and ("+" in policy or named.has(Tune)) else policy


def jobs_of(rows: list[tuple[int, int, int, str, int]], most_gpus: int, elastic: int = 1) -> Workload:
    rows = sorted((row for row in rows if row[1] <= most_gpus), key=lambda row: row[0])
    submit, gpus, duration, user, priority = zip(*rows, strict=True)
    numbers = {"priority": np.array(priority)}
    if elastic > 1:
        numbers |= {"min_gpus": np.ones(len(rows), int), "max_gpus": np.array(gpus) * elastic}
    names = [str(number) for number in range(len(rows))]
    return workload(names, submit, gpus, duration, numbers=numbers, labels={"user": user})


@settings(max_examples=60, deadline=None)
@given(
    policy=some.sampled_from(EVERY),
    way=some.sampled_from(sorted(WAYS)),
    rows=ROWS,
    quotas=some.fixed_dictionaries({"ann": some.integers(4, 12)}, optional={"*": some.integers(4, 12)}),
    elastic=some.sampled_from([1, 3]),
)
def test_no_user_holds_more_than_its_quota_and_every_job_ends(
    policy: str, way: str, rows: list[tuple[int, int, int, str, int]], quotas: dict[str, int], elastic: int
) -> None:
    rows = [*rows, (5, 2, 40, "ann", 0)]
    replay = Bounded(jobs_of(rows, 4, elastic), possible(policy, way), WAYS[way], quotas)
    replay.run()
    assert replay.ledger.outcomes().finished.all()
    assert not replay.state.jobs.charges.held


def crowd(seed: int, jobs: int = 40) -> Workload:
    """Two users with more work than the cluster can do while it comes."""
    dice = np.random.default_rng(seed)
    return workload(
        [str(job) for job in range(jobs)],
        np.sort(dice.uniform(0.0, 3_000.0, jobs)),
        dice.choice([1, 1, 2, 4], jobs),
        np.exp(dice.normal(6.0, 1.0, jobs)),
        labels={"user": ["ann" if job % 2 else "bob" for job in range(jobs)]},
        numbers={"priority": dice.choice([0, 0, 1], jobs), "min_gpus": 1, "max_gpus": 6},
    )


@pytest.mark.parametrize("policy", sorted({*NAMES, *EVERY}))
def test_on_an_oversubscribed_cluster_a_user_uses_its_quota_up_and_holds_no_more(policy: str) -> None:
    replay = Bounded(crowd(3), policy, ReplayOptions(), {"ann": 5})
    replay.run()
    assert (replay.most["ann"], replay.ledger.outcomes().finished.all()) == (5, True)
    assert replay.most["bob"] > 5


@pytest.mark.parametrize("way", sorted(WAYS))
@pytest.mark.parametrize("policy", NAMES)
def test_quotas_that_no_user_reaches_change_nothing(policy: str, way: str) -> None:
    jobs, options = crowd(5, 20), WAYS[way]
    without = simulate(jobs, SERVERS, possible(policy, way), options)
    within = simulate(jobs, SERVERS, possible(policy, way), replace(options, quotas={"ann": 180, "*": 240}))
    assert without.events == within.events
    for column in fields(Outcomes):
        np.testing.assert_array_equal(getattr(without.outcomes, column.name), getattr(within.outcomes, column.name))


def test_two_users_share_a_cluster_as_their_quotas_say() -> None:
    """Ann's jobs came first and would hold all eight GPUs: bounded to four they run by twos, and bob's at once."""
    jobs = workload(
        [f"a{number}" for number in range(4)] + ["b0", "b1"],
        [0.0] * 4 + [10.0] * 2,
        [2] * 6,
        [100.0] * 6,
        labels={"user": ["ann"] * 4 + ["bob"] * 2},
    )
    servers = servers_from_flags(nodes=1, gpus_per_node=8)

    def ends(policy: str, quotas: dict[str, int]) -> list[float]:
        run = simulate(jobs, servers, policy, ReplayOptions(costs=FREE, quotas=quotas))
        return [float(end) for end in run.outcomes.end_s]

    for policy in ("fifo", "fifo-backfill", "srtf", "tetris"):
        assert ends(policy, {}) == [100.0] * 4 + [200.0] * 2
        assert ends(policy, {"ann": 4}) == ends(policy, {"*": 4}) == [100.0, 100.0, 200.0, 200.0, 110.0, 110.0]
        # Of three GPUs one is no use to a gang of two.
        assert ends(policy, {"ann": 3}) == [100.0, 200.0, 300.0, 400.0, 110.0, 110.0]


def test_no_job_is_preempted_for_a_job_that_could_not_start() -> None:
    """Under las ann's second job goes before bob's, which has run for longest."""
    jobs = workload(
        ["b", "a0", "a1"],
        [0.0, 900.0, 1_000.0],
        [4, 4, 4],
        [5_000.0, 3_000.0, 100.0],
        labels={"user": ["bob", "ann", "ann"]},
    )
    servers = servers_from_flags(nodes=1, gpus_per_node=8)

    def stops(**quotas: int) -> list[int]:
        return simulate(jobs, servers, "las", ReplayOptions(quotas=quotas)).outcomes.preemptions.tolist()

    assert stops()[0] > 0
    assert stops(ann=8) == stops()
    assert stops(ann=4) == stops(ann=7) == [0, 0, 0]


@pytest.mark.parametrize("policy", ["fifo", "fifo-backfill"])
def test_of_very_many_jobs_over_quota_the_next_starts_within_seconds_and_futile_ticks_are_skipped(
    policy: str,
) -> None:
    """Of more than are looked at at once the core asks others every second; but while nothing gets free no job starts,
    and the last job runs for a year."""
    anns, bobs = ["year", *[f"a{job}" for job in range(149)]], [f"b{job}" for job in range(50)]
    duration_s = dict(zip(anns + bobs, np.random.default_rng(2).uniform(20.0, 400.0, 200), strict=True))
    jobs = workload(
        anns + bobs,
        [0.0, *np.linspace(1.0, 2.0, 199)],
        [1] * 200,
        list((duration_s | {"year": YEAR_S}).values()),
        labels={"user": ["ann"] * 150 + ["bob"] * 50},
    )
    run = simulate(jobs, SERVERS, policy, ReplayOptions(costs=FREE, quotas={"ann": 1, "bob": 5}))
    ends = dict(zip(run.outcomes.job_ids, run.outcomes.end_s, strict=True))
    work = [duration_s[job] for job in bobs]
    assert max(ends[job] for job in bobs) < sum(work) / 5 + max(work) + 6.0 * len(bobs) / 5
    assert run.events < 6 * len(ends)
