"""What papers claim, and when a run counts as reproducing or beating it: read from thresholds.toml, nowhere else."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from ganger_master.simulator.report.figures import Interval

_COMPARES = {
    "at_least": lambda figure, limit: figure >= limit,
    "at_most": lambda figure, limit: figure <= limit,
    "above": lambda figure, limit: figure > limit,
    "below": lambda figure, limit: figure < limit,
}
# By figure: by comparison: the limit.
Criterion = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class PaperClaim:
    """`paper`: figures as published. `holds`, `beats`: what ours must be; an empty `beats`: no more is required."""

    name: str
    title: str
    source: str
    paper: Mapping[str, float | str]
    holds: Criterion
    beats: Criterion

    @property
    def figures(self) -> set[str]:
        """Those that are compared with something."""
        return {*self.holds, *self.beats}


@cache
def claims() -> Mapping[str, PaperClaim]:
    """By name, in the order of the file."""
    text = resources.files("experiments").joinpath("thresholds.toml").read_text(encoding="utf-8")
    return {name: _claim(name, table) for name, table in tomllib.loads(text).items()}


def meets(criterion: Criterion, ours: Mapping[str, float | Interval]) -> bool:
    """Whether every figure is within its limits; of figures with an interval the mean counts. A figure that is not
    there is our mistake."""
    return all(
        _COMPARES[comparison](middle(ours[figure]), limit)
        for figure, limits in criterion.items()
        for comparison, limit in limits.items()
    )


def shortfalls(criterion: Criterion, ours: Mapping[str, float | Interval]) -> list[str]:
    """Return by how much each figure misses its limit, in words; empty if the criterion is met."""
    missed = [
        (name, comparison, limit, middle(ours[name]))
        for name, limits in criterion.items()
        for comparison, limit in limits.items()
        if not _COMPARES[comparison](middle(ours[name]), limit)
    ]
    return [
        f"{name} by {abs(figure - limit):.3g} ({figure:.4g}, {comparison.replace('_', ' ')} {limit:g})"
        for name, comparison, limit, figure in missed
    ]


def middle(figure: float | Interval) -> float:
    return figure.mean if isinstance(figure, Interval) else float(figure)


def half_width(figure: float | Interval) -> float:
    """NaN of figures without an interval."""
    return figure.half_width if isinstance(figure, Interval) else math.nan


def _claim(name: str, table: Mapping[str, Any]) -> PaperClaim:
    expected = {"title", "source", "paper", "holds", "beats"}
    assert set(table) == expected, f"{name}: {set(table) ^ expected}"
    for criterion in (table["holds"], table["beats"]):
        for limits in criterion.values():
            assert set(limits) <= set(_COMPARES), f"{name}: {limits}"
    return PaperClaim(name, **table)
