"""Synergy's tunings: what they guarantee, against packing by hand, and how near to the best they come."""

from __future__ import annotations

import time
from itertools import product

import numpy as np
import pytest
from ganger_master.policies.tunings import (
    Gangs,
    Pieces,
    Profiles,
    TuningNodes,
    demands,
    exact,
    gangs,
    options,
    pieces,
    proportionally,
    rates,
    runnable,
    synergy,
)
from ganger_master.policies.tunings.exact import Choices, best_choice
from ganger_master.policies.tunings.synergy import RoundPacking
from hypothesis import given, settings
from hypothesis import strategies as st
from policies.tune_cases import NAMES, SYNERGY, assert_fits, clusters, drawn, profiles, rounds, servers

Where = list[tuple[int, int]]


def relative(of_round: Gangs, nodes: TuningNodes, placed: Pieces) -> np.ndarray:
    """Rates against those of the share of these servers, which are all alike."""
    share = of_round.profiles.at(of_round.profile, nodes.share_cores[:1], nodes.share_memory[:1])
    return np.asarray(rates(of_round, placed) / share, float)


# --- what holds always


@pytest.mark.parametrize("place", [synergy.place, synergy.place_optimally, exact.place])
@settings(max_examples=50)
@given(case=rounds(alike=True))
def test_every_usable_gpu_is_used_and_no_gang_falls_below_its_share(
    place: object, case: tuple[Gangs, TuningNodes]
) -> None:
    of_round, nodes = case
    of_round = gangs(of_round.gpus, of_round.profile, of_round.profiles)
    placed = place(of_round, nodes)  # type: ignore[operator]
    assert_fits(placed, of_round, nodes)
    assert np.unique(placed.gang).tolist() == runnable(of_round, nodes).tolist()
    floor = rates(of_round, proportionally(nodes, placed))
    assert np.all(rates(of_round, placed) >= floor * (1 - 1e-6))


@pytest.mark.parametrize("place", [synergy.place, synergy.place_greedily, synergy.place_optimally, exact.place])
@settings(max_examples=50)
@given(case=rounds())
def test_nothing_is_given_twice_on_nodes_that_differ_and_local_gangs_stay_on_one(
    place: object, case: tuple[Gangs, TuningNodes]
) -> None:
    of_round, nodes = case
    placed = place(of_round, nodes)  # type: ignore[operator]
    assert_fits(placed, of_round, nodes)
    split = np.bincount(placed.gang, minlength=len(of_round)) > 1
    assert not np.any(split & of_round.is_local)


@given(rounds())
def test_tune_keeps_every_gang_at_the_share_of_its_node(case: tuple[Gangs, TuningNodes]) -> None:
    of_round, nodes = case
    placed = synergy.place(of_round, nodes)
    assert np.all(rates(of_round, placed) >= rates(of_round, proportionally(nodes, placed)) * (1 - 1e-6))


# --- against doing it by hand


def naive_tightest(
    packing: RoundPacking, gang: int, cores: list[float], memory: list[float], most_free_cores: bool = False
) -> Where | None:
    gpus = int(packing.gangs.gpus[gang])
    count = len(packing.nodes)

    def usable(node: int) -> int:
        most = int(packing.free_gpus[node])
        while most and (
            most * cores[node] > packing.free_cores[node] + 1e-6
            or most * memory[node] > packing.free_memory[node] + 1e-6
        ):
            most -= 1
        return min(most, gpus)

    def least(nodes: list[int]) -> int:
        sign = -1 if most_free_cores else 1
        return min(
            nodes,
            key=lambda n: (packing.free_gpus[n], sign * packing.free_cores[n], sign * packing.free_memory[n], n),
        )

    can = {node: usable(node) for node in range(count)}
    whole = [node for node in can if can[node] >= gpus]
    if whole:
        return [(least(whole), gpus)]
    if packing.gangs.is_local[gang] or sum(can.values()) < gpus:
        return None
    found: Where = []
    left = gpus
    while left:
        rest = [node for node in can if can[node] >= left]
        if rest:
            found.append((least(rest), left))
            break
        node = max(can, key=lambda n: (can[n], -n))
        found.append((node, can[node]))
        left -= can.pop(node)
    return sorted(found)


