"""Facts about live jobs that a policy may read, as columns: the queue, the clocks and measurements.

Seconds are on the master's clock. A job is live from its submission to its end. `remaining_s` is set only for orders
that declare an oracle (`JobOrder.knows_durations`), so that no other order can read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import fields, replace
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Capacity:
    """Resources of the nodes that accept gangs."""

    gpus: int
    cores: float
    memory_bytes: float
    # Of the largest node.
    gpus_per_node: int


class Facts(Struct, frozen=True, eq=False, gc=False):
    """One entry per live job, in any order."""

    number: Integers
    arrival_s: Floats
    # The gang that it has or asks for.
    gpus: Integers
    cores: Floats
    memory_bytes: Floats
    priority: Integers
    weight: Floats
    # The same number for the jobs of one user.
    user: Integers
    # Infinite: none.
    deadline_s: Floats
    # Holds a gang that it has not been ordered to release.
    is_running: Flags
    is_preemptible: Flags
    # Seconds that it has run, over all stretches.
    attained_s: Floats
    # Seconds since it last ran, or since it was submitted; zero while it runs.
    waited_s: Floats
    # When it first held a gang; infinite: never yet.
    started_s: Floats
    # Length of the present stretch of running, and of the wait before it; zero while the job is pending.
    stretch_s: Floats
    waited_before_s: Floats
    # Estimate from its own progress or similar jobs, at the rate of its whole gang alone; NaN: no estimate.
    expected_remaining_s: Floats
    # Gittins's index from similar jobs, in 1 / GPU-seconds; NaN: the order does not learn.
    index: Floats
    # An oracle's value, at the rate of its whole gang alone; NaN where the order has no oracle.
    remaining_s: Floats

    def __len__(self) -> int:
        return len(self.number)

    @property
    def service(self) -> Floats:
        """Attained GPU-seconds."""
        return self.attained_s * self.gpus

    def take(self, jobs: NDArray[Any]) -> Facts:
        """Return the jobs at these positions, or where this mask is true."""
        return replace(self, **{column.name: getattr(self, column.name)[jobs] for column in fields(type(self))})
