"""Elastic jobs in a replayed trace: how fast they go with how many GPUs, and what Optimus makes of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from faultsim.state_invariants import violations
from ganger_master.planner.plan_pace import INSTANT_S
from ganger_master.simulator.inputs import ReplayOptions, SwitchCosts
from ganger_master.simulator.measurement_model import Losses
from ganger_master.simulator.run import _Replay, simulate
from ganger_master.simulator.traces.servers import servers_from_flags
from ganger_master.simulator.traces.workload import Workload, elasticflow_speeds, workload
from ganger_master.simulator.true_rates import Scaling
from hypothesis import given, settings
from hypothesis import strategies as some

SERVERS = servers_from_flags(nodes=2, gpus_per_node=8)
OPTIONS = ReplayOptions(costs=SwitchCosts(start_s=2.0, suspend_s=1.5, resume_s=1.0), plan_every_s=20.0, profile_s=10.0)


def scaling(model: str, gpus: int, batch: float = np.nan) -> Scaling:
    jobs = workload(["0"], [0.0], [gpus], [1.0], numbers={"batch_size": [batch]}, labels={"model": [model]})
    return Scaling(jobs, seed=0)


@pytest.mark.parametrize(("model", "batch"), [("bert", 64), ("resnet50", 256), ("deepspeech2", 32)])
def test_of_a_published_model_rates_are_what_was_measured(model: str, batch: int) -> None:
    points = elasticflow_speeds()[model][batch]
    found = scaling(model, 4, batch)
    for gpus, speed in points.items():
        assert found.rate(0, [gpus]) == pytest.approx(speed / points[4])
    assert found.rate(0, [4]) == 1.0
    assert found.rate(0, [2]) < found.rate(0, [3]) < found.rate(0, [4])


def test_the_nearest_batch_counts() -> None:
    assert scaling("ResNet50", 1, 300.0).rate(0, [8]) == scaling("resnet50", 1, 256.0).rate(0, [8])
    assert scaling("ResNet50", 1, 300.0).rate(0, [8]) > scaling("resnet50", 1, 64.0).rate(0, [8])


def test_all_jobs_of_an_unpublished_model_scale_alike_by_a_published_curve() -> None:
    names = [str(job) for job in range(20)]
    models = [f"model-{job % 10}" for job in range(20)]
    jobs = workload(names, np.zeros(20), np.ones(20, int), np.ones(20), labels={"model": models})
    found = Scaling(jobs, 0)
    rates = [found.rate(job, [4]) for job in range(20)]
    assert rates[:10] == rates[10:]
    measured = {speeds[4] / speeds[1] for batches in elasticflow_speeds().values() for speeds in batches.values()}
    assert all(any(rate == pytest.approx(known) for known in measured) for rate in rates)
    assert len(set(rates)) > 3


def test_a_job_without_a_model_has_a_published_curve_drawn_by_the_seed() -> None:
    jobs = workload([str(job) for job in range(50)], np.zeros(50), np.ones(50, int), np.ones(50))
    one, again, other = (Scaling(jobs, seed) for seed in (1, 1, 2))
    rates = [[found.rate(job, [8]) for job in range(50)] for found in (one, again, other)]
    assert rates[0] == rates[1] != rates[2]
    assert len({round(rate, 6) for rate in rates[0]}) > 8


def test_losses_converge_when_the_trace_says() -> None:
    jobs = workload(["0", "1"], [0.0, 0.0], [1, 1], [1000.0, 1000.0], numbers={"converges_s": [np.nan, 4000.0]})
    losses = Losses(jobs, seed=3)
    assert len(losses.points(0, 1000.0)) > 10
    assert losses.points(0, 500.0) == losses.points(0, 1000.0)[: len(losses.points(0, 500.0))]
    same = Losses(jobs.with_columns(converges_s=[1000.0, 1000.0]), seed=3)
    assert losses.epoch_s(0) == same.epoch_s(0)
    assert losses.epoch_s(1) == pytest.approx(4.0 * same.epoch_s(1))


def one_job(gpus: int, least: int, most: int, duration_s: float = 20_000.0) -> Workload:
    numbers = {"min_gpus": [least], "max_gpus": [most], "batch_size": [256.0]}
    return workload(["0"], [0.0], [gpus], [duration_s], numbers=numbers, labels={"model": ["resnet50"]})


def test_without_a_policy_that_resizes_a_job_runs_as_its_trace_says() -> None:
    found = simulate(one_job(4, 1, 16), SERVERS, "fifo", OPTIONS).outcomes
    assert found.end_s[0] == pytest.approx(20_002.0)
    assert found.gpu_seconds[0] == pytest.approx(4 * 20_002.0)


def test_optimus_grows_a_job_that_is_alone_and_it_ends_sooner() -> None:
    fixed = simulate(one_job(1, 1, 1), SERVERS, "optimus", OPTIONS).outcomes
    found = simulate(one_job(1, 1, 16), SERVERS, "optimus", OPTIONS).outcomes
    points = elasticflow_speeds()["resnet50"][256]
    assert fixed.end_s[0] == pytest.approx(20_002.0)
    # No job is faster than the fastest measurement, and most of that is reached.
    best = 20_000.0 * points[1] / max(points.values())
    assert best < found.end_s[0] < 1.6 * best
    assert (found.resizes[0] >= 1, found.preemptions[0]) == (True, 0)


class Watched(_Replay):
    """Looks at the whole state after every batch."""

    def __init__(self, jobs: Workload, policy: str, options: ReplayOptions = OPTIONS) -> None:
        self.sizes: set[tuple[int, int]] = set()
        super().__init__(jobs, SERVERS, policy, options, None)

    def _finish(self) -> None:
        super()._finish()
        assert violations(self.state) == []
        for gang in self.state.gangs.values():
            assert self.jobs.min_gpus[gang.job - 1] <= gang.devices <= self.jobs.max_gpus[gang.job - 1]
            self.sizes.add((gang.job, gang.devices))


# Fewer plans, for what takes longer.
SELDOM = replace(OPTIONS, plan_every_s=200.0)

ROWS = some.lists(
    some.tuples(
        some.integers(0, 150),
        some.sampled_from([1, 1, 2, 3, 4, 8, 12, 16]),
        some.integers(1, 400),
        some.integers(0, 4),
        some.integers(0, 12),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=12, deadline=None)
@given(policy=some.sampled_from(["optimus", "optimus", "optimus", "ganger", "fifo-backfill"]), rows=ROWS)
def test_every_elastic_job_ends_in_sizes_that_it_accepts_and_nothing_is_promised_twice(
    policy: str, rows: list[tuple[int, int, int, int, int]]
) -> None:
    arrivals, gpus, durations, less, more = (np.array(column) for column in zip(*rows, strict=True))
    numbers = {"min_gpus": np.maximum(1, gpus - less), "max_gpus": np.minimum(16, gpus + more)}
    replay = Watched(
        workload([str(job) for job in range(len(rows))], arrivals, gpus, durations, numbers=numbers), policy
    )
    replay.run()
    outcomes = replay.ledger.outcomes()
    assert outcomes.finished.all()
    # An end is an instant, in which a gang of sixteen does up to sixteen times as much as one.
    assert replay.work.remaining(np.arange(len(rows)), replay.clock.now) == pytest.approx(0.0, abs=16 * INSTANT_S)
    assert replay.state.nodes.free_devices == SERVERS.gpus


def busy(seed: int, **columns: object) -> Workload:
    draw = np.random.default_rng(seed)
    gpus = draw.choice([1, 2, 4], 20)
    jobs = workload(
        [str(job) for job in range(20)],
        np.sort(draw.uniform(0.0, 3_000.0, 20)),
        gpus,
        np.exp(draw.normal(6.5, 1.0, 20)),
        numbers={"min_gpus": np.ones(20, int), "max_gpus": 4 * gpus},
    )
    return jobs.with_columns(**columns)


def test_optimus_heeds_losses_and_nothing_that_they_do_not_tell() -> None:
    jobs = busy(1)
    one = simulate(jobs, SERVERS, "optimus", SELDOM).outcomes
    same = simulate(busy(1, converges_s=jobs.duration_s), SERVERS, "optimus", SELDOM).outcomes
    misled = simulate(busy(1, converges_s=jobs.duration_s[::-1].copy()), SERVERS, "optimus", SELDOM).outcomes
    assert one.end_s.tolist() == same.end_s.tolist() != misled.end_s.tolist()


def test_optimus_serves_elastic_jobs_sooner_than_an_order_that_leaves_them_their_size() -> None:
    means = {
        policy: np.mean([simulate(busy(seed), SERVERS, policy, SELDOM).outcomes.jct_s.mean() for seed in (1, 2)])
        for policy in ("optimus", "tiresias")
    }
    assert means["optimus"] < means["tiresias"]


@pytest.mark.parametrize("options", [ReplayOptions(ideal=True), ReplayOptions(round_s=300.0)], ids=["ideal", "rounds"])
def test_optimus_runs_ideally_and_in_rounds(options: ReplayOptions) -> None:
    replay = Watched(busy(3), "optimus", options)
    replay.run()
    assert replay.ledger.outcomes().finished.all()
    assert len(replay.sizes) > 20, "some job had more than one size"
