"""A state written down and made again is the same in all that may be asked of it."""

from __future__ import annotations

import msgspec
import pytest
from decision_log.kit import busy, stormy
from faultsim.restored_state import attributes
from ganger.cluster.refusals import Reason
from ganger.cluster.view import View, ViewImage, image_of_view, view_of_image
from ganger_master.core.explain import explain
from ganger_master.core.settings import CoreSettings
from ganger_master.core.state import State
from ganger_master.core.state_image import Image, image_of, state_of
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.clusters import idle_row, server

# Attributes of a state that are not in its image: what follows from the rest, and what a batch has not handed over.
DERIVED = {
    *(
        "policy",
        "teams",
        "limits",
        "partitions",
        "counts_use",
        "_running",
        "_by_user",
        "configuration_sets",
        "epochs_of",
        "places_on",
        "strays_of",
        "live",
        "charges",
        "holdings",
        "waiting",
        "front",
        "aside",
    ),
    *("dependents", "lacking", "turn_of", "closures", "free_on"),
    *("set_of", "set_on", "nodes_with", "requests"),
}
OF_A_BATCH = {"parties", "projected", "dirty", "history", "_puts", "_removes", "_counters_taken"}
# Depends on the owner of the state, and is no part of its content.
OF_ITS_SHELL = {"is_kept"}


def test_whatever_a_state_knows_is_in_its_image_or_follows_from_it() -> None:
    imaged = set(Image.__struct_fields__) - {"sent", "requested", "turns"} | {"leases"}
    assert set(attributes(State(CoreSettings()))) == imaged | DERIVED | OF_A_BATCH | OF_ITS_SHELL


def test_a_state_made_again_has_all_that_was_derived() -> None:
    cluster = stormy(3)
    busy(cluster, 6)
    cluster.run_until(lambda: cluster.master.is_up, 60.0)
    before = cluster.state
    image = image_of(before)
    after = state_of(msgspec.json.decode(msgspec.json.encode(image), type=Image))
    assert image_of(after) == image
    names = ("jobs", "gangs", "nodes", "epochs_of", "places_on", "live", "turn_of", "nodes_with", "requests")
    ours, theirs = attributes(after), attributes(before)
    for name in (*names, "configuration_sets", "ranks"):
        assert ours[name] == theirs[name], name
    assert list(after.queue.waiting) == list(before.queue.waiting)
    assert list(after.queue.lacking) == list(before.queue.lacking)
    assert after.jobs.charges.held == before.jobs.charges.held
    assert after.jobs.holdings == before.jobs.holdings
    assert {name: one.gangs for name, one in after.desired.items()} == {
        name: one.gangs for name, one in before.desired.items()
    }
    assert not after.take_changes()


@pytest.mark.parametrize("seed", range(4))
def test_to_ask_why_a_job_waits_leaves_the_state_as_it_was(seed: int) -> None:
    cluster = stormy(seed, "fifo-backfill", is_calm=True)
    for _ in range(12):
        busy(cluster, 1)
        before = image_of(cluster.state)
        for number in cluster.state.jobs.live:
            explain(cluster.state, number, cluster.engine.now + 30.0)
        assert image_of(cluster.state) == before


def test_reasons_are_stored_under_their_names() -> None:
    assert [reason.value for reason in Reason] == [reason.name for reason in Reason]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 7), st.sampled_from(["", "a", "b"]), st.sampled_from(["", "x", "y"]))),
    st.lists(st.integers(0, 7), max_size=4),
    st.booleans(),
)
def test_a_view_made_again_breaks_ties_alike(
    joins: list[tuple[int, str, str]], leaves: list[int], asks_for_idle: bool
) -> None:
    view = View([server("2x2"), server("2x4")])
    for number, rack, fabric in joins:
        view.put(idle_row(f"n{number}", server("2x4" if number % 3 else "2x2"), rack, fabric))
    for number in leaves:
        view.remove(f"n{number}")
    if asks_for_idle:
        view.idle()
    image = image_of_view(view)
    again = view_of_image(msgspec.json.decode(msgspec.json.encode(image), type=ViewImage))
    assert image_of_view(again) == image
    for one in (view, again):
        for number in range(8, 11):
            one.put(idle_row(f"n{number}", server("2x2"), "c", "z"))
    assert list(again.rows()) == list(view.rows())
    assert again.slots == view.slots
    for name in ("racks", "fabrics", "free", "sets"):
        ours, theirs = (getattr(one.columns(), name) for one in (again, view))
        assert [ours[slot] for slot in view.slots.values()] == [theirs[slot] for slot in view.slots.values()], name


def test_rack_numbers_do_not_depend_on_earlier_reads() -> None:
    seen, unseen = View([server("2x2")]), View([server("2x2")])
    for rack in ("a", "b", "c"):
        for view in (seen, unseen):
            view.put(idle_row(f"n-{rack}", server("2x2"), rack, "f"))
        seen.columns()
    for view in (seen, unseen):
        view.put(idle_row("n-a", server("2x2"), "d", "f"))
    assert list(seen.columns().racks) == list(unseen.columns().racks)
