"""No policy without an oracle sees hidden durations: nothing it does before a time depends on what ends after it."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from ganger_master.core.commands import Command, ProposePlan, RequestGang
from ganger_master.policies import NAMES, policy_named
from ganger_master.simulator.inputs import ReplayOptions
from ganger_master.simulator.run import _Replay
from ganger_master.simulator.time_slices import EPOCH_S
from ganger_master.simulator.traces.servers import servers_from_flags
from ganger_master.simulator.traces.workload import Workload, workload

JOBS = 60
# Until then about half of them have ended.
UNTIL_S = 9_000.0
KNOW_NOTHING = [name for name in (*NAMES, "fifo+elastic") if not policy_named(name).order.knows_durations]


class _Recorded(_Replay):
    """Keeps what the core was told, and when; what orders and plans decided is in it, byte for byte."""

    def __init__(self, jobs: Workload, policy: str) -> None:
        self.decisions: list[bytes] = []
        self.decided = 0
        super().__init__(jobs, servers_from_flags(nodes=2, gpus_per_node=4), policy, ReplayOptions(), None)

    def send(self, command: Command) -> object:
        self.decisions.append(f"{self.clock.now!r} {command!r}".encode())
        self.decided += isinstance(command, ProposePlan | RequestGang)
        return super().send(command)

    def run_until(self, end_s: float) -> _Recorded:
        """All that happens before that time."""
        while (time := self.clock.next_time()) is not None and time < EPOCH_S + end_s:
            self.clock.run_instant()
            self._settle()
        return self

    def left_s(self, now_s: float) -> np.ndarray:
        """Seconds of work that are hidden at that time; 0 for ended jobs, all for jobs still to come."""
        # Time slices are credited when their group is next looked at.
        self.clock.now = EPOCH_S + now_s
        self.nodes.sync_groups()
        left = self.work.remaining(np.arange(len(self.jobs)), EPOCH_S + now_s)
        # Rounding leaves nothing of ended jobs.
        return np.where(left > 1e-3, left, 0.0)


@cache
def trace() -> Workload:
    draw = np.random.default_rng(5)
    submit_s = np.sort(draw.uniform(0.0, 12_000.0, JOBS))
    gpus = draw.choice([1, 1, 1, 2, 4, 8], JOBS)
    duration_s = np.exp(draw.normal(6.0, 1.5, JOBS))
    return workload(
        [str(job) for job in range(JOBS)],
        submit_s,
        gpus,
        duration_s,
        numbers={
            "deadline_s": draw.uniform(1_000.0, 30_000.0, JOBS),
            # What is measured stays as it is, whatever is hidden: losses tell of an end that need not come.
            "converges_s": duration_s,
            "min_gpus": np.where(gpus > 1, gpus // 2, 1),
            "max_gpus": np.minimum(2 * gpus, 8),
        },
        labels={"user": [f"user{job % 3}" for job in range(JOBS)]},
    )


@pytest.mark.parametrize("policy", KNOW_NOTHING)
@pytest.mark.parametrize("factor", [0.01, 20.0], ids=["shorter", "longer"])
def test_decisions_before_a_time_do_not_depend_on_what_ends_after_it(policy: str, factor: float) -> None:
    jobs = trace()
    one = _Recorded(jobs, policy).run_until(UNTIL_S)
    left_s = one.left_s(UNTIL_S)
    assert 10 < np.count_nonzero(left_s) < JOBS - 10, "some have ended, others have not"
    changed = jobs.with_columns(duration_s=jobs.duration_s + (factor - 1.0) * left_s)
    other = _Recorded(changed, policy).run_until(UNTIL_S)
    assert one.decided > JOBS / 3
    assert other.decisions == one.decisions


def test_an_oracle_is_found_out() -> None:
    """The test can fail: srtf starts others once what is hidden changes."""
    jobs = trace()
    one = _Recorded(jobs, "srtf").run_until(UNTIL_S)
    left_s = one.left_s(UNTIL_S)
    draw = np.random.default_rng(6).uniform(0.01, 20.0, JOBS)
    changed = jobs.with_columns(duration_s=jobs.duration_s + (draw - 1.0) * left_s)
    assert _Recorded(changed, "srtf").run_until(UNTIL_S).decisions != one.decisions
