"""What goes wrong, how often. Deciding what is wrong with the outcome is the checkers' business, not this module's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from faultsim.engine import Engine


@dataclass(frozen=True, slots=True)
class Faults:
    """Probabilities per message, and mean seconds between crashes of each kind (zero: never)."""

    lose: float = 0.0
    repeat: float = 0.0
    # Messages take up to this long, each its own time: later ones overtake earlier ones.
    delay_seconds: float = 0.02
    commit_s: float = 0.01
    slow_commit: float = 0.0
    slow_commit_seconds: float = 2.0
    # What is decided while a commit is under way goes to the store with the next one, all of it as one transaction.
    together: bool = False
    # An alarm goes off up to this much after its time.
    late_alarm: float = 0.0
    late_alarm_seconds: float = 5.0
    master_crash_seconds: float = 0.0
    daemon_crash_seconds: float = 0.0
    node_crash_seconds: float = 0.0
    rank_crash_seconds: float = 0.0
    scheduler_crash_seconds: float = 0.0
    # The store takes nothing of what was decided last; its master goes on from what it has.
    failed_commit: float = 0.0
    # A node that crashed stays away for up to this long; longer than lost_after now and then.
    node_away_seconds: float = 120.0
    # A daemon is busy with one gang of a desired set while the others wait: it reports, with the version before.
    late: float = 0.0
    # A node that crashed comes back without its disk.
    wiped: float = 0.0
    # A destination's image is that of an earlier stop; or it is ready before it can say of which step.
    spoiled_image: float = 0.0
    late_step: float = 0.0
    # Storage has no room for a checkpoint that a stop asks for: it rests where it stands.
    full_storage: float = 0.0
    # A gang cannot be launched on one of its nodes, by no fault of its own.
    failed_launch: float = 0.0
    # An operator takes silent nodes for gone.
    removal_seconds: float = 0.0
    # The master's clock may be off by up to this much after a restart.
    clock_jump_seconds: float = 0.0
    # And is set while it runs, by up to as much.
    clock_set_seconds: float = 0.0

    def healed(self) -> Faults:
        """The same network without anything going wrong: for asking whether all ends well."""
        return Faults(delay_seconds=self.delay_seconds, commit_s=self.commit_s)


NONE = Faults()


def storm(seed_engine: Engine) -> Faults:
    """A mixture drawn from the seed: some runs have one kind of fault only, some have all."""
    kinds = {
        "lose": seed_engine.between(0.0, 0.15),
        "repeat": seed_engine.between(0.0, 0.15),
        "delay_seconds": seed_engine.between(0.01, 0.5),
        "slow_commit": seed_engine.between(0.0, 0.1),
        "master_crash_seconds": seed_engine.between(20.0, 200.0),
        "daemon_crash_seconds": seed_engine.between(20.0, 200.0),
        "node_crash_seconds": seed_engine.between(60.0, 400.0),
        "rank_crash_seconds": seed_engine.between(30.0, 300.0),
        "scheduler_crash_seconds": seed_engine.between(20.0, 200.0),
        "late": seed_engine.between(0.0, 0.3),
        "wiped": seed_engine.between(0.0, 0.5),
        "spoiled_image": seed_engine.between(0.0, 0.3),
        "late_step": seed_engine.between(0.0, 0.3),
        "full_storage": seed_engine.between(0.0, 0.5),
        "failed_launch": seed_engine.between(0.0, 0.1),
        "clock_jump_seconds": seed_engine.between(0.0, 3600.0),
        "removal_seconds": seed_engine.between(1.0, 10.0),
    }
    chosen: dict[str, Any] = {name: value for name, value in kinds.items() if seed_engine.chance(0.6)}
    return replace(NONE, **chosen)


class Network:
    """Delivers messages late, twice, out of order or not at all."""

    def __init__(self, engine: Engine, faults: Faults) -> None:
        self.engine = engine
        self.faults = faults

    def send(self, deliver: Callable[[], None]) -> None:
        copies = 2 if self.engine.chance(self.faults.repeat) else 1
        for _ in range(copies):
            if not self.engine.chance(self.faults.lose):
                self.engine.after(self.engine.between(0.001, self.faults.delay_seconds), deliver)
