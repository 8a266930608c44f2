"""The audit log: calls that change jobs, nodes or the cluster, readings of a job's log, and refused callers.

One JSON object a line, in the state directory, readable by the master's account only. A line is with the kernel before
the caller has its answer, so it outlives the master, but not the machine; that of a log is written when its reading
ends. Calls of job schedulers and daemons, and what only reads, are not recorded: there are thousands a second.
"""

from __future__ import annotations

import errno
import inspect
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import grpc
import msgspec
from ganger.text import os_failure, os_reason
from ganger.wire.errors import ApiError, reason_of
from ganger.wire.methods import CallerRole
from ganger.wire.servers import Callers, WrappingInterceptor, behaviour_of, rebuilt

from ganger_master.rpc.access import Bucket

log = logging.getLogger(__name__)

FILE: Final = "audit.jsonl"

_LARGEST_BYTES: Final = 64 << 20
_FORMER_FILES: Final = 8
_SERVICES: Final = ("/ganger.v1.JobService/", "/ganger.v1.NodeService/")
_READS: Final = ("Get", "List", "Watch", "Explain", "Validate")
_REFUSALS: Final = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED})
# Failed calls a second, and at once: a flood of them must not push out what others did.
_FAILED_RATE: Final = 10.0
_FAILED_BURST: Final = 1_000.0
_LONGEST: Final = 200


class AuditRecord(msgspec.Struct, omit_defaults=True):
    """`source`: address of the caller. `subject`: name of the job, array, node or gang. `result`: OK, the reason
    of the refusal, or CANCELLED: the caller hung up before the end, and what it ordered may be done all the same.
    `left_out`: failed calls since the last record that were not recorded, for they were too many."""

    time: str
    caller: str
    source: str
    method: str
    subject: str
    result: str
    left_out: int = 0


class AuditLog:
    """Appends records to a file, and starts another one when it is large; the last eight are kept. A record that cannot
    be written is reported in the master's own log, and holds nothing up."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1
        self._size = 0
        self._is_failing = False

    def append(self, record: AuditRecord) -> None:
        line = msgspec.json.encode(record) + b"\n"
        try:
            if self._file < 0:
                self._open()
            if self._size + len(line) > _LARGEST_BYTES:
                self._rotate()
            self._write(line)
        except OSError as error:
            if not self._is_failing:
                log.error("audit log not written", extra={"file": str(self._path), "error": os_reason(error)})
            self._is_failing = True
        else:
            self._is_failing = False

    def _write(self, line: bytes) -> None:
        written = os.write(self._file, line)
        if written < len(line):
            # The disk is full. The next record must not go on in the middle of this one.
            os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += written

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _open(self) -> None:
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._size = os.fstat(self._file).st_size

    def _rotate(self) -> None:
        """Start another file. Where that fails, this one goes on for as long again, rather than losing records."""
        try:
            for number in range(_FORMER_FILES - 1, 0, -1):
                with suppress(FileNotFoundError):
                    self._former(number).replace(self._former(number + 1))
            self._path.replace(self._former(1))
        except OSError as error:
            log.error("audit log not rotated", extra={"file": str(self._path), "error": os_failure(error)})
            self._size = 0
            return
        self.close()
        self._open()

    def _former(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")


class _Caller(NamedTuple):
    """Role and name, empty for an unknown one, and the address that the call came from."""

    name: str
    source: str


class AuditInterceptor(WrappingInterceptor):
    """Records calls once they are answered, refused ones too. It comes before the one that refuses callers.

    steady: a steady clock, in seconds.
    """

    def __init__(self, records: AuditLog, callers: Callers, steady: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._records = records
        self._callers = callers
        self._steady = steady
        self._failed = Bucket(_FAILED_RATE, _FAILED_BURST)
        self._left_out = 0

    def _wrap(self, method: str, handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
        behaviour = behaviour_of(handler)
        name = method.rpartition("/")[2]
        is_recorded = method.startswith(_SERVICES) and not name.startswith(_READS)

        def note(begun: _Caller | None, context: Any, request: Any, response: Any, error: BaseException | None) -> None:
            if begun is None and not (isinstance(error, ApiError) and error.code in _REFUSALS):
                return
            if isinstance(error, Exception) and self._failed.take(self._steady()):
                self._left_out += 1
                return
            if begun is None or _is_unknown(error):
                # A refusal comes while the call is there.
                begun = self._caller(context, is_known=not _is_unknown(error))
            subject = str(getattr(response, "name", "") or getattr(request, "name", ""))
            self._record(begun, name, subject, _result(error))

        def begin(context: Any) -> _Caller | None:
            return self._caller(context, is_known=True) if is_recorded else None

        async def answer(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            begun = begin(context)
            try:
                response = await behaviour(request, context)
            # A caller that hangs up cancels the call, and what it ordered may be done all the same.
            except BaseException as error:
                note(begun, context, request, None, error)
                raise
            note(begun, context, request, response, None)
            return response

        async def stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            begun = begin(context)
            try:
                async for response in behaviour(request, context):
                    yield response
            except BaseException as error:
                note(begun, context, request, None, error)
                raise
            note(begun, context, request, None, None)

        return rebuilt(handler, stream if inspect.isasyncgenfunction(behaviour) else answer)

    def _caller(self, context: Any, *, is_known: bool) -> _Caller:
        """Return the caller. Not after the end of a call: the generator of a stream may be closed long after it, when
        the call behind `context` has been freed, and gRPC ends the process that looks at it."""
        try:
            # Without a certificate, the token is what makes a caller the operator of this machine.
            identity = self._callers.of(context) if is_known else self._callers.remote(context)
            name = "" if identity is None else f"{identity.role}/{identity.name}"
        except ApiError as error:
            # An access token that is known names its user, although it is not taken.
            user = error.metadata.get("user", "")
            name = f"{CallerRole.USER}/{user}" if user else ""
        # "ipv4:10.0.0.1:7" or "ipv6:%5B::1%5D:7".
        return _Caller(name, unquote(str(context.peer())).rpartition(":")[0].partition(":")[2].strip("[]"))

    def _record(self, caller: _Caller, method: str, subject: str, result: str) -> None:
        left_out, self._left_out = self._left_out, 0
        moment = datetime.now(UTC).isoformat(timespec="milliseconds")
        record = AuditRecord(moment, caller.name, caller.source, method, subject[:_LONGEST], result, left_out)
        self._records.append(record)


def _result(error: BaseException | None) -> str:
    if error is None:
        return "OK"
    if isinstance(error, ApiError):
        return reason_of(error)
    return "INTERNAL" if isinstance(error, Exception) else "CANCELLED"


def _is_unknown(error: BaseException | None) -> bool:
    return isinstance(error, ApiError) and error.code is grpc.StatusCode.UNAUTHENTICATED
