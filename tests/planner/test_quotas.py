"""Quotas in plans: a job beyond its user's quota waits for that user's jobs, and preempts or delays no other."""

from __future__ import annotations

from collections import Counter

import pytest
from core.drive import job_of
from ganger.cluster.refusals import Reason
from ganger.cluster.resources import Claim, LocalityLevel, Role, TaskShape
from ganger.job_state import JobState
from ganger_master.core.accounting import limits_of
from ganger_master.core.commands import CancelJob
from ganger_master.core.explain import explain, reported_blockers
from ganger_master.core.gang_model import Gang, GangPhase, GangRole, Piece
from ganger_master.core.job_model import JobRecord
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.tenancy import Team, TeamIndex
from ganger_master.planner.job_table import LiveTable
from ganger_master.policies.fairness import QuotaUse
from hypothesis import given
from hypothesis import strategies as some
from planner.test_passes import Planned


def crowded(quotas: dict[str, int]) -> tuple[Planned, int, int]:
    """On four GPUs one job of ann's and an older one of bob's that ranks after any new job; return their numbers."""
    drive = Planned(quotas=quotas)
    return drive, drive.running(job_of(2), seconds=500.0, user="bob"), drive.running(job_of(2), user="ann")


@pytest.mark.parametrize("quotas", [{"ann": 3}, {"": 3}, {"ann": 2, "": 9}])
def test_no_job_is_preempted_for_one_that_would_exceed_its_users_quota(quotas: dict[str, int]) -> None:
    drive, bobs, anns = crowded({})
    drive.submit(job_of(2), "ann")
    assert [change.number for change in drive.found().changes] == [bobs], "without a quota"
    drive, bobs, anns = crowded(quotas)
    newcomer = drive.submit(job_of(2), "ann")
    found = drive.found()
    assert (found.changes, found.line.tolist()) == ((), []), "it is in no line"
    reported = reported_blockers(drive.state, drive.job(newcomer), drive.now)
    for told in (explain(drive.state, newcomer, drive.now).blockers, reported):
        assert [blocker.reason for blocker in told] == [Reason.QUOTA]
    drive.step(CancelJob(anns))
    drive.seen_without("n1", anns)
    assert drive.proposed() == [("START", newcomer)]


def test_of_several_jobs_within_quota_one_by_one_only_the_first_preempts() -> None:
    def stopped(quotas: dict[str, int]) -> int:
        drive = Planned()
        for _ in range(2):
            drive.running(job_of(2), seconds=500.0, user="bob")
        for _ in range(2):
            drive.submit(job_of(2), "ann")
        drive.set_quotas(**quotas)
        return len(drive.found().changes)

    assert stopped({}) == stopped({"ann": 4}) == 2
    assert stopped({"ann": 3}) == stopped({"ann": 2}) == 1
    assert stopped({"ann": 1}) == 0


def test_without_preemption_a_job_that_fits_the_quota_starts_before_one_that_does_not() -> None:
    drive = Planned(quotas={"ann": 3})
    anns = drive.running(job_of(2), user="ann")
    large, small = drive.submit(job_of(2), "ann"), drive.submit(job_of(1), "ann")
    bobs = drive.submit(job_of(1), "bob")
    assert drive.proposed() == [("START", small), ("START", bobs)]
    drive.step(CancelJob(anns))
    drive.seen_without("n1", anns)
    assert drive.proposed() == [("START", large)]


def gang(epoch: int, number: int, gpus: int) -> Gang:
    claim = Claim("n1", (1 << gpus) - 1, (0,), 0)
    piece = Piece(claim, claim)
    return Gang(epoch, number, GangRole.ACTIVE, GangPhase.RUNNING, (piece,), LocalityLevel.NODE, 1.0)


