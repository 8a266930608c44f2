"""One of several masters leads: when a stand-by may take the lease, and how long a leader may rely on its own."""

from __future__ import annotations

import pytest
from ganger_master.core.leader_lease import LeaderLease, is_held, may_take, read_again_s, renewal_interval_s

LEASE_S = 2.0


def lease(left_s: float) -> LeaderLease:
    return LeaderLease(7, "m1:1:a", "m1:7070", left_s)


@pytest.mark.parametrize(
    ("present", "may"),
    [(None, True), (lease(2.0), False), (lease(0.001), False), (lease(0.0), True), (lease(-100.0), True)],
    ids=["no-master-yet", "fresh", "about-to-expire", "just-expired", "long-expired"],
)
def test_a_master_takes_the_lease_once_it_has_expired(present: LeaderLease | None, may: bool) -> None:
    assert may_take(present) is may


@pytest.mark.parametrize(
    ("verified_at", "now", "held"),
    [(100.0, 100.0, True), (100.0, 101.999, True), (100.0, 102.0, False), (100.0, 1_000.0, False)],
    ids=["just-renewed", "about-to-expire", "just-expired", "stopped-for-long"],
)
def test_a_leader_relies_on_its_lease_from_the_begin_of_its_last_renewal(
    verified_at: float, now: float, held: bool
) -> None:
    assert is_held(verified_at, now, LEASE_S) is held


@pytest.mark.parametrize(
    ("left_s", "wait_s"),
    [(2.0, 0.25), (0.25, 0.25), (0.1, 0.1), (0.0, 0.02), (-5.0, 0.02)],
    ids=["fresh", "a-read-left", "expires-before-the-next-read", "expired", "long-expired"],
)
def test_a_stand_by_reads_the_lease_at_its_end_and_often_before(left_s: float, wait_s: float) -> None:
    assert read_again_s(lease(left_s), LEASE_S) == pytest.approx(wait_s)


@pytest.mark.parametrize("lease_s", [0.5, 2.0, 30.0])
def test_one_renewal_may_be_lost(lease_s: float) -> None:
    lost = 2 * renewal_interval_s(lease_s)
    assert is_held(0.0, lost, lease_s)
