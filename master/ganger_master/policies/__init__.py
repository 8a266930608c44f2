"""Policies by name: an order of jobs, a placement, and a list of stages. Names compose with a plus, as in
"gandiva+synergy-tune" (docs/reference/policies.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, TypeVar

from ganger_master.core.job_model import JobRecord
from ganger_master.policies.order_registry import FIFO_BACKFILL, ORDERS
from ganger_master.policies.orders import Floats, Integers, JobOrder, with_aging
from ganger_master.policies.placements import PLACEMENTS, PlacementPreference, placement_named
from ganger_master.policies.tetris import Alignment, Knobs

if TYPE_CHECKING:
    from ganger_master.policies.optimus_sizes import ElasticJobs
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
    """Optimus starts jobs, and decides the number of GPUs of each elastic one (`planner.optimus_stage`). `allocate`
    returns the tasks of `optimus_sizes.ElasticJobs` from a capacity; None: by marginal gain."""

    allocate: Callable[[ElasticJobs, Floats], Integers] | None = None


@dataclass(frozen=True, slots=True)
class SliceNewcomers:
    """Jobs that have never run get time slices beside running jobs (`planner.sharing_under_order`)."""


@dataclass(frozen=True, slots=True)
class ShareByTimeSlices:
    """Jobs start, are time-sliced where they do not all fit, and co-located on trial (`planner.sharing_stage`)."""


@dataclass(frozen=True, slots=True)
class Tune:
    """Running jobs that have their devices alone get tuned cores and memory, and so do jobs that `StartByRank` starts
    (`planner.tune_stage`). `packs_rounds`: as often as jobs may be preempted, the tuning places all chosen jobs anew
    (`planner.synergy_round`)."""

    tuning: Tuning
    packs_rounds: bool = False


@dataclass(frozen=True, slots=True)
class Colocate:
    """While jobs are pending, running jobs are co-located on trial (`planner.sharing_under_order`)."""


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
    """Return the stages in their order, one of each kind. Time slicing co-locates and serves newcomers by itself."""
    by_kind = {type(stage): stage for stage in stages}
    if ShareByTimeSlices in by_kind:
        by_kind.pop(Colocate, None)
        by_kind.pop(SliceNewcomers, None)
    return tuple([by_kind[kind] for kind in _SEQUENCE if kind in by_kind])


_Stage = TypeVar("_Stage", bound=StageSpec)


@dataclass(frozen=True, slots=True)
class Policy:
    """An order, a placement, and the stages of a plan. Without stages each job's scheduler places it, by the order."""

    name: str
    order: JobOrder
    placement: PlacementPreference
    stages: tuple[StageSpec, ...] = ()

    @property
    def is_planned(self) -> bool:
        """Return whether a planner ranks all jobs and suggests their places; else the order alone decides on leases."""
        return bool(self.stages)

    @property
    def starter(self) -> Starter | None:
        """Return the stage that starts jobs; None if no stage does."""
        return next((stage for stage in self.stages if isinstance(stage, STARTERS)), None)

    def stage(self, kind: type[_Stage]) -> _Stage | None:
        """Return the stage of this kind; None if there is none."""
        return next((stage for stage in self.stages if isinstance(stage, kind)), None)

    def has(self, *kinds: type[StageSpec]) -> bool:
        """Return whether one of the stages is of these kinds."""
        return any(isinstance(stage, kinds) for stage in self.stages)

    def without(self, *kinds: type[StageSpec]) -> Policy:
        """Return the policy without its stages of these kinds."""
        return replace(self, stages=tuple([stage for stage in self.stages if not isinstance(stage, kinds)]))

    @property
    def planned(self) -> Policy:
        """Return the policy with a planner that places all jobs, whether it has preemption or not."""
        return self if self.stages else replace(self, stages=(StartByRank(),))

    @property
    def shares_devices(self) -> bool:
        """Return whether gangs may share devices: in time slices, or at the same time."""
        return self.has(ShareByTimeSlices, SliceNewcomers, Colocate)

    @property
    def migrates(self) -> bool:
        """Return whether the planner migrates running jobs."""
        return self.has(Migrate)

    @property
    def tunes_by_profiles(self) -> bool:
        """Return whether cores and memory follow from measured or given profiles of jobs."""
        tune = self.stage(Tune)
        return tune is not None and tune.tuning.by_profiles

    @property
    def aging_order(self) -> JobOrder:
        """Return the order with bounded waiting, which planners use. A strict order needs no bound."""
        return self.order if self.order.is_strict else with_aging(self.order)

    @property
    def protects_all(self) -> bool:
        """Return whether no job may take GPUs that a job ahead of it waits for, however few."""
        return self.order.is_strict

    @property
    def key(self) -> Callable[[JobRecord], tuple[int, ...]]:
        """Return the sort key of pending jobs in the master's queue: smaller goes first."""
        return _by_submission


