"""Devices that users hold are counted as jobs come and go, and equal a recount over all live jobs."""

from __future__ import annotations

from collections import Counter

import pytest
from core.drive import SERVER, Drive, job_of
from faultsim import faults
from faultsim.engine import Engine
from faultsim.fault_cluster import FaultCluster
from ganger.cluster.refusals import Reason
from ganger.job_state import JobState
from ganger_master.core.accounting import Charges, Owner
from ganger_master.core.answers import Refused
from ganger_master.core.commands import ProposePlan, SubmitArray, SubmitJob, SuspendJob
from ganger_master.core.explain import explain, reported_blockers
from ganger_master.core.job_model import SuspendLevel
from ganger_master.core.job_rules import rules
from ganger_master.core.plan_changes import StartChange
from ganger_master.core.settings import CoreSettings
from ganger_master.core.state import State
from hypothesis import given
from hypothesis import strategies as some
from msgspec.structs import replace

QUOTAS = CoreSettings(quota_devices={"ann": 4, "": 6}, lost_after_s=60.0)


def counted_anew(state: State) -> dict[Owner, int]:
    jobs = [state.jobs[number] for number in state.jobs.live]
    held: Counter[str] = Counter()
    for job in jobs:
        if job.epoch in state.gangs:
            held[job.user] += job.spec.gpus
    return {Owner(user): devices for user, devices in held.items() if devices}


@pytest.mark.parametrize("seed", range(6))
def test_in_any_storm_the_count_is_that_of_all_live_jobs(seed: int) -> None:
    nodes = [(name, SERVER) for name in ("n1", "n2", "n3")]
    cluster = FaultCluster(seed, nodes, QUOTAS, faults.storm(Engine(seed)))
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
                seen += len(cluster.state.jobs.charges.held)
                assert cluster.state.jobs.charges.held == counted_anew(cluster.state)
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
def test_the_last_charge_of_a_job_is_what_counts(made: list[tuple[int, str, int]]) -> None:
    charges = Charges()
    last: dict[int, tuple[str, int]] = {}
    for number, user, devices in made:
        charges.charge(number, (Owner(user),), devices)
        last[number] = user, devices
    for user in ("ann", "bob"):
        assert charges.held.get(Owner(user), 0) == sum(devices for owner, devices in last.values() if owner == user)
        for number in last:
            others = [devices for other, (owner, devices) in last.items() if owner == user and other != number]
            assert charges.beside(number, Owner(user)) == sum(others)


@pytest.mark.parametrize("policy", ["fifo", "las"])
def test_a_job_larger_than_its_user_s_quota_is_refused_at_submission_with_the_numbers(policy: str) -> None:
    drive = Drive(settings=CoreSettings(policy=policy, quota_devices={"ann": 2, "bob": 0, "": 3}))
    for command in (SubmitJob(job_of(3), "uid", "ann"), SubmitArray(job_of(3), ((0, {}),), ("uid",), user="ann")):
        answer = drive.step(command)
        assert isinstance(answer, Refused)
        assert answer.reason == "QUOTA_EXCEEDED"
        assert answer.metadata == {"user": "ann", "needed": "3", "limit": "2"}
        assert "needs 3 GPUs and the quota of user 'ann' is 2: ask for 2 or fewer" in answer.message
    nothing = drive.step(SubmitJob(job_of(1), "uid", "bob"))
    assert isinstance(nothing, Refused)
    assert "user 'bob' may hold none" in nothing.message
    assert isinstance(drive.step(SubmitJob(job_of(4), "uid", "cat")), Refused)
    drive.submit(job_of(2), "ann")
    drive.submit(job_of(3), "cat")


@pytest.mark.parametrize("policy", ["fifo", "las"])
def test_why_names_the_jobs_that_hold_the_share(policy: str) -> None:
    drive = Drive(2, CoreSettings(policy=policy, quota_devices={"ann": 4}))
    sizes = {drive.submit(job_of(gpus), "ann"): gpus for gpus in (1, 2, 1)}
    for number in sizes:
        job = drive.job(number)
        drive.step(ProposePlan((StartChange(number, job.revision, drive.places(number)[0]),)))
        assert drive.job(number).state is JobState.HOLDING
    waiting = drive.submit(job_of(1), "ann")
    if policy == "fifo":
        # Where schedulers place jobs, the reason is the refusal of its last request.
        drive.request(waiting, *drive.places(waiting))
    for (blocker,) in (
        explain(drive.state, waiting, drive.now).blockers,
        reported_blockers(drive.state, drive.job(waiting), drive.now),
    ):
        assert explain(drive.state, waiting, drive.now).share == (Owner("ann"), 4)
        assert blocker.reason is Reason.QUOTA
        assert blocker.message.startswith(
            "user 'ann' holds 4 of the 4 GPUs of its quota: jobs/2 (2), jobs/1 (1), jobs/3 (1)"
        )
        assert "because of" not in blocker.message


@pytest.mark.parametrize("policy", ["fifo", "las"])
def test_why_reports_that_a_job_never_starts_once_the_quota_was_set_below_what_it_needs(policy: str) -> None:
    drive = Drive(settings=CoreSettings(policy=policy, quota_devices={"ann": 4}))
    number = drive.submit(job_of(3), "ann")
    drive.set_quotas(ann=2)
    found = explain(drive.state, number, drive.now)
    (blocker,) = found.blockers
    assert (blocker.reason, blocker.figures) == (Reason.QUOTA, {"needed": 3, "limit": 2})
    assert found.assumption == "never under this quota: ask for fewer GPUs, or have an operator raise the quota"
