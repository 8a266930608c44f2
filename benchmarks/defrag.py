"""`ganger bench defrag`: a gang of four GPUs that wants one node, in a cluster of nodes none of which has four free.

Real jobs of one GPU fill the nodes, one after the other. First on each node at least one of them ends: there is room
enough for the gang, in pieces, and the fewest moves that bring it together are found by trying all. Then on a full
cluster: on each node one job is of lower priority than the gang, and is parked in host memory while it runs; the others
make room for it by moves; and parked jobs resume elsewhere once there is room. Each job notes every step that it does,
with the clock: so a step that was done twice or never is seen, and how long it stood still.
"""

from __future__ import annotations

import heapq
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.bench_cluster import BenchCluster, BenchClusterError
from benchmarks.report import BenchReport, quantile
from benchmarks.step_notes import NOTING, NotedStep, steps_of

NODES, GPUS = 4, 4
# How many jobs end on each node, round after round.
ROUNDS = ((1, 1, 1, 1), (1, 2, 1, 1), (2, 1, 2, 1))
QUICK_ROUNDS = ROUNDS[1:2]
POLICY = "fifo-backfill+first-fit+defrag"
WAIT_S = 120.0
# Beyond this a gang did not start because of the moves.
LIMIT_S = 30.0

JOB = f"""
import sys
import torch
import ganger
{NOTING}
torch.set_num_threads(1)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
x = torch.ones(8, 64)
world = int(os.environ.get("WORLD_SIZE", "1"))
if world > 1:
    torch.distributed.init_process_group("gloo")
trained = torch.nn.parallel.DistributedDataParallel(model) if world > 1 else model
note = note_to(sys.argv[1]) if os.environ.get("RANK", "0") == "0" else None
job = ganger.attach(model=model, optimizer=optimizer)
for step in job.steps():
    begin = now()
    loss = trained(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.05)
    if note is not None:
        note(step + 1, begin)
    job.step(loss)
"""


@dataclass(frozen=True, slots=True)
class DefragJob:
    """One that was submitted, and where it notes its steps."""

    name: str
    notes: Path
    asked_ns: int

    def steps(self) -> list[NotedStep]:
        """In the order in which they were done."""
        return steps_of(self.notes)

    def pauses_ms(self) -> list[float]:
        """From the end of its last step in one process to the end of its first in another."""
        pairs = pairwise(self.steps())
        return [(then.end - now.end) / 1e6 for now, then in pairs if now.pid != then.pid]

    def replayed(self) -> int:
        numbers = [step.number for step in self.steps()]
        return len(numbers) - len(set(numbers))

    def skipped(self) -> int:
        numbers = {step.number for step in self.steps()}
        return max(numbers) - len(numbers)


@dataclass(frozen=True, slots=True)
class DefragRound:
    """What one gang took. `moves` and `rests`: of other jobs, as the event log has them; `fewest`: as many as it takes.
    `pauses_ms`: of moved jobs, as the jobs noted them, and as the daemons reported."""

    moves: int
    rests: int
    fewest_moves: int
    fewest_rests: int
    start_s: float
    pauses_ms: tuple[float, ...]
    told_pauses_ms: tuple[float, ...]
    replayed: int
    skipped: int


def main(quick: bool = False) -> dict[str, object]:
    """Run it; `quick`: one round, and the swap."""
    report = BenchReport("defrag")
    rounds: list[DefragRound] = []
    for number, ends in enumerate(QUICK_ROUNDS if quick else ROUNDS):
        report.say(f"round {number + 1}: {'+'.join(map(str, ends))} GPUs are free")
        with _cluster() as cluster:
            rounds.append(_fragments(cluster, ends))
        report.samples([_as_sample("fragments", rounds[-1])])
    _tell(report, "hole", rounds)
    report.say("a full cluster")
    with _cluster() as cluster:
        swap, back_s = _swap(cluster)
    report.samples([_as_sample("swap", swap)])
    _tell(report, "swap", [swap])
    report.at_most("swap_rests_above_fewest", swap.rests - swap.fewest_rests, 0)
    report.figure("swap_rests", swap.rests)
    report.at_most("swap_parked_job_resumed_s", back_s, LIMIT_S)
    return report.result()


