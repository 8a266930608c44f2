"""What the table of live jobs tells policies of the clocks of a job, from its submission to its end."""

from __future__ import annotations

import math
from collections.abc import Collection

import pytest
from ganger.cluster.resources import Claim, LocalityLevel, Role, TaskShape
from ganger.job_state import JobState
from ganger_master.core.gang_model import Gang, GangIntent, GangPhase, GangRole, Piece
from ganger_master.core.job_model import JobRecord
from ganger_master.core.job_spec import JobSpec
from ganger_master.planner.job_table import LiveTable
from msgspec.structs import replace

SPEC = JobSpec(("train",), (Role("worker", 2, TaskShape(gpus=2)),))
JOB = JobRecord(7, "uid", "ada", SPEC, create_time=100.0, pending_since=100.0)


def clocks(table: LiveTable, now: float) -> tuple[float, ...]:
    """Attained, waited, first start, present stretch, wait before it."""
    _, facts = table.facts(now)
    assert facts.number.tolist() == [7]
    columns = (facts.attained_s, facts.waited_s, facts.started_s, facts.stretch_s, facts.waited_before_s)
    return tuple([float(column[0]) for column in columns])


def gang(epoch: int, now: float) -> Gang:
    return Gang(epoch, 7, GangRole.ACTIVE, GangPhase.RUNNING, (), LocalityLevel.CLUSTER, now, since=now)


def test_waits_and_stretches_are_told_as_they_come() -> None:
    table = LiveTable()
    table.put(JOB, None)
    assert clocks(table, 130.0) == (0.0, 30.0, math.inf, 0.0, 0.0)
    held = replace(JOB, state=JobState.HOLDING, epoch=1, pending_since=0.0)
    table.put(held, gang(1, 140.0))
    # Its wait is over, its first step not yet seen.
    assert clocks(table, 145.0) == (0.0, 0.0, math.inf, 0.0, 40.0)
    running = replace(held, running_since=150.0, start_time=150.0)
    table.put(running, gang(1, 140.0))
    table.put(running, gang(1, 140.0))
    assert clocks(table, 210.0) == (60.0, 0.0, 150.0, 60.0, 40.0)
    stopped = replace(running, state=JobState.PENDING, running_since=0.0, run_s=60.0, pending_since=210.0)
    table.put(stopped, None)
    assert clocks(table, 215.0) == (60.0, 5.0, 150.0, 0.0, 0.0)
    again = replace(stopped, state=JobState.HOLDING, epoch=2, pending_since=0.0, running_since=225.0)
    table.put(again, gang(2, 220.0))
    assert clocks(table, 235.0) == (70.0, 0.0, 150.0, 10.0, 10.0)
    table.put(replace(again, state=JobState.SUCCEEDED), None)
    assert len(table) == 0


def test_a_reused_row_has_nothing_of_its_last_job() -> None:
    table = LiveTable()
    table.put(JOB, None)
    table.put(replace(JOB, state=JobState.CANCELLED), None)
    table.put(replace(JOB, state=JobState.HOLDING, pending_since=0.0), gang(1, 150.0))
    assert clocks(table, 160.0) == (0.0, 0.0, math.inf, 0.0, 0.0)


def test_a_job_that_backs_off_is_not_in_the_table_until_then() -> None:
    table = LiveTable()
    running = replace(JOB, state=JobState.HOLDING, epoch=1, pending_since=0.0, running_since=150.0, start_time=150.0)
    table.put(running, gang(1, 140.0))
    failed = replace(running, running_since=0.0, run_s=60.0, again_at=230.0)
    # Its gang is still on the way out.
    table.put(replace(failed, ending=JobState.PENDING), gang(1, 140.0))
    assert len(table) == 1
    waits = replace(failed, state=JobState.PENDING, epoch=0, pending_since=211.0)
    table.put(waits, None)
    table.put(waits, None)
    assert len(table) == 0
    table.put(replace(waits, again_at=0.0, pending_since=230.0), None)
    assert clocks(table, 235.0) == (60.0, 5.0, 150.0, 0.0, 0.0)


