"""Whether the choice is unchanged is found without ranking all jobs, and agrees with the full choice."""

from __future__ import annotations

import numpy as np
import pytest
from ganger_master.planner.plan import RankedQueue, choose
from ganger_master.policies.order_registry import ORDERS
from ganger_master.policies.orders import Facts, JobOrder, ranks, with_aging
from hypothesis import given
from hypothesis import strategies as st
from kit.facts import capacity_of, facts_of, live_jobs
from msgspec.structs import replace

NOW = 1000.0


def asked_of(
    order: JobOrder, facts: Facts, gpus: int, waiting: list[bool], units: list[int] | None = None
) -> RankedQueue:
    of = np.array(units, np.int64) if units is not None else None
    waits = np.array(waiting) & ~facts.is_running
    rows = np.arange(len(facts)) * 3
    return RankedQueue(
        order, gpus, rows, facts, ranks(order, facts, NOW, capacity_of(gpus)), waits, None, waits, of, np.inf
    )


@given(st.data(), live_jobs(most=8), st.sampled_from(["las", "srtf", "ganger-alone", "fifo", "fifo-backfill"]))
def test_exactly_the_running_jobs_are_chosen_where_the_choice_is_unchanged(
    data: st.DataObject, facts: Facts, name: str
) -> None:
    order = (
        with_aging(ORDERS[name], data.draw(st.sampled_from([5.0, 40.0]))) if data.draw(st.booleans()) else ORDERS[name]
    )
    facts = replace(facts, index=np.nan_to_num(facts.index))
    count = len(facts)
    # Some share devices: two beside each other in the table, of which the first one stands for both.
    units = [-1] * count
    for first in range(0, count - 1, 2):
        both = facts.is_running[first] and facts.is_running[first + 1] and facts.gpus[first]
        if both and data.draw(st.booleans()):
            facts.gpus[first + 1] = facts.gpus[first]
            units[first : first + 2] = [3 * first] * 2
    alone = [unit < 0 or unit == 3 * at for at, unit in enumerate(units)]
    held = int(facts.gpus[facts.is_running & alone].sum())
    gpus = max(1, held + data.draw(st.integers(-2, 8)))
    waiting = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    of = asked_of(order, facts, gpus, waiting, units if max(units) >= 0 else None)
    choice = choose(of)
    assert of.line.tolist() == choice.queue.tolist()
    if of.is_unchanged:
        assert choice.is_chosen.tolist() == facts.is_running.tolist()


@pytest.mark.parametrize(("attained_s", "comes"), [(5.0, False), (500.0, True)])
def test_a_large_gang_comes_once_enough_of_those_behind_it_may_go(attained_s: float, comes: bool) -> None:
    running = {"is_running": True, "is_preemptible": True, "gpus": 4}
    facts = facts_of(
        {**running, "attained_s": 500.0}, {**running, "attained_s": attained_s}, {"gpus": 8, "attained_s": 50.0}
    )
    of = asked_of(ORDERS["las"], facts, 8, [True] * 3)
    assert of.is_unchanged is not comes
    assert bool(choose(of).is_chosen[2]) is comes
