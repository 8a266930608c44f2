"""The same events at the same times bring the same plans, in whatever order a process keeps its sets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
from ganger_master.planner.context import Plan
from ganger_master.planner.loop import PlannerLoop
from ganger_master.simulator.inputs import ReplayOptions, SwitchCosts
from ganger_master.simulator.run import simulate
from ganger_master.simulator.traces.servers import servers_from_flags
from ganger_master.simulator.traces.workload import workload

JOBS = 40
MODELS = ["resnet50", "resnext50", "vae", "lstm"]
STEP = PlannerLoop.step


def plans(policy: str, seed: int) -> bytes:
    """Return all plans of a simulation, with their times, as JSON."""
    draw = np.random.default_rng(seed)
    jobs = workload(
        [str(job) for job in range(JOBS)],
        np.sort(draw.uniform(0.0, 10_000.0, JOBS)),
        draw.choice([1, 1, 1, 2, 4], JOBS),
        np.exp(draw.normal(7.5, 1.0, JOBS)),
        labels={"model": [str(model) for model in draw.choice(MODELS, JOBS)]},
    )
    found: list[tuple[float, Plan]] = []

    def kept(loop: PlannerLoop, now: float) -> tuple[Plan | None, float]:
        plan, next_s = STEP(loop, now)
        if plan is not None:
            found.append((now, plan))
        return plan, next_s

    with patch.object(PlannerLoop, "step", kept):
        servers = servers_from_flags(nodes=3, gpus_per_node=4)
        simulate(jobs, servers, policy, ReplayOptions(costs=SwitchCosts(start_s=5.0)))
    return msgspec.json.encode(found)


def plans_of_a_process(policy: str, seed: int, hash_seed: str) -> bytes:
    words = [
        sys.executable,
        "-c",
        f"import sys; sys.stdout.buffer.write(__import__('test_equal_plans').plans({policy!r}, {seed}))",
    ]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(__file__).parent)}
    return subprocess.run(words, env=environment, check=True, capture_output=True).stdout


@pytest.mark.parametrize("policy", ["gandiva", "ganger+defrag"])
def test_equal_observations_bring_equal_plans_in_every_process(policy: str) -> None:
    first = plans_of_a_process(policy, 3, "1")
    assert first.count(b'"START"') + first.count(b'"ROW"') >= JOBS
    assert plans_of_a_process(policy, 3, "2") == first
    assert plans(policy, 4) != first
