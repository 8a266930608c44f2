"""Selection of jobs for GPUs: the first in order that fit, unpreemptible jobs, and the guard of overdue gangs."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations
from random import Random

import numpy as np
import pytest
from ganger_master.policies.order_registry import FIFO, FIFO_BACKFILL, LAS
from ganger_master.policies.orders import Facts, JobOrder, chosen, ranked, selected, with_aging
from ganger_master.policies.partition_room import PartitionBounds
from hypothesis import given
from hypothesis import strategies as st
from kit.facts import capacity_of, facts_of, live_jobs


def naive(
    ranked: list[int],
    gpus: list[int],
    free: int,
    is_strict: bool,
    kept: list[bool],
    guarded: list[bool],
    passing: list[bool],
) -> list[int]:
    taken = [job for job in ranked if kept[job]]
    free -= sum(gpus[job] for job in taken)
    is_guarded = False
    for job in ranked:
        if kept[job] or (is_guarded and not passing[job]):
            continue
        if gpus[job] <= free:
            taken.append(job)
            free -= gpus[job]
        elif is_strict:
            break
        else:
            is_guarded = is_guarded or guarded[job]
    return taken


@given(
    jobs=st.lists(
        st.tuples(st.sampled_from([0, 1, 1, 2, 3, 4, 8]), st.booleans(), st.booleans(), st.booleans()), max_size=15
    ),
    free=st.integers(-2, 20),
    is_strict=st.booleans(),
    random=st.randoms(use_true_random=False),
)
def test_chosen_jobs_are_those_of_a_plain_loop(
    jobs: list[tuple[int, bool, bool, bool]], free: int, is_strict: bool, random: Random
) -> None:
    order = list(range(len(jobs)))
    random.shuffle(order)
    gpus = [job[0] for job in jobs]
    kept, guarded, passing = [[bool(job[column]) for job in jobs] for column in (1, 2, 3)]
    expected = naive(order, gpus, free, is_strict, kept, guarded, passing)
    found = chosen(
        np.array(order, np.int64),
        np.array(gpus, np.int64),
        free,
        is_strict,
        np.array(kept, bool),
        np.array(guarded, bool),
        np.array(passing, bool),
    )
    assert found.tolist() == expected
    plain = chosen(np.array(order, np.int64), np.array(gpus, np.int64), free, is_strict)
    none = [False] * len(jobs)
    assert plain.tolist() == naive(order, gpus, free, is_strict, none, none, none)


SIZES = st.lists(st.tuples(st.sampled_from([0, 1, 2, 3, 4, 8]), st.integers(0, 2), st.booleans()), max_size=15)


@given(SIZES, st.integers(0, 20), st.booleans())
def test_one_partition_of_all_nodes_chooses_what_none_does(
    jobs: list[tuple[int, int, bool]], free: int, is_strict: bool
) -> None:
    line, gpus = np.arange(len(jobs)), np.array([job[0] for job in jobs], np.int64)
    kept = np.array([job[2] for job in jobs], bool)
    bounds = PartitionBounds([0] * len(jobs), {frozenset({0}): free})
    within = chosen(line, gpus, free, is_strict, kept, bounds=bounds)
    assert within.tolist() == chosen(line, gpus, free, is_strict, kept).tolist()


@given(SIZES, st.tuples(*[st.integers(0, 8)] * 3), st.booleans())
def test_apart_partitions_are_chosen_for_as_if_each_were_a_cluster(
    jobs: list[tuple[int, int, bool]], there: tuple[int, ...], is_strict: bool
) -> None:
    line, gpus = np.arange(len(jobs)), np.array([job[0] for job in jobs], np.int64)
    inside = [job[1] for job in jobs]
    bounds = PartitionBounds(inside, {frozenset({number}): free for number, free in enumerate(there)})
    found = chosen(line, gpus, sum(there), is_strict, bounds=bounds).tolist()
    alone = []
    for number, free in enumerate(there):
        own = [at for at in line.tolist() if inside[at] == number]
        alone += [own[at] for at in chosen(np.arange(len(own)), gpus[own], free, is_strict).tolist()]
    assert sorted(found) == sorted(alone)


def test_a_strict_order_holds_up_only_partitions_with_nodes_in_common() -> None:
    # Of three partitions the first two share nodes; the first job fits nowhere.
    bounds = PartitionBounds([0, 1, 2], {frozenset({0, 1}): 4, frozenset({2}): 4})
    assert chosen(np.arange(3), np.array([8, 1, 1]), 8, is_strict=True, bounds=bounds).tolist() == [2]
    assert chosen(np.arange(3), np.array([8, 1, 1]), 8, bounds=bounds).tolist() == [1, 2]


def test_jobs_of_overlapping_partitions_keep_no_node_of_another_idle() -> None:
    # Three nodes of four: the first two in one partition, the second in another, too, the third in a third.
    bounds = PartitionBounds([0, 1, 2], {frozenset({0}): 4, frozenset({0, 1}): 4, frozenset({2}): 4})
    for is_strict in (True, False):
        assert chosen(np.arange(3), np.array([8, 4, 4]), 12, is_strict, bounds=bounds).tolist() == [0, 2]


GROUPS = st.dictionaries(st.frozensets(st.integers(0, 3)), st.integers(0, 8), max_size=6)


@given(GROUPS, st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), max_size=12))
def test_jobs_of_overlapping_partitions_are_taken_as_long_as_every_set_of_partitions_has_the_gpus(
    groups: dict[frozenset[int], int], jobs: list[tuple[int, int]]
) -> None:
    """Hall's condition: jobs fit exactly if the jobs of no set of partitions need more than all nodes of the set."""
    held = [0] * 4
    expected = []
    for at, (partition, size) in enumerate(jobs):
        held[partition] += size
        if all(
            sum([held[one] for one in some]) <= sum([gpus for group, gpus in groups.items() if group & some])
            for some in map(frozenset, chain.from_iterable(combinations(range(4), count) for count in range(5)))
        ):
            expected.append(at)
        else:
            held[partition] -= size
    bounds = PartitionBounds([partition for partition, _ in jobs], groups)
    sizes = np.array([size for _, size in jobs], np.int64)
    assert chosen(np.arange(len(jobs)), sizes, sum(groups.values()), bounds=bounds).tolist() == expected


