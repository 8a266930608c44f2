"""Ids that another master has given are not given again, and only operators decide about quarantined gangs."""

from __future__ import annotations

import pytest
from ganger.wire.errors import RoleNotPermitted
from ganger.wire.methods import CallerIdentity, CallerRole, check_call
from ganger_master.core.quarantine import is_skipped, note_ids
from ganger_master.core.settings import CoreSettings
from ganger_master.core.state import State
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.one_of(st.none(), st.integers(1, 400)), max_size=60))
def test_an_epoch_that_a_node_reports_is_never_given_and_one_that_was_given_is_never_taken_for_anothers(
    steps: list[int | None],
) -> None:
    state, given_here, met = State(CoreSettings()), [], set()
    for reported in steps:
        if reported is None:
            given_here.append(state.take_epoch())
        else:
            if is_skipped(state, reported):
                met.add(reported)
            note_ids(state, reported + 1, reported + 1)
            assert state.counters.next_job > reported
    assert len(set(given_here)) == len(given_here)
    assert not met & set(given_here)
    assert not any(is_skipped(state, epoch) for epoch in given_here)
    assert all(is_skipped(state, epoch) for epoch in met)


@pytest.mark.parametrize("role", list(CallerRole))
@pytest.mark.parametrize(
    "method", ["ListQuarantinedGangs", "EndQuarantinedGang", "AdoptQuarantinedGang", "SettleRestore"]
)
def test_only_operators_decide_about_quarantined_gangs(role: CallerRole, method: str) -> None:
    path, caller = f"/ganger.v1.NodeService/{method}", CallerIdentity(role, "x")
    if role is CallerRole.OPERATOR:
        check_call(path, caller)
        return
    with pytest.raises(RoleNotPermitted):
        check_call(path, caller)
