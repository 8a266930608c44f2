"""Profiles, rates, shares and runnable gangs of all tunings; the simple tunings of the CPU poster."""

from __future__ import annotations

import numpy as np
import pytest
from estimators.published import synergy_points
from ganger_master.estimators.cores_and_memory import CpuModel, SensitivityMatrix, fit_cpu
from ganger_master.policies.tunings import (
    ENOUGH,
    Gangs,
    Pieces,
    Profiles,
    TuningNodes,
    demands,
    gangs,
    pieces,
    profiles_of,
    proportionally,
    rates,
    runnable,
    sampled,
)
from ganger_master.policies.tunings.catalogue import TUNINGS, predicted, shared_out
from hypothesis import example, given, settings
from hypothesis import strategies as st
from policies.tune_cases import GB, NAMES, SYNERGY, assert_fits, profiles, rounds, servers


@given(profiles(), st.integers(0, 3), st.floats(0.0, 12.0), st.floats(0.0, 8.0))
def test_rates_between_cells_are_those_of_the_matrix(known: Profiles, which: int, cores: float, memory: float) -> None:
    which %= len(known.rates)
    matrix = SensitivityMatrix(
        tuple(known.cores.tolist()), tuple(known.memory_bytes.tolist()), tuple(map(tuple, known.rates[which].tolist()))
    )
    found = known.at(np.array([which]), np.array([cores]), np.array([memory]))
    assert found[0] == pytest.approx(matrix.rate(cores, memory))


def test_profiles_of_matrices_with_other_axes_keep_what_was_measured() -> None:
    one = SensitivityMatrix((1.0, 4.0), (1.0,), ((1.0,), (3.0,)))
    other = SensitivityMatrix((2.0,), (0.5, 2.0), ((1.0, 5.0),))
    known = profiles_of([one, other])
    assert known.cores.tolist() == [1.0, 2.0, 4.0]
    for which, matrix in enumerate((one, other)):
        for cores in matrix.cores:
            for memory in matrix.memory_bytes:
                found = known.at(np.array(which), np.array(cores), np.array(memory))
                assert float(found) == pytest.approx(matrix.rate(cores, memory))


def test_what_falls_is_made_flat_and_what_is_no_profile_is_refused() -> None:
    falling = sampled([lambda cores, memory: 10.0 - cores - memory], [1.0, 2.0], [1.0, 3.0])
    assert np.all(falling.rates == 8.0)
    for cores, memory, table in (
        ([1.0, 2.0], [1.0], [[[1.0]]]),
        ([2.0, 1.0], [1.0], [[[1.0], [1.0]]]),
        ([0.0, 1.0], [1.0], [[[1.0], [1.0]]]),
        ([1.0, 2.0], [1.0], [[[2.0], [1.0]]]),
    ):
        with pytest.raises(ValueError, match=r"profiles|rates"):
            Profiles(np.array(cores), np.array(memory), np.array(table))
    with pytest.raises(ValueError, match="at least one GPU"):
        gangs([0], [0], SYNERGY)


def test_a_gang_runs_at_the_rate_of_its_slowest_piece_and_without_a_piece_not_at_all() -> None:
    two = gangs([2, 1], [NAMES.index("res18"), 0], SYNERGY)
    placed = pieces([0, 0], [0, 1], [1, 1]).given(np.array([9.0, 3.0]), np.array([62.5, 62.5]) * GB)
    assert rates(two, placed).tolist() == pytest.approx([1.0, 0.0])
    assert rates(two, proportionally(servers(2), placed)).tolist() == pytest.approx([1.0, 0.0])


@given(rounds())
def test_runnable_gangs_are_taken_in_order_by_gpus_alone(case: tuple[Gangs, TuningNodes]) -> None:
    of_round, nodes = case
    free, expected = int(nodes.gpus.sum()), []
    for gang, gpus in enumerate(of_round.gpus.tolist()):
        if gpus <= free:
            expected.append(gang)
            free -= gpus
    assert runnable(of_round, nodes).tolist() == expected


