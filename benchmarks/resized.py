"""The pass of `ganger bench plan` that says how many GPUs each job has: Optimus weighs all of them at once.

It is the planner's whole pass over elastic jobs all of which wait, each believed to follow the all-reduce law that a
published table of ElasticFlow's gives: GPUs by what one more would save, then the gangs placed on the fewest, emptiest
nodes, up to the changes of one plan. What is believed was fitted before: fits are made as measurements come, not by a
pass.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from typing import Final

import numpy as np
from ganger.cluster.resources import GangShape, Role, TaskShape
from ganger.cluster.room import CapacityIndex
from ganger.cluster.view import View
from ganger_master.core.model import Gang, JobRecord, JobSpec
from ganger_master.estimators.speed import AllReduceModel, StepPoint, fit_allreduce
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.optimus_stage import plan_optimus
from ganger_master.policies import policy_named
from ganger_master.policies.job_facts import Capacity, Facts
from ganger_master.policies.optimus_belief import OptimusEstimate
from ganger_master.simulator.traces.profiles import elasticflow_speeds

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
    wall, cpu = time.perf_counter(), time.process_time()
    found = plan_optimus(
        policy.order, policy.placement, table, 1e6, capacity, CapacityIndex(view.copy()), believed, resize_s=13.0
    )
    seconds, processor = time.perf_counter() - wall, time.process_time() - cpu
    placed = [claim.device_mask.bit_count() for change in found.changes for claim in change.claims]
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
