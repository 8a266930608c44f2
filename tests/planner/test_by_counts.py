"""Passes that find places by counts, against the same passes in a room."""

from __future__ import annotations

from dataclasses import fields
from dataclasses import replace as replaced

import numpy as np
import pytest
from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.claims import FreeDevices, is_counted
from ganger.cluster.preferences import BY_COUNTS
from ganger.cluster.resources import ConfigurationSet, GangShape, Locality, LocalityLevel, NodeRow, Role, TaskShape
from ganger.cluster.search import PlacementRequest
from ganger.cluster.view import View
from ganger.job_state import JobState
from ganger_master.core.gang_model import Gang, GangIntent, GangPhase, GangRole, Piece
from ganger_master.core.job_model import JobRecord, SuspendLevel
from ganger_master.core.job_spec import JobSpec
from ganger_master.planner.context import PlanDraft, PlannerSettings, context_of
from ganger_master.planner.device_groups import Claims
from ganger_master.planner.gang_fitting import GangFitting
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.optimus_stage import _yielding
from ganger_master.planner.plan import plan
from ganger_master.policies import policy_named
from ganger_master.policies.order_registry import ORDERS
from ganger_master.policies.orders import Capacity
from ganger_master.policies.placements import PLACEMENTS, PlacementPreference
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.clusters import gang
from msgspec.structs import replace

NOW = 1_000_000.0
FIFO = policy_named("fifo")
IN_A_ROOM = replaced(BY_COUNTS, counts=None)
SIZES = (4, 12, 64)

# Devices of each node, those that are free, and whether it takes gangs.
nodes = st.lists(st.tuples(st.sampled_from(SIZES), st.integers(0, (1 << 64) - 1), st.booleans()), min_size=1)
Asked = tuple[int, float, bool, bool]
Step = Asked | list[Asked] | None
# Devices, seconds since it began to run or wait, whether it may be stopped, whether it asks for more than devices.
asked = st.tuples(st.integers(1, 24), st.floats(1.0, 900_000.0), st.booleans(), st.sampled_from([False] * 5 + [True]))


def view_of(servers: list[tuple[int, int, bool]]) -> View:
    view = View([ConfigurationSet(f"only-{devices}", "x", devices) for devices in SIZES])
    for at, (devices, free, available) in enumerate(servers):
        view.put(NodeRow(f"s{at}", f"only-{devices}", free & ((1 << devices) - 1), (0,), 0, available=available))
    return view


@settings(max_examples=100)
@given(nodes, st.lists(st.tuples(st.integers(1, 24), st.sampled_from([1, 1, 1, 2]), st.booleans()), min_size=1))
def test_gangs_come_and_go_as_they_would_in_a_room(
    servers: list[tuple[int, int, bool]], sizes: list[tuple[int, int, bool]]
) -> None:
    view = view_of(servers)
    room, free_devices = CapacityIndex(view.copy()), FreeDevices(view)
    for tasks, each, is_undone in sizes:
        shape = replace(gang(), roles=(Role("worker", tasks, TaskShape(each)),))
        assert is_counted(shape)
        found = PLACEMENTS["anywhere"].place(room, PlacementRequest(shape))
        assert free_devices.take(shape) == found
        if is_undone:
            free_devices.give(found or ())
        else:
            room.take(found or ())
        assert free_devices.count == room.free_devices


@pytest.mark.parametrize(
    "shape",
    [
        gang(2, cores=1),
        gang(2, gib=1),
        gang(2, device_type="other"),
        gang(2, nodes=2),
        gang(2, widest=LocalityLevel.NODE),
        gang(2, device_gib=1),
        replace(gang(2), roles=(Role("idle", 1, TaskShape(0)),)),
        replace(gang(2), roles=(*gang(2).roles, *gang(1).roles)),
    ],
)
def test_a_job_that_requests_more_than_devices_is_not_placed_by_counts(shape: GangShape) -> None:
    assert not is_counted(shape)


def job_of(number: int, gpus: int, since_s: float, preemptible: bool, asks_for_more: bool) -> JobRecord:
    spec = JobSpec(
        ("train",),
        (Role("worker", gpus, TaskShape(1)),),
        locality=Locality(LocalityLevel.CLUSTER),
        preemptible=preemptible,
        device_type="x" if asks_for_more else "",
    )
    return JobRecord(number, f"uid-{number}", "ada", spec, create_time=NOW - since_s, pending_since=NOW - since_s)


