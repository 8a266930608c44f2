"""Refusals of masters that do not lead: a stand-by, and one that may have lost its lease, answer no call."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import grpc
import grpc.aio
from ganger.wire.errors import ApiError, LeaseLost
from ganger.wire.servers import WrappingInterceptor, behaviour_of, rebuilt

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