# Synergy's table (OSDI 2022 profiles; dossier 9.1): cores and GB per GPU at which each model is at its best.
BEST = {
    "alexnet": (12, 125), "shufflenet": (12, 125), "res18": (9, 62.5), "mobilenet": (6, 62.5), "res50": (4, 62.5),
    "m5": (6, 187.5), "deepspeech": (3, 62.5), "transformer": (1, 20.83), "gnmt": (1, 20.83), "lstm": (1, 20.83),
}  # fmt: skip


def test_published_demands_are_read_from_the_published_profiles() -> None:
    every = gangs([1] * len(NAMES), range(len(NAMES)), SYNERGY)
    found = demands(every, servers(2))
    for gang, name in enumerate(NAMES):
        assert (found.cores[gang], found.memory_bytes[gang] / GB) == pytest.approx(BEST[name]), name


def test_a_gang_demands_no_more_than_its_fewest_nodes_have() -> None:
    # four GPUs of a server with 24 cores: six each at most; eight: their share
    names = ("alexnet", "res18", "res50")
    for gpus, cores in ((4, (6.0, 6.0, 4.0)), (8, (3.0, 3.0, 3.0)), (16, (3.0, 3.0, 3.0))):
        every = gangs([gpus] * 3, [NAMES.index(name) for name in names], SYNERGY)
        assert demands(every, servers(2)).cores.tolist() == list(cores)


def naive_demand(of_round: Gangs, gang: int, nodes: TuningNodes) -> tuple[float, float]:
    gpus = int(of_round.gpus[gang])
    known = of_round.profiles

    def rate(cores: float, memory: float) -> float:
        return float(known.at(of_round.profile[gang], np.array(cores), np.array(memory)))

    rows = list(zip(nodes.gpus.tolist(), nodes.cores.tolist(), nodes.memory_bytes.tolist(), strict=True))
    together = max(min(max(have, 1), gpus) for have, _, _ in rows)
    shares = [(cores / have, memory / have) for have, cores, memory in rows if have]
    most = [
        max(
            [row[axis] / together for row in rows if min(max(row[0], 1), gpus) == together]
            + [s[axis - 1] for s in shares]
        )
        for axis in (1, 2)
    ]
    points = [
        sorted({p for p in [*grid.tolist(), *(s[axis] for s in shares), most[axis]] if p <= most[axis] * (1 + 1e-9)})
        for axis, grid in enumerate((known.cores, known.memory_bytes))
    ]
    best = rate(*most)
    for cores in points[0]:
        for memory in points[1]:
            holds = all(rate(min(cores, c), min(memory, m)) >= rate(c, m) * (1 - 1e-9) for c, m in shares)
            if rate(cores, memory) >= ENOUGH * best and holds:
                return cores, memory
    raise AssertionError("all there is always enough")


@settings(max_examples=60)
@given(rounds())
def test_demands_agree_with_looking_at_every_cell(case: tuple[Gangs, TuningNodes]) -> None:
    of_round, nodes = case
    found = demands(of_round, nodes)
    for gang in range(len(of_round)):
        assert (found.cores[gang], found.memory_bytes[gang]) == naive_demand(of_round, gang, nodes)


@settings(max_examples=100)
@given(
    steps=st.lists(st.integers(0, 3), min_size=3, max_size=3),
    shares=st.lists(
        st.tuples(st.integers(1, 16).map(lambda cores: cores / 2), st.sampled_from([0.5, 1.0, 1.5, 2.0, 4.0])),
        min_size=1,
        max_size=9,
    ),
)
# Of shares between the same measured amounts the most, and the fewest, cores decide.
@example(steps=[0, 3, 0], shares=[(2.5, 2.0), (3.5, 2.0), (3.0, 4.0)])
@example(steps=[0, 3, 0], shares=[(4.0, 2.0), (2.5, 4.0), (4.0, 4.0)])
def test_where_memory_makes_up_for_cores_no_node_that_lacks_it_costs_anything(
    steps: list[int], shares: list[tuple[float, float]]
) -> None:
    with_little = np.cumsum([1, *steps])[1:].astype(float)
    rates_of = np.stack([with_little, np.full(3, with_little[-1])], axis=1)[None]
    nodes = TuningNodes(
        np.ones(len(shares), np.int64), np.array([c for c, _ in shares]), np.array([m for _, m in shares])
    )
    one = gangs([1], [0], Profiles(np.array([2.0, 4.0, 6.0]), np.array([2.0, 4.0]), rates_of))
    found = demands(one, nodes)
    assert (found.cores[0], found.memory_bytes[0]) == naive_demand(one, 0, nodes)


