"""The methods of the API: deadline, repeatability and request size of each, and the roles that may call it.

To read a request takes its server up to 25 ms a MiB, so most methods take little. The tables are checked against the
services in the tests, so that a new method cannot be forgotten.

A certificate names its holder by one URI among its subject alternative names, `ganger://ROLE/NAME`, for example
`ganger://daemon/n1`. A caller with a server's start-up token, on the server's own machine, has the roles of `LOCAL`. A
person may come with an access token in place of a certificate, as a user.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from google.protobuf.message import Message

from ganger.wire.errors import ApiError, CertificateInvalid, MessageTooLarge, RoleNotPermitted

# Streams end by themselves after 30 minutes; a minute more lets the server be the one to end them.
_STREAM_S = 31 * 60.0


class CallerRole(StrEnum):
    """What a party of a cluster is there for."""

    USER = "user"
    OPERATOR = "operator"
    SCHEDULER = "scheduler"
    PLANNER = "planner"
    DAEMON = "daemon"
    MASTER = "master"


_PEOPLE: Final = frozenset({CallerRole.USER, CallerRole.OPERATOR})
_READERS: Final = _PEOPLE | {CallerRole.SCHEDULER, CallerRole.PLANNER}
_ALL: Final = frozenset(CallerRole)
_OPERATORS: Final = frozenset({CallerRole.OPERATOR})
_DAEMONS: Final = frozenset({CallerRole.DAEMON})
# A user's own job scheduler runs as that user, for that user's jobs: the services look at whose they are.
_SCHEDULERS: Final = _PEOPLE | {CallerRole.SCHEDULER}
_PLANNERS: Final = frozenset({CallerRole.OPERATOR, CallerRole.PLANNER})
_MASTERS: Final = frozenset({CallerRole.MASTER})


@dataclass(frozen=True, slots=True)
class Method:
    """`roles`: those that may call it; `deadline_s`: None for streams that last as long as both ends live."""

    path: str
    roles: frozenset[CallerRole]
    deadline_s: float | None = 10.0
    is_idempotent: bool = True
    is_stream: bool = False
    largest_bytes: int = 64 * 1024


# The fields of a job and of what it requests that all users may read: neither commands and environments nor results.
VISIBLE_OF_JOB: Final = (
    "name uid spec user state revision gang suspended_level create_time start_time end_time failures preemptions"
    " blockers queue_rank run_duration running_since_time progress array"
)
VISIBLE_OF_SPEC: Final = (
    "display_name roles device_type locality nodes priority time_limit gpu_memory_bytes max_failures preemptible"
    " gpus_min gpus_max deadline movable weight partition"
)

_MIB = 1024 * 1024
_JOBS, _SCHEDULING, _NODES = "ganger.v1.JobService", "ganger.v1.SchedulingService", "ganger.v1.NodeService"
_AGENTS, _PEERS = "ganger.agent.v1.AgentService", "ganger.agent.v1.PeerService"

METHODS: dict[str, Method] = {
    f"/{method.path}": method
    for method in (
        # The request id makes a repeated submission the same submission.
        Method(f"{_JOBS}/CreateJob", _PEOPLE, 30.0, largest_bytes=_MIB // 2),
        Method(f"{_JOBS}/ValidateSubmission", _PEOPLE, 30.0, largest_bytes=5 * _MIB // 8 + 64),
        Method(f"{_JOBS}/GetJob", _READERS),
        Method(f"{_JOBS}/ListJobs", _READERS),
        Method(f"{_JOBS}/WatchJob", _READERS, _STREAM_S, is_stream=True),
        Method(f"{_JOBS}/CancelJob", _PEOPLE),
        Method(f"{_JOBS}/UpdateJob", _PEOPLE),
        Method(f"{_JOBS}/SuspendJob", _PEOPLE),
        Method(f"{_JOBS}/ResumeJob", _PEOPLE),
        # A second move would be refused as busy although the first was taken.
        Method(f"{_JOBS}/MoveJob", _PEOPLE, 30.0, is_idempotent=False),
        Method(f"{_JOBS}/RetuneJob", _PEOPLE, is_idempotent=False),
        Method(f"{_JOBS}/ResizeJob", _PEOPLE, is_idempotent=False),
        Method(f"{_JOBS}/ReadLog", _PEOPLE, _STREAM_S, is_stream=True),
        Method(f"{_JOBS}/GetSeries", _PEOPLE, 30.0),
        Method(f"{_JOBS}/ExplainJob", _READERS),
        Method(f"{_JOBS}/ListEvents", _READERS),
        Method(f"{_JOBS}/CreateArray", _PEOPLE, 30.0, largest_bytes=5 * _MIB // 8),
        Method(f"{_JOBS}/GetArray", _READERS),
        Method(f"{_JOBS}/ListArrays", _READERS),
        Method(f"{_JOBS}/CancelArray", _PEOPLE),
        Method(f"{_JOBS}/UpdateArray", _PEOPLE),
        Method(f"{_JOBS}/GetUsage", _READERS),
        Method(f"{_SCHEDULING}/GetView", _READERS),
        Method(f"{_SCHEDULING}/WatchView", _READERS, _STREAM_S, is_stream=True),
        Method(f"{_SCHEDULING}/WatchLeases", _SCHEDULERS, None, is_stream=True),
        Method(f"{_SCHEDULING}/WatchTurns", _SCHEDULERS, None, is_stream=True),
        # A second request would be refused as stale although the first was approved.
        Method(f"{_SCHEDULING}/RequestGang", _SCHEDULERS, is_idempotent=False, largest_bytes=_MIB),
        Method(
            f"{_SCHEDULING}/RequestGangs", _SCHEDULERS, None, is_idempotent=False, is_stream=True, largest_bytes=_MIB
        ),
        Method(f"{_SCHEDULING}/ReleaseGang", _SCHEDULERS, is_idempotent=False),
        # A plan of 250 starts with 4,096 claims, and the order of 10,000 pending jobs, takes 0.4 MiB.
        Method(f"{_SCHEDULING}/ProposePlan", _SCHEDULERS | _PLANNERS, is_idempotent=False, largest_bytes=_MIB // 2),
        Method(f"{_SCHEDULING}/WatchCluster", _PLANNERS, _STREAM_S, is_stream=True),
        Method(f"{_SCHEDULING}/WatchProgress", _READERS, _STREAM_S, is_stream=True),
        Method(f"{_NODES}/ListNodes", _READERS),
        Method(f"{_NODES}/GetNode", _READERS),
        Method(f"{_NODES}/DrainNode", _OPERATORS),
        Method(f"{_NODES}/CordonNode", _OPERATORS),
        Method(f"{_NODES}/UncordonNode", _OPERATORS),
        Method(f"{_NODES}/DeclareNodeLost", _OPERATORS),
        # A second call would find no such node although the first was taken.
        Method(f"{_NODES}/RemoveNode", _OPERATORS, is_idempotent=False),
        Method(f"{_NODES}/ListPartitions", _READERS),
        Method(f"{_NODES}/CreateReservation", _OPERATORS),
        Method(f"{_NODES}/ListReservations", _READERS),
        Method(f"{_NODES}/UpdateReservation", _OPERATORS),
        Method(f"{_NODES}/DeleteReservation", _OPERATORS),
        # A daemon's certificate is what a node has: `ganger doctor` compares clocks and versions there.
        Method(f"{_NODES}/GetCluster", _READERS | _DAEMONS),
        Method(f"{_NODES}/ListQuarantinedGangs", _OPERATORS),
        # Second calls would find nothing to do although the first were taken.
        Method(f"{_NODES}/EndQuarantinedGang", _OPERATORS, is_idempotent=False),
        Method(f"{_NODES}/AdoptQuarantinedGang", _OPERATORS, is_idempotent=False),
        Method(f"{_NODES}/SettleRestore", _OPERATORS, is_idempotent=False),
        # Each call makes a token.
        Method(f"{_NODES}/CreateToken", _OPERATORS, is_idempotent=False),
        Method(f"{_NODES}/ListTokens", _OPERATORS),
        Method(f"{_NODES}/RevokeToken", _OPERATORS),
        # Answers when the recording has ended: an hour at most, and what the file then takes.
        Method(f"{_NODES}/RecordDecisions", _OPERATORS, 61 * 60.0, is_idempotent=False),
        Method(f"{_AGENTS}/CreateSession", _DAEMONS, largest_bytes=_MIB),
        # Each call makes a certificate.
        Method(f"{_AGENTS}/RenewCertificate", _DAEMONS, is_idempotent=False),
        # Held up to max_wait; the daemon itself calls again, and only its newest call counts.
        Method(f"{_AGENTS}/Reconcile", _DAEMONS, 120.0, is_idempotent=False, largest_bytes=4 * _MIB),
        Method(
            f"{_AGENTS}/ReportProgress", _DAEMONS, None, is_idempotent=False, is_stream=True, largest_bytes=4 * _MIB
        ),
        Method(f"{_PEERS}/RelayBoundary", _DAEMONS, None, is_idempotent=False, is_stream=True, largest_bytes=4 * _MIB),
        Method(f"{_PEERS}/GetRendezvous", _DAEMONS, 120.0),
        Method(f"{_PEERS}/ShardWritten", _DAEMONS, largest_bytes=4 * _MIB),
        Method(f"{_PEERS}/KeepCheckpoint", _DAEMONS, 3700.0),
        Method(f"{_PEERS}/SwitchRow", _DAEMONS, 5.0, largest_bytes=4 * _MIB),
        Method(f"{_PEERS}/ReadLog", _MASTERS, _STREAM_S, is_stream=True),
        Method(f"{_PEERS}/ReadSeries", _MASTERS),
        Method("grpc.health.v1.Health/Check", _ALL, 5.0),
        Method("grpc.health.v1.Health/List", _ALL, is_idempotent=False),
        Method("grpc.health.v1.Health/Watch", _ALL, None, is_stream=True),
        Method("grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", _ALL, is_stream=True),
    )
}


def deadline_s(path: str) -> float | None:
    """The default deadline of "/package.Service/Method"; 10 s for methods not in the table."""
    method = METHODS.get(path)
    return 10.0 if method is None else method.deadline_s


def largest_bytes(path: str) -> int:
    """Return how many bytes a request to "/package.Service/Method" may have; unknown methods: a whole message."""
    method = METHODS.get(path)
    return 4 * _MIB if method is None else method.largest_bytes


def check_size(request: Message, method: str, remedy: str) -> None:
    """Raise MessageTooLarge, as the server would, before a submission is sent. `method`: its full name."""
    most = largest_bytes(method)
    if request.ByteSize() > most:
        raise MessageTooLarge(f"the submission is {request.ByteSize()} bytes, a message holds {most}: {remedy}")


def retry_service_config() -> str:
    """The gRPC service config that repeats idempotent calls while the server is UNAVAILABLE: four tries in ~1 s.

    No streams: their readers reopen them, and one that gRPC (1.85) repeats when its server is killed as it is
    opened now and then never ends, not even at the server's return."""
    retried = []
    for method in METHODS.values():
        if method.is_idempotent and not method.is_stream:
            service, _, name = method.path.rpartition("/")
            retried.append({"service": service, "method": name})
    policy = {
        "maxAttempts": 4,
        "initialBackoff": "0.1s",
        "maxBackoff": "1s",
        "backoffMultiplier": 2.5,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    return json.dumps({"methodConfig": [{"name": retried, "retryPolicy": policy}]})


SCHEME: Final = "ganger://"
_SERVED: Final = "ganger"
# A job's user is kept in a column of this many characters and shown in tables.
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._@-]{0,61}[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True)
class CallerIdentity:
    """The role and name that a certificate, or the token, stands for."""

    role: CallerRole
    name: str

    @property
    def uri(self) -> str:
        return f"{SCHEME}{self.role}/{self.name}"

    @property
    def has_own_jobs_only(self) -> bool:
        """Whether those that were submitted by its name are all that it may touch."""
        return self.role is CallerRole.USER

    def may_read(self, user: str) -> bool:
        """Return whether what `user` runs, and what comes of it, is for its eyes."""
        return self.role is CallerRole.OPERATOR or (self.role is CallerRole.USER and self.name == user)

    def __str__(self) -> str:
        return f"{self.role} {self.name!r}"


