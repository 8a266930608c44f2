"""A restored master adopts, quarantines or ends each gang that nodes report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import pytest
from core.drive import ALL_LEVELS, GIB, Drive, job_of
from ganger.cluster.resources import Claim
from ganger.job_state import JobState
from ganger_master.core.answers import Done, JobAnswer, Refused
from ganger_master.core.commands import (
    AdoptQuarantined,
    CancelJob,
    EndQuarantined,
    FinishedGang,
    Marks,
    NoteEnds,
    ObservedGang,
    OpenStore,
)
from ganger_master.core.explain import explain
from ganger_master.core.gang_model import Gang, GangIntent, ObservedPhase, Outcome, OutcomeKind, Restore, StoredOrder
from ganger_master.core.job_model import Checkpoint, SuspendLevel
from ganger_master.core.node_model import Stray
from ganger_master.core.preconditions import no_job
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
    # Its devices that other gangs may have, too.
    shared_mask: int = 0
    # How it ended, in the phase ENDED; its daemons then describe no order.
    outcome: OutcomeKind = OutcomeKind.NONE

    def on(self, node: str) -> ObservedGang:
        mask, gpus = self.masks[node], sum(mask.bit_count() for mask in self.masks.values())
        tasks = mask.bit_count()
        claim = Claim(node, mask, (2_000 * tasks, 0), 4 * GIB * tasks, tasks=(tasks,), shared_mask=self.shared_mask)
        told = StoredOrder(
            self.sequence, self.intent, claim, tuple(self.masks), spec=job_of(gpus), restore=Restore(),
            level=SuspendLevel.OFFLOAD if self.intent is GangIntent.PARK else SuspendLevel.NONE,
            is_sliced=self.is_sliced,
        )  # fmt: skip
        return ObservedGang(
            self.job, self.uid, self.epoch, self.phase, self.sequence, device_mask=mask,
            newest_order=None if self.phase is ObservedPhase.ENDED else told, outcome=Outcome(self.outcome),
            level=told.level if self.phase is ObservedPhase.PARKED else SuspendLevel.NONE,
            stop_step=3 if self.phase is ObservedPhase.PARKED else 0, capabilities=ALL_LEVELS,
        )  # fmt: skip

    @property
    def nodes(self) -> list[str]:
        return [node for node in self.masks if node not in self.missing]


def restored(drive: Drive, gangs: list[Found], finished: Mapping[str, FinishedGang] = MappingProxyType({})) -> None:
    """The database goes back to what `drive` is now, and the nodes report these gangs. `finished`: by node, a gang
    that it has a record of."""
    drive.step(OpenStore("store", is_restored=True))
    for node in NODES:
        drive.join(node)
    for node in NODES:
        ended = (finished[node],) if node in finished else ()
        drive.observe(node, *[gang.on(node) for gang in gangs if node in gang.nodes], version=0, finished=ended)
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
    return CoreSettings(restored_wait_s=5.0)


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
    adopted = {(row.kind, str(row.figures.get("epoch"))) for row in drive.history}
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
        drive.observe(node, replace(gang.on(node), newest_order=None), version=0)
    drive.now += 60.0
    drive.step(NoteEnds({}))
    assert adopt(drive, gang) == JobAnswer(7)
    assert drive.state.gangs[9].nodes == ("n1", "n2")


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"missing": ("n2",)}, "its part on n2 is not there"),
        ({"is_sliced": True}, "it is time-sliced with other jobs on its devices"),
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


def with_a_quarantined_gang() -> tuple[Drive, Found]:
    """A restore found a gang that the database knows, in time slices of which it knows nothing."""
    drive = Drive(nodes=3, settings=settings())
    number = drive.submit(job_of(2))
    epoch = drive.start(number)
    drive.runs(number)
    ((node, mask),) = [(piece.claim.node, piece.claim.device_mask) for piece in drive.state.gangs[epoch].pieces]
    gang = Found(number, drive.job(number).uid, epoch, {node: mask}, is_sliced=True)
    restored(drive, [gang])
    assert strays(drive, gang)[node].quarantined
    return drive, gang


def test_a_known_gang_that_got_time_slices_since_the_backup_is_quarantined() -> None:
    drive, gang = with_a_quarantined_gang()
    number = gang.job
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


# -- what the database does not know of gangs that it has, or has quarantined ------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "state"),
    [(OutcomeKind.DONE, JobState.SUCCEEDED), (OutcomeKind.UNKNOWN, JobState.SUSPENDED)],
)
def test_a_job_whose_quarantined_gang_has_ended_since_the_backup_does_not_run_again(
    outcome: OutcomeKind, state: JobState
) -> None:
    """The database gave the epoch itself, lost it in an earlier restore, and goes back a second time."""
    drive, gang = with_a_quarantined_gang()
    number = gang.job
    restored(drive, [replace_found(gang, phase=ObservedPhase.ENDED, outcome=outcome)])
    assert drive.job(number).state is state
    assert not strays(drive, gang)


def test_a_gang_that_is_stopped_after_a_restore_still_shares_its_devices_with_a_gang_that_joined_it_since() -> None:
    """Its job has moved on, and waits for the first step before its source goes."""
    drive = Drive(nodes=3, settings=settings())
    spec = replace(job_of(2), gpu_memory_bytes=GIB // 4)
    moved, beside = drive.submit(spec), drive.submit(spec)
    epoch = drive.start(moved)
    drive.runs(moved)
    ((node, mask),) = [(piece.claim.node, piece.claim.device_mask) for piece in drive.state.gangs[epoch].pieces]
    elsewhere = next(name for name in NODES if name != node)
    uid = drive.job(moved).uid
    source = Found(moved, uid, epoch, {node: mask}, GangIntent.HAND_OVER, ObservedPhase.PARKED, 3, shared_mask=mask)
    joined = Found(beside, drive.job(beside).uid, 8, {node: mask}, shared_mask=mask)
    restored(drive, [source, joined, Found(moved, uid, 9, {elsewhere: mask})])
    left = drive.state.gangs[epoch].pieces[0]
    assert drive.state.gangs[epoch].intent is GangIntent.STOP
    assert left.claim.shared_mask == mask
    assert (drive.job(moved).epoch, drive.job(beside).epoch) == (9, 8)


def test_a_part_that_has_ended_since_the_backup_keeps_no_devices_from_a_gang_that_has_them_now() -> None:
    """The other part lives on a node that was cut off, so the gang is not over."""
    drive = Drive(nodes=3, settings=settings())
    broken, later = drive.submit(job_of(8)), drive.submit(job_of(2))
    epoch = drive.start(broken)
    drive.runs(broken)
    stopped, alive = drive.state.gangs[epoch].nodes
    uid = drive.job(broken).uid
    left = Found(broken, uid, epoch, {alive: 0b1111, stopped: 0b1111}, missing=(stopped,))
    taken = Found(later, drive.job(later).uid, 9, {stopped: 0b11})
    restored(drive, [left, taken], {stopped: FinishedGang(broken, uid, epoch, Outcome(OutcomeKind.STOPPED), 2)})
    assert drive.job(later).epoch == 9
    assert drive.state.gangs[epoch].intent is GangIntent.STOP
    assert drive.job(broken).ending is JobState.PENDING
    drive.observe(alive)
    assert (drive.job(broken).state, drive.job(broken).epoch) == (JobState.PENDING, 0)


@pytest.mark.parametrize("before", [GangIntent.HAND_OVER, GangIntent.RUN])
@pytest.mark.parametrize(
    ("kind", "shows", "becomes"),
    [
        (OutcomeKind.DONE, "", JobState.SUCCEEDED),
        (OutcomeKind.YIELDED, "", JobState.SUSPENDED),
        (OutcomeKind.UNKNOWN, "a checkpoint", JobState.SUSPENDED),
        (OutcomeKind.UNKNOWN, "a step", JobState.SUSPENDED),
        (OutcomeKind.FAILED, "a step", JobState.FAILED),
        (OutcomeKind.UNKNOWN, "", JobState.HOLDING),
    ],
)
def test_a_gang_does_not_run_on_if_a_later_one_of_its_job_has_stepped(
    before: GangIntent, kind: OutcomeKind, shows: str, becomes: JobState
) -> None:
    """The earlier gang is the source of a move, or came back with a node that was lost; the later one has ended. If it
    did no step, the job keeps the earlier one."""
    drive = Drive(nodes=3, settings=settings())
    number = drive.submit(job_of(2))
    uid = drive.job(number).uid
    phase = ObservedPhase.RUNNING if before is GangIntent.RUN else ObservedPhase.PARKED
    earlier = Found(number, uid, 5, {"n1": 0b11}, before, phase, 3)
    checkpoint = Checkpoint(20, 6, "20-6") if shows == "a checkpoint" else None
    end = FinishedGang(number, uid, 6, Outcome(kind), 1, checkpoint, has_stepped=shows == "a step")
    restored(drive, [earlier], {"n2": end})
    assert drive.job(number).state is becomes
    assert drive.job(number).epoch == (5 if becomes is JobState.HOLDING else 0)
    assert all(not stray.quarantined for stray in strays(drive, earlier).values())


def test_a_part_of_an_ended_quarantine_keeps_its_devices_while_it_lives() -> None:
    """Its other part is reported as ended once more, before its daemon has the acknowledgement, and the operator ends
    that, too."""
    drive, gang = Drive(nodes=3, settings=settings()), spread()
    restored(drive, [gang])
    drive.step(EndQuarantined(gang.uid, gang.epoch))
    ended = replace(gang.on("n2"), phase=ObservedPhase.ENDED, outcome=Outcome(OutcomeKind.STOPPED))
    drive.observe("n2", ended)
    drive.observe("n2", ended)
    drive.step(EndQuarantined(gang.uid, gang.epoch))
    assert drive.state.rows["n1"].free_mask == 0b1100
    drive.observe("n1")
    assert drive.state.rows["n1"].free_mask == 0b1111


def refused_text(drive: Drive, number: int) -> str:
    answer = drive.step(CancelJob(number))
    assert isinstance(answer, Refused)
    assert answer.reason == "JOB_NOT_FOUND"
    return answer.message


def test_a_job_that_the_copy_lacks_is_said_to_be_in_quarantine_where_it_is_and_not_to_have_ended() -> None:
    drive, gang = Drive(nodes=3, settings=settings()), spread()
    assert "there is no jobs/7" in refused_text(drive, 7)
    restored(drive, [gang])
    there = "jobs/7 is not in the database, but its gang of epoch 9 is on n1, n2"
    end = "`ganger nodes quarantine end uid-late-9`"
    assert refused_text(drive, 7).startswith(f"{there}, in quarantine: ")
    assert refused_text(drive, 7).endswith(f"ends it by {end}")
    assert drive.step(EndQuarantined("uid-late", 9)) == Done()
    assert refused_text(drive, 7) == f"{there}, where it is being ended"
    for node in NODES:
        drive.observe(node)
    assert "the copy that was restored is older than the job" in refused_text(drive, 7)
    assert "older than the job" in refused_text(drive, 3), "it was submitted after the backup, and never ran"
    assert "there is no jobs/8" in refused_text(drive, 8)
    assert drive.submit(job_of(1)) == 8


def test_while_nodes_have_not_reported_it_is_open_whether_a_job_that_the_copy_lacks_runs() -> None:
    drive = Drive(nodes=3, settings=settings())
    drive.step(OpenStore("store", marks=Marks("store", next_job=4), is_restored=True))
    assert "Whether it runs is known once all nodes have reported" in no_job(drive.state, 3).refused.message
