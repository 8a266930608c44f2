"""Metrics for Prometheus: families from a snapshot, and the HTTP endpoint. Loaded only where a master serves metrics.

A label never names a job, a user or a node: the number of series does not grow with them. Names follow Prometheus'
conventions: base units, `_total` for what only rises. The endpoint is a thread of its own and serves one request at a
time, each bounded in time. It takes the snapshot in an instant of the master's event loop; the sums are made here.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from ganger.cluster.refusals import Reason
from ganger.cluster.resources import ConfigurationSet, NodeRow
from ganger.job_state import JobState
from ganger.wire.endpoints import EndpointError, why_not_listening
from ganger.wire.tls import Renewed
from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily

from ganger_master.core.accounting import UserUsage
from ganger_master.core.gang_model import Gang, GangIntent, GangPhase, OutcomeKind
from ganger_master.core.job_model import JobRecord
from ganger_master.core.node_model import Node, NodeState
from ganger_master.core.tenancy import TeamIndex
from ganger_master.core.usage import standings
from ganger_master.runtime.telemetry import Distribution, MasterCounters
from ganger_master.runtime.writer import Writer


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one scrape reads. `blockers`: the first reason of the last refusal of each waiting job; `answered`: when
    each node called last, by the clock of `now`; `daemons`: how many hold a call; `teams`: of the settings, none
    without; `usages`: of all users."""

    now: float
    policy: str
    is_ready: bool
    jobs: tuple[JobRecord, ...]
    gangs: tuple[Gang, ...]
    nodes: tuple[Node, ...]
    rows: Mapping[str, NodeRow]
    configuration_sets: Mapping[str, ConfigurationSet]
    node_sets: int
    blockers: tuple[str, ...]
    answered: Mapping[str, float]
    daemons: int
    approved: int
    meter: MasterCounters
    teams: TeamIndex
    usages: tuple[UserUsage, ...]
    usage_half_life_s: float


def take(writer: Writer, daemons: int, now: float) -> Snapshot:
    """Copy references only: two milliseconds of the event loop where there are 16,000 nodes and 20,000 jobs."""
    committed, state = writer.committed, writer.state
    return Snapshot(
        now=now,
        policy=state.settings.policy,
        is_ready=writer.is_ready and writer.ownership.refusal() is None,
        jobs=tuple(committed.jobs.values()),
        gangs=tuple(committed.gangs.values()),
        nodes=tuple(committed.nodes.values()),
        rows=dict(committed.rows),
        configuration_sets=dict(committed.configuration_sets),
        node_sets=len(committed.sets),
        blockers=tuple([refusals[0].reason.name for refusals in state.queue.refusals.values() if refusals]),
        answered=dict(state.nodes.last_answer),
        daemons=daemons,
        approved=committed.counters.approved,
        meter=deepcopy(writer.meter),
        teams=state.teams,
        usages=tuple(committed.usage.values()) if state.teams else (),
        usage_half_life_s=state.settings.usage_half_life_s,
    )


# The others have ended, and are counted as events.
_LIVE = (JobState.PENDING, JobState.HOLDING, JobState.SUSPENDED)
_GPU_STATES = ("busy", "idle", "drained", "silent", "faulty", "unknown", "lost")


def families(snapshot: Snapshot, version: str) -> Iterator[Any]:
    yield InfoMetricFamily("ganger_master", "The master.", {"version": version, "policy": snapshot.policy})
    about = "1 while the master answers calls; 0 while it stands by, may have lost its lease, or reads its store again."
    yield _gauge("ganger_master_ready", about, snapshot.is_ready)
    yield from _of_jobs(snapshot)
    yield from _of_gangs(snapshot.gangs)
    yield from _of_nodes(snapshot)
    yield from _of_teams(snapshot)
    yield from _of_the_meter(snapshot)


def gpus_of(node: Node, devices: int, row: NodeRow | None) -> Counter[str]:
    """Return the number of the node's devices in each state; each device counts once."""
    if node.lost:
        return Counter(lost=devices)
    if not node.heard or row is None:
        return Counter(unknown=devices)
    free = row.free_mask.bit_count()
    faulty = len(node.device_faults)
    state = "silent" if node.silent or node.unanswerable else "idle" if node.takes_gangs else "drained"
    return Counter({state: free, "faulty": faulty, "busy": devices - free - faulty})


