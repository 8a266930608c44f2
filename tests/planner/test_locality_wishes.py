"""First placements by what is measured: which gangs wait for a closer place, for how long, and what is not done for
them. (2 s)"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from core.drive import GIB, job_of
from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.resources import Locality, LocalityLevel
from ganger_master.core.plan_changes import MoveChange, PlanChange, StartChange
from ganger_master.estimators.speed import UNKNOWN_JOB, LocalityPoint
from ganger_master.planner.context import PlannerSettings, context_of
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.migrate_stage import plan_moves
from ganger_master.planner.migration_outcomes import MigrationOutcomes
from ganger_master.planner.migration_plans import MigrationMemory
from ganger_master.planner.plan import plan
from ganger_master.planner.plan_pace import PlanPace
from msgspec.structs import replace
from planner.test_moves import Moved, together

PLAN_EVERY_S = 300.0
UNSTATED = Locality()
IN_ONE_SERVER = UNKNOWN_JOB.relative_speed(2, 1, LocalityLevel.NODE)


def losing(share: float) -> tuple[LocalityPoint, ...]:
    """Measurements of pairs that lose this share of their speed where their devices are in two servers."""
    return (LocalityPoint(2, 2, (1.0 - share) * IN_ONE_SERVER, LocalityLevel.CLUSTER),) * 8


class Placed(Moved):
    """A planner that has measured gangs `alike`, and may preempt at most every five minutes."""

    def __init__(self, points: Sequence[LocalityPoint] = (), nodes: int = 2, policy: str = "las+defrag") -> None:
        super().__init__(nodes, policy)
        self.moving = MigrationMemory(outcomes=MigrationOutcomes(points={"alike": tuple(points)} if points else {}))

    def changes(self, may_stop: bool = False, is_news: bool = True) -> tuple[PlanChange, ...]:
        table = LiveTable()
        for job in self.state.jobs.values():
            table.put(*self.as_received(job))
        context = context_of(
            self.policy,
            table,
            CapacityIndex(self.state.view.copy()),
            self.now,
            settings=PlannerSettings(PlanPace(PLAN_EVERY_S)),
            order=self.policy.order,
            rates=self.rates,
            may_preempt=may_stop,
            is_news=is_news,
        )
        found, self.moving, self.findings, self.again_s = plan_moves(plan, context, self.moving)
        return found.changes

    def waits_s(self, number: int) -> float:
        """Return for how long the pending job waits though enough devices are free, planning only when it is due."""
        since = self.now
        while not (changes := self.changes(is_news=self.now == since)):
            if self.again_s == float("inf"):
                return self.again_s
            self.now = self.again_s
        assert [(change.kind, change.number) for change in changes] == [("START", number)]
        return self.now - since


def with_pair(
    points: Sequence[LocalityPoint] = (), locality: Locality = UNSTATED, ran_s: float = 1_000.0
) -> tuple[Placed, int]:
    """One device is free on each of two servers, beside jobs that are not moved, and a pair is pending. It has run for
    so long, and is expected to run as long again."""
    drive = Placed(points)
    for _ in range(2):
        drive.running(together(3, movable=False))
    pair = drive.submit(replace(job_of(2, memory=GIB), locality=locality))
    drive.state.put_job(replace(drive.job(pair), run_s=ran_s))
    return drive, pair


@pytest.mark.parametrize(
    ("lost", "locality", "ran_s", "waits_s"),
    [
        (None, UNSTATED, 1_000.0, 0.0),
        (0.0, UNSTATED, 1_000.0, 0.0),
        (0.03, UNSTATED, 1_000.0, 0.0),
        (0.28, UNSTATED, 1_000.0, 280.0),
        (0.28, UNSTATED, 100.0, 28.0),
        (0.28, UNSTATED, 50_000.0, PLAN_EVERY_S),
        (0.28, Locality(patience_s=40.0), 1_000.0, 40.0),
        (0.28, Locality(patience_s=900.0), 1_000.0, 900.0),
        (0.28, Locality(wish=LocalityLevel.SOCKET, patience_s=60.0), 1_000.0, 60.0),
        (0.0, Locality(wish=LocalityLevel.SOCKET, patience_s=60.0), 1_000.0, 60.0),
        (None, Locality(wish=LocalityLevel.SOCKET, patience_s=60.0), 1_000.0, 60.0),
        (0.28, Locality(wish=LocalityLevel.CLUSTER, patience_s=60.0), 1_000.0, 0.0),
        (0.0, Locality(widest=LocalityLevel.NODE), 1_000.0, float("inf")),
    ],
    ids=lambda value: str(value),
)
def test_a_gang_waits_for_one_server_as_long_as_it_tolerates_and_then_takes_what_there_is(
    lost: float | None, locality: Locality, ran_s: float, waits_s: float
) -> None:
    drive, pair = with_pair(() if lost is None else losing(lost), locality, ran_s)
    assert drive.waits_s(pair) == pytest.approx(waits_s, rel=0.1, abs=0.1)


def test_a_gang_that_waits_takes_one_server_as_soon_as_it_has_room() -> None:
    drive, pair = with_pair(losing(0.28))
    assert drive.changes() == ()
    drive.ends(1)
    (start,) = drive.changes()
    assert isinstance(start, StartChange)
    assert (start.number, [claim.node for claim in start.claims]) == (pair, ["n1"])


def test_a_gang_that_loses_nothing_starts_in_two_servers() -> None:
    drive, pair = with_pair(losing(0.0))
    (start,) = drive.changes()
    assert isinstance(start, StartChange)
    assert (start.number, len(start.claims)) == (pair, 2)


def test_a_single_gpu_and_other_kinds_of_gangs_do_not_wait() -> None:
    drive, pair = with_pair(losing(0.28))
    single = drive.submit(job_of(1, memory=GIB))
    assert [change.number for change in drive.changes()] == [single]
    drive, pair = with_pair()
    drive.moving = MigrationMemory(outcomes=MigrationOutcomes(points={"other": losing(0.28)}))
    assert [change.number for change in drive.changes()] == [pair]


def test_no_job_is_preempted_for_a_place_that_is_only_better() -> None:
    drive, pair = with_pair(losing(0.28))
    for number in (1, 2):
        drive.state.put_job(replace(drive.job(number), run_s=1e6))
    drive.state.put_job(replace(drive.job(pair), run_s=1_000.0, spec=replace(drive.job(pair).spec, priority=5)))
    assert drive.changes(may_stop=True) == ()


def test_a_gang_for_which_too_little_is_free_takes_what_it_gets() -> None:
    """It needs devices of others in any case: of the two jobs that have run longest, on two servers."""
    drive = Placed(losing(0.28), policy="las+first-fit+defrag")
    old = [drive.running(together(count)) for count in (3, 1, 3, 1)][1::2]
    assert [drive.node_of(number) for number in old] == ["n1", "n2"]
    pair = drive.submit(job_of(2, memory=GIB))
    for number in (*old, pair):
        drive.state.put_job(replace(drive.job(number), run_s=1e6 if number in old else 1.0))
    assert [(change.kind, change.number) for change in drive.changes(may_stop=True)] == [
        ("SUSPEND", number) for number in reversed(old)
    ]


def test_jobs_move_out_of_the_way_of_a_gang_that_would_lose_apart() -> None:
    """Each of two servers has a free device, one beside a job of one device, which can move there."""
    drive = Placed(losing(0.28), policy="fifo-backfill+first-fit+defrag")
    holders = [drive.running(together(count)) for count in (1, 3, 1, 3)]
    for number in holders[1::2]:
        drive.ends(number)
    rest = [drive.running(together(2, movable=False)) for _ in range(2)]
    pair = drive.submit(job_of(2, memory=GIB))
    drive.state.put_job(replace(drive.job(pair), run_s=1_000.0))
    assert len({drive.node_of(number) for number in rest}) == 2
    assert drive.changes() == ()
    drive.now = drive.again_s
    (move,) = drive.changes()
    assert isinstance(move, MoveChange)
    assert move.number in holders
