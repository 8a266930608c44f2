"""What CRIU writes to its log, in plain words."""

from __future__ import annotations

import pytest
from ganger_daemon.images.criu import errors_of, reason_of

# Lines as CRIU 4.2 writes them.
SOCKET = "(00.013061) Error (criu/sk-unix.c:905): unix: External socket is used. Consider using --ext-unix-sk option."
DEVICE = "(00.011) Error (criu/files-ext.c:96): Can't dump file 5 of that type [20666] (chr 195:255 /dev/nvidiactl)"
GHOST = "(00.02) Error (criu/files-reg.c:1080): Can't dump ghost file /dev/shm/x of 3000000 size, increase limit"
SIZE = "(00.05)   1000: Error (criu/files-reg.c:2252): File tmp/data has bad size 14 (expect 5)"
PID = "(00.05) Error (criu/cr-restore.c:1472): Can't fork for 1000: File exists"
FULL = "(00.06) Error (criu/page-xfer.c:312): page-xfer: Can't write pages: No space left on device"
UNKNOWN = "(00.07) Error (criu/never.c:1): Something that no version of CRIU has written"
NOISE = (
    "(00.000105) Warn  (compel/src/lib/ptrace.c:1): nothing to see",
    "(00.082263) Error (criu/util.c:1534): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted",
)
END = "(00.123455) Error (criu/cr-dump.c:1975): Dumping FAILED."


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (SOCKET, "a process is connected to a program outside the job"),
        (DEVICE, "a process still uses the GPU through /dev/nvidiactl"),
        (GHOST, "/dev/shm/x, removed and still open, has 3000000 bytes: too many"),
        (SIZE, "/tmp/data has 14 bytes; it had 5 when the image was made"),
        (PID, "a process id of the image is in use"),
        (FULL, "there is no space left for the image"),
    ],
)
def test_a_known_error_is_put_in_plain_words_with_the_original_behind_it(line: str, reason: str) -> None:
    log = "\n".join((*NOISE, line, END))
    assert reason_of(log).startswith(f"{reason} (CRIU: ")
    assert line.partition("): ")[2] in reason_of(log)


def test_an_unknown_error_is_given_as_it_is() -> None:
    assert reason_of("\n".join((*NOISE, UNKNOWN, END))) == "CRIU: Something that no version of CRIU has written"


def test_the_first_known_error_counts_before_its_consequences() -> None:
    assert "outside the job" in reason_of("\n".join((UNKNOWN, SOCKET, PID, END)))


def test_a_log_without_a_cause_gives_no_reason() -> None:
    assert errors_of("\n".join((*NOISE, END))) == ()
    assert reason_of("") == ""
