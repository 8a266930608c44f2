"""A planner that observes the cluster over the wire plans as the simulated one, which reads the core's own records."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
from ganger.cluster.view import LoadMode, View
from ganger.v1 import resources_pb2, scheduling_pb2
from ganger.wire import resource_messages as convert
from ganger.wire import resource_names as names
from ganger.wire import times
from ganger_master.core.tenancy import Team
from ganger_master.planner.context import ClusterChange, Plan, PlanVerdict, ProgressReports
from ganger_master.planner.loop import PlannerLoop
from ganger_master.planner_process.run import ClusterMirror
from ganger_master.rpc.planner_messages import limits_to_wire, live_job_to_wire, teams_to_wire, use_to_wire
from ganger_master.simulator import planner_shell
from ganger_master.simulator.inputs import ReplayOptions, SwitchCosts
from ganger_master.simulator.run import simulate
from ganger_master.simulator.traces.servers import servers_from_flags
from ganger_master.simulator.traces.workload import Workload, workload

JOBS = 60
MODELS = ["resnet50", "resnext50", "vae", "lstm"]


class WatchedLoop(PlannerLoop):
    """A simulated planner's loop, beside one that observes the same over the wire; compares all plans of both."""

    plans: list[Plan]

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.live = PlannerLoop(*arguments)  # type: ignore[arg-type]
        self.mirror = ClusterMirror(lambda: 0.0)
        self.view_changes = 0

    def observe(self, event: ClusterChange | ProgressReports | PlanVerdict, now: float) -> None:
        super().observe(event, now)
        if isinstance(event, ClusterChange):
            received = self.mirror.apply(scheduling_pb2.ClusterDelta.FromString(self._sent(event, now)))
            assert received is not None
            event = received
        self.live.observe(event, now)

    def step(self, now: float) -> tuple[Plan | None, float]:
        found, next_s = super().step(now)
        live, _ = self.live.step(now)
        assert live == found
        if found is not None:
            self.plans.append(found)
        return found, next_s

    def _sent(self, change: ClusterChange, now: float) -> bytes:
        """Return the message of a change of the cluster, as a master sends it."""
        view = change.view
        delta = scheduling_pb2.ClusterDelta(
            view=self._view_delta(view, change.is_whole),
            removed_jobs=[names.job_name(number) for number in change.forgotten],
            time=times.timestamp(now),
            draining_nodes=[names.node_name(node) for node in change.draining],
            changing_node_sets=[names.node_set_name(number) for number in change.changing],
            quantum=None if change.quantum_s is None else times.duration(change.quantum_s),
            migrations_per_hour=change.moves_per_hour,
            limits=limits_to_wire(change.limits),
            teams=teams_to_wire(change.teams),
            usage_half_life=times.duration(change.usage_half_life_s),
            usage=[use_to_wire(one) for one in change.usage],
        )
        for job, gang, _ in change.jobs:
            live_job_to_wire(job, gang, delta.jobs.add())
        self.view_changes = view.journal.changes
        return delta.SerializeToString()

    def _view_delta(self, view: View, is_whole: bool) -> scheduling_pb2.ViewDelta:
        slots = None if is_whole else view.journal.since(self.view_changes)
        nodes = list(view.names()) if slots is None else [view.nodes[slot] for slot in dict.fromkeys(slots)]
        is_light = view.mode is LoadMode.SPREAD
        return scheduling_pb2.ViewDelta(
            version=view.version + 1,
            from_version=0 if is_whole else 1,
            configuration_sets=[convert.configuration_set_to_wire(one) for one in view.sets.values()],
            nodes=[convert.node_row_to_wire(view.row(node)) for node in nodes],
            load_mode=resources_pb2.LOAD_MODE_SPREAD if is_light else resources_pb2.LOAD_MODE_PACK,
        )


def crowd() -> Workload:
    """Now more work than the cluster can do, now less."""
    draw = np.random.default_rng(11)
    gpus = draw.choice([1, 1, 1, 2, 4], JOBS)
    return workload(
        [str(job) for job in range(JOBS)],
        np.sort(draw.uniform(0.0, 20_000.0, JOBS)),
        gpus,
        np.exp(draw.normal(7.5, 1.0, JOBS)),
        labels={
            "model": [str(model) for model in draw.choice(MODELS, JOBS)],
            "user": [str(user) for user in draw.choice(["ann", "bob", "cat"], JOBS)],
        },
    )


TEAMS = {"vision": Team(("ann", "bob"), 2.0, 8), "others": Team(("*",))}


@pytest.mark.parametrize("teams", [{}, TEAMS], ids=["without teams", "with teams"])
@pytest.mark.parametrize("policy", ["gandiva", "ganger", "ganger+defrag", "las", "drf", "tetris", "gandiva+elastic"])
def test_what_the_wire_carries_of_jobs_nodes_and_use_changes_no_plan(policy: str, teams: dict[str, Team]) -> None:
    WatchedLoop.plans = []
    with patch.object(planner_shell, "PlannerLoop", WatchedLoop):
        servers = servers_from_flags(nodes=3, gpus_per_node=4)
        simulate(crowd(), servers, policy, ReplayOptions(costs=SwitchCosts(start_s=5.0), teams=teams))
    assert sum(len(plan.changes) for plan in WatchedLoop.plans) >= JOBS
