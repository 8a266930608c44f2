"""Large gangs among fragments: lower-ranked jobs are preempted for them, higher-ranked ones moved at most. (2 s)"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from core.drive import GIB, job_of
from ganger.cluster.resources import Locality, LocalityLevel
from ganger_master.core.commands import CancelJob
from ganger_master.core.job_spec import JobSpec
from ganger_master.policies import NAMES, policy_named
from ganger_master.policies.orders import WEEK_S
from ganger_master.simulator.inputs import ReplayOptions, SwitchCosts
from ganger_master.simulator.run import simulate
from ganger_master.simulator.traces.servers import servers_from_flags
from ganger_master.simulator.traces.workload import Workload, workload
from msgspec.structs import replace
from planner.test_passes import Planned

TOGETHER = Locality(LocalityLevel.NODE)
DAY_S = 86_400.0


def together(gpus: int) -> JobSpec:
    return replace(job_of(gpus, memory=GIB), locality=TOGETHER)


def node_of(drive: Planned, number: int) -> str:
    (claim,) = drive.state.gangs[drive.job(number).epoch].claims
    return claim.node


def fragmented(*, priority: int = 0, preemptible: bool = True, policy: str = "las") -> tuple[Planned, list[int]]:
    """Two nodes of four devices with a job of one device on each."""
    drive = Planned(nodes=2, policy=policy)
    large = [drive.running(together(3)) for _ in range(2)]
    small = [drive.running(replace(together(1), priority=priority, preemptible=preemptible)) for _ in range(2)]
    for number in large:
        node = node_of(drive, number)
        drive.step(CancelJob(number))
        drive.seen_without(node, number)
    assert [node_of(drive, number) for number in small] == ["n1", "n2"]
    assert drive.state.nodes.free_devices == 6
    return drive, small


def test_gang_behind_fragments_has_a_node_emptied_and_starts_there() -> None:
    drive, small = fragmented()
    large = drive.submit(together(4))
    ((kind, stopped),) = drive.proposed()
    assert (kind, stopped in small) == ("SUSPEND", True)
    node = node_of(drive, stopped)
    assert drive.proposed() == [], "it has been told already"
    drive.rests(stopped)
    # The preempted job fits beside the other.
    assert sorted(drive.proposed()) == [("START", stopped), ("START", large)]
    assert node_of(drive, large) == node
    assert node_of(drive, stopped) != node


def test_a_higher_ranked_job_moves_under_an_order_that_regroups() -> None:
    drive, small = fragmented(policy="ganger-alone")
    large = drive.submit(together(4))
    # By its GPUs it ranks below both.
    assert not drive.found().displaced, "a job that moves starts as soon as it can"
    ((kind, moved),) = drive.proposed()
    assert (kind, moved in small) == ("SUSPEND", True)
    drive.rests(moved)
    assert sorted(drive.proposed()) == [("START", moved), ("START", large)]
    assert node_of(drive, moved) == node_of(drive, *(set(small) - {moved}))


def test_no_job_moves_for_a_gang_that_has_too_few_free_devices_in_all() -> None:
    drive, _ = fragmented(policy="ganger")
    drive.running(together(3))
    drive.submit(together(4))
    assert drive.found().changes == ()


@pytest.mark.parametrize("kept", [{"priority": 1}, {"preemptible": False}])
def test_no_job_of_a_higher_priority_moves(kept: dict[str, Any]) -> None:
    drive, _ = fragmented(policy="ganger", **kept)
    drive.submit(together(4))
    assert drive.found().changes == ()


def test_a_place_that_a_job_leaves_is_kept_for_the_gang_it_left_for() -> None:
    drive, _ = fragmented()
    large = drive.submit(together(4))
    ((_, stopped),) = drive.proposed()
    newcomers = [drive.submit(together(1)) for _ in range(4)]
    # They rank below the gang: only the other node's three devices are theirs.
    changes = drive.found(may_stop=False).changes
    assert [(change.kind, change.number) for change in changes] == [("START", number) for number in newcomers[:3]]
    assert {claim.node for change in changes for claim in change.claims} == {"n1", "n2"} - {node_of(drive, stopped)}
    drive.rests(stopped)
    assert ("START", large) in drive.proposed()


def test_no_job_of_a_higher_priority_is_preempted() -> None:
    drive, _ = fragmented(priority=1)
    drive.submit(together(4))
    assert drive.found().changes == ()


def test_a_job_that_must_not_be_preempted_keeps_its_place() -> None:
    drive, _ = fragmented(preemptible=False)
    drive.submit(together(4))
    assert drive.found().changes == ()


def test_an_order_without_preemption_makes_no_room() -> None:
    drive = Planned(nodes=2, policy="fifo-backfill+best-fit")
    for _ in range(2):
        drive.running(together(3))
    drive.submit(together(2))
    assert drive.found().changes == ()


PREEMPTING = [name for name in NAMES if policy_named(name).order.preempts and policy_named(name).is_planned]


def fragments_for_weeks() -> Workload:
    """A job of one device for three weeks on each of two nodes of four, those beside it gone after an hour; and after a
    day a gang of four, for which there are six devices all the time."""
    jobs = [
        ("first", 0.0, 1, 21 * DAY_S),
        *((f"short-{number}", 60.0, 1, 3600.0) for number in range(3)),
        ("second", 120.0, 1, 21 * DAY_S),
        ("large", DAY_S, 4, 5 * DAY_S),
    ]
    names, arrivals, gpus, durations = zip(*jobs, strict=True)
    return workload(names, arrivals, gpus, durations)


@pytest.mark.parametrize("policy", PREEMPTING)
def test_large_gang_starts_at_the_latest_when_it_has_waited_too_long(policy: str) -> None:
    """Make the job rank first and all others preemptible."""
    options = ReplayOptions(costs=SwitchCosts(start_s=5.0, suspend_s=30.0, resume_s=5.0))
    runs = [
        simulate(fragments_for_weeks(), servers_from_flags(nodes=2, gpus_per_node=4), policy, options).outcomes
        for _ in range(2)
    ]
    assert np.array_equal(runs[0].end_s, runs[1].end_s)
    assert runs[0].finished.all()
    large = list(runs[0].job_ids).index("large")
    waited = float(runs[0].first_start_s[large] - runs[0].submit_s[large])
    assert waited <= WEEK_S + 2 * options.plan_every_s + 2 * options.costs.suspend_s
    # The job that made room started again at once beside the other.
    assert float((runs[0].jct_s - runs[0].duration_s).sum()) <= WEEK_S + 3600.0
