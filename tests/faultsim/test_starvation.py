"""No job waits for ever: a gang of the whole cluster starts though small jobs keep coming, and every job ends, whatever
its own scheduler does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
from faultsim import faults
from faultsim.engine import Engine
from faultsim.fault_cluster import FaultCluster, require_progress
from faultsim.faults import NONE, Faults
from ganger.cluster.refusals import Reason, Refusal
from ganger.cluster.resources import Claim, Locality, LocalityLevel, Role, TaskShape
from ganger.cluster.topology import parse_topology
from ganger.cluster.view import View
from ganger.job_state import JobState
from ganger.scheduling import DefaultScheduler, JobScheduler, PlacementLease, Proposal
from ganger_master.core.commands import ResumeJob, SuspendJob
from ganger_master.core.job_model import SuspendLevel
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.settings import CoreSettings

_GIB = 1 << 30
SERVER = parse_topology("2x2", name="v4", millicores=16_000, memory_bytes=64 * _GIB, device_memory_bytes=_GIB)
# Seconds that a small job runs at most, its start, its end and what the network adds included.
LONGEST = 90.0
# What a large gang may lose by schedulers that are not there, by nodes that fail, and by waiting for its wish.
DELAYS = 240.0


class Passing(JobScheduler):
    """Says that devices are missing, whatever is free."""

    def propose(self, turn: PlacementLease, view: View) -> Proposal:
        return Proposal((), (Refusal(Reason.GPUS),))


class Absurd(JobScheduler):
    """Asks for what never adds up."""

    def propose(self, turn: PlacementLease, view: View) -> Proposal:
        return Proposal(((Claim(next(view.names()), 1, (0, 0), 1, 0, (1,)),),))


class Stubborn(JobScheduler):
    """Asks for the first devices of the first node, held or not."""

    def propose(self, turn: PlacementLease, view: View) -> Proposal:
        tasks = turn.shape.tasks
        cores = (2_000 * tasks, 0)
        return Proposal(((Claim(next(view.names()), (1 << tasks) - 1, cores, 4 * _GIB * tasks, 0, (tasks,)),),))


OWN: dict[str, Callable[[], JobScheduler]] = {
    "good:S": DefaultScheduler,
    "passing:S": Passing,
    "absurd:S": Absurd,
    "stubborn:S": Stubborn,
}
ANY = ["", "", "", *OWN, "hung:S", "dead:S"]


def job_of(gpus: int, steps: int, scheduler: str = "", locality: Locality | None = None) -> JobSpec:
    roles = (Role("worker", gpus, TaskShape(1, 2_000, 4 * _GIB)),)
    return JobSpec(("train", str(steps)), roles, scheduler=scheduler, locality=locality or Locality())


def cluster_of(seed: int, nodes: int, policy: str, of: Faults) -> FaultCluster:
    cluster = FaultCluster(
        seed,
        [(f"n{number}", SERVER) for number in range(nodes)],
        CoreSettings(lost_after_s=60.0, policy=policy),
        of,
    )
    for name, make in OWN.items():
        cluster.add_scheduler(name, make)
    # One that claims its jobs and never answers a turn.
    cluster.add_scheduler("hung:S", DefaultScheduler).take = lambda turn: None  # type: ignore[method-assign]
    cluster.run_for(5.0)
    return cluster


def small_jobs(cluster: FaultCluster, schedulers: Sequence[str] = ANY) -> Iterator[None]:
    """One after the other, each as its turn of the dice says; some are suspended and resumed soon after."""
    dice = cluster.engine.random
    while True:
        wish = Locality(wish=LocalityLevel.SOCKET, patience_s=20.0) if dice.random() < 0.2 else None
        cluster.submit(job_of(dice.choice([1, 1, 1, 2, 3]), dice.randint(5, 40), dice.choice(schedulers), wish))
        holding = [job.number for job in cluster.state.jobs.values() if job.state is JobState.HOLDING]
        if holding and dice.random() < 0.15:
            number = dice.choice(holding)
            cluster.send(SuspendJob(number, dice.choice([level for level in SuspendLevel if level])))
            cluster.engine.after(dice.uniform(5.0, 30.0), partial(cluster.send, ResumeJob(number)))
        cluster.run_for(dice.uniform(1.0, 6.0))
        yield


@pytest.mark.parametrize("own", ["", "good:S"])
@pytest.mark.parametrize("policy", ["fifo", "backfill"])
@pytest.mark.parametrize("seed", range(2))
def test_a_gang_of_the_whole_cluster_is_not_starved_by_small_jobs_that_keep_coming(
    seed: int, policy: str, own: str
) -> None:
    failing = Faults(node_crash_seconds=200.0, node_away_seconds=20.0)
    nodes = 1 + seed % 3
    cluster = cluster_of(seed, nodes, policy, failing if seed % 2 else NONE)
    coming = small_jobs(cluster)
    for _ in range(4 * nodes):
        next(coming)
    cluster.unleash()
    wish = Locality(wish=LocalityLevel.SOCKET, patience_s=100.0) if seed % 2 else None
    wanted = cluster.submit(job_of(4 * nodes, 10, own, wish))
    deadline = cluster.engine.now + CoreSettings().keep_place_after_s + LONGEST + DELAYS
    while not (wanted.number and cluster.state.jobs[wanted.number].start_time):
        next(coming)
        assert cluster.engine.now < deadline, cluster.state.blockers_of(wanted.number)
    cluster.check()


@pytest.mark.parametrize("policy", ["fifo", "backfill"])
@pytest.mark.parametrize("seed", range(3))
def test_every_job_ends_whatever_its_scheduler_does_and_the_network_loses(seed: int, policy: str) -> None:
    cluster = cluster_of(seed, 2, policy, faults.storm(Engine(seed)))
    cluster.unleash()
    # One that always passes keeps its own job waiting, as is its right.
    coming = small_jobs(cluster, [name for name in ANY if name != "passing:S"])
    for _ in range(20):
        next(coming)
    require_progress(cluster, 2_000.0)