def _by_submission(job: JobRecord) -> tuple[int, ...]:
    return (-job.priority, job.number)


# -- names -----------------------------------------------------------------------------------------------------------


class _Base(NamedTuple):
    order: JobOrder
    placement: str
    stages: tuple[StageSpec, ...] = ()


def _tetris(name: str, knobs: Knobs, knows_durations: bool = False) -> _Base:
    order = replace(FIFO_BACKFILL, name=name, knows_durations=knows_durations)
    return _Base(order, name.removesuffix("-oracle"), (StartByTetris(knobs),))


def _base_of_order(order: JobOrder) -> _Base:
    return _Base(order, order.placement, (StartByRank(),) if order.needs_planner else ())


# Optimus visits jobs by arrival, preempts for the jobs it chose, and skips those that do not fit. Tetris aligns by the
# dot product, or by the angle alone as in the Virginia report; an oracle may replace its estimates of remaining work.
_BASES: Final[Mapping[str, _Base]] = {
    **{name: _base_of_order(order) for name, order in ORDERS.items()},
    "gandiva": _Base(replace(FIFO_BACKFILL, name="gandiva"), "gandiva", (Grow(), ShareByTimeSlices(), Migrate())),
    "optimus": _Base(replace(FIFO_BACKFILL, name="optimus", preempts=True), "optimus", (ResizeByOptimus(),)),
    "tetris": _tetris("tetris", Knobs()),
    "tetris-cos": _tetris("tetris-cos", Knobs(srtf_weight=0.0, alignment=Alignment.COSINE)),
    "tetris-oracle": _tetris("tetris-oracle", Knobs(), knows_durations=True),
}
# Compositions with a name of their own, former names, and those of the papers. `ganger` has every stage; `synergy` has
# the one of Synergy's orders that needs no oracle.
_COMPOSED: Final = {
    "backfill": "fifo-backfill",
    "ganger": "ganger-alone+adaptive+packs+slices+defrag+elastic+auto",
    "las2d": "tiresias",
    "las2d-gittins": "tiresias-gittins",
    "synergy": "las+synergy-tune",
}
NAMES: Final = tuple(sorted({*_BASES, *_COMPOSED}))


class _ExtraStage(NamedTuple):
    spec: StageSpec
    summary: str


# Stages that may follow a plus.
EXTRA_STAGES: Final[Mapping[str, _ExtraStage]] = {
    "defrag": _ExtraStage(Migrate(), "running jobs are moved"),
    "elastic": _ExtraStage(Grow(), "elastic jobs grow and shrink"),
    "packs": _ExtraStage(Colocate(), "gangs share GPUs"),
    "slices": _ExtraStage(SliceNewcomers(), "jobs that have never run share GPUs in time slices"),
}


@dataclass(slots=True)
class _Composition:
    """The parts of a name. `first`: the name of its base."""

    first: str
    base: _Base
    stages: list[StageSpec]
    placements: list[str] = field(default_factory=list)
    tunings: list[Tuning] = field(default_factory=list)

    def has(self, kind: type[StageSpec]) -> bool:
        return any(isinstance(stage, kind) for stage in self.stages)


class _Rule(NamedTuple):
    """A composition without a meaning, and the reason with what to do instead. `{first}` is its base."""

    holds_for: Callable[[_Composition], bool]
    reason: str


_RULES: Final = (
    _Rule(lambda one: len(one.placements) > 1, "a gang goes by one placement: name one of {placements}"),
    _Rule(lambda one: len(one.tunings) > 1, "cores follow one tuning: name one of {tunings}"),
    _Rule(
        lambda one: one.has(StartByTetris) and bool(one.placements),
        "{first} chooses a job together with its place: leave out {placements}, or name an order with it",
    ),
    _Rule(
        lambda one: one.has(ResizeByOptimus) and one.has(Grow),
        "{first} decides the size of elastic jobs itself: leave out elastic",
    ),
    _Rule(
        lambda one: one.has(Colocate) and not (one.base.order.preempts or one.has(ShareByTimeSlices)),
        "{first} preempts no job, and a co-location that does not pay ends with a preemption: leave out packs, or "
        "name an order that preempts, as in las+packs",
    ),
    _Rule(
        lambda one: one.has(SliceNewcomers) and not (one.base.order.preempts or one.has(ShareByTimeSlices)),
        "{first} preempts no job, and a newcomer leaves its time slices for the queue: leave out slices, or name an "
        "order that preempts, as in las+slices",
    ),
)


