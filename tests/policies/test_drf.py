"""Progressive filling: the published example, a naive twin with a line per user, and the promises of the paper."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ganger_master.policies import fairness
from ganger_master.policies.fairness import DRF, filled
from ganger_master.policies.orders import Facts, ranked, selected
from hypothesis import assume, given
from hypothesis import strategies as st
from kit.facts import capacity_of, facts_of, live_jobs, rows

RESOURCES = ("gpus", "cores", "memory_bytes")


def naive(jobs: list[dict[str, Any]], capacity: dict[str, float]) -> list[int]:
    """Numbers in the sequence of visits: one gang at a time, the user with the smallest share next."""

    def kept(job: dict[str, Any]) -> bool:
        return bool(job["is_running"] and not job["is_preemptible"])

    line = sorted(jobs, key=lambda job: (not kept(job), -job["priority"], job["arrival_s"], job["number"]))
    weight = {job["user"]: job["weight"] for job in reversed(line)}
    held = {user: dict.fromkeys(capacity, 0.0) for user in weight}
    free = dict(capacity)
    visits = []
    while True:
        line = [job for job in line if all(job[name] <= free[name] for name in capacity)]
        if not line:
            break
        first = {job["user"]: job for job in reversed(line)}

        def urgency(job: dict[str, Any]) -> tuple[Any, ...]:
            user = job["user"]
            share = max([held[user][name] / capacity[name] for name in capacity], default=0.0) / weight[user]
            return not kept(job), -job["priority"], round(share, 9), job["arrival_s"], job["number"]

        job = min(first.values(), key=urgency)
        for name in capacity:
            held[job["user"]][name] += job[name]
            free[name] -= job[name]
        visits.append(job["number"])
        line.remove(job)
    rest = [job for job in jobs if job["number"] not in visits]
    rest.sort(key=lambda job: (not kept(job), -job["priority"], job["arrival_s"], job["number"]))
    return visits + [job["number"] for job in rest]


@given(
    facts=live_jobs(most=20),
    gpus=st.sampled_from([0, 4, 16, 64]),
    cores=st.sampled_from([0.0, 16.0, 64.0]),
    memory=st.sampled_from([0.0, 32.0, 128.0]),
    glance=st.sampled_from([1, 2, 5, 1_024]),
)
def test_visits_are_those_of_serving_one_gang_at_a_time(
    facts: Facts, gpus: int, cores: float, memory: float, glance: int
) -> None:
    jobs = rows(facts)
    capacity = {name: amount for name, amount in zip(RESOURCES, (gpus, cores, memory), strict=True) if amount > 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fairness, "_FIRST_BATCH", glance)
        (position,) = fairness.drf_keys(facts, 0.0, capacity_of(gpus, cores, memory))
    assert facts.number[np.argsort(position)].tolist() == naive(jobs, capacity)


def test_visits_of_thousands_of_gangs_are_those_of_one_at_a_time() -> None:
    """Past the number of rows from which sorting works by ranks."""
    random = np.random.default_rng(5)
    count = 3_000
    jobs = [
        {
            "number": number,
            "arrival_s": float(random.integers(0, 500)),
            "user": int(random.zipf(1.5)) % 40,
            "gpus": int(random.choice([1, 1, 2, 4, 8])),
            "cores": float(random.choice([2.0, 3.0, 16.0])),
            "memory_bytes": float(random.choice([1.0, 8.0])),
        }
        for number in range(count)
    ]
    facts = facts_of(*jobs)
    (position,) = fairness.drf_keys(facts, 0.0, capacity_of(300, 900.0, 600.0))
    expected = naive(rows(facts), {"gpus": 300, "cores": 900.0, "memory_bytes": 600.0})
    assert facts.number[np.argsort(position)].tolist() == expected


def test_example_of_the_paper_serves_three_tasks_and_two() -> None:
    """Ghodsi et al., section 4.1: 9 CPUs and 18 GB, tasks of <1 CPU, 4 GB> against tasks of <3 CPU, 1 GB>."""
    user = np.array([0, 1] * 6)
    demands = np.array([[1.0, 3.0] * 6, [4.0, 1.0] * 6])
    visits, served = filled(demands, np.array([9.0, 18.0]), user, np.ones(12))
    assert np.bincount(user[visits[:served]]).tolist() == [3, 2]
    # B's share after its first task (1/3) is above A's (2/9): A B A B A, as the paper's table has it but for ties.
    assert user[visits[:served]].tolist() == [0, 1, 0, 1, 0]


def test_example_of_the_paper_as_jobs_of_an_order() -> None:
    # The same with GPUs in the place of CPUs.
    jobs = [{"user": at % 2, "gpus": (1, 3)[at % 2], "memory_bytes": (4.0, 1.0)[at % 2]} for at in range(12)]
    facts = facts_of(*jobs)
    capacity = capacity_of(9, memory_bytes=18.0)
    held = selected(DRF, facts, ranked(DRF, facts, 0.0, capacity), 9)
    assert np.bincount(facts.user[held]).tolist() == [3, 2]


def test_weight_two_gets_twice_the_share() -> None:
    facts = facts_of(*[{"user": at % 2, "weight": (1.0, 2.0)[at % 2]} for at in range(40)])
    held = selected(DRF, facts, ranked(DRF, facts, 0.0, capacity_of(12)), 12)
    assert np.bincount(facts.user[held]).tolist() == [4, 8]


def test_a_gang_that_does_not_fit_takes_nothing_from_its_user() -> None:
    # 8 is more than the 6 there are: user 0 goes on with small gangs as if it had not asked.
    facts = facts_of({"user": 0, "gpus": 8}, *[{"user": at % 2} for at in range(8)])
    held = selected(DRF, facts, ranked(DRF, facts, 0.0, capacity_of(6)), 6)
    assert np.bincount(facts.user[held]).tolist() == [3, 3]


def test_new_users_get_their_share_from_preemptible_jobs_only() -> None:
    old = {"user": 0, "is_running": True, "attained_s": 9.0}
    new = {"user": 1, "arrival_s": 5.0}
    facts = facts_of(*[old] * 4, *[new] * 4)
    held = selected(DRF, facts, ranked(DRF, facts, 9.0, capacity_of(4)), 4)
    assert np.bincount(facts.user[held]).tolist() == [2, 2]
    facts = facts_of(*[{**old, "is_preemptible": False}] * 3, {**old, "user": 1}, *[old] * 2)
    held = selected(DRF, facts, ranked(DRF, facts, 9.0, capacity_of(4)), 4)
    assert np.bincount(facts.user[held]).tolist() == [3, 1]


DEMAND = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))


@given(demands=st.lists(DEMAND, min_size=1, max_size=5), capacity=st.tuples(*[st.integers(8, 40)] * 3))
def test_sharing_never_serves_a_user_less_than_an_equal_part_of_the_cluster_would(
    demands: list[tuple[int, int, int]], capacity: tuple[int, int, int]
) -> None:
    """Sharing incentive (section 3) for users who ask for many equal tasks. And Pareto efficiency: nothing that was
    passed over still fits."""
    count = len(demands)
    user = np.tile(np.arange(count), 40)
    wanted = np.tile(np.array(demands, float).T, 40)
    visits, served = filled(wanted, np.array(capacity, float), user, np.ones(len(user)))
    tasks = np.bincount(user[visits[:served]], minlength=count)
    assume((tasks < 40).all())
    free = np.array(capacity) - wanted[:, visits[:served]].sum(axis=1)
    assert (free >= 0).all()
    assert not (wanted[:, visits[served:]] <= free[:, None]).all(axis=0).any()
    # When a user finds no room, what others have beyond its share is less than one task each, so it has at least an
    # equal share less the mean task: with tasks small against the cluster, the equal part itself.
    steps = [max(d / c for d, c in zip(demand, capacity, strict=True)) for demand in demands]
    least = (1.0 - sum(steps)) / count
    assert all(tasks[at] * steps[at] >= least - 1e-9 for at in range(count))
