"""What the master of a simulated cluster takes, and why not the rest: the same checks as of a live one."""

from __future__ import annotations

import numpy as np
import pytest
from ganger_master.simulator.admission import acceptable
from ganger_master.simulator.inputs import ReplayOptions
from ganger_master.simulator.run import simulate
from ganger_master.simulator.traces.servers import Servers, servers_from_description, servers_from_flags
from ganger_master.simulator.traces.workload import Labels, Workload, workload

MIXED = servers_from_description(
    {
        "servers": [
            {"nodes": 2, "gpus_per_node": 4, "gpu_type": "T4", "cores_per_node": 16, "memory_per_node": "64G"},
            {"nodes": 3, "gpus_per_node": 4, "gpu_type": "V100", "cores_per_node": 48, "memory_per_node": "64G"},
            {"nodes": 3, "gpus_per_node": 4, "gpu_type": "A10", "cores_per_node": 48, "memory_per_node": "64G"},
        ]
    }
)
PLAIN = servers_from_flags(nodes=2, gpus_per_node=4)


def jobs_of(*rows: tuple[int, float, str], priority: int = 0) -> Workload:
    """(GPUs, cores, types) of each."""
    return workload(
        [f"j{number}" for number in range(len(rows))],
        np.arange(len(rows)),
        [gpus for gpus, _, _ in rows],
        [10.0] * len(rows),
        numbers={"cpus": [cores for _, cores, _ in rows], "lines": range(2, len(rows) + 2), "priority": priority},
        labels={"gpu_type": [types for _, _, types in rows]},
    )


@pytest.mark.parametrize(
    ("accepted", "asked"),
    [("", ""), ("T4", "T4"), ("T4|V100", "V100"), ("V100|A10|T4", "A10"), ("V100| A10", "A10"), ("H100|T4", "T4")],
)
def test_of_several_types_the_one_there_are_most_of_is_asked_for(accepted: str, asked: str) -> None:
    jobs, findings = acceptable(jobs_of((1, 1.0, accepted)), MIXED, is_ideal=False)
    assert jobs.gpu_type.texts() == [asked]
    assert len(findings) == ("|" in accepted)


@pytest.mark.parametrize(
    ("quotas", "left"),
    [
        ({}, "0123"),
        ({"ann": 8}, "0123"),
        ({"ann": 4}, "023"),
        ({"ann": 1, "*": 1}, "02"),
        ({"*": 4}, "023"),
        ({"*": 2, "ann": 8}, "0123"),
        ({"bob": 1, "*": 8}, "012"),
        ({"*": 0, "bob": 2}, "23"),
        ({"*": 0}, ""),
    ],
)
def test_a_gang_larger_than_its_user_s_quota_could_never_run(quotas: dict[str, int], left: str) -> None:
    jobs = jobs_of((1, 1.0, ""), (8, 1.0, ""), (1, 1.0, ""), (2, 1.0, "")).with_columns(
        user=Labels.of(["ann", "ann", "bob", ""]), tenant=Labels.of(["", "", "", "bob"])
    )
    kept, findings = acceptable(jobs, PLAIN, is_ideal=True, quotas=quotas)
    assert kept.job_ids == tuple(f"j{number}" for number in left)
    assert sum(finding.rows for finding in findings) == 4 - len(left)
    assert all("of its user's quota" in finding.what for finding in findings)


def test_types_mean_nothing_to_servers_without_named_types() -> None:
    jobs, (finding,) = acceptable(jobs_of((1, 1.0, "T4|V100"), (1, 1.0, "")), PLAIN, is_ideal=False)
    assert jobs.gpu_type.texts() == ["", ""]
    assert str(finding) == "line 2: asks for a type of GPU, but the servers' has no name: any serves"


def left_out(jobs: Workload, servers: Servers, is_ideal: bool = False) -> dict[str, tuple[int, ...]]:
    kept, findings = acceptable(jobs, servers, is_ideal)
    assert len(kept) + sum(found.rows for found in findings) == len(jobs)
    return {found.what: found.lines for found in findings}


def test_a_gang_larger_than_the_servers_of_its_type_may_lie_on_several() -> None:
    """Though servers of another type are large enough for it."""
    kinds = [{"nodes": 4, "gpus_per_node": 4, "gpu_type": "P100"}, {"nodes": 2, "gpus_per_node": 8, "gpu_type": "V100"}]
    jobs, findings = acceptable(jobs_of((8, 8.0, "P100")), servers_from_description({"servers": kinds}), is_ideal=False)
    assert (len(jobs), findings) == (1, ())


def test_what_fits_the_sum_of_the_servers_but_none_of_them_is_left_out_with_the_masters_reason() -> None:
    # 16 cores for one GPU: there are 24, 12 of them in each server.
    jobs = jobs_of((1, 16.0, ""), (1, 12.0, ""), (1, 20.0, ""))
    reason = "not even the idle cluster could hold it (not enough free cores beside the devices)"
    assert left_out(jobs, PLAIN) == {reason: (2, 4)}
    assert left_out(jobs, PLAIN, is_ideal=True) == {}, "an ideal cluster asks for devices only"


def test_an_ideal_cluster_holds_what_asks_for_more_cores_and_memory_than_there_are() -> None:
    jobs = jobs_of((1, 99.0, ""), (8, 1.0, "")).with_columns(memory_bytes=np.array([1e9, 1e15]))
    assert len(left_out(jobs, PLAIN)) == 2
    assert left_out(jobs, PLAIN, is_ideal=True) == {}


def test_what_no_master_takes_is_left_out_with_what_is_wrong() -> None:
    assert left_out(jobs_of((1, 1.0, ""), priority=5000), PLAIN) == {
        "no master takes it: spec.priority: from -1000 to 1000": (2,)
    }


@pytest.mark.parametrize("is_ideal", [False, True])
def test_what_is_taken_runs_to_its_end(is_ideal: bool) -> None:
    random = np.random.default_rng(5)
    kinds = ["", "T4", "V100", "A10|T4", "H100"]
    rows = [
        (int(random.integers(1, 16)), float(random.integers(1, 60)), kinds[random.integers(len(kinds))])
        for _ in range(60)
    ]
    jobs, _ = acceptable(jobs_of(*rows), MIXED, is_ideal)
    assert 10 < len(jobs) < 60
    run = simulate(jobs, MIXED, "fifo-backfill", ReplayOptions(ideal=is_ideal))
    assert run.outcomes.finished.all()