def placed_somewhere(of_round: Gangs, nodes: TuningNodes) -> Pieces:
    """GPUs handed out in order, wherever they are."""
    free = nodes.gpus.tolist()
    rows = []
    for gang, gpus in enumerate(of_round.gpus.tolist()):
        if gpus > sum(free):
            continue
        for node in range(len(nodes)):
            count = min(gpus, free[node])
            if count:
                rows.append((gang, node, count, (gang + node) % 3))
            free[node] -= count
            gpus -= count
    return pieces(*([row[column] for row in rows] for column in range(4)))


# Under these no gang runs slower than with its proportional share, if all nodes are alike.
GUARANTEEING = {"proportional", "bind", "exact", "synergy-opt", "synergy-tune"}


@pytest.mark.parametrize("name", sorted(TUNINGS))
@settings(max_examples=40)
@given(case=rounds(alike=True))
def test_no_tuning_gives_more_than_there_is_and_guarantees_hold_for_every_gang(
    name: str, case: tuple[Gangs, TuningNodes]
) -> None:
    of_round, nodes = case
    placed = placed_somewhere(of_round, nodes)
    tuned = TUNINGS[name].tune(of_round, nodes, placed)
    assert_fits(tuned, of_round, nodes)
    if name in GUARANTEEING:
        assert len(tuned) == len(placed)
        floor = rates(of_round, proportionally(nodes, placed))
        assert np.all(rates(of_round, tuned) >= floor * (1 - 1e-6))


@pytest.mark.parametrize("name", ["proportional", "bind", "synergy-tune", "exact"])
@settings(max_examples=50)
@given(case=rounds(alike=False))
def test_shares_are_kept_on_nodes_that_differ(name: str, case: tuple[Gangs, TuningNodes]) -> None:
    of_round, nodes = case
    placed = placed_somewhere(of_round, nodes)
    tuned = TUNINGS[name].tune(of_round, nodes, placed)
    assert_fits(tuned, of_round, nodes)
    assert np.all(rates(of_round, tuned) >= rates(of_round, proportionally(nodes, placed)) * (1 - 1e-6))


@given(rounds())
def test_sharing_and_roles_agree_with_doing_it_node_by_node(case: tuple[Gangs, TuningNodes]) -> None:
    of_round, nodes = case
    placed = placed_somewhere(of_round, nodes)
    demand = demands(of_round, nodes)
    shared, role = (TUNINGS[name].tune(of_round, nodes, placed) for name in ("shared", "role"))
    for node in range(len(nodes)):
        rows = [row for row in range(len(placed)) if placed.node[row] == node]
        for tuned, wants in (
            (shared, [float(placed.gpus[row] * demand.cores[placed.gang[row]]) for row in rows]),
            (role, [4.0 * placed.gpus[row] + 3.0 * placed.parameter_servers[row] for row in rows]),
        ):
            total = sum(wants)
            for row, want in zip(rows, wants, strict=True):
                given = want if total <= nodes.cores[node] else nodes.cores[node] * want / total
                assert tuned.cores[row] == pytest.approx(given)


def test_a_binding_server_gives_six_cores_to_each_of_four_gpus() -> None:
    server = servers(1, gpus=4, cores_per_gpu=6.0)
    four = gangs([1] * 4, [0, 5, 5, 9], SYNERGY)
    placed = pieces(range(4), [0] * 4, [1] * 4, [1, 0, 0, 0])
    assert TUNINGS["bind"].tune(four, server, placed).cores.tolist() == [6.0] * 4
    assert TUNINGS["role"].tune(four, server, placed).cores.tolist() == [7.0, 4.0, 4.0, 4.0]


def best_by_trying(curves: list[list[float]], cores: int) -> float:
    """The most that whole cores, at least one each, make of the curves."""
    best = {0: 0.0}
    for curve in curves:
        found: dict[int, float] = {}
        for used, worth in best.items():
            for count, value in enumerate(curve, 1):
                if used + count <= cores:
                    found[used + count] = max(found.get(used + count, 0.0), worth + value)
        best = found
    return max(best.values())