def test_a_job_without_gpus_runs_in_a_full_cluster() -> None:
    assert chosen(np.arange(3), np.array([4, 0, 1]), 4).tolist() == [0, 1]


@given(live_jobs(), st.integers(0, 30), st.sampled_from([FIFO, FIFO_BACKFILL, LAS]), st.booleans())
def test_no_gpu_is_promised_twice_and_no_unpreemptible_job_is_stopped(
    facts: Facts, gpus: int, order: JobOrder, is_aged: bool
) -> None:
    order = with_aging(order, after_s=10.0) if is_aged else order
    line = ranked(order, facts, 1000.0, capacity_of(gpus))
    held = selected(order, facts, line, gpus)
    assert len(set(held.tolist())) == len(held)
    stays = facts.is_running if not order.preempts else facts.is_running & ~facts.is_preemptible
    assert set(np.flatnonzero(stays)) <= set(held.tolist())
    # What runs and stays may exceed a cluster that lost a node, but nothing is added to that.
    assert facts.gpus[held].sum() <= max(gpus, facts.gpus[stays].sum())


OVERDUE = {"waited_s": 100.0, "gpus": 4, "arrival_s": 0.0}
HOLDS_TWO = {"is_running": True, "is_preemptible": False, "gpus": 2, "arrival_s": 50.0, "attained_s": 20.0}


@pytest.mark.parametrize("order", [FIFO_BACKFILL, LAS])
@pytest.mark.parametrize(("may_be_stopped", "starts"), [(True, True), (False, False)])
def test_only_preemptible_jobs_start_before_an_overdue_gang(
    order: JobOrder, may_be_stopped: bool, starts: bool
) -> None:
    young = {"arrival_s": 99.0, "waited_s": 1.0, "is_preemptible": may_be_stopped}
    facts = facts_of(OVERDUE, HOLDS_TWO, young)
    aged = with_aging(order, after_s=60.0)
    held = selected(aged, facts, ranked(aged, facts, 100.0, capacity_of(4)), 4)
    # Under an order that does not preempt no job can be preempted again.
    assert held.tolist() == ([1, 2] if starts and order.preempts else [1])


def test_no_job_waits_for_an_overdue_gang_that_fits_no_empty_cluster() -> None:
    facts = facts_of({**OVERDUE, "gpus": 9}, {"arrival_s": 99.0, "waited_s": 1.0})
    aged = with_aging(FIFO_BACKFILL, after_s=60.0)
    assert selected(aged, facts, ranked(aged, facts, 100.0, capacity_of(8)), 8).tolist() == [1]


def test_the_order_without_aging_lets_every_job_pass() -> None:
    facts = facts_of(OVERDUE, HOLDS_TWO, {"arrival_s": 99.0, "waited_s": 1.0})
    plain = replace(with_aging(FIFO_BACKFILL, after_s=60.0), overdue=None)
    assert selected(plain, facts, ranked(plain, facts, 100.0, capacity_of(4)), 4).tolist() == [1, 2]
