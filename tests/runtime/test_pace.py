"""A lone caller never waits for others; many callers share commits."""

from __future__ import annotations

from ganger_master.runtime.commits import CommitPace


def test_first_commit_begins_at_once() -> None:
    assert CommitPace().wait_s(now=5.0) == 0.0


def test_lone_callers_are_committed_one_after_the_other_without_pause() -> None:
    pace = CommitPace()
    pace.began(1.0)
    pace.ended(callers=1, seconds=0.001)
    assert pace.wait_s(1.001) == 0.0


def test_many_callers_make_commits_keep_apart_but_not_for_long() -> None:
    pace = CommitPace()
    pace.began(1.0)
    pace.ended(callers=32, seconds=0.0001)
    assert 0.0 < pace.wait_s(1.001) <= 0.010
    pace.began(2.0)
    pace.ended(callers=32, seconds=10.0)
    assert pace.wait_s(2.0) <= 0.0101


def test_pause_ends_when_the_crowd_is_gone() -> None:
    pace = CommitPace()
    pace.began(1.0)
    pace.ended(callers=32, seconds=0.004)
    pace.began(1.01)
    pace.ended(callers=1, seconds=0.001)
    assert pace.wait_s(1.012) == 0.0
