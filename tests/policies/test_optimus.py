"""Optimus: how many tasks."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from estimators.published import server_points
from ganger_master.estimators.server_speed import ServerSpeed, UpdateMode, fit_server_speed
from ganger_master.estimators.speed import AllReduceModel
from ganger_master.policies.optimus_sizes import YOUNG, ElasticJobs, allocated, allreduce_speeds, growing, server_speeds
from ganger_master.policies.orders import Floats
from hypothesis import given
from hypothesis import strategies as st

# Optimus's published coefficients (EuroSys 2018, table of section 3.2).
SYNCHRONOUS = ServerSpeed(UpdateMode.SYNCHRONOUS, (1.02, 2.78, 4.92, 0.0, 0.02, 0.0), batch=32.0)
ASYNCHRONOUS = ServerSpeed(UpdateMode.ASYNCHRONOUS, (2.83, 3.92, 0.0, 0.11))

quarters = st.integers(0, 12).map(lambda count: count / 4)
synchronous = st.builds(
    ServerSpeed,
    st.just(UpdateMode.SYNCHRONOUS),
    st.tuples(quarters, quarters.map(lambda value: value + 0.25), *[quarters] * 4),
    st.sampled_from([1.0, 32.0]),
)
asynchronous = st.builds(
    ServerSpeed,
    st.just(UpdateMode.ASYNCHRONOUS),
    st.tuples(quarters.map(lambda value: value + 0.25), *[quarters] * 3),
)


@st.composite
def rounds(draw: st.DrawFn) -> tuple[ElasticJobs, Floats]:
    """Jobs over parameter servers, and what there is of two or three resources."""
    models = draw(st.lists(synchronous | asynchronous, max_size=5))
    count, resources = len(models), draw(st.integers(1, 3))
    amounts = st.integers(0, 3).map(float)
    shapes = draw(st.lists(amounts, min_size=count * 2 * resources, max_size=count * 2 * resources))
    jobs = growing(
        draw(st.lists(st.sampled_from([math.nan, 0.0, 1.0, 10.0, 1000.0]), min_size=count, max_size=count)),
        server_speeds(models),
        # something of the first resource for each task, or growth knows no end
        np.array(shapes).reshape(count, 2, resources) + np.eye(1, resources)[0],
        draw(st.lists(st.booleans(), min_size=count, max_size=count)),
        np.array(draw(st.lists(st.integers(0, 12), min_size=count * 2, max_size=count * 2)), int).reshape(count, 2),
        np.array(draw(st.lists(st.integers(1, 4), min_size=count * 2, max_size=count * 2)), int).reshape(count, 2),
    )
    capacity = draw(st.lists(st.integers(0, 60).map(float), min_size=resources, max_size=resources))
    return jobs, np.array(capacity)


def naive_allocated(jobs: ElasticJobs, capacity: Floats, least_gain: float) -> list[list[int]]:
    """One task at a time: every job proposes its next task, and the one that gains most receives it."""
    free = capacity * (1 + 1e-9)
    kinds = jobs.shapes.shape[1]
    moves = [[int(kind == other) for other in range(kinds)] for kind in range(kinds)]
    counts = [[0] * kinds for _ in range(len(jobs))]
    for job in range(len(jobs)):
        least = jobs.least[job].tolist()
        need = sum(count * shape for count, shape in zip(least, jobs.shapes[job], strict=True))
        if np.all(need <= free) and np.all(jobs.most[job] >= least):
            free = free - need
            counts[job] = least

    def seconds(job: int, count: list[int]) -> float:
        return float(jobs.remaining_steps[job] / jobs.speed(np.array([job]), np.array([count]))[0])

    def divisor(job: int, kind: int) -> float:
        shape = jobs.shapes[job, kind]
        parts = [wanted / max(there, 1e-9) for wanted, there in zip(shape, capacity, strict=True)]
        return max(float(shape[parts.index(max(parts))]), 1e-9)

    closed: set[tuple[int, int]] = set()

    def wish(job: int) -> tuple[float, int] | None:
        count = counts[job]
        best: tuple[float, int] | None = None
        if not (min(count) > 0 and jobs.remaining_steps[job] > 0):
            return None
        for number, move in enumerate(moves):
            after = [have + more for have, more in zip(count, move, strict=True)]
            if (job, number) in closed or any(have > most for have, most in zip(after, jobs.most[job], strict=True)):
                continue
            now, then = seconds(job, count), seconds(job, after)
            saved = now - then
            gain = saved / sum(divisor(job, kind) * move[kind] for kind in range(kinds))
            gain *= YOUNG if jobs.is_young[job] else 1.0
            if saved > 0 and saved >= least_gain * sum(move) * now and (best is None or gain > best[0]):
                best = (gain, number)
        return best

    wishes = [wish(job) for job in range(len(jobs))]
    while True:
        asking = [(-found[0], job, found[1]) for job, found in enumerate(wishes) if found is not None]
        if not asking:
            return counts
        _, job, number = min(asking)
        need = sum(jobs.shapes[job, kind] * moves[number][kind] for kind in range(kinds))
        if np.all(need <= free):
            free = free - need
            counts[job] = [have + more for have, more in zip(counts[job], moves[number], strict=True)]
        else:
            closed.add((job, number))
        wishes[job] = wish(job)


@given(rounds(), st.sampled_from([0.0, 0.01, 0.1]))
def test_tasks_are_those_added_one_by_one(case: tuple[ElasticJobs, Floats], least_gain: float) -> None:
    jobs, capacity = case
    found = allocated(jobs, capacity, least_gain)
    assert found.tolist() == naive_allocated(jobs, capacity, least_gain)
    assert np.all(np.einsum("jk,jkr->r", found, jobs.shapes) <= capacity * (1 + 1e-6) + 1e-9)


def test_many_jobs_looked_far_ahead_get_what_they_get_one_by_one() -> None:
    """Enough jobs for the long looks, and few limits, so that looks end before paths do."""
    random = np.random.default_rng(3)
    models = [
        ServerSpeed(UpdateMode.SYNCHRONOUS, (float(a), 0.1, float(c), 0.0, 0.001, 0.0), batch=64.0)
        for a, c in random.uniform(0.1, 3.0, (70, 2))
    ]
    steps = random.lognormal(5, 3, 70)
    shapes = np.tile(np.array([[3.0, 0.0], [2.0, 1.0]]), (70, 1, 1))
    jobs = growing(steps, server_speeds(models), shapes, random.random(70) < 0.3)
    capacity = np.array([2500.0, 500.0])
    found = allocated(jobs, capacity, 0.0005)
    assert found.max() > 64
    assert found.tolist() == naive_allocated(jobs, capacity, 0.0005)


@given(st.lists(synchronous | asynchronous, min_size=1, max_size=4), st.integers(1, 9), st.integers(1, 9))
def test_speeds_of_many_jobs_are_those_of_each(models: list[ServerSpeed], servers: int, workers: int) -> None:
    jobs = np.arange(len(models))
    found = server_speeds(models)(jobs, np.tile([servers, workers], (len(models), 1)))
    assert found.tolist() == pytest.approx([model.steps_per_second(servers, workers) for model in models])


def test_all_reduce_speeds_of_many_jobs_are_those_of_each() -> None:
    models = [
        AllReduceModel(0.1, 0.01, 0.02, 0.001, 0.2, 0.002, 2.0),
        AllReduceModel(0.3, 0.001, 0.1, 0.0, 0.1, 0.0, 1.0),
    ]
    for gpus in range(1, 20):
        found = allreduce_speeds(models, [128.0, 256.0], 4)(np.array([0, 1]), np.array([[gpus], [gpus]]))
        expected = [
            1.0 / model.step_s(gpus, math.ceil(gpus / 4), batch / gpus)
            for model, batch in zip(models, (128.0, 256.0), strict=True)
        ]
        assert found.tolist() == pytest.approx(expected)


def test_all_reduce_jobs_grow_gpu_by_gpu_as_in_polluxs_optimus() -> None:
    models = [
        AllReduceModel(0.1, 0.01, 0.02, 0.001, 0.2, 0.002, 2.0),
        AllReduceModel(0.01, 0.002, 0.1, 0.0, 0.9, 0.0, 1.0),
    ]
    jobs = growing([1000.0, 1000.0], allreduce_speeds(models, [128.0, 256.0], 4), np.ones((2, 1, 1)))
    found = allocated(jobs, np.array([16.0]))
    assert found.tolist() == naive_allocated(jobs, np.array([16.0]), 0.01)
    # the second is slower on two nodes than on one, and one GPU more never gets it across that
    assert found[1, 0] == 4
    assert found[0, 0] > 4


def test_a_job_at_its_beginning_yields_to_its_twin() -> None:
    shapes = np.ones((2, 2, 1))
    for young, tasks in (([True, False], [2, 3]), ([False, False], [3, 2])):
        jobs = growing([100.0, 100.0], server_speeds([ASYNCHRONOUS] * 2), shapes, young)
        assert allocated(jobs, np.array([5.0])).sum(axis=1).tolist() == tasks


def test_what_does_not_fit_ends_that_growth_only() -> None:
    """The public code stops at the first misfit: workers need GPUs, of which there are two; servers do not."""
    shapes = np.tile(np.array([[1.0, 0.0], [1.0, 1.0]]), (2, 1, 1))
    jobs = growing([1e4, 1e2], server_speeds([SYNCHRONOUS] * 2), shapes)
    found = allocated(jobs, np.array([10.0, 2.0]))
    assert found[:, 1].tolist() == [1, 1]
    assert found[0, 0] > 1


def test_no_job_starves_and_unknown_jobs_keep_one_task_of_each_kind() -> None:
    jobs = growing([1e9, math.nan, 1.0], server_speeds([SYNCHRONOUS] * 3), np.ones((3, 2, 1)))
    assert allocated(jobs, np.array([4.0])).tolist() == [[1, 1], [1, 1], [0, 0]]
    assert allocated(jobs, np.array([60.0]))[1].tolist() == [1, 1]


def test_shapes_that_are_not_by_job_are_refused() -> None:
    with pytest.raises(ValueError, match="must be"):
        growing([1.0], server_speeds([SYNCHRONOUS]), np.ones((2, 2, 1)))


def test_a_least_gain_ends_dozens_of_servers_for_a_few_percent() -> None:
    """On the measured speeds of ResNet-50 the rule without a least gain goes on for a fifth of a step's time at most,
    with twice the tasks and more."""
    batch, points = server_points()["resnet-50"]
    model = fit_server_speed(points, UpdateMode.SYNCHRONOUS, batch)
    assert model is not None
    jobs = growing([1e5], server_speeds([model]), np.array([[[3.0, 0.0], [2.0, 1.0]]]))
    capacity = np.array([1000.0, 100.0])
    greedy, bounded = allocated(jobs, capacity, 0.0)[0].tolist(), allocated(jobs, capacity)[0].tolist()
    assert sum(greedy) >= 2 * sum(bounded)
    assert model.steps_per_second(*bounded) > 0.8 * model.steps_per_second(*greedy)


def test_the_sizes_of_four_thousand_jobs_on_sixteen_thousand_servers_take_a_second() -> None:
    """B4: 4,000 jobs of 100,000 tasks; 5 s in the paper. Seen on a loaded machine: 0.8 CPU seconds."""
    random = np.random.default_rng(0)
    models = [
        ServerSpeed(model.mode, tuple(t * factor for t in model.coefficients), model.batch)
        for model, factor in zip([SYNCHRONOUS, ASYNCHRONOUS] * 2000, random.lognormal(0, 0.5, 4000), strict=True)
    ]
    shapes = np.tile(np.array([[2.0, 0.0, 9.0], [2.0, 1.0, 8.0]]), (4000, 1, 1))
    free = np.tile([16.0, 4.0, 80.0], (16_000, 1))
    jobs = growing(random.uniform(1e3, 1e5, 4000), server_speeds(models), shapes)
    started = time.process_time()
    counts = allocated(jobs, free.sum(axis=0))
    # The paper takes 5 s; how much less is for `ganger reproduce` and the benchmarks to say, on a quiet machine.
    assert time.process_time() - started < 5.0
    assert int(counts.sum()) > 100_000