@given(rounds(), st.data())
def test_the_tightest_nodes_are_those_found_by_looking_at_each(
    case: tuple[Gangs, TuningNodes], data: st.DataObject
) -> None:
    of_round, nodes = case
    packing = RoundPacking(of_round, nodes)
    amounts = st.integers(0, 6).map(lambda half: half / 2)
    for gang in range(len(of_round)):
        each = [
            data.draw(st.lists(amounts, min_size=len(nodes), max_size=len(nodes)), label="amounts") for _ in range(2)
        ]
        reverse = data.draw(st.booleans(), label="most free cores")
        found = packing.tightest(gang, np.array(each[0]), np.array(each[1]), reverse)
        assert found == naive_tightest(packing, gang, each[0], each[1], reverse)
        if found:
            packing.take(gang, found, np.array(each[0]), np.array(each[1]))


@given(rounds(), st.integers(0, 6), st.integers(0, 6))
def test_the_first_nodes_are_those_found_by_looking_at_each(
    case: tuple[Gangs, TuningNodes], cores: int, memory: int
) -> None:
    of_round, nodes = case
    packing = RoundPacking(of_round, nodes)
    for gang in range(len(of_round)):
        gpus = int(of_round.gpus[gang])
        can = []
        for node in range(len(nodes)):
            count = min(gpus, int(packing.free_gpus[node]))
            while count and (count * cores > packing.free_cores[node] or count * memory > packing.free_memory[node]):
                count -= 1
            can.append(count)
        expected: Where | None = None
        whole = [node for node, count in enumerate(can) if count >= gpus]
        if whole:
            expected = [(whole[0], gpus)]
        elif sum(can) >= gpus and not of_round.is_local[gang]:
            expected, left = [], gpus
            for node, count in enumerate(can):
                if left and count:
                    expected.append((node, min(count, left)))
                    left -= min(count, left)
        found = packing.first(gang, float(cores), float(memory))
        assert found == expected
        if found:
            packing.take(gang, found, float(cores), float(memory))


def naive_tune(of_round: Gangs, nodes: TuningNodes) -> dict[int, dict[int, tuple[float, float]]]:
    """Synergy-Tune in its own words; what each gang has for each GPU by node. Nodes must be alike."""
    demand = demands(of_round, nodes)
    share = float(nodes.share_cores[0]), float(nodes.share_memory[0])
    running = runnable(of_round, nodes).tolist()
    want = {gang: (float(demand.cores[gang]), float(demand.memory_bytes[gang])) for gang in running}
    g = {gang: int(of_round.gpus[gang]) for gang in running}
    held: dict[int, dict[int, tuple[float, float]]] = {}
    count: dict[int, dict[int, int]] = {}

    def packing() -> RoundPacking:
        now = RoundPacking(of_round, nodes)
        for gang, where in held.items():
            for node, (cores, memory) in where.items():
                now.free_gpus[node] -= count[gang][node]
                now.free_cores[node] -= count[gang][node] * cores
                now.free_memory[node] -= count[gang][node] * memory
        return now

    every = range(len(nodes))
    for gang in sorted(running, key=lambda j: (-g[j], -g[j] * want[j][0], -g[j] * want[j][1], j)):
        less = min(want[gang][0], share[0]), min(want[gang][1], share[1])
        for amounts, by_gpus in ((want[gang], False), (less, False), (less, True)):
            asked = (0.0, 0.0) if by_gpus else amounts
            where = naive_tightest(packing(), gang, [asked[0] for _ in every], [asked[1] for _ in every], by_gpus)
            if where is not None:
                break
        if where is None:
            continue
        held[gang] = dict.fromkeys((node for node, _ in where), amounts)
        count[gang] = dict(where)
        for node, _ in where:
            peers = [peer for peer in held if node in held[peer]]
            peers.sort(key=lambda j: (len(held[j]), -held[j][node][0], -held[j][node][1], j))
            for peer in peers:
                now = packing()
                lacks = now.free_cores[node] < -1e-6, now.free_memory[node] < -1e-6
                over = held[peer][node][0] > share[0] + 1e-6, held[peer][node][1] > share[1] + 1e-6
                if peer != gang and any(lack and more for lack, more in zip(lacks, over, strict=True)):
                    for there, (cores, memory) in held[peer].items():
                        held[peer][there] = min(cores, share[0]), min(memory, share[1])
    return held


