"""docs/reference/policies.md has every order with its summary and with what places under it."""

from __future__ import annotations

from pathlib import Path

import pytest
from ganger_master.policies import NAMES, Places, live_policy_named, policy_named
from ganger_master.policies.order_registry import ORDERS, summary

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "policies.md").read_text()
_ORDERS = PAGE.partition("## Whole policies")[0].splitlines()
_ROWS = {line.split("`")[1]: line for line in _ORDERS if line.startswith("| `")}


def test_the_page_has_a_row_for_every_order_and_no_other() -> None:
    assert set(_ROWS) == set(ORDERS)


@pytest.mark.parametrize("name", sorted(ORDERS))
def test_the_page_describes_every_order_and_what_places_under_it(name: str) -> None:
    policy = policy_named(name)
    placed_by = "simulator" if policy.order.knows_durations else policy.places.value
    assert _ROWS[name] == f"| `{name}` | {placed_by} | {summary(policy.order.name)} |"


def test_other_names_are_on_the_page() -> None:
    assert [name for name in NAMES if f"`{name}`" not in PAGE] == []


def test_a_live_cluster_accepts_every_order_that_needs_no_oracle() -> None:
    for name, order in ORDERS.items():
        if policy_named(name).order.knows_durations:
            with pytest.raises(ValueError, match="for the simulator only"):
                live_policy_named(name)
        else:
            stops = policy_named(name).order.preempts
            assert live_policy_named(name).places is (Places.PLANNER if stops else Places.JOBS), order.name
    assert live_policy_named("fifo+best-fit").places is Places.PLANNER


def test_optimus_decides_on_sizes_and_places_in_the_planner_live_too() -> None:
    policy = live_policy_named("optimus")
    assert (policy.resizes, policy.places) == (True, Places.PLANNER)
    with pytest.raises(KeyError, match="places by itself"):
        policy_named("optimus+best-fit")


def test_any_policy_but_optimus_may_grow_elastic_jobs() -> None:
    policy = policy_named("fifo+elastic")
    assert (policy.name, policy.grows, policy.places, policy.order.name) == (
        "fifo+elastic",
        True,
        Places.PLANNER,
        "fifo",
    )
    assert policy_named("gandiva").grows
    assert not policy_named("las+best-fit").grows
    assert live_policy_named("las+elastic+role").grows
    with pytest.raises(KeyError, match="decides on the size of elastic jobs itself"):
        policy_named("optimus+elastic")


def test_ganger_packs_unless_it_tunes_or_moves_and_so_does_any_order_that_stops_jobs() -> None:
    assert policy_named("ganger").packs
    assert policy_named("ganger").order.name == "ganger-alone"
    assert not policy_named("ganger-alone").packs
    assert live_policy_named("ganger+elastic").packs
    assert not live_policy_named("ganger+synergy-tune").packs
    assert not live_policy_named("ganger+defrag").packs
    assert live_policy_named("las+packs").packs
    for name in (
        "fifo+packs",
        "fifo+best-fit+packs",
        "gandiva+packs",
        "optimus+packs",
        "las+synergy-tune+packs",
        "las+defrag+packs",
    ):
        with pytest.raises(KeyError, match="cannot be composed"):
            policy_named(name)


def test_synergy_is_las_tuned_by_synergy() -> None:
    one, other = policy_named("synergy"), policy_named("las+synergy-tune")
    assert (one.order, one.tuning, one.placement) == (other.order, other.tuning, other.placement)
    assert policy_named("synergy+best-fit").placement.name == "best-fit"


def test_a_live_master_shares_gpus_by_its_planner() -> None:
    assert live_policy_named("gandiva").places is Places.PLANNER