def _is_waiting(job: JobRecord) -> bool:
    # Held array members and jobs in backoff do not wait for resources.
    return job.state is JobState.PENDING and not (job.held or job.again_at)


def _of_jobs(snapshot: Snapshot) -> Iterator[Any]:
    live = [job for job in snapshot.jobs if job.state in _LIVE]
    waiting = list(filter(_is_waiting, live))
    states = Counter(job.state.name.lower() for job in live)
    yield _gauges("ganger_jobs", "Jobs that have not ended.", "state", _all(states, (s.name.lower() for s in _LIVE)))
    yield _gauge("ganger_pending_gpus", "GPUs that pending jobs request.", sum(job.gpus for job in waiting))
    since = min((job.pending_since for job in waiting if job.pending_since), default=snapshot.now)
    text = "Longest time for which a job has been pending."
    yield _gauge("ganger_longest_pending_seconds", text, max(0.0, snapshot.now - since))
    late = sum(0 < job.spec.deadline < snapshot.now for job in live)
    yield _gauge("ganger_jobs_past_deadline", "Jobs that have not ended by their deadline.", late)
    text = "Pending jobs that were refused a gang, by the first reason of the last refusal."
    yield _gauges("ganger_pending_jobs_refused", text, "reason", Counter(snapshot.blockers))


def _of_gangs(gangs: Collection[Gang]) -> Iterator[Any]:
    number: Counter[str] = Counter()
    devices: Counter[str] = Counter()
    for gang in gangs:
        phase = gang.phase.name.lower()
        number[phase] += 1
        devices[phase] += sum(claim.device_mask.bit_count() for claim in gang.held)
    phases = [phase.name.lower() for phase in GangPhase]
    idle = sum(gang.devices for gang in gangs if gang.idle is not None and gang.intent is GangIntent.RUN)
    text = "GPUs of running jobs that have made no step and used no GPU for idle_warning; one that several share counts"
    yield _gauge("ganger_idle_gpus", f"{text} for each.", idle)
    yield _gauges("ganger_gangs", "Gangs that hold or keep something.", "phase", _all(number, phases))
    text = "GPUs that gangs hold; one that several share counts for each."
    yield _gauges("ganger_gang_gpus", text, "phase", _all(devices, phases))


def _of_nodes(snapshot: Snapshot) -> Iterator[Any]:
    states = Counter(node.state.name.lower() for node in snapshot.nodes)
    all_states = [state.name.lower() for state in NodeState]
    yield _gauges("ganger_nodes", "Nodes that have joined and were not removed.", "state", _all(states, all_states))
    yield _gauge("ganger_daemons_connected", "Daemons whose call the master holds at this moment.", snapshot.daemons)
    answered = snapshot.answered
    alive = [answered[node.name] for node in snapshot.nodes if not node.lost and node.name in answered]
    text = "Longest silence of a node that is not lost."
    yield _gauge("ganger_longest_silence_seconds", text, max(0.0, snapshot.now - min(alive, default=snapshot.now)))
    text = "Nodes on which the last start of a gang failed."
    yield _gauge("ganger_nodes_failing_starts", text, sum(node.launch_failures > 0 for node in snapshot.nodes))
    text = "Nodes that are out of service because their health check fails, or has not passed often enough since."
    yield _gauge("ganger_nodes_unhealthy", text, sum(bool(node.faults) for node in snapshot.nodes))
    text = "Nodes on which several jobs step more slowly than on other nodes."
    yield _gauge("ganger_nodes_slow", text, sum(bool(node.slow) for node in snapshot.nodes))
    tests = [node.test for node in snapshot.nodes if node.test is not None]
    text = "Nodes that take no gangs before they have passed a test."
    counts = Counter(waiting=0, running=0, failed=0)
    counts.update(["failed" if test.failure else "running" if test.job else "waiting" for test in tests])
    yield _gauges("ganger_nodes_in_test", text, "state", counts)
    yield _gauge("ganger_node_sets", "Time-slice groups.", snapshot.node_sets)
    gpus: dict[str, Counter[str]] = {}
    for node in snapshot.nodes:
        kind = snapshot.configuration_sets[node.configuration_set]
        if kind.devices:
            known = gpus.setdefault(kind.device_type, Counter())
            known.update(gpus_of(node, kind.devices, snapshot.rows.get(node.name)))
    text = (
        "GPUs of all nodes, each in one state: busy (a gang holds it), idle, drained (free, but its node is draining or"
        " cordoned), silent (free, but its node's daemon does not call), faulty, unknown (its node has not called"
        " since the master started), lost (with its node)."
    )
    family = GaugeMetricFamily("ganger_gpus", text, labels=["device_type", "state"])
    for device_type, by_state in sorted(gpus.items()):
        for state in _GPU_STATES:
            family.add_metric([device_type, state], by_state[state])
    yield family


