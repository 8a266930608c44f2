"""Whatever the policy: nothing is over-committed, no gang is split, every job ends, the same run comes out twice."""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
from faultsim.state_invariants import violations
from ganger_master.policies import NAMES
from ganger_master.policies.orders import WEEK_S, with_aging
from ganger_master.simulator.inputs import ReplayOptions, SwitchCosts
from ganger_master.simulator.run import _Replay, simulate
from ganger_master.simulator.traces.servers import Servers, servers_from_flags
from ganger_master.simulator.traces.workload import Workload, workload
from hypothesis import given, settings
from hypothesis import strategies as st

SERVERS = servers_from_flags(nodes=3, gpus_per_node=4, nodes_per_rack=2)
POLICIES = (
    *NAMES,
    "las2d+best-fit",
    "srtf+tetris",
    "ganger+fgd",
    "fifo-backfill+locality",
    "fifo+first-fit",
    "las+proportional",
)
# Plans often, switching that takes a while: much is under way when something else happens.
OPTIONS = ReplayOptions(costs=SwitchCosts(start_s=2.0, suspend_s=1.5, resume_s=1.0), plan_every_s=20.0)

ROWS = st.lists(
    st.tuples(
        st.integers(0, 150),
        st.sampled_from([1, 1, 1, 2, 3, 4, 8, 12]),
        st.integers(1, 120),
        st.sampled_from(["ann", "bob"]),
        st.sampled_from([0, 0, 1]),
    ),
    min_size=1,
    max_size=10,
)


class Watched(_Replay):
    """Looks at the whole state after every batch."""

    def __init__(self, jobs: Workload, servers: Servers, policy: str, options: ReplayOptions) -> None:
        super().__init__(jobs, servers, policy, options, None)

    def _finish(self) -> None:
        super()._finish()
        found = violations(self.state)
        assert not found, found
        for number in self.state.jobs.live:
            gang = self.state.gangs.get(self.state.jobs[number].epoch)
            # Whole, or not at all.
            held = [piece.held is not None for piece in gang.pieces] if gang is not None else []
            assert all(held) or not any(held) or (gang is not None and any(piece.gone for piece in gang.pieces))


@settings(max_examples=40, deadline=None)
@given(policy=st.sampled_from(POLICIES), rows=ROWS, too_long_s=st.sampled_from([WEEK_S, 20.0]))
def test_every_job_ends_and_nothing_is_promised_twice(
    policy: str, rows: list[tuple[int, int, int, str, int]], too_long_s: float
) -> None:
    with patch("ganger_master.policies.with_aging", partial(with_aging, after_s=too_long_s)):
        replay = Watched(_jobs(rows), SERVERS, policy, OPTIONS)
    replay.run()
    outcomes = replay.ledger.outcomes()
    assert outcomes.finished.all()
    # What was served is what was asked for, and what switching took.
    served = outcomes.service_s - outcomes.overhead_s
    if replay.windows is None:
        assert served == pytest.approx(outcomes.duration_s, abs=1e-3)
    else:
        # Jobs that share a GPU are slower.
        assert (served >= outcomes.duration_s - 1e-3).all()
    assert not replay.state.jobs.live
    assert replay.state.nodes.free_devices == SERVERS.gpus


# Under gandiva no job waits for others to end: jobs are time-sliced.
@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "gandiva"])
def test_every_job_ends_though_many_have_waited_too_long(policy: str) -> None:
    dice = np.random.default_rng(7)
    arrivals, sizes = np.sort(dice.integers(0, 600, 40)).tolist(), dice.choice([1, 1, 2, 3, 4, 8, 12], 40).tolist()
    rows = [(at, gpus, int(dice.integers(1, 300)), "ann", 0) for at, gpus in zip(arrivals, sizes, strict=True)]
    with patch("ganger_master.policies.with_aging", partial(with_aging, after_s=20.0)):
        replay = Watched(_jobs(rows), SERVERS, policy, OPTIONS)
    replay.run()
    assert replay.ledger.outcomes().finished.all()


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_run_comes_out_the_same(policy: str) -> None:
    dice = np.random.default_rng(5)
    rows = [
        (int(arrival), int(gpus), int(seconds), "ann" if user else "bob", 0)
        for arrival, gpus, seconds, user in zip(
            dice.integers(0, 700, 40),
            dice.choice([1, 1, 2, 4, 8], 40),
            dice.integers(1, 300, 40),
            dice.integers(0, 2, 40),
            strict=True,
        )
    ]
    runs = [simulate(_jobs(order), SERVERS, policy, OPTIONS).outcomes for order in (rows, rows)]
    assert np.array_equal(runs[0].end_s, runs[1].end_s)
    assert np.array_equal(runs[0].first_start_s, runs[1].first_start_s)


def test_gangs_that_rest_in_host_memory_are_sent_nowhere_that_has_no_memory_for_them() -> None:
    """A gang of 8 was asked closer together, onto a node where what it keeps there while it rests leaves too little for
    it: it rested, was given up after ten minutes, went on, and was asked again, for ever."""
    dice = np.random.default_rng(7)
    arrivals, sizes = np.sort(dice.integers(0, 600, 40)), dice.choice([1, 1, 2, 3, 4, 8, 12], 40)
    each = zip(arrivals.tolist(), sizes.tolist(), strict=True)
    rows = [(at, gpus, int(dice.integers(1, 300)), "ann", 0) for at, gpus in each]
    outcomes = simulate(_jobs(rows), SERVERS, "gandiva", OPTIONS).outcomes
    assert outcomes.end_s.max() < 3_600.0


def _jobs(rows: list[tuple[int, int, int, str, int]]) -> Workload:
    arrivals, gpus, durations, users, priorities = zip(*rows, strict=True)
    names = [str(number) for number in range(len(rows))]
    return workload(names, arrivals, gpus, durations, numbers={"priority": priorities}, labels={"user": users})
