"""Migrations in a replay: the migration stage around another pass, and its state between passes."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from ganger.cluster.capacity_index import CapacityIndex

from ganger_master.core.change_reason import TrialFinding
from ganger_master.core.state import State
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.migrate_stage import Inner, moves_no_job, plan_moves
from ganger_master.planner.migration_context import MigrationMemory, MigrationTerms
from ganger_master.planner.plan import PlanDraft
from ganger_master.planner.refusal_backoff import NONE_EXCLUDED
from ganger_master.policies.placements import PlacementPreference
from ganger_master.simulator.measurement_model import ModelledRates
from ganger_master.simulator.replay import Clock


class Moves:
    """Runs the migration stage. `is_strict` and `per_hour`: as in `MigrationTerms`."""

    def __init__(
        self,
        placement: PlacementPreference,
        is_strict: bool,
        state: State,
        table: LiveTable,
        room: CapacityIndex,
        windows: ModelledRates,
        clock: Clock,
        per_hour: float | None,
    ) -> None:
        self._placement, self._is_strict = placement, is_strict
        self._state, self._table, self._room = state, table, room
        self._windows, self._clock, self._per_hour = windows, clock, per_hour
        # Migrations in progress, and when the next pass over them is due without a change.
        self.moving = MigrationMemory()
        self._again_s = math.inf

    @property
    def is_due(self) -> bool:
        return self._clock.now >= self._again_s

    def around(self, inner: Inner, may_stop: bool, is_news: bool) -> tuple[PlanDraft, tuple[TrialFinding, ...]]:
        """Run the pass `inner` and add migrations to its changes."""
        return self._plan(inner, self._terms, may_stop, is_news)

    def of_sharers(self, on_trial: Collection[int]) -> tuple[PlanDraft, tuple[TrialFinding, ...]]:
        """Return migrations for time-sliced and co-located jobs, when their own pass has no change.

        `on_trial`: numbers of the jobs whose co-location is on trial.
        """
        terms = MigrationTerms(self._placement, holes=False, per_hour=self._per_hour, on_trial=frozenset(on_trial))
        return self._plan(lambda kept_out, may_stop: PlanDraft(), terms, False, True)

    def has_nothing_to_move(self) -> bool:
        """Return whether the migration stage would certainly propose no migration now."""
        return moves_no_job(self.moving, self._terms, self._table, self._clock.now, self._room)

    @property
    def _terms(self) -> MigrationTerms:
        return MigrationTerms(
            self._placement,
            draining=tuple(self._state.nodes.draining),
            is_strict=self._is_strict,
            per_hour=self._per_hour,
        )

    def _plan(
        self, inner: Inner, terms: MigrationTerms, may_stop: bool, is_news: bool
    ) -> tuple[PlanDraft, tuple[TrialFinding, ...]]:
        self._windows.now = self._clock.now
        terms = replace(terms, rated=self._windows)
        found, self.moving, findings, again_s = plan_moves(
            inner, terms, self._table, self._clock.now, self._room, self.moving, NONE_EXCLUDED, may_stop, is_news
        )
        if again_s != self._again_s:
            self._again_s = again_s
            if again_s < math.inf:
                self._clock.at(max(again_s, self._clock.now), _nothing)
        return found, findings


def _nothing() -> None:
    """Only let virtual time reach this instant."""