# Label of the users without a team, as `ganger usage` prints it.
_WITHOUT_TEAM: Final = "-"


def _of_teams(snapshot: Snapshot) -> Iterator[Any]:
    """Yield the use of teams, which settings name: their number does not grow with jobs or users."""
    teams = snapshot.teams
    found = standings(teams, snapshot.usages, snapshot.usage_half_life_s, snapshot.now) if teams else ()
    about = (
        ("ganger_team_share", "Part of the weights of all teams that a team has.", "share"),
        ("ganger_team_used_share", "Part of the use of all users, recent use counting most, that is a team's.", "used"),
        ("ganger_team_gpus", "GPUs that running jobs of a team use.", "running"),
    )
    for name, text, amount in about:
        yield _gauges(name, text, "team", {one.team or _WITHOUT_TEAM: getattr(one, amount) for one in found})
    wanted = {one.team or _WITHOUT_TEAM: 0 for one in found}
    for job in snapshot.jobs if teams else ():
        if _is_waiting(job):
            name = teams.of(job.user) or _WITHOUT_TEAM
            wanted[name] = wanted.get(name, 0) + job.gpus
    yield _gauges("ganger_team_pending_gpus", "GPUs that pending jobs of a team request.", "team", wanted)
    limits = {name: gpus for name in teams if (gpus := teams[name].gpus) is not None}
    yield _gauges("ganger_team_gpus_limit", "Most GPUs that a team's users hold at once.", "team", limits)


def _of_the_meter(snapshot: Snapshot) -> Iterator[Any]:
    meter = snapshot.meter
    verdicts = {"approved": snapshot.approved, "rejected": meter.rejections.total()}
    text = "Requested gangs and changes of plans; approved ones are counted across restarts of the master."
    yield _counters("ganger_verdicts", text, "outcome", verdicts)
    rejections = _all(meter.rejections, (reason.name for reason in Reason))
    yield _counters("ganger_rejections", "Verdicts that were rejections, by first reason.", "reason", rejections)
    yield _counters("ganger_events", "Entries of the history, by kind.", "kind", meter.events)
    failed = _all(meter.failed_attempts, (kind.name for kind in OutcomeKind if kind is not OutcomeKind.NONE))
    yield _counters("ganger_failed_attempts", "Attempts that failed, by outcome.", "outcome", failed)
    text = "Jobs with a deadline that have ended: by then (met), or later or in failure (missed)."
    yield _counters("ganger_deadlines", text, "outcome", _all(meter.deadlines, ("met", "missed")))
    text = "From when a job began to wait to the approval of its gang."
    yield _histogram("ganger_queue_wait_seconds", text, meter.waits)
    text = "How long a move or a change of size made a job stand still, from its last step to its next."
    yield _histogram("ganger_move_pause_seconds", text, meter.pauses)
    yield _histogram("ganger_commit_seconds", "How long the store took to make a batch durable.", meter.commit_s)
    yield _histogram("ganger_commit_calls", "Calls that were answered by one commit.", meter.commit_calls)
    yield CounterMetricFamily("ganger_store_errors", "Commits that failed.", meter.store_errors)
    text = "Errors of the master itself, after which it read its store again."
    yield CounterMetricFamily("ganger_core_errors", text, meter.core_errors)


