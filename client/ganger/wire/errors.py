"""The errors of the API: one class per reason, the way onto the wire and back.

A caller's mistake or a state that does not allow a call is an `ApiError` subclass with a stable reason; on the wire it
is google.rpc.Status with one ErrorInfo (domain "ganger.v1") and, for a bad request, all field violations at once.
Refusals of gangs are values (`ganger.cluster.refusals`), not errors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import grpc
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

    def __str__(self) -> str:
        lines = [f"{violation.field}: {violation.description}" for violation in self.violations]
        # A message may have its violations in it already.
        return "\n  ".join([self.message, *(line for line in lines if line not in self.message)])


def _error(name: str, code: grpc.StatusCode, kind: type[ApiError] = ApiError) -> type[ApiError]:
    """Return the class of an error. Its reason is the name as it is in the protos, "JOB_NOT_FOUND" of JobNotFound."""
    reason = re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper()
    made = type(name, (kind,), {"code": code, "reason": reason, "__module__": __name__})
    ApiError._by_reason[reason] = made
    return made


_Code = grpc.StatusCode
SpecInvalid = _error("SpecInvalid", _Code.INVALID_ARGUMENT)
NameInvalid = _error("NameInvalid", _Code.INVALID_ARGUMENT)
PageTokenInvalid = _error("PageTokenInvalid", _Code.INVALID_ARGUMENT)
RequestInvalid = _error("RequestInvalid", _Code.INVALID_ARGUMENT)
PlanInvalid = _error("PlanInvalid", _Code.INVALID_ARGUMENT)
ReasonMissing = _error("ReasonMissing", _Code.INVALID_ARGUMENT)
ReservationInvalid = _error("ReservationInvalid", _Code.INVALID_ARGUMENT)
ConfigurationSetMismatch = _error("ConfigurationSetMismatch", _Code.INVALID_ARGUMENT)
JobNotFound = _error("JobNotFound", _Code.NOT_FOUND)
ArrayNotFound = _error("ArrayNotFound", _Code.NOT_FOUND)
NodeNotFound = _error("NodeNotFound", _Code.NOT_FOUND)
RankNotFound = _error("RankNotFound", _Code.NOT_FOUND)
GangNotFound = _error("GangNotFound", _Code.NOT_FOUND)
ReservationNotFound = _error("ReservationNotFound", _Code.NOT_FOUND)
TokenNotFound = _error("TokenNotFound", _Code.NOT_FOUND)
NodeSetNotFound = _error("NodeSetNotFound", _Code.NOT_FOUND)
OffsetBeyondEnd = _error("OffsetBeyondEnd", _Code.OUT_OF_RANGE)
EventsCompacted = _error("EventsCompacted", _Code.OUT_OF_RANGE)
LogNotKept = _error("LogNotKept", _Code.OUT_OF_RANGE)
RequestReused = _error("RequestReused", _Code.ALREADY_EXISTS)
WireVersionUnsupported = _error("WireVersionUnsupported", _Code.FAILED_PRECONDITION)
GangImpossible = _error("GangImpossible", _Code.FAILED_PRECONDITION)
# metadata: `user`, `needed` and `limit`, in GPUs.
QuotaExceeded = _error("QuotaExceeded", _Code.FAILED_PRECONDITION)
# metadata: `partition`, and figures where there are some.
NoSuchPartition = _error("NoSuchPartition", _Code.NOT_FOUND)
PartitionClosed = _error("PartitionClosed", _Code.FAILED_PRECONDITION)
PartitionTime = _error("PartitionTime", _Code.FAILED_PRECONDITION)
PartitionLimit = _error("PartitionLimit", _Code.FAILED_PRECONDITION)
JobFinished = _error("JobFinished", _Code.FAILED_PRECONDITION)
JobBusy = _error("JobBusy", _Code.FAILED_PRECONDITION)
LevelUnavailable = _error("LevelUnavailable", _Code.FAILED_PRECONDITION)
NotRunning = _error("NotRunning", _Code.FAILED_PRECONDITION)
MoveRefused = _error("MoveRefused", _Code.FAILED_PRECONDITION)
ResizeRefused = _error("ResizeRefused", _Code.FAILED_PRECONDITION)
CoresRefused = _error("CoresRefused", _Code.FAILED_PRECONDITION)
UpdateRefused = _error("UpdateRefused", _Code.FAILED_PRECONDITION)
# metadata: `job`, `jobs` (how many would end), `ran` and `limit` in seconds.
UpdateEndsJob = _error("UpdateEndsJob", _Code.FAILED_PRECONDITION)
ReservationExists = _error("ReservationExists", _Code.FAILED_PRECONDITION)
# metadata: `node`, and `reservation` that has it.
ReservationConflict = _error("ReservationConflict", _Code.FAILED_PRECONDITION)
NodeAlive = _error("NodeAlive", _Code.FAILED_PRECONDITION)
NodeBusy = _error("NodeBusy", _Code.FAILED_PRECONDITION)
AlreadyRecording = _error("AlreadyRecording", _Code.FAILED_PRECONDITION)
NotRecorded = _error("NotRecorded", _Code.FAILED_PRECONDITION)
NodeSilent = _error("NodeSilent", _Code.FAILED_PRECONDITION)
NodeNameTaken = _error("NodeNameTaken", _Code.FAILED_PRECONDITION)
StorageMismatch = _error("StorageMismatch", _Code.FAILED_PRECONDITION)
RevisionConflict = _error("RevisionConflict", _Code.ABORTED)
SessionSuperseded = _error("SessionSuperseded", _Code.ABORTED)
EpochStale = _error("EpochStale", _Code.ABORTED)
JobNotYours = _error("JobNotYours", _Code.PERMISSION_DENIED)
# metadata: `method`, `permitted` (roles, by commas), and of a certificate `role` and `name`.
RoleNotPermitted = _error("RoleNotPermitted", _Code.PERMISSION_DENIED)
NodeNotYours = _error("NodeNotYours", _Code.PERMISSION_DENIED)
# A certificate of the right authority that names no role.
CertificateInvalid = _error("CertificateInvalid", _Code.UNAUTHENTICATED)
CertificateRevoked = _error("CertificateRevoked", _Code.UNAUTHENTICATED)
TokenInvalid = _error("TokenInvalid", _Code.UNAUTHENTICATED)
# Of a person's token, which is known. metadata: `token`, its name, and `user`.
TokenExpired = _error("TokenExpired", _Code.UNAUTHENTICATED)
TokenRevoked = _error("TokenRevoked", _Code.UNAUTHENTICATED)
QueueFull = _error("QueueFull", _Code.RESOURCE_EXHAUSTED)
# A user has, or requests, more than each user may have. metadata: `limit`.
UserLimit = _error("UserLimit", _Code.RESOURCE_EXHAUSTED)
MessageTooLarge = _error("MessageTooLarge", _Code.RESOURCE_EXHAUSTED)
NotSupported = _error("NotSupported", _Code.UNIMPLEMENTED)
# The master's database was restored, and it waits for what nodes run. metadata: `nodes`, those it waits for.
Restoring = _error("Restoring", _Code.FAILED_PRECONDITION)
# The master does not wait for nodes after a restore: there is nothing to continue with.
NotRestoring = _error("NotRestoring", _Code.FAILED_PRECONDITION)
# A quarantined gang cannot be adopted as it is now; the message has the reason.
AdoptionRefused = _error("AdoptionRefused", _Code.FAILED_PRECONDITION)
NotReady = _error("NotReady", _Code.UNAVAILABLE)
# The master stands by, or has lost its lease, and has done nothing. metadata: `leader`, the address of the master that
# leads, if it is known.
NotLeader = _error("NotLeader", _Code.UNAVAILABLE, NotReady)
# The master may have lost its lease after it began the call, which may have been carried out. metadata: as NotLeader.
LeaseLost = _error("LeaseLost", _Code.UNAVAILABLE, NotReady)
# A daemon could not fetch a checkpoint from another node's disk.
CheckpointNotFetched = _error("CheckpointNotFetched", _Code.UNAVAILABLE)
# Our bug. metadata["id"] finds it in the server's log.
Internal = _error("Internal", _Code.INTERNAL)
# No server answers at the address. Made by the client; never sent.
Unreachable = _error("Unreachable", _Code.UNAVAILABLE)
# The program of a job's own scheduler ended or hung before it had its job. Made by the client; never sent.
SchedulerFailed = _error("SchedulerFailed", _Code.FAILED_PRECONDITION)
# No answer within the deadline. Made on the client's side, or by a server that waited in vain.
DeadlineExceeded = _error("DeadlineExceeded", _Code.DEADLINE_EXCEEDED)


def to_status(error: ApiError) -> status_pb2.Status:
    """The error as google.rpc.Status. What would not fit into a header is cut: long texts, then late violations."""
    metadata = {name: value[:_MAX_METADATA_CHARACTERS] for name, value in error.metadata.items()}
    status = status_pb2.Status(code=error.code.value[0], message=error.message[:_MAX_MESSAGE_CHARACTERS])
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata))
    if error.violations:
        bad_request = error_details_pb2.BadRequest()
        for number, (field, description) in enumerate(error.violations, 1):
            bad_request.field_violations.add(field=field[:200], description=description[:_MAX_METADATA_CHARACTERS])
            if bad_request.ByteSize() > _MAX_VIOLATIONS_BYTES and number < len(error.violations):
                bad_request.field_violations.add(field="", description=f"{len(error.violations) - number} more")
                break
        status.details.add().Pack(bad_request)
    return status


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

    def read(name: str) -> Any:
        # A grpc.RpcError says in its documentation, not in its type, that it is also the call.
        method = getattr(error, name, None)
        return None if method is None else method()

    for key, value in read("trailing_metadata") or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            return from_status(status_pb2.Status.FromString(value))
    code, details = read("code"), str(read("details") or error)
    code = code if isinstance(code, grpc.StatusCode) else grpc.StatusCode.UNKNOWN
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
