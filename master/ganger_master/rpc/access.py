"""Access of users: holders of access tokens, which fields of jobs they may read, and how much they may request.

They read all fields of their own jobs, and of other jobs only what a queue listing shows. Limits on requests and
changes per second and on open streams protect the service of all users, above what people and their scripts do:
requests beyond the rate wait. Operators and the master's own programs have no limits. A daemon has its
certificate renewed a few times an hour.
"""

from __future__ import annotations

import asyncio
import hmac
import inspect
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, Final

import grpc
from ganger.text import counted
from ganger.v1 import array_pb2, job_pb2
from ganger.wire import errors
from ganger.wire.errors import ApiError, UserLimit
from ganger.wire.methods import VISIBLE_OF_JOB, VISIBLE_OF_SPEC, CallerIdentity, CallerRole
from ganger.wire.servers import Callers, WrappingInterceptor, behaviour_of, rebuilt
from google.protobuf.message import Message

from ganger_master.core.node_model import AccessToken
from ganger_master.rpc.answer_messages import VisibleState


def _fields(message: type[Message], names: str) -> frozenset[str]:
    found = frozenset(names.split())
    assert found <= set(message.DESCRIPTOR.fields_by_name), f"{message.DESCRIPTOR.full_name} lacks some of: {names}"
    return found


# By message, the fields that every user may read.
_VISIBLE: Final[dict[type[Message], frozenset[str]]] = {
    kind: _fields(kind, names)
    for kind, names in (
        (job_pb2.Job, VISIBLE_OF_JOB),
        (job_pb2.JobSpec, VISIBLE_OF_SPEC),
        (job_pb2.Progress, "step samples steps_per_s time step_time first_step_time device_utilization"),
        (array_pb2.ArrayMembership, "array member size max_concurrent held"),
        (array_pb2.ArrayMember, "index"),
        (array_pb2.Array, "name display_name user size max_concurrent create_time end_time states gpus"),
    )
}


def new_token(user: str) -> tuple[str, str, str]:
    """Return the name of a new access token, its text, and the digest of the text, which is all that is to be kept."""
    name = secrets.token_hex(_NAME_BYTES)
    # The client reads its user's name from it. No part of it can be exchanged: the digest is of the whole.
    text = f"{user}.{name}.{secrets.token_urlsafe(_SECRET_BYTES)}"
    return name, text, sha256(text.encode()).hexdigest()


_NAME_BYTES: Final = 8
_SECRET_BYTES: Final = 32


class TokenHolders:
    """The holders of the access tokens of a master. `tokens`: those that are durable, by name. `now`: Unix seconds."""

    def __init__(self, tokens: Mapping[str, AccessToken], now: Callable[[], float] = time.time) -> None:
        self._tokens = tokens
        self._now = now

    def holder_of(self, text: bytes) -> CallerIdentity:
        """Return the user of a token. Raises TokenInvalid, TokenExpired and TokenRevoked."""
        name = text.rpartition(b".")[0].rpartition(b".")[2].decode("ascii", "replace")
        token = self._tokens.get(name)
        digest = sha256(text).hexdigest()
        if token is None or not hmac.compare_digest(digest, token.digest):
            raise errors.TokenInvalid("the access token is none of this cluster: ask an operator for another")
        error: ApiError | None = None
        if token.revoke_time:
            error = errors.TokenRevoked(f"the token {name} of {token.user} was revoked: ask an operator for another")
        elif token.expiry <= self._now():
            end = datetime.fromtimestamp(token.expiry, UTC)
            ended = f"the token {name} of {token.user} ended on {end:%Y-%m-%d %H:%M UTC}"
            error = errors.TokenExpired(f"{ended}: ask an operator for another")
        if error is not None:
            error.metadata = {"token": name, "user": token.user}
            raise error
        return CallerIdentity(CallerRole.USER, token.user)


_HOUR_S: Final = 3600.0
# Of one node's certificate. One that lasts for a quarter of an hour needs so many.
RENEWALS_PER_HOUR: Final = 6


def check_jobs(caller: CallerIdentity, jobs: VisibleState, numbers: Iterable[int]) -> None:
    """Check that a user owns all of these jobs; other callers may access all jobs. Raises JobNotYours, JobNotFound."""
    if caller.has_own_jobs_only:
        for number in numbers:
            job = jobs.job_named(number)
            check_owner(caller, job.name, job.user)


