"""Packs of `ganger` in a replay: pending jobs get the GPUs that co-located jobs leave."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from unittest.mock import patch

from ganger.cluster.claims import resplit_cores
from ganger.cluster.fit import demand
from ganger.cluster.view import View
from ganger_master.core.gang_model import Gang
from ganger_master.core.job_model import JobRecord
from ganger_master.core.plan_changes import CoresChange, PlanChange
from ganger_master.planner import colocations as of_packs
from ganger_master.planner.colocations import Colocations, is_settled, whole_again
from ganger_master.planner.rate_registry import JobRates
from ganger_master.simulator.inputs import ReplayOptions
from ganger_master.simulator.report.figures import figures
from ganger_master.simulator.run import _Replay, simulate
from ganger_master.simulator.traces.servers import servers_from_flags
from ganger_master.simulator.traces.workload import Workload, workload
from ganger_master.simulator.true_rates import Footprints
from msgspec.structs import replace
from simulator.replay.test_packs import Judged

SERVERS = servers_from_flags(nodes=1, gpus_per_node=4)
HOURS = 4 * 3600.0


def jobs(*models: str, seconds: float = HOURS) -> Workload:
    count = len(models)
    return workload(map(str, range(count)), [0.0] * count, [1] * count, [seconds] * count, labels={"model": models})


def options(rows: Workload) -> ReplayOptions:
    """Of the seeds by which two find memory on one GPU."""
    most = 0.4 * SERVERS.groups[0].configuration_set.device_memory_bytes
    return ReplayOptions(
        seed=next(seed for seed in range(100) if Footprints(rows, SERVERS, seed).memory_bytes(0) < most)
    )


def colocations_of(replay: _Replay) -> Colocations:
    return replay.planning.loop.memory.packing.colocations


def test_light_jobs_share_gpus_while_others_wait_and_all_are_done_sooner() -> None:
    rows = jobs(*["vae"] * 6)
    together, alone = [simulate(rows, SERVERS, policy, options(rows)) for policy in ("ganger", "ganger-alone")]
    # Six hours of a GPU for each four that there are.
    assert figures(alone).makespan_s > 1.5 * HOURS
    assert figures(together).makespan_s < 1.2 * HOURS
    assert together.outcomes.jct_s.mean() < 0.85 * alone.outcomes.jct_s.mean()
    assert together.outcomes.migrations.sum() >= 2
    assert figures(together).gpu_utilization <= 1.0


def test_jobs_that_use_all_of_a_gpu_do_not_stay_together() -> None:
    rows = jobs(*["resnext50"] * 6)
    replay = Judged(rows, SERVERS, "ganger", options(rows), None)
    replay.run()
    # Such a pair is tried, and is left alone for an hour, and then for two, and four, if it is at all.
    assert len(replay.are_kept) <= 2 * 4
    assert replay.kept == 0


def naive_whole_again(
    running: Mapping[int, tuple[JobRecord, Gang]], busy: Collection[int], view: View, seen: JobRates
) -> Iterator[PlanChange]:
    """All jobs are examined, also on nodes without a free core."""
    free = dict(zip(view.nodes, view.millicores, strict=True))
    for number, (job, gang) in running.items():
        if number in busy or seen.neighbours(number) or not is_settled(job, gang) or gang.node_set:
            continue
        claims = []
        for claim in gang.claims:
            have, own = free[claim.node], claim.millicores
            wanted = demand(view.topology(claim.node).configuration_set, job.shape, claim.tasks).millicores
            cores = own if sum(own) >= wanted else resplit_cores(own, have, min(wanted, sum(own) + sum(have)))
            free[claim.node] = tuple(h + o - n for h, o, n in zip(have, own, cores, strict=True))
            claims.append(replace(claim, millicores=cores))
        if tuple(claims) != gang.claims:
            yield CoresChange(number, job.revision, tuple(claims))


def test_jobs_that_get_their_cores_back_are_found_as_if_all_were_examined() -> None:
    found = []

    def both(
        running: Mapping[int, tuple[JobRecord, Gang]], busy: Collection[int], view: View, seen: JobRates
    ) -> Iterator[PlanChange]:
        changes = list(whole_again(running, busy, view, seen))
        assert changes == list(naive_whole_again(running, busy, view, seen))
        found.extend(changes)
        yield from changes

    # Hosts and guests end at different times.
    rows = jobs(*["vae", "scrnn"] * 6).with_columns(duration_s=[HOURS * (1 + at % 4) / 2 for at in range(12)])
    with patch.object(of_packs, "whole_again", both):
        simulate(rows, SERVERS, "ganger", options(rows))
    assert found, "some job got some"


def test_once_the_queue_is_empty_co_located_jobs_are_separated() -> None:
    # Two that outlast all others, and are slower together than alone.
    rows = jobs(*["scrnn"] * 6).with_columns(duration_s=[3 * HOURS] * 2 + [HOURS] * 4)
    replay = Judged(rows, SERVERS, "ganger", options(rows), None)
    while replay.ledger.ended < 4:
        replay.clock.run_instant()
        replay._settle()
    assert replay.kept >= 1
    replay.run()
    assert colocations_of(replay).present == ()
    assert not replay.planning.loop.table.has_sharing


def test_without_switching_costs_or_places_nothing_is_measured_and_no_job_co_located() -> None:
    rows = jobs(*["vae"] * 8)
    packed, alone = [
        simulate(rows, SERVERS, policy, ReplayOptions(ideal=True)) for policy in ("ganger", "ganger-alone")
    ]
    assert packed.outcomes.end_s.tolist() == alone.outcomes.end_s.tolist()


def test_with_no_interval_between_plans_all_jobs_end() -> None:
    rows = jobs(*["vae"] * 6, seconds=300.0)
    assert simulate(rows, SERVERS, "ganger", ReplayOptions(plan_every_s=0.0)).outcomes.end_s.max() < 1200.0
