"""Packs in a replay: jobs that use little of their GPU share one and both gain; those that use all of it do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ganger_master.core.answers import PlanAnswer
from ganger_master.core.commands import CancelJob, Command, ProposePlan
from ganger_master.core.plan_changes import Goal, PlanChange
from ganger_master.planner.colocations import Colocations
from ganger_master.policies.fairness import quantum_s
from ganger_master.simulator.inputs import ReplayOptions
from ganger_master.simulator.measurement_model import WINDOW_S, ModelledRates
from ganger_master.simulator.report.figures import figures
from ganger_master.simulator.run import _Replay, simulate
from ganger_master.simulator.traces.servers import servers_from_flags
from ganger_master.simulator.traces.workload import Workload, workload
from ganger_master.simulator.true_rates import Footprints

SERVERS = servers_from_flags(nodes=1, gpus_per_node=4)


def jobs(*models: str, seconds: float = 3000.0) -> Workload:
    count = len(models)
    return workload(map(str, range(count)), [0.0] * count, [1] * count, [seconds] * count, labels={"model": models})


class Judged(_Replay):
    """Keeps the verdicts on co-locations, one for each of their jobs, and what was refused of the plans."""

    def __init__(self, *given: Any) -> None:
        self.are_kept: list[bool] = []
        self.refused: list[PlanChange] = []
        super().__init__(*given)

    @property
    def kept(self) -> int:
        """The number of pairs that were kept."""
        return self.are_kept.count(True) // 2

    def send(self, command: Command) -> object:
        answer = super().send(command)
        if isinstance(command, ProposePlan) and isinstance(answer, PlanAnswer):
            refused = {verdict.number for verdict in answer.verdicts if not verdict.approved}
            self.refused += [change for change in command.changes if change.number in refused]
            self.are_kept += [finding.kept for finding in command.findings if finding.goal is Goal.PACK]
        return answer


def replayed(rows: Workload, seed: int = 0) -> Judged:
    replay = Judged(rows, SERVERS, "gandiva", ReplayOptions(seed=seed), None)
    replay.run()
    return replay


def colocations_of(replay: _Replay) -> Colocations:
    return replay.planning.loop.memory.shared.colocations


def test_light_jobs_are_packed_and_the_cluster_does_more() -> None:
    replay = replayed(jobs(*["vae"] * 8))
    found = replay.ledger.outcomes()
    assert replay.kept >= 2
    # Eight on four GPUs: in turns alone it would take all of them twice as long.
    assert found.end_s.max() < 1.6 * 3000.0
    assert found.migrations.sum() >= 2


def test_no_guest_is_told_to_go_on_in_vain_where_many_rest_and_keep_memory() -> None:
    models = ["vae", "superres", "rhn", "scrnn"] * 10
    replay = Judged(jobs(*models, seconds=1500.0), SERVERS, "gandiva", ReplayOptions(), None)
    replay.run()
    assert [change for change in replay.refused if change.kind == "RESUME"] == []
    assert replay.kept >= 2


def test_a_job_alone_on_its_gpu_again_has_its_cores_again() -> None:
    rows = jobs(*["vae"] * 8).with_columns(duration_s=[4000.0] + [600.0] * 7)
    replay = Judged(rows, SERVERS, "gandiva", ReplayOptions(), None)
    while replay.ledger.ended < 7 or any(not pack.is_kept for pack in colocations_of(replay).present):
        replay.clock.run_instant()
        replay._settle()
    assert replay.kept >= 1
    # The jobs that share it gave theirs at the end of the quantum.
    replay.clock.at(replay.clock.now + quantum_s(replay.nodes.switch_s), lambda: None)
    while replay.clock.next_time() is not None and len(colocations_of(replay).present):
        replay.clock.run_instant()
        replay._settle()
    left = replay.state.gangs[replay.state.jobs[next(iter(replay.state.jobs.live))].epoch]
    # Three cores go with a GPU of these servers.
    assert sum(left.claims[0].millicores) == 3_000


def test_a_gpu_that_two_share_is_in_use_once() -> None:
    run = simulate(jobs(*["vae"] * 8), SERVERS, "gandiva")
    found = figures(run)
    held = run.outcomes.gpu_seconds.sum() / (4 * found.makespan_s)
    assert held > 1.2 > 1.0 >= found.gpu_utilization > 0.5
    assert found.fragmentation >= 0.0


def test_a_co_location_in_which_a_job_is_too_slow_is_undone_and_not_tried_again_at_once() -> None:
    rows = jobs(*["mi-lstm"] * 6)
    # Of the seeds by which such a pair is slower than expected: only a trial shows it.
    seed = next(s for s in range(500) if Footprints(rows, SERVERS, s).speed(0, [1]) < 0.56)
    assert replayed(rows, seed).are_kept == [False, False]


def test_what_is_not_expected_to_pay_is_not_tried() -> None:
    assert replayed(jobs(*["resnext50"] * 6)).are_kept == []


def test_rates_beside_others_are_those_of_the_published_law_but_for_its_error() -> None:
    rows = jobs("resnet50", "lstm", "vae")
    speeds = np.array([Footprints(rows, SERVERS, seed).speed(0, [1]) for seed in range(300)])
    assert speeds.mean() == pytest.approx(1.0 / (0.9 * (0.94 + 0.872)), rel=0.02)
    assert np.abs(speeds - speeds.mean()).mean() / speeds.mean() == pytest.approx(0.071, rel=0.15)
    footprints = Footprints(rows, SERVERS, 1)
    assert footprints.speed(0, []) == 1.0
    assert footprints.speed(0, [1]) == footprints.speed(1, [0])
    assert footprints.speed(2, [0]) <= 1.0


def test_windows_tell_of_the_present_stretch_and_of_the_last_one_alone() -> None:
    windows = ModelledRates(Footprints(jobs("vae", "vae"), SERVERS, 0), 0)
    windows.trains(1, 0.0, 1.0, frozenset(), 1)
    windows.now = 10.0 * WINDOW_S
    alone = windows.alone(1)
    # The first one after a change is left out.
    assert len(alone) == 9
    windows.trains(1, windows.now, 0.5, frozenset({2}), 1)
    windows.now += 6.0 * WINDOW_S
    assert windows.alone(1) == alone
    assert windows.neighbours(1) == {2}
    beside = windows.present(1)
    assert len(beside) == 5
    assert np.mean(beside) == pytest.approx(0.5, rel=0.1)
    windows.now += WINDOW_S
    assert windows.present(1)[:5] == beside


def after_room_appeared(model: str, seed: int = 0) -> _Replay:
    """Five jobs of one model on four GPUs, two of them packed; then one that has a GPU to itself ends."""
    replay = _Replay(jobs(*[model] * 5, seconds=20_000.0), SERVERS, "gandiva", ReplayOptions(seed=seed), None)

    def run_until(is_done: Callable[[], bool]) -> None:
        while not is_done() and replay.clock.next_time() is not None:
            replay.clock.run_instant()
            replay._settle()

    run_until(lambda: any(pack.is_kept for pack in colocations_of(replay).present))
    (pack,) = colocations_of(replay).present
    replay.send(CancelJob(next(number for number in sorted(replay.state.jobs.live) if number not in pack.numbers)))
    until = replay.clock.now + 3_000.0
    replay.clock.at(until, lambda: None)
    run_until(lambda: replay.clock.now >= until)
    return replay


def test_a_pack_in_which_both_are_slower_is_taken_apart_once_there_is_room_and_that_is_kept() -> None:
    replay = after_room_appeared("rhn")
    assert colocations_of(replay).present == ()
    gangs = [replay.state.gangs[replay.state.jobs[number].epoch] for number in replay.state.jobs.live]
    assert len(gangs) == 4
    assert not any(claim.shared_mask for gang in gangs for claim in gang.claims)
    assert len({(claim.node, claim.device_mask) for gang in gangs for claim in gang.claims}) == 4


def test_a_co_location_without_a_cost_stays_though_there_is_room() -> None:
    # Of the seeds by which two of them have room on one device.
    assert len(colocations_of(after_room_appeared("vae", seed=1)).present) == 1
