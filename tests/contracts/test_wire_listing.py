"""The messages of the wire change only so that a peer of a recorded version can read them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from guards.wire_listing import (
    PROTOS,
    breaks,
    gaps_in,
    generated_modules,
    present_listing,
    problems,
    read_listing,
    text_of,
    unrecorded,
)

JOB = """message ganger.v1.Job
  1 name string
  2 state ganger.v1.State
  3 claims repeated ganger.v1.Claim
  4 reserved
  5 labels map<string, string>
message ganger.v1.Claim
  1 node string
enum ganger.v1.State
  0 STATE_UNSPECIFIED
  1 STATE_PENDING
message ganger.v1.GetJobRequest
  1 name string
method /ganger.v1.JobService/GetJob ganger.v1.GetJobRequest -> ganger.v1.Job
method /ganger.v1.JobService/WatchJob ganger.v1.GetJobRequest -> stream ganger.v1.Job
"""


def broken_by(*changes: tuple[str, str], has_same_names: bool = True) -> list[str]:
    """Return what the changes (text, its replacement) break in the listing above."""
    text = JOB
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return list(breaks(read_listing(JOB), read_listing(text), has_same_names=has_same_names))


def test_the_messages_of_this_checkout_break_no_recorded_version_and_leave_no_gap() -> None:
    assert problems() == []


def test_a_listing_that_is_read_back_is_the_same() -> None:
    assert read_listing(text_of(present_listing())) == present_listing()


def test_a_new_file_of_messages_is_listed_without_being_named(tmp_path: Path) -> None:
    for name in ("ganger/v1/job.proto", "ganger/v1/new.proto", "ganger/other/v2/more.proto", "ganger/v1/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    modules = ["ganger.other.v2.more_pb2", "ganger.v1.job_pb2", "ganger.v1.new_pb2"]
    assert generated_modules(tmp_path) == modules


def test_every_message_enum_and_method_of_the_protos_is_listed() -> None:
    listing = present_listing()
    listed = {name.rpartition(".")[2] for name in listing.types}
    listed |= {path.rpartition("/")[2] for path in listing.methods}
    for file in PROTOS.rglob("*.proto"):
        declared = set(re.findall(r"^\s*(?:message|enum|rpc) (\w+)", file.read_text(), re.MULTILINE))
        assert declared, f"{file} declares nothing"
        assert declared <= listed, f"{file.name}: {declared - listed}"


def test_a_new_field_method_or_value_breaks_nothing() -> None:
    more = "message ganger.v1.Claim\n  2 cores uint32\n"
    value = "  1 STATE_PENDING\n  2 STATE_HOLDING\n"
    method = "-> ganger.v1.Job\nmethod /ganger.v1.JobService/New ganger.v1.Job -> ganger.v1.Job\n"
    changes = (
        ("message ganger.v1.Claim\n", more),
        ("  1 STATE_PENDING\n", value),
        ("-> ganger.v1.Job\n", method),
    )
    assert broken_by(*changes) == []


@pytest.mark.parametrize("has_same_names", [True, False])
@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("  1 node string\n", "", "ganger.v1.Claim: node = 1 is gone: write `reserved 1;` in its place"),
        (
            "  1 STATE_PENDING\n",
            "",
            "ganger.v1.State: STATE_PENDING = 1 is gone: write `reserved 1;` in its place",
        ),
        (
            "  1 node string\n",
            "  1 node uint32\n",
            "ganger.v1.Claim: node = 1 was 'string', is 'uint32': give the new type a new number, and write "
            "`reserved 1;`",
        ),
        (
            "repeated ganger.v1.Claim",
            "ganger.v1.Claim",
            "ganger.v1.Job: claims = 3 was 'repeated ganger.v1.Claim', is 'ganger.v1.Claim': give the new type a new "
            "number, and write `reserved 3;`",
        ),
        (
            "  1 node string\n",
            "  2 node string\n",
            "ganger.v1.Claim: node = 1 is gone: write `reserved 1;` in its place",
        ),
        (
            "  4 reserved\n",
            "  4 user string\n",
            "ganger.v1.Job: user = 4 was reserved: take a number that was never used",
        ),
        (
            "stream ganger.v1.Job",
            "ganger.v1.Job",
            "/ganger.v1.JobService/WatchJob was 'stream ganger.v1.Job', is 'ganger.v1.Job': give the new form a new "
            "name, and keep the old method",
        ),
        (
            "JobService/GetJob",
            "JobService/ReadJob",
            "/ganger.v1.JobService/GetJob is gone: keep the method as long as its version of the wire is supported",
        ),
    ],
)
def test_what_a_peer_cannot_read_is_refused_with_what_to_do(
    old: str, new: str, sentence: str, has_same_names: bool
) -> None:
    assert broken_by((old, new), has_same_names=has_same_names) == [sentence]


def test_a_field_may_go_once_its_number_is_reserved() -> None:
    assert broken_by(("  1 node string\n", "  1 reserved\n")) == []


def test_names_change_with_the_version_of_the_wire_only() -> None:
    renamed = ("ganger.v1.Claim", "ganger.v1.NodeClaim"), ("  1 node string", "  1 host string")
    assert broken_by(*renamed, has_same_names=False) == []
    assert broken_by(*renamed) == [
        "ganger.v1.Claim is ganger.v1.NodeClaim now: keep the name, or raise NEWEST_VERSION of ganger.wire.channels",
        "ganger.v1.NodeClaim: node = 1 is host now: keep the name, or raise NEWEST_VERSION of ganger.wire.channels",
    ]


def test_a_number_without_a_use_has_to_be_reserved() -> None:
    sentences = list(gaps_in(read_listing(JOB.replace("  4 reserved\n", ""))))
    assert sentences == ["ganger.v1.Job: nothing has the numbers 4: use them, or write `reserved 4;`"]


def test_the_messages_of_this_checkout_are_recorded() -> None:
    assert unrecorded() == []
