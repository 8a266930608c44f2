"""The errors of the API: one class per reason, the way onto the wire and back.

A caller's mistake or a state that does not allow a call is an `ApiError` subclass with a stable reason; on the wire it
is google.rpc.Status with one ErrorInfo (domain "ganger.v1") and, for a bad request, all field violations at once.
Refusals of gangs are values (`ganger.cluster.refusals`), not errors.
"""

# Classes carry the names of the reasons in the protos, which users see.
# ruff: noqa: N818

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "ganger.v1"
DETAILS_KEY = "grpc-status-details-bin"

# HTTP/2 peers limit headers to 8 KiB; a status beyond that would lose its details, and the client sees only INTERNAL.
_MAX_MESSAGE_CHARACTERS = 1_000
_MAX_VIOLATIONS_BYTES = 3_000
_MAX_METADATA_CHARACTERS = 256


class Violation(NamedTuple):
    """One thing wrong with a request: `field` is the path in the message, for example "spec.roles[0].tasks"."""

    field: str
    description: str


class ApiError(Exception):
    """Base of all errors of the API. `code` and `reason` are of the class; an error of an unknown reason (from a newer
    server) is an `ApiError` itself and carries both in the instance."""

    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN
    reason: str = "UNKNOWN"
    _by_reason: ClassVar[dict[str, type[ApiError]]] = {}

    def __init__(self, message: str, *, violations: Sequence[Violation] = (), **metadata: object) -> None:
        super().__init__(message)
        self.message = message
        self.violations = tuple(violations)
        self.metadata: dict[str, str] = {name: str(value) for name, value in metadata.items()}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        assert cls.reason not in ApiError._by_reason, f"two errors with reason {cls.reason}"
        ApiError._by_reason[cls.reason] = cls

    def __str__(self) -> str:
        lines = [self.message, *(f"{violation.field}: {violation.description}" for violation in self.violations)]
        return "\n  ".join(lines)


class SpecInvalid(ApiError):
    code, reason = grpc.StatusCode.INVALID_ARGUMENT, "SPEC_INVALID"


class NameInvalid(ApiError):
    code, reason = grpc.StatusCode.INVALID_ARGUMENT, "NAME_INVALID"


class PageTokenInvalid(ApiError):
    code, reason = grpc.StatusCode.INVALID_ARGUMENT, "PAGE_TOKEN_INVALID"


class RequestInvalid(ApiError):
    code, reason = grpc.StatusCode.INVALID_ARGUMENT, "REQUEST_INVALID"


class PlanInvalid(ApiError):
    code, reason = grpc.StatusCode.INVALID_ARGUMENT, "PLAN_INVALID"


class ReasonMissing(ApiError):
    code, reason = grpc.StatusCode.INVALID_ARGUMENT, "REASON_MISSING"


class ConfigurationSetMismatch(ApiError):
    code, reason = grpc.StatusCode.INVALID_ARGUMENT, "CONFIGURATION_SET_MISMATCH"


class JobNotFound(ApiError):
    code, reason = grpc.StatusCode.NOT_FOUND, "JOB_NOT_FOUND"


class ArrayNotFound(ApiError):
    code, reason = grpc.StatusCode.NOT_FOUND, "ARRAY_NOT_FOUND"


class NodeNotFound(ApiError):
    code, reason = grpc.StatusCode.NOT_FOUND, "NODE_NOT_FOUND"


class RankNotFound(ApiError):
    code, reason = grpc.StatusCode.NOT_FOUND, "RANK_NOT_FOUND"


class GangNotFound(ApiError):
    code, reason = grpc.StatusCode.NOT_FOUND, "GANG_NOT_FOUND"


class NodeSetNotFound(ApiError):
    code, reason = grpc.StatusCode.NOT_FOUND, "NODE_SET_NOT_FOUND"


class OffsetBeyondEnd(ApiError):
    code, reason = grpc.StatusCode.OUT_OF_RANGE, "OFFSET_BEYOND_END"


class EventsCompacted(ApiError):
    code, reason = grpc.StatusCode.OUT_OF_RANGE, "EVENTS_COMPACTED"


class LogNotKept(ApiError):
    code, reason = grpc.StatusCode.OUT_OF_RANGE, "LOG_NOT_KEPT"


class RequestReused(ApiError):
    code, reason = grpc.StatusCode.ALREADY_EXISTS, "REQUEST_REUSED"


