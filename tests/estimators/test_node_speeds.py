"""Slow nodes: those on which several jobs step more slowly than the same work does elsewhere."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from core.drive import Drive, job_of
from ganger_master.core.commands import NoteSlowNode, UncordonNode
from ganger_master.core.node_faults import service_reason
from ganger_master.core.node_model import NodeState
from ganger_master.core.settings import CoreSettings, SlowNodes
from ganger_master.estimators.node_speeds import GangRate, NodeSpeed, SpeedWatch, is_slow, node_speeds


def gangs(*rates: tuple[str, float], kind: str = "train") -> list[GangRate]:
    """One job for each (nodes, steps/s) of a kind of work."""
    return [GangRate(100 * len(kind) + at, (kind,), tuple(of.split()), rate) for at, (of, rate) in enumerate(rates)]


EVEN = [("a", 10.0), ("a", 10.0), ("a", 10.0), ("b", 10.0), ("b", 10.0), ("b", 10.0)]
SLOW_B = [("a", 10.0), ("a", 10.0), ("a", 10.0), ("b", 5.0), ("b", 5.0), ("b", 5.0)]


@pytest.mark.parametrize(
    ("rates", "slow"),
    [
        pytest.param([], {}, id="nothing is known"),
        pytest.param(EVEN, {}, id="all nodes are alike"),
        pytest.param(SLOW_B, {"b": 2.0}, id="three jobs are slow"),
        pytest.param(SLOW_B[:5], {}, id="two jobs are too few"),
        pytest.param([("b", 5.0)] * 4, {}, id="there is nothing to compare with"),
        pytest.param([*EVEN, ("b", 1.0)], {}, id="one slow job among several is the job's own"),
        pytest.param([("a", 10.0)] * 3 + [("b", 8.0)] * 3, {}, id="by less than the threshold"),
        pytest.param(
            [("a b", 5.0), ("a c", 10.0), ("a d", 10.0), ("b c", 5.0), ("b d", 5.0), ("c d", 10.0), ("c d", 10.0)],
            {"b": 2.0},
            id="gangs on two nodes count for the slower one",
        ),
    ],
)
def test_which_nodes_are_slow(rates: list[tuple[str, float]], slow: dict[str, float]) -> None:
    found = {name: speed for name, speed in node_speeds(gangs(*rates)).items() if is_slow(speed, was_slow=False)}
    assert {name: speed.ratio for name, speed in found.items()} == pytest.approx(slow)


def test_different_work_is_not_compared_and_jobs_of_several_kinds_count_together() -> None:
    alone = gangs(*[("a", 10.0)] * 3) + gangs(*[("b", 2.0)] * 3, kind="large")
    assert not node_speeds(alone)
    several = [
        GangRate(10 * index + at, (kind,), (node,), rate * (1.0 if node == "a" else 0.5))
        for index, (kind, rate) in enumerate([("small", 20.0), ("large", 2.0), ("wide", 7.0)])
        for at, node in enumerate("ab")
    ]
    assert node_speeds(several)["b"] == NodeSpeed(2.0, 3)


def test_a_slow_node_stays_slow_until_it_is_clearly_faster() -> None:
    assert [is_slow(NodeSpeed(ratio, 3), was_slow=False) for ratio in (1.29, 1.3)] == [False, True]
    assert [is_slow(NodeSpeed(ratio, 3), was_slow=True) for ratio in (1.14, 1.16)] == [False, True]


@dataclass(frozen=True)
class Progress:
    epoch: int
    step: int
    step_time: float
    since_time: float = 1.0


class Cluster:
    """Two nodes with three jobs of the same work each; those on n2 take `longer` times as long."""

    def __init__(self, settings: CoreSettings) -> None:
        self.drive = Drive(nodes=2, settings=settings)
        self.watch = SpeedWatch()
        self.steps: dict[int, float] = {}
        self.time = 100.0
        for node in ("n1", "n2") * 3:
            number = self.drive.submit(job_of(1))
            self.drive.request(number, *[place for place in self.drive.places(number) if place[0].node == node])
            self.drive.runs(number)

    def trains(self, longer: float, seconds: float = 60.0) -> None:
        """All jobs train for some time, and what that shows is noted."""
        state = self.drive.state
        for _ in range(8):
            self.time += seconds / 8
            for gang in state.gangs.values():
                slower = longer if gang.nodes == ("n2",) else 1.0
                self.steps[gang.epoch] = self.steps.get(gang.epoch, 0.0) + seconds / 8 * 10.0 / slower
            samples = {
                gang.job: Progress(gang.epoch, int(self.steps[gang.epoch]), self.time, 1.0 + self.time % 0.01)
                for gang in state.gangs.values()
            }
            self.watch.note(samples, state.jobs, state.gangs, state.nodes, state.nodes.configuration_sets)
        for name, text in self.watch.news(state.nodes).items():
            self.drive.step(NoteSlowNode(name, text))


def test_a_node_that_is_slow_is_warned_of_and_no_longer_once_it_has_recovered() -> None:
    cluster = Cluster(CoreSettings())
    assert Counter(gang.nodes for gang in cluster.drive.state.gangs.values()) == {("n1",): 3, ("n2",): 3}
    cluster.trains(longer=1.0)
    assert service_reason(cluster.drive.state.nodes["n2"]) == ""
    cluster = Cluster(CoreSettings())
    cluster.trains(longer=1.5)
    node = cluster.drive.state.nodes["n2"]
    assert service_reason(node) == "slow: steps take 1.5 times as long as on other nodes, by 3 jobs"
    assert node.takes_gangs
    cluster.trains(longer=1.0, seconds=6_000.0)
    assert service_reason(cluster.drive.state.nodes["n2"]) == ""
    kinds = [row.kind for row in cluster.drive.history if row.subject == "nodes/n2" and "slow" in row.kind]
    assert kinds == ["node_slow", "node_slow_ended"]


def test_a_master_that_starts_anew_keeps_the_warning_until_it_knows_better() -> None:
    cluster = Cluster(CoreSettings())
    cluster.trains(longer=2.0)
    assert SpeedWatch().news(cluster.drive.state.nodes) == {}


def test_a_slow_node_is_drained_where_that_is_set_and_an_operator_returns_it() -> None:
    cluster = Cluster(CoreSettings(slow_nodes=SlowNodes.DRAIN))
    cluster.trains(longer=2.0)
    node = cluster.drive.state.nodes["n2"]
    assert node.state is NodeState.DRAINING
    cluster.drive.step(UncordonNode("n2"))
    assert cluster.drive.state.nodes["n2"].takes_gangs
    assert cluster.watch.news(cluster.drive.state.nodes) == {}, "what was measured before does not count"
