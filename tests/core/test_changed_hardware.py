"""A node that comes back with other hardware than it had: a device is lost and the machine booted, memory is added."""

from __future__ import annotations

import pytest
from core.drive import GIB, SERVER, Drive, job_of
from core.test_removed_nodes import restarted
from core.test_time_slices import Turns
from ganger.cluster.placement import candidates
from ganger.cluster.resources import ConfigurationSet
from ganger.cluster.topology import parse_topology
from ganger.cluster.view import View
from ganger.job_state import JobState
from ganger_master.core.answers import Answer, Refused, SessionAnswer
from ganger_master.core.commands import CancelJob, DeclareLost, OpenSession, SuspendJob
from ganger_master.core.gang_model import ObservedPhase
from ganger_master.core.job_model import SuspendLevel
from ganger_master.core.node_model import NodeState
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

# SERVER without one of its devices, without one of its sockets, with four devices more, with other memory.
SMALLER = parse_topology("3", name="v3", millicores=16_000, memory_bytes=64 * GIB, device_memory_bytes=GIB)
HALF = parse_topology("2", name="v2", millicores=8_000, memory_bytes=32 * GIB, device_memory_bytes=GIB)
LARGER = parse_topology("2x4", name="v8", millicores=32_000, memory_bytes=64 * GIB, device_memory_bytes=GIB)
ROOMIER = replace(SERVER, name="v4-roomy", memory_bytes=128 * GIB)
KINDS = (SERVER, SMALLER, HALF, LARGER, ROOMIER)


class Changing(Drive):
    """Nodes that say which boot they are of."""

    def __init__(self, nodes: int = 1) -> None:
        self.boots: dict[str, int] = {}
        super().__init__(nodes)

    def join(self, node: str) -> None:
        assert isinstance(self.opens(node, SERVER), SessionAnswer)
        self.observe(node, version=0)

    def opens(self, node: str, kind: ConfigurationSet, boots: int = 0) -> Answer:
        """Its daemon starts, after so many boots of the machine."""
        self.boots[node] = self.boots.get(node, 0) + boots
        boot = f"boot-{self.boots[node]}"
        answer = self.step(
            OpenSession(
                node,
                f"machine-{node}",
                kind,
                boot_id=boot,
                peer_address=f"{node}:1",
                capabilities={"rotation": "yes", "packing": "yes"},
            )
        )
        if isinstance(answer, SessionAnswer):
            self.sessions[node] = answer.session
        return answer

    def lost(self, node: str) -> None:
        self.now += self.state.settings.session_alive_s
        self.step(DeclareLost(node))


class ChangingTurns(Changing, Turns):
    """Changing hardware where jobs are time-sliced."""


def running(drive: Drive, gpus: int) -> int:
    number = drive.submit(job_of(gpus))
    drive.start(number)
    drive.runs(number)
    return number


@pytest.mark.parametrize("kind", KINDS[1:], ids=lambda kind: kind.name)
@pytest.mark.parametrize("level", [None, SuspendLevel.PAUSE, SuspendLevel.OFFLOAD])
def test_a_machine_booted_with_other_hardware_is_accepted_and_its_jobs_continue_elsewhere(
    kind: ConfigurationSet, level: SuspendLevel | None
) -> None:
    drive = Changing()
    number = running(drive, 4)
    epoch = drive.job(number).epoch
    if level is not None:
        drive.step(SuspendJob(number, level))
        drive.seen(number, epoch, ObservedPhase.PARKED, stop_step=7)
    assert isinstance(drive.opens("n1", kind, boots=1), SessionAnswer)
    drive.observe("n1", version=0)
    assert drive.state.view.row("n1").free_mask == (1 << kind.devices) - 1
    assert (drive.state.nodes.devices, drive.state.nodes.free_devices) == (kind.devices, kind.devices)
    assert epoch not in drive.state.gangs
    assert drive.job(number).state is (JobState.PENDING if level is None else JobState.SUSPENDED)
    (told,) = [entry for entry in drive.history if entry.kind == "node_changed"]
    assert told.message == f"was 'v4', came back as {kind.name!r}"


def test_a_gang_that_is_still_elsewhere_is_stopped_there() -> None:
    drive = Changing(nodes=2)
    number = running(drive, 8)
    epoch = drive.job(number).epoch
    assert isinstance(drive.opens("n1", SMALLER, boots=1), SessionAnswer)
    drive.observe("n1", version=0)
    (told,) = drive.state.desired["n2"].gangs
    assert (told.epoch, told.intent) == (epoch, "STOP")
    assert drive.state.desired["n1"].gangs == ()
    restarted(drive)
    drive.opens("n2", SERVER)
    drive.observe("n2", drive.report(drive.state.gangs[epoch], ObservedPhase.ENDED))
    assert drive.job(number).state is JobState.PENDING
    assert epoch not in drive.state.gangs


def test_gangs_time_sliced_on_it_are_requeued_and_their_group_is_dissolved() -> None:
    drive = ChangingTurns(nodes=2)
    jobs = drive.share(8)
    assert isinstance(drive.opens("n1", LARGER, boots=1), SessionAnswer)
    drive.observe("n1", version=0)
    assert {gang.intent for gang in drive.state.desired["n2"].gangs} == {"STOP"}
    drive.observe("n2")
    assert drive.state.gangs.sets == {}
    assert [drive.job(number).state for number in jobs] == [JobState.PENDING] * 2
    assert [drive.state.view.row(node).free_mask for node in ("n1", "n2")] == [0xFF, 0xF]


