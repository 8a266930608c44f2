"""Of two gangs that lie apart on a full cluster each gets a node: what distance does to the one, a move of another of
its kind has shown before. (chaos: 2 min)"""

from __future__ import annotations

from pathlib import Path

import pytest
from ganger.v1 import scheduling_pb2
from kit.cluster import Cluster
from kit.shell import Shell
from kit.waiting import eventually
from system.harness import Run
from system.hasty import events, hasty_planner, story
from system.packing import WANTS, Plans, claim

pytestmark = [pytest.mark.system, pytest.mark.torch, pytest.mark.chaos, pytest.mark.timeout(600)]

OPTIONS = ("--policy", "fifo-backfill+first-fit+defrag", "--no-planner")
STEPS = 1536


def idle(cluster: Cluster, label: str) -> Run:
    """A job that takes a GPU, and cannot be moved."""
    answer = Shell(cluster.master_directory).json(
        "submit", "--name", label, "--gpus", "1", *WANTS, "--", "sleep", "900"
    )
    return Run(cluster, str(answer["name"]), Run.record_of(cluster, label), 1, 0)


def start(plans: Plans, run: Run, device: int, *nodes: str) -> None:
    claims = [claim(node, device, shared=False) for node in nodes]
    plans.until_approved(run, start=scheduling_pb2.StartChange(claims=claims))


def nodes_of(run: Run) -> list[str]:
    return [str(held["node"]) for held in run.show()["gang"]["claims"]]


def test_two_gangs_over_the_same_two_nodes_get_one_each_once_it_is_known_to_pay(tmp_path: Path) -> None:
    with Cluster(tmp_path, nodes=2, virtual_gpus=4, topology="1x1x4", master_options=OPTIONS) as cluster:
        plans = Plans(cluster)
        knit = ("--close-knit",)
        first, second = (
            Run.submit(cluster, f"knit-{number}", *WANTS, world=2, steps=STEPS, job=knit, alike=True)
            for number in range(2)
        )
        other = Run.submit(cluster, "other", *WANTS, world=2, steps=STEPS)
        gangs = [first, second, other]
        leaves, stays = (idle(cluster, label) for label in ("leaves", "stays"))
        start(plans, first, 0, "n0", "n1")
        # The job that has run longest has the most to save.
        first.wait_step(1, within_seconds=120)
        for device, gang in ((1, second), (2, other)):
            start(plans, gang, device, "n0", "n1")
        start(plans, leaves, 3, "n0")
        start(plans, stays, 3, "n1")
        with hasty_planner(cluster):
            for gang in gangs:
                gang.wait_step(gang.last_step() + 10, within_seconds=120)
            # Nothing is free, and the effect of distance on either is unknown: all stay.
            assert events(first, "move_begun") == []
            cluster.run("cancel", leaves.id)
            eventually(
                lambda: events(first, "move_begun", "LOCALITY") or events(first, "suspend_ordered", "LOCALITY"),
                what="one finds room on a node",
                within_seconds=120,
                story=lambda: story(cluster, *gangs),
                every_seconds=0.2,
            )
            # It leaves a GPU to another job, so that nothing is free again.
            comes = idle(cluster, "comes")
            (closer,) = eventually(
                lambda: events(first, "change_kept", "LOCALITY"),
                what="it is found to be faster",
                within_seconds=120,
                story=lambda: story(cluster, *gangs),
                every_seconds=0.5,
            )
            assert closer["subject"] == first.name
            assert float(closer["figures"]["gain"]) > 2.0
            comes.wait_state("HOLDING")

            eventually(
                lambda: len(events(first, "change_kept", "LOCALITY")) == 2,
                what="the others exchange places, and the gain is measured",
                within_seconds=180,
                story=lambda: story(cluster, second, other),
                every_seconds=0.5,
            )
        # The other one gains nothing: that it loses nothing either may take long to tell.
        (exchanged,) = events(first, "move_done", "EXCHANGE")
        assert exchanged["subject"] == other.name
        *_, gained = events(first, "change_kept", "LOCALITY")
        assert (gained["subject"], float(gained["figures"]["gain"]) > 2.0) == (second.name, True)
        assert [len(set(nodes_of(gang))) for gang in gangs] == [1, 1, 1]
        assert nodes_of(second) != nodes_of(other)
        told = other.shell.try_("history", other.id).out
        assert "to exchange places with a job that gains more" in told
        for gang in gangs:
            gang.hurry()
        for gang in gangs:
            gang.wait_state("SUCCEEDED", within_seconds=180)
        for gang in (second, other):
            gang.check(first)
