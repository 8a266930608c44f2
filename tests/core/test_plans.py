"""Plans: each change is judged as if those before it had happened; changes of one id happen together or not at all."""

from __future__ import annotations

from core.drive import GIB, Drive, job_of
from ganger.cluster.placement import candidates
from ganger.cluster.refusals import Reason
from ganger.cluster.resources import Claim
from ganger.job_state import JobState
from ganger_master.core.answers import PlanAnswer
from ganger_master.core.commands import KeepPlace, ProposePlan
from ganger_master.core.plan_changes import PlanChange, StartChange
from ganger_master.core.settings import CoreSettings
from msgspec.structs import replace


def two_places(drive: Drive, *numbers: int) -> list[tuple[Claim, ...]]:
    """Places beside each other."""
    view = drive.state.view.copy()
    found = []
    for number in numbers:
        claims = candidates(view, drive.job(number).shape).candidates[0]
        for claim in claims:
            view.take(claim)
        found.append(claims)
    return found


def start(drive: Drive, number: int, claims: tuple[Claim, ...], together: int = 0) -> PlanChange:
    return StartChange(number, drive.job(number).revision, claims, together=together)


def propose(drive: Drive, *changes: PlanChange) -> list[bool]:
    version = drive.state.view.version
    answer = drive.step(ProposePlan(changes))
    assert isinstance(answer, PlanAnswer)
    approved = [verdict.approved for verdict in answer.verdicts]
    assert any(approved) or drive.state.view.version == version
    return approved


def test_two_gangs_are_put_on_one_node_by_one_plan() -> None:
    drive = Drive()
    numbers = [drive.submit(job_of(2)), drive.submit(job_of(2))]
    one, other = two_places(drive, *numbers)
    assert propose(drive, start(drive, numbers[0], one), start(drive, numbers[1], other)) == [True, True]
    assert drive.state.rows["n1"].free_mask == 0


def test_of_two_changes_for_the_same_devices_the_first_gets_them() -> None:
    drive = Drive()
    numbers = [drive.submit(job_of(2)), drive.submit(job_of(2))]
    place = drive.places(numbers[0])[0]
    assert propose(drive, start(drive, numbers[0], place), start(drive, numbers[1], place)) == [True, False]


def test_a_plan_is_judged_by_the_places_that_it_keeps_not_by_those_of_the_plan_before() -> None:
    drive = Drive()
    large, small = drive.submit(job_of(4)), drive.submit(job_of(2))
    kept = KeepPlace(large, drive.places(large)[0])
    drive.step(ProposePlan((), kept_places=(kept,)))
    begin = start(drive, small, drive.places(small)[0])

    def verdict(kept_places: tuple[KeepPlace, ...] | None) -> list[Reason]:
        answer = drive.step(ProposePlan((begin,), kept_places=kept_places))
        assert isinstance(answer, PlanAnswer)
        return [refusal.reason for refusal in answer.verdicts[0].refusals]

    assert verdict(None) == [Reason.KEPT], "they stand"
    assert verdict((kept,)) == [Reason.KEPT]
    assert verdict(()) == [], "the place that is kept no longer is free for this plan, too"


def test_a_place_that_is_kept_for_a_job_which_the_plan_starts_is_not_counted_twice() -> None:
    drive = Drive()
    first, second = drive.submit(job_of(2)), drive.submit(job_of(2))
    one, other = two_places(drive, first, second)
    # Together they have the node's cores.
    ((kept,), (left,)) = (one, other)
    kept, left = replace(kept, millicores=(8_000, 4_000)), replace(left, millicores=(0, 4_000))
    drive.step(ProposePlan((), kept_places=(KeepPlace(first, (kept,)),)))
    assert propose(drive, start(drive, first, (kept,)), start(drive, second, (left,))) == [True, True]


def test_memory_is_not_promised_twice() -> None:
    drive = Drive()
    numbers = [drive.submit(job_of(1, 40 * GIB)), drive.submit(job_of(1, 40 * GIB))]
    one = drive.places(numbers[0])[0]
    other = tuple(
        Claim(c.node, 0b1000, (0, 2_000), c.memory_bytes, c.arena_bytes, c.tasks) for c in drive.places(numbers[1])[0]
    )
    assert propose(drive, start(drive, numbers[0], one), start(drive, numbers[1], other)) == [True, False]


def test_changes_of_one_id_happen_together_or_not_at_all() -> None:
    drive = Drive()
    numbers = [drive.submit(job_of(2)), drive.submit(job_of(2)), drive.submit(job_of(2))]
    one, other = two_places(drive, *numbers[:2])
    changes = (
        start(drive, numbers[0], one, together=7),
        start(drive, numbers[2], other),
        start(drive, numbers[1], one, together=7),
    )
    assert propose(drive, *changes) == [False, True, False]
    assert [drive.job(number).state for number in numbers] == [JobState.PENDING, JobState.PENDING, JobState.HOLDING]


def test_what_a_refused_pair_would_have_taken_is_free_for_the_next_change() -> None:
    drive = Drive()
    numbers = [drive.submit(job_of(4)), drive.submit(job_of(1)), drive.submit(job_of(4))]
    everything = drive.places(numbers[0])[0]
    single = drive.places(numbers[1])[0]
    changes = (
        start(drive, numbers[0], everything, together=1),
        start(drive, numbers[1], single, together=1),
        start(drive, numbers[2], everything),
    )
    assert propose(drive, *changes) == [False, False, True]


def test_a_plan_cannot_exceed_a_users_share_by_several_changes() -> None:
    drive = Drive(settings=CoreSettings(quota_devices={"ann": 3}))
    numbers = [drive.submit(job_of(2), "ann"), drive.submit(job_of(2), "ann")]
    one, other = two_places(drive, *numbers)
    changes = (start(drive, numbers[0], one), start(drive, numbers[1], other))
    answer = drive.step(ProposePlan(changes))
    assert isinstance(answer, PlanAnswer)
    assert [verdict.approved for verdict in answer.verdicts] == [True, False]
    assert answer.verdicts[1].refusals[0].reason is Reason.QUOTA
