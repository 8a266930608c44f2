"""Facts of live jobs for tests: say what matters, the rest is plain."""

from __future__ import annotations

from typing import Any

import numpy as np
from ganger_master.policies.orders import FACT_COLUMNS, Capacity, Facts
from hypothesis import strategies as st

# What a job is that says nothing: one GPU, just submitted.
PLAIN: dict[str, Any] = {
    "arrival_s": 0.0,
    "gpus": 1,
    "cores": 0.0,
    "memory_bytes": 0.0,
    "priority": 0,
    "weight": 1.0,
    "user": 0,
    "deadline_s": np.inf,
    "is_running": False,
    "is_preemptible": True,
    "attained_s": 0.0,
    "waited_s": 0.0,
    "started_s": np.inf,
    "stretch_s": 0.0,
    "waited_before_s": 0.0,
    "expected_remaining_s": np.nan,
    "index": np.nan,
    "remaining_s": np.nan,
}


def facts_of(*jobs: dict[str, Any]) -> Facts:
    """One job each; numbers are positions unless said."""
    columns = {name: [job.get(name, plain) for job in jobs] for name, plain in PLAIN.items()}
    columns["number"] = [job.get("number", position) for position, job in enumerate(jobs)]
    kinds = {
        **dict.fromkeys(("number", "gpus", "priority", "user"), np.int64),
        **dict.fromkeys(("is_running", "is_preemptible"), np.bool_),
    }
    found: dict[str, Any] = {name: np.array(columns[name], kinds.get(name, np.float64)) for name in FACT_COLUMNS}
    return Facts(**found)


def capacity_of(gpus: int, cores: float = 0.0, memory_bytes: float = 0.0) -> Capacity:
    return Capacity(gpus, cores, memory_bytes, min(gpus, 8))


def rows(facts: Facts) -> list[dict[str, Any]]:
    """Back to one dictionary a job."""
    return [{name: getattr(facts, name)[at].item() for name in FACT_COLUMNS} for at in range(len(facts))]


@st.composite
def live_jobs(draw: st.DrawFn, now: float = 1000.0, most: int = 12) -> Facts:
    """As a master would tell them at `now`, with many ties; in whole seconds. Quick, at the price of small examples
    being small in the number of jobs only."""
    count = draw(st.integers(1, most))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def some(*values: float) -> Any:
        return random.choice(np.array(values), count)

    attained = some(0.0, 0.0, 2.0, 5.0, 10.0)
    is_running = some(0, 1) > 0
    wait = random.integers(0, 21, count).astype(float)
    return Facts(
        number=random.choice(1000, count, replace=False),
        arrival_s=now - attained - wait - some(0.0, 5.0, 30.0),
        gpus=some(0, 1, 1, 2, 3, 4, 8).astype(np.int64),
        cores=some(0.0, 1.0, 2.5, 8.0),
        memory_bytes=some(0.0, 4.0, 16.0),
        priority=some(0, 0, 0, 1, -1).astype(np.int64),
        weight=some(1.0, 1.0, 2.0, 0.5),
        user=some(0, 0, 1, 2, 7).astype(np.int64),
        deadline_s=some(np.inf, np.inf, now - 1, now, now + 5, now + 50),
        is_running=is_running,
        is_preemptible=some(0, 1, 1) > 0,
        attained_s=attained,
        waited_s=np.where(is_running, 0.0, wait),
        started_s=np.where(attained > 0, now - attained - 3.0, np.inf),
        stretch_s=np.where(is_running, np.minimum(attained, some(0.0, 1.0, 4.0, 20.0)), 0.0),
        waited_before_s=np.where(is_running, wait, 0.0),
        expected_remaining_s=some(np.nan, np.nan, 0.0, 40.0, 300.0),
        index=some(np.nan, 0.0, 1e-6, 1e-3),
        remaining_s=random.integers(1, 400, count).astype(float),
    )
