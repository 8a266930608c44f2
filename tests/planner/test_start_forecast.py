"""When a waiting job may start, as users are told where the planner ranks."""

from __future__ import annotations

from typing import TypeAlias

import pytest
from ganger.cluster.resources import Claim, LocalityLevel, Role, TaskShape
from ganger.cluster.view import View
from ganger.job_state import JobState
from ganger_master.core.explain import StartEstimate
from ganger_master.core.gang_model import Gang, GangPhase, GangRole, Piece
from ganger_master.core.job_model import JobRecord
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.tenancy import PartitionTerms
from ganger_master.planner.job_forecasts import inside_partition, start_forecast
from kit.clusters import idle_row, server
from msgspec.structs import replace

NOW = 100_000.0
SERVER = server("2x2")
BY_LINDY = "if the jobs before it take half to twice as long as they have run so far, and later ones do not go first"
BY_OTHERS = "if the jobs before it take half to twice as long as similar jobs did, and later ones do not go first"


def waiting(number: int, gpus: int, limit_s: float | None = None, user: str = "ann") -> JobRecord:
    spec = JobSpec(("train",), (Role("worker", gpus, TaskShape(1)),), time_limit_s=limit_s)
    return JobRecord(number, "", user, spec, NOW - 10, pending_since=NOW - 10)


def running(number: int, gpus: int, ran_s: float, limit_s: float | None = None) -> JobRecord:
    return replace(waiting(number, gpus, limit_s), state=JobState.HOLDING, pending_since=0.0, running_since=NOW - ran_s)


def ended(number: int, run_s: float) -> JobRecord:
    return replace(waiting(number, 1), state=JobState.SUCCEEDED, run_s=run_s, pending_since=0.0)


def forecast(
    *jobs: JobRecord, ranks: tuple[int, ...] = (), preempts: bool = False, limit: int | None = None
) -> StartEstimate:
    """Of the last job, on 4 GPUs. `ranks`: the numbers of the waiting jobs, first to last."""
    view = View([SERVER])
    row = idle_row("n1", SERVER)
    held = sum(one.gpus for one in jobs if one.running_since)
    view.put(replace(row, free_mask=row.free_mask >> held))
    order = {number: at for at, number in enumerate(ranks, 1)}
    pairs = [(one, _gang(one) if one.running_since else None) for one in jobs]
    return start_forecast(pairs, jobs[-1].number, order, view, NOW, preempts=preempts, limit=limit)


def _gang(job: JobRecord, **devices: int) -> Gang:
    """`devices`: masks by node."""
    claims = [Claim(node, mask, (0,), 0) for node, mask in devices.items()]
    pieces = tuple([Piece(claim, claim) for claim in claims])
    return Gang(job.number, job.number, GangRole.ACTIVE, GangPhase.RUNNING, pieces, LocalityLevel.CLUSTER, NOW)


@pytest.mark.parametrize(
    ("jobs", "ranks", "after", "before"),
    [
        pytest.param([waiting(1, 4)], (1,), 0, 1, id="nothing is before it"),
        pytest.param([running(1, 4, 1_000), waiting(2, 4)], (2,), 500, 2_000, id="one runs, as long again"),
        pytest.param([running(1, 4, 10), waiting(2, 4)], (2,), 150, 600, id="one has just begun: five minutes"),
        pytest.param([running(1, 4, 1_000, 1_700), waiting(2, 4)], (2,), 500, 700, id="one runs to its limit at most"),
        pytest.param([running(1, 2, 1_000), waiting(2, 2)], (2,), 0, 1, id="there is room beside it"),
        pytest.param(
            [running(1, 4, 1_000), waiting(2, 4), waiting(3, 4)], (2, 3), 650, 2_600, id="another one goes first"
        ),
        pytest.param(
            [running(1, 4, 1_000), waiting(2, 4), waiting(3, 4)], (3, 2), 500, 2_000, id="an older one goes later"
        ),
    ],
)
def test_the_forecast_follows_the_order_and_the_room(
    jobs: list[JobRecord], ranks: tuple[int, ...], after: float, before: float
) -> None:
    assert forecast(*jobs, ranks=ranks) == StartEstimate(after, before, BY_LINDY)


def test_a_job_that_waits_for_a_share_starts_once_jobs_of_that_share_have_ended() -> None:
    jobs = [running(1, 1, 1_000), running(2, 1, 3_000), waiting(3, 2)]
    assert forecast(*jobs) == StartEstimate(0.0, 1.0, BY_LINDY)
    assert forecast(*jobs, limit=3) == StartEstimate(500.0, 2_000.0, f"{BY_LINDY}, and there is room then")
    assert forecast(*jobs, limit=2) == StartEstimate(1_500.0, 6_000.0, f"{BY_LINDY}, and there is room then")


