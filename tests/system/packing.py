"""Jobs on one device together, as a plan puts them there: the tests are the planner."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from ganger.v1 import job_pb2, resources_pb2, scheduling_pb2, scheduling_pb2_grpc
from ganger.wire.channels import open_channel
from ganger.wire.endpoints import EndpointError, read_endpoint
from ganger_daemon.cgroups.contract import is_done
from ganger_daemon.cgroups.group_tree import choose_cgroups
from kit.cluster import Cluster
from kit.waiting import eventually
from system.harness import Run
from system.hasty import events, hasty_planner, story

MEBIBYTE = 1 << 20
OPTIONS = ("--policy", "gandiva", "--no-planner")
# What a job says that it uses of a device: that, and a tenth more, is reserved for its arena.
NEEDS_MEBIBYTES = 64
WANTS = ("--cpus-per-gpu", "1", "--memory", "512M", "--gpu-memory", f"{NEEDS_MEBIBYTES}M")


@contextmanager
def packing_cluster(directory: Path, nodes: int = 1) -> Iterator[Cluster]:
    with Cluster(directory, nodes=nodes, virtual_gpus=2, topology="2", master_options=OPTIONS) as cluster:
        yield cluster


@dataclass
class Plans:
    """Proposes to the master of a cluster, whichever serves now."""

    cluster: Cluster

    def propose(self, *changes: scheduling_pb2.Change) -> list[scheduling_pb2.ChangeVerdict]:
        with open_channel(read_endpoint(self.cluster.master_directory)) as channel:
            stub: Any = scheduling_pb2_grpc.SchedulingServiceStub(channel)
            return list(stub.ProposePlan(scheduling_pb2.Plan(changes=changes, reason="a test")).verdicts)

    def until_approved(self, run: Run, **change: Any) -> None:
        """Asks until it is: what is free, and what a job is, is known only once all nodes have told."""
        said: list[str] = []

        def is_approved() -> bool:
            shown = run.shell.try_("show", run.id, "--json")
            if shown.code:
                return False
            asked = scheduling_pb2.Change(job=run.name, revision=int(json.loads(shown.out)["revision"]), **change)
            try:
                (verdict,) = self.propose(asked)
            except (EndpointError, grpc.RpcError) as error:
                said[:] = [str(error)]
                return False
            said[:] = [refusal.message for refusal in verdict.refusals]
            return verdict.approved

        eventually(
            is_approved,
            what=f"{change} of {run.name} is approved",
            within_seconds=120,
            story=lambda: "; ".join(said),
            every_seconds=0.1,
        )

    def start(self, run: Run, node: str, device: int, shared: bool) -> None:
        self.until_approved(run, start=scheduling_pb2.StartChange(claims=[claim(node, device, shared)]))

    def move(self, run: Run, node: str, device: int, shared: bool) -> None:
        self.until_approved(run, move=scheduling_pb2.MoveChange(claims=[claim(node, device, shared)]))

    def park(self, run: Run) -> None:
        level = job_pb2.SUSPEND_LEVEL_OFFLOAD
        self.until_approved(run, suspend=scheduling_pb2.SuspendChange(level=level))

    def suspend(self, run: Run) -> None:
        self.park(run)
        eventually(
            lambda: run.show()["gang"]["phase"] == "PARKED", what="it rests", within_seconds=120, story=run.story
        )

    def resume(self, run: Run) -> None:
        self.until_approved(run, resume=scheduling_pb2.ResumeChange())


def claim(node: str, device: int, shared: bool) -> resources_pb2.Claim:
    mask = 1 << device
    return resources_pb2.Claim(
        node=f"nodes/{node}",
        device_mask=mask,
        millicores=[1000],
        memory_bytes=512 * MEBIBYTE,
        arena_bytes=NEEDS_MEBIBYTES * MEBIBYTE * 11 // 10,
        tasks=[1],
        shared_mask=mask if shared else 0,
    )


def beside(run: Run) -> list[str]:
    return list((run.show().get("gang") or {}).get("colocated_jobs", []))


def goes_on(run: Run, steps: int = 3) -> None:
    run.wait_step(run.last_step() + steps, within_seconds=120)


def is_settled(run: Run) -> bool:
    shown = run.shell.try_("show", run.id, "--json")
    gang = (json.loads(shown.out).get("gang") or {}) if shown.code == 0 else {}
    return gang.get("phase") == "RUNNING" and not gang.get("move_claims")


def is_at(run: Run, node: str, device: int) -> bool:
    (held,) = run.show()["gang"]["claims"]
    return held["node"] == f"nodes/{node}" and int(held["device_mask"]) == 1 << device


def check_beginning(run: Run, reference: Run) -> None:
    """Of one that goes on: every step once and in order, and those of the reference as there."""
    lines = run.lines(0)
    assert [line.step for line in lines] == list(range(1, len(lines) + 1)), "no step is lost or done twice"
    expected = {line.step: line.loss for line in reference.lines(0)}
    assert {line.step: line.loss for line in lines if line.step in expected} == expected


def has_quotas() -> bool:
    """Whether virtual devices can be bound to cores here."""
    cgroups = choose_cgroups(f"ganger-test-{os.getpid()}-quota", quotas=True)
    cgroups.tidy()
    return is_done(cgroups, "cpu_quota")


@dataclass
class PackedPair:
    """Two co-located jobs, and a third one on a GPU of its own. `gain`: of the co-location, as the planner saw it."""

    cluster: Cluster
    pair: list[Run]
    third: Run
    gain: float

    def beside(self) -> list[list[str]]:
        return [beside(run) for run in self.pair]

    def end_third(self) -> None:
        self.third.wait_step(1, within_seconds=120)
        self.third.hurry()
        self.third.wait_state("SUCCEEDED", within_seconds=120)

    def end_pair(self) -> None:
        """Let both train to their ends, with the losses of the third one."""
        for run in self.pair:
            run.hurry()
        for run in self.pair:
            run.wait_state("SUCCEEDED", within_seconds=120)
            run.check(self.third)


@contextmanager
def three_jobs(
    directory: Path, computes_s: float, *master_options: str, job: tuple[str, ...] = ()
) -> Iterator[list[Run]]:
    """Submit three jobs for two GPUs to a cluster with a planner that believes what it measures after seconds.

    `computes_s`: of CPU time in each step, beside which a job waits for a quarter of a second."""
    if not has_quotas():
        pytest.skip("waiting jobs differ from computing ones by the CPU time of a device, and there is no quota here")
    with (
        Cluster(
            directory,
            nodes=1,
            virtual_gpus=2,
            topology="2",
            master_options=(*master_options, "--plan-every", "5s", "--no-planner"),
            # So little of a core that a busy machine has it to give.
            daemon_options=("--virtual-gpu-cores", "0.15"),
        ) as cluster,
        hasty_planner(cluster),
    ):
        duty = ("--computes", str(computes_s), "--waits", "0.25", *job)
        yield [Run.submit(cluster, f"job-{number}", *WANTS, steps=512, job=duty) for number in range(3)]


def tried_together(runs: list[Run], verdict: str) -> tuple[list[Run], Run, float]:
    """Wait until a planner has judged two of three jobs together. Return them, the third one, and their gain.

    `verdict`: the event, `change_kept` or `change_undone`."""
    told = eventually(
        lambda: events(runs[0], verdict, "PACK"),
        what="two run at once, and that is judged",
        within_seconds=240,
        story=lambda: story(runs[0].cluster, *runs),
        every_seconds=0.5,
    )
    names = {event["subject"] for event in told}
    (third,) = [run for run in runs if run.name not in names]
    return [run for run in runs if run.name in names], third, float(told[0]["figures"]["gain"])


@contextmanager
def packed_pair(directory: Path, computes_s: float, *master_options: str) -> Iterator[PackedPair]:
    """Wait until two of three jobs for two GPUs are co-located, and that is kept. Arguments: as of `three_jobs`."""
    with three_jobs(directory, computes_s, *master_options) as runs:
        pair, third, gain = tried_together(runs, "change_kept")
        assert [beside(run) for run in pair] == [[pair[1].name], [pair[0].name]]
        yield PackedPair(third.cluster, pair, third, gain)
