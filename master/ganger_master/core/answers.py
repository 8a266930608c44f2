"""The answers of `decide`: values, refusals among them. Reasons are those in the comments of the protos."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from ganger.cluster.refusals import Refusal
from ganger.cluster.resources import NodeRow
from msgspec import Struct, field

Violations: TypeAlias = tuple[tuple[str, str], ...]


class Refused(Struct, frozen=True, gc=False):
    """Nothing happened. `violations` are (path in the request, what is wrong) pairs."""

    reason: str
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    violations: Violations = ()


class RefusedError(Exception):
    """A command is refused: raised where that is found, and returned as the answer by `decide`. See `Refused`."""

    def __init__(
        self, reason: str, message: str, metadata: Mapping[str, str] | None = None, violations: Violations = ()
    ) -> None:
        super().__init__(message)
        self.refused = Refused(reason, message, metadata or {}, violations)


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
