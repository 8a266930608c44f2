"""Values come back from the wire as they went, whatever they hold."""

from __future__ import annotations

from typing import TypeAlias

import pytest
from ganger.cluster.refusals import Reason, Refusal
from ganger.cluster.resources import (
    Claim,
    ConfigurationSet,
    DeviceGroup,
    GangShape,
    Locality,
    LocalityLevel,
    NodeRow,
    Role,
    Socket,
    TaskShape,
)
from ganger.v1 import job_pb2, resources_pb2
from ganger.wire import resource_messages as convert
from ganger.wire.errors import RequestInvalid
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

Sizes: TypeAlias = tuple[int, ...]

masks = st.integers(0, 2**64 - 1)
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**63)
numbers = st.lists(u32, max_size=4).map(tuple)
sizes = st.lists(u64, max_size=4).map(tuple)
nodes = st.from_regex(r"[a-z][a-z0-9]{0,8}", fullmatch=True)
words = st.text("abc-", max_size=8)
levels = st.sampled_from(LocalityLevel)
bandwidths = st.just(()) | st.tuples(st.integers(1, 2**32 - 1), u32)
shapes = st.builds(TaskShape, gpus=u32, millicores=u32, memory_bytes=u64, bandwidth=bandwidths)
roles = st.builds(Role, words, u32, shapes)
localities = st.builds(Locality, levels, st.none() | levels, st.integers(0, 10**6).map(float))
claims = st.builds(Claim, nodes, masks, numbers, u64, u64, numbers, shared_mask=masks, bandwidth=bandwidths)
rows = st.builds(
    NodeRow,
    *(nodes, words, masks, numbers, u64, u64, st.booleans(), words, words, numbers, numbers, numbers, u32, sizes),
    st.just(()) | st.tuples(u64, u64),
)
sets = st.builds(
    ConfigurationSet,
    words,
    words,
    u32,
    u64,
    st.lists(st.builds(DeviceGroup, levels, masks), max_size=3).map(tuple),
    st.lists(st.builds(Socket, u32, masks), max_size=3).map(tuple),
    u64,
    st.dictionaries(words, st.floats(0, 1e9)),
)
refusals = st.builds(
    Refusal,
    st.sampled_from(Reason),
    st.dictionaries(words, st.integers(-(2**62), 2**62), max_size=3),
    st.just("") | nodes,
    st.just("") | st.integers(1, 99).map(lambda number: f"jobs/{number}"),
    st.just("") | st.text("abc, =on", min_size=1, max_size=20),
)


@given(roles, localities)
def test_what_a_job_asks_for_comes_back(role: Role, locality: Locality) -> None:
    assert convert.role_from_wire(convert.role_to_wire(role)) == role
    assert convert.locality_from_wire(convert.locality_to_wire(locality)) == locality


@given(sets, rows)
def test_what_there_is_comes_back(kind: ConfigurationSet, row: NodeRow) -> None:
    assert convert.configuration_set_from_wire(convert.configuration_set_to_wire(kind)) == kind
    assert convert.node_row_from_wire(convert.node_row_to_wire(row)) == row


@given(st.lists(claims, max_size=3).map(tuple), st.lists(refusals, max_size=3).map(tuple))
def test_claims_and_refusals_come_back(claims: tuple[Claim, ...], refusals: tuple[Refusal, ...]) -> None:
    assert convert.claims_from_wire(convert.claims_to_wire(claims)) == claims
    assert convert.refusals_from_wire(convert.refusals_to_wire(refusals)) == refusals


@given(st.builds(GangShape, st.lists(roles, max_size=3).map(tuple), words, localities, u32))
def test_the_shape_of_a_gang_comes_back(shape: GangShape) -> None:
    spec = job_pb2.JobSpec(
        roles=[convert.role_to_wire(role) for role in shape.roles],
        device_type=shape.device_type,
        locality=convert.locality_to_wire(shape.locality),
        nodes=shape.nodes,
    )
    assert convert.gang_shape_from_wire(spec) == shape


@given(st.lists(claims, max_size=3), sizes)
def test_parked_bytes_are_in_answers_and_never_in_requests(claims: list[Claim], kept: Sizes) -> None:
    parked = tuple(replace(claim, parked_bytes=kept) for claim in claims)
    messages = convert.claims_to_wire(parked)
    assert convert.parked_claims_from_wire(messages) == parked
    assert convert.claims_from_wire(messages) == tuple(claims)


def test_what_is_needed_of_a_device_is_what_the_spec_says_or_what_was_measured() -> None:
    spec = job_pb2.JobSpec(gpu_memory_bytes=1_000)
    assert convert.gang_shape_from_wire(spec).device_memory_bytes == 1_000
    assert convert.gang_shape_from_wire(spec, 0, 2_000).device_memory_bytes == 2_000


def test_a_job_without_wishes_accepts_any_place() -> None:
    assert convert.locality_from_wire(resources_pb2.Locality()) == Locality()


def test_the_arena_is_the_peak_and_a_tenth_rounded_up() -> None:
    assert convert.arena_bytes_for(1_000) == 1_100
    assert convert.arena_bytes_for(1) == 2
    assert convert.arena_bytes_for(0) == 0


def test_words_of_a_newer_program_are_refused_by_name() -> None:
    with pytest.raises(RequestInvalid, match="level 99"):
        convert.level_from_wire(99)


def test_a_refusal_for_a_reason_of_a_newer_master_keeps_the_sentence_that_the_master_sent() -> None:
    sentence = "the moon is too small (8% needed, 3% free), on n1, because of jobs/4"
    newer = resources_pb2.Refusal(
        reason="MOON_PHASE", message=sentence, figures={"needed_percent": 8}, node="nodes/n1", job="jobs/4"
    )
    refusal = convert.refusal_from_wire(newer)
    assert (refusal.reason, refusal.node, refusal.job) == (Reason.UNKNOWN, "n1", "jobs/4")
    assert refusal.message == f"MOON_PHASE: {sentence}"
    # Relayed to another program it is the same sentence.
    assert convert.refusal_from_wire(convert.refusal_to_wire(refusal)) == refusal
