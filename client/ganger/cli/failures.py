"""What a command says and which code it exits with when something goes wrong (documented in docs/reference/cli.md)."""

from __future__ import annotations

import errno
import os
import sys
import time
import traceback
import uuid
from pathlib import Path

import click

from ganger.console import CommandError, ExitCode, visible

__all__ = ["CommandError", "ExitCode", "exit_code", "report"]


def report(error: BaseException) -> int:
    """Writes one explanation to stderr and returns the exit code."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return ExitCode.USAGE
    if isinstance(error, click.ClickException):
        if isinstance(error, click.UsageError) and error.ctx is not None:
            _say(f"{error.format_message()}\n  see `{error.ctx.command_path} --help`")
        else:
            _say(error.format_message())
        return ExitCode.USAGE
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return ExitCode.INTERRUPTED
    if isinstance(error, BrokenPipeError):
        # The reader (head, less) has had enough. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    if isinstance(error, OSError) and error.strerror and (error.filename or error.errno == errno.ENOSPC):
        # The machine's state, not our bug: a directory that is a file, a disk that is full, missing rights.
        _say(f"{error.filename or 'the disk'}: {error.strerror.lower()}")
        return ExitCode.NOT_PERMITTED if isinstance(error, PermissionError) else ExitCode.REFUSED
    if isinstance(error, CommandError):
        _say(str(error))
        return error.code
    if isinstance(error, UnicodeEncodeError) and "\udc80" <= error.object[error.start] <= "\udcff":
        # Bytes of the command line that were no UTF-8; the wire carries nothing else.
        _say(f"{error.object!r} is not UTF-8: give it another way, or set the locale of the terminal")
        return ExitCode.USAGE
    return _report_api_error(error)


def _report_api_error(error: BaseException) -> int:
    from ganger.wire.endpoints import CredentialError, EndpointError
    from ganger.wire.errors import ApiError, JobNotFound

    if isinstance(error, EndpointError):
        _say(str(error))
        if isinstance(error, CredentialError):
            return ExitCode.NOT_PERMITTED
        return ExitCode.USAGE if error.found else ExitCode.UNREACHABLE
    if isinstance(error, ApiError):
        _say(str(error))
        # The sentence carries the figures already where the master put them in.
        if error.reason == "GANG_IMPOSSIBLE" and "=" not in error.message:
            for name, value in sorted(error.metadata.items()):
                print(f"  {name}: {value}", file=sys.stderr)
        # It is there, but is no job: what was asked for is asked of a member.
        is_array = isinstance(error, JobNotFound) and "array" in error.metadata
        return ExitCode.USAGE if is_array else exit_code(error)
    return _report_bug(error)


def exit_code(error: Exception) -> ExitCode:
    """The exit code of an `ApiError`: by its status code, so that reasons yet unknown have one too."""
    import grpc

    codes = {
        grpc.StatusCode.INVALID_ARGUMENT: ExitCode.USAGE,
        grpc.StatusCode.OUT_OF_RANGE: ExitCode.USAGE,
        grpc.StatusCode.NOT_FOUND: ExitCode.NOT_FOUND,
        grpc.StatusCode.FAILED_PRECONDITION: ExitCode.REFUSED,
        grpc.StatusCode.ALREADY_EXISTS: ExitCode.REFUSED,
        grpc.StatusCode.ABORTED: ExitCode.REFUSED,
        grpc.StatusCode.RESOURCE_EXHAUSTED: ExitCode.REFUSED,
        grpc.StatusCode.UNIMPLEMENTED: ExitCode.REFUSED,
        grpc.StatusCode.UNAVAILABLE: ExitCode.UNREACHABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED: ExitCode.UNREACHABLE,
        grpc.StatusCode.PERMISSION_DENIED: ExitCode.NOT_PERMITTED,
        grpc.StatusCode.UNAUTHENTICATED: ExitCode.NOT_PERMITTED,
    }
    return codes.get(getattr(error, "code", None) or grpc.StatusCode.UNKNOWN, ExitCode.BUG)


def _report_bug(error: BaseException) -> int:
    number = uuid.uuid4().hex[:12]
    base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    path = base / "ganger" / "cli-errors.log"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with path.open("a") as file:
            # Arguments only by count: they may hold what --env was given.
            file.write(f"--- {number} {time.strftime('%Y-%m-%dT%H:%M:%S%z')} {' '.join(sys.argv[1:2])}\n")
            file.writelines(traceback.format_exception(error))
        where = f"details are in {path}"
    except OSError as failure:
        where = f"no details could be written to {path} ({failure.strerror})"
    _say(f"this is a bug in ganger ({type(error).__name__}), number {number}: {where}")
    return ExitCode.BUG


def _say(message: str) -> None:
    sys.stdout.flush()
    print(f"ganger: {visible(message, lines=True)}", file=sys.stderr)
