"""The pass of `ganger bench plan` that weighs cores and memory of all gangs at once: Synergy-Tune packs a round.

It is the planner's whole pass: jobs that train the published models, chosen by GPUs in the order of the policy, packed
over all nodes with cores and memory, up to the changes of one plan.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import numpy as np
from ganger.cluster.resources import GangShape, Locality, LocalityLevel, Role, TaskShape
from ganger.cluster.view import View
from ganger_master.core.model import JobRecord, JobSpec
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.synergy_round import plan_packed
from ganger_master.policies.job_facts import Capacity, Facts, Integers
from ganger_master.policies.orders.las2d import LAS2D
from ganger_master.policies.tunings import profiles_of
from ganger_master.policies.tunings.known import Known
from ganger_master.policies.tunings.synergy_tune import SYNERGY_TUNE
from ganger_master.simulator.traces.profiles import synergy_profiles

# Of Synergy's servers: a gang up to this size wants to stay on one node.
_TOGETHER: Final = 8
_COMMAND: Final = ("train",)


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
    wall, cpu = time.perf_counter(), time.process_time()
    found = plan_packed(SYNERGY_TUNE, LAS2D, table, 1e6, capacity, view, known=Known(profiles, position_of))
    seconds, processor = time.perf_counter() - wall, time.process_time() - cpu
    assert found is not None, "jobs of one role are packed"
    placed = [claim.device_mask.bit_count() for change in found.changes for claim in change.claims]
    return seconds, processor, len(found.changes), sum(placed)
