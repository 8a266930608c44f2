"""The log of a job is printed so that it cannot control the terminal of its reader."""

from __future__ import annotations

import io

import pytest
from ganger.cli.logs import print_chunks
from ganger.console import LogText
from ganger.v1.job_service_pb2 import LogChunk


def shown(*pieces: bytes) -> str:
    text = LogText()
    return "".join(map(text.feed, pieces)) + text.end()


@pytest.mark.parametrize(
    ("wrote", "shows"),
    [
        (b"step 1\tloss 0.5\r\n", "step 1\tloss 0.5\r\n"),
        (b"\x1b[2J\x1b[Hpassword: ", "\\x1b[2J\\x1b[Hpassword: "),
        (b"\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        (b"\x9b2J \xff", "\\x9b2J \\xff"),
        ("\u202eabc".encode(), "\\u202eabc"),
        (b"\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m\x1b[0m"),
        ("loss \N{GREEK SMALL LETTER EPSILON} \N{GRINNING FACE}".encode(), "loss \u03b5 \U0001f600"),
        (b"\x1b", "\\x1b"),
        (b"\x1b[12", "\\x1b[12"),
    ],
)
def test_a_terminal_gets_colours_and_lines_and_no_other_code(wrote: bytes, shows: str) -> None:
    assert shown(wrote) == shows
    assert shown(*[wrote[at : at + 1] for at in range(len(wrote))]) == shows, "cut anywhere"


class Out(io.TextIOWrapper):
    def __init__(self, is_terminal: bool) -> None:
        self.raw_bytes = io.BytesIO()
        super().__init__(self.raw_bytes, encoding="utf-8")
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


@pytest.mark.parametrize(
    ("is_terminal", "raw", "is_as_written"), [(True, False, False), (True, True, True), (False, False, True)]
)
def test_a_file_and_raw_get_the_bytes_as_they_are(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, raw: bool, is_as_written: bool
) -> None:
    out, wrote = Out(is_terminal), b"\x1b]0;title\x07\xff\n"
    monkeypatch.setattr("sys.stdout", out)
    assert print_chunks([LogChunk(data=wrote[:3]), LogChunk(data=wrote[3:])], raw)
    got = out.raw_bytes.getvalue()
    assert (got == wrote) is is_as_written
    assert is_as_written or got == b"\\x1b]0;title\\x07\\xff\n"