def test_where_running_jobs_may_be_stopped_it_may_start_at_any_time() -> None:
    assert forecast(running(1, 4, 1_000), waiting(2, 4), ranks=(2,), preempts=True) == StartEstimate(
        0.0, 2_000.0, BY_LINDY
    )


def test_similar_jobs_that_have_ended_tell_how_long_those_before_it_take() -> None:
    found = forecast(*(ended(number, 1_000.0) for number in range(1, 30)), running(30, 4, 1.0), waiting(31, 4))
    assert found.assumption == BY_OTHERS
    assert 300 <= found.after <= 800
    assert found.before == pytest.approx(4 * found.after)


def test_a_job_that_never_fits_is_told_so() -> None:
    assert forecast(waiting(1, 8)) == StartEstimate(
        0.0, 0.0, "unknown, because it would not fit even if all running jobs ended"
    )


def test_of_a_job_that_has_ended_there_is_no_forecast() -> None:
    assert forecast(waiting(1, 4), ended(2, 10.0)) == StartEstimate(0.0, 0.0, "")


def test_behind_very_many_jobs_there_is_no_forecast() -> None:
    many = [waiting(number, 1) for number in range(1, 1_200)]
    assert forecast(*many, ranks=tuple(range(1, 1_200))).assumption == "unknown, because 1198 jobs run or go first"


Nodes: TypeAlias = tuple[tuple[str, tuple[str, ...]], ...]
PARTITIONED: Nodes = (("n1", ("batch",)), ("n2", ("urgent",)))


def forecast_in(partition: str, *jobs: tuple[JobRecord, str], nodes: Nodes = PARTITIONED) -> StartEstimate:
    """Of the last job, on two nodes of 4 GPUs in partitions. The jobs, each with its partition, hold all of one."""
    view = View([SERVER])
    for name, partitions in nodes:
        view.put(replace(idle_row(name, SERVER), partitions=partitions))
    placed = [replace(job, partition=PartitionTerms(inside)) for job, inside in jobs]
    pairs = [(one, _gang(one, **{f"n{one.number}": 0b1111}) if one.running_since else None) for one in placed]
    for number in [one.number for one in placed if one.running_since]:
        view.put(replace(idle_row(f"n{number}", SERVER), free_mask=0, partitions=view.row(f"n{number}").partitions))
    there = inside_partition(pairs, view, partition)
    number = placed[-1].number
    return start_forecast(there.pairs, number, {}, there.view, NOW, preempts=False, rivals=there.rivals)


def test_a_forecast_in_a_partition_counts_its_own_nodes_and_jobs_only() -> None:
    held, other = running(1, 4, 1_000), waiting(3, 2)
    assert forecast_in("batch", (held, "batch"), (other, "batch")) == StartEstimate(500.0, 2_000.0, BY_LINDY)
    assert forecast_in("urgent", (held, "batch"), (other, "urgent")) == StartEstimate(0.0, 1.0, BY_LINDY)


OVERLAPPING: Nodes = (("n1", ("batch",)), ("n2", ("batch", "urgent")))


def test_in_a_partition_with_nodes_in_common_jobs_of_the_other_one_may_delay_a_start() -> None:
    held, first, last = running(2, 4, 1_000), waiting(3, 4), waiting(4, 4)
    # The running job has all of "urgent"; the pending one of "batch" takes that next, or the other node at once.
    found = forecast_in("urgent", (held, "batch"), (first, "batch"), (last, "urgent"), nodes=OVERLAPPING)
    assert found == StartEstimate(500.0, 2_600.0, f"{BY_LINDY}, whichever nodes jobs of other partitions get")
    assert forecast_in("urgent", (held, "batch"), (last, "urgent"), nodes=OVERLAPPING).before == 2_000.0
    assert forecast_in("batch", (held, "urgent"), (last, "batch"), nodes=OVERLAPPING).before == 1.0


def test_a_gang_on_nodes_of_two_partitions_holds_only_a_part_of_each() -> None:
    view = View([SERVER])
    view.put(replace(idle_row("n1", SERVER), partitions=("batch",), free_mask=0))
    view.put(replace(idle_row("n2", SERVER), partitions=("batch", "urgent"), free_mask=0b1100))
    wide = replace(running(1, 6, 1_000), epoch=1, partition=PartitionTerms("batch"))
    late = replace(waiting(2, 2), partition=PartitionTerms("urgent"))
    there = inside_partition([(wide, _gang(wide, n1=0b1111, n2=0b0011)), (late, None)], view, "urgent")
    assert [job.gpus for job, _ in there.pairs] == [2, 2]
    found = start_forecast(there.pairs, 2, {}, there.view, NOW, preempts=False)
    assert (found.after, found.before) == (0.0, 1.0)
