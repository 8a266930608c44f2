"""Renewal of a daemon's certificate by the master, a third of its life before its end.

The key is made here and does not leave the node. Master and daemons take the new files for new connections at once
(`ganger.wire.tls.Renewed`). A master without the authority refuses, and an operator renews the certificate.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import grpc
from ganger.agent.v1 import agent_pb2, agent_pb2_grpc
from ganger.text import os_failure
from ganger.wire.channels import note_failure, open_aio_channel
from ganger.wire.endpoints import Endpoint, EndpointError
from ganger.wire.errors import from_rpc_error, reason_of
from ganger.wire.tls import CERTIFICATE

log = logging.getLogger(__name__)

# A clock that is set, or files that an operator replaced, are noticed after so long.
_LONGEST_WAIT_S: Final = 3600.0
_SHORTEST_WAIT_S: Final = 0.5
# Tries in the third of its life that is left.
_TRIES: Final = 100


async def keep_renewed(directory: Path, find_master: Callable[[], Endpoint]) -> None:
    """Renew the certificate in a directory whenever it is due, until cancelled. What fails is tried again."""
    is_refused = False
    while True:
        wait_s, life_s = await asyncio.to_thread(_times, directory)
        if wait_s <= 0.0:
            try:
                await _renew(directory, find_master)
                is_refused = False
            except RenewalError as error:
                level = logging.INFO if is_refused else logging.WARNING
                log.log(level, "certificate not renewed", extra={"error": str(error)})
                is_refused = True
            wait_s = life_s / 3 / _TRIES
        await asyncio.sleep(min(_LONGEST_WAIT_S, max(_SHORTEST_WAIT_S, wait_s)))


class RenewalError(Exception):
    """The certificate was not renewed; the message says why."""


def _times(directory: Path) -> tuple[float, float]:
    """Return in how many seconds the certificate is due, and how long one lives."""
    from ganger.wire.certificate_authority import renewal_time

    try:
        content = (directory / CERTIFICATE).read_bytes()
        due, end = renewal_time(content)
    except (OSError, ValueError):
        return _LONGEST_WAIT_S, _LONGEST_WAIT_S
    return (due - datetime.now(UTC)).total_seconds(), 3 * (end - due).total_seconds()


async def _renew(directory: Path, find_master: Callable[[], Endpoint]) -> None:
    from ganger.wire.certificate_authority import CertificateError, replace_files, request_renewal

    endpoint: Endpoint | None = None
    try:
        former = await asyncio.to_thread((directory / CERTIFICATE).read_bytes)
        key, request = await asyncio.to_thread(request_renewal)
        endpoint = find_master()
        async with open_aio_channel(endpoint) as channel:
            stub: Any = agent_pb2_grpc.AgentServiceStub(channel)
            answer = await stub.RenewCertificate(agent_pb2.RenewCertificateRequest(signing_request=request))
        await asyncio.to_thread(replace_files, directory, former, key, answer.certificate)
    except grpc.aio.AioRpcError as error:
        note_failure(endpoint, error)
        raise RenewalError(f"{reason_of(error)}: {from_rpc_error(error).message}") from error
    except (EndpointError, CertificateError) as error:
        raise RenewalError(str(error)) from error
    except OSError as error:
        raise RenewalError(os_failure(error)) from error
    log.info("certificate renewed", extra={"file": str(directory / CERTIFICATE)})