def check_owner(caller: CallerIdentity, name: str, user: str) -> None:
    """Raise JobNotYours for a user that did not submit the job or array."""
    if caller.has_own_jobs_only and caller.name != user:
        raise errors.JobNotYours(
            f"{name} is {user}'s: only that user and operators may do this; the caller is {caller}",
            job=name,
            user=user,
        )


def outline(job: job_pb2.Job) -> job_pb2.Job:
    """Return a copy of a job with the fields that every user may read."""
    shown = job_pb2.Job()
    shown.CopyFrom(job)
    _keep_visible(shown)
    _keep_visible(shown.spec)
    if shown.HasField("progress"):
        _keep_visible(shown.progress)
        # Not a number: none was reported.
        shown.progress.loss = float("nan")
    if shown.HasField("array"):
        _keep_visible(shown.array)
        _keep_visible(shown.array.member)
    return shown


def array_outline(array: array_pb2.Array) -> array_pb2.Array:
    """Return a copy of an array with the fields that every user may read."""
    shown = array_pb2.Array()
    shown.CopyFrom(array)
    _keep_visible(shown)
    return shown


def _keep_visible(message: Message) -> None:
    for found, _ in message.ListFields():
        if found.name not in _VISIBLE[type(message)]:
            message.ClearField(found.name)


# Bursts, in seconds of the lasting rate: enough for a script that reads all its jobs, and for 20 arrays.
_REQUESTS_BURST_S: Final = 10.0
_CHANGES_BURST_S: Final = 2_000.0


# Requests beyond the rate wait so long at most. What would wait longer is refused, and the refusal held
# back: the loop of a caller that tries again at once costs others little.
LONGEST_WAIT_S: Final = 2.0
_REFUSED_AFTER_S: Final = 1.0
# What a call that changes jobs counts as, in requests: it is written to disk, and starts or ends something.
_CHANGE_COST: Final = 5.0


@dataclass(slots=True)
class Bucket:
    """A token bucket: `rate` in a second, at most `burst` at once. Full at first."""

    rate: float
    burst: float
    level: float | None = None
    filled_at: float = 0.0

    def take(self, now: float, cost: float = 1.0, longest_s: float = 0.0) -> float:
        """Return the seconds until there is enough for the cost; take it unless these are more than `longest_s`. The
        level may fall below zero; later calls wait until it is refilled. A cost above a burst is taken from a full
        bucket. `now`: seconds of a steady clock."""
        passed = max(0.0, now - self.filled_at)
        level = self.burst if self.level is None else min(self.burst, self.level + passed * self.rate)
        self.filled_at = now
        wait_s = max(0.0, min(cost, self.burst) - level) / self.rate
        self.level = level if wait_s > longest_s else level - cost
        return wait_s


@dataclass(slots=True)
class _User:
    requests: Bucket
    changes: Bucket
    streams: int = 0
    # Held by the change that is being made.
    one_change: asyncio.Lock = field(default_factory=asyncio.Lock)