concave = st.lists(st.integers(0, 8), min_size=1, max_size=6).map(
    lambda gains: np.cumsum(sorted(gains, reverse=True)).astype(float).tolist()
)
rising = st.lists(st.integers(0, 8), min_size=1, max_size=6).map(lambda gains: np.cumsum(gains).astype(float).tolist())


@given(st.lists(concave, min_size=1, max_size=5), st.integers(5, 24))
def test_marginal_gain_is_best_where_curves_bend_down(curves: list[list[float]], cores: int) -> None:
    held = shared_out([np.array(curve) for curve in curves], cores)
    assert sum(held) <= cores
    assert sum(curve[int(count) - 1] for curve, count in zip(curves, held, strict=True)) == best_by_trying(
        curves, cores
    )


@given(st.lists(rising, min_size=1, max_size=5), st.integers(5, 24))
def test_marginal_gain_misses_at_most_one_step_where_they_do_not(curves: list[list[float]], cores: int) -> None:
    held = shared_out([np.array(curve) for curve in curves], cores)
    assert sum(held) <= cores
    assert all(1 <= count <= len(curve) for count, curve in zip(held, curves, strict=True))
    found = sum(curve[int(count) - 1] for curve, count in zip(curves, held, strict=True))
    assert found >= best_by_trying(curves, cores) - max(max(curve) for curve in curves)


def test_too_few_cores_are_shared_alike() -> None:
    assert shared_out([np.array([1.0, 2.0])] * 4, 2.0) == [0.5] * 4


# Cores for the best rate on one P100 (Xiao et al., SoCC 2018 poster).
POSTER = {
    "Lenet": 20, "AlexNet": 19, "Overfeat": 22, "GoogleNet": 11, "LanguageModel": 1, "Bi-Att-Flow": 8, "DeepSpeech": 3,
    "WaveNet": 3,
}  # fmt: skip


def test_predicted_cores_are_those_of_the_posters_table() -> None:
    """Alone on the poster's machine (24 cores, P100) every model gets the cores its table names."""
    models = [CpuModel(0.0, 1.0 / theta, 1.0, float(theta)) for theta in POSTER.values()]
    server = TuningNodes(np.array([1]), np.array([24.0]), np.array([1.0]))
    for which, theta in enumerate(POSTER.values()):
        alone = gangs([1], [which], predicted(models, 24))
        assert TUNINGS["predictor"].tune(alone, server, pieces([0], [0], [1])).cores.tolist() == [theta]


def test_predicted_cores_of_synergys_models_are_within_one_of_their_best() -> None:
    """From fits of three probes (1, 3 and 24 cores; all nine where the curve has a second knee)."""
    short = {"resnet50": 4, "mobilenet": 6, "deepspeech": 3, "gnmt": 1}
    server = servers(1)
    for name, best in short.items():
        model = fit_cpu([point for point in synergy_points(name) if point.cores in (1, 3, 24)])
        assert model is not None
        alone = gangs([1], [0], predicted([model], 24))
        found = TUNINGS["predictor"].tune(alone, server, pieces([0], [0], [1])).cores[0]
        assert abs(found - best) <= 2, name
    for name, best in {"alexnet": 12, "resnet18": 9, "m5": 6}.items():
        model = fit_cpu(synergy_points(name))
        assert model is not None
        alone = gangs([1], [0], predicted([model], 24))
        assert abs(TUNINGS["predictor"].tune(alone, server, pieces([0], [0], [1])).cores[0] - best) <= 1, name


@pytest.mark.parametrize("name", sorted(TUNINGS))
@pytest.mark.parametrize(("cores", "gigabytes"), [(0.0, 0.0), (0.0, 100.0), (4.0, 0.0)])
def test_nodes_that_have_nothing_to_give_break_nothing(name: str, cores: float, gigabytes: float) -> None:
    nodes = TuningNodes(np.array([2, 2]), np.array([cores, 0.0]), np.array([gigabytes * GB, 0.0]))
    three = gangs([2, 1, 1], [0, 1, 5], SYNERGY)
    tuned = TUNINGS[name].tune(three, nodes, pieces([0, 1, 2], [0, 1, 1], [2, 1, 1]))
    assert_fits(tuned, three, nodes)
    place = TUNINGS[name].place
    if place is not None:
        assert_fits(place(three, nodes), three, nodes)
