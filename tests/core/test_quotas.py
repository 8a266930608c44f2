"""What users hold is counted as jobs come and go; counted anew over all live jobs it is the same."""

from __future__ import annotations

from collections import Counter

import pytest
from core.drive import SERVER, Drive, job_of
from ganger_master.core.capacity import rules
from ganger_master.core.commands import SuspendJob
from ganger_master.core.model import SuspendLevel
from ganger_master.core.settings import Settings
from ganger_master.core.shares import Shares
from ganger_master.core.state import State
from ganger_master.sim import faults
from ganger_master.sim.cluster import Cluster
from ganger_master.sim.engine import Engine
from hypothesis import given
from hypothesis import strategies as some
from msgspec.structs import replace

QUOTAS = Settings(quota_devices={"ann": 4, "": 6}, lost_after_seconds=60.0)


def counted_anew(state: State) -> dict[str, int]:
    jobs = [state.jobs[number] for number in state.live]
    held: Counter[str] = Counter()
    for job in jobs:
        if job.epoch in state.gangs:
            held[job.user] += job.spec.gpus
    return {user: devices for user, devices in held.items() if devices}


@pytest.mark.parametrize("seed", range(6))
def test_in_any_storm_the_count_is_that_of_all_live_jobs(seed: int) -> None:
    nodes = [(name, SERVER) for name in ("n1", "n2", "n3")]
    cluster = Cluster(seed, nodes, QUOTAS, faults.storm(Engine(seed)))
    dice = cluster.engine.random
    cluster.run_for(5.0)
    cluster.unleash()
    cluster.unleash_users(15.0)
    seen = 0
    for _ in range(8):
        spec = replace(job_of(dice.choice([1, 2, 4])), command=("train", str(dice.randint(20, 60))))
        cluster.submit(spec, dice.choice(["ann", "bob", "cat"]))
        for _ in range(15):
            cluster.run_for(1.0)
            if cluster.master.is_up:
                seen += len(cluster.state.shares.held)
                assert cluster.state.shares.held == counted_anew(cluster.state)
    assert seen


def test_a_parked_job_counts_but_not_against_its_own_resumption() -> None:
    drive = Drive(settings=QUOTAS)
    number = drive.submit(job_of(4), user="ann")
    drive.start(number)
    drive.runs(number)
    drive.step(SuspendJob(number, SuspendLevel.OFFLOAD))
    assert rules(drive.state, drive.job(number)) == ()
    other = drive.submit(job_of(1), user="ann")
    (refusal,) = rules(drive.state, drive.job(other))
    assert refusal.figures == {"needed": 1, "held": 4, "limit": 4}


@given(some.lists(some.tuples(some.integers(1, 4), some.sampled_from(["ann", "bob"]), some.integers(0, 3))))
def test_the_last_charge_of_a_job_is_what_counts(charges: list[tuple[int, str, int]]) -> None:
    shares = Shares()
    last: dict[int, tuple[str, int]] = {}
    for number, user, devices in charges:
        shares.charge(number, user, devices)
        last[number] = user, devices
    for user in ("ann", "bob"):
        assert shares.held.get(user, 0) == sum(devices for who, devices in last.values() if who == user)
        for number in last:
            others = [devices for other, (who, devices) in last.items() if who == user and other != number]
            assert shares.beside(number, user) == sum(others)