def served_name(role: CallerRole, host: str) -> str:
    """Return the DNS name by which a certificate states that its holder serves ``host`` in this role.

    The client checks it in the TLS handshake, which compares names and no URIs: "m.lab" of a master is
    "m.lab.master.ganger". An IPv6 address is written out, with dashes.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        name = host.lower()
    else:
        name = address.exploded.replace(":", "-")
    return f"{name}.{role}.{_SERVED}"


def is_served_name(name: str) -> bool:
    """Return whether a DNS name is one of `served_name`."""
    return name.endswith(f".{_SERVED}")


def is_name(name: str) -> bool:
    """Letters, digits, dots, dashes, underscores and @, at most 63, starting and ending with a letter or digit."""
    return _NAME.fullmatch(name) is not None


def identity_of(uris: Iterable[str]) -> CallerIdentity:
    """Return the identity that the URIs of a certificate name; URIs of other schemes are ignored. Raises
    CertificateInvalid unless exactly one names a role and a name."""
    ours = [uri for uri in uris if uri.startswith(SCHEME)]
    if len(ours) != 1:
        found = "names no role" if not ours else f"names {len(ours)} roles"
        raise CertificateInvalid(
            f"the certificate {found}: it needs one URI ganger://ROLE/NAME among its subject alternative names"
        )
    role, _, name = ours[0].removeprefix(SCHEME).partition("/")
    if role not in set(CallerRole) or not is_name(name):
        raise CertificateInvalid(
            f"the certificate's URI {ours[0][:100]!r} is not ganger://ROLE/NAME with one of the roles "
            + ", ".join(CallerRole)
        )
    return CallerIdentity(CallerRole(role), name)


# Programs that the master starts, and local users that may read its directory. Daemons are not among them: with
# certificates every daemon has its own, or it could act for any node.
LOCAL: Final = frozenset({CallerRole.OPERATOR, CallerRole.SCHEDULER, CallerRole.PLANNER})


def _roles(path: str) -> frozenset[CallerRole]:
    """A method that is not in the table is for no role."""
    method = METHODS.get(path)
    return frozenset() if method is None else method.roles


def check_call(method: str, caller: CallerIdentity) -> None:
    """Check a call. Raises RoleNotPermitted unless the caller may call "/package.Service/Method"."""
    permitted = _roles(method)
    if caller.role not in permitted:
        raise _not_permitted(method, permitted, f"the caller is {caller}", role=caller.role, name=caller.name)


def check_local_call(method: str) -> None:
    """The same for a caller with the start-up token, on a server that asks others for certificates."""
    permitted = _roles(method)
    if not permitted & LOCAL:
        raise _not_permitted(method, permitted, "the token does not do for it here: come with a certificate")


def _not_permitted(method: str, permitted: frozenset[CallerRole], but: str, **caller: str) -> ApiError:
    *most, last = [f"{role}s" for role in CallerRole if role in permitted] or ["no role"]
    roles = f"{', '.join(most)} and {last}" if most else last
    name = method.rpartition("/")[2]
    error = RoleNotPermitted(f"{name} is for {roles}; {but}")
    error.metadata = {"method": name, "permitted": ",".join(sorted(permitted)), **caller}
    return error
