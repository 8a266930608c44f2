"""Checkpoints on nodes' own disks: kept where not all nodes see the storage, and never started from where nothing has
them."""

from __future__ import annotations

import pytest
from core.drive import SERVER, Drive, job_of
from ganger.cluster.refusals import Reason
from ganger.job_state import JobState
from ganger_master.core import node_checkpoints
from ganger_master.core.answers import SessionAnswer
from ganger_master.core.commands import NoteCopies, Observe, ObservedGang, OpenSession, SuspendJob
from ganger_master.core.explain import explain
from ganger_master.core.gang_model import ObservedPhase
from ganger_master.core.job_model import Checkpoint, SuspendLevel
from msgspec.structs import replace


class DiskDrive(Drive):
    """Nodes that do not see the storage, but keep checkpoints. `proved`: those that see it."""

    proved: frozenset[str] = frozenset()
    can_keep: bool = True

    def join(self, node: str) -> None:
        capabilities = {"disk_checkpoints": "yes"} if self.can_keep else {}
        answer = self.step(
            OpenSession(node, f"machine-{node}", SERVER, peer_address=f"{node}:1", capabilities=capabilities)
        )
        assert isinstance(answer, SessionAnswer)
        self.sessions[node] = answer.session
        self.observe(node, version=0)

    def observe(self, node: str, *gangs: ObservedGang, version: int | None = None, **_: object) -> object:  # type: ignore[override]
        self.observations += 1
        applied = self.state.desired.of(node).version if version is None else version
        proved = node in self.proved
        return self.step(Observe(node, self.sessions[node], self.observations, applied, gangs, storage_proved=proved))


def suspended_on(drive: Drive, *nodes: str) -> int:
    """A job that rests on a checkpoint of its node's disk; `nodes`: those that have it, by default its own."""
    number = drive.submit(job_of(4))
    drive.start(number)
    drive.runs(number)
    gang = drive.state.gangs[drive.job(number).epoch]
    node = gang.nodes[0]
    drive.step(SuspendJob(number, SuspendLevel.CHECKPOINT, "ann"))
    gang = drive.state.gangs[gang.epoch]
    checkpoint = Checkpoint(40, gang.epoch, f"checkpoints/40-{gang.epoch}", 1, 1.0, nodes or (node,))
    report = drive.report(gang, ObservedPhase.PARKED, 40)
    drive.observe(node, replace(report, level=SuspendLevel.CHECKPOINT, checkpoint=checkpoint))
    drive.observe(node)
    assert drive.job(number).state is JobState.SUSPENDED
    return number


@pytest.mark.parametrize(
    ("proved", "can_keep", "on_nodes"),
    [((), True, True), (("n1",), True, False), ((), False, False)],
    ids=["no node sees the storage", "its node sees the storage", "a daemon of old"],
)
def test_a_gang_keeps_checkpoints_on_disks_where_its_nodes_see_no_storage(
    proved: tuple[str, ...], can_keep: bool, on_nodes: bool
) -> None:
    kind = type("One", (DiskDrive,), {"proved": frozenset(proved), "can_keep": can_keep})
    drive = kind()
    number = drive.submit(job_of(4))
    drive.start(number)
    gang = drive.state.gangs[drive.job(number).epoch]
    assert gang.on_nodes is on_nodes
    (desired,) = drive.state.desired.of("n1").gangs
    assert desired.on_nodes is on_nodes


def test_a_job_starts_on_another_node_from_the_disk_that_has_its_checkpoint() -> None:
    drive = DiskDrive(nodes=2)
    number = suspended_on(drive)
    (home,) = drive.job(number).checkpoint.nodes  # type: ignore[union-attr]
    assert [claim.node for places in drive.places(number) for claim in places] == ["n1", "n2"]
    assert node_checkpoints.away(drive.state.nodes, drive.job(number)) is None
    assert [node.name for node in node_checkpoints.sources(drive.state.nodes, [home, "gone"])] == [home]


def test_a_checkpoint_names_only_nodes_of_the_cluster() -> None:
    drive = DiskDrive(nodes=2)
    number = suspended_on(drive, "n2", "n7")
    assert drive.job(number).checkpoint.nodes == ("n2",)  # type: ignore[union-attr]


def test_a_copy_that_is_made_after_the_publication_is_recorded_too() -> None:
    drive = DiskDrive(nodes=2)
    number = drive.submit(job_of(4))
    drive.start(number)
    drive.runs(number)
    gang = drive.state.gangs[drive.job(number).epoch]
    (home,) = gang.nodes
    other = "n2" if home == "n1" else "n1"
    alone = Checkpoint(40, gang.epoch, f"checkpoints/40-{gang.epoch}", 1, 1.0, (home,))
    copied = replace(alone, nodes=(home, other))
    # A daemon that has restarted reports its own disk only.
    for reported, recorded in ((alone, alone), (copied, copied), (alone, copied)):
        drive.observe(home, replace(drive.report(gang, ObservedPhase.RUNNING, 40), checkpoint=reported))
        assert drive.job(number).checkpoint == recorded


