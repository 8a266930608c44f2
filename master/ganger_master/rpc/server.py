"""The master's gRPC server: all services with health, reflection, limits and authentication. A stand-by, and a master
that may have lost its lease, answer no call.

Without certificates one address serves callers with the token. With certificates that address serves callers with a
certificate, a second one on loopback serves this machine by the token, and a third one, if there is one, people with
access tokens.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
from ganger.agent.v1 import agent_pb2, agent_pb2_grpc
from ganger.v1 import (
    job_service_pb2,
    job_service_pb2_grpc,
    node_pb2,
    node_pb2_grpc,
    scheduling_pb2,
    scheduling_pb2_grpc,
)
from ganger.wire.errors import ApiError, LeaseLost
from ganger.wire.methods import CallerIdentity, CallerRole
from ganger.wire.revocation import Revocations
from ganger.wire.servers import Callers, WrappingInterceptor, behaviour_of, bind, make_server, rebuilt
from ganger.wire.tls import server_credentials
from grpc_health.v1 import _async as aio_health
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ganger_master.rpc.access import LimitInterceptor, TokenHolders, UserLimits
from ganger_master.rpc.agent_service import AgentService
from ganger_master.rpc.answer_messages import SessionRefusals, VisibleState, owner
from ganger_master.rpc.audit import AuditInterceptor, AuditLog
from ganger_master.rpc.job_service import JobService
from ganger_master.rpc.log_proxy import LogProxy
from ganger_master.rpc.node_service import NodeService
from ganger_master.rpc.scheduling_service import SchedulingService
from ganger_master.runtime.publication import ProgressBoard
from ganger_master.runtime.writer import Writer

# A probe finds out whether a master leads by its health, which is SERVING only then.
_OF_ANY_MASTER: Final = ("/grpc.health.v1.", "/grpc.reflection.")


class LeaderInterceptor(WrappingInterceptor):
    """Refuses calls when they come, and again when they are to be answered: the process may have been stopped between.

    A call that is refused when it comes was not carried out, and is repeated elsewhere. One that is refused later may
    have been, so its refusal is another one (LeaseLost).

    refusal: why this master may not answer now; None if it may.
    """

    def __init__(self, refusal: Callable[[], ApiError | None]) -> None:
        super().__init__()
        self._refusal = refusal

    def _wrap(self, method: str, handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
        if method.startswith(_OF_ANY_MASTER):
            return handler
        behaviour = behaviour_of(handler)

        async def answer(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            self._check()
            try:
                response = await behaviour(request, context)
            except Exception:
                # A refusal that was decided without the lease is no answer either.
                self._check_answer()
                raise
            self._check_answer()
            return response

        async def stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            self._check()
            try:
                async for response in behaviour(request, context):
                    self._check_answer()
                    yield response
            except Exception:
                self._check_answer()
                raise

        return rebuilt(handler, stream if inspect.isasyncgenfunction(behaviour) else answer)

    def _check(self) -> None:
        refusal = self._refusal()
        if refusal is not None:
            raise refusal

    def _check_answer(self) -> None:
        refusal = self._refusal()
        if refusal is not None:
            lost = LeaseLost(f"{refusal.message}; whether it carried this call out is not known")
            lost.metadata.update(refusal.metadata)
            raise lost from refusal


# Every daemon of a large cluster holds one poll, and all come back at once after a restart.
_OPTIONS: Final = (
    ("grpc.server.max_pending_requests", 40_000),
    ("grpc.server.max_pending_requests_hard_limit", 60_000),
)
# For the master's child processes, and users that can read its state directory.
_LOCAL: Final = "127.0.0.1:0"
# Between two looks at whether this master may answer, for its health.
_HEALTH_S: Final = 0.2
_SERVICES: Final = (
    job_service_pb2.DESCRIPTOR.services_by_name["JobService"].full_name,
    scheduling_pb2.DESCRIPTOR.services_by_name["SchedulingService"].full_name,
    node_pb2.DESCRIPTOR.services_by_name["NodeService"].full_name,
    agent_pb2.DESCRIPTOR.services_by_name["AgentService"].full_name,
)


class MasterServer:
    """Serves a writer. `address` is where, with the port that was chosen, and `local_address` where the token does;
    `tls`: the directory of the certificate, if there is one, and `revocations`: what goes with it; `authority`: the
    directory of the one that renews certificates; `checkpoints_kept_s`: as of `AgentService`; `captures`: where
    recordings go; `audit`: the log of calls; `listen_tokens`: where people call with access tokens, or nowhere;
    `token_address`: the same, with the port; `has_stand_bys`: other masters may lead, so that calls are answered only
    while this one does."""

    def __init__(
        self,
        writer: Writer,
        progress: ProgressBoard,
        *,
        token: str,
        listen: str,
        captures: Path,
        audit: AuditLog,
        limits: UserLimits,
        tls: Path | None = None,
        revocations: Revocations | None = None,
        authority: Path | None = None,
        checkpoints_kept_s: float | None = None,
        listen_tokens: str = "",
        has_stand_bys: bool = False,
        more_handlers: Sequence[grpc.GenericRpcHandler[Any, Any]] = (),
    ) -> None:
        refusals = SessionRefusals(writer.now)
        shown = VisibleState(writer, progress, refusals)
        holders = TokenHolders(writer.committed.tokens, writer.now)
        callers = Callers(
            CallerIdentity(CallerRole.OPERATOR, owner()), by_role=tls is not None, holder_of=holders.holder_of
        )
        self._logs = LogProxy(writer, shown, token, str(tls or ""))
        self._health: Any = aio_health.HealthServicer()
        self._limits = limits
        limiter = LimitInterceptor(limits, callers)
        self._refusal = writer.ownership.refusal
        leader_first = (LeaderInterceptor(self._refusal),) if has_stand_bys else ()
        self._has_stand_bys = has_stand_bys
        self._following: asyncio.Task[None] | None = None
        self._audit = audit
        self._server = make_server(
            token,
            _OPTIONS,
            revocations=revocations,
            holder_of=holders.holder_of,
            # Its refusals are in no audit log: callers of a stand-by try again elsewhere, many times.
            first_interceptors=(*leader_first, AuditInterceptor(audit, callers)),
            more_interceptors=(limiter,),
        )
        job_service_pb2_grpc.add_JobServiceServicer_to_server(
            JobService(writer, shown, self._logs, callers, limits), self._server
        )
        scheduling_pb2_grpc.add_SchedulingServiceServicer_to_server(
            SchedulingService(writer, shown, progress, callers, limits), self._server
        )
        self.agents = AgentService(writer, progress, callers, refusals, revocations, authority, checkpoints_kept_s)
        node_pb2_grpc.add_NodeServiceServicer_to_server(
            NodeService(writer, shown, callers, self.agents.is_held, captures, lambda: self.token_address),
            self._server,
        )
        agent_pb2_grpc.add_AgentServiceServicer_to_server(self.agents, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        if more_handlers:
            self._server.add_generic_rpc_handlers(tuple(more_handlers))
        self._bind(listen, listen_tokens, tls)

    def _bind(self, listen: str, listen_tokens: str, tls: Path | None) -> None:
        self.token_address = ""
        if tls is None:
            self.address = self.local_address = bind(self._server, listen)
            return
        self.address = bind(self._server, listen, server_credentials(tls))
        self.local_address = bind(self._server, _LOCAL)
        if listen_tokens:
            self.token_address = bind(self._server, listen_tokens, server_credentials(tls, is_mutual=False))

    async def start(self) -> None:
        """Accept calls. Until `lead`, health is NOT_SERVING."""
        for service in ("", *_SERVICES):
            await self._health.set(service, health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._server.start()

    async def lead(self) -> None:
        """Report by health from now on whether this master answers."""
        await self._report_health()
        if self._has_stand_bys and self._following is None:
            self._following = asyncio.get_running_loop().create_task(self._follow_lease())

    async def _follow_lease(self) -> None:
        while True:
            await asyncio.sleep(_HEALTH_S)
            await self._report_health()

    async def _report_health(self) -> None:
        known = health_pb2.HealthCheckResponse
        status = known.SERVING if self._refusal() is None else known.NOT_SERVING
        for service in ("", *_SERVICES):
            await self._health.set(service, status)

    async def stop(self, grace_s: float) -> None:
        """Takes no more calls and gives those in progress some time; held polls and streams are cut."""
        if self._following is not None:
            self._following.cancel()
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
        await self._logs.close()
        self._audit.close()
