"""Trials of cores, planned second by second: cores go to the jobs that gain by them, and a change that gains nothing is
reverted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from core.drive import GIB, job_of
from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.resources import Claim
from ganger_master.core.answers import PlanAnswer
from ganger_master.core.commands import ProposePlan, RetuneJob
from ganger_master.core.job_model import Capabilities
from ganger_master.core.job_spec import JobSpec
from ganger_master.planner.context import context_of
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.order_stage import plan_by
from ganger_master.planner.rate_registry import ProgressReport, RateRegistry
from ganger_master.planner.tune_stage import CoresWish, fitted
from ganger_master.policies import live_policy_named
from ganger_master.policies.trials import TrialPace
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from planner.test_passes import Planned

# Steps per second by cores for each GPU.
Curve = Callable[[float], float]
PACE = TrialPace(warm_s=3.0, settle_s=2.0, window_s=1.0, window_steps=2, most_s=120.0, share=0.5)


def needs(cores: float) -> Curve:
    """Return a rate that is proportional to the cores per GPU, up to this number."""
    return lambda given: 20.0 * min(given, cores)


class Profiled(Planned):
    """A node of 4 GPUs and 16 cores whose jobs report their steps every second."""

    def __init__(self, policy: str = "las+predictor", noise: float = 0.02) -> None:
        super().__init__(policy=policy)
        self.policy = live_policy_named(policy)
        self.measured = RateRegistry(PACE)
        self.curves: dict[int, Curve] = {}
        self.signatures: dict[int, int] = {}
        self.steps: dict[int, float] = {}
        self.noise, self.random = noise, np.random.default_rng(7)
        self.changes: list[tuple[int, int]] = []
        self.reasons: list[str] = []

    def add(self, curve: Curve, spec: JobSpec | None = None, signature: int | None = None) -> int:
        number = self.submit(spec or job_of(1))
        self.curves[number], self.signatures[number] = curve, number if signature is None else signature
        self.steps[number] = 0.0
        self.plan()
        self.runs(number)
        self.plan()
        return number

    def cores(self, number: int) -> float:
        """Return the cores per GPU."""
        claims = self.state.gangs[self.job(number).epoch].claims
        return min(sum(claim.millicores) / claim.device_mask.bit_count() for claim in claims) / 1000

    def plan(self) -> None:
        table = LiveTable()
        for job in self.state.jobs.values():
            gang = self.state.gangs.get(job.epoch)
            table.put(job, gang)
            self.measured.put(job, gang, self.signatures.get(job.number, 0), self.now)
        view = self.state.view.copy()
        found = plan_by(context_of(self.policy, table, CapacityIndex(view), self.now, rates=self.measured))
        if found.changes:
            tuned = [change for change in found.changes if change.kind == "CORES"]
            self.changes += [(change.number, sum(change.claims[0].millicores)) for change in tuned]
            self.reasons += [self.measured.describe_cores(change.number) for change in tuned]
            answer = self.step(ProposePlan(found.changes))
            assert isinstance(answer, PlanAnswer)
            assert all(verdict.approved for verdict in answer.verdicts), answer
            for change in found.changes:
                job = self.job(change.number)
                gang = self.state.gangs.get(job.epoch)
                self.measured.put(job, gang, self.signatures.get(job.number, 0), self.now)

    def spend(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1.0
            for number, curve in self.curves.items():
                rate = curve(self.cores(number)) * (1.0 + self.noise * self.random.standard_normal())
                self.steps[number] += max(rate, 0.0)
                self.measured.record(number, ProgressReport(int(self.steps[number]), self.now), self.now)
            ran = {number: self.now - self.job(number).running_since for number in self.curves}
            if self.measured.update_trials(self.state.view, ran, self.now):
                self.plan()


def test_cores_go_from_jobs_that_cannot_use_them_to_jobs_that_can() -> None:
    drive = Profiled()
    idle, hungry, modest, fair = (drive.add(needs(cores)) for cores in (1, 7, 2, 4))
    assert [drive.cores(number) for number in (idle, hungry, modest, fair)] == [4, 4, 4, 4]
    drive.spend(900)
    # The other jobs leave at least the seven cores that the hungry one can use.
    assert [drive.cores(number) for number in (idle, modest, fair)] == [1, 2, 4]
    assert drive.cores(hungry) >= 7
    assert any("a trial of 1 core for each GPU; steps/s by cores for each GPU: " in reason for reason in drive.reasons)
    # Complete profiles need no more trials.
    changes = len(drive.changes)
    drive.spend(300)
    assert drive.changes[changes:] == []


def test_more_cores_that_gain_nothing_are_taken_back() -> None:
    drive = Profiled()
    number = drive.add(needs(4))
    assert drive.cores(number) == 4
    drive.spend(400)
    tried = [millicores for changed, millicores in drive.changes if changed == number]
    assert max(tried) == 16_000, "all free cores were tried"
    assert drive.cores(number) == pytest.approx(4, abs=1)
    rate = drive.curves[number](drive.cores(number))
    assert rate >= 0.95 * needs(4)(16)


def test_a_job_gets_fewer_cores_than_it_was_measured_with_only_for_a_trial() -> None:
    drive = Profiled()
    number = drive.add(lambda cores: 20.0 if cores >= 3 else 2.0 * cores)
    least = 4.0
    for _ in range(300):
        drive.spend(1)
        cores = drive.cores(number)
        if cores < least:
            assert number in drive.measured.trials
        if number not in drive.measured.trials:
            least = min([point.cores for point in drive.measured._jobs[number].cores.profile.own], default=4.0)
    assert drive.cores(number) == pytest.approx(3, abs=1)


def test_no_trial_waits_for_cores_that_only_another_trial_had_freed() -> None:
    drive = Profiled()
    numbers = [drive.add(needs(cores)) for cores in (12, 1, 12, 1)]
    waited_s = dict.fromkeys(numbers, 0)
    for _ in range(600):
        drive.spend(1)
        for number in numbers:
            tried = drive.measured.trials.get(number)
            waited_s[number] += tried is not None and tried != 1000 * drive.cores(number)
    assert max(waited_s.values()) <= 12, waited_s
    assert [drive.cores(number) for number in numbers[1::2]] == [1, 1]


def test_the_trials_of_a_job_cost_at_most_a_fiftieth_of_an_hour_however_slow_its_steps_are() -> None:
    def slow(cores: float) -> float:
        return 0.4 * min(cores, 12.0) / 12.0

    drive = Profiled(noise=0.0)
    number = drive.add(slow)
    drive.spend(1_200)
    (curve,) = drive.measured.curve_news(is_all=True)
    assert curve.number == number
    assert curve.lost_s <= 0.02 * 3600.0
    assert drive.cores(number) >= 4


def test_memory_of_a_running_job_stays_where_the_profile_covers_cores_alone() -> None:
    drive = Profiled("las+bind")
    number = drive.add(needs(4), job_of(1, 0))
    (claim,) = drive.state.gangs[drive.job(number).epoch].claims
    # Less free memory, as after an arena was set aside, lowers the share of every job.
    view = drive.state.view.copy()
    view.take(structs.replace(claim, device_mask=0, millicores=(0, 0), memory_bytes=8 * GIB))
    table = LiveTable()
    table.put(drive.job(number), drive.state.gangs[drive.job(number).epoch])
    assert (
        plan_by(context_of(drive.policy, table, CapacityIndex(view), drive.now, order=drive.policy.order)).changes == ()
    )


@pytest.mark.parametrize("policy", ["las+predictor", "ganger"])
def test_trials_of_cores_take_no_memory_from_a_running_job_that_uses_little_of_it(policy: str) -> None:
    drive = Profiled(policy)
    (role,) = job_of(1, 0).roles
    unnamed = structs.replace(role, shape=structs.replace(role.shape, millicores=0))
    number = drive.add(needs(8), structs.replace(job_of(1, 0), roles=(unnamed,)))
    (before,) = drive.state.gangs[drive.job(number).epoch].claims
    drive.state.put_job(structs.replace(drive.job(number), working_set_bytes=GIB // 8))
    assert 0 < drive.job(number).task_memory_bytes < before.memory_bytes
    drive.spend(400)
    assert len(drive.changes) > 2, "cores were tried"
    (after,) = drive.state.gangs[drive.job(number).epoch].claims
    assert after.memory_bytes == before.memory_bytes


def test_cores_that_a_user_sets_hold_until_the_user_leaves_them_to_the_scheduler_again() -> None:
    drive = Profiled("ganger")
    (role,) = job_of(1, 0).roles
    unnamed = structs.replace(role, shape=structs.replace(role.shape, millicores=0))
    number = drive.add(needs(8), structs.replace(job_of(1, 0), roles=(unnamed,)))
    drive.spend(100)
    drive.step(RetuneJob(number, 2_000, user="ann"))
    planned = len(drive.changes)
    drive.spend(300)
    assert drive.cores(number) == 2
    assert drive.changes[planned:] == []
    drive.step(RetuneJob(number, 0, user="ann"))
    drive.spend(400)
    assert drive.cores(number) > 2


def test_the_next_job_of_a_series_starts_with_the_curve_of_the_last_one() -> None:
    drive = Profiled()
    drive.add(needs(1), signature=7)
    drive.spend(300)
    second = drive.add(lambda cores: 3.0 * needs(1)(cores), signature=7)
    assert drive.cores(second) == 1
    stranger = drive.add(needs(1), signature=8)
    assert drive.cores(stranger) == 4
    drive.spend(200)
    # One probe checks whether the inherited curve holds, then the cores go back.
    changes = [millicores for number, millicores in drive.changes if number == second]
    assert len(changes) == 2
    assert (changes[0] > 1_000, changes[1]) == (True, 1_000)


def test_a_job_that_differs_from_its_series_gets_a_curve_of_its_own() -> None:
    drive = Profiled()
    drive.add(needs(1), signature=7)
    drive.spend(300)
    other = drive.add(needs(6), signature=7)
    assert drive.cores(other) == 1
    drive.spend(500)
    assert drive.cores(other) >= 6


@pytest.mark.parametrize("kind", ["not preemptible", "opaque"])
def test_jobs_that_are_not_preemptible_or_report_no_steps_get_no_trials(kind: str) -> None:
    drive = Profiled()
    spec = job_of(1)
    if kind == "not preemptible":
        number = drive.add(needs(1), structs.replace(spec, preemptible=False))
    else:
        number = drive.add(needs(1), spec)
        opaque = structs.replace(drive.job(number), capabilities=Capabilities(pause=True, known=True))
        drive.state.put_job(opaque)
        drive.plan()
    drive.spend(200)
    assert drive.changes == []


def test_a_job_whose_rates_change_while_it_runs_is_measured_anew() -> None:
    drive = Profiled()
    number = drive.add(needs(1))
    drive.spend(300)
    assert drive.cores(number) == 1
    # In its next phase the job is slower and uses more cores.
    drive.curves[number] = lambda cores: 4.0 * min(cores, 3.0)
    drive.spend(900)
    assert drive.cores(number) == pytest.approx(3, abs=1)


def test_trials_take_no_more_than_their_share_of_running_time() -> None:
    drive = Profiled()
    drive.measured = RateRegistry(replace(PACE, share=0.01))
    number = drive.add(lambda cores: 10.0 * math.log2(1.0 + cores))
    slow = 0
    for _ in range(600):
        drive.spend(1)
        slow += number in drive.measured.trials
    # Its budget is that of an hour, and the last trial may have begun just before it was used up.
    assert 0 < slow <= 0.01 * 3600 + PACE.most_s


def test_without_spare_cores_every_job_keeps_its_share_until_it_is_measured() -> None:
    for tuning in ("predictor", "synergy-greedy", "synergy-tune", "synergy-opt", "shared"):
        drive = Profiled(f"las+{tuning}")
        numbers = [drive.add(needs(4)) for _ in range(4)]
        assert [drive.cores(number) for number in numbers] == [4] * 4, tuning


@pytest.mark.parametrize("tuning", ["synergy-tune", "synergy-greedy", "exact"])
def test_synergy_tunes_by_measured_profiles(tuning: str) -> None:
    drive = Profiled(f"las+{tuning}")
    idle, hungry = drive.add(needs(1)), drive.add(needs(7))
    drive.spend(600)
    assert drive.curves[idle](drive.cores(idle)) >= 0.95 * 20
    assert drive.cores(hungry) >= 6.5


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 2), st.floats(0.5, 12.0), st.sampled_from([1, 1, 2])), min_size=1, max_size=4),
    st.sampled_from(["predictor", "synergy-tune", "synergy-greedy"]),
    st.floats(0.0, 0.1),
)
def test_all_changes_fit_and_without_profiles_every_job_has_its_share_again(
    jobs: list[tuple[int, float, int]], tuning: str, noise: float
) -> None:
    drive = Profiled(f"las+{tuning}", noise)
    started = []
    for gpus, cores, signature in jobs:
        if sum(drive.job(number).spec.gpus for number in started) + gpus <= 4:
            started.append(drive.add(needs(cores), job_of(gpus), signature))
    # `plan` asserts that every change is approved, `Drive.step` that the state stays consistent.
    drive.spend(300)
    drive.measured = RateRegistry(replace(PACE, share=0.0))
    drive.plan()
    assert [drive.cores(number) for number in started] == [4.0] * len(started)


@pytest.mark.parametrize(("kept_on", "starts"), [((), True), (("n1",), False), (("n2",), True)])
def test_what_a_job_gives_back_on_a_node_with_a_kept_place_starts_no_other_job(
    kept_on: tuple[str, ...], starts: bool
) -> None:
    drive = Planned()
    number, newcomer = drive.running(job_of(1)), drive.submit(job_of(1))
    view, job = drive.state.view.copy(), drive.job(number)
    held = drive.state.gangs[job.epoch].claims
    # Nothing but devices and memory is free beside it, as where the rest is kept.
    view.take(Claim("n1", 0, view.millicores[0], 0))
    fewer = CoresWish(job, held, ((500, held[0].memory_bytes),), ((0, 0),))
    start = CoresWish(
        drive.job(newcomer), (Claim("n1", 0, (), 0, tasks=(1,)),), ((1_000, GIB),), ((1, GIB),), gpus=(1,)
    )
    found = fitted(view, [fewer], [start], kept_on)
    assert [change.kind for change in found.changes] == ["CORES"] + ["START"] * starts
    assert found.held_back is not starts