@given(
    some.dictionaries(some.sampled_from(["ann", "bob", ""]), some.integers(0, 6)),
    some.lists(
        some.tuples(some.integers(0, 7), some.sampled_from(["waits", "runs", "ends", "forgotten", "rests"])),
        max_size=60,
    ),
)
def test_the_table_keeps_out_the_same_jobs_as_a_scan_of_all(
    quotas: dict[str, int], story: list[tuple[int, str]]
) -> None:
    table = LiveTable(limits=limits_of(quotas))
    waiting: dict[int, JobRecord] = {}
    holding: dict[int, JobRecord] = {}
    for number, what in story:
        spec = JobSpec(("train",), (Role("worker", 1 + number % 3, TaskShape(gpus=1)),))
        job = JobRecord(number, "uid", ("ann", "bob", "cat")[number % 3 - number // 4], spec, 1.0, pending_since=1.0)
        waiting.pop(number, None)
        holding.pop(number, None)
        match what:
            case "waits":
                table.put(job, None)
                waiting[number] = job
            case "runs" | "rests":
                state = JobState.HOLDING if what == "runs" else JobState.SUSPENDED
                epoch = number + 100
                table.put(
                    JobRecord(number, "uid", job.user, spec, 1.0, state=state, epoch=epoch),
                    gang(epoch, number, job.gpus),
                )
                holding[number] = job
            case "ends":
                table.put(JobRecord(number, "uid", job.user, spec, 1.0, state=JobState.SUCCEEDED), None)
            case "forgotten" if table.get(number) is not None:
                table.forget(number)
            case _:
                pass
        naive = []
        for one in waiting.values():
            limit = quotas.get(one.user, quotas.get("", 1 << 30))
            held = sum([other.gpus for other in holding.values() if other.user == one.user])
            if held + one.gpus <= limit:
                naive.append(one.number)
        rows, facts = table.facts(2.0)
        assert sorted(facts.number[table.is_waiting(rows)].tolist()) == sorted(naive)
        assert sorted([one.number for one in table.waiting_jobs(99)]) == sorted(naive)
        assert table.has_waiting == bool(naive)


@given(
    some.dictionaries(some.sampled_from(["ann", "bob", ""]), some.integers(0, 6)),
    some.lists(some.tuples(some.sampled_from(["ann", "bob", "cat"]), some.integers(1, 3)), max_size=12),
)
def test_the_jobs_of_a_line_start_that_fit_beside_those_before_them(
    limits: dict[str, int], line: list[tuple[str, int]]
) -> None:
    quotas = QuotaUse(limits_of(limits))
    jobs = [
        JobRecord(number, "uid", user, JobSpec(("train",), (Role("worker", gpus, TaskShape(gpus=1)),)), 1.0)
        for number, (user, gpus) in enumerate(line, 1)
    ]
    for job in jobs:
        quotas.put(job, None, True)
    held: dict[str, int] = {}
    beyond = []
    for job in jobs:
        limit = limits.get(job.user, limits.get("", 1 << 30))
        if held.get(job.user, 0) + job.gpus > limit:
            beyond.append(job.number)
        else:
            held[job.user] = held.get(job.user, 0) + job.gpus
    assert quotas.beyond(jobs) == set(beyond)
    assert quotas.are_contested == (quotas.beyond([job for job in jobs if job.number not in quotas.kept_out]) != set())


@given(
    some.integers(0, 6),
    some.dictionaries(some.sampled_from(["ann", "bob"]), some.integers(0, 6)),
    some.lists(some.tuples(some.sampled_from(["ann", "bob", "cat"]), some.integers(1, 3)), max_size=12),
)
def test_the_limits_of_users_and_of_their_team_hold_together(
    of_team: int, quotas: dict[str, int], line: list[tuple[str, int]]
) -> None:
    teams = {"vision": Team(("ann", "bob"), gpus=of_team)}
    use = QuotaUse(limits_of(quotas, teams), TeamIndex(teams))
    jobs = [
        JobRecord(number, "uid", user, JobSpec(("train",), (Role("worker", gpus, TaskShape(gpus=1)),)), 1.0)
        for number, (user, gpus) in enumerate(line, 1)
    ]
    for job in jobs:
        use.put(job, None, True)
    held: Counter[str] = Counter()
    beyond = set()
    limits = {**quotas, "vision": of_team}
    for job in jobs:
        owners = [job.user] if job.user == "cat" else [job.user, "vision"]
        if any(held[owner] + job.gpus > limits.get(owner, 1 << 30) for owner in owners):
            beyond.add(job.number)
        else:
            held.update(dict.fromkeys(owners, job.gpus))
    assert use.beyond(jobs) == beyond
    assert use.kept_out == {job.number for job in jobs if use.beyond([job])}
    assert use.are_contested == bool(use.beyond([job for job in jobs if job.number not in use.kept_out]))


def test_a_job_is_let_in_when_another_user_of_its_team_returns_devices() -> None:
    drive = Planned(teams={"vision": Team(("ann", "bob"), gpus=3)})
    first = drive.running(job_of(2), user="ann")
    second = drive.submit(job_of(2), "bob")
    assert drive.found().changes == ()
    drive.step(CancelJob(first))
    drive.seen_without("n1", first)
    assert drive.proposed() == [("START", second)]
