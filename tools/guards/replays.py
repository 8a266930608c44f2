"""The replays whose decisions the restructuring keeps: part E of the tables of docs/design/009.

Of the policies only `ganger` uses time slices. All jobs are synthetic or from the example trace that comes with Ganger.
Times are rounded to milliseconds: vector units of different processors disagree in the last bit of a power.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Final

import numpy as np
from ganger_master.simulator.admission import acceptable
from ganger_master.simulator.inputs import ReplayOptions
from ganger_master.simulator.traces.reader import read_trace
from ganger_master.simulator.traces.servers import Servers, servers_from_description, servers_from_flags
from ganger_master.simulator.traces.workload import (
    MULTI_GPU,
    Labels,
    Workload,
    scaled_to_load,
    synthetic,
    with_models,
    with_sizes,
)

SEED: Final = 1
# Gangs of up to two servers.
_WIDE: Final = {1: 0.5, 2: 0.15, 4: 0.15, 8: 0.12, 16: 0.08}
_EIGHT: Final = servers_from_flags(nodes=8, gpus_per_node=8, topology="2x4")
_SIXTEEN: Final = servers_from_flags(nodes=16, gpus_per_node=8, topology="2x4")
# Two types of devices, each in two racks; the newer servers have two sockets.
_MIXED: Final = servers_from_description(
    {
        "servers": [
            {"name": "old", "nodes": 4, "gpus_per_node": 8, "gpu_type": "P100", "nodes_per_rack": 2},
            {"name": "new", "nodes": 4, "gpus_per_node": 8, "gpu_type": "V100", "topology": "2x4", "nodes_per_rack": 2},
        ]
    }
)
_WITH_COSTS: Final = ReplayOptions(seed=SEED)


@dataclass(frozen=True)
class ReplayCase:
    """One run of the simulator. `jobs` makes its workload from their number."""

    policy: str
    jobs: Callable[[int], Workload]
    count: int = 300
    servers: Servers = _EIGHT
    options: ReplayOptions = _WITH_COSTS

    def workload(self) -> Workload:
        """Return the jobs that the cluster can hold."""
        taken, _ = acceptable(self.jobs(self.count), self.servers, self.options.ideal, self.options.quotas)
        return taken


def _rounded(jobs: Workload) -> Workload:
    return jobs.with_columns(
        submit_s=np.round(jobs.submit_s, 3),
        duration_s=np.round(jobs.duration_s, 3),
        deadline_s=np.round(jobs.deadline_s, 3),
    )


def _at_load(
    load: float, servers: Servers = _EIGHT, gangs: Mapping[int, float] = MULTI_GPU
) -> Callable[[int], Workload]:
    """Return a maker of synthetic jobs that offer this load, of three users, with deadlines."""

    def make(count: int) -> Workload:
        jobs = scaled_to_load(synthetic(count, 10.0, SEED, gangs), servers.gpus, load)
        random = np.random.default_rng(SEED)
        users = Labels.of([("ann", "bob", "eve")[user] for user in random.integers(0, 3, count).tolist()])
        deadlines = jobs.submit_s + jobs.duration_s * random.uniform(1.2, 4.0, count)
        return _rounded(jobs.with_columns(user=users, deadline_s=deadlines))

    return make


def _with_models(count: int) -> Workload:
    return with_models(_at_load(0.8)(count), SEED)


def _elastic(count: int) -> Workload:
    return with_sizes(with_models(_at_load(0.7)(count), SEED), 4.0, _EIGHT.gpus // 2)


def _example(count: int) -> Workload:
    """Return the first jobs of the example trace; each accepts one type of devices, the other, or both."""
    with resources.as_file(resources.files("ganger_master.simulator.traces") / "example.csv") as file:
        jobs = read_trace(file).workload
    jobs = scaled_to_load(jobs.take(np.arange(min(count, len(jobs)))), _MIXED.gpus, 0.9)
    types = np.random.default_rng(SEED).integers(0, 3, len(jobs)).tolist()
    return _rounded(jobs.with_columns(gpu_type=Labels.of([("P100", "V100", "")[kind] for kind in types])))


def _replays() -> Iterator[tuple[str, ReplayCase]]:
    costs = "fifo backfill srtf las tiresias tiresias-gittins drf ftf edf ganger-alone+packs"
    for policy in costs.split():
        yield "costs", ReplayCase(policy, _at_load(0.9))
    for policy in ("fifo", "srsf", "tiresias", "ganger-alone+packs"):
        yield "ideal", ReplayCase(policy, _at_load(0.6), options=ReplayOptions(ideal=True, seed=SEED))
    for policy, count in (("tiresias", 300), ("synergy", 150), ("las+synergy-tune+best-fit", 200)):
        yield "rounds", ReplayCase(policy, _at_load(1.1), count, options=ReplayOptions(round_s=300.0, seed=SEED))
    with_profiles = ReplayOptions(rates="profiles", seed=SEED)
    solved = (("las+synergy-opt", 150), ("las+exact", 150))
    for policy, count in (("synergy", 300), *solved, ("las+predictor", 300), ("ganger-alone+packs+bind", 300)):
        yield "profiles", ReplayCase(policy, _with_models, count, options=with_profiles)
    for policy in ("tetris", "tetris-cos", "srtf+tetris", "fifo+fgd", "fifo+locality", "drf+optimus-cards"):
        yield "types", ReplayCase(policy, _example, servers=_MIXED)
    for policy, count in (("optimus", 150), ("ganger-alone+packs+elastic", 300), ("srtf+elastic", 300)):
        yield "elastic", ReplayCase(policy, _elastic, count)
    for policy in ("ganger-alone+packs+defrag", "tiresias+defrag", "edf+defrag"):
        yield "defrag", ReplayCase(policy, _at_load(0.8, _SIXTEEN, _WIDE), servers=_SIXTEEN)
    quotas = {"ann": 16, "*": 24}
    for policy in ("ganger-alone+packs", "srtf"):
        yield "quotas", ReplayCase(policy, _at_load(0.9), options=ReplayOptions(quotas=quotas, seed=SEED))
    yield "profiles", ReplayCase("ganger", _with_models, 300, options=with_profiles)


REPLAYS: Final[Mapping[str, ReplayCase]] = {f"{kind}/{case.policy}": case for kind, case in _replays()}