def started(view: View, job: JobRecord, epoch: int, is_going: bool) -> tuple[JobRecord, Gang] | None:
    """A job that runs, and holds what it found, or is giving it back."""
    claims = PLACEMENTS["anywhere"].place(CapacityIndex(view), PlacementRequest(job.shape))
    if claims is None:
        return None
    for claim in claims:
        view.take(claim)
    job = replace(job, state=JobState.HOLDING, epoch=epoch, pending_since=0.0, running_since=job.pending_since)
    pieces = tuple([Piece(claim, claim) for claim in claims])
    held = Gang(epoch, job.number, GangRole.ACTIVE, GangPhase.RUNNING, pieces, LocalityLevel.CLUSTER, NOW)
    if is_going:
        level = SuspendLevel.CHECKPOINT
        held = replace(held, intent=GangIntent.PARK, park_level=level, phase=GangPhase.STOPPING, parked_by_plan=True)
    return job, held


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.sampled_from(SIZES), st.just((1 << 64) - 1), st.just(True)), min_size=1, max_size=4),
    st.lists(st.tuples(asked, st.sampled_from([False, False, True])), max_size=12),
    st.lists(asked, min_size=1, max_size=14),
    st.sampled_from(["fifo", "fifo-backfill", "las", "las2d", "tiresias", "drf"]),
    st.booleans(),
)
def test_passes_are_as_they_would_be_in_a_room(
    servers: list[tuple[int, int, bool]],
    running: list[tuple[Asked, bool]],
    waiting: list[Asked],
    order: str,
    may_stop: bool,
) -> None:
    view, table = view_of(servers), LiveTable()
    for at, (what, is_going) in enumerate(running, 1):
        found = started(view, job_of(at, *what), at, is_going)
        if found is not None:
            table.put(*found)
    for at, what in enumerate(waiting, 100):
        table.put(job_of(at, *what), None)
    rows = [replace(row, version=0) for row in view.rows()]
    devices = sum(topology.devices for topology in view.topologies)
    capacity = Capacity(devices, 1.0, 1.0, max(SIZES))

    def found_by(placement: PlacementPreference) -> PlanDraft:
        passed = plan(
            context_of(
                replaced(FIFO, placement=placement),
                table,
                CapacityIndex(view),
                NOW,
                settings=PlannerSettings(capacity=capacity),
                order=ORDERS[order],
                may_preempt=may_stop,
            )
        )
        assert [replace(row, version=0) for row in view.rows()] == rows, "all is given back"
        return passed

    counted, twin = found_by(BY_COUNTS), found_by(IN_A_ROOM)
    for field in fields(PlanDraft):
        assert np.array_equal(getattr(counted, field.name), getattr(twin, field.name)), field.name


@settings(max_examples=150)
@given(nodes, st.lists(st.one_of(asked, st.none(), st.lists(asked, max_size=3)), min_size=1))
def test_what_is_undone_half_way_leaves_the_rest(servers: list[tuple[int, int, bool]], steps: list[Step]) -> None:
    """A job starts; or all is undone (None); or a job is placed as if some started ones were gone."""
    view, table = view_of(servers), LiveTable(learns=False)
    rows = [replace(row, version=0) for row in view.rows()]
    twins = [
        GangFitting(context_of(replaced(FIFO, placement=one), table, CapacityIndex(view.copy()), NOW))
        for one in (BY_COUNTS, IN_A_ROOM)
    ]
    held: list[Claims] = []
    for number, step in enumerate(steps):
        if step is None:
            for one in twins:
                one.undo()
            held.clear()
        elif isinstance(step, tuple):
            counted, found = (one._hold(job_of(number, *step), frozenset(), set()) for one in twins)
            assert counted == found
            held += [] if found is None else [found]
        elif step:
            job, gone = job_of(number, *step[0]), held[: len(step)]
            there, expected = (one._would_be(job, gone, frozenset()) for one in twins)
            assert there == expected
    for one in twins:
        one.undo()
        assert [replace(row, version=0) for row in one._room.view.rows()] == rows


def test_an_elastic_gang_fits_with_fewer_devices_where_the_counts_have_too_few() -> None:
    room, job = CapacityIndex(view_of([(4, 0b0111, True)])), job_of(1, 4, 1.0, True, False)
    policy = replaced(FIFO, placement=_yielding(BY_COUNTS, {job.shape: (2,)}))
    fitting = GangFitting(context_of(policy, LiveTable(learns=False), room, NOW))
    (claim,) = fitting._hold(job, frozenset(), set()) or ()
    assert claim.device_mask == 0b0111


def test_an_elastic_gang_of_several_device_types_fits_with_fewer_devices() -> None:
    room, job = CapacityIndex(view_of([(4, 0b0111, True)])), job_of(1, 4, 1.0, True, False)
    (kind,) = {made.device_type for made in room.view.sets.values()}
    shape = replace(job.shape, device_type=f"newest,{kind}")
    (claim,) = _yielding(BY_COUNTS, {shape: (2,)}).place(room, PlacementRequest(shape)) or ()
    assert claim.device_mask == 0b0111
