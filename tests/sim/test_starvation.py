"""A large gang starts though small jobs keep coming: its place is kept once it has waited long enough."""

from __future__ import annotations

from ganger.resources.topology import parse_topology
from ganger.resources.values import Role, TaskShape
from ganger_master.approval.reservations import SECONDS_BEFORE
from ganger_master.core.model import JobSpec, JobState
from ganger_master.core.settings import Settings
from ganger_master.sim.cluster import Cluster
from hypothesis import given, settings
from hypothesis import strategies as st

_GIB = 1 << 30
SERVER = parse_topology("2x2", name="v4", millicores=16_000, memory_bytes=64 * _GIB, device_memory_bytes=_GIB)
# Seconds that a small job runs at most, its start and end included.
LONGEST = 60.0


def job_of(gpus: int, steps: int) -> JobSpec:
    return JobSpec(("train", str(steps)), (Role("worker", gpus, TaskShape(1, 2_000, 4 * _GIB)),))


@settings(max_examples=4)
@given(
    smalls=st.lists(st.tuples(st.integers(1, 3), st.integers(5, 40), st.floats(2.0, 8.0)), min_size=12, max_size=30),
    large=st.integers(5, 8),
)
def test_a_large_gang_is_not_starved_by_small_jobs_that_keep_coming(
    smalls: list[tuple[int, int, float]], large: int
) -> None:
    cluster = Cluster(1, [("n1", SERVER), ("n2", SERVER)], Settings(policy="backfill"))
    cluster.run_for(5.0)
    for gpus in (3, 2, 3):
        cluster.submit(job_of(gpus, 40))
    cluster.run_for(5.0)
    wanted = cluster.submit(job_of(large, 10))
    deadline = cluster.engine.now + SECONDS_BEFORE + LONGEST + 30.0
    while cluster.engine.now < deadline:
        for gpus, steps, pause in smalls:
            cluster.submit(job_of(gpus, steps))
            cluster.run_for(pause)
    cluster.check()
    assert cluster.state.jobs[wanted.number].state is not JobState.PENDING
