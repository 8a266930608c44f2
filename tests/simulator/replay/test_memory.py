"""What a replay holds grows with the jobs that are live, not with those that there have been."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sized
from dataclasses import replace

import numpy as np
import pytest
from ganger_master.simulator import run
from ganger_master.simulator.inputs import ReplayOptions
from ganger_master.simulator.traces.servers import servers_from_flags
from ganger_master.simulator.traces.workload import workload

# Ended jobs that are kept, and more than twice as many jobs.
KEPT = 200
JOBS = 450
MOST_HELD = 250


def held(replay: run._Replay) -> Iterator[tuple[str, int]]:
    """Every container of the core and of the modelled nodes and schedulers, and how much is in it; queues have limits
    of their own."""
    state = replay.state
    core = (state, state.view, state.queue.waiting, state.queue.lacking)
    for part in (*core, replay.nodes, replay.turns, replay.planning.loop.table, replay.clock):
        for name, value in vars(part).items():
            if isinstance(value, Sized) and not isinstance(value, deque):
                yield f"{type(part).__name__}.{name}", len(value)


@pytest.mark.parametrize("policy", ["fifo-backfill", "ganger"])
def test_nothing_is_held_for_jobs_that_are_long_gone(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = run._core_settings
    monkeypatch.setattr(run, "_core_settings", lambda *known: replace(settings(*known), finished_jobs_limit=KEPT))
    draw = np.random.default_rng(5)
    jobs = workload(
        [str(job) for job in range(JOBS)],
        np.arange(JOBS) * 60.0,
        draw.choice([1, 1, 2, 4, 8], JOBS),
        draw.uniform(20.0, 800.0, JOBS),
    )
    replay = run._Replay(jobs, servers_from_flags(nodes=4, gpus_per_node=8), policy, ReplayOptions(), None)
    replay.run()
    found = dict(held(replay))
    assert found["State.jobs"] >= KEPT, "those that ended last are kept"
    assert {name: entries for name, entries in found.items() if entries > MOST_HELD} == {}
