"""Stop rules of job arrays: what each rule stops, against what its paper says, and what none of them ever does."""

from __future__ import annotations

import pytest
from ganger_master.core.array_model import Contender, RuleKind, StopRule, Value, best, judge
from hypothesis import given
from hypothesis import strategies as st

HALVING = StopRule(RuleKind.HALVING, "accuracy", maximise=True, first=10)
ASHA = StopRule(RuleKind.ASHA, "loss", first=10)
MEDIAN = StopRule(RuleKind.MEDIAN, "loss", first=10)
THRESHOLD = StopRule(RuleKind.THRESHOLD, "loss", first=10, bound=1.0)

RULES = (HALVING, StopRule(RuleKind.HALVING, "loss", first=1, factor=3))
_RUNGS = 3
_CURVE = st.lists(st.sampled_from((None, 0.0, 1.0, 2.0, 3.0)), min_size=_RUNGS, max_size=_RUNGS)
_CURVES = st.lists(_CURVE, min_size=1, max_size=7)
_ORDERS = st.lists(st.integers(0, 6), min_size=1, max_size=20)


def contenders(*records: tuple[Value, ...]) -> list[Contender]:
    return [Contender(index, one) for index, one in enumerate(records)]


def stopped(rule: StopRule, *records: tuple[Value, ...], reporting: int = 0) -> list[int]:
    return [stop.index for stop in judge(rule, contenders(*records), reporting)]


def test_rungs_of_halving_are_further_and_further_apart_and_those_of_the_others_are_not() -> None:
    assert [HALVING.rung(index) for index in range(4)] == [10, 20, 40, 80]
    assert [MEDIAN.rung(index) for index in range(4)] == [10, 20, 30, 40]


def test_halving_stops_a_member_as_soon_as_it_cannot_be_among_the_better_half() -> None:
    assert stopped(HALVING, (0.1,), (), (), ()) == []
    assert stopped(HALVING, (0.1,), (0.5,), (), ()) == []
    # Two of four go on, and two are better than it already.
    assert stopped(HALVING, (0.1,), (0.5,), (0.3,), ()) == [0]
    assert stopped(HALVING, (0.1,), (0.5,), (0.3,), (0.4,)) == [0, 2]


def test_halving_stops_one_that_ran_on_while_nothing_was_decided() -> None:
    (stop,) = judge(HALVING, contenders((0.2, 0.9), (0.5,), (0.6,), ()), reporting=2)
    assert (stop.index, stop.rung, stop.value) == (0, 0, 0.2)
    assert stop.why == "2 others did better, and 2 go on"


def test_results_beyond_the_rung_at_which_a_member_was_stopped_count_against_no_member() -> None:
    lost = Contender(0, (0.2,), is_live=False)
    assert judge(HALVING, [lost, Contender(1, (0.5, 0.3))], reporting=1) == ()


def test_at_least_one_member_continues_and_ties_stop_no_member() -> None:
    assert stopped(HALVING, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)) == []
    assert stopped(HALVING, (0.5, 0.5, 0.6), (0.5, 0.5, 0.5)) == [1]


def test_a_value_that_is_no_number_is_the_worst() -> None:
    assert stopped(HALVING, (None,), (0.0,)) == [0]
    assert stopped(THRESHOLD, (None,)) == [0]


def test_members_that_failed_are_not_compared_with() -> None:
    failed = [Contender(index, (0.9,), is_live=False, has_failed=True) for index in (2, 3)]
    assert judge(HALVING, [*contenders((0.1,), (0.2,)), *failed], reporting=0)[0].index == 0
    assert judge(HALVING, [*contenders((0.1,), ()), *failed], reporting=0) == ()


def test_asha_judges_a_member_among_those_that_came_before_it() -> None:
    assert stopped(ASHA, (3.0,), ()) == []
    assert stopped(ASHA, (3.0,), (1.0,)) == [0]
    assert stopped(ASHA, (1.0,), (3.0,)) == []
    assert stopped(ASHA, (2.0,), (1.0,), (3.0,), (4.0,)) == []
    assert stopped(ASHA, (2.0, 5.0), (1.0, 1.0), (3.0,), (4.0,)) == [0]


def test_the_median_rule_compares_the_best_so_far_with_the_running_means_of_the_others() -> None:
    others = ((2.0, 2.0), (4.0, 2.0), (6.0, 6.0))
    # The means are 2, 3 and 6.
    assert stopped(MEDIAN, (5.0, 2.9), *others) == []
    assert stopped(MEDIAN, (5.0, 3.1), *others) == [0]
    assert stopped(MEDIAN, (5.0, 3.1), *others[:2]) == []


def test_the_threshold_is_a_bound_on_the_newest_value() -> None:
    assert stopped(THRESHOLD, (0.9, 1.0)) == []
    assert stopped(THRESHOLD, (0.9, 1.1)) == [0]


def test_the_best_is_the_one_that_the_rule_prefers() -> None:
    values = [(0, 0.3), (1, None), (2, 0.5)]
    assert best(HALVING, values) == (2, 0.5)
    assert best(ASHA, values) == (0, 0.3)
    assert best(ASHA, [(1, None)]) is None


def successive_halving(rule: StopRule, curves: list[list[Value]]) -> set[int]:
    """Return the members that continue behind the last rung by the paper's synchronous algorithm, in which all members
    reach a rung before any continues."""
    sign = -1 if rule.maximise else 1
    alive, keeps = set(range(len(curves))), len(curves)
    for rung in range(len(curves[0])):
        keeps = max(1, int(keeps / rule.factor))
        key = {index: float("inf") if (v := curves[index][rung]) is None else sign * v for index in alive}
        alive = {index for index in alive if sum(key[other] < key[index] for other in alive) < keeps}
    return alive


@given(_CURVES, _ORDERS, st.sampled_from(RULES))
def test_in_whatever_order_members_come_to_their_rungs_halving_ends_as_the_papers(
    curves: list[list[Value]], order: list[int], rule: StopRule
) -> None:
    assert _left(rule, curves, order) == successive_halving(rule, curves)


@given(_CURVES, _ORDERS, st.sampled_from((RuleKind.ASHA, RuleKind.MEDIAN)))
def test_the_other_comparing_rules_leave_one_member_at_least(
    curves: list[list[Value]], order: list[int], kind: RuleKind
) -> None:
    assert _left(StopRule(kind, first=1), curves, order)


def _left(rule: StopRule, curves: list[list[Value]], order: list[int]) -> set[int]:
    """Return the members that continue behind the last rung, when members reach their next rungs in this order."""
    records: dict[int, tuple[Value, ...]] = dict.fromkeys(range(len(curves)), ())
    live, turn = set(records), 0
    while able := [index for index in sorted(live) if len(records[index]) < _RUNGS]:
        index = able[order[turn % len(order)] % len(able)]
        turn += 1
        records[index] = tuple(curves[index][: len(records[index]) + 1])
        stops = judge(rule, _now(records, live), index)
        assert rule.kind is RuleKind.HALVING or {stop.index for stop in stops} <= {index}
        for stop in stops:
            live.remove(stop.index)
            records[stop.index] = records[stop.index][: stop.rung + 1]
        # Asked again, it has no more to say.
        assert judge(rule, _now(records, live), index) == () or rule.kind is not RuleKind.HALVING
    return live


def _now(records: dict[int, tuple[Value, ...]], live: set[int]) -> list[Contender]:
    return [Contender(index, known, is_live=index in live) for index, known in records.items()]


def test_an_unknown_kind_is_an_error_and_not_a_rule() -> None:
    with pytest.raises(ValueError, match="GUESS"):
        RuleKind("GUESS")
