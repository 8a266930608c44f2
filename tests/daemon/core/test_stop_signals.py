"""A gang whose script saves itself at a signal: when it is asked to, and what its exit counts as."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ganger.injob.page_layout import PageOrderKind, PageState
from ganger.protocol.gang_orders import DesiredOrder, OrderIntent, OrderKey, ParkLevel, by_signal
from ganger_daemon.core import gang_judgement
from ganger_daemon.core.gang_judgement import PartPhase, Todo, judge
from ganger_daemon.core.part_facts import GangPart, PartOutcome, PartOutcomeKind, Rank, RankExit
from ganger_daemon.gang.control_pages import page_order

KEY = OrderKey(1, 5)
RUN = by_signal(DesiredOrder("u", KEY, OrderIntent.RUN))
PREPARE = DesiredOrder("u", KEY, OrderIntent.PREPARE)
PAUSE, OFFLOAD, SAVE = (
    by_signal(DesiredOrder("u", KEY, OrderIntent.PARK, level, 5))
    for level in (ParkLevel.PAUSE, ParkLevel.OFFLOAD, ParkLevel.CHECKPOINT)
)
HAND_OVER = by_signal(DesiredOrder("u", KEY, OrderIntent.HAND_OVER, stop_sequence=5))
STOP = by_signal(DesiredOrder("u", KEY, OrderIntent.STOP))
SAVE_AND_STOP = by_signal(DesiredOrder("u", KEY, OrderIntent.STOP, stop_sequence=5, checkpoint_first=True))
STALE = by_signal(DesiredOrder("u", KEY, OrderIntent.STOP, grace_s=0.0))

OPAQUE = Rank(0, opaque=True)
# Its agent has reported, and it waits at a boundary.
AT_BOUNDARY = Rank(0, hello=True, state=PageState.PAUSED)


def left(code: int = 0, signal: int = 0, rank: int = 0, at: float = 1.0) -> Rank:
    return Rank(rank, exit=RankExit(code, signal, at=at))


@pytest.mark.parametrize("rank", [OPAQUE, AT_BOUNDARY])
@pytest.mark.parametrize(
    ("wanted", "todo"),
    [
        (SAVE, Todo.ASK_TO_SAVE),
        (HAND_OVER, Todo.ASK_TO_SAVE),
        (SAVE_AND_STOP, Todo.ASK_TO_SAVE),
        (STOP, Todo.TERMINATE),
        (STALE, Todo.KILL),
    ],
)
def test_a_script_is_asked_to_save_itself_once_where_it_is_to_leave(
    wanted: DesiredOrder, todo: Todo, rank: Rank
) -> None:
    gang = GangPart(wanted, (rank,), launched=True)
    assert judge(gang, 99.0) == gang_judgement.Judgement(PartPhase.STOPPING, todo=(todo,))
    asked = judge(replace(gang, asked_to_save=True), 99.0)
    assert asked.todo == (() if todo is Todo.ASK_TO_SAVE else (todo,))


def test_without_a_stop_signal_no_order_asks_a_script_to_save_itself() -> None:
    for wanted in (SAVE, HAND_OVER, SAVE_AND_STOP, STOP, PAUSE, RUN):
        plain = replace(wanted, is_by_signal=False, stop_sequence=5)
        assert Todo.ASK_TO_SAVE not in judge(GangPart(plain, (OPAQUE,), launched=True), 99.0).todo


@pytest.mark.parametrize("wanted", [SAVE, HAND_OVER, SAVE_AND_STOP])
def test_the_page_lets_a_script_run_that_is_asked_to_save_itself(wanted: DesiredOrder) -> None:
    order = page_order(wanted)
    assert order is not None
    assert order.order == PageOrderKind.RUN
    assert order.stop_seq == 0


def test_a_pause_freezes_it_and_a_stop_thaws_it_again() -> None:
    frozen = GangPart(PAUSE, (OPAQUE,), launched=True, frozen=True)
    assert gang_judgement.should_freeze(frozen, 99.0, lease_is_over=False)
    assert not gang_judgement.should_freeze(replace(frozen, wanted=SAVE), 99.0, lease_is_over=False)
    assert not gang_judgement.should_freeze(replace(frozen, asked_to_save=True), 99.0, lease_is_over=False)


def test_only_an_offload_is_beyond_it() -> None:
    assert gang_judgement.is_beyond(GangPart(OFFLOAD, (OPAQUE,), launched=True))
    for wanted in (SAVE, HAND_OVER, PAUSE):
        assert not gang_judgement.is_beyond(GangPart(wanted, (OPAQUE,), launched=True))


@pytest.mark.parametrize(
    ("rank", "code", "message"),
    [
        (left(), 0, "rank 0 exited with code 0 after its stop signal"),
        (left(3), 3, "rank 0 exited with code 3 after its stop signal"),
        (left(signal=15), -15, "rank 0 was ended by signal 15 after its stop signal"),
        (left(signal=9), -9, "rank 0 did not exit within the grace after its stop signal, and was killed"),
    ],
)
@pytest.mark.parametrize("wanted", [SAVE, HAND_OVER, RUN])
def test_any_exit_after_the_signal_is_a_yield(wanted: DesiredOrder, rank: Rank, code: int, message: str) -> None:
    gone = judge(GangPart(wanted, (rank,), launched=True, asked_to_save=True), 99.0)
    assert gone.phase is PartPhase.ENDED
    assert gone.outcome == PartOutcome(PartOutcomeKind.YIELDED, code, 0, message)


def test_an_exit_before_the_signal_is_its_own() -> None:
    done = judge(GangPart(SAVE, (left(),), launched=True), 99.0).outcome
    assert done is not None
    assert done.kind is PartOutcomeKind.DONE
    failed = judge(GangPart(SAVE, (left(1),), launched=True), 99.0).outcome
    assert failed is not None
    assert failed.kind is PartOutcomeKind.FAILED


def test_a_rank_that_has_saved_itself_does_not_hurry_the_others() -> None:
    gang = GangPart(SAVE, (left(1), replace(OPAQUE, rank=1)), launched=True, world=2, asked_to_save=True)
    assert judge(gang, 99.0) == gang_judgement.Judgement(PartPhase.STOPPING)


def test_a_cancel_during_the_grace_ends_it_as_stopped() -> None:
    asked = GangPart(STOP, (OPAQUE,), launched=True, asked_to_save=True)
    assert judge(asked, 99.0).todo == (Todo.TERMINATE,)
    gone = replace(asked, ranks=(left(signal=15),), stop_signalled=True)
    assert judge(gone, 99.0).outcome == PartOutcome(PartOutcomeKind.STOPPED, -15)


def test_a_gang_that_was_not_launched_is_not_launched_for_its_signal() -> None:
    parked = judge(GangPart(SAVE), 0.0)
    assert parked.phase is PartPhase.ENDED
    assert parked.outcome is not None
    assert parked.outcome.kind is PartOutcomeKind.YIELDED


def test_a_destination_without_a_state_to_restore_waits_without_a_process_until_it_may_run() -> None:
    assert judge(GangPart(PREPARE), 0.0) == gang_judgement.Judgement(PartPhase.PREPARED)
    assert judge(GangPart(PREPARE, restores=True), 0.0).todo == (Todo.LAUNCH,)
    assert judge(GangPart(RUN), 0.0).todo == (Todo.LAUNCH,)
