"""Preferred places of pending gangs, from measurements of gangs of the same series: locality, types of GPU, and nodes
on which neither they nor gangs that run there lose speed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from statistics import fmean, geometric_mean

import numpy as np
from ganger.cluster.resources import GangShape, Locality, LocalityLevel
from ganger.cluster.view import LoadMode
from msgspec.structs import replace as replace_of

from ganger_master.core.job_model import JobRecord
from ganger_master.estimators.slowdown import LocalityLoss, measured_loss
from ganger_master.planner.context import PassTerms, PlanContext, PreferredPlace
from ganger_master.planner.job_measurements import SeriesRates
from ganger_master.planner.migration_outcomes import MigrationOutcomes
from ganger_master.policies.migration_choice import LEAST_GAIN
from ganger_master.policies.orders import SLACK_S
from ganger_master.policies.trials import DOUBT, FIRST_WINDOWS, TrialRates, normalised


class MeasuredPlaces:
    """Preferred places of pending gangs in one plan. Made before the plan takes any device.

    ends_s: earliest end of a wait for a preferred place, in Unix seconds, of this plan or an earlier one (`ended_s`);
        infinite without any.
    """

    def __init__(self, context: PlanContext, outcomes: MigrationOutcomes, ended_s: float = math.inf) -> None:
        self._context, self._outcomes = context, outcomes
        self._free = context.room.free_devices
        self._known: dict[int, Locality] = {}
        # Types of GPU in order, and the load that does no harm, by signature and number of GPUs.
        self._by_series: dict[tuple[str, int], tuple[str, float]] = {}
        self.ends_s = ended_s if ended_s > context.now else math.inf

    @property
    def terms(self) -> PassTerms:
        """Return the terms of the plan with these places."""
        rates = self._context.job_rates
        preferred = self._preferred if any(True for _ in rates.series) else self._context.terms.preferred
        return replace_of(self._context.terms, shape=self._shape, preferred=preferred)

    def _preferred(self, job: JobRecord) -> PreferredPlace | None:
        shape = job.shape
        if shape.nodes > 1 or len(shape.roles) > 1:
            return None
        key = self._context.job_rates.signature(job.number), job.gpus
        if key not in self._by_series:
            series = self._context.job_rates.same_series(job.number, job.gpus)
            self._by_series[key] = self._order_of(series), _harmless(series)
        order, harmless = self._by_series[key]
        device_type = shape.device_type or order
        avoid = self._harmful_nodes(job.gpus, harmless)
        return PreferredPlace(device_type, avoid) if avoid or device_type != shape.device_type else None

    def _order_of(self, series: Mapping[str, SeriesRates]) -> str:
        """Return the types of GPU in the order in which to try them; empty without a preference."""
        if len(self._types) < 2 or len(series) < 2:
            return ""
        is_scarce = self._context.room.view.mode is LoadMode.PACK
        order = types_by_gain(_speeds(series), self._speeds, is_scarce=is_scarce)
        return ",".join([*order, *sorted(self._types.difference(order))]) if order else ""

    def _harmful_nodes(self, gpus: int, harmless: float) -> frozenset[str]:
        """Return the nodes where a gang of `gpus` GPUs would lose speed, or would slow down gangs that run there."""
        view, most = self._context.room.view, self._most_used
        if math.isinf(harmless) and not most:
            return frozenset()
        used = {
            name: view.held[slot].bit_count()
            for name, slot in view.slots.items()
            if harmless < math.inf or name in most
        }
        return frozenset(
            [name for name, count in used.items() if count > harmless or count + gpus > most.get(name, math.inf)]
        )

    @cached_property
    def _most_used(self) -> dict[str, float]:
        """Devices that may be in use on a node before a gang that runs there loses speed, by node."""
        rates, found = self._context.job_rates, dict[str, float]()
        for job, gang in self._context.jobs.running:
            if len(gang.claims) == 1:
                harmless = _harmless(rates.same_series(job.number, gang.devices))
                if harmless < math.inf:
                    node = gang.claims[0].node
                    found[node] = min(found.get(node, math.inf), gang.devices + harmless)
        return found

    @cached_property
    def _types(self) -> set[str]:
        sets = [topology.configuration_set.device_type for topology in self._context.room.view.topologies]
        return {one for one in sets if one}

    @cached_property
    def _speeds(self) -> list[Mapping[str, float]]:
        return [_speeds(one) for one in self._context.job_rates.series]

    def _shape(self, job: JobRecord) -> GangShape:
        shape = self._context.terms.shape(job)
        locality = self._known.get(job.number)
        if locality is None:
            locality = self._known[job.number] = self._measured(job) or shape.locality
            ends_s = job.pending_since + locality.patience_s + SLACK_S
            if locality.wish is not None and ends_s > self._context.now:
                self.ends_s = min(self.ends_s, ends_s)
        return shape if locality is shape.locality else replace_of(shape, locality=locality)

    def _measured(self, job: JobRecord) -> Locality | None:
        """Return the locality that measurements prefer; None if there are none, or if the job states its own."""
        own, points = job.shape.locality, self._outcomes.points
        if not points or own.wish is not None or own.widest is not LocalityLevel.CLUSTER or job.gpus < 2:
            return None
        if job.gpus > self._free:
            # Too few devices are free, so it accepts any place.
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
        """Locality level of a whole node by its number of devices; the widest level if nodes differ."""
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


def _speeds(series: Mapping[str, SeriesRates]) -> Mapping[str, float]:
    """Return the rates by type of GPU, in steps/s, of those that are known by name and by enough windows."""
    speeds = {name: least_loaded_rate(one.by_load) for name, one in series.items() if name}
    return {name: rate for name, rate in speeds.items() if rate}


def _harmless(series: Mapping[str, SeriesRates]) -> float:
    """Return the devices that others may use on a gang's node, whatever the GPU type; infinite if no load harmed."""
    return min([harmless_load(one.by_load) for one in series.values()], default=math.inf)


