"""First placements by measured locality, learned during a replay. (30 s)"""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

import numpy as np
from ganger.cluster.resources import Locality
from ganger_master.estimators.speed import measured_loss
from ganger_master.planner import migration_outcomes
from ganger_master.simulator import admission
from ganger_master.simulator.inputs import ReplayOptions
from ganger_master.simulator.report.outcomes import Outcomes
from ganger_master.simulator.run import simulate
from ganger_master.simulator.traces.servers import servers_from_flags
from ganger_master.simulator.traces.workload import Labels, scaled_to_load, synthetic

GANGS = {1: 0.5, 2: 0.15, 4: 0.2, 8: 0.15}
FOUR_SERVERS = servers_from_flags(nodes=4, gpus_per_node=8, topology="2x4")


def run(models: Sequence[str], load: float, seed: int, learns: bool) -> tuple[Outcomes, int]:
    """Return the outcomes of jobs that state no locality, and how often a gang was found to lose at wider places."""
    jobs = scaled_to_load(synthetic(120, 10.0, seed, GANGS), FOUR_SERVERS.gpus, load)
    chosen = np.random.default_rng(seed).integers(0, len(models), len(jobs)).tolist()
    jobs = jobs.with_columns(model=Labels.of([models[model] for model in chosen]))
    found = 0

    def counted(*arguments: object) -> object:
        nonlocal found
        loss = measured_loss(*arguments)  # type: ignore[arg-type]
        found += loss is not None
        return loss if learns else None

    # A replay demands one server for jobs that fit into one.
    with patch.object(admission, "_TOGETHER", Locality()), patch.object(migration_outcomes, "measured_loss", counted):
        outcomes = simulate(jobs, FOUR_SERVERS, "ganger", ReplayOptions(rates="profiles", seed=seed)).outcomes
    assert outcomes.finished.all()
    return outcomes, found


def test_gangs_that_wait_for_the_locality_that_they_need_are_done_no_later_on_average() -> None:
    """Half of the jobs lose 25 to 30 % of their speed across servers, the others next to nothing."""
    models, ratios, found = ("lstm", "resnet50"), [], []
    for seed in (2, 3):
        with_learned, count = run(models, 0.8, seed, learns=True)
        without, _ = run(models, 0.8, seed, learns=False)
        ratios.append(with_learned.jct_s.mean() / without.jct_s.mean())
        found.append(count)
    assert min(found) > 0
    assert np.mean(ratios) < 1.0
