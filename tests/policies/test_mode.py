"""Spread under light load, pack under heavy load: a ramp of noisy load flips the mode exactly twice. (8 s)"""

from __future__ import annotations

import numpy as np
import pytest
from ganger.cluster.placement import choose_mode
from ganger.cluster.view import LoadMode
from ganger_master.core import state
from ganger_master.simulator.inputs import ReplayOptions
from ganger_master.simulator.run import _Replay, simulate
from ganger_master.simulator.traces.servers import servers_from_flags
from ganger_master.simulator.traces.workload import Workload, workload
from hypothesis import given
from hypothesis import strategies as st

HOUR_S = 3600.0
NODES, GPUS = 64, 8


def ramp(seed: int, hours: float = 12.0, mean_s: float = HOUR_S, nodes: int = NODES) -> Workload:
    """Gangs of all sizes that come at random (Poisson), so many that the load rises from 0.2 to 0.9 and falls again."""
    random = np.random.default_rng(seed)
    sizes = np.array([1, 1, 1, 1, 2, 2, 4, 8])
    devices = nodes * GPUS
    most = 0.9 * devices / (float(sizes.mean()) * mean_s)
    times = np.cumsum(random.exponential(1.0 / most, int(most * hours * HOUR_S)))
    load = np.interp(times / HOUR_S, [0.0, hours / 2, hours], [0.2, 0.9, 0.2])
    times = times[random.uniform(0.0, 0.9, len(times)) < load]
    # Those that were there before, so that it begins at 0.2.
    times = np.concatenate([np.zeros(int(0.2 * devices / sizes.mean())), times])
    gpus = random.choice(sizes, len(times))
    durations = random.exponential(mean_s, len(times)).clip(1.0)
    return workload([str(n) for n in range(len(times))], times.tolist(), gpus.tolist(), durations.tolist())


class Watched(_Replay):
    """Remembers the mode after every batch, and the load."""

    def __init__(self, jobs: Workload) -> None:
        super().__init__(
            jobs, servers_from_flags(nodes=NODES, gpus_per_node=GPUS), "fifo-backfill", ReplayOptions(), None
        )
        self.modes = [self.state.view.mode]
        self.most = 0.0

    def _finish(self) -> None:
        super()._finish()
        if not hasattr(self, "modes"):
            return
        self.most = max(self.most, 1.0 - self.state.nodes.free_devices / self.state.nodes.devices)
        if self.state.view.mode is not self.modes[-1]:
            self.modes.append(self.state.view.mode)


@pytest.mark.parametrize("seed", [0, 1])
def test_ramp_of_load_flips_the_mode_of_the_cluster_exactly_twice(seed: int) -> None:
    replay = Watched(ramp(seed))
    replay.run()
    assert replay.most > 0.8
    assert replay.modes == [LoadMode.SPREAD, LoadMode.PACK, LoadMode.SPREAD]


def test_adaptive_mode_completes_jobs_sooner_than_either_mode_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 nodes, models drawn from the published profiles, so that it counts how close the GPUs of a gang are."""
    jct_s = {}
    for name, choose in (
        ("adaptive", choose_mode),
        ("spread", lambda *_: LoadMode.SPREAD),
        ("pack", lambda *_: LoadMode.PACK),
    ):
        monkeypatch.setattr(state, "choose_mode", choose)
        options = ReplayOptions(rates="profiles")
        runs = [
            simulate(
                ramp(seed, 24.0, nodes=16), servers_from_flags(nodes=16, gpus_per_node=GPUS), "fifo-backfill", options
            )
            for seed in range(2)
        ]
        jct_s[name] = float(np.mean([run.outcomes.jct_s.mean() for run in runs]))
    assert jct_s["adaptive"] <= min(jct_s.values()) * 1.005, jct_s


@given(st.integers(40, 120), st.data())
def test_noise_of_less_than_half_the_gap_never_flips_it_back(steps: int, data: st.DataObject) -> None:
    noise = data.draw(st.lists(st.floats(-0.149, 0.149), min_size=steps, max_size=steps))
    up = np.interp(np.arange(steps), [0, steps / 2, steps], [0.2, 0.9, 0.2])
    mode, flips = LoadMode.SPREAD, 0
    for load, error in zip(up.tolist(), noise, strict=True):
        then = choose_mode(mode, round(1000 * (load + error)), 1000)
        flips += then is not mode
        mode = then
    assert flips == 2
    assert mode is LoadMode.SPREAD
