"""What the end of a hook means: the reason that people read, and none of what a terminal would obey; and when a node
is healthy."""

from __future__ import annotations

import pytest
from ganger_daemon.core.hook_outcomes import CheckRecord, HookEnd, after_check, hook_failure, last_line


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
        (HookEnd(128), "prolog exited with code 128"),
        (HookEnd(137), "prolog was killed by signal 9"),
        (HookEnd(192), "prolog was killed by signal 64"),
        (HookEnd(193), "prolog exited with code 193"),
        (HookEnd(255), "prolog exited with code 255"),
        (HookEnd(None), "prolog ended, and how was not recorded"),
        (HookEnd(None, b"formatting", is_late=True), "prolog did not end within 90 s and was killed: formatting"),
    ],
)
def test_a_hook_fails_unless_it_ends_with_0_in_its_time(end: HookEnd, failure: str) -> None:
    assert hook_failure("prolog", end, 90.0) == failure


def checked(record: CheckRecord, checks: str) -> CheckRecord:
    """The record after checks in a row: "x" fails, "." passes."""
    for check in checks:
        record = after_check(record, "no InfiniBand" if check == "x" else "")
    return record


@pytest.mark.parametrize(
    ("checks", "is_healthy", "needed"),
    [
        ("", True, 0),
        (".", True, 0),
        ("x", False, 3),
        ("x..", False, 3),
        ("x...", True, 3),
        ("x..x...", True, 3),
        ("x..x..", False, 3),
        ("xxxxx...", True, 3),
        # Soon after its return it needs twice as many.
        ("x...x", False, 6),
        ("x...x.....", False, 6),
        ("x...x......", True, 6),
        ("x... ...........x".replace(" ", ""), False, 6),
        # It has passed for long.
        ("x..." + 12 * "." + "x", False, 3),
    ],
)
def test_a_node_returns_after_checks_in_a_row_and_more_of_them_if_it_fails_again_soon(
    checks: str, is_healthy: bool, needed: int
) -> None:
    record = checked(CheckRecord(), checks)
    assert (record.fault == "", record.needed) == (is_healthy, needed)


def test_the_number_of_checks_is_bounded() -> None:
    record, needed = CheckRecord(), []
    for _ in range(8):
        record = checked(record, "x")
        needed.append(record.needed)
        record = checked(record, record.needed * ".")
        assert record.fault == ""
    assert needed == [3, 6, 12, 24, 48, 96, 96, 96]


def test_the_reason_counts_the_checks_that_a_node_has_passed_since() -> None:
    assert checked(CheckRecord(), ".").reason == ""
    assert checked(CheckRecord(), "x").reason == "no InfiniBand"
    text = "no InfiniBand; it has passed 2 of the 3 checks that it needs to return"
    assert checked(CheckRecord(), "x..").reason == text
