"""`ganger bench plan`: how long one full pass takes that orders and places every gang of a large cluster.

4,000 jobs with 100,000 tasks of one GPU each go to 16,000 nodes with 8 GPUs, all of them waiting: in the order of the
policy they are chosen by counts and placed, gang by gang, into a what-if of the cluster. Jobs have 1 to 256 tasks and
ten different demands for cores and memory. Once the cluster is idle and takes all of them, once it is in use here and
there, so that it takes part of them, in pieces. Figures are medians over rounds of whole passes, the making of the
what-if from the view included.

Beside them Synergy-Tune packs a round of the same gangs on both (bench_tuned.py), and Optimus says how many GPUs each
of the same jobs has, if they are elastic (bench_resized.py).

The pass of `ganger bench plan` that says how many GPUs each job has: Optimus weighs all of them at once.

It is the planner's whole pass over elastic jobs all of which wait, each believed to follow the all-reduce law that a
published table of ElasticFlow's gives: GPUs by what one more would save, then the gangs placed on the fewest, emptiest
nodes, up to the changes of one plan. What is believed was fitted before: fits are made as measurements come, not by a
pass.

The pass of `ganger bench plan` that weighs cores and memory of all gangs at once: Synergy-Tune packs a round.

It is the planner's whole pass: jobs that train the published models, chosen by GPUs in the order of the policy, packed
over all nodes with cores and memory, up to the changes of one plan.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.resources import GangShape, Locality, LocalityLevel, NodeRow, Role, TaskShape
from ganger.cluster.search import PlacementRequest
from ganger.cluster.topology import parse_topology
from ganger.cluster.view import LoadMode, View
from ganger.program_setup import settled
from ganger_master.core.gang_model import Gang
from ganger_master.core.job_model import JobRecord
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.plan_changes import claims_in
from ganger_master.estimators.speed import AllReduceModel, StepPoint, fit_allreduce
from ganger_master.planner.context import PlannerSettings, context_of
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.optimus_stage import plan_optimus
from ganger_master.planner.synergy_round import packing_of, plan_packed
from ganger_master.policies import policy_named
from ganger_master.policies.optimus_sizes import OptimusEstimate
from ganger_master.policies.order_registry import FIFO_BACKFILL, LAS2D
from ganger_master.policies.orders import FACT_COLUMNS, Capacity, Facts, Integers, JobOrder, chosen, ranked
from ganger_master.policies.placements import PLACEMENTS, PlacementPreference
from ganger_master.policies.tunings import Known, profiles_of
from ganger_master.policies.tunings.synergy import SYNERGY_TUNE
from ganger_master.simulator.traces.workload import elasticflow_speeds, synergy_profiles

from benchmarks.report import AtMost, report

_GPUS_PER_NODE: Final = 8
# A job takes at least the GPUs that its shape names, and up to so many times as many.
_MOST: Final = 4
_COMMAND: Final = ("train",)


def optimus_pass(view: View, shapes: Sequence[GangShape], facts: Facts) -> tuple[float, float, int, int]:
    """(wall seconds, processor seconds, jobs, GPUs) of one pass over jobs all of which wait."""
    table = LiveTable()
    for position, shape in enumerate(shapes):
        (role,) = shape.roles
        spec = JobSpec(
            _COMMAND,
            (Role("worker", role.tasks, TaskShape(1, role.shape.millicores, role.shape.memory_bytes)),),
            priority=int(facts.priority[position]),
            gpus_min=role.tasks,
            gpus_max=_MOST * role.tasks,
        )
        arrival = float(facts.arrival_s[position])
        table.put(JobRecord(position + 1, "", "", spec, arrival, pending_since=arrival), None)
    laws = _laws()
    steps = np.random.default_rng(len(shapes)).lognormal(9.0, 1.5, len(shapes)).tolist()

    def believed(jobs: Sequence[tuple[JobRecord, Gang | None]]) -> Sequence[OptimusEstimate]:
        return [
            OptimusEstimate(steps[job.number - 1], job.number % 5 == 0, laws[job.number % len(laws)]) for job, _ in jobs
        ]

    policy = policy_named("optimus")
    gpus = sum([mask.bit_count() for mask in view.free])
    cores = sum([sum(free) for free in view.millicores]) / 1000
    capacity = Capacity(gpus, cores, float(sum(view.memory)), _GPUS_PER_NODE)
    settings = PlannerSettings(capacity=capacity, resize_s=13.0)
    rates = SimpleNamespace(believed=lambda gpus_per_node: believed, resize_s=None)
    wall, cpu = time.perf_counter(), time.process_time()
    found = plan_optimus(
        context_of(policy, table, CapacityIndex(view.copy()), 1e6, settings=settings, order=policy.order, rates=rates)
    )
    seconds, processor = time.perf_counter() - wall, time.process_time() - cpu
    placed = [claim.device_mask.bit_count() for change in found.changes for claim in claims_in(change)]
    return seconds, processor, len(found.changes), sum(placed)


@cache
def _laws() -> tuple[AllReduceModel, ...]:
    found = []
    for batches in elasticflow_speeds().values():
        for speeds in batches.values():
            points = [
                StepPoint(gpus, -(-gpus // _GPUS_PER_NODE), 1.0 / gpus, 1.0 / speed) for gpus, speed in speeds.items()
            ]
            model = fit_allreduce(points)
            assert model is not None, "every published table has points"
            found.append(model)
    return tuple(found)


# Of Synergy's servers: a gang up to this size wants to stay on one node.
_TOGETHER: Final = 8


def synergy_pass(view: View, shapes: Sequence[GangShape], facts: Facts) -> tuple[float, float, int, int]:
    """(wall seconds, processor seconds, jobs, GPUs) of one pass over jobs all of which wait; amounts that the shapes
    name are left to the tuning."""
    table = LiveTable()
    for position, shape in enumerate(shapes):
        widest = LocalityLevel.NODE if shape.gpus <= _TOGETHER else LocalityLevel.CLUSTER
        spec = JobSpec(
            _COMMAND,
            (Role("worker", shape.gpus, TaskShape(1)),),
            locality=Locality(widest),
            priority=int(facts.priority[position]),
        )
        arrival = float(facts.arrival_s[position])
        table.put(JobRecord(position + 1, "", "", spec, arrival, pending_since=arrival), None)
    profiles = profiles_of([profile.matrix for profile in synergy_profiles().values()])

    def position_of(numbers: Integers) -> Integers:
        return numbers % len(profiles.rates)

    gpus = sum([mask.bit_count() for mask in view.free])
    capacity = Capacity(gpus, float(np.inf), float(np.inf), _TOGETHER)
    settings = PlannerSettings(capacity=capacity)
    rates = SimpleNamespace(known=Known(profiles, position_of), trials={})
    room, policy = CapacityIndex(view), policy_named(_PACKED)
    context = context_of(policy, table, room, 1e6, settings=settings, order=LAS2D, rates=rates)
    wall, cpu = time.perf_counter(), time.process_time()
    packing = packing_of(SYNERGY_TUNE, context)
    assert packing is not None, "jobs of one role are packed"
    changes = plan_packed(packing, context).draft.changes
    seconds, processor = time.perf_counter() - wall, time.process_time() - cpu
    placed = [claim.device_mask.bit_count() for change in changes for claim in claims_in(change)]
    return seconds, processor, len(changes), sum(placed)


NODES: Final = 16_000
JOBS: Final = 4_000
ROUNDS: Final = 5
_PER_RACK: Final = 32
_GIB: Final = 1 << 30
# GPUs of a gang, and how many of a hundred jobs ask for so many: 25 on average.
_SIZES: Final = ((1, 25), (2, 10), (4, 12), (8, 15), (16, 10), (32, 9), (64, 11), (128, 7), (256, 1))
# Cores and GiB of one task; 0: the node's proportional share.
_DEMANDS: Final = ((0, 0), (1, 8), (2, 16), (3, 10), (3, 24), (4, 32), (5, 62), (6, 48), (8, 60), (12, 40))
_SEED: Final = 3
_PACKED: Final = "las2d+synergy-tune"
_RESIZED: Final = "optimus"


@dataclass(frozen=True, slots=True)
class Passed:
    """Duration of one pass, and the jobs that it placed."""

    seconds: float
    cpu_s: float
    jobs: int
    gpus: int


@dataclass(frozen=True, slots=True)
class PassSample:
    """A whole pass of one policy over the view and the jobs, to be done within the limit."""

    name: str
    limit_s: float
    run: Callable[[View, Sequence[GangShape], Facts], Passed]


def main(nodes: int = NODES, jobs: int = JOBS, rounds: int = ROUNDS, quick: bool = False) -> dict[str, Any]:
    """The whole report; `quick` tries it on a small cluster."""
    if quick:
        nodes, jobs, rounds = 1_600, 400, 1
    shapes, facts = workload(jobs)
    views = {"idle": idle_view(nodes), "used": used_view(nodes)}
    samples: list[dict[str, Any]] = []
    with settled():
        # By turns, so that a drift of the machine hits all alike.
        for number, (kind, view), timed in product(range(rounds), views.items(), PASSES):
            passed = timed.run(view, shapes, facts)
            samples.append({"policy": timed.name, "view": kind, "round": number, **asdict(passed)})
        for number, (kind, view) in product(range(rounds), views.items()):
            packed = Passed(*synergy_pass(view, shapes, facts))
            samples.append({"policy": _PACKED, "view": kind, "round": number, **asdict(packed)})
            resized = Passed(*optimus_pass(view, shapes, facts))
            samples.append({"policy": _RESIZED, "view": kind, "round": number, **asdict(resized)})
    figures: dict[str, float] = {
        "nodes": nodes,
        "jobs": jobs,
        "tasks": int(facts.gpus.sum()),
        "room_ms": 1e3 * min(_room_s(view) for view in views.values() for _ in range(rounds)),
    }
    limits: dict[str, AtMost] = {"room_ms": AtMost(20.0)}
    limit_of = {**{timed.name: timed.limit_s for timed in PASSES}, _PACKED: 3.0, _RESIZED: 1.5}
    for (policy, limit), kind in product(limit_of.items(), views):
        of_figure = [sample for sample in samples if (sample["policy"], sample["view"]) == (policy, kind)]
        name = f"{policy}_{kind}".replace("-", "_").replace("+", "_")
        figures[f"{name}_seconds"] = statistics.median(sample["seconds"] for sample in of_figure)
        figures[f"{name}_cpu_seconds"] = statistics.median(sample["cpu_s"] for sample in of_figure)
        figures[f"{name}_placed_jobs"] = of_figure[0]["jobs"]
        limits[f"{name}_seconds"] = AtMost(limit)
    return report("plan", figures, limits, samples)


def one_pass(
    view: View, order: JobOrder, placement: PlacementPreference, shapes: Sequence[GangShape], facts: Facts
) -> Passed:
    """Ranks, chooses and places all jobs in a what-if of the view, which stays as it is."""
    wall, cpu = time.perf_counter(), time.process_time()
    capacity = Capacity(sum(mask.bit_count() for mask in view.free), math.inf, math.inf, 8)
    first = chosen(ranked(order, facts, 0.0, capacity), facts.gpus, capacity.gpus, order.is_strict)
    room = CapacityIndex(view.copy())
    jobs = gpus = 0
    for job in first.tolist():
        claims = placement.place(room, PlacementRequest(shapes[job]))
        if claims is not None:
            room.take(claims)
            jobs += 1
            gpus += shapes[job].gpus
    return Passed(time.perf_counter() - wall, time.process_time() - cpu, jobs, gpus)


def ordered_and_placed(order: JobOrder, placement: PlacementPreference) -> PassSample:
    def run(view: View, shapes: Sequence[GangShape], facts: Facts) -> Passed:
        return one_pass(view, order, placement, shapes, facts)

    return PassSample(f"{order.name}+{placement.name}", 0.5, run)


PASSES: Final = tuple(
    ordered_and_placed(order, PLACEMENTS[name])
    for order in (FIFO_BACKFILL, LAS2D)
    for name in ("first-fit", "best-fit", "gandiva", "tetris")
)


def workload(jobs: int) -> tuple[list[GangShape], Facts]:
    """Waiting jobs in any order of size, and what a policy may know of them."""
    random = np.random.default_rng(_SEED)
    sizes = np.array([gpus for gpus, share in _SIZES for _ in range(share)])
    gpus = random.permutation(np.resize(sizes, jobs))
    shapes = []
    for number, size in enumerate(gpus.tolist()):
        cores, gib = _DEMANDS[number % len(_DEMANDS)]
        shapes.append(GangShape((Role("worker", size, TaskShape(1, cores * 1000, gib * _GIB)),)))
    # All that the orders here do not ask for is zero.
    columns: dict[str, Any] = {name: np.zeros(jobs) for name in FACT_COLUMNS}
    columns |= {
        "number": np.arange(1, jobs + 1),
        "arrival_s": np.sort(random.uniform(0, 86_400, jobs)),
        "gpus": gpus.astype(np.int64),
        "priority": random.integers(0, 3, jobs),
        "is_running": np.zeros(jobs, np.bool_),
        "attained_s": random.exponential(3_600, jobs),
    }
    return shapes, Facts(**columns)


def idle_view(nodes: int) -> View:
    of = parse_topology("2x2x2", name="bench", device_type="gpu", millicores=64_000, memory_bytes=512 * _GIB)
    view = View((of,), mode=LoadMode.PACK)
    cores = tuple(socket.millicores for socket in of.sockets)
    for number in range(nodes):
        rack = number // _PER_RACK
        row = NodeRow(
            f"n{number:05}", of.name, 0xFF, cores, of.memory_bytes, rack=f"r{rack:03}", fabric=f"f{rack // 50}"
        )
        view.put(row)
    view.columns()
    return view


def used_view(nodes: int) -> View:
    """Two of five nodes hold gangs of 1 to 8 GPUs, in no order, of which every second one ended since."""
    random = np.random.default_rng(_SEED)
    view = idle_view(nodes)
    shapes, _ = workload(nodes * 2)
    room = CapacityIndex(view, only=[f"n{number:05}" for number in random.choice(nodes, nodes * 2 // 5, replace=False)])
    small = [shape for shape in shapes if shape.gpus <= 8]
    held = []
    for shape in small:
        claims = PLACEMENTS["best-fit"].place(room, PlacementRequest(shape))
        if claims is not None:
            room.take(claims)
            held.append(claims)
    for claims in held[::2]:
        room.give(claims)
    view.columns()
    return view


def _room_s(view: View) -> float:
    twin = view.copy()
    began = time.perf_counter()
    CapacityIndex(twin)
    return time.perf_counter() - began
