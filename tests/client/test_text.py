"""Amounts as people write them, and errors of the system as people read them: a sentence, without a number."""

from __future__ import annotations

import errno
import os
import socket

import pytest
from ganger.text import (
    counted,
    format_duration,
    format_memory,
    meant,
    os_failure,
    os_reason,
    parse_duration,
    parse_memory,
)
from ganger.wire.endpoints import why_not_listening
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("text", "count"),
    [("16G", 16 << 30), ("512m", 512 << 20), ("1.5GiB", 3 << 29), ("2GB", 2 * 10**9), ("100B", 100), ("0", 0), (0, 0)],
)
def test_memory_is_read(text: str | int, count: int) -> None:
    assert parse_memory(text) == count


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2h30m", 9_000),
        ("90s", 90),
        ("1d 2h", 93_600),
        ("500ms", 0.5),
        ("0", 0),
        (0, 0),
        ("1-12:00:00", 129_600),
        ("12:30:00", 45_000),
        ("12:30", 750),
        ("1-06", 108_000),
        ("1-02:03", 93_780),
    ],
)
def test_durations_are_read(text: str | int, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "2x", "h", "-5m", "1h2", "1:2:3", "2h;rm", [], True, float("nan"), -1, 10**400])
def test_what_is_no_duration_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="duration"):
        parse_duration(text)


@pytest.mark.parametrize(("text", "units"), [("10", "10s, 10m or 10h"), (1.5, "1.5s, 1.5m or 1.5h")])
def test_a_duration_without_a_unit_is_refused_with_what_to_write(text: object, units: str) -> None:
    with pytest.raises(ValueError, match="has no unit") as refused:
        parse_duration(text)
    assert str(refused.value) == f"{text!r} has no unit: write {units}"


@pytest.mark.parametrize("text", ["2000", 2000])
def test_an_amount_of_memory_without_a_unit_is_refused_with_what_to_write(text: object) -> None:
    with pytest.raises(ValueError, match="has no unit") as refused:
        parse_memory(text)
    assert str(refused.value) == f"{text!r} has no unit: write 2000M (MiB, as in Slurm), 2000G or 2000B (bytes)"


@pytest.mark.parametrize("text", ["", "G", "-1G", "3Q", "1e9", "16 GG"])
def test_what_is_no_memory_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="memory"):
        parse_memory(text)


@given(st.integers(0, 2**50))
def test_printed_memory_reads_as_nearly_the_same(count: int) -> None:
    assert parse_memory(format_memory(count)) == pytest.approx(count, rel=0.06)


@given(st.floats(0, 1e7))
def test_printed_durations_read_as_nearly_the_same(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, rel=0.06, abs=0.6)


@pytest.mark.parametrize(
    ("count", "noun", "spec", "text"),
    [
        (1, "job", "", "1 job"),
        (0, "job", "", "0 jobs"),
        (1, "more job", "", "1 more job"),
        (2, "more job", "", "2 more jobs"),
        (1_200, "window", ",", "1,200 windows"),
        (2, "mini-batch", "", "2 mini-batches"),
        (2, "entry", "", "2 entries"),
        (0.5, "core", "g", "0.5 cores"),
    ],
)
def test_a_number_stands_beside_its_noun(count: float, noun: str, spec: str, text: str) -> None:
    assert counted(count, noun, spec) == text


@pytest.mark.parametrize(
    ("name", "told"),
    [("gpu", "is it gpus?"), ("colour", "there are gpus, tasks"), ("x" * 10**6, "there are gpus, tasks")],
)
def test_an_unknown_name_is_answered_with_the_most_similar_one_or_with_all(name: str, told: str) -> None:
    assert meant(name, ("tasks", "gpus")) == told


NOT_TEXT = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOENT, os.strerror(errno.ENOENT), "/a"), "/a: no such file or directory"),
        (OSError(errno.EEXIST, os.strerror(errno.EEXIST), "/a"), "/a: there is a file of this name"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "no space left on device"),
        (OSError("storage has not answered within 5 s"), "storage has not answered within 5 s"),
        (OSError(), "OSError"),
        (NOT_TEXT, "it is not UTF-8 text"),
    ],
)
def test_an_error_of_the_system_is_a_reason(error: Exception, reason: str) -> None:
    assert os_failure(error) == reason
    assert os_reason(error) == reason.removeprefix("/a: ")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "the host name m.lab is not known; give a"),
        (OSError(errno.EADDRNOTAVAIL, "-"), "m.lab is not an address of this machine; give one of its own"),
        (OSError(errno.EADDRINUSE, "-"), "in use; stop the program that has port 80, or give another port"),
        (PermissionError(errno.EACCES, "-"), "port 80 is not permitted; give one above 1023"),
        (OSError(errno.EMFILE, "Too many open files"), "too many open files; give another address"),
    ],
)
def test_what_is_wrong_with_an_address_to_listen_at_is_told_apart(error: OSError, reason: str) -> None:
    assert why_not_listening("m.lab:80", error).startswith(f"cannot listen on m.lab:80: {reason}")
