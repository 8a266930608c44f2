"""Disk and network bandwidth in the master: what time-sliced and parked gangs keep of it, and what is stored."""

from __future__ import annotations

import pytest
from core import drive as drives
from core.drive import job_of
from core.test_time_slices import Turns, blamed
from ganger.cluster.refusals import Reason
from ganger.cluster.resources import Bandwidth, TaskShape
from ganger_master.core.answers import Refused
from ganger_master.core.commands import MoveJob, OpenSession, RetuneJob
from ganger_master.core.gang_model import ObservedPhase
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.state_image import Image, image_of, state_of
from msgspec import json
from msgspec.structs import replace

DECLARED = replace(drives.SERVER, name="io", dimensions={"disk_mb_per_s": 1_000.0, "net_mb_per_s": 1_000.0})


@pytest.fixture(autouse=True)
def _nodes_declare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.test_time_slices.SERVER", DECLARED)


def naming(gpus: int, disk: int) -> JobSpec:
    spec = job_of(gpus)
    (role,) = spec.roles
    return replace(spec, roles=(replace(role, shape=replace(role.shape, bandwidth=(disk, 0))),))


def free(drive: Turns, node: str = "n1") -> Bandwidth:
    return drive.state.rows[node].free_bandwidth


def test_a_time_sliced_gang_keeps_its_bandwidth_and_another_comes_only_beside_it() -> None:
    drive = Turns()
    host = drive.run(naming(4, 150))
    assert free(drive) == (400, 1_000)
    greedy = drive.submit(naming(4, 101))
    changes = [drive.row(host, 0), drive.row(greedy, 1, claims=_as_named(drive, greedy, host))]
    assert blamed(drive.propose(*changes)).reason is Reason.DISK
    modest = drive.submit(naming(4, 100))
    changes = [drive.row(host, 0), drive.row(modest, 1, claims=_as_named(drive, modest, host))]
    assert drive.propose(*changes) == [None, None]
    drive.runs(modest)
    assert free(drive) == (0, 1_000), "both, whichever has the slice"
    drive.seen(host, drive.job(host).epoch, ObservedPhase.PARKED, stop_step=3)
    assert free(drive) == (0, 1_000)


def _as_named(drive: Turns, guest: int, host: int) -> tuple[drives.Claim, ...]:
    (role,) = drive.job(guest).spec.roles
    bandwidth = tuple([role.tasks * amount for amount in role.shape.bandwidth])
    return drive.place(guest, host, bandwidth=bandwidth)


def test_a_gang_moves_only_where_its_bandwidth_is_and_holds_it_at_both_ends_meanwhile() -> None:
    drive = Turns(nodes=2)
    host, moved = drive.run(naming(3, 250)), drive.run(naming(1, 300))
    (held,) = drive.state.gangs[drive.job(moved).epoch].nodes
    assert (free(drive, "n1"), free(drive, "n2"), held) == ((250, 1_000), (700, 1_000), "n2"), "n1 has a GPU left"
    refused = drive.step(MoveJob(moved, ("n1",)))
    assert isinstance(refused, Refused)
    assert "there is no room for it on nodes/n1" in refused.message
    other = drive.run(naming(1, 250))
    assert (free(drive, "n1"), free(drive, "n2")) == ((250, 1_000), (450, 1_000))
    assert not isinstance(drive.step(MoveJob(other, ("n1",))), Refused)
    assert (free(drive, "n1"), free(drive, "n2")) == ((0, 1_000), (450, 1_000))
    assert host == 1


def test_other_cores_leave_the_bandwidth_as_it_is() -> None:
    drive = Turns()
    number = drive.run(naming(2, 200))
    assert not isinstance(drive.step(RetuneJob(number, 3_000)), Refused)
    (claim,) = drive.state.gangs[drive.job(number).epoch].claims
    assert (sum(claim.millicores), claim.bandwidth) == (6_000, (400, 0))


def test_tasks_of_earlier_versions_name_none_and_what_is_held_outlives_a_restart() -> None:
    assert json.decode(b'{"gpus":1,"millicores":2000,"memory_bytes":4}', type=TaskShape) == TaskShape(1, 2_000, 4)
    drive = Turns()
    drive.run(naming(2, 200))
    again = state_of(json.decode(json.encode(image_of(drive.state)), type=Image))
    assert again.view.row("n1").free_bandwidth == free(drive) == (600, 1_000)


@pytest.mark.parametrize("amount", [float("nan"), float("inf"), -1.0, 1e13])
def test_a_node_that_declares_what_cannot_be_is_not_accepted(amount: float) -> None:
    kind = replace(DECLARED, name="odd", dimensions={"disk_mb_per_s": amount})
    answer = Turns().step(OpenSession("n9", "machine-n9", kind))
    assert isinstance(answer, Refused)