class UserLimits:
    """What each user has used of the limits. All methods raise UserLimit for what exceeds a limit."""

    def __init__(self, requests: int, changes: int, streams: int, steady: Callable[[], float] = time.monotonic) -> None:
        self._requests = requests
        self._changes = changes
        self._streams = streams
        self._steady = steady
        self._users: dict[str, _User] = {}

    def charge_requests(self, caller: CallerIdentity, count: float = 1.0) -> float:
        """Count requests of a caller; return the seconds until its rate allows them. Raises UserLimit where these
        would be more than `LONGEST_WAIT_S`."""
        user = self._user(caller)
        if user is None:
            return 0.0
        wait_s = user.requests.take(self._steady(), count, LONGEST_WAIT_S)
        if wait_s > LONGEST_WAIT_S:
            raise self._exceeded(
                caller, wait_s, counted(self._requests, "request"), "requests_per_user", self._requests
            )
        return wait_s

    async def wait_for_rate(self, caller: CallerIdentity, count: float = 1.0) -> None:
        """Count requests of a caller, and wait until its rate allows them. Raises UserLimit as `charge_requests`."""
        if wait_s := self.charge_requests(caller, count):
            await asyncio.sleep(wait_s)

    @asynccontextmanager
    async def change(self, caller: CallerIdentity, count: int = 1) -> AsyncIterator[None]:
        """Count changes of jobs, each of which is an entry of the history; wait until the caller's rate allows them,
        and hold its next ones back until the context ends. Raises UserLimit where they are too many."""
        user = self._user(caller)
        if user is None:
            yield
            return
        await self.wait_for_rate(caller, _CHANGE_COST - 1.0)
        if wait_s := user.changes.take(self._steady(), count):
            raise self._exceeded(
                caller, wait_s, f"{counted(self._changes, 'change')} of jobs", "changes_per_user", self._changes
            )
        async with user.one_change:
            yield

    @contextmanager
    def stream(self, caller: CallerIdentity) -> Iterator[None]:
        """Count a stream of a caller as long as the context lasts. Raises UserLimit where it has too many."""
        user = self._user(caller)
        if user is None:
            yield
            return
        if user.streams >= self._streams:
            raise UserLimit(
                f"user {caller.name} has {counted(user.streams, 'stream')} open, and a user may have {self._streams}"
                " (streams_per_user): end some that watch jobs or follow logs",
                limit=self._streams,
            )
        user.streams += 1
        try:
            yield
        finally:
            user.streams -= 1

    def _user(self, caller: CallerIdentity) -> _User | None:
        """Return the record of the caller's user; None for a caller without limits."""
        if not caller.has_own_jobs_only:
            return None
        user = self._users.get(caller.name)
        if user is None:
            requests = Bucket(self._requests, self._requests * _REQUESTS_BURST_S)
            user = _User(requests, Bucket(self._changes, self._changes * _CHANGES_BURST_S))
            self._users[caller.name] = user
        return user

    @staticmethod
    def _exceeded(caller: CallerIdentity, wait_s: float, what: str, setting: str, limit: int) -> ApiError:
        text = f"user {caller.name} has used up {what} a second ({setting}): try again in {wait_s:.1f} s"
        return UserLimit(text, limit=limit)


class RenewalLimit:
    """How often the certificate of each node was renewed in the last hour: each renewal is a file for good."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._renewed: dict[str, list[float]] = {}

    @contextmanager
    def counted(self, node: str) -> Iterator[None]:
        """Count a renewal, unless the context ends with an error. Raises UserLimit where there were too many."""
        now = self._now()
        recent = self._renewed[node] = [one for one in self._renewed.get(node, ()) if 0.0 <= now - one < _HOUR_S]
        if len(recent) >= RENEWALS_PER_HOUR:
            again = datetime.fromtimestamp(recent[0] + _HOUR_S, UTC)
            raise UserLimit(
                f"the certificate of nodes/{node} was renewed {RENEWALS_PER_HOUR} times in an hour: the next time at"
                f" {again:%H:%M:%S} UTC; let certificates last longer (--days)",
                limit=RENEWALS_PER_HOUR,
            )
        recent.append(now)
        try:
            yield
        except Exception:
            # A cancelled call counts: its file is written nevertheless.
            with suppress(ValueError):
                self._renewed[node].remove(now)
            raise


class LimitInterceptor(WrappingInterceptor):
    """Counts each call, which waits until the caller's rate allows it, and each stream as long as it is open."""

    def __init__(self, limits: UserLimits, callers: Callers) -> None:
        super().__init__()
        self._limits = limits
        self._callers = callers

    def _wrap(self, method: str, handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
        behaviour = behaviour_of(handler)

        async def answer(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            async with _refusals_held_back():
                await self._limits.wait_for_rate(self._callers.of(context))
                return await behaviour(request, context)

        async def stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            caller = self._callers.of(context)
            async with _refusals_held_back():
                await self._limits.wait_for_rate(caller)
                with self._limits.stream(caller):
                    async for response in behaviour(request, context):
                        yield response

        return rebuilt(handler, stream if inspect.isasyncgenfunction(behaviour) else answer)


@asynccontextmanager
async def _refusals_held_back() -> AsyncIterator[None]:
    try:
        yield
    except UserLimit:
        await asyncio.sleep(_REFUSED_AFTER_S)
        raise
