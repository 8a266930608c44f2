"""Elastic jobs grow onto idle GPUs and give them back, in virtual time, by the live planner's pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from faultsim.state_invariants import violations
from ganger_master.simulator.inputs import ReplayOptions, SwitchCosts
from ganger_master.simulator.report.outcomes import Outcomes
from ganger_master.simulator.run import _Replay, simulate
from ganger_master.simulator.traces.servers import Servers, servers_from_flags
from ganger_master.simulator.traces.workload import Workload, elasticflow_speeds, workload
from hypothesis import given, settings
from hypothesis import strategies as some

ONE = servers_from_flags(nodes=1, gpus_per_node=8)
COSTS = SwitchCosts(start_s=2.0, suspend_s=1.5, resume_s=1.0, offload_s=0.5, restore_s=0.5, move_s=1.5)
OPTIONS = ReplayOptions(costs=COSTS)
GROWS = ["fifo+elastic", "las+elastic", "gandiva"]
SCALES = ("resnet50", 256.0)
# Four times its batch a second on four GPUs is what it would take; this one makes next to nothing of them.
DOES_NOT = ("resnet50_cifar10", 64.0)


def jobs_of(*rows: tuple[float, int, int, int, float], models: Sequence[tuple[str, float]] = (SCALES,)) -> Workload:
    """Rows of submission, GPUs, least, most and seconds; one model for all, or one each. Half of a server's memory
    would keep others from starting while two worlds have it."""
    submitted, gpus, least, most, seconds = zip(*rows, strict=True)
    names = [*models, *[models[-1]] * (len(rows) - len(models))]
    return workload(
        [str(number) for number in range(len(rows))],
        submitted,
        gpus,
        seconds,
        numbers={
            "min_gpus": least,
            "max_gpus": most,
            "batch_size": [batch for _, batch in names],
            "memory_bytes": [count << 30 for count in gpus],
        },
        labels={"model": [model for model, _ in names]},
    )


def run(jobs: Workload, policy: str, servers: Servers = ONE) -> Outcomes:
    outcomes = simulate(jobs, servers, policy, OPTIONS).outcomes
    assert outcomes.finished.all()
    return outcomes


@pytest.mark.parametrize("policy", GROWS)
def test_a_job_alone_grows_onto_the_whole_server_and_none_of_its_work_is_lost(policy: str) -> None:
    jobs = jobs_of((0.0, 1, 1, 8, 20_000.0))
    fixed, found = run(jobs, policy.removesuffix("+elastic") if "+" in policy else "fifo"), run(jobs, policy)
    points = elasticflow_speeds()["resnet50"][256]
    # A size at a time, once GPUs have been idle for a minute, with a pause each.
    assert (found.resizes.tolist(), found.preemptions.tolist(), found.migrations.tolist()) == ([7], [0], [0])
    best_s = 20_000.0 * points[1] / points[8]
    assert best_s < found.end_s[0] < 1.1 * best_s
    assert fixed.end_s[0] == pytest.approx(20_002.0)
    assert (fixed.resizes.sum(), fixed.gpu_seconds[0]) == (0, pytest.approx(20_002.0))


@pytest.mark.parametrize("policy", GROWS)
def test_a_new_job_gets_the_gpus_that_others_grew_onto_within_a_boundary_and_a_copy(policy: str) -> None:
    jobs = jobs_of((0.0, 1, 1, 8, 40_000.0), (3_000.0, 6, 6, 6, 500.0))
    found = run(jobs, policy)
    assert found.start_delay_s[1] <= COSTS.offload_s + COSTS.start_s + COSTS.move_s
    # It kept no less than it may, was never stopped, and grew again.
    assert not found.preemptions.any()
    assert found.resizes[0] > 8
    assert found.gpu_seconds[1] == pytest.approx(6 * 502.0)


def test_a_job_submitted_with_more_gpus_than_it_needs_gives_some_back_to_pending_jobs() -> None:
    jobs = jobs_of((0.0, 8, 2, 8, 20_000.0), (1_000.0, 6, 6, 6, 500.0))
    found = run(jobs, "fifo+elastic")
    assert found.start_delay_s[1] <= COSTS.offload_s + COSTS.start_s + COSTS.move_s
    assert run(jobs, "fifo").start_delay_s[1] > 19_000.0


def test_a_job_that_gains_too_little_by_a_gpu_gives_it_back() -> None:
    found = run(jobs_of((0.0, 1, 1, 8, 3_000.0), models=[DOES_NOT]), "fifo+elastic")
    # There and back again, and not tried any more in that hour.
    assert found.resizes.tolist() == [2]
    assert found.gpu_seconds[0] < 1.3 * 3_000.0


def test_a_pending_job_that_needs_more_than_all_could_give_back_costs_no_other_job_anything() -> None:
    jobs = jobs_of((0.0, 4, 4, 8, 4_000.0), (1_000.0, 8, 8, 8, 500.0))
    found = run(jobs, "fifo+elastic")
    assert found.first_start_s[1] == found.end_s[0] < 3_000.0, "it has kept what it had grown onto"
    assert not found.preemptions.any()


def test_under_gandiva_a_time_sliced_job_keeps_its_size_until_it_has_gpus_of_its_own() -> None:
    jobs = jobs_of((0.0, 4, 4, 8, 3_000.0), *[(1_000.0, 4, 4, 4, 3_000.0)] * 3)
    found = run(jobs, "gandiva")
    assert found.preemptions.sum() > 20
    assert found.resizes[0] >= 1, "it grew while it was alone, and after the others had gone"
    assert np.isfinite(found.end_s).all()


class Watched(_Replay):
    """Looks at the whole state after every batch."""

    def __init__(self, jobs: Workload, policy: str, options: ReplayOptions) -> None:
        self.sizes: set[tuple[int, int]] = set()
        super().__init__(jobs, servers_from_flags(nodes=2, gpus_per_node=4), policy, options, None)

    def _finish(self) -> None:
        super()._finish()
        assert violations(self.state) == []
        for gang in self.state.gangs.values():
            assert self.jobs.min_gpus[gang.job - 1] <= gang.devices <= self.jobs.max_gpus[gang.job - 1]
            self.sizes.add((gang.job, gang.devices))


ROWS = some.lists(
    some.tuples(
        some.integers(0, 600),
        some.sampled_from([1, 1, 2, 3, 4, 8]),
        some.integers(0, 3),
        some.integers(0, 6),
        some.integers(1, 900),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=12, deadline=None)
@given(policy=some.sampled_from([*GROWS, "gandiva", "ganger+elastic+defrag"]), rows=ROWS, plan_every_s=some.just(20.0))
def test_every_job_ends_in_sizes_that_it_accepts_and_nothing_is_promised_twice(
    policy: str, rows: list[tuple[int, int, int, int, int]], plan_every_s: float
) -> None:
    jobs = jobs_of(
        *[(float(at), gpus, max(1, gpus - less), min(8, gpus + more), s) for at, gpus, less, more, s in sorted(rows)]
    )
    replay = Watched(jobs, policy, ReplayOptions(costs=COSTS, plan_every_s=plan_every_s))
    replay.run()
    assert replay.ledger.outcomes().finished.all()
    # Times are whole microseconds, of several times as much work where a job has more GPUs.
    assert replay.work.remaining(np.arange(len(rows)), replay.clock.now) == pytest.approx(0.0, abs=1e-5)
    assert replay.state.nodes.free_devices == 8


def test_the_same_run_comes_out_the_same_and_in_rounds_too() -> None:
    draw = np.random.default_rng(4)
    rows = [
        (float(at), int(gpus), 1, 8, float(s))
        for at, gpus, s in zip(
            np.sort(draw.uniform(0.0, 3_000.0, 12)),
            draw.choice([1, 2, 4], 12),
            draw.uniform(60.0, 2_000.0, 12),
            strict=True,
        )
    ]
    one, again = run(jobs_of(*rows), "gandiva"), run(jobs_of(*rows), "gandiva")
    assert one.end_s.tolist() == again.end_s.tolist()
    assert one.resizes.sum() > 0
    in_rounds = Watched(jobs_of(*rows), "fifo+elastic", ReplayOptions(costs=COSTS, round_s=300.0))
    in_rounds.run()
    assert len(in_rounds.sizes) > len(rows)
