"""Results of a storm: changes by kind, kills by victim, and how long the cluster was incomplete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Tally:
    """By kind of change, but for `kills`: by party."""

    counted: Iterable[str]
    done: Counter[str] = field(default_factory=Counter)
    called_off: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    # Kills while one was on its way.
    kills_in: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    # Seconds from a restart until all nodes are ready, and until every job that is to run has done a step.
    ready: list[float] = field(default_factory=list)

    @property
    def actions(self) -> int:
        return sum(self.done[kind] for kind in self.counted)

    def killed(self, victim: str, under_way: Iterable[str]) -> None:
        self.kills[victim] += 1
        for kind in under_way:
            self.kills_in[f"{kind} x {victim}"] += 1

    def lines(self) -> list[str]:
        ready = sorted(self.ready) or [0.0]
        return [
            f"done: {_counts(self.done)}; called off: {_counts(self.called_off)}",
            f"refused: {_counts(self.refused)}",
            f"kills: {_counts(self.kills)}; while one was under way: {_counts(self.kills_in)}",
            f"nodes were ready {ready[len(ready) // 2]:.1f} s after a restart (median), {ready[-1]:.1f} s at most",
        ]


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counter.items())) or "none"