def test_other_hardware_under_jobs_that_may_run_is_refused_with_what_to_do() -> None:
    drive = Changing()
    numbers = [running(drive, 1), running(drive, 2)]
    answer = drive.opens("n1", SMALLER)
    assert isinstance(answer, Refused)
    assert answer.reason == "CONFIGURATION_SET_MISMATCH"
    assert answer.message == (
        "nodes/n1 has something of jobs/1, jobs/2 and was 'v4', now it says 'v3': start its daemon as before, "
        "boot the machine, or `ganger lost n1`, and they go on elsewhere"
    )
    assert isinstance(drive.opens("n1", SERVER), SessionAnswer), "as before"
    for number in numbers:
        drive.step(CancelJob(number))


def test_a_machine_whose_boot_is_not_known_is_not_taken_to_be_booted() -> None:
    drive = Changing()
    running(drive, 1)
    answer = drive.step(OpenSession("n1", "machine-n1", SMALLER))
    assert isinstance(answer, Refused)


def test_after_lost_other_hardware_is_taken_and_what_still_runs_there_is_stopped() -> None:
    drive = Changing()
    number = running(drive, 4)
    gang = drive.state.gangs[drive.job(number).epoch]
    drive.lost("n1")
    assert isinstance(drive.opens("n1", SMALLER), SessionAnswer)
    assert drive.state.nodes["n1"].state is NodeState.UNKNOWN
    drive.observe("n1", drive.report(gang, ObservedPhase.RUNNING), version=0)
    (told,) = drive.state.desired["n1"].gangs
    assert (told.epoch, told.intent) == (gang.epoch, "STOP")
    drive.observe("n1", drive.report(gang, ObservedPhase.ENDED))
    assert drive.state.view.row("n1").free_mask == 0b111


def test_an_idle_node_may_become_another_at_any_time() -> None:
    drive = Changing()
    for kind in (*KINDS[1:], SERVER):
        assert isinstance(drive.opens("n1", kind), SessionAnswer)
        drive.observe("n1", version=0)
        assert drive.state.nodes.devices == kind.devices


_node = st.sampled_from(["n1", "n2", "n3"])
_DEEDS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.sampled_from([1, 2, 4, 6, 8])),
        st.tuples(st.just("open"), _node, st.sampled_from(KINDS), st.integers(0, 1)),
        st.tuples(st.just("lose"), _node),
        st.tuples(st.just("suspend"), st.integers(1, 6), st.sampled_from([SuspendLevel.PAUSE, SuspendLevel.OFFLOAD])),
        st.tuples(st.just("end"), st.integers(1, 6)),
        st.tuples(st.just("restart")),
    ),
    max_size=25,
)


@given(_DEEDS)
def test_the_cluster_is_the_hardware_that_its_nodes_report_after_any_changes(deeds: list[tuple[object, ...]]) -> None:
    drive = Changing(nodes=3)
    kinds = dict.fromkeys(drive.state.nodes, SERVER)
    for deed, *about in deeds:
        _do(drive, kinds, str(deed), *about)
        view = drive.state.view
        assert {name: view.topology(name).configuration_set for name in view.names()} == kinds
        for gang in drive.state.gangs.values():
            for piece in gang.pieces:
                devices = kinds[piece.claim.node].devices
                assert piece.held is None or piece.held.device_mask < 1 << devices
        _assert_as_seen_by_a_newcomer(view)


def _do(drive: Changing, kinds: dict[str, ConfigurationSet], deed: str, *about: object) -> None:
    match deed, *about:
        case "start", int(gpus):
            number = drive.submit(job_of(gpus))
            drive.request(number, *drive.places(number))
            if drive.job(number).epoch:
                drive.runs(number)
        case "open", str(node), ConfigurationSet() as kind, int(boots):
            state = drive.state
            is_busy = bool(state.gangs.living_on(node))
            before = state.nodes[node]
            answer = drive.opens(node, kind, boots)
            is_other = before.configuration_set != kind.name
            assert isinstance(answer, Refused) == (
                is_other and is_busy and before.boot_id == f"boot-{drive.boots[node]}"
            )
            if isinstance(answer, SessionAnswer):
                kinds[node] = kind
                # Of what is not wanted there any more nothing is left.
                left = [drive.reported(gang, node) for gang in state.gangs.living_on(node)] if not boots else []
                drive.observe(node, *[one for one in left if one is not None])
        case "lose", str(node):
            drive.lost(node)
        case "suspend", int(number), SuspendLevel() as level:
            if number in drive.state.jobs and drive.job(number).state is JobState.HOLDING:
                epoch = drive.job(number).epoch
                drive.step(SuspendJob(number, level))
                if epoch in drive.state.gangs:
                    # Lost nodes report nothing.
                    drive.seen(number, epoch, ObservedPhase.PARKED, stop_step=1)
        case "end", int(number):
            if number in drive.state.jobs:
                drive.step(CancelJob(number))
        case "restart", *_:
            restarted(drive)


def _assert_as_seen_by_a_newcomer(view: View) -> None:
    """Check that a view that followed every change equals one that is built from its rows now."""
    fresh = View(view.sets.values(), mode=view.mode)
    for row in view.rows():
        fresh.put(row)
    for gpus in (1, 2, 4, 8):
        shape = job_of(gpus).shape()
        assert candidates(view, shape, waited_s=1e9).candidates == candidates(fresh, shape, waited_s=1e9).candidates