@given(rounds(alike=True))
def test_tune_agrees_with_its_description(case: tuple[Gangs, TuningNodes]) -> None:
    of_round, nodes = case
    placed = synergy.place(of_round, nodes)
    found: dict[int, dict[int, tuple[float, float]]] = {}
    for gang, node, gpus, cores, memory in zip(
        placed.gang.tolist(), placed.node.tolist(), placed.gpus, placed.cores, placed.memory_bytes, strict=True
    ):
        found.setdefault(gang, {})[node] = (float(cores / gpus), float(memory / gpus))
    expected = naive_tune(of_round, nodes)
    assert found.keys() == expected.keys()
    for gang, where in expected.items():
        assert found[gang].keys() == where.keys()
        for node, amounts in where.items():
            assert found[gang][node] == pytest.approx(amounts)


def test_peers_give_back_in_the_documented_order() -> None:
    """Of two hungry residents the one with more cores for each GPU goes first, and only as many as are needed."""
    hungry, hungrier, newcomer = (NAMES.index(name) for name in ("res18", "alexnet", "deepspeech"))
    server = TuningNodes(np.array([8]), np.array([24.0]), np.array([500e9]))
    placed = synergy.place(gangs([1, 1, 1, 1], [hungrier, hungry, newcomer, newcomer], SYNERGY), server)
    # 12 + 9 + 3 cores are all there are: the second newcomer makes the 12 go back to 3, and no other gang
    assert placed.cores.tolist() == [3.0, 9.0, 3.0, 3.0]


def test_greedy_leaves_gpus_idle_where_tune_does_not() -> None:
    server = servers(1)
    six = gangs([1] * 6, [NAMES.index("alexnet")] * 6, SYNERGY)
    assert synergy.place_greedily(six, server).gang.tolist() == [0, 1]
    assert synergy.place(six, server).gang.tolist() == list(range(6))


def test_scattered_gpus_split_a_gang_or_leave_a_local_one_out() -> None:
    """The public code gives up the whole round here."""
    nodes = TuningNodes(np.array([3, 3]), np.array([9.0, 9.0]), np.array([9.0, 9.0]))
    known = Profiles(np.array([1.0]), np.array([1.0]), np.ones((1, 1, 1)))
    assert synergy.place(gangs([4, 1], [0, 0], known), nodes).gang.tolist() == [0, 0, 1]
    assert synergy.place(gangs([4, 1], [0, 0], known, is_local=[True, True]), nodes).gang.tolist() == [1]


@settings(max_examples=60)
@given(rounds())
def test_the_hungry_are_spread_as_by_looking_at_every_node(case: tuple[Gangs, TuningNodes]) -> None:
    of_round, nodes = case
    demand = demands(of_round, nodes)
    rows = list(zip(nodes.cores.tolist(), nodes.memory_bytes.tolist(), strict=True))
    packing = RoundPacking(of_round, nodes)
    used = [(0.0, 0.0) for _ in rows]
    want = [
        (gpus * cores, gpus * memory)
        for gpus, cores, memory in zip(of_round.gpus.tolist(), demand.cores, demand.memory_bytes, strict=True)
    ]

    def part(gang: int) -> float:
        return float(max(want[gang][axis] / max(row[axis] for row in rows) for axis in (0, 1)))

    def full(gang: int, node: int) -> float:
        return float(max((used[node][axis] + want[gang][axis]) / rows[node][axis] for axis in (0, 1)))

    expected: dict[tuple[int, int], int] = {}
    for gang in sorted(range(len(of_round)), key=lambda j: (-of_round.gpus[j], -part(j), j)):
        gpus = int(of_round.gpus[gang])
        able = [node for node in range(len(rows)) if packing.free_gpus[node] >= gpus]
        nothing = [0.0] * len(rows)
        where: Where | None
        if able:
            where = [(min(able, key=lambda node: (full(gang, node), node)), gpus)]
        else:
            where = naive_tightest(packing, gang, nothing, nothing)
        for node, count in where or []:
            expected[gang, node] = count
            packing.free_gpus[node] -= count
            used[node] = (
                used[node][0] + count * float(demand.cores[gang]),
                used[node][1] + count * float(demand.memory_bytes[gang]),
            )
    placed = exact.place_by_demand(of_round, nodes, demand)
    found = dict(zip(zip(placed.gang.tolist(), placed.node.tolist(), strict=True), placed.gpus.tolist(), strict=True))
    assert found == expected