def live_policy_named(name: str) -> Policy:
    """Return a policy for a live cluster; KeyError for an unknown name, ValueError for one that needs an oracle."""
    live = [known for known in NAMES if not _base_of(known)[0].order.knows_durations]
    policy = policy_named(name, live)
    if policy.order.knows_durations:
        raise ValueError(
            f"policy {name!r} asks an oracle how long jobs take: for the simulator only; there are {', '.join(live)}"
        )
    return policy


def policy_named(name: str, suggested: Sequence[str] = NAMES) -> Policy:
    """Return the policy of a composed name; KeyError, with what to do, if there is none or it has no meaning.

    `name`: an order or a whole policy, then in any sequence at most one placement, one tuning and each of
    `EXTRA_STAGES`, with pluses. A part that the policy has already changes nothing. `suggested`: the policies to
    choose from instead of an unknown one.
    """
    first, *parts = name.split("+")
    if first not in NAMES and (first or not parts):
        near = _near(first, suggested) or f"there are {', '.join(suggested)}"
        raise KeyError(f"there is no policy {_shown(first)}; {near}")
    composition = _composition(name, first, parts)
    twice = next((part for part in parts if parts.count(part) > 1), None)
    if twice is not None:
        raise KeyError(f"policy {_shown(name)} names {twice} twice")
    for rule in _RULES:
        if rule.holds_for(composition):
            named = {
                "first": first,
                "placements": ", ".join(composition.placements),
                "tunings": ", ".join([tuning.name for tuning in composition.tunings]),
            }
            raise KeyError(f"policy {_shown(name)}: {rule.reason.format(**named)}")
    base, stages = composition.base, composition.stages
    for tuning in composition.tunings:
        stages.append(Tune(tuning, packs_rounds=tuning.place is not None and not composition.placements))
    if parts and not any(isinstance(stage, STARTERS) for stage in stages):
        stages.append(StartByRank())
    # Migration replaces restarting jobs elsewhere.
    order = replace(base.order, regroups=False) if composition.has(Migrate) else base.order
    placement = placement_named(composition.placements[0] if composition.placements else base.placement)
    return Policy(name, order, placement, in_sequence(stages))


def _base_of(first: str) -> tuple[_Base, list[str]]:
    base, *own = _COMPOSED.get(first, first).split("+")
    return _BASES[base], own


def _composition(name: str, first: str, parts: Sequence[str]) -> _Composition:
    """Return the parts of a name, with those of its base. KeyError for one that no part can be."""
    if not all((first, *parts)):
        raise KeyError(f"policy {_shown(name)} has an empty part; after the policy's name {_known_parts()}")
    base, own = _base_of(first)
    found = _Composition(first, base, list(base.stages))
    # Another placement or tuning replaces that of the policy.
    for kind in (PLACEMENTS, _tunings()) if own and parts else ():
        own = [part for part in own if part not in kind or not any(other in kind for other in parts)]
    for part in dict.fromkeys([*own, *parts]):
        if part in EXTRA_STAGES:
            found.stages.append(EXTRA_STAGES[part].spec)
        elif part in PLACEMENTS:
            found.placements.append(part)
        elif part in (tunings := _tunings()):
            found.tunings.append(tunings[part])
        elif part in NAMES:
            raise KeyError(
                f"policy {_shown(name)}: only the first part can be the policy {part}; then {_known_parts()}"
            )
        else:
            near = _near(part, (*PLACEMENTS, *tunings, *EXTRA_STAGES)) or _known_parts()
            raise KeyError(f"there is no placement or tuning {_shown(part)}; {near}")
    return found


def _known_parts() -> str:
    kinds = {"placements": PLACEMENTS, "tunings": _tunings(), "other parts": EXTRA_STAGES}
    return "there are " + "; ".join([f"{kind} {', '.join(names)}" for kind, names in kinds.items()])


def _near(name: str, known: Sequence[str]) -> str:
    """Return a question for the most similar of the known names; empty if none is similar."""
    from difflib import get_close_matches

    near = get_close_matches(name[:_LONGEST_SHOWN].lower(), known, 1)
    return f"did you mean {near[0]}?" if near else ""


_LONGEST_SHOWN: Final = 50


def _shown(name: str) -> str:
    """Return a name in quotes, cut if it is long."""
    shown = repr(name)
    return shown if len(shown) <= _LONGEST_SHOWN else f"{shown[:_LONGEST_SHOWN]}...{shown[0]}"


def _tunings() -> Mapping[str, Tuning]:
    # Imported on demand: SciPy takes longer to load than a replay of a hundred jobs.
    from ganger_master.policies.tunings.catalogue import TUNINGS

    return TUNINGS