def _all(counts: Mapping[str, int], names: Iterable[str]) -> dict[str, int]:
    """Return the count of each name, zero where none was counted: a series that comes and goes is hard to query."""
    return {name: counts.get(name, 0) for name in names}


def _gauge(name: str, text: str, value: float) -> Any:
    return GaugeMetricFamily(name, text, value)


def _gauges(name: str, text: str, label: str, values: Mapping[str, float], kind: Any = GaugeMetricFamily) -> Any:
    family = kind(name, text, labels=[label])
    for key, value in sorted(values.items()):
        family.add_metric([key], value)
    return family


def _counters(name: str, text: str, label: str, values: Mapping[str, float]) -> Any:
    return _gauges(name, text, label, values, CounterMetricFamily)


def _histogram(name: str, text: str, values: Distribution) -> Any:
    buckets = [("+Inf" if bound == float("inf") else str(bound), count) for bound, count in values.at_most()]
    return HistogramMetricFamily(name, text, buckets, values.sum)


log = logging.getLogger(__name__)

# A connection that sends no request or reads no response in this time is closed.
_REQUEST_S: Final = 5.0
# Maximum wait for the event loop, which is never busy for this long.
_SNAPSHOT_S: Final = 5.0
_TEXT: Final = [("Content-Type", "text/plain")]


class MetricsServer:
    """Serves metrics from creation until `stop`, which any thread except the loop's may call.

    `take`: returns a snapshot, called in `loop`. `contexts`: with TLS, callers need a certificate. Raises EndpointError
    if the address is not available.
    """

    def __init__(
        self,
        listen: str,
        version: str,
        take: Callable[[], Snapshot],
        loop: asyncio.AbstractEventLoop,
        contexts: Renewed[ssl.SSLContext] | None = None,
    ) -> None:
        self._version = version
        self._take = take
        self._loop = loop
        registry: Any = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(self)
        host, _, port = listen.rpartition(":")
        try:
            self._http = _bound(host.strip("[]"), int(port), contexts)
        except OSError as error:
            raise EndpointError(f"metrics: {why_not_listening(listen, error)}") from error
        self._http.set_app(_answering(make_wsgi_app(registry)))
        self.url = f"{'http' if contexts is None else 'https'}://{host}:{self._http.server_port}/metrics"
        self._thread = threading.Thread(target=self._http.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def describe(self) -> Iterable[Any]:
        """Return nothing, so that registering collects nothing."""
        return ()

    def collect(self) -> Iterator[Any]:
        """Return the metrics for one request; runs in this server's thread. Raises TimeoutError."""
        taken = asyncio.run_coroutine_threadsafe(self._taken(), self._loop)
        return families(taken.result(_SNAPSHOT_S), self._version)

    async def _taken(self) -> Snapshot:
        return self._take()


class _Handler(WSGIRequestHandler):
    timeout = _REQUEST_S

    def log_message(self, *_: object) -> None:
        """Log nothing: a request comes every few seconds."""


def _bound(host: str, port: int, contexts: Renewed[ssl.SSLContext] | None) -> WSGIServer:
    # The kind of the first address that the name has, as others dial it.
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]

    class Server(WSGIServer):
        address_family = family

        def get_request(self) -> tuple[socket.socket, Any]:
            connection, address = super().get_request()
            if contexts is None:
                return connection, address
            # The handshake comes with the first byte that is read, so it is bounded as that is.
            context = contexts.current()
            return context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False), address

        def handle_error(self, *_: object) -> None:
            log.debug("connection for metrics failed", exc_info=True)

    return Server((str(address[0]), port), _Handler)


def _answering(app: Any) -> Any:
    def answer(environ: Any, start_response: Any) -> Any:
        try:
            return app(environ, start_response)
        except (TimeoutError, concurrent.futures.CancelledError):
            start_response("503 Service Unavailable", _TEXT)
            return [b"the master is busy, or stopping: try again\n"]
        except Exception:
            log.exception("metrics failed")
            start_response("500 Internal Server Error", _TEXT)
            return [b"internal error: the master's log has the details\n"]

    return answer
