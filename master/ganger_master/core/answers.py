"""The answers of `decide`: values, refusals among them. Reasons are those in the comments of the protos."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

from ganger.cluster.refusals import Refusal
from ganger.cluster.resources import NodeRow
from msgspec import Struct, field

# gRPC status code by reason.
CODES: Final[Mapping[str, str]] = {
    "SPEC_INVALID": "INVALID_ARGUMENT",
    "REQUEST_INVALID": "INVALID_ARGUMENT",
    "PLAN_INVALID": "INVALID_ARGUMENT",
    "REASON_MISSING": "INVALID_ARGUMENT",
    "NAME_INVALID": "INVALID_ARGUMENT",
    "CONFIGURATION_SET_MISMATCH": "INVALID_ARGUMENT",
    "GANG_IMPOSSIBLE": "FAILED_PRECONDITION",
    "JOB_FINISHED": "FAILED_PRECONDITION",
    "JOB_BUSY": "FAILED_PRECONDITION",
    "LEVEL_UNAVAILABLE": "FAILED_PRECONDITION",
    "NOT_RUNNING": "FAILED_PRECONDITION",
    "MOVE_REFUSED": "FAILED_PRECONDITION",
    "RESIZE_REFUSED": "FAILED_PRECONDITION",
    "CORES_REFUSED": "FAILED_PRECONDITION",
    "UPDATE_REFUSED": "FAILED_PRECONDITION",
    "NODE_ALIVE": "FAILED_PRECONDITION",
    "NODE_BUSY": "FAILED_PRECONDITION",
    "NODE_NAME_TAKEN": "FAILED_PRECONDITION",
    "STORAGE_MISMATCH": "FAILED_PRECONDITION",
    "ADOPTION_REFUSED": "FAILED_PRECONDITION",
    "NOT_RESTORING": "FAILED_PRECONDITION",
    "RESTORING": "FAILED_PRECONDITION",
    "GANG_NOT_FOUND": "NOT_FOUND",
    "REQUEST_REUSED": "ALREADY_EXISTS",
    "QUEUE_FULL": "RESOURCE_EXHAUSTED",
    "USER_LIMIT": "RESOURCE_EXHAUSTED",
    "JOB_NOT_FOUND": "NOT_FOUND",
    "ARRAY_NOT_FOUND": "NOT_FOUND",
    "NODE_NOT_FOUND": "NOT_FOUND",
    "SESSION_SUPERSEDED": "ABORTED",
    "REVISION_CONFLICT": "ABORTED",
    "NOT_SUPPORTED": "UNIMPLEMENTED",
}


class Refused(Struct, frozen=True, gc=False):
    """Nothing happened. `violations` are (path in the request, what is wrong) pairs."""

    reason: str
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    violations: tuple[tuple[str, str], ...] = ()

    @property
    def code(self) -> str:
        return CODES[self.reason]


class JobAnswer(Struct, frozen=True, gc=False):
    """The answer of a command about one job: `state.jobs[number]` as it is after the command."""

    number: int


class ArrayAnswer(Struct, frozen=True, gc=False):
    """The array whose members are the jobs of the next numbers."""

    number: int


class UpdateAnswer(Struct, frozen=True, gc=False):
    """The answer to an array update: how many members are as requested, and why the others are not, by job."""

    number: int
    updated: int
    refused: tuple[tuple[int, Refused], ...]


class NodeAnswer(Struct, frozen=True, gc=False):
    name: str


class Approved(Struct, frozen=True, gc=False):
    number: int
    epoch: int
    revision: int
    view_version: int
    candidate: int


class Rejected(Struct, frozen=True, gc=False):
    number: int
    refusals: tuple[Refusal, ...]
    rows: tuple[NodeRow, ...]
    view_version: int
    turn_kept: bool


class ChangeAnswer(Struct, frozen=True, gc=False):
    number: int
    approved: bool
    revision: int
    refusals: tuple[Refusal, ...] = ()


class PlanAnswer(Struct, frozen=True, gc=False):
    verdicts: tuple[ChangeAnswer, ...]
    view_version: int


class SessionAnswer(Struct, frozen=True, gc=False):
    node: str
    session: str


class Done(Struct, frozen=True, gc=False):
    """It is done; there is nothing to say."""


Answer: TypeAlias = (
    Refused
    | JobAnswer
    | ArrayAnswer
    | UpdateAnswer
    | NodeAnswer
    | Approved
    | Rejected
    | PlanAnswer
    | SessionAnswer
    | Done
)
