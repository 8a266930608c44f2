"""Publication of durable changes, and the watchers that they wake."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ganger_master.core.gang_model import Matrix, TimesliceGroup
from ganger_master.core.job_model import SuspendLevel
from ganger_master.runtime import publication
from ganger_master.runtime.publication import CommittedState, Publication

MATRIX = Matrix(1, ((1,), (2,)), 60.0, SuspendLevel.OFFLOAD)


def test_a_watcher_of_all_jobs_wakes_when_a_matrix_is_active_and_when_it_is_gone() -> None:
    committed = CommittedState()
    key = ("node_set", "1")
    with committed.watching_jobs() as news:
        news.mark.clear()
        committed.publish(Publication())
        assert not news.mark.is_set()
        committed.publish(Publication({key: TimesliceGroup(1, ("n1",), "n1", MATRIX)}))
        assert news.mark.is_set()
        assert committed.sets[1].coming is None
        news.mark.clear()
        committed.publish(Publication(removes=(key,)))
        assert news.mark.is_set()
        assert committed.sets == {}


def test_a_planner_that_the_master_starts_has_some_time_to_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=100.0)
    monkeypatch.setattr(publication, "time", clock)
    committed = CommittedState()
    assert not committed.has_planner
    committed.expect_planner()
    assert committed.has_planner
    clock.now += publication.PLANNER_GRACE_S
    assert not committed.has_planner
    with committed.watching_jobs():
        clock.now += 1_000.0
        assert committed.has_planner
    assert committed.has_planner, "it is started again"
    clock.now += publication.PLANNER_GRACE_S
    assert not committed.has_planner
