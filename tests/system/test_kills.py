"""Kill -9, anywhere: no accepted job is lost, none runs twice, no step is lost or repeated, all weights are right.

Each row of PAIRS names a place (a failpoint of the victim, or an instant for those who have none), who dies there, and
what the user was doing. `make test` runs each pair once, `make chaos` three times and fifty random instants besides.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from ganger_daemon import failpoints as daemon_failpoints
from ganger_master.runtime import failpoints as master_failpoints
from kit.cluster import Cluster, Service
from kit.waiting import eventually
from system.harness import Run

pytestmark = [pytest.mark.system, pytest.mark.torch]

STEPS = 96


@dataclass(frozen=True)
class Pair:
    """`place`: failpoint of `victim`. `deed`: what the user asks for meanwhile."""

    place: str
    victim: str  # master, leader (rank 0's daemon), member (another daemon of the gang), destination
    deed: str  # start, offload, checkpoint, move, cancel
    world: int = 1

    def __str__(self) -> str:
        return f"{self.victim}-{self.place}-{self.deed}"


PAIRS = (
    Pair("before-commit", "master", "start"),
    Pair("after-commit", "master", "start"),
    Pair("commit-before-reply", "master", "start"),
    Pair("before-commit", "master", "offload"),
    Pair("after-commit", "master", "offload"),
    Pair("before-move-commit", "master", "move"),
    Pair("after-move-commit", "master", "move"),
    Pair("between-fork-and-page", "leader", "start"),
    Pair("order-half-written", "leader", "offload"),
    Pair("partial-acks", "leader", "offload", world=2),
    Pair("partial-acks", "member", "offload", world=2),
    Pair("mid-fsync", "leader", "checkpoint"),
    Pair("before-rename", "leader", "checkpoint"),
    Pair("after-rename", "leader", "checkpoint"),
    Pair("parked-before-report", "leader", "offload"),
    Pair("parked-before-report", "leader", "move"),
    Pair("mid-stream", "leader", "move"),
    Pair("after-prepare", "destination", "move"),
    Pair("before-move-commit", "destination", "move"),
    Pair("before-reap", "leader", "move"),
)

# Places that no row of PAIRS reaches, and where they are tested instead.
ELSEWHERE = {
    "mid-load": "test_a_master_killed_while_it_loads_loads_the_next_time",
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("kills"), nodes=3, virtual_gpus=2, topology="1x2") as running:
        yield running


@pytest.fixture(scope="module")
def references(cluster: Cluster) -> dict[int, Run]:
    """Runs that nobody disturbed, by world size."""
    runs = {world: _submit(cluster, f"reference-{world}", world) for world in (1, 2)}
    for run in runs.values():
        run.hurry()
        run.wait_state("SUCCEEDED")
        run.check(run)
    return runs


def _submit(cluster: Cluster, label: str, world: int, *options: str) -> Run:
    nodes = ("--nodes", "2") if world > 1 else ()
    return Run.submit(cluster, label, *nodes, *options, world=world, steps=STEPS, job=("--state-megabytes", "2"))


def _nodes_of(run: Run) -> list[str]:
    gang = run.show().get("gang") or {}
    return [str(claim["node"]).removeprefix("nodes/") for claim in gang.get("claims", [])]


def _victim(cluster: Cluster, role: str, run: Run | None) -> tuple[Service, list[str]]:
    """The process to arm, and options that steer a move so that it is concerned."""
    if role == "master":
        return cluster.master, []
    assert run is not None
    nodes = _nodes_of(run)
    if role == "leader":
        return cluster.daemons[nodes[0]], []
    if role == "member":
        return cluster.daemons[nodes[1]], []
    other = next(name for name in sorted(cluster.daemons) if name not in nodes)
    return cluster.daemons[other], ["--to", other]


def _start_again(cluster: Cluster, service: Service) -> None:
    if service is cluster.master:
        cluster.start_master()
    else:
        service.start()
    cluster.wait_ready()


def _deeds(cluster: Cluster, run: Run, options: list[str]) -> dict[str, Callable[[], object]]:
    return {
        "offload": lambda: cluster.run("suspend", run.id, "--level", "offload", "--no-wait", ok=False),
        "checkpoint": lambda: cluster.run("suspend", run.id, "--level", "checkpoint", "--no-wait", ok=False),
        "move": lambda: cluster.run("move", run.id, *options, "--no-wait", ok=False),
    }


def _kill_there(cluster: Cluster, pair: Pair, label: str, references: dict[int, Run]) -> None:
    if pair.deed == "start":
        _kill_at_start(cluster, pair, label, references)
        return
    run = _submit(cluster, label, pair.world)
    run.wait_step(3)
    service, options = _victim(cluster, pair.victim, run)
    service.arm(pair.place)
    _deeds(cluster, run, options)[pair.deed]()
    eventually(
        lambda: not service.alive, what=f"{pair.victim} dies at {pair.place}", story=run.story, within_seconds=40
    )
    _start_again(cluster, service)
    if pair.deed in ("offload", "checkpoint"):
        # The order may not have been durable when the master died; asking again is what a user does.
        eventually(
            lambda: (
                cluster.run("suspend", run.id, "--level", pair.deed, ok=False).returncode == 0
                or run.state.endswith("SUCCEEDED")
            ),
            what="the job rests",
            story=run.story,
            within_seconds=60,
        )
        if not run.state.endswith("SUCCEEDED"):
            cluster.run("resume", run.id, "--no-wait")
    run.hurry()
    run.wait_state("SUCCEEDED", within_seconds=90)
    run.check(references[pair.world])


def _kill_at_start(cluster: Cluster, pair: Pair, label: str, references: dict[int, Run]) -> None:
    """The victim dies while a job is accepted or started. The request id makes asking again safe."""
    victims = [cluster.master] if pair.victim == "master" else list(cluster.daemons.values())
    for service in victims:
        service.arm(pair.place)
    request = ("--request-id", f"00000000-0000-4000-8000-{random.Random(label).getrandbits(48):012x}")
    record = cluster.directory / f"{label}.record"
    try:
        run = _submit(cluster, label, pair.world, *request)
    except AssertionError:
        assert pair.victim == "master", "only a dead master may fail to answer"
    eventually(lambda: any(not service.alive for service in victims), what=f"{pair.victim} dies", story=cluster.story)
    for service in victims:
        service.armed.unlink(missing_ok=True)
        if not service.alive:
            _start_again(cluster, service)
    run = _submit(cluster, label, pair.world, *request)
    assert run.record == record
    run.hurry()
    run.wait_state("SUCCEEDED", within_seconds=90)
    run.check(references[pair.world])
    listed = cluster.run("queue", "--all", "--json").stdout
    assert listed.count(f'"{label}"') == 1, "accepted once, however often it was asked for"


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_kill_at_a_named_place_loses_nothing(cluster: Cluster, references: dict[int, Run], pair: Pair) -> None:
    _kill_there(cluster, pair, f"{pair}", references)


def test_every_failpoint_of_every_service_is_in_the_table() -> None:
    covered = {pair.place for pair in PAIRS} | set(ELSEWHERE)
    assert covered == daemon_failpoints.NAMES | master_failpoints.NAMES


def test_a_master_killed_while_it_loads_loads_the_next_time(cluster: Cluster, references: dict[int, Run]) -> None:
    run = _submit(cluster, "mid-load", 1)
    run.wait_step(2)
    cluster.master.kill()
    cluster.master.arm("mid-load")
    cluster.master.start()
    eventually(lambda: not cluster.master.alive, what="the master dies while it loads", story=cluster.story)
    _start_again(cluster, cluster.master)
    run.hurry()
    run.wait_state("SUCCEEDED")
    run.check(references[1])


@pytest.mark.chaos
@pytest.mark.parametrize("again", range(2))
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_kill_at_a_named_place_loses_nothing_the_next_time_either(
    cluster: Cluster, references: dict[int, Run], pair: Pair, again: int
) -> None:
    _kill_there(cluster, pair, f"{pair}-again-{again}", references)


def test_a_killed_launcher_leaves_its_ranks_running(cluster: Cluster, references: dict[int, Run]) -> None:
    run = _submit(cluster, "launcher", 1)
    run.wait_step(3)
    rank = run.lines(0)[-1].pid
    os.kill(_parent(rank), signal.SIGKILL)
    run.hurry()
    run.wait_state("SUCCEEDED")
    run.check(references[1])
    assert {line.pid for line in run.lines(0)} == {rank}


@pytest.mark.parametrize("level", ["pause", "offload"])
def test_a_launcher_killed_while_its_ranks_rest_leaves_them_their_state(
    cluster: Cluster, references: dict[int, Run], level: str
) -> None:
    run = _submit(cluster, f"launcher-{level}", 1)
    run.wait_step(3)
    cluster.run("suspend", run.id, "--level", level)
    os.kill(_parent(run.lines(0)[-1].pid), signal.SIGKILL)
    cluster.run("resume", run.id, "--no-wait")
    run.hurry()
    run.wait_state("SUCCEEDED")
    run.check(references[1])


def test_a_rank_killed_while_it_is_moved_goes_back_to_the_last_complete_checkpoint(
    cluster: Cluster, references: dict[int, Run]
) -> None:
    run = _submit(cluster, "rank-move", 1, "--max-failures", "1")
    run.wait_step(4)
    cluster.run("suspend", run.id, "--level", "checkpoint")
    cluster.run("resume", run.id, "--no-wait")
    run.wait_step(run.last_step() + 3)
    rank = run.lines(0)[-1].pid
    cluster.run("move", run.id, "--no-wait")
    os.kill(rank, signal.SIGKILL)
    run.hurry()
    run.wait_state("SUCCEEDED", within_seconds=90)
    run.check(references[1], may_repeat=True)


@pytest.mark.parametrize("world", [1, 2])
def test_a_killed_rank_goes_back_to_the_last_complete_checkpoint_and_no_further(
    cluster: Cluster, references: dict[int, Run], world: int
) -> None:
    run = _submit(cluster, f"rank-{world}", world, "--max-failures", "1")
    run.wait_step(8)
    cluster.run("suspend", run.id, "--level", "checkpoint")
    saved = run.last_step()
    cluster.run("resume", run.id, "--no-wait")
    run.wait_step(saved + 5)
    os.kill(run.lines(world - 1)[-1].pid, signal.SIGKILL)
    run.hurry()
    run.wait_state("SUCCEEDED", within_seconds=90)
    run.check(references[world], may_repeat=True)
    for rank in range(world):
        steps = [line.step for line in run.lines(rank)]
        restarts = [after for before, after in pairwise(steps) if after <= before]
        assert restarts in ([], [saved + 1]), f"rank {rank} went back to {restarts}, saved was {saved}"


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(50))
def test_a_kill_at_any_instant_loses_nothing(cluster: Cluster, references: dict[int, Run], seed: int) -> None:
    dice = random.Random(seed)
    run = _submit(cluster, f"instant-{seed}", 1)
    run.wait_step(dice.randint(1, 10))
    service = dice.choice([cluster.master, cluster.daemons[_nodes_of(run)[0]]])
    deed = dice.choice(["offload", "checkpoint", "move"])
    _deeds(cluster, run, [])[deed]()
    run.wait_step(run.last_step() + dice.randint(0, 2)) if deed == "move" else None
    service.kill()
    _start_again(cluster, service)
    if deed != "move":
        eventually(
            lambda: (
                cluster.run("resume", run.id, "--no-wait", ok=False).returncode == 0 or run.state.endswith("SUCCEEDED")
            ),
            what="it goes on",
            story=run.story,
        )
    run.hurry()
    run.wait_state("SUCCEEDED", within_seconds=90)
    run.check(references[1])


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
