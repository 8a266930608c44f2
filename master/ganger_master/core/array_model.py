"""The values of job arrays: which member of which array a job is, and the rule that stops members early."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from msgspec import Struct, field

# The members of array n are the jobs n + 1 to n + size, in the order in which they were given.
MEMBERS_LIMIT: Final = 1_000
# Parameters of all members together.
PARAMETERS_LIMIT: Final = 20_000
# Rungs at which a member is judged; behind the last it runs to its end.
RUNGS_LIMIT: Final = 200
STEP: Final = "step"
LOSS: Final = "loss"


class RuleKind(StrEnum):
    """See `core.early_stopping` for what each means, and for its source."""

    HALVING = "HALVING"
    ASHA = "ASHA"
    MEDIAN = "MEDIAN"
    THRESHOLD = "THRESHOLD"


class StopRule(Struct, frozen=True, gc=False, omit_defaults=True):
    """`first`, `every` are in the resource: steps, or what a reported metric counts."""

    kind: RuleKind
    metric: str = LOSS
    maximise: bool = False
    resource: str = STEP
    first: float = 0.0
    factor: float = 2.0
    every: float = 0.0
    bound: float = 0.0

    def rung(self, index: int) -> float:
        """The amount of the resource at which members are compared for the index-th time, from 0."""
        if self.kind in (RuleKind.HALVING, RuleKind.ASHA):
            try:
                return float(self.first * self.factor**index)
            except OverflowError:
                return math.inf
        return self.first + (self.every or self.first) * index


class Membership(Struct, frozen=True, gc=False, omit_defaults=True):
    """One job of array `array`: the one of number `array` + 1 + `place`."""

    array: int
    place: int
    # What its user calls it; by default its place.
    index: int
    size: int
    parameters: Mapping[str, str] = field(default_factory=dict)
    # At most so many run or wait at once; zero: all.
    at_once: int = 0
    rule: StopRule | None = None

    @property
    def name(self) -> str:
        return f"{self.array}_{self.index}"
