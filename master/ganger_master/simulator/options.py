"""How a trace is replayed: what switching costs, when plans are made, what is idealised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class SwitchCosts:
    """Seconds in which a gang holds its devices and does not train.

    Defaults: a start is a process of the pre-imported launcher with its first batches (0.03 s measured here) and a data
    loader to fill; a suspension waits for a boundary, then writes a checkpoint of a few gigabytes; a restart reads it
    again. Ours, measured: 0.55 s for the pause of a move of 1 GB, 2.1 GB/s; published: 0.1-1 s for a suspension and
    1-2 s for a warm migration (Gandiva, OSDI 2018), which are those of slices and moves here; 25-250 s for restarts
    that fill data loaders anew (Sia, SOSP 2023).
    """

    # From approval to the first step.
    start_s: float = 5.0
    # From the order to the last rank gone, its checkpoint complete.
    suspend_s: float = 3.0
    # On top of `start_s`, to the first step after the restored one.
    resume_s: float = 5.0
    # From the order to the devices free and the state in host memory, and from there to the next step.
    offload_s: float = 0.5
    restore_s: float = 0.5
    # From the source's last step to the destination's first one.
    move_s: float = 2.0


FREE = SwitchCosts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """`ideal`: any free GPUs serve, nothing costs time, and plans are made at every event. `round_s`: plans only at
    multiples of so many seconds, at which gangs that ended meanwhile also give their devices back. `plan_every_s`: not
    ideal, the least time between two plans that stop somebody. What a round's plan stops has `costs.suspend_s` to go,
    and who takes its place starts then.

    `rates`: "recorded", every job at the pace of its trace wherever it runs; "profiles", as fast as its model goes with
    the cores and memory, at the distance and on the GPUs that its gang has (`replay.rates`); who names no model gets
    one of the published. `profile_s`: how long it takes after a job's submission until a policy that tunes knows its
    profile, measured beside the queue: Synergy's eight points take about a minute each. `moves_per_hour`: of a node,
    where jobs are moved; None: as many as the planner finds right. `quotas`: GPUs that a user may hold at once; "*" is
    each who is not named. Jobs that name no user are one who is not."""

    ideal: bool = False
    round_s: float | None = None
    costs: SwitchCosts = SwitchCosts()
    seed: int = 0
    plan_every_s: float = 300.0
    rates: Literal["recorded", "profiles"] = "recorded"
    profile_s: float = 480.0
    moves_per_hour: float | None = None
    quotas: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.ideal and self.rates != "recorded":
            raise ValueError("an ideal cluster has nothing but GPUs: every job runs at its recorded pace")
