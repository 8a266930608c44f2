"""Growth of elastic jobs onto idle GPUs, and their release when pending jobs need them.

One job grows at a time, by one size: the one for which the next GPUs are measured, or else forecast, to be worth most.
Growth begins once GPUs have been idle for a while, and prefers the job's own node. The gain is measured; growth with
less than 0.7 of a linear speed-up is undone and not tried again. Shrinking is immediate and takes the GPUs that are
worth least. Gandiva (OSDI 2018, section 3.3) grows within a server only and has no rule for choosing the job.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ganger.cluster.capacity_index import CapacityIndex, Claims, Trial
from ganger.cluster.preferences import BEST_FIT
from ganger.cluster.resources import Claim, GangShape
from ganger.cluster.search import PlacementRequest
from ganger.cluster.view import View

from ganger_master.policies.fairness import Seat
from ganger_master.policies.placements import PlacementPreference
from ganger_master.policies.trials import Judged, TrialRates, judge

# Time for which GPUs must have been idle before a job grows onto them; no paper gives a number.
IDLE_S: Final = 60.0
# Of a linear speed-up.
LEAST_SHARE: Final = 0.7


@dataclass(frozen=True, slots=True)
class Elastic:
    """A running job and the numbers of GPUs that it accepts, ascending. `rates`: measured samples per second by number
    of GPUs, including the present one. `speed_up`: a model's ratio of the rates of two numbers; linear without a model.
    `ceiling`: the size at which growth was undone."""

    number: int
    sizes: tuple[int, ...]
    seat: Seat
    rates: Mapping[int, float]
    speed_up: Callable[[int, int], float] = lambda more, fewer: more / fewer
    ceiling: int = 1 << 30

    def __post_init__(self) -> None:
        if self.gpus not in self.sizes or self.gpus not in self.rates or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(f"job {self.number} has {self.gpus} GPUs, which its sizes and rates must name")

    @property
    def gpus(self) -> int:
        return sum(mask.bit_count() for _, mask in self.seat)

    @property
    def least(self) -> int:
        return self.sizes[0]

    @property
    def larger(self) -> int | None:
        """The next number of GPUs that it might have."""
        return next((size for size in self.sizes if self.gpus < size < self.ceiling), None)

    def rate(self, gpus: int) -> float:
        """Return the samples per second: as measured, else by the model from the present number of GPUs."""
        return self.rates[gpus] if gpus in self.rates else self.rates[self.gpus] * self.speed_up(gpus, self.gpus)

    def share_of_linear(self, more: int, fewer: int) -> float:
        """Return the speed-up from `fewer` to `more` GPUs, as a share of a linear one."""
        return (self.rate(more) / self.rate(fewer)) / (more / fewer)


@dataclass(frozen=True, slots=True)
class GrowthProposal:
    """A proposed growth of a job. `seat`: all its devices afterwards, including the present ones."""

    number: int
    gpus: int
    seat: Seat


def grow(
    jobs: Collection[Elastic], view: View, idle_s: float, wanted_gpus: int = 0, one_node_only: bool = True
) -> GrowthProposal | None:
    """Return the one job to grow next, if any. `idle_s`: for how long all free GPUs have been free; `wanted_gpus`: GPUs
    of all pending gangs. Call it again once the growth was judged."""
    if wanted_gpus or idle_s < IDLE_S:
        return None
    options = []
    for job in jobs:
        size = job.larger
        if size is None or job.share_of_linear(size, job.gpus) < LEAST_SHARE:
            continue
        seat = _grown(job, size, view, one_node_only)
        if seat is not None:
            # Relative to the rate with its fewest GPUs, since rates of different jobs are not comparable.
            worth = (job.rate(size) - job.rate(job.gpus)) / (size - job.gpus) * (job.least / job.rate(job.least))
            options.append((-round(worth, 9), len(seat), job.number, size, seat))
    if not options:
        return None
    *_, number, size, seat = min(options)
    return GrowthProposal(number, size, seat)


def verdict(fewer: int, more: int, rates: TrialRates) -> Judged:
    """Judge the growth of a job by `rates` in samples, before and after."""
    return judge([rates], LEAST_SHARE * more / fewer)


def shrink(
    jobs: Iterable[Elastic],
    room: CapacityIndex,
    shape: GangShape,
    claims_of: Mapping[int, Claims],
    placement: PlacementPreference = BEST_FIT,
) -> dict[int, int]:
    """Return the new numbers of GPUs, by number of job, with which a gang fits that does not fit now.

    It is empty where shrinking is not enough or not needed. The loss of rates is least on one node, and node by node
    for gangs over several. `claims_of`: the claims that the jobs hold.
    """
    if placement.place(room, PlacementRequest(shape, math.inf)) is not None:
        return {}
    view = room.view
    most = max((topology.devices for topology in view.topologies), default=0)
    count = shape.nodes or -(-shape.gpus // max(1, most))
    share = -(-shape.gpus // count)
    elastic = {job.number: job for job in sorted(jobs, key=lambda one: one.number)}
    options = []
    for slot, name in enumerate(view.nodes):
        missing = share - view.free[slot].bit_count()
        if view.available[slot] and view.topologies[slot].devices >= share:
            loss, cuts = _least_loss([job for job in elastic.values() if name in dict(job.seat)], name, missing)
            if loss < math.inf:
                options.append((round(loss, 9), slot, cuts))
    options.sort()
    trying = Trial(room)
    for start in range(len(options)):
        sizes: dict[int, int] = {}
        for _, slot, cuts in options[start : start + count]:
            for number, size in cuts.items():
                sizes[number] = min(size, sizes.get(number, size))
            for number in cuts:
                trying.give(_given_back(elastic[number], sizes[number], view.nodes[slot], claims_of[number], view))
        found = placement.place(room, PlacementRequest(shape, math.inf))
        trying.undo()
        if found is not None:
            return sizes
    return {}


def _least_loss(jobs: Sequence[Elastic], node: str, missing: int) -> tuple[float, dict[int, int]]:
    """Return the least loss of rate that frees `missing` more devices on a node, and the new sizes of the jobs that are
    cut. Rates are relative to that of one device at the least size; the loss is infinite if no cuts suffice."""
    # By devices released: the least loss, and the new sizes.
    best: list[tuple[float, dict[int, int]]] = [(0.0, {}), *[(math.inf, {})] * max(0, missing)]
    for job in jobs:
        base = job.rate(job.least) / job.least
        here = dict(job.seat)[node].bit_count()
        for devices in range(max(0, missing), 0, -1):
            for given in range(1, min(here, job.gpus - job.least) + 1):
                size = max(size for size in job.sizes if size <= job.gpus - given)
                loss, cuts = best[max(0, devices - given)]
                loss += (job.rate(job.gpus) - job.rate(size)) / base
                if loss < best[devices][0]:
                    best[devices] = (loss, {**cuts, job.number: size})
    return best[max(0, missing)]


def _given_back(job: Elastic, size: int, node: str, claims: Claims, view: View) -> Claims:
    """Return the devices that it releases: on that node first, then where it has the fewest."""
    missing = job.gpus - size
    found = []
    for claim in sorted(claims, key=lambda one: (one.node != node, one.device_mask.bit_count(), one.node)):
        devices = claim.device_mask.bit_count()
        count = min(missing, devices)
        stays = view.topology(claim.node).best(claim.device_mask, devices - count)
        if count and stays is not None:
            missing -= count
            # Of cores and memory as much as of the devices; what stays is rounded down.
            cores = tuple([all_of_it - all_of_it * (devices - count) // devices for all_of_it in claim.millicores])
            memory = claim.memory_bytes * count // devices
            arena = claim.arena_bytes * count // devices
            found.append(Claim(claim.node, claim.device_mask & ~stays, cores, memory, arena))
    return tuple(found)


def _grown(job: Elastic, size: int, view: View, one_node_only: bool) -> Seat | None:
    """Return its devices and the closest free ones: beside the most of its own first."""
    missing = size - job.gpus
    seat = dict(job.seat)
    own = sorted(seat, key=lambda name: (-seat[name].bit_count(), name))
    others = [] if one_node_only else sorted(set(view.names()) - set(own), key=lambda name: (-_free(view, name), name))
    for name in (*own, *others):
        slot = view.slots.get(name)
        if slot is None or not view.available[slot] or not missing:
            continue
        count = min(missing, view.free[slot].bit_count())
        mask = view.topologies[slot].best(view.free[slot], count)
        if count and mask is not None:
            seat[name] = seat.get(name, 0) | mask
            missing -= count
    return tuple(sorted(seat.items())) if not missing else None


def _free(view: View, name: str) -> int:
    return view.free[view.slots[name]].bit_count()