def test_a_copy_that_a_daemon_has_fetched_is_recorded_too() -> None:
    drive = DiskDrive(nodes=2)
    number = suspended_on(drive)
    job = drive.job(number)
    assert job.checkpoint is not None
    (home,) = job.checkpoint.nodes
    other = "n2" if home == "n1" else "n1"
    before = replace(job.checkpoint, step=20, path=f"checkpoints/20-{job.checkpoint.epoch}")
    drive.state.put_job(replace(job, checkpoint_before=before))
    found = [job.checkpoint.path, before.path, "checkpoints/9-9"]
    drive.step(NoteCopies(other, drive.sessions[other], tuple((number, path) for path in found)))
    job = drive.job(number)
    assert [one.nodes for one in (job.checkpoint, job.checkpoint_before)] == [(home, other)] * 2  # type: ignore[union-attr]
    assert not any(node_checkpoints.is_new_copy(job, path, other) for path in found)
    # Without its first node the job starts from there.
    drive.state.put_node(replace(drive.state.nodes[home], silent=True))
    assert node_checkpoints.away(drive.state.nodes, job) is None


def test_the_copy_of_a_checkpoint_on_storage_changes_nothing() -> None:
    drive = DiskDrive(nodes=2)
    number = suspended_on(drive)
    job = drive.job(number)
    job = replace(job, checkpoint=replace(job.checkpoint, nodes=()))  # type: ignore[type-var]
    assert not node_checkpoints.is_new_copy(job, job.checkpoint.path, "n2")  # type: ignore[union-attr]


def test_a_daemon_is_given_also_the_addresses_of_nodes_that_are_away() -> None:
    drive = DiskDrive(nodes=2)
    nodes = drive.state.nodes
    for name in ("n1", "n2"):
        drive.state.put_node(replace(nodes[name], stream_address=f"{name}:2", silent=name == "n1"))
    assert node_checkpoints.streams_of(nodes, ["n1", "n2", "n9"]) == ["n2:2", "n1:2"]
    # Never none, by which it would look on storage.
    drive.state.put_node(replace(nodes["n1"], stream_address=""))
    assert node_checkpoints.streams_of(nodes, ["n1"]) == [""]


def test_while_no_node_has_it_the_job_waits_and_why_says_for_which() -> None:
    drive = DiskDrive(nodes=2)
    number = suspended_on(drive)
    (home,) = drive.job(number).checkpoint.nodes  # type: ignore[union-attr]
    drive.state.put_node(replace(drive.state.nodes[home], silent=True))
    refusal = node_checkpoints.away(drive.state.nodes, drive.job(number))
    assert refusal is not None
    assert refusal.reason is Reason.CHECKPOINT_AWAY
    assert home in refusal.message
    drive.state.put_job(replace(drive.job(number), state=JobState.PENDING))
    assert [one.reason for one in explain(drive.state, number, drive.now).blockers][:1] == [Reason.CHECKPOINT_AWAY]


def test_a_job_whose_checkpoints_went_with_their_nodes_starts_from_what_is_left() -> None:
    drive = DiskDrive(nodes=2)
    number = suspended_on(drive)
    job = drive.job(number)
    assert job.checkpoint is not None
    gone, here = replace(job.checkpoint, nodes=("n9",)), replace(job.checkpoint, step=20, nodes=("n2",))
    nodes = drive.state.nodes
    assert (
        node_checkpoints.without_removed(nodes, replace(job, checkpoint=gone, checkpoint_before=here)).checkpoint
        == here
    )
    assert (
        node_checkpoints.without_removed(nodes, replace(job, checkpoint=gone, checkpoint_before=gone)).checkpoint
        is None
    )
    assert node_checkpoints.without_removed(nodes, replace(job, checkpoint=here)).checkpoint == here


def test_a_copy_goes_to_another_node_that_can_keep_it() -> None:
    drive = DiskDrive(nodes=4)
    nodes = drive.state.nodes

    def names(members: list[str], copies: int) -> list[str]:
        return [node.name for node in node_checkpoints.copy_candidates(nodes, members, copies)]

    assert names(["n2", "n3"], 2) == ["n4", "n1"]
    assert names(["n2"], 1) == []
    drive.state.put_node(replace(nodes["n4"], lost=True))
    assert names(["n2", "n3"], 2) == ["n1"]


def test_what_no_job_starts_from_may_go() -> None:
    drive = DiskDrive(nodes=2)
    job = drive.job(suspended_on(drive))
    newest = job.checkpoint
    assert newest is not None
    before = replace(newest, step=30, path=f"checkpoints/30-{newest.epoch}")
    job = replace(job, epoch=newest.epoch, checkpoint_before=before)

    def may_go(path: str, now: float = 0.0, kept_s: float | None = 100.0) -> bool:
        return node_checkpoints.may_go(job, path, now, kept_s)

    # Of the present attempt, too: nothing else removes copies from other nodes while it lasts.
    assert may_go(f"checkpoints/10-{newest.epoch}")
    assert not may_go(before.path)
    assert not may_go(newest.path)
    # The master may not have recorded it yet.
    assert not may_go(f"checkpoints/90-{newest.epoch}")
    job = replace(job, epoch=newest.epoch + 1)
    # Of an attempt that was cut off, whose report may still come.
    assert not may_go(f"checkpoints/90-{newest.epoch}")
    assert not may_go(newest.path)
    assert not may_go(f"checkpoints/5-{job.epoch}")
    assert may_go(f"checkpoints/5-{newest.epoch}")
    assert not may_go("checkpoints/another")
    job = replace(job, state=JobState.SUCCEEDED, end_time=1_000.0)
    assert not may_go(newest.path, now=1_050.0)
    assert may_go(newest.path, now=1_101.0)
    assert not may_go(newest.path, now=1e12, kept_s=None)