# --- the small exact problems


def naive_options(
    known: Profiles, profile: int, share: tuple[float, float], most: tuple[float, float]
) -> list[tuple[float, float, float]]:
    which = np.array(profile)

    def rate(cores: float, memory: float) -> float:
        return float(known.at(which, np.array(cores), np.array(memory)))

    most = max(most[0], share[0]), max(most[1], share[1])
    whole = [float(count) for count in range(1, int(min(most[0], known.cores[-1])) + 1)]
    cores = sorted({c for c in [*known.cores.tolist(), *whole, share[0]] if c <= most[0]})
    memory = sorted({m for m in [*known.memory_bytes.tolist(), share[1]] if m <= most[1]})
    cells = [(c, m, rate(c, m) / rate(*share)) for c, m in product(cores, memory)]
    return [
        cell
        for cell in cells
        if cell[2] >= 1 - 1e-9
        and not any(o[0] <= cell[0] and o[1] <= cell[1] and o != cell and o[2] >= cell[2] - 1e-12 for o in cells)
    ]


@given(profiles(1), *(st.integers(1, 20).map(lambda half: half / 2) for _ in range(4)))
def test_options_are_the_cells_that_no_other_beats(
    known: Profiles, share_cores: float, share_memory: float, most_cores: float, most_memory: float
) -> None:
    found = options(known, 0, share_cores, share_memory, most_cores, most_memory)
    listed = list(zip(found.cores.tolist(), found.memory_bytes.tolist(), found.value.tolist(), strict=True))
    assert listed == naive_options(known, 0, (share_cores, share_memory), (most_cores, most_memory))
    assert listed


piece = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(0, 12)), min_size=1, max_size=5).map(
    lambda rows: tuple(np.array(column, float) for column in zip(*rows, strict=True))
)


@given(st.lists(piece, max_size=5), st.integers(1, 20), st.integers(1, 20))
def test_a_nodes_best_choice_is_the_best_of_all(choices: list[Choices], cores: int, memory: int) -> None:
    def worth(chosen: tuple[int, ...]) -> float:
        used = [sum(piece[axis][option] for piece, option in zip(choices, chosen, strict=True)) for axis in range(3)]
        return used[2] if used[0] <= cores and used[1] <= memory else -np.inf

    best = max(worth(chosen) for chosen in product(*(range(len(piece[0])) for piece in choices)))
    found = best_choice(choices, float(cores), float(memory))
    if best == -np.inf:
        assert found is None
    else:
        assert found is not None
        assert worth(tuple(found)) == pytest.approx(best)


