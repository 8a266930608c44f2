"""The small rules: escalation, relay, leases, offload, checkpoints that may go."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from ganger.injob.page_layout import PagePhase, Word
from ganger.protocol.stop_rules import (
    NEVER,
    RelayedPoint,
    expired,
    lease_until,
    longest_hold_s,
    merge_point,
    merge_points,
    renewed,
)
from ganger_daemon.checkpoints.gang_checkpoints import surplus
from ganger_daemon.checkpoints.storage import CheckpointName, Shard, ShardCollection
from ganger_daemon.gang import escalation
from ganger_daemon.gang.control_pages import ControlPages
from ganger_daemon.gang.escalation import Ladder, Rung
from ganger_daemon.gang.gang_memory import compare
from ganger_daemon.gang.step_rate import PageSample, StepRate, rate_between
from hypothesis import given
from hypothesis import strategies as st


def ordered(iteration_s: float, grace: float, *, ends: bool = True) -> Ladder:
    return escalation.begin(0.0, iteration_s, grace, 60.0, 30.0, ends=ends)


def rungs(ladder: Ladder, until: float) -> list[tuple[float, Rung]]:
    return [(float(now), ladder.rung) for now in range(int(until) + 1) if ladder.climb(float(now))]


def test_an_order_climbs_from_dump_to_kill() -> None:
    assert rungs(ordered(0.1, 10.0), 200.0) == [(30.0, Rung.DUMP), (60.0, Rung.TERMINATE), (70.0, Rung.KILL)]


def test_the_order_of_a_move_ends_no_process() -> None:
    assert rungs(ordered(0.1, 10.0, ends=False), 1e4) == [(30.0, Rung.DUMP), (60.0, Rung.GIVE_UP)]


def test_long_iterations_get_two_of_themselves() -> None:
    assert rungs(ordered(50.0, 5.0), 300.0)[0] == (100.0, Rung.DUMP)


def test_a_stop_begins_with_the_signal_and_ends_with_the_kill() -> None:
    assert rungs(Ladder(0.0, 7.0), 50.0) == [(7.0, Rung.KILL)]


def test_evaluation_moves_the_clock_but_not_for_ever() -> None:
    ladder = ordered(0.0, 5.0)
    ladder.extend(100.0)
    assert rungs(ladder, 400.0)[0] == (130.0, Rung.DUMP)
    ladder.extend(1e9)
    assert ladder.extended == escalation.EXTENSION_S


POINTS = st.builds(
    RelayedPoint,
    rank=st.just(0),
    step=st.integers(0, 50),
    ack_sequence=st.integers(0, 3),
    ack_step=st.integers(0, 50),
    done=st.booleans(),
)


@given(POINTS, POINTS)
def test_merging_points_never_goes_back(known: RelayedPoint, heard: RelayedPoint) -> None:
    both = merge_point(known, heard)
    assert both.step >= max(known.step, heard.step)
    assert both.ack_step >= known.ack_step
    assert both.step >= both.ack_step
    assert merge_point(both, heard) == both
    assert both.done or not (known.done or heard.done)


def test_the_ack_of_a_stop_follows_that_of_a_checkpoint_whatever_their_numbers() -> None:
    checkpoint = RelayedPoint(0, 10, 1 << 62 | 1, 10)
    stop = RelayedPoint(0, 10, 3, 10)
    assert merge_point(checkpoint, stop) == stop
    assert merge_point(stop, RelayedPoint(0, 12, 1 << 62 | 2, 12)).ack_sequence == 1 << 62 | 2


def test_points_of_own_and_of_unknown_ranks_are_ignored() -> None:
    known = {0: RelayedPoint(0, 5), 1: RelayedPoint(1, 3)}
    merged = merge_points(known, [RelayedPoint(0, 99), RelayedPoint(1, 4), RelayedPoint(7, 1)], frozenset({0}))
    assert merged == {0: RelayedPoint(0, 5), 1: RelayedPoint(1, 4)}


@pytest.mark.parametrize(
    ("until", "has_orders", "then"),
    [
        # It still runs.
        (100, True, 900),
        (100, False, 900),
        (NEVER, False, 900),
        # It has ended, or only the ranks know of one.
        (10, True, 900),
        (10, False, 10),
        (None, True, 900),
        (None, False, None),
    ],
)
def test_an_answer_without_orders_renews_no_lease_that_has_ended(
    until: int | None, has_orders: bool, then: int | None
) -> None:
    assert renewed(until, 900, has_orders, now_ns=50) == then


def test_a_lease_counts_from_the_sending_and_never_means_never() -> None:
    assert lease_until(1_000, 2.0) == 2_000_001_000
    assert lease_until(1_000, None) == 0


@pytest.mark.parametrize(("lost_after_s", "longest"), [(None, 60.0), (600.0, 60.0), (240.0, 60.0), (40.0, 10.0)])
def test_a_heartbeat_is_held_for_a_quarter_of_the_lease_at_most(lost_after_s: float | None, longest: float) -> None:
    assert longest_hold_s(60.0, lost_after_s) == longest
    assert not expired(0, 10**20)
    assert expired(10, 11)


def test_memory_counts_as_free_when_nearly_all_of_it_was_seen_to_go() -> None:
    assert compare({1: 400 << 20}, {1: 90 << 20}, 310 << 20).enough
    assert not compare({1: 400 << 20}, {1: 300 << 20}, 310 << 20).enough
    assert not compare({1: 400 << 20}, {1: -1}, 310 << 20).enough


def test_rates_are_means_and_a_restart_counts_as_nothing() -> None:
    early, late = PageSample(10.0, 100, 0, 0), PageSample(12.0, 150, 0, 1_000_000_000)
    assert rate_between(early, late).steps_per_second == 25.0
    assert rate_between(early, late).data_wait_share == 0.5
    assert rate_between(late, replace(early, time_s=20.0)).steps_per_second == 0.0
    assert rate_between(None, late).steps_per_second == 0.0


def test_the_two_newest_checkpoints_stay_and_no_other_once_the_master_has_recorded_them() -> None:
    names = [CheckpointName(step, 1) for step in (10, 20, 30, 40)]
    assert surplus(names, names[3], names[2:]) == (names[0], names[1])
    assert surplus(names[:2], names[1]) == ()


def test_what_the_master_would_start_from_stays_and_the_first_it_has_not_acknowledged_however_long_it_is_away() -> None:
    names = [CheckpointName(step, 1) for step in range(10, 100, 10)]
    for newest in range(2, len(names)):
        gone = surplus(names[: newest + 1], names[newest], names[:2])
        assert not {*names[:3], *names[newest - 1 : newest + 1]} & set(gone)
    assert surplus(names, names[-1], names[:2]) == tuple(names[3:-2])
    assert surplus(names, names[-1]) == tuple(names[1:-2])


def test_a_good_checkpoint_is_not_crowded_out_by_a_damaged_one_of_a_higher_step() -> None:
    good, damaged, *own = CheckpointName(10, 1), CheckpointName(20, 1), CheckpointName(14, 2), CheckpointName(18, 2)
    assert surplus([good, damaged, own[0]], own[0], [good]) == ()
    assert surplus([good, damaged, *own], own[1], [own[0], good]) == (damaged,)
    assert surplus([good, *own], own[1], own) == (good,)


def test_shards_of_another_step_begin_a_gathering_afresh() -> None:
    gathering = ShardCollection(2, 10).add(10, (Shard(0, 1, "x:1"),))
    assert not gathering.complete
    assert gathering.add(9, (Shard(1, 1, "x:2"),)) == gathering
    assert not gathering.add(11, (Shard(1, 1, "x:2"),)).complete
    assert gathering.add(10, (Shard(1, 1, "x:2"),)).complete


def test_the_figures_of_a_gang_are_those_of_a_rank_that_takes_samples(tmp_path: Path) -> None:
    pages = ControlPages(tmp_path, epoch=1, world=3, local=(0, 1, 2))
    pages.create({0: 1, 1: 1, 2: 1})
    # A parameter server and two workers.
    for rank, (step, samples) in enumerate(((6, 0), (8, 80), (7, 70))):
        pages[rank].set(Word.STEP, step)
        pages[rank].set(Word.SAMPLES, samples)
    look = StepRate(pages, (0, 1, 2)).measure()
    assert look is not None
    assert (look[0].step, look[0].samples) == (7, 70)


def test_a_gang_evaluates_while_a_rank_does_and_the_farthest_one_counts(tmp_path: Path) -> None:
    pages = ControlPages(tmp_path, epoch=1, world=2, local=(0, 1))
    pages.create({0: 1, 1: 1})
    rate = StepRate(pages, (0, 1))
    for rank in (0, 1):
        pages[rank].set(Word.STEP, 7)
    look = rate.measure()
    assert look is not None
    assert (look[0].evaluated, look[0].evaluated_in_row, look[0].evaluated_age_s) == (0, 0, None)
    now = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    for rank, evaluated, before in ((0, 12, 10), (1, 9, 20)):
        pages[rank].set(Word.PHASE, PagePhase.EVALUATION)
        pages[rank].set(Word.EVALUATED_TIME, now - 2_000_000_000)
        pages[rank].set(Word.EVALUATED_BEFORE, before)
        pages[rank].set(Word.EVALUATED, evaluated)
    look = rate.measure()
    assert look is not None
    assert (look[0].evaluated, look[0].evaluated_in_row) == (12, 2)
    assert look[0].evaluated_age_s == pytest.approx(2.0, abs=1.0)
    # A job may write anything into its page.
    pages[1].set(Word.EVALUATED, 13)
    look = rate.measure()
    assert look is not None
    assert (look[0].evaluated, look[0].evaluated_in_row) == (13, 0)
