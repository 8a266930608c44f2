"""Gangs and nodes to tune: drawn, and with Synergy's published profiles."""

from __future__ import annotations

from typing import Any

import numpy as np
from ganger_master.policies.tunings import Gangs, Pieces, Profiles, TuningNodes, gangs, profiles_of
from ganger_master.simulator.traces.workload import synergy_profiles
from hypothesis import strategies as st

GB = 1e9
NAMES = tuple(synergy_profiles())
SYNERGY = profiles_of([profile.matrix for profile in synergy_profiles().values()])
CLASSES = {name: profile.model_class for name, profile in synergy_profiles().items()}


def servers(count: int, gpus: int = 8, cores_per_gpu: float = 3.0, gigabytes_per_gpu: float = 62.5) -> TuningNodes:
    """Synergy's: 8 V100, 24 cores, 500 GB."""
    return TuningNodes(
        np.full(count, gpus), np.full(count, gpus * cores_per_gpu), np.full(count, gpus * gigabytes_per_gpu * GB)
    )


def drawn(seed: int, gpus: int, split: tuple[float, float, float], sizes: dict[int, float]) -> Gangs:
    """Gangs of published models that fill so many GPUs; `split` is over image, language and speech."""
    random = np.random.default_rng(seed)
    kinds = [CLASSES[name].value for name in NAMES]
    part = dict(zip(("image", "language", "speech"), np.array(split) / sum(split), strict=True))
    likely = np.array([part[kind] / kinds.count(kind) for kind in kinds])
    counts: list[int] = []
    while (left := gpus - sum(counts)) > 0:
        counts.append(min(left, int(random.choice(list(sizes), p=list(sizes.values())))))
    return gangs(counts, random.choice(len(NAMES), size=len(counts), p=likely), SYNERGY)


@st.composite
def profiles(draw: st.DrawFn, most: int = 4) -> Profiles:
    """Any non-falling rates on a small grid; steps of a quarter, so that ties are common."""
    count = draw(st.integers(1, most))
    cores = sorted(draw(st.sets(st.integers(1, 8), min_size=1, max_size=4)))
    memory = sorted(draw(st.sets(st.integers(1, 6), min_size=1, max_size=3)))
    size = count * len(cores) * len(memory)
    steps = np.array(draw(st.lists(st.integers(0, 4), min_size=size, max_size=size)), float)
    table = steps.reshape(count, len(cores), len(memory)) / 4.0
    rising = np.maximum.accumulate(np.maximum.accumulate(table, axis=1), axis=2) + 0.25
    return Profiles(np.array(cores, float), np.array(memory, float), rising)


@st.composite
def clusters(draw: st.DrawFn, most_nodes: int = 4, alike: bool | None = None) -> TuningNodes:
    """Nodes of up to 8 GPUs, alike or not; some without GPUs."""
    count = draw(st.integers(1, most_nodes))
    kind = st.tuples(st.sampled_from([0, 1, 2, 4, 8]), st.integers(1, 24), st.integers(1, 24))
    is_alike = draw(st.booleans()) if alike is None else alike
    rows = [draw(kind.filter(lambda row: row[0] > 0))] * count if is_alike else [draw(kind) for _ in range(count)]
    return TuningNodes(
        np.array([row[0] for row in rows]),
        np.array([row[1] for row in rows], float),
        np.array([row[2] for row in rows], float),
    )


@st.composite
def rounds(draw: st.DrawFn, most_gangs: int = 8, alike: bool | None = None) -> tuple[Gangs, TuningNodes]:
    """A round: gangs in order of policy, and the nodes."""
    known = draw(profiles())
    nodes = draw(clusters(alike=alike))
    count = draw(st.integers(0, most_gangs))
    rows = st.lists(
        st.tuples(st.integers(1, 6), st.integers(0, len(known.rates) - 1), st.booleans()),
        min_size=count,
        max_size=count,
    )
    found = draw(rows)
    return (
        gangs([row[0] for row in found], [row[1] for row in found], known, is_local=[row[2] for row in found]),
        nodes,
    )


def held(placed: Pieces, nodes: TuningNodes) -> tuple[Any, Any, Any]:
    """What is used of each node: GPUs, cores, bytes."""
    gpus, cores, memory = (
        np.bincount(placed.node, weights=column, minlength=len(nodes))
        for column in (placed.gpus, placed.cores, placed.memory_bytes)
    )
    return gpus, cores, memory


def assert_fits(placed: Pieces, gangs: Gangs, nodes: TuningNodes) -> None:
    """No node gives more than it has, and gangs are whole."""
    for used, capacity in zip(held(placed, nodes), (nodes.gpus, nodes.cores, nodes.memory_bytes), strict=True):
        assert np.all(used <= capacity * (1 + 1e-6) + 1e-9)
    for gang in np.unique(placed.gang):
        assert placed.gpus[placed.gang == gang].sum() == gangs.gpus[gang]
    assert np.all(placed.gpus > 0)
