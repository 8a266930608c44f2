"""What a desired set means for what is here: tables, and the promises that hold for all sets."""

from __future__ import annotations

from dataclasses import replace

from ganger.protocol.gang_orders import DesiredOrder, OrderIntent, OrderKey
from ganger_daemon.core.gang_judgement import (
    Forget,
    GangId,
    Here,
    Obey,
    Observed,
    ReportGone,
    Start,
    StopAbsent,
    reconcile,
)
from hypothesis import given
from hypothesis import strategies as st


def wanted(uid: str = "a", epoch: int = 1, sequence: int = 1, intent: OrderIntent = OrderIntent.RUN) -> DesiredOrder:
    return DesiredOrder(uid, OrderKey(epoch, sequence), intent)


def here(uid: str = "a", epoch: int = 1, sequence: int = 1, **more: bool) -> tuple[GangId, Here]:
    return (uid, epoch), Here(OrderKey(epoch, sequence), **more)


def observed(
    *gangs: tuple[GangId, Here], before: tuple[tuple[str, int], ...] = (), finished: dict[str, int] | None = None
) -> Observed:
    return Observed(dict(gangs), finished or {}, frozenset(before))


def test_a_wanted_gang_that_is_not_here_is_started() -> None:
    assert reconcile([wanted()], observed()) == (Start(wanted()),)


def test_a_newer_order_is_obeyed_and_an_older_one_ignored() -> None:
    assert reconcile([wanted(sequence=3)], observed(here(sequence=2))) == (Obey(wanted(sequence=3)),)
    assert reconcile([wanted(sequence=2)], observed(here(sequence=2))) == ()
    assert reconcile([wanted(sequence=1)], observed(here(sequence=2))) == ()


def test_a_gang_that_no_desired_set_has_had_is_left_alone() -> None:
    assert reconcile([], observed(here())) == ()


def test_a_gang_that_this_session_wanted_before_is_stopped_when_it_is_absent() -> None:
    (action,) = reconcile([], observed(here(), before=(("a", 1),)))
    assert isinstance(action, StopAbsent)
    assert reconcile([], observed(here(stopping=True), before=(("a", 1),))) == ()


def test_an_older_epoch_is_stopped_when_only_a_newer_one_is_wanted() -> None:
    actions = reconcile([wanted(epoch=2)], observed(here(epoch=1)))
    assert [type(action) for action in actions] == [StopAbsent, Start]


def test_source_and_destination_of_a_move_on_one_node_live_together() -> None:
    actions = reconcile([wanted(epoch=1), wanted(epoch=2, intent=OrderIntent.PREPARE)], observed(here(epoch=1)))
    assert actions == (Start(wanted(epoch=2, intent=OrderIntent.PREPARE)),)


def test_an_epoch_that_ended_here_never_starts_again() -> None:
    assert reconcile([wanted(epoch=1)], observed(finished={"a": 1})) == (ReportGone(wanted(epoch=1)),)


def test_what_is_to_be_parked_but_is_not_here_is_said_to_be_gone() -> None:
    asked = wanted(intent=OrderIntent.PARK)
    assert reconcile([asked], observed()) == (ReportGone(asked),)


def test_an_outcome_is_forgotten_once_acknowledged_and_no_earlier() -> None:
    assert reconcile([], observed(here(ended=True))) == ()
    assert reconcile([], observed(here(ended=True)), frozenset({1})) == (Forget(("a", 1)),)
    assert reconcile([wanted()], observed(here(ended=True)), frozenset({1})) == ()


UIDS = st.sampled_from(["a", "b", "c"])
WANTED = st.builds(
    wanted, uid=UIDS, epoch=st.integers(1, 4), sequence=st.integers(1, 4), intent=st.sampled_from(list(OrderIntent))
)
HERE = st.builds(
    here,
    uid=UIDS,
    epoch=st.integers(1, 4),
    sequence=st.integers(1, 4),
    ended=st.booleans(),
    stopping=st.booleans(),
)
SETS = st.lists(WANTED, max_size=6)
STATES = st.builds(
    lambda gangs, before, finished: observed(*gangs, before=tuple(before), finished=finished),
    st.lists(HERE, max_size=6),
    st.lists(st.tuples(UIDS, st.integers(1, 4)), max_size=4),
    st.dictionaries(UIDS, st.integers(1, 4)),
)


def carried_out(state: Observed, actions: tuple[object, ...]) -> Observed:
    gangs, finished = dict(state.gangs), dict(state.finished)
    for action in actions:
        match action:
            case Start(one) | ReportGone(one):
                gangs[one.job_uid, one.epoch] = Here(one.order, isinstance(action, ReportGone))
            case Obey(one):
                gangs[one.job_uid, one.epoch] = replace(gangs[one.job_uid, one.epoch], order=one.order)
            case StopAbsent(key, _):
                gangs[key] = replace(gangs[key], stopping=True)
            case Forget(key):
                del gangs[key]
                finished[key[0]] = max(finished.get(key[0], 0), key[1])
    return Observed(gangs, finished, state.wanted_before)


@given(SETS, STATES, st.frozensets(st.integers(1, 4)))
def test_doing_what_was_decided_leaves_nothing_but_reports_to_do(
    desired: list[DesiredOrder], state: Observed, acknowledged: frozenset[int]
) -> None:
    after = carried_out(state, reconcile(desired, state, acknowledged))
    again = reconcile(desired, after, acknowledged)
    # a stop that is wanted of something gone is answered again for as long as it is wanted
    assert all(isinstance(action, ReportGone | Forget) for action in again)


@given(SETS, STATES, st.frozensets(st.integers(1, 4)))
def test_nothing_is_ever_stopped_on_doubt(
    desired: list[DesiredOrder], state: Observed, acknowledged: frozenset[int]
) -> None:
    mentioned = {(one.job_uid, one.epoch) for one in desired}
    for action in reconcile(desired, state, acknowledged):
        if isinstance(action, StopAbsent):
            uid, epoch = action.gang
            assert action.gang not in mentioned
            newer = any(other == uid and number > epoch for other, number in mentioned)
            assert newer or action.gang in state.wanted_before


@given(SETS, STATES)
def test_no_order_is_obeyed_that_is_not_higher_and_nothing_finished_starts(
    desired: list[DesiredOrder], state: Observed
) -> None:
    for action in reconcile(desired, state):
        if isinstance(action, Obey):
            assert action.wanted.order > state.gangs[action.wanted.job_uid, action.wanted.epoch].order
        if isinstance(action, Start):
            assert action.wanted.epoch > state.finished.get(action.wanted.job_uid, 0)
