"""How fast jobs really go, against what is published of their models."""

from __future__ import annotations

import numpy as np
import pytest
from ganger.cluster.resources import Claim, LocalityLevel
from ganger_master.core.gang_model import Gang, GangPhase, GangRole, Piece
from ganger_master.simulator.traces.servers import Servers, servers_from_description, servers_from_flags
from ganger_master.simulator.traces.workload import workload
from ganger_master.simulator.true_rates import TrueRates, without_arenas

GB = 1_000_000_000
SYNERGY = without_arenas(servers_from_flags(nodes=4, gpus_per_node=8))


def gang(*claims: Claim, level: LocalityLevel = LocalityLevel.NODE) -> Gang:
    pieces = tuple(Piece(claim, claim) for claim in claims)
    return Gang(1, 1, GangRole.ACTIVE, GangPhase.RUNNING, pieces, level, 0.0)


def claim(cores: float, gigabytes: float, mask: int = 1, node: str = "node-0") -> Claim:
    return Claim(node, mask, (int(1000 * cores),), int(gigabytes * GB), tasks=(mask.bit_count(),))


def rate(model: str, made: Gang, gpus: int = 1, servers: Servers = SYNERGY, **columns: object) -> float:
    numbers = {name: [value] for name, value in columns.items() if name != "gpu_type"}
    labels = {"model": [model], "gpu_type": [str(columns.get("gpu_type", ""))]}
    return TrueRates(workload(["0"], [0.0], [gpus], [1.0], numbers=numbers, labels=labels), servers).rate(0, made)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "cores", "gigabytes", "expected"),
    [
        # The share of Synergy's servers is what it was recorded with; the others are its published figures.
        ("alexnet", 3, 62.5, 1.0),
        ("alexnet", 12, 125, 2.94),
        ("alexnet", 12, 62.5, 2.0),
        ("resnet18", 9, 62.5, 2.4),
        ("m5", 6, 125, 2.0),
        ("gnmt", 1, 20.83, 1.0),
        ("res50", 1, 62.5, 0.4),
        ("res50", 3, 20.83, 0.1),
        # Of unknown models more gains nothing.
        ("", 9, 125, 1.0),
        ("unpublished", 1.5, 62.5, 0.5),
    ],
)
def test_cores_and_memory_do_to_a_job_what_is_published_of_its_model(
    model: str, cores: float, gigabytes: float, expected: float
) -> None:
    assert rate(model, gang(claim(cores, gigabytes))) == pytest.approx(expected)


def test_a_gang_goes_as_fast_as_its_slowest_piece() -> None:
    apart = gang(claim(9, 62.5), claim(2, 62.5, node="node-1"), level=LocalityLevel.CLUSTER)
    near = gang(claim(2, 62.5), claim(2, 62.5, node="node-1"), level=LocalityLevel.CLUSTER)
    assert rate("res18", apart, 2) == rate("res18", near, 2) < 0.72 + 1e-9


def test_the_recorded_pace_is_that_with_the_cores_the_trace_tells_of() -> None:
    assert rate("res18", gang(claim(9, 62.5)), cpus=9.0) == 1.0
    assert rate("res18", gang(claim(3, 62.5)), cpus=9.0) == pytest.approx(1.0 / 2.4)


@pytest.mark.parametrize(("gpus", "nodes", "measured"), [(2, 2, 0.745), (4, 2, 0.397), (8, 4, 0.268)])
def test_gangs_that_lie_apart_lose_what_chronus_measured(gpus: int, nodes: int, measured: float) -> None:
    each = gpus // nodes
    claims = [claim(3 * each, 62.5 * each, (1 << each) - 1, f"node-{node}") for node in range(nodes)]
    racked = without_arenas(
        servers_from_description({"servers": [{"name": "node", "nodes": 4, "gpus_per_node": 8, "nodes_per_rack": 4}]})
    )
    found = rate("alexnet", gang(*claims, level=LocalityLevel.RACK), gpus, racked)
    assert found == pytest.approx(measured)
    together = gang(claim(3 * gpus, 62.5 * gpus, (1 << gpus) - 1), level=LocalityLevel.NVLINK)
    assert rate("alexnet", together, gpus, racked) == 1.0


def test_further_apart_is_never_faster() -> None:
    found = [
        rate("", gang(claim(6, 125, 3), claim(6, 125, 3, "node-1"), level=level), 4)
        for level in (LocalityLevel.RACK, LocalityLevel.FABRIC, LocalityLevel.CLUSTER)
    ]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]


def test_an_older_type_of_gpu_is_slower_unless_the_job_named_it() -> None:
    servers = without_arenas(
        servers_from_description(
            {
                "servers": [
                    {"name": "new", "nodes": 2, "gpus_per_node": 8, "gpu_type": "V100"},
                    {"name": "old", "nodes": 1, "gpus_per_node": 8, "gpu_type": "K80"},
                ]
            }
        )
    )
    new, old = gang(claim(3, 62.5, node="new-0")), gang(claim(3, 62.5, node="old-0"))
    assert rate("gnmt", new, servers=servers) == 1.0
    assert 0.05 < rate("gnmt", old, servers=servers) < 0.5
    assert rate("gnmt", old, servers=servers, gpu_type="K80") == 1.0


def test_a_policy_knows_only_the_profiles_of_jobs_that_were_profiled() -> None:
    jobs = workload(
        ["0", "1", "2"], [0.0, 0.0, 0.0], [1, 1, 1], labels={"model": ["alexnet", "alexnet", "unpublished"]}
    )
    known = TrueRates(jobs, SYNERGY).known(lambda numbers: numbers != 2)
    assert known.position(np.array([1, 2, 3])).tolist() == [0, -1, -1]