@pytest.mark.parametrize("most_gpus", [0, 2, 8])
@pytest.mark.parametrize("least_urgent", [None, 0, 1])
def test_the_jobs_that_could_get_room_are_the_same_as_by_a_scan(most_gpus: int, least_urgent: int | None) -> None:
    table = LiveTable()
    assert table.least_urgent_running is None
    held = replace(JOB, state=JobState.HOLDING, epoch=1, pending_since=0.0)
    table.put(held, gang(1, 140.0))
    assert table.least_urgent_running == 0
    jobs = {
        number: replace(
            JOB,
            number=number,
            spec=replace(SPEC, priority=number % 3, roles=(Role("worker", 1, TaskShape(gpus=1 + number % 4)),)),
        )
        for number in range(20, 32)
    }
    for job in jobs.values():
        table.put(job, None)
    numbers = [7, 999, *reversed(jobs)]
    naive = []
    for number in numbers:
        waiting = jobs.get(number)
        if waiting is not None:
            outranks = least_urgent is not None and waiting.spec.priority > least_urgent
            if waiting.gpus <= most_gpus or outranks:
                naive.append(number)
    assert table.asking(numbers, most_gpus, least_urgent) == naive
    assert table.asking([], most_gpus, least_urgent) == []


@pytest.mark.parametrize("numbers", [(), (7,), (20, 7, 31, 25), range(100)])
def test_those_among_some_are_found_by_row(numbers: Collection[int]) -> None:
    table = LiveTable()
    for number in (25, 20, 21, 31, 7, 22):
        table.put(replace(JOB, number=number), None)
    table.put(replace(JOB, number=7, state=JobState.CANCELLED), None)
    table.put(replace(JOB, number=21, state=JobState.SUSPENDED), None)
    rows, facts = table.facts(150.0)
    assert table.are_among(rows, numbers).tolist() == [number in numbers for number in facts.number.tolist()]


def test_an_updated_job_ranks_by_its_new_priority_and_requests_the_new_amounts_until_it_starts() -> None:
    table = LiveTable()
    table.put(JOB, None)
    first = replace(JOB, spec=replace(SPEC, priority=5, roles=(Role("worker", 2, TaskShape(2, 3_000, 1 << 30)),)))
    table.put(first, None)
    _, facts = table.facts(130.0)
    assert (facts.priority.tolist(), facts.cores.tolist(), facts.memory_bytes.tolist()) == ([5], [6.0], [2 << 30])
    held = replace(first, state=JobState.HOLDING, epoch=1, pending_since=0.0, running_since=150.0, start_time=150.0)
    table.put(replace(held, spec=replace(first.spec, priority=-2)), gang(1, 140.0))
    _, facts = table.facts(160.0)
    assert (facts.priority.tolist(), facts.cores.tolist(), table.least_urgent_running) == ([-2], [6.0], -2)


def test_the_jobs_that_return_devices_are_the_same_as_by_a_scan() -> None:
    table = LiveTable()
    for number in range(1, 9):
        epoch = number % 4 and number
        job = replace(JOB, number=number, epoch=epoch, state=JobState.HOLDING if epoch else JobState.PENDING)
        held = replace(gang(epoch, 140.0), job=number)
        stopping = replace(held, intent=GangIntent.STOP if number % 2 else GangIntent.RUN)
        table.put(job, held if epoch else None)
        table.put(job, stopping if epoch else None)
    table.put(replace(JOB, number=3, state=JobState.SUCCEEDED), None)
    table.forget(5)
    found = [(job.number, held.epoch) for job, held in table.going]
    assert found == [(1, 1), (7, 7)]
    rows, facts = table.facts(150.0)
    assert sorted(number for number, _ in found) == sorted(facts.number[table.is_going(rows)].tolist())


def test_running_jobs_are_found_by_their_nodes_and_by_their_moves_as_by_a_scan() -> None:
    table = LiveTable()
    for number in range(1, 100):
        nodes = [f"n{number % 5}", *(["m"] if number % 3 == 0 else [])]
        pieces = tuple([Piece(Claim(node, 1, (1000,), 0), None) for node in nodes])
        job = replace(JOB, number=number, epoch=number, state=JobState.HOLDING, move_pause_s=0.5 * (number % 2))
        table.put(job, replace(gang(number, 140.0), job=number, pieces=pieces))
        if number % 7 == 0:
            table.put(replace(job, state=JobState.PENDING), None)
        elif number % 11 == 0:
            table.put(replace(job, state=JobState.SUCCEEDED), None)
    running = table.running
    assert len(running) > 70
    assert table.apart == [(job, held) for job, held in running if len(held.pieces) > 1]
    alone = [(job, held) for job, held in running if len(held.pieces) == 1]
    for nodes in (["n1"], ["n0", "n4", "unknown"], ["m"], []):
        assert table.within(nodes) == [(job, held) for job, held in alone if held.pieces[0].claim.node in nodes]
    assert table.moved == [(job, held) for job, held in running if job.move_pause_s]
