"""The uid of a job in a request for its log names a directory, so it is checked."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ganger.agent.v1 import peer_pb2
from ganger.wire.errors import RequestInvalid
from ganger_daemon.node.peer_service import PeerServicer


@pytest.mark.parametrize("uid", ["", "..", "../../../root", "a/b", "\0", "x" * 5_000, "-", "\N{GRINNING FACE}"])
def test_a_text_that_is_not_a_uid_reads_no_file(uid: str) -> None:
    host = SimpleNamespace(logs=SimpleNamespace())
    servicer = PeerServicer(cast(Any, host), cast(Any, None), cast(Any, None))

    async def read() -> None:
        async for _ in servicer.ReadLog(peer_pb2.ReadPeerLogRequest(job_uid=uid), cast(Any, None)):
            raise AssertionError("something was read")

    with pytest.raises(RequestInvalid, match="is no uid of a job"):
        asyncio.run(read())
