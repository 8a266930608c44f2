"""A master in this process that asks for certificates, and clients with and without one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
from ganger.wire.channels import open_aio_channel
from ganger.wire.endpoints import Endpoint
from ganger.wire.methods import CallerRole
from ganger_master.app import Master
from ganger_master.config import Config
from kit.certified import Authority
from rpc.kit import Served


class CertifiedMaster:
    """A master behind certificates; `calls` gives stubs for any caller."""

    def __init__(self, master: Master, authority: Authority) -> None:
        self.master = master
        self.authority = authority
        self._channels: list[grpc.aio.Channel] = []

    def calls(self, role: CallerRole | str, name: str, authority: Authority | None = None) -> Served:
        return self.with_certificate((authority or self.authority).issue(role, name))

    def with_certificate(self, directory: Path) -> Served:
        return self._served(Endpoint(self.master.address, tls=str(directory)))

    def with_token(self) -> Served:
        return self._served(Endpoint(self.master.local_address, self.master.token))

    def over(self, channel: grpc.aio.Channel) -> Served:
        self._channels.append(channel)
        return Served(self.master, channel)

    def _served(self, endpoint: Endpoint) -> Served:
        return self.over(open_aio_channel(endpoint, (("grpc.enable_retries", 0),)))

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close(None)
        await self.master.stop()


@asynccontextmanager
async def serving_certified(directory: Path, policy: str = "fifo", **more: int) -> AsyncIterator[CertifiedMaster]:
    """`more` are fields of Config."""
    authority = Authority(directory)
    config = Config(
        state_dir=directory / "state",
        listen="127.0.0.1:0",
        tls=authority.issue("master", "m"),
        scheduler_host=False,
        policy=policy,
        planner=False,
        **more,  # type: ignore[arg-type]
    )
    served = CertifiedMaster(Master(config), authority)
    await served.master.start()
    try:
        yield served
    finally:
        await served.close()
