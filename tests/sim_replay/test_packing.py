"""Packs of `ganger` in a replay: who waits is served by what others leave who share GPUs."""

from __future__ import annotations

from ganger_master.planner.packs import Packs
from ganger_master.sim.replay.footprints import Footprints
from ganger_master.sim.replay.options import Options
from ganger_master.sim.replay.run import _Replay, simulate
from ganger_master.sim.report.figures import figures
from ganger_master.sim.traces.servers import servers_from_flags
from ganger_master.sim.traces.workload import Workload, workload

SERVERS = servers_from_flags(nodes=1, gpus_per_node=4)
HOURS = 4 * 3600.0


def jobs(*models: str, seconds: float = HOURS) -> Workload:
    count = len(models)
    return workload(map(str, range(count)), [0.0] * count, [1] * count, [seconds] * count, labels={"model": models})


def options(rows: Workload) -> Options:
    """Of the seeds by which two find memory on one GPU."""
    most = 0.4 * SERVERS.groups[0].configuration_set.device_memory_bytes
    return Options(seed=next(seed for seed in range(100) if Footprints(rows, SERVERS, seed).memory_bytes(0) < most))


def packs_of(replay: _Replay) -> Packs:
    packer = replay.planning._packer
    assert packer is not None
    return packer.packing.packs


def test_light_jobs_share_gpus_while_others_wait_and_all_are_done_sooner() -> None:
    rows = jobs(*["vae"] * 6)
    together, alone = [simulate(rows, SERVERS, policy, options(rows)) for policy in ("ganger", "ganger-alone")]
    assert figures(alone).makespan_s > 1.9 * HOURS
    assert figures(together).makespan_s < 1.2 * HOURS
    assert together.outcomes.jct_s.mean() < 0.85 * alone.outcomes.jct_s.mean()
    assert together.outcomes.migrations.sum() >= 2
    assert figures(together).gpu_utilization <= 1.0


def test_jobs_that_use_all_of_a_gpu_do_not_stay_together() -> None:
    rows = jobs(*["resnext50"] * 6)
    replay = _Replay(rows, SERVERS, "ganger", options(rows), None)
    replay.run()
    packs = packs_of(replay)
    # Such a pair is tried, and is left alone for an hour, and then for two, and four, if it is at all.
    assert packs.tried <= 4
    assert packs.kept == 0


def test_once_nobody_waits_they_go_apart() -> None:
    # Two that outlast all others, and are slower together than alone.
    rows = jobs(*["scrnn"] * 6).with_columns(duration_s=[3 * HOURS] * 2 + [HOURS] * 4)
    replay = _Replay(rows, SERVERS, "ganger", options(rows), None)
    while replay.ledger.ended < 4:
        replay.clock.run_instant()
        replay._settle()
    assert packs_of(replay).kept >= 1
    replay.run()
    assert packs_of(replay).packs == ()
    assert not replay.planning.table.sharing


def test_without_switching_costs_or_places_nothing_is_measured_and_nobody_packed() -> None:
    rows = jobs(*["vae"] * 8)
    packed, alone = [simulate(rows, SERVERS, policy, Options(ideal=True)) for policy in ("ganger", "ganger-alone")]
    assert packed.outcomes.end_s.tolist() == alone.outcomes.end_s.tolist()


def test_with_no_interval_between_plans_all_jobs_end() -> None:
    rows = jobs(*["vae"] * 6, seconds=300.0)
    assert simulate(rows, SERVERS, "ganger", Options(plan_every_s=0.0)).outcomes.end_s.max() < 1200.0
