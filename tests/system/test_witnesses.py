"""The judges of chaos tests find what they are there to find."""

from __future__ import annotations

import pytest

from benchmarks.witnesses import (
    Death,
    Pack,
    Step,
    by_step_and_rank,
    losses_of_batches,
    lost_or_repeated,
    other_results,
    samples_not_once,
    switches,
    two_attempts_at_once,
    two_on_a_device,
    undone_without_cause,
    what_counts,
)


def step(
    number: int,
    began: int,
    ended: int,
    *,
    job: str = "a",
    attempt: int = 1,
    rank: int = 0,
    world: int = 1,
    device: int = 0,
    loss: float = 0.5,
    samples: tuple[int, ...] = (),
) -> Step:
    return Step(
        job, number, 0, attempt, "n0", (device,), rank, world, loss.hex(), "", samples, began * 10**6, ended * 10**6
    )


@pytest.mark.parametrize(
    ("steps", "is_found"),
    [
        ([step(1, 0, 1), step(2, 1, 2)], False),
        ([step(1, 0, 1), step(3, 1, 2)], True),
        ([step(1, 0, 1), step(1, 1, 2)], True),
        ([step(1, 0, 1), step(2, 1, 2), step(1, 2, 3)], True),
        # of a world of two, one rank may be ahead of the other by one step
        ([step(1, 0, 1, world=2), step(1, 0, 1, rank=1, world=2), step(2, 1, 2, world=2)], False),
        ([step(1, 0, 1, world=2), step(2, 1, 2, world=2)], True),
        ([step(1, 0, 1, world=2), step(1, 0, 1, rank=1, world=2, attempt=2), step(2, 1, 2, attempt=2)], True),
    ],
)
def test_lost_and_repeated_steps_are_found(steps: list[Step], is_found: bool) -> None:
    assert bool(lost_or_repeated(steps)) == is_found


@pytest.mark.parametrize(
    ("steps", "is_found"),
    [
        ([step(1, 0, 1), step(2, 1, 2, attempt=2)], False),
        ([step(1, 0, 1, rank=0, world=2), step(1, 0, 2, rank=1, world=2)], False),
        ([step(1, 0, 2), step(2, 1, 3, attempt=2)], True),
        ([step(1, 0, 1, attempt=2), step(2, 1, 2, attempt=1)], True),
    ],
)
def test_two_attempts_at_once_are_found(steps: list[Step], is_found: bool) -> None:
    assert bool(two_attempts_at_once(steps)) == is_found


@pytest.mark.parametrize(
    ("other", "packs", "is_found"),
    [
        (step(1, 2, 4, job="b"), [], False),
        (step(1, 1, 4, job="b"), [], True),
        (step(1, 1, 4, job="b", device=1), [], False),
        (step(1, 1, 4, job="b"), [Pack(("n0", 0), frozenset("ab"), 0)], False),
        (step(1, 1, 4, job="b"), [Pack(("n0", 1), frozenset("ab"), 0)], True),
        (step(1, 1, 4, job="b"), [Pack(("n0", 0), frozenset("ac"), 0)], True),
        # before they were let in together, and after they had parted
        (step(1, 1, 4, job="b"), [Pack(("n0", 0), frozenset("ab"), 2 * 10**6)], True),
        (step(1, 1, 4, job="b"), [Pack(("n0", 0), frozenset("ab"), 0, 1)], True),
    ],
)
def test_two_on_a_device_are_found_unless_they_were_let_on_it_together(
    other: Step, packs: list[Pack], is_found: bool
) -> None:
    assert bool(two_on_a_device([step(1, 0, 2), other], packs)) == is_found


def test_another_loss_is_found() -> None:
    reference = by_step_and_rank([step(1, 0, 1), step(2, 1, 2)])
    assert not other_results([step(1, 5, 6), step(2, 7, 8)], reference)
    assert other_results([step(1, 5, 6), step(2, 7, 8, loss=0.5 + 2**-50)], reference)


def test_samples_are_taken_once_in_each_epoch() -> None:
    whole = [step(1, 0, 1, samples=(0, 2)), step(2, 1, 2, samples=(1,))]
    assert not samples_not_once(whole, 3)
    assert samples_not_once([*whole, step(3, 2, 3, samples=(1,))], 3)


def test_the_loss_of_a_batch_is_the_mean_over_its_ranks_once_all_have_told() -> None:
    ranks = [step(1, 0, 1, world=2, loss=0.25), step(1, 0, 1, rank=1, world=2, loss=0.75)]
    assert losses_of_batches([*ranks, step(2, 1, 2, world=2)]) == {1: 0.5}


def test_turns_are_counted_by_device() -> None:
    assert switches([step(1, 0, 1), step(1, 1, 2, job="b"), step(2, 2, 3, job="b"), step(1, 0, 9, device=1)]) == 1


def death(at: int, saved: int = 0, job: str = "a") -> Death:
    return Death(job, at * 10**6, saved)


def attempt(number: int, first: int, last: int, began: int) -> list[Step]:
    """A step a millisecond, by itself."""
    return [
        step(one, began + index, began + index + 1, attempt=number) for index, one in enumerate(range(first, last + 1))
    ]


BACK_TO_FIVE = [*attempt(1, 1, 10, 0), *attempt(2, 6, 8, 20), *attempt(4, 9, 12, 30)]


def test_what_a_later_attempt_did_again_counts_once() -> None:
    counts = what_counts(BACK_TO_FIVE)
    assert [(one.attempt, one.step) for one in counts] == [
        *((1, number) for number in range(1, 6)),
        *((2, number) for number in range(6, 9)),
        *((4, number) for number in range(9, 13)),
    ]
    assert not lost_or_repeated(counts)
    assert lost_or_repeated(BACK_TO_FIVE)


@pytest.mark.parametrize(
    ("deaths", "is_found"),
    [
        ([death(15)], False),
        ([death(15, saved=5)], False),
        ([], True),
        # there was a newer checkpoint; it was another's death; it came later
        ([death(15, saved=6)], True),
        ([death(15, job="b")], True),
        ([death(25)], True),
        # killed again before it came to a step: back to what there was at the first death
        ([death(15, saved=5), death(17, saved=7)], False),
    ],
)
def test_steps_undone_without_cause_are_found(deaths: list[Death], is_found: bool) -> None:
    assert bool(undone_without_cause(BACK_TO_FIVE, deaths)) == is_found