@given(rounds(most_gangs=4, alike=True))
def test_gangs_on_one_node_each_are_tuned_as_well_as_can_be(case: tuple[Gangs, TuningNodes]) -> None:
    of_round, nodes = case
    whole = gangs(of_round.gpus, of_round.profile, of_round.profiles, is_local=[True] * len(of_round))
    placed = synergy.place(whole, nodes)
    floor = rates(whole, proportionally(nodes, placed))
    running = np.unique(placed.gang)
    found = rates(whole, exact.tune(whole, nodes, placed))
    best = 0.0
    for node in np.unique(placed.node).tolist():
        rows = np.flatnonzero(placed.node == node)
        share = float(nodes.share_cores[node]), float(nodes.share_memory[node])
        offered = []
        for row in rows.tolist():
            gpus = int(placed.gpus[row])
            most = float(nodes.cores[node]) / gpus, float(nodes.memory_bytes[node]) / gpus
            cells = naive_options(whole.profiles, int(whole.profile[placed.gang[row]]), share, most)
            offered.append([(gpus * c, gpus * m, value) for c, m, value in cells])
        best += max(
            sum(cell[2] for cell in cells)
            for cells in product(*offered)
            if sum(cell[0] for cell in cells) <= nodes.cores[node] * (1 + 1e-9)
            and sum(cell[1] for cell in cells) <= nodes.memory_bytes[node] * (1 + 1e-9)
        )
    assert float(np.sum(found[running] / floor[running])) == pytest.approx(best)


def test_a_split_gang_gets_the_same_everywhere_and_only_what_pays() -> None:
    """It could use its neighbours' cores on both nodes, but one neighbour makes more of them."""
    known = Profiles(
        np.array([1.0, 2.0, 3.0]),
        np.array([1.0]),
        np.array([[[1.0], [1.0], [1.0]], [[1.0], [2.0], [3.0]], [[1.0], [2.0], [2.1]]]),
    )
    nodes = TuningNodes(np.array([2, 2]), np.array([4.0, 4.0]), np.array([2.0, 2.0]))
    frugal, hungry, split = 0, 1, 2
    placed = pieces([0, 0, 1, 2], [0, 1, 0, 1], [1, 1, 1, 1])
    beside_frugal = exact.tune(gangs([2, 1, 1], [split, frugal, frugal], known), nodes, placed)
    assert beside_frugal.cores.tolist() == [3.0, 3.0, 1.0, 1.0]
    beside_hungry = exact.tune(gangs([2, 1, 1], [split, hungry, hungry], known), nodes, placed)
    assert beside_hungry.cores.tolist() == [2.0, 2.0, 2.0, 2.0]


# --- how near to the best


@settings(max_examples=50)
@given(rounds(most_gangs=6, alike=True))
def test_no_packing_beats_the_bound(case: tuple[Gangs, TuningNodes]) -> None:
    of_round, nodes = case
    of_round = of_round.take(runnable(of_round, nodes))
    of_round = gangs(of_round.gpus, of_round.profile, of_round.profiles)
    bound = synergy.upper_bound(of_round, nodes)
    for place in (synergy.place, synergy.place_optimally, exact.place):
        placed = place(of_round, nodes)
        assert relative(of_round, nodes, placed).sum() <= bound * (1 + 1e-6) + 1e-9


SPLITS = ((20.0, 70.0, 10.0), (33.0, 33.0, 33.0), (60.0, 30.0, 10.0))
SINGLE, MIXED = {1: 1.0}, {1: 0.7, 2: 0.1, 4: 0.15, 8: 0.05}


def shares_of_bound(split: tuple[float, float, float], sizes: dict[int, float]) -> dict[str, float]:
    """Mean over five draws of 128 GPUs on 16 servers, all of them needed."""
    found: dict[str, list[float]] = {"proportional": [], "tune": [], "opt": [], "exact": []}
    nodes = servers(16)
    for seed in range(5):
        of_round = drawn(seed, 128, split, sizes)
        bound = synergy.upper_bound(of_round, nodes)
        found["proportional"].append(len(of_round) / bound)
        for name, place in (("tune", synergy.place), ("opt", synergy.place_optimally), ("exact", exact.place)):
            found[name].append(float(relative(of_round, nodes, place(of_round, nodes)).sum()) / bound)
    return {name: float(np.mean(values)) for name, values in found.items()}


@pytest.mark.parametrize("split", SPLITS)
def test_of_the_bound_tune_reaches_nine_tenths_of_opt_and_ours_all_but_three_percent(
    split: tuple[float, float, float],
) -> None:
    """Synergy's claim is Tune within 10 % of OPT. Seen, of LP-1: proportional 0.78 to 0.82, Tune 0.88 to 0.90, OPT
    0.94 to 0.98, ours 0.987 to 0.998."""
    found = shares_of_bound(split, SINGLE)
    assert found["tune"] >= 0.9 * found["opt"]
    assert found["proportional"] < found["tune"] < found["opt"] < found["exact"]
    assert found["exact"] >= 0.97