def fewest(movable: Sequence[int], stoppable: Sequence[int], needed: int, devices: int) -> tuple[int, int]:
    """The fewest jobs of one GPU to stop, and then the fewest to move, until a node has so many GPUs free, by trying
    all; `movable` and `stoppable` by node. ValueError if nothing helps."""
    start = (tuple(movable), tuple(stoppable))
    seen = {start}
    line: list[tuple[int, int, tuple[tuple[int, ...], tuple[int, ...]]]] = [(0, 0, start)]
    while line:
        rests, moves, (fixed, loose) = heapq.heappop(line)
        free = [devices - one - other for one, other in zip(fixed, loose, strict=True)]
        if max(free) >= needed:
            return rests, moves
        following = [(rests + 1, moves, (fixed, _plus(loose, node, -1))) for node, count in enumerate(loose) if count]
        for source, count in enumerate(fixed):
            for node, room in enumerate(free):
                if count and room > 0 and node != source:
                    following.append((rests, moves + 1, (_plus(_plus(fixed, source, -1), node, 1), loose)))
        for one in following:
            if one[2] not in seen or one[:2] < (rests, moves):
                seen.add(one[2])
                heapq.heappush(line, one)
    raise ValueError("no moves make room")


def _plus(counts: tuple[int, ...], node: int, more: int) -> tuple[int, ...]:
    return (*counts[:node], counts[node] + more, *counts[node + 1 :])


def _no_priority(number: int) -> int:
    return 0


def _cluster() -> BenchCluster:
    return BenchCluster(nodes=NODES, gpus=GPUS, cores=8, memory="16G", master=("--policy", POLICY))


def _fragments(cluster: BenchCluster, ends: Sequence[int]) -> DefragRound:
    jobs = _fill(cluster)
    homes = _nodes(cluster)
    left = dict(zip(sorted(set(homes.values())), ends, strict=True))
    for job in list(jobs):
        if left[homes[job.name]]:
            left[homes[job.name]] -= 1
            cluster.ganger("cancel", job.name)
            jobs.remove(job)
    # What they held is free once their daemons have seen them go.
    cluster.until(lambda: len(cluster.pages()) == len(jobs), WAIT_S, "cancelled jobs are gone")
    counts = Counter(homes[job.name] for job in jobs)
    before = [counts[node] for node in sorted(set(homes.values()))]
    gang = _start_gang(cluster)
    return _round(cluster, gang, jobs, fewest(before, [0] * NODES, GPUS, GPUS))


def _swap(cluster: BenchCluster) -> tuple[DefragRound, float]:
    """Return the round, and the seconds until every job parked for the gang had made a step again."""
    # First fit: each fourth one is the first of its node.
    jobs = _fill(cluster, lambda number: 0 if number % GPUS else -1)
    low = jobs[::GPUS]
    homes = _nodes(cluster)
    if len({homes[job.name] for job in low}) < NODES:
        raise BenchClusterError("not every node has a job of lower priority")
    gang = _start_gang(cluster)
    at_rest = {job.name: job.steps()[-1].number for job in low}
    # Room for all parked jobs, on other nodes than the gang's.
    homes = _nodes(cluster)
    others = [job for job in jobs if job not in low and homes[job.name] != homes[gang.name]]
    began = time.monotonic()
    for job in others[: len(low)]:
        cluster.ganger("cancel", job.name)
    cluster.until(lambda: all(job.steps()[-1].number > at_rest[job.name] for job in low), WAIT_S, "parked jobs resume")
    back_s = time.monotonic() - began
    return _round(cluster, gang, jobs, fewest([GPUS - 1] * NODES, [1] * NODES, GPUS, GPUS)), back_s


def _fill(cluster: BenchCluster, priority: Callable[[int], int] = _no_priority) -> list[DefragJob]:
    """Jobs of one GPU, until the cluster is full; all of them train."""
    (cluster.directory / "job.py").write_text(JOB)
    jobs: list[DefragJob] = []
    for number in range(NODES * GPUS):
        jobs.append(_submit(cluster, 1, "--priority", str(priority(number))))
        if priority is not _no_priority:
            # The next one goes where this one has left room, whatever its rank.
            cluster.until(lambda: jobs[-1].name in _nodes(cluster), WAIT_S, f"{jobs[-1].name} has a place")
    # What they can is known by then, and memory is reserved for their state.
    cluster.until(lambda: all(len(job.steps()) >= 10 for job in jobs), WAIT_S, "all jobs train")
    cluster.until(lambda: _have_arenas(cluster, jobs), WAIT_S, "all could rest in host memory")
    return jobs


