"""Work that is done once per batch, or cached, gives the same as if it were done each time."""

from __future__ import annotations

from faultsim.state_invariants import violations
from ganger.cluster.resources import Claim, Role, TaskShape
from ganger.cluster.topology import Topology, innermost_groups, parse_topology
from ganger_master.core import commands, gang_orders, machine
from ganger_master.core.answers import Approved, SessionAnswer
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.kept_places import KeptPlace, KeptPlaceRequest, keep_places, kept_places_of
from ganger_master.core.node_model import Node
from ganger_master.core.settings import CoreSettings
from ganger_master.core.state import State
from ganger_master.core.state_indexes import row_of
from hypothesis import given, settings
from hypothesis import strategies as st

SERVER = parse_topology("2x2", name="v4")
SPEC = JobSpec(("train",), (Role("worker", 1, TaskShape(1, 1_000, 1 << 20)),))


def claim(node: str, device: int) -> Claim:
    return Claim(node, 1 << device, (1_000, 0) if device < 2 else (0, 1_000), 1 << 20, 0, (1,))


def story() -> list[commands.Command]:
    """Two nodes, six gangs on them, two that conflict, one that is cancelled."""
    told: list[commands.Command] = []
    for number, node in enumerate(("n1", "n2"), 1):
        told.append(commands.OpenSession(node, f"m-{node}", SERVER))
        told.append(commands.Observe(node, f"{node}-{number}", 1, 0))
    told += [commands.SubmitJob(SPEC, f"u{number}", "ann") for number in range(1, 9)]
    places = [claim("n1", 0), claim("n1", 1), claim("n1", 1), claim("n2", 3), claim("n2", 2), claim("n1", 3)]
    told += [commands.RequestGang(number, 1, ((place,),)) for number, place in enumerate(places, 1)]
    return [*told, commands.CancelJob(2), commands.Observe("n1", "n1-1", 2, 0)]


def with_policy() -> State:
    return State(CoreSettings(policy="backfill"), 0.0)


@settings(max_examples=25)
@given(st.sets(st.integers(0, 19)))
def test_batches_of_any_size_end_in_the_same_state(ends: set[int]) -> None:
    alone, together = with_policy(), with_policy()
    news: set[str] = set()
    for position, command in enumerate(story()):
        expected = machine.step(alone, command, 1.0)
        answer, _ = machine.advance(together, command, 1.0)
        if isinstance(answer, SessionAnswer | Approved):
            assert answer == expected.answer
        if position in ends:
            news.update(machine.finish(together, 1.0).nodes)
            together.take_changes()
    news.update(machine.finish(together, 1.0).nodes)
    assert not list(violations(together))
    assert news == {"n1", "n2"}
    assert together.jobs == alone.jobs
    assert together.rows == alone.rows
    assert {name: found.gangs for name, found in together.desired.items()} == {
        name: found.gangs for name, found in alone.desired.items()
    }
    for state in (alone, together):
        for name, node in state.nodes.items():
            remembered = gang_orders.project_node(state, node).gangs
            state.desired.parties.clear()
            state.desired.projected.clear()
            assert gang_orders.project_node(state, node).gangs == remembered == state.desired[name].gangs


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 15), st.integers(0, 2), st.integers(0, 2)), max_size=5))
def test_a_row_counts_its_neighbours(held: list[tuple[int, int, int]]) -> None:
    claims = [Claim("n1", mask, tuple(cores), 0) for mask, *cores in held]
    row = row_of(Node("n1", "m", SERVER.name), Topology(SERVER), claims)
    assert row.device_rows == tuple(sum(one.device_mask >> device & 1 for one in claims) for device in range(4))
    assert row.group_jobs == tuple(
        sum(bool(one.device_mask & mask) for one in claims) for mask in innermost_groups(SERVER)
    )
    assert row.socket_jobs == tuple(
        sum(bool(one.device_mask & socket.device_mask or one.millicores[index]) for one in claims)
        for index, socket in enumerate(SERVER.sockets)
    )


def test_places_kept_for_blocked_jobs_are_searched_again_only_after_a_while() -> None:
    state = with_policy()
    for command in story()[:4]:
        machine.step(state, command, 0.0)
    big = JobSpec(("train",), (Role("worker", 4, TaskShape(1, 1_000, 1 << 20)),))
    for number, spec in enumerate([SPEC, big, SPEC, SPEC], 1):
        machine.step(state, commands.SubmitJob(spec, f"u{number}", "ann"), 0.0)
    four = Claim("n1", 0xF, (2_000, 2_000), 4 << 20, 0, (4,))
    assert isinstance(ask(state, 1, claim("n1", 0), 1.0), Approved)
    assert not isinstance(ask(state, 2, four, 1.0), Approved)
    late = 200.0
    first = kept_places_of(state, [state.jobs[2]], late)
    assert first == naive(state, 2)
    assert first[0].nodes == ("n2",)
    assert not isinstance(ask(state, 3, claim("n2", 1), late), Approved)
    assert isinstance(ask(state, 3, claim("n1", 1), late), Approved)
    assert kept_places_of(state, [state.jobs[2]], late + 0.1) == first
    assert kept_places_of(state, [state.jobs[2]], late + 1.0) == naive(state, 2)
    assert kept_places_of(state, [state.jobs[4]], late) == ()


def ask(state: State, number: int, wanted: Claim, now: float) -> object:
    request = commands.RequestGang(number, state.jobs[number].revision, ((wanted,),))
    return machine.step(state, request, now).answer


def naive(state: State, number: int) -> tuple[KeptPlace, ...]:
    job = state.jobs[number]
    return keep_places(state.view, [KeptPlaceRequest(job.name, state.queue_rank(number), job.spec.shape())])