@pytest.mark.parametrize("split", SPLITS)
def test_with_gangs_of_several_gpus_ours_is_ahead_of_tune(split: tuple[float, float, float]) -> None:
    """LP-1 knows no nodes, so gangs that fill one cannot reach it. Seen: Tune 0.78 to 0.87, ours 0.91 to 0.97."""
    found = shares_of_bound(split, MIXED)
    assert found["tune"] < found["exact"]


def test_gangs_of_many_kinds_are_placed_by_their_demands_nearly_as_well() -> None:
    """Each gang with a profile of its own, 300 of them: too many for the program at every round. Seen: 0.97."""
    random = np.random.default_rng(0)
    nodes = servers(38)
    like = drawn(0, 300, SPLITS[0], SINGLE)
    table = SYNERGY.rates[like.profile] * random.uniform(0.8, 1.2, (300, 1, 1))
    of_round = gangs(like.gpus, range(300), Profiles(SYNERGY.cores, SYNERGY.memory_bytes, table))
    placed = exact.place(of_round, nodes)
    assert_fits(placed, of_round, nodes)
    bound = synergy.upper_bound(of_round, nodes)
    assert relative(of_round, nodes, placed).sum() >= 0.95 * bound


def test_opt_places_as_tune_what_it_could_not_solve() -> None:
    many, nodes = drawn(0, 1000, SPLITS[0], SINGLE), servers(1000)
    found, tuned = synergy.place_optimally(many, nodes), synergy.place(many, nodes)
    assert found.node.tolist() == tuned.node.tolist()
    assert found.cores.tolist() == tuned.cores.tolist()


def test_opt_splits_no_gang_of_one_node_that_tune_places_whole() -> None:
    of_round = gangs([1, 1, 1, 1, 4], [0] * 5, SYNERGY, is_local=[True] * 5)
    nodes = TuningNodes(np.array([4, 4]), np.array([12.0, 12.0]), np.array([250e9, 250e9]))
    placed = synergy.place_optimally(of_round, nodes)
    assert placed.gpus.sum() == 8
    assert sorted(placed.gang.tolist()) == [0, 1, 2, 3, 4]


@settings(max_examples=50)
@given(clusters())
def test_an_empty_round_needs_nothing(nodes: TuningNodes) -> None:
    empty = gangs([], [], SYNERGY)
    for place in (synergy.place, synergy.place_greedily, synergy.place_optimally, exact.place):
        assert len(place(empty, nodes)) == 0
    assert synergy.upper_bound(empty, nodes) == 0.0


@pytest.mark.parametrize("is_used", [False, True], ids=["idle", "used"])
def test_four_thousand_gangs_on_sixteen_thousand_nodes_take_seconds(is_used: bool) -> None:
    """100,000 GPUs asked for of 128,000, or of what others left of them, no two nodes alike. Seen: 0.6 to 3.2 CPU
    seconds, as fast as the machine is; `ganger bench plan` holds it to three. What grows with the product takes
    minutes."""
    random = np.random.default_rng(0)
    sizes = random.choice([1, 2, 4, 8, 16, 32, 64, 128], size=4000, p=[0.2, 0.05, 0.1, 0.2, 0.15, 0.1, 0.1, 0.1])
    of_round = gangs(sizes, random.integers(len(NAMES), size=4000), SYNERGY)
    nodes = servers(16_000)
    if is_used:
        left = [random.uniform(0.0, amounts) for amounts in (nodes.cores, nodes.memory_bytes)]
        nodes = TuningNodes(random.integers(4, 9, 16_000), *left)
    started = time.process_time()
    placed = synergy.place(of_round, nodes)
    assert time.process_time() - started < 15.0
    assert int(placed.gpus.sum()) == (int(nodes.gpus.sum()) if nodes.gpus.sum() < sizes.sum() else int(sizes.sum()))
