"""Trials of memory, planned second by second: caches are held back as far as a job's budget allows, and what its rate
shows is used at the next start of its series."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from core.drive import GIB, job_of
from ganger_master.core.job_model import WHOLE_SHARE
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.plan_changes import CoresCurve
from ganger_master.estimators.cores_and_memory import CpuPoint, enough_memory, next_memory
from ganger_master.planner.core_profiles import CoreProfile, curves_of
from ganger_master.planner.cores_curves import explain_memory
from ganger_master.planner.rate_registry import ProgressReport
from ganger_master.planner.resource_trials import MemorySample
from ganger_master.policies.tunings import TuningNodes, demands, known_gangs, pieces, rates
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from planner.test_resource_trials import Profiled, needs

# Part of the full rate, by bytes of memory.
ByMemory = Callable[[float], float]


def points(*pairs: tuple[float, float]) -> tuple[CpuPoint, ...]:
    """Return points of (GiB, steps/s), by memory."""
    return tuple([CpuPoint(1.0, rate, gib * GIB) for gib, rate in pairs])


@pytest.mark.parametrize(
    ("measured", "used", "least", "affordable", "tried"),
    [
        ((), 16, 1, 64, 1),  # the least first
        ((), 16, 1, 4, 12),  # as far as the budget goes
        (((12, 20), (16, 20)), 16, 1, 4, 8),  # what cost nothing is no risk any more
        (((1, 20), (16, 20)), 16, 1, 64, None),
        (((1, 5), (16, 20)), 16, 1, 64, 8.5),  # the middle
        (((1, 5), (8.5, 20), (16, 20)), 16, 1, 64, 4.75),
        (((1, 5), (8.5, 6), (16, 20)), 16, 1, 64, 12.25),
        (((15, 5), (16, 20)), 16, 1, 64, None),  # it needs all of it
        ((), 16, 1, 0.5, None),  # nothing is affordable
        ((), 16, 15.5, 64, None),  # nearly all is in use by itself
        ((), 0, 0, 64, None),
        (((12, 20), (64, 20)), 4, 1, 64, 1),  # what it does not use it does not need
    ],
)
def test_the_next_memory_to_try(
    measured: tuple[tuple[float, float], ...], used: float, least: float, affordable: float, tried: float | None
) -> None:
    found = next_memory(points(*measured), used * GIB, least * GIB, affordable * GIB)
    assert found == (None if tried is None else tried * GIB)


@given(st.floats(0.1, 63.0), st.floats(0.0, 0.9))
def test_a_job_whose_caches_thrash_is_measured_within_a_sixteenth_in_few_trials(needed: float, slow: float) -> None:
    measured = points((64, 10.0))
    for _ in range(8):
        tried = next_memory(measured, 64 * GIB, GIB / 16, math.inf)
        if tried is None:
            break
        rate = 10.0 if tried >= needed * GIB else 10.0 * slow
        measured = tuple(sorted([*measured, CpuPoint(1.0, rate, tried)], key=lambda point: point.memory_bytes))
    else:
        pytest.fail("more than eight trials")
    assert needed * GIB <= enough_memory(measured) <= max(GIB / 16, (needed + 64 / 8) * GIB)


class Squeezed(Profiled):
    """Jobs that report their memory; a node that carries trials out a second later, if it can."""

    def __init__(self, policy: str = "las+synergy-tune", can_hold: bool = True) -> None:
        super().__init__(policy)
        self.by_memory: dict[int, ByMemory] = {}
        self.used: dict[int, float] = {}
        self.curve_of: dict[int, CoresCurve] = {}
        self.can_hold, self.is_deaf, self.tried = can_hold, False, dict[int, list[int]]()
        self.slow_s = dict[int, float]()
        self.least = GIB // 4

    def put(
        self, by_memory: ByMemory, used_gib: float, spec: JobSpec | None = None, signature: int | None = None
    ) -> int:
        """Start a job with one core's worth of input pipeline, which uses so much memory with its caches."""
        (role,) = job_of(1, 0).roles
        unnamed = structs.replace(role, shape=structs.replace(role.shape, millicores=0))
        number = self.add(needs(1), spec or structs.replace(job_of(1, 0), roles=(unnamed,)), signature)
        self.by_memory[number], self.used[number] = by_memory, used_gib * GIB
        self.slow_s[number] = 0.0
        return number

    def memory(self, number: int) -> int:
        """Return its claimed memory."""
        return sum([claim.memory_bytes for claim in self.state.gangs[self.job(number).epoch].claims])

    def spend(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1.0
            for number, curve in self.curves.items():
                asked = self.curve_of[number].trial_memory_bytes if number in self.curve_of else 0
                held = max(asked, GIB // 4) if asked and not self.is_deaf else 0
                if held and (number not in self.tried or self.tried[number][-1] != held):
                    self.tried.setdefault(number, []).append(held)
                part = self.by_memory[number](held or self.memory(number))
                self.slow_s[number] += 1.0 - part
                self.steps[number] += curve(self.cores(number)) * part * (1.0 + 0.005 * self.random.standard_normal())
                least = self.least if self.can_hold else 0
                used = min(self.used[number], self.memory(number))
                sample = MemorySample(int(used), least, held)
                report = ProgressReport(int(1000 * self.steps[number]), self.now, memory=sample)
                self.measured.record(number, report, self.now)
            ran = {number: self.now - self.job(number).running_since for number in self.curves}
            if self.measured.update_trials(self.state.view, ran, self.now):
                self.plan()
            for one in self.measured.curve_news():
                self.curve_of[one.number] = self.state.cores_curves[one.number] = one


def flat(memory: float) -> float:
    return 1.0


def thrashes_below(gib: float) -> ByMemory:
    return lambda memory: 1.0 if memory >= gib * GIB else 0.25


def test_a_job_that_reads_no_file_again_loses_nothing_and_is_tried_once() -> None:
    drive = Squeezed()
    number = drive.put(flat, used_gib=6)
    held = drive.memory(number)
    drive.spend(400)
    assert drive.tried == {number: [GIB // 4]}
    curve = drive.curve_of[number]
    assert [point.memory_bytes for point in curve.memory_points] == [GIB // 4, held]
    assert (curve.enough_memory_bytes, curve.trial_memory_bytes) == (GIB // 4, 0)
    assert drive.memory(number) == held, "no memory is taken from a running job"
    assert "256M are enough" in explain_memory(drive.state, number)


def test_a_job_whose_caches_thrash_is_measured_within_its_budget_and_keeps_its_memory() -> None:
    drive = Squeezed()
    number = drive.put(thrashes_below(3), used_gib=4)
    held = drive.memory(number)
    drive.spend(2_000)
    curve = drive.curve_of[number]
    slow = [point for point in curve.memory_points if point.memory_bytes < curve.enough_memory_bytes]
    assert 3 * GIB <= curve.enough_memory_bytes <= 3.6 * GIB
    assert max(point.memory_bytes for point in slow) >= 2.4 * GIB
    assert all(point.rate == pytest.approx(0.25 * curve.memory_points[-1].rate, rel=0.05) for point in slow)
    assert drive.slow_s[number] <= curve.lost_s <= 0.02 * 3600
    assert drive.memory(number) == held
    assert len(drive.tried[number]) <= 6, "each amount once"
    # Nothing more is tried: the curve is complete.
    before = list(drive.tried[number])
    drive.spend(1_000)
    assert drive.tried[number] == before


def test_a_cache_that_would_take_long_to_fill_again_is_emptied_bit_by_bit() -> None:
    drive = Squeezed()
    number = drive.put(thrashes_below(9), used_gib=14)
    drive.spend(1_000)
    # 72 s of 100 MB/s: what the first hour may cost.
    assert drive.tried[number][0] == pytest.approx(14 * GIB - 7.2e9, rel=0.01)
    assert drive.curve_of[number].lost_s <= 0.02 * 3600 + 20


@pytest.mark.parametrize("policy", ["las+synergy-tune", "ganger"])
def test_the_next_job_of_a_series_takes_what_was_enough_with_a_margin_and_is_not_tried(policy: str) -> None:
    drive = Squeezed(policy)
    first = drive.put(flat, used_gib=6, signature=7)
    whole = drive.memory(first)
    drive.spend(400)
    second = drive.put(flat, used_gib=6, signature=7)
    assert drive.memory(second) == GIB // 4 * 5 // 4 + GIB < whole
    stranger = drive.put(flat, used_gib=6, signature=8)
    assert drive.memory(stranger) > 7 * GIB, "its share, or half of it where jobs are co-located"
    drive.spend(400)
    assert second not in drive.tried
    assert drive.curve_of[second].memory_points[0].is_inherited
    assert drive.memory(second) == GIB // 4 * 5 // 4 + GIB


def test_a_job_that_came_to_need_more_than_it_was_tried_with_is_believed_to_need_that() -> None:
    drive = Squeezed()
    first = drive.put(flat, used_gib=6, signature=7)
    drive.spend(400)
    assert drive.curve_of[first].enough_memory_bytes == GIB // 4
    drive.least = 2 * GIB
    drive.spend(2)
    assert drive.curve_of[first].enough_memory_bytes == 2 * GIB
    # It creeps on, and that is no news.
    drive.curve_of.clear()
    drive.least = 2 * GIB + GIB // 16
    drive.spend(5)
    assert drive.curve_of == {}
    assert drive.memory(drive.put(flat, used_gib=6, signature=7)) == 2 * GIB * 5 // 4 + GIB


def test_a_tuning_weighs_jobs_with_a_curve_of_memory_beside_jobs_without_one() -> None:
    profile = CoreProfile((CpuPoint(1.0, 20.0), CpuPoint(2.0, 20.0)))
    shown = profile.with_memory(CpuPoint(1.0, 5.0, 2.0 * GIB), 16.0 * GIB)
    shown = shown.with_memory(CpuPoint(1.0, 20.0, 4.0 * GIB), 16.0 * GIB)
    known = curves_of([(1, shown, shown.limits(0.0)), (2, profile, profile.limits(0.0))])
    assert [known.knows_memory_of(number) for number in (1, 2, 3)] == [True, False, False]
    nodes = TuningNodes(np.array([4]), np.array([16.0]), np.array([64.0 * GIB]))
    numbers = np.array([1, 2, 3])
    gangs = known_gangs(known, numbers, np.ones(3, np.int64), np.zeros(3, bool), nodes)
    found = demands(gangs, nodes)
    assert (found.memory_bytes / GIB).tolist() == [4 * 5 / 4 + 1, 16, 16]
    assert rates(gangs, pieces([0], [0], [1]).given(np.array([4.0]), np.array([3.6 * GIB])))[0] == 5.0
    # A job that holds more than it was shown to need keeps it: to the tuning it is one without a curve.
    assert shown.limits(16.0 * GIB) == ()


@pytest.mark.parametrize("kind", ["a node that cannot", "named memory", "ran out of less", "not preemptible"])
def test_jobs_that_are_not_tried_keep_their_share(kind: str) -> None:
    drive = Squeezed(can_hold=kind != "a node that cannot")
    spec = job_of(1, 4 * GIB if kind == "named memory" else 0)
    number = drive.put(flat, 3, structs.replace(spec, preemptible=kind != "not preemptible"))
    if kind == "ran out of less":
        drive.state.put_job(structs.replace(drive.job(number), working_set_bytes=WHOLE_SHARE))
        drive.plan()
    held = drive.memory(number)
    drive.spend(300)
    assert drive.tried == {}
    assert not any(curve.memory_points for curve in drive.curve_of.values())
    assert drive.memory(number) == held
    text = explain_memory(drive.state, number)
    assert "no control group can hold it back" in text or "its user asked for" in text


def test_a_node_that_does_not_carry_out_a_trial_is_not_asked_again() -> None:
    drive = Squeezed()
    number, asked_s = drive.put(flat, used_gib=6), 0
    drive.is_deaf = True
    for _ in range(400):
        drive.spend(1)
        asked_s += drive.curve_of[number].trial_memory_bytes > 0 if number in drive.curve_of else 0
    assert 0 < asked_s <= 12
    assert drive.curve_of[number].memory_points == ()
