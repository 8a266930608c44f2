"""Errors keep reason, message, violations and metadata on their way over the wire."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ganger.wire import errors
from ganger.wire.errors import ApiError, SpecInvalid, Violation, from_status, to_status

PROTOS = Path(__file__).parents[2] / "protos"


@pytest.mark.parametrize("kind", ApiError.__subclasses__(), ids=lambda kind: kind.reason)
def test_every_error_comes_back_as_itself(kind: type[ApiError]) -> None:
    sent = kind("what is wrong: what to do", needed=8)
    received = from_status(to_status(sent))
    assert type(received) is kind
    assert (received.code, received.reason, received.message) == (kind.code, kind.reason, sent.message)
    assert received.metadata == {"needed": "8"}


def test_every_reason_named_in_the_protos_has_an_error() -> None:
    named = set()
    for path in PROTOS.rglob("*.proto"):
        text = re.sub(r"\n\s*// ?", " ", path.read_text())
        for code, several, one in re.findall(r"\b([A-Z_]{5,})/(?:\{([^}]*)\}|([A-Z_]+))", text):
            if code.endswith(
                ("ARGUMENT", "FOUND", "PRECONDITION", "RANGE", "EXISTS", "ABORTED", "DENIED", "EXHAUSTED")
            ):
                named |= set(re.findall(r"\b[A-Z]{2,}(?:_[A-Z]+)*\b", re.sub(r"\([^)]*\)", "", several or one)))
    known = {kind.reason for kind in ApiError.__subclasses__()}
    assert named
    assert named <= known


def test_all_violations_come_back_in_order() -> None:
    violations = [Violation("spec.roles[0].tasks", "must be at least 1"), Violation("spec.command", "missing")]
    received = from_status(to_status(SpecInvalid("bad", violations=violations)))
    assert list(received.violations) == violations
    assert "spec.roles[0].tasks: must be at least 1" in str(received)


def test_a_thousand_violations_are_cut_to_fit_a_header_and_counted() -> None:
    violations = [Violation(f"spec.roles[{index}].tasks", "x" * 300) for index in range(1_000)]
    status = to_status(SpecInvalid("y" * 5_000, violations=violations, figure="z" * 5_000))
    assert status.ByteSize() < 8_000
    assert "more" in from_status(status).violations[-1].description


def test_an_unknown_reason_keeps_code_and_reason() -> None:
    status = to_status(errors.JobBusy("moving"))
    info = status.details[0]
    info.value = info.value.replace(b"JOB_BUSY", b"NEW_ONES")
    received = from_status(status)
    assert type(received) is ApiError
    assert (received.reason, received.code) == ("NEW_ONES", errors.JobBusy.code)
    assert errors.JobBusy.reason == "JOB_BUSY"


def test_what_is_no_api_error_has_no_reason() -> None:
    assert errors.reason_of(ValueError("x")) == ""
    assert errors.reason_of(errors.NotReady("x")) == "NOT_READY"
