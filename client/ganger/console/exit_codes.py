"""Exit codes of all programs (docs/reference/cli.md), and the error that ends a command with a code and a sentence."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    OK = 0
    JOB_FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    REFUSED = 4
    UNREACHABLE = 5
    NOT_PERMITTED = 6
    BUG = 7
    # Of a master whose database another master has taken over. A restart would take the database back.
    FENCED = 8
    INTERRUPTED = 130


class CommandError(Exception):
    """Something a command itself found wrong; the message says what to do."""

    def __init__(self, message: str, code: ExitCode = ExitCode.REFUSED) -> None:
        super().__init__(message)
        self.code = code
