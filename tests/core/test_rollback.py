"""A restored master adopts, quarantines or ends each gang that nodes report."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from core.drive import ALL_LEVELS, GIB, Drive, job_of
from ganger.cluster.resources import Claim
from ganger.job_state import JobState
from ganger_master.core.answers import JobAnswer, Refused
from ganger_master.core.commands import AdoptQuarantined, NoteEnds, ObservedGang, OpenStore
from ganger_master.core.explain import explain
from ganger_master.core.gang_model import Gang, GangIntent, ObservedPhase, Restore, StoredOrder
from ganger_master.core.job_model import SuspendLevel
from ganger_master.core.node_model import Stray
from ganger_master.core.settings import CoreSettings
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

NODES = ("n1", "n2", "n3")


@dataclass
class Found:
    """A gang as its nodes report it after the restore."""

    job: int
    uid: str
    epoch: int
    masks: dict[str, int]
    intent: GangIntent = GangIntent.RUN
    phase: ObservedPhase = ObservedPhase.RUNNING
    sequence: int = 1
    is_sliced: bool = False
    # Nodes of the gang that report nothing of it.
    missing: tuple[str, ...] = ()

    def on(self, node: str) -> ObservedGang:
        mask, gpus = self.masks[node], sum(mask.bit_count() for mask in self.masks.values())
        tasks = mask.bit_count()
        claim = Claim(node, mask, (2_000 * tasks, 0), 4 * GIB * tasks, tasks=(tasks,))
        told = StoredOrder(
            self.sequence, self.intent, claim, tuple(self.masks), spec=job_of(gpus), restore=Restore(),
            level=SuspendLevel.OFFLOAD if self.intent is GangIntent.PARK else SuspendLevel.NONE,
            is_sliced=self.is_sliced,
        )  # fmt: skip
        return ObservedGang(
            self.job, self.uid, self.epoch, self.phase, self.sequence, device_mask=mask, told=told,
            level=told.level if self.phase is ObservedPhase.PARKED else SuspendLevel.NONE,
            stop_step=3 if self.phase is ObservedPhase.PARKED else 0, capabilities=ALL_LEVELS,
        )  # fmt: skip

    @property
    def nodes(self) -> list[str]:
        return [node for node in self.masks if node not in self.missing]


def restored(drive: Drive, gangs: list[Found]) -> None:
    """The database goes back to what `drive` is now, and the nodes report these gangs."""
    drive.step(OpenStore("store", is_restored=True))
    for node in NODES:
        drive.join(node)
    for node in NODES:
        drive.observe(node, *[gang.on(node) for gang in gangs if node in gang.nodes], version=0)
    drive.now += 60.0
    drive.step(NoteEnds({}))
    assert drive.state.counters.restoring is None


def strays(drive: Drive, gang: Found) -> dict[str, Stray]:
    return {
        node: stray
        for node in NODES
        for stray in drive.state.nodes[node].strays
        if (stray.uid, stray.epoch) == (gang.uid, gang.epoch)
    }


def known(drive: Drive, gang: Found) -> Gang | None:
    one = drive.state.gangs.get(gang.epoch)
    return one if one is not None and drive.job(one.job).uid == gang.uid else None


def settings() -> CoreSettings:
    return CoreSettings(restored_wait_seconds=5.0)


@st.composite
def reports(draw: st.DrawFn) -> list[Found]:
    """Gangs of jobs in the database (1 and 2 run, 3 waits) and of others; up to two of each."""
    gangs = []
    for job, uid in ((1, "uid-0"), (2, "uid-1"), (3, "uid-2"), (4, "uid-3"), (3, "uid-other")):
        for epoch in draw(st.lists(st.integers(1, 9), max_size=2, unique=True)):
            if any(one.epoch == epoch for one in gangs):
                continue
            nodes = draw(st.lists(st.sampled_from(NODES), min_size=1, max_size=2, unique=True))
            gangs.append(
                Found(
                    job, uid, epoch,
                    {node: draw(st.integers(1, 15)) for node in nodes},
                    draw(st.sampled_from(
                        [GangIntent.RUN, GangIntent.RUN, GangIntent.PARK, GangIntent.STOP, GangIntent.HAND_OVER]
                    )),
                    draw(st.sampled_from([ObservedPhase.RUNNING, ObservedPhase.STARTING, ObservedPhase.PARKED])),
                    draw(st.integers(1, 3)), draw(st.integers(0, 4)) == 0,
                    tuple(nodes[1:]) if draw(st.integers(0, 4)) == 0 else (),
                )
            )  # fmt: skip
    return gangs


@given(reports())
def test_each_reported_gang_has_one_verdict_and_no_device_of_a_quarantined_one_is_free(gangs: list[Found]) -> None:
    drive = Drive(nodes=3, settings=settings())
    numbers = [drive.submit(job_of(2)) for _ in range(3)]
    for number in numbers[:2]:
        drive.start(number)
        drive.runs(number)
    restored(drive, gangs)
    for gang in gangs:
        left, taken = strays(drive, gang), known(drive, gang)
        for node in gang.nodes:
            piece = taken.piece(node) if taken is not None else None
            # Exactly one of: kept or adopted, quarantined, ordered to stop.
            assert (piece is not None and not piece.gone) != (node in left), (gang, node)
        if any(stray.quarantined for stray in left.values()):
            assert all(stray.quarantined for stray in left.values())
            assert taken is None
            for node in left:
                assert not drive.state.rows[node].free_mask & gang.masks[node]
    for job in drive.state.jobs.values():
        _require_no_contradiction(drive, [one for one in gangs if one.uid == job.uid], job.epoch)
    assert drive.state.counters.next_epoch > max([gang.epoch for gang in gangs], default=0)


def _require_no_contradiction(drive: Drive, gangs: list[Found], epoch: int) -> None:
    """The gang that a job has is the newest that may step, is there with all its parts, and has its devices alone."""
    adopted = {(row.kind, str(row.figures.get("epoch"))) for row in drive.told}
    found = [one for one in gangs if one.epoch == epoch]
    if not found or ("gang_adopted", str(epoch)) not in adopted:
        return
    (gang,) = found
    assert gang.intent is not GangIntent.STOP
    assert not gang.missing
    assert not gang.is_sliced
    assert all(one.epoch <= epoch for one in gangs if one.intent is not GangIntent.STOP)
    for piece in drive.state.gangs[epoch].pieces:
        claim, node = piece.held, piece.claim.node
        assert claim is not None
        others = [one for one in drive.state.gangs.held_on(node) if one is not claim]
        assert not any(claim.device_mask & one.device_mask for one in others)


# -- gangs over several nodes, and gangs with time slices --------------------------------------------------------------


def spread(**more: object) -> Found:
    return replace_found(Found(7, "uid-late", 9, {"n1": 0b11, "n2": 0b1100}), **more)


def replace_found(gang: Found, **more: object) -> Found:
    for name, value in more.items():
        setattr(gang, name, value)
    return gang


def adopt(drive: Drive, gang: Found) -> object:
    return drive.step(AdoptQuarantined(gang.uid, gang.epoch))


def test_a_gang_over_two_nodes_is_adopted_with_both_parts() -> None:
    drive, gang = Drive(nodes=3, settings=settings()), spread()
    restored(drive, [gang])
    assert adopt(drive, gang) == JobAnswer(7)
    assert drive.state.gangs[9].nodes == ("n1", "n2")
    assert not strays(drive, gang)
    assert drive.state.rows["n1"].free_mask == 0b1100
    assert drive.state.rows["n2"].free_mask == 0b0011


def test_a_report_without_descriptions_takes_nothing_from_an_earlier_one() -> None:
    """A daemon describes an order only when it is asked to."""
    drive, gang = Drive(nodes=3, settings=settings()), spread()
    drive.step(OpenStore("store", is_restored=True))
    for node in NODES:
        drive.join(node)
        drive.observe(node, *([gang.on(node)] if node in gang.nodes else []), version=0)
    for node in gang.nodes:
        drive.observe(node, replace(gang.on(node), told=None), version=0)
    drive.now += 60.0
    drive.step(NoteEnds({}))
    assert adopt(drive, gang) == JobAnswer(7)
    assert drive.state.gangs[9].nodes == ("n1", "n2")


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"missing": ("n2",)}, "its part on n2 is not there"),
        ({"is_sliced": True}, "it takes turns with others on its devices"),
        ({"intent": GangIntent.STOP}, "it was ordered to stop"),
    ],
)
def test_a_gang_that_cannot_be_adopted_whole_is_not_adopted_in_part(more: dict[str, object], why: str) -> None:
    drive, gang = Drive(nodes=3, settings=settings()), spread(**more)
    restored(drive, [gang])
    answer = adopt(drive, gang)
    assert isinstance(answer, Refused)
    assert (answer.reason, why in answer.message) == ("ADOPTION_REFUSED", True), answer.message
    assert all(stray.quarantined for stray in strays(drive, gang).values())
    assert 7 not in drive.state.jobs


def test_a_gang_is_not_adopted_where_another_quarantined_gang_has_one_of_its_devices() -> None:
    drive, gang = Drive(nodes=3, settings=settings()), spread()
    restored(drive, [gang, Found(8, "uid-beside", 11, {"n2": 0b0100})])
    answer = adopt(drive, gang)
    assert isinstance(answer, Refused)
    assert "epoch 11 of uid-beside, quarantined too, has a device of it on nodes/n2" in answer.message


def test_a_known_gang_that_got_time_slices_since_the_backup_is_quarantined() -> None:
    drive = Drive(nodes=3, settings=settings())
    number = drive.submit(job_of(2))
    epoch = drive.start(number)
    drive.runs(number)
    ((node, mask),) = [(piece.claim.node, piece.claim.device_mask) for piece in drive.state.gangs[epoch].pieces]
    gang = Found(number, drive.job(number).uid, epoch, {node: mask}, is_sliced=True)
    restored(drive, [gang])
    assert strays(drive, gang)[node].quarantined
    assert drive.job(number).state is JobState.PENDING


def test_the_older_of_two_gangs_of_an_unknown_job_is_stopped() -> None:
    """It is frozen on a node that was lost: the next answer would let it go on beside its successor."""
    drive = Drive(nodes=3, settings=settings())
    older, newer = Found(7, "uid-late", 5, {"n1": 1}), Found(7, "uid-late", 6, {"n2": 1})
    restored(drive, [older, newer])
    assert not strays(drive, older)["n1"].quarantined
    assert strays(drive, newer)["n2"].quarantined


def test_the_older_of_two_gangs_of_a_known_job_that_are_newer_than_the_backup_is_stopped() -> None:
    drive = Drive(nodes=3, settings=settings())
    number = drive.submit(job_of(2))
    uid = drive.job(number).uid
    older, newer = Found(number, uid, 5, {"n1": 3}), Found(number, uid, 6, {"n2": 3})
    restored(drive, [older, newer])
    assert drive.job(number).epoch == 6
    assert not strays(drive, older)["n1"].quarantined


def test_a_gang_that_obeys_a_later_order_than_the_database_knows_is_given_a_new_one() -> None:
    """Its node reports after all was settled without it."""
    drive = Drive(nodes=3, settings=settings())
    number = drive.submit(job_of(2))
    epoch = drive.start(number)
    drive.runs(number)
    (node,) = drive.state.gangs[epoch].nodes
    reported = drive.reported(drive.state.gangs[epoch], node)
    assert reported is not None
    drive.observe(node, replace(reported, master_sequence=reported.master_sequence + 5))
    assert drive.state.gangs[epoch].master_sequence > reported.master_sequence + 5


def test_why_of_a_job_that_the_restore_suspended_names_the_restore() -> None:
    drive = Drive(nodes=3, settings=settings())
    number = drive.submit(job_of(2))
    epoch = drive.start(number)
    drive.runs(number)
    (node,) = drive.state.gangs[epoch].nodes
    gang = Found(number, drive.job(number).uid, 9, {node: 3}, GangIntent.PARK, ObservedPhase.PARKED)
    restored(drive, [gang])
    assert drive.job(number).state is JobState.SUSPENDED
    told = explain(drive.state, number, drive.now).assumption
    assert told.startswith("it was found at rest after a restore"), told
