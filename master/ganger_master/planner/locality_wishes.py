"""The locality that pending gangs are placed with: their own, or the one that measurements of their kind prefer.

A gang whose kind measurably loses speed at wider places (`MigrationOutcomes.points`) waits for a closer one while
enough devices are free, as if it had been submitted with `--locality`: the wait is the patience of a learned wish.
Without a tolerance of its own it waits for at most what it would lose at the wider place, so waiting costs at most as
much again as not to wait, and for at most an interval between two plans that preempt. A locality that the job states
goes before all measurements.
"""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np
from ganger.cluster.resources import GangShape, Locality, LocalityLevel
from msgspec.structs import replace

from ganger_master.core.job_model import JobRecord
from ganger_master.estimators.slowdown import LocalityLoss, measured_loss
from ganger_master.planner.context import PassTerms, PlanContext
from ganger_master.planner.migration_outcomes import MigrationOutcomes
from ganger_master.policies.orders import SLACK_S


class LocalityWishes:
    """Localities in one plan of a policy that measures jobs. Made before the plan takes any device.

    ends_s: when the first wait ends that this plan or an earlier one (`ended_s`) has found, in Unix seconds; infinite
        without any.
    """

    def __init__(self, context: PlanContext, outcomes: MigrationOutcomes, ended_s: float = math.inf) -> None:
        self._context, self._outcomes = context, outcomes
        self._free = context.room.free_devices
        self._known: dict[int, Locality] = {}
        self.ends_s = ended_s if ended_s > context.now else math.inf

    @property
    def terms(self) -> PassTerms:
        """Return the terms of the plan with these localities."""
        return replace(self._context.terms, shape=self._shape)

    def _shape(self, job: JobRecord) -> GangShape:
        shape = self._context.terms.shape(job)
        locality = self._known.get(job.number)
        if locality is None:
            locality = self._known[job.number] = self._learned(job) or shape.locality
            ends_s = job.pending_since + locality.patience_s + SLACK_S
            if locality.wish is not None and ends_s > self._context.now:
                self.ends_s = min(self.ends_s, ends_s)
        return shape if locality is shape.locality else replace(shape, locality=locality)

    def _learned(self, job: JobRecord) -> Locality | None:
        """Return the locality that measurements prefer; None if there are none, or if the job states its own."""
        own, points = job.shape.locality, self._outcomes.points
        if not points or own.wish is not None or own.widest is not LocalityLevel.CLUSTER or job.gpus < 2:
            return None
        if job.gpus > self._free:
            # It needs devices of others, and takes those that it can get.
            return None
        loss = self._loss(job)
        if loss is None:
            return None
        lost_s = loss.share * self._remaining_s(job)
        patience_s = own.patience_s or min(lost_s, self._context.pace.every_s)
        return Locality(own.widest, loss.tolerated, patience_s)

    def _loss(self, job: JobRecord) -> LocalityLoss | None:
        points = self._outcomes.points.get(self._context.job_rates.signature(job.number))
        levels = self._levels
        if not points or not levels:
            return None
        nodes = max(1, job.shape.nodes, -(-job.gpus // max(levels)))
        inside = max([level for devices, level in levels.items() if devices >= job.gpus], default=LocalityLevel.NODE)
        return measured_loss(points, job.gpus, nodes, inside)

    @cached_property
    def _levels(self) -> dict[int, LocalityLevel]:
        """The locality of all devices of a node, by their number: that of the widest such node."""
        found: dict[int, LocalityLevel] = {}
        for topology in set(self._context.room.view.topologies):
            if topology.devices:
                level = topology.level(topology.all_mask)
                found[topology.devices] = max(level, found.get(topology.devices, level))
        return found

    def _remaining_s(self, job: JobRecord) -> float:
        """Return the expected run time that is left: the median of similar jobs, else as long again as it has run."""
        table = self._context.jobs
        if table.memory is not None:
            rows, ran_s = np.array([table.row(job.number)]), np.array([job.run_s])
            left_s = float(table.memory.remaining_s(rows, ran_s)[0])
            if math.isfinite(left_s):
                return left_s
        return job.run_s