def _submit(cluster: BenchCluster, gpus: int, *options: str) -> DefragJob:
    notes = cluster.directory / f"notes-{time.monotonic_ns()}"
    asked_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    answer = cluster.ganger(
        "submit",
        *("--gpus", str(gpus), "--cpus-per-gpu", "0.5", "--memory", "512M", "--gpu-memory", "64M"),
        *("--checkpoint-every", "never", "--directory", str(cluster.directory), *options, "--json", "--"),
        *(sys.executable, str(cluster.directory / "job.py"), str(notes)),
    )
    return DefragJob(str(json.loads(answer)["name"]), notes, asked_ns)


def _start_gang(cluster: BenchCluster) -> DefragJob:
    gang = _submit(cluster, GPUS, "--locality", "node")
    cluster.until(lambda: len(gang.steps()) >= 3, WAIT_S, f"{gang.name} trains")
    return gang


def _round(
    cluster: BenchCluster, gang: DefragJob, jobs: Sequence[DefragJob], fewest_of: tuple[int, int]
) -> DefragRound:
    events = json.loads(cluster.ganger("history", "--json"))
    told = [event for event in events if event["figures"].get("for") == gang.name]
    moved = [event["subject"] for event in told if event["kind"] == "move_begun"]
    rested = [event["subject"] for event in told if event["kind"] == "suspend_ordered"]
    movers = [job for job in jobs if job.name in moved]
    cluster.until(lambda: all(job.pauses_ms() for job in movers), WAIT_S, "moved jobs resume")
    events = json.loads(cluster.ganger("history", "--json"))
    done = [event["figures"] for event in events if event["kind"] == "move_done"]
    rests, moves = fewest_of
    return DefragRound(
        moves=len(moved),
        rests=len(rested),
        fewest_moves=moves,
        fewest_rests=rests,
        start_s=(gang.steps()[0].end - gang.asked_ns) / 1e9,
        pauses_ms=tuple(pause for job in movers for pause in job.pauses_ms()),
        told_pauses_ms=tuple(float(figures["pause_ms"]) for figures in done if figures.get("for") == gang.name),
        replayed=sum(job.replayed() for job in jobs),
        skipped=sum(job.skipped() for job in jobs),
    )


def _nodes(cluster: BenchCluster) -> dict[str, str]:
    """By job that has a gang: the node, of jobs on one."""
    found = json.loads(cluster.ganger("queue", "--json"))
    return {job["name"]: job["gang"]["claims"][0]["node"] for job in found if job["gang"] and job["gang"]["claims"]}


def _have_arenas(cluster: BenchCluster, jobs: Sequence[DefragJob]) -> bool:
    found = {job["name"]: job for job in json.loads(cluster.ganger("queue", "--json"))}
    return all(
        found[job.name]["capabilities"]["offload"] and found[job.name]["gang"]["claims"][0]["arena_bytes"]
        for job in jobs
    )


def _tell(report: BenchReport, name: str, rounds: Sequence[DefragRound]) -> None:
    report.figure(f"{name}_moves", sum(one.moves for one in rounds))
    report.at_most(f"{name}_moves_above_fewest", sum(one.moves - one.fewest_moves for one in rounds), 0)
    report.at_least(f"{name}_moves_least_of_a_round", min(one.moves for one in rounds), 1)
    report.at_most(f"{name}_steps_replayed", sum(one.replayed for one in rounds), 0)
    report.at_most(f"{name}_steps_left_out", sum(one.skipped for one in rounds), 0)
    report.at_most(f"{name}_request_to_first_step_seconds", max(one.start_s for one in rounds), LIMIT_S)
    pauses = [pause for one in rounds for pause in one.pauses_ms]
    told = [pause for one in rounds for pause in one.told_pauses_ms]
    report.figure(f"{name}_pause_p50_milliseconds", quantile(pauses, 0.5))
    report.figure(f"{name}_pause_longest_milliseconds", max(pauses))
    # The daemons' word is what the next move is weighed by.
    report.at_most(f"{name}_pause_told_off_milliseconds", abs(max(told) - max(pauses)), 0.2 * max(pauses) + 100.0)


def _as_sample(name: str, one: DefragRound) -> dict[str, object]:
    return {"scenario": name, **asdict(one)}
