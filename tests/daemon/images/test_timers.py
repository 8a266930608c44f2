"""Timers behind descriptors go on in a restored process as they were."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon.images.unit_job import real, restored, started
from ganger_daemon.images.contract import DumpRequest, ImageRefusedError
from ganger_daemon.images.descriptors import ArmedTimer, mend_timers
from injob.launcher_kit import Place, launcher_place

RELATIVE, ABSOLUTE, UNTIL_CLOCK_IS_SET = 0, 1, 3
NEVER = (0, 0)


@pytest.mark.parametrize(
    ("timer", "expected"),
    [
        pytest.param(ArmedTimer(0, RELATIVE, (3, 7), NEVER), ArmedTimer(0, RELATIVE, (3, 7), NEVER), id="once"),
        pytest.param(ArmedTimer(1, RELATIVE, NEVER, NEVER), ArmedTimer(1, RELATIVE, NEVER, NEVER), id="expired once"),
        pytest.param(
            ArmedTimer(0, RELATIVE, (3, 7), (9, 0)), ArmedTimer(0, RELATIVE, (3, 7), (9, 0)), id="periodic, running"
        ),
        pytest.param(
            ArmedTimer(1, RELATIVE, NEVER, (9, 5)), ArmedTimer(1, RELATIVE, (9, 5), (9, 5)), id="periodic, not read"
        ),
        pytest.param(
            ArmedTimer(0, RELATIVE, NEVER, (9, 5)), ArmedTimer(0, RELATIVE, NEVER, (9, 5)), id="periodic, disarmed"
        ),
        pytest.param(ArmedTimer(0, ABSOLUTE, (3, 7), NEVER), ArmedTimer(0, RELATIVE, (3, 7), NEVER), id="absolute"),
        pytest.param(
            ArmedTimer(0, UNTIL_CLOCK_IS_SET, (3, 7), NEVER), ArmedTimer(0, 2, (3, 7), NEVER), id="until it is set"
        ),
    ],
)
def test_a_timer_is_armed_again_with_the_time_that_is_left(timer: ArmedTimer, expected: ArmedTimer) -> None:
    assert timer.restorable() == expected


def test_an_image_in_an_unknown_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "files.img").write_bytes(b"12345678" + b"\x02\0\0\0\xff\xff")
    with pytest.raises(ImageRefusedError, match="another format"):
        mend_timers(tmp_path)


# Prints in each step how often the timer has expired since the step before.
TICKING = """
import ctypes, os, struct, sys, time
libc = ctypes.CDLL(None)
timer = libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK)
def arm(flags, seconds, interval):
    first = seconds + (time.clock_gettime(time.CLOCK_MONOTONIC) if flags else 0)
    words = [int(part) for each in (interval, first) for part in (each // 1, each % 1 * 1e9)]
    assert libc.timerfd_settime(timer, flags, struct.pack("qqqq", *words), None) == 0
def ticks():
    try:
        return struct.unpack("Q", os.read(timer, 8))[0]
    except BlockingIOError:
        return 0
count = 0
def step():
    global count
    count += 1
    print(count, ticks(), flush=True)
    time.sleep(0.05)
"""
# It has expired whenever an image is taken, and is read after that.
UNREAD = TICKING + "arm(0, 0.001, 0.001)\ntime.sleep(0.05)\nwhile True: step()\n"
PASSED = TICKING + "arm(1, 0.001, 0)\ntime.sleep(0.05)\nticks()\nwhile True: step()\n"


@pytest.fixture
def place() -> Iterator[Place]:
    yield from launcher_place(preload=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="units need root")
@pytest.mark.parametrize(
    ("program", "expires"),
    [pytest.param(UNREAD, True, id="periodic, not read"), pytest.param(PASSED, False, id="absolute, passed")],
)
def test_a_timer_expires_after_a_restore_if_it_would_have_without(
    program: str, expires: bool, place: Place, tmp_path: Path
) -> None:
    images = real()
    job = started(place, program)
    facts = images.dump(DumpRequest(job.unit, tmp_path, goes_on=False))
    again = restored(images, place, tmp_path, facts)
    again.until_it_counts(4)
    ticks = [int(line.split()[1]) for line in again.log.read_text().splitlines()]
    assert all(number > 0 for number in ticks) if expires else not any(ticks), ticks
