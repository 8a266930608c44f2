"""What a policy may know of the live jobs, as columns: the queue, the clocks and what was measured; nothing hidden.

Seconds are on the master's clock. A job is live from its submission to its end. `remaining_s` is filled in only for
policies that say they need an oracle (`Order.knows_durations`), so that no other one can look.
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
    """Of the nodes that take gangs."""

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
    # Holds a gang, and was not told to give it back.
    is_running: Flags
    is_preemptible: Flags
    # Seconds for which it has run, all stretches together.
    attained_s: Floats
    # Seconds since it last ran, or since it was submitted; zero while it runs.
    waited_s: Floats
    # When it first held a gang; infinite: never yet.
    started_s: Floats
    # Of the stretch in which it runs now: how long it has run, and how long it had waited before. Zero while it waits.
    stretch_s: Floats
    waited_before_s: Floats
    # What its own progress or jobs like it let expect, at the rate of its whole gang alone; NaN: nothing is known.
    expected_remaining_s: Floats
    # Gittins's index by what was learned from ended jobs, in 1 / GPU-seconds; NaN: nobody learns.
    index: Floats
    # Of an oracle, at the rate of its whole gang alone; NaN for who may not know.
    remaining_s: Floats

    def __len__(self) -> int:
        return len(self.number)

    @property
    def service(self) -> Floats:
        """Attained GPU-seconds."""
        return self.attained_s * self.gpus

    def take(self, jobs: NDArray[Any]) -> Facts:
        """The jobs at these positions, or where this mask is true."""
        return replace(self, **{column.name: getattr(self, column.name)[jobs] for column in fields(type(self))})
