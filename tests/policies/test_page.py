"""docs/reference/policies.md has every order with its summary and with what places under it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ganger_master.policies import NAMES, Colocate, Grow, ResizeByOptimus, StartByRank, live_policy_named, policy_named
from ganger_master.policies.order_registry import ORDERS, summary

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "policies.md").read_text()
_ORDERS = PAGE.partition("## The orders")[2].partition("## Whole policies")[0].splitlines()
_ROWS = {line.split("`")[1]: line for line in _ORDERS if line.startswith("| `")}


def test_the_page_has_a_row_for_every_order_and_no_other() -> None:
    assert set(_ROWS) == set(ORDERS)


@pytest.mark.parametrize("name", sorted(ORDERS))
def test_the_page_describes_every_order_and_what_places_under_it(name: str) -> None:
    policy = policy_named(name)
    placed_by = "simulator" if policy.order.knows_durations else "planner" if policy.is_planned else "jobs"
    assert _ROWS[name] == f"| `{name}` | {placed_by} | {summary(policy.order.name)} |"


def test_the_page_lists_what_does_not_compose_and_all_else_does() -> None:
    rows = [line.split("|")[1:3] for line in PAGE.partition("## What composes")[2].partition("\n##")[0].splitlines()]
    refused = {
        part.strip(" `"): set(re.findall("`([^`]+)`", bases)) for part, bases in (row for row in rows if len(row) == 2)
    }
    for part, key in {
        "best-fit": "a placement",
        "elastic": "elastic",
        "packs": "packs",
        "defrag": "",
        "role": "",
    }.items():
        found = set()
        for base in NAMES:
            try:
                policy_named(f"{base}+{part}")
            except KeyError:
                found.add(base)
        expected = refused[key] if key else set()
        assert found == expected, part


def test_other_names_are_on_the_page() -> None:
    assert [name for name in NAMES if f"`{name}`" not in PAGE] == []


def test_a_live_cluster_accepts_every_order_that_needs_no_oracle() -> None:
    for name, order in ORDERS.items():
        if policy_named(name).order.knows_durations:
            with pytest.raises(ValueError, match="for the simulator only"):
                live_policy_named(name)
        else:
            assert live_policy_named(name).is_planned is order.needs_planner, order.name
    assert live_policy_named("fifo+best-fit").is_planned


def test_optimus_decides_on_sizes_and_places_in_the_planner_live_too() -> None:
    policy = live_policy_named("optimus")
    assert policy.is_planned
    assert policy.stages == (ResizeByOptimus(),)
    assert policy_named("optimus+best-fit").placement.name == "best-fit"


def test_an_order_by_arrival_without_preemption_has_stages_only_with_another_part() -> None:
    assert policy_named("fifo").stages == ()
    policy = policy_named("fifo+elastic")
    assert policy.is_planned
    assert (policy.name, policy.order.name) == ("fifo+elastic", "fifo")
    assert policy.stages == (Grow(), StartByRank())
    assert policy_named("las").stages == (StartByRank(),)


def test_ganger_co_locates_whatever_else_it_does_and_so_does_any_order_that_preempts() -> None:
    assert policy_named("ganger").order.name == "ganger-alone"
    for name in ("ganger", "ganger+elastic", "ganger+synergy-tune", "ganger+defrag", "las+packs", "optimus+packs"):
        assert live_policy_named(name).has(Colocate), name
    assert not policy_named("ganger-alone+defrag").has(Colocate)


def test_synergy_is_las_tuned_by_synergy() -> None:
    one, other = policy_named("synergy"), policy_named("las+synergy-tune")
    assert (one.order, one.stages, one.placement) == (other.order, other.stages, other.placement)
    assert policy_named("synergy+best-fit").placement.name == "best-fit"


def test_a_live_master_shares_gpus_by_its_planner() -> None:
    assert live_policy_named("gandiva").is_planned
