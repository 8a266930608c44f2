"""The stages of a policy, as values: what a plan does, in order.

The planner's loop (`planner.loop`) builds a stage with a state from each of them. Each stage adds changes to the plan;
where two would change the same job, the earlier stage wins.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from ganger_master.policies.tetris import Knobs

if TYPE_CHECKING:
    from ganger_master.policies.tunings import Tuning


@dataclass(frozen=True, slots=True)
class Grow:
    """Elastic jobs grow onto idle GPUs, and release them when jobs are pending (`planner.growth_stage`)."""


@dataclass(frozen=True, slots=True)
class StartByRank:
    """The first jobs of the policy's order start, and preempt jobs behind them where the order preempts
    (`planner.order_stage`)."""


@dataclass(frozen=True, slots=True)
class StartByTetris:
    """Tetris chooses pending jobs together with their places (`planner.tetris_stage`)."""

    knobs: Knobs


@dataclass(frozen=True, slots=True)
class ResizeByOptimus:
    """Optimus starts jobs, and decides the number of GPUs of each elastic one (`planner.optimus_stage`)."""


@dataclass(frozen=True, slots=True)
class SliceNewcomers:
    """Jobs that have never run get time slices beside running jobs (`planner.newcomer_stage`)."""


@dataclass(frozen=True, slots=True)
class ShareByTimeSlices:
    """Jobs start, are time-sliced where they do not all fit, and co-located on trial (`planner.sharing_stage`)."""


@dataclass(frozen=True, slots=True)
class Tune:
    """Running jobs that have their devices alone get tuned cores and memory, and so do jobs that `StartByRank` starts
    (`planner.tune_stage`). `packs_rounds`: in a simulation with rounds the tuning places all chosen jobs anew."""

    tuning: Tuning
    packs_rounds: bool = False


@dataclass(frozen=True, slots=True)
class Colocate:
    """While jobs are pending, running jobs are co-located on trial (`planner.colocation_stage`)."""


@dataclass(frozen=True, slots=True)
class Migrate:
    """Running jobs are migrated, for other jobs and for their own sake (`planner.migrate_stage`)."""


StageSpec: TypeAlias = (
    Grow
    | StartByRank
    | StartByTetris
    | ResizeByOptimus
    | ShareByTimeSlices
    | Tune
    | SliceNewcomers
    | Colocate
    | Migrate
)
# One of these starts jobs.
Starter: TypeAlias = StartByRank | StartByTetris | ResizeByOptimus | ShareByTimeSlices
STARTERS: Final = (StartByRank, StartByTetris, ResizeByOptimus, ShareByTimeSlices)
_SEQUENCE: Final[tuple[type[StageSpec], ...]] = (Grow, *STARTERS, Tune, SliceNewcomers, Colocate, Migrate)


def in_sequence(stages: Iterable[StageSpec]) -> tuple[StageSpec, ...]:
    """Return the stages in the order in which they plan, one of each kind. Time slicing co-locates jobs and serves
    newcomers by itself."""
    by_kind = {type(stage): stage for stage in stages}
    if ShareByTimeSlices in by_kind:
        by_kind.pop(Colocate, None)
        by_kind.pop(SliceNewcomers, None)
    return tuple([by_kind[kind] for kind in _SEQUENCE if kind in by_kind])
