"""What the oracles let pass and what not, where the production core gives them no occasion to speak."""

from __future__ import annotations

import pytest
from faultsim.checkers import Oracle, RuleBrokenError


def trained(to: int) -> Oracle:
    oracle = Oracle()
    oracle.submitted("uid-1", 60)
    oracle.placed("uid-1", 1)
    for step in range(1, to + 1):
        oracle.stepped("uid-1", 1, step, [("n1", 0)])
        if step == 20:
            oracle.checkpointed("uid-1", step)
            oracle.made_known("uid-1", step)
    return oracle


def test_an_attempt_on_a_node_that_is_given_up_may_go_back_once() -> None:
    oracle = trained(to=25)
    oracle.given_up("n1", silent=65.0, allowed=60.0, attempts=[("uid-1", 1)])
    oracle.placed("uid-1", 2)
    oracle.restored("uid-1", 2, 20, from_parked=False)
    oracle.stepped("uid-1", 2, 21, [("n2", 0)])
    oracle.placed("uid-1", 3)
    with pytest.raises(RuleBrokenError, match="goes back from 21 to 20"):
        oracle.restored("uid-1", 3, 20, from_parked=False)


def test_an_attempt_without_whose_report_a_restore_is_settled_may_go_back_although_it_has_ended_well() -> None:
    oracle = trained(to=60)
    oracle.rolled_back({1: ("uid-1", 20)})
    oracle.unreported([("uid-1", 1)])
    oracle.placed("uid-1", 2)
    oracle.restored("uid-1", 2, 20, from_parked=False)
    oracle.stepped("uid-1", 2, 21, [("n2", 0)])


def test_a_copy_left_on_a_node_that_is_given_up_lets_nothing_go_back() -> None:
    oracle = trained(to=25)
    oracle.stepped("uid-1", 2, 26, [("n2", 0)])
    oracle.given_up("n1", silent=65.0, allowed=60.0, attempts=[("uid-1", 1)])
    oracle.placed("uid-1", 3)
    with pytest.raises(RuleBrokenError, match="goes back from 26 to 20"):
        oracle.restored("uid-1", 3, 20, from_parked=False)


@pytest.mark.parametrize("dies", [True, False])
def test_a_parked_copy_goes_on_where_it_stands_only_if_what_took_over_from_it_has_died(dies: bool) -> None:
    oracle = trained(to=25)
    oracle.restored("uid-1", 2, 25, from_parked=True)
    oracle.stepped("uid-1", 2, 26, [("n2", 0)])
    if not dies:
        with pytest.raises(RuleBrokenError, match="goes back from 26 to 25"):
            oracle.restored("uid-1", 3, 25, from_parked=True)
        return
    oracle.died("uid-1")
    oracle.restored("uid-1", 3, 25, from_parked=True)
    oracle.stepped("uid-1", 3, 26, [("n1", 0)])


def test_a_migration_from_anything_older_loses_steps_whatever_rank_died() -> None:
    oracle = trained(to=25)
    oracle.restored("uid-1", 2, 25, from_parked=True)
    oracle.stepped("uid-1", 2, 26, [("n2", 0)])
    oracle.died("uid-1")
    with pytest.raises(RuleBrokenError, match="a move lost steps"):
        oracle.restored("uid-1", 3, 24, from_parked=True)


def test_what_starts_from_storage_starts_from_the_newest_checkpoint_that_is_known() -> None:
    oracle = trained(to=25)
    oracle.died("uid-1")
    oracle.placed("uid-1", 2)
    with pytest.raises(RuleBrokenError, match="starts at step 0, not at checkpoint 20"):
        oracle.restored("uid-1", 2, 0, from_parked=False)


def test_one_that_becomes_known_later_is_for_the_attempt_after_that_and_passes_over_steps_that_were_done() -> None:
    oracle = trained(to=45)
    oracle.checkpointed("uid-1", 40)
    oracle.given_up("n1", silent=65.0, allowed=60.0, attempts=[("uid-1", 1)])
    oracle.placed("uid-1", 2)
    oracle.made_known("uid-1", 40)
    oracle.restored("uid-1", 2, 20, from_parked=False)
    oracle.stepped("uid-1", 2, 21, [("n2", 0)])
    oracle.died("uid-1")
    oracle.placed("uid-1", 3)
    with pytest.raises(RuleBrokenError, match="starts at step 20, not at checkpoint 40"):
        oracle.restored("uid-1", 3, 20, from_parked=False)
    oracle.restored("uid-1", 3, 40, from_parked=False)
    oracle.stepped("uid-1", 3, 41, [("n2", 0)])


def test_no_checkpoint_is_published_that_no_rank_wrote() -> None:
    with pytest.raises(RuleBrokenError, match="which no rank wrote"):
        trained(to=25).made_known("uid-1", 25)


def test_a_node_is_not_given_up_before_its_time() -> None:
    with pytest.raises(RuleBrokenError, match="59 s of silence"):
        trained(to=1).given_up("n1", silent=59.0, allowed=60.0, attempts=[("uid-1", 1)])


def test_a_device_is_used_only_while_what_its_user_needs_is_left_beside_what_others_keep() -> None:
    oracle, device = Oracle(), [("n1", 0)]
    oracle.memory["n1"] = 100
    for uid, needed in (("whole", 100), ("most", 90), ("unknown", 0)):
        oracle.submitted(uid, 60, needed)
    oracle.occupied("most", 1, device)
    oracle.offloaded("most", 1, device, 10)
    oracle.occupied("unknown", 2, device)
    oracle.left("unknown", 2, device)
    with pytest.raises(RuleBrokenError, match="need 100 of the 100 bytes"):
        oracle.occupied("whole", 3, device)
    oracle.left("whole", 3, device)
    # What it keeps itself is its own when it goes on, and gone when it has ended.
    oracle.occupied("most", 1, device)
    oracle.offloaded("most", 1, device, 10)
    oracle.left("most", 1, device)
    oracle.occupied("whole", 4, device)
    with pytest.raises(RuleBrokenError, match="others keep 5"):
        oracle.offloaded("most", 5, device, 5)