def harmless_load(rates: Mapping[int, tuple[float, ...]]) -> float:
    """Return the devices that others may use on a gang's node before it loses `LEAST_GAIN`; infinite if no significant
    loss was measured. The loss is interpolated linearly between measured loads.

    rates: windows in steps/s, by the number of devices that others use.
    """
    known = _enough(rates)
    for (harmless, _), (load, some) in pairwise(known):
        gain, _ = normalised([TrialRates(some, known[0][1])]).bounds(DOUBT)
        if gain >= 1.0 + LEAST_GAIN:
            return min(load - 1, harmless + math.floor((load - harmless) * LEAST_GAIN / (gain - 1.0)))
    return math.inf


def least_loaded_rate(rates: Mapping[int, tuple[float, ...]]) -> float:
    """Return the mean rate beside the fewest devices in use, in steps/s; 0 without enough windows."""
    known = _enough(rates)
    return fmean(known[0][1]) if known else 0.0


def _enough(rates: Mapping[int, tuple[float, ...]]) -> list[tuple[int, tuple[float, ...]]]:
    return sorted((load, some) for load, some in rates.items() if len(some) >= FIRST_WINDOWS and sum(some) > 0.0)


def types_by_gain(own: Mapping[str, float], others: Iterable[Mapping[str, float]], *, is_scarce: bool) -> Sequence[str]:
    """Return the measured types of GPU, the preferred one first; empty if the rates differ by less than `LEAST_GAIN`.

    While devices are plenty the fastest type goes first. Once they are scarce, types are ranked by the program's gain
    relative to the mean gain of all programs, as in trading (Chaudhary et al., Gandiva_fair, EuroSys 2020): programs
    that gain little leave the fast types to those that gain much.

    own: steps/s of the program by type; others: those of all programs, only their ratios count.
    """
    if len(own) < 2 or max(own.values()) < (1.0 + LEAST_GAIN) * min(own.values()):
        return ()
    if not is_scarce:
        return sorted(own, key=lambda one: (-own[one], one))
    relative = [_relative({one: rates[one] for one in own}) for rates in others if own.keys() <= rates.keys()]
    mean = {one: fmean([speeds[one] for speeds in relative]) if relative else 1.0 for one in own}
    return sorted(own, key=lambda one: (-own[one] / mean[one], -own[one], one))


def _relative(rates: Mapping[str, float]) -> dict[str, float]:
    middle = geometric_mean(rates.values())
    return {one: rate / middle for one, rate in rates.items()}
