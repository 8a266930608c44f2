"""What the end of a hook means: the reason that people read, and none of what a terminal would obey."""

from __future__ import annotations

import pytest
from ganger_daemon.core.node_health import HookEnd, hook_failure, last_line


@pytest.mark.parametrize(
    ("output", "line"),
    [
        (b"", ""),
        (b"\n \n", ""),
        (b"checking\ndisk full\n", "disk full"),
        (b"disk full\n\n  \n", "disk full"),
        (b"\x1b[31mdisk full\x1b[0m\n", "disk full"),
        (b"\x1b]0;title\x07disk full", "disk full"),
        (b"disk\tfull\x00\n", "disk full"),
        (b"50 %\rdisk full\r\n", "disk full"),
        (b"disk \xff full", "disk � full"),
        (b"x" * 500, "x" * 199 + "…"),
    ],
)
def test_the_last_line_is_bounded_and_free_of_control_sequences(output: bytes, line: str) -> None:
    assert last_line(output) == line


@pytest.mark.parametrize(
    ("end", "failure"),
    [
        (HookEnd(0, b"all is well"), ""),
        (HookEnd(3), "prolog exited with code 3"),
        (HookEnd(3, b"disk full\n"), "prolog exited with code 3: disk full"),
        (HookEnd(137), "prolog was killed by signal 9"),
        (HookEnd(None), "prolog ended, and how was not recorded"),
        (HookEnd(None, b"formatting", is_late=True), "prolog did not end within 90 s and was killed: formatting"),
    ],
)
def test_a_hook_fails_unless_it_ends_with_0_in_its_time(end: HookEnd, failure: str) -> None:
    assert hook_failure("prolog", end, 90.0) == failure
