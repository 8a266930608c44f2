"""What each method of the API promises: its deadline, whether a lost answer may be asked for again, and how large a
request of it may be. To read a request takes its server up to 25 ms a MiB, so most methods take little.

The table is checked against the services in the tests, so that a new method cannot be forgotten.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

# Streams end by themselves after 30 minutes; a minute more lets the server be the one to end them.
_STREAM_SECONDS = 31 * 60.0


@dataclass(frozen=True, slots=True)
class Method:
    """`deadline_seconds` is None for streams that last as long as both ends live."""

    path: str
    deadline_seconds: float | None = 10.0
    is_idempotent: bool = True
    is_stream: bool = False
    largest_bytes: int = 64 * 1024


_MIB = 1024 * 1024
_JOBS, _SCHEDULING, _NODES = "ganger.v1.JobService", "ganger.v1.SchedulingService", "ganger.v1.NodeService"
_AGENTS, _PEERS = "ganger.agent.v1.AgentService", "ganger.agent.v1.PeerService"

METHODS: dict[str, Method] = {
    f"/{method.path}": method
    for method in (
        # The request id makes a repeated submission the same submission.
        Method(f"{_JOBS}/CreateJob", 30.0, largest_bytes=_MIB // 2),
        Method(f"{_JOBS}/GetJob"),
        Method(f"{_JOBS}/ListJobs"),
        Method(f"{_JOBS}/WatchJob", _STREAM_SECONDS, is_stream=True),
        Method(f"{_JOBS}/CancelJob"),
        # As CreateJob.
        Method(f"{_JOBS}/UpdateJob"),
        Method(f"{_JOBS}/SuspendJob"),
        Method(f"{_JOBS}/ResumeJob"),
        # A second move would be refused as busy although the first was taken.
        Method(f"{_JOBS}/MoveJob", 30.0, is_idempotent=False),
        Method(f"{_JOBS}/RetuneJob", is_idempotent=False),
        Method(f"{_JOBS}/ResizeJob", is_idempotent=False),
        Method(f"{_JOBS}/ReadLog", _STREAM_SECONDS, is_stream=True),
        Method(f"{_JOBS}/ExplainJob"),
        Method(f"{_JOBS}/ListEvents"),
        Method(f"{_JOBS}/CreateArray", 30.0, largest_bytes=5 * _MIB // 8),
        Method(f"{_JOBS}/GetArray"),
        Method(f"{_JOBS}/ListArrays"),
        Method(f"{_JOBS}/CancelArray"),
        Method(f"{_JOBS}/UpdateArray"),
        Method(f"{_SCHEDULING}/GetView"),
        Method(f"{_SCHEDULING}/WatchView", _STREAM_SECONDS, is_stream=True),
        Method(f"{_SCHEDULING}/WatchLeases", None, is_stream=True),
        Method(f"{_SCHEDULING}/WatchTurns", None, is_stream=True),
        # A second request would be refused as stale although the first was approved.
        Method(f"{_SCHEDULING}/RequestGang", is_idempotent=False, largest_bytes=_MIB),
        Method(f"{_SCHEDULING}/RequestGangs", None, is_idempotent=False, is_stream=True, largest_bytes=_MIB),
        Method(f"{_SCHEDULING}/ReleaseGang", is_idempotent=False),
        # A plan of 250 starts with 4,096 claims, and the order of 10,000 pending jobs, takes 0.4 MiB.
        Method(f"{_SCHEDULING}/ProposePlan", is_idempotent=False, largest_bytes=_MIB // 2),
        Method(f"{_SCHEDULING}/WatchCluster", _STREAM_SECONDS, is_stream=True),
        Method(f"{_SCHEDULING}/WatchProgress", _STREAM_SECONDS, is_stream=True),
        Method(f"{_NODES}/ListNodes"),
        Method(f"{_NODES}/GetNode"),
        Method(f"{_NODES}/DrainNode"),
        Method(f"{_NODES}/CordonNode"),
        Method(f"{_NODES}/UncordonNode"),
        Method(f"{_NODES}/DeclareNodeLost"),
        # A second call would find no such node although the first was taken.
        Method(f"{_NODES}/RemoveNode", is_idempotent=False),
        Method(f"{_NODES}/GetCluster"),
        Method(f"{_NODES}/ListQuarantinedGangs"),
        # Second calls would find nothing to do although the first were taken.
        Method(f"{_NODES}/EndQuarantinedGang", is_idempotent=False),
        Method(f"{_NODES}/AdoptQuarantinedGang", is_idempotent=False),
        Method(f"{_NODES}/SettleRestore", is_idempotent=False),
        # Answers when the recording has ended: an hour at most, and what the file then takes.
        Method(f"{_NODES}/RecordDecisions", 61 * 60.0, is_idempotent=False),
        Method(f"{_AGENTS}/CreateSession", largest_bytes=_MIB),
        # Held up to max_wait; the daemon itself calls again, and only its newest call counts.
        Method(f"{_AGENTS}/Reconcile", 120.0, is_idempotent=False, largest_bytes=4 * _MIB),
        Method(f"{_AGENTS}/ReportProgress", None, is_idempotent=False, is_stream=True, largest_bytes=4 * _MIB),
        Method(f"{_PEERS}/RelayBoundary", None, is_idempotent=False, is_stream=True, largest_bytes=4 * _MIB),
        Method(f"{_PEERS}/GetRendezvous", 120.0),
        Method(f"{_PEERS}/ShardWritten", largest_bytes=4 * _MIB),
        Method(f"{_PEERS}/SwitchRow", 5.0, largest_bytes=4 * _MIB),
        Method(f"{_PEERS}/ReadLog", _STREAM_SECONDS, is_stream=True),
        Method("grpc.health.v1.Health/Check", 5.0),
        Method("grpc.health.v1.Health/Watch", None, is_stream=True),
    )
}


def deadline_seconds(path: str) -> float | None:
    """The default deadline of "/package.Service/Method"; 10 s for methods not in the table."""
    method = METHODS.get(path)
    return 10.0 if method is None else method.deadline_seconds


def largest_bytes(path: str) -> int:
    """Return how many bytes a request to "/package.Service/Method" may have; unknown methods: a whole message."""
    method = METHODS.get(path)
    return 4 * _MIB if method is None else method.largest_bytes


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