class WireVersionUnsupported(ApiError):
    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "WIRE_VERSION_UNSUPPORTED"


class GangImpossible(ApiError):
    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "GANG_IMPOSSIBLE"


class QuotaExceeded(ApiError):
    """metadata: `user`, `needed` and `limit`, in GPUs."""

    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "QUOTA_EXCEEDED"


class JobFinished(ApiError):
    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "JOB_FINISHED"


class JobBusy(ApiError):
    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "JOB_BUSY"


class LevelUnavailable(ApiError):
    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "LEVEL_UNAVAILABLE"


class NotRunning(ApiError):
    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "NOT_RUNNING"


class MoveRefused(ApiError):
    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "MOVE_REFUSED"


class ResizeRefused(ApiError):
    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "RESIZE_REFUSED"


class CoresRefused(ApiError):
    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "CORES_REFUSED"


class UpdateRefused(ApiError):
    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "UPDATE_REFUSED"


class UpdateEndsJob(ApiError):
    """metadata: `job`, `jobs` (how many would end), `ran` and `limit` in seconds."""

    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "UPDATE_ENDS_JOB"


class NodeAlive(ApiError):
    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "NODE_ALIVE"


class NodeBusy(ApiError):
    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "NODE_BUSY"


class AlreadyRecording(ApiError):
    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "ALREADY_RECORDING"


class NotRecorded(ApiError):
    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "NOT_RECORDED"


class NodeSilent(ApiError):
    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "NODE_SILENT"


class NodeNameTaken(ApiError):
    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "NODE_NAME_TAKEN"


class StorageMismatch(ApiError):
    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "STORAGE_MISMATCH"


class RevisionConflict(ApiError):
    code, reason = grpc.StatusCode.ABORTED, "REVISION_CONFLICT"


class SessionSuperseded(ApiError):
    code, reason = grpc.StatusCode.ABORTED, "SESSION_SUPERSEDED"


class EpochStale(ApiError):
    code, reason = grpc.StatusCode.ABORTED, "EPOCH_STALE"


class JobNotYours(ApiError):
    code, reason = grpc.StatusCode.PERMISSION_DENIED, "JOB_NOT_YOURS"


class RoleNotPermitted(ApiError):
    """metadata: `method`, `permitted` (roles, by commas), and of a certificate `role` and `name`."""

    code, reason = grpc.StatusCode.PERMISSION_DENIED, "ROLE_NOT_PERMITTED"


class NodeNotYours(ApiError):
    code, reason = grpc.StatusCode.PERMISSION_DENIED, "NODE_NOT_YOURS"


class CertificateInvalid(ApiError):
    """A certificate of the right authority that names no role."""

    code, reason = grpc.StatusCode.UNAUTHENTICATED, "CERTIFICATE_INVALID"


class TokenInvalid(ApiError):
    code, reason = grpc.StatusCode.UNAUTHENTICATED, "TOKEN_INVALID"


class QueueFull(ApiError):
    code, reason = grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"


class UserLimit(ApiError):
    """A user has, or requests, more than each user may have. metadata: `limit`."""

    code, reason = grpc.StatusCode.RESOURCE_EXHAUSTED, "USER_LIMIT"


class MessageTooLarge(ApiError):
    code, reason = grpc.StatusCode.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE"


class NotSupported(ApiError):
    code, reason = grpc.StatusCode.UNIMPLEMENTED, "NOT_SUPPORTED"


class Restoring(ApiError):
    """The master's database was restored, and it waits for what nodes run. metadata: `nodes`, those it waits for."""

    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "RESTORING"


class NotRestoring(ApiError):
    """The master does not wait for nodes after a restore: there is nothing to go on with."""

    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "NOT_RESTORING"


class AdoptionRefused(ApiError):
    """A quarantined gang cannot be adopted as it is now; the message has the reason."""

    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "ADOPTION_REFUSED"


class NotReady(ApiError):
    code, reason = grpc.StatusCode.UNAVAILABLE, "NOT_READY"


class Internal(ApiError):
    """Our bug. metadata["id"] finds it in the server's log."""

    code, reason = grpc.StatusCode.INTERNAL, "INTERNAL"


class Unreachable(ApiError):
    """No server answers at the address. Made by the client; never sent."""

    code, reason = grpc.StatusCode.UNAVAILABLE, "UNREACHABLE"


