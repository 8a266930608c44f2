"""The pre-run of elastic jobs: each runs with a few sizes for a short time, so that its speed model rests on more than
the size with which it began (Optimus, EuroSys 2018, section 3.2).

A job is tried while no job waits, and only if what it has left is many times what the trials cost. One trial begins at
a time, on free GPUs or fewer than the job has.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, TypeAlias

from ganger_master.estimators.server_speed import ServerSpeed, first_placements
from ganger_master.policies.optimus_sizes import OptimusEstimate, first_sizes

# Sizes of a pre-run, with that in which the job began.
TRIED_SIZES: Final = 3
# The remaining time is to be so many times the pauses of the trials that are left.
_WORTH: Final = 20.0
# A size that shows no rate for so long is not waited for.
_MEASURED_WITHIN_S: Final = 90.0
# Placements of which the best is looked for.
_MOST_CANDIDATES: Final = 256

# Workers and parameter servers; the latter are zero in a job without any.
TaskCounts: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class TriedJob:
    """An elastic job that runs. `estimate.tried`: sizes with a measured rate; `ranges`: the numbers of workers and of
    servers that it may have; `pause_s`: by a resize; `stretch_s`: since it last started; `rate`: now, in steps/s;
    `free_workers`: for which there are free GPUs."""

    estimate: OptimusEstimate
    present: TaskCounts
    ranges: tuple[Sequence[int], Sequence[int]]
    pause_s: float
    stretch_s: float
    rate: float
    free_workers: int

    @property
    def is_measured(self) -> bool:
        """Whether the present size has a rate, or has shown none for long."""
        return self.present in (self.estimate.tried or ()) or self.stretch_s > _MEASURED_WITHIN_S

    @property
    def is_worth(self) -> bool:
        """Whether what is left is long enough for the trials that are left."""
        trials = TRIED_SIZES - len(self.estimate.tried or ())
        left_s = self.estimate.steps_left / max(self.rate, 1e-9)
        return 0 < trials < TRIED_SIZES and left_s > _WORTH * self.pause_s * trials

    @property
    def next_size(self) -> TaskCounts | None:
        """The size to try next; None if there is none."""
        tried = {*(self.estimate.tried or ()), self.present}
        most = self.present[0] + self.free_workers
        workers = [number for number in self.ranges[0] if number <= most]
        found = [pair for pair in product(_spread(workers), _spread(self.ranges[1])) if pair not in tried]
        if not found:
            return None
        speed = self.estimate.speed
        if isinstance(speed, ServerSpeed):
            candidates = [(servers, number) for number, servers in found[:_MOST_CANDIDATES]]
            known = [(servers, number) for number, servers in tried]
            ((servers, number),) = first_placements(candidates, speed.mode, count=1, model=speed, known=known)
            return number, servers
        # As far from every tried size as can be.
        return max(found, key=lambda pair: (min(abs(math.log(pair[0] / other[0])) for other in tried), -pair[0]))


def pinned_tasks(jobs: Mapping[int, TriedJob]) -> dict[int, TaskCounts]:
    """Return the tasks that jobs are to have now, by the keys of `jobs`, which are in order: those under measurement
    keep theirs; if there are none, the first job that can begins a trial."""
    worth = {key: job for key, job in jobs.items() if job.is_worth}
    measured = {key: job.present for key, job in worth.items() if not job.is_measured}
    if measured:
        return measured
    for key, job in worth.items():
        if (size := job.next_size) is not None and job.free_workers:
            return {key: size}
    return {}


def _spread(numbers: Sequence[int]) -> Collection[int]:
    """Return a few of the numbers, from the least to the most."""
    if not numbers or numbers[-1] < 1:
        return numbers
    wanted = first_sizes(max(1, numbers[0]), numbers[-1])
    return sorted({min(numbers, key=lambda number: abs(number - one)) for one in wanted})