class DeadlineExceeded(ApiError):
    """No answer within the deadline. Made on the client's side, or by a server that waited in vain."""

    code, reason = grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"


def to_status(error: ApiError) -> status_pb2.Status:
    """The error as google.rpc.Status. What would not fit into a header is cut: long texts, then late violations."""
    details = [
        error_details_pb2.ErrorInfo(
            reason=error.reason,
            domain=DOMAIN,
            metadata={name: value[:_MAX_METADATA_CHARACTERS] for name, value in error.metadata.items()},
        )
    ]
    packed = [_pack(details[0])]
    if error.violations:
        bad_request = error_details_pb2.BadRequest()
        for number, violation in enumerate(error.violations):
            bad_request.field_violations.add(
                field=violation.field[:200], description=violation.description[:_MAX_METADATA_CHARACTERS]
            )
            if bad_request.ByteSize() > _MAX_VIOLATIONS_BYTES and number + 1 < len(error.violations):
                bad_request.field_violations.add(field="", description=f"{len(error.violations) - number - 1} more")
                break
        packed.append(_pack(bad_request))
    return status_pb2.Status(code=error.code.value[0], message=error.message[:_MAX_MESSAGE_CHARACTERS], details=packed)


def to_trailing_metadata(error: ApiError) -> tuple[tuple[str, bytes], ...]:
    """Return the metadata that carries the status of `error` beside code and message."""
    return ((DETAILS_KEY, to_status(error).SerializeToString()),)


def from_status(status: status_pb2.Status) -> ApiError:
    """The error a status stands for. A status without our ErrorInfo becomes an `ApiError` with the reason UNKNOWN."""
    reason, metadata = "", {}
    violations: list[Violation] = []
    for packed in status.details:
        info = error_details_pb2.ErrorInfo()
        bad_request = error_details_pb2.BadRequest()
        if packed.Is(error_details_pb2.ErrorInfo.DESCRIPTOR) and packed.Unpack(info) and info.domain == DOMAIN:
            reason, metadata = info.reason, dict(info.metadata)
        elif packed.Is(error_details_pb2.BadRequest.DESCRIPTOR) and packed.Unpack(bad_request):
            violations += [Violation(each.field, each.description) for each in bad_request.field_violations]
    return _make(_CODES.get(status.code, grpc.StatusCode.UNKNOWN), reason, status.message, violations, metadata)


def from_rpc_error(error: grpc.RpcError) -> ApiError:
    """The error behind an exception of a gRPC call, sync or aio. Transport failures become `Unreachable`,
    `DeadlineExceeded` or `MessageTooLarge`."""
    for key, value in _trailing_metadata(error):
        if key == DETAILS_KEY and isinstance(value, bytes):
            return from_status(status_pb2.Status.FromString(value))
    code, details = _code(error), _details(error)
    if code is grpc.StatusCode.UNAVAILABLE:
        return Unreachable(details)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(details)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return MessageTooLarge(details)
    return _make(code, "", details, (), {})


def reason_of(error: BaseException) -> str:
    """The stable reason of an `ApiError` or of a gRPC call's exception; "" for anything else."""
    if isinstance(error, ApiError):
        return error.reason
    return from_rpc_error(error).reason if isinstance(error, grpc.RpcError) else ""


_CODES: Mapping[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


def _make(
    code: grpc.StatusCode, reason: str, message: str, violations: Sequence[Violation], metadata: Mapping[str, str]
) -> ApiError:
    kind = ApiError._by_reason.get(reason, ApiError)
    error = kind(message, violations=violations)
    error.metadata = dict(metadata)
    if kind is ApiError:
        error.code, error.reason = code, reason or "UNKNOWN"
    return error


def _pack(message: error_details_pb2.ErrorInfo | error_details_pb2.BadRequest) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


# A grpc.RpcError says in its documentation, not in its type, that it is also the call.
def _trailing_metadata(error: grpc.RpcError) -> Sequence[tuple[str, str | bytes]]:
    read = getattr(error, "trailing_metadata", None)
    return tuple(read() or ()) if read is not None else ()


def _code(error: grpc.RpcError) -> grpc.StatusCode:
    read = getattr(error, "code", None)
    code = read() if read is not None else None
    return code if isinstance(code, grpc.StatusCode) else grpc.StatusCode.UNKNOWN


def _details(error: grpc.RpcError) -> str:
    read = getattr(error, "details", None)
    return str((read() if read is not None else None) or error)
