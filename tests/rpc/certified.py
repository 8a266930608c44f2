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
from ganger_master.core.commands import CreateToken, RevokeToken
from ganger_master.rpc.access import new_token
from kit.certified import Authority
from rpc.kit import Served


class CertifiedMaster:
    """A master behind certificates; `calls` gives stubs for any caller."""

    def __init__(self, master: Master, authority: Authority) -> None:
        self.master = master
        self.authority = authority
        # Texts of access tokens by what they are, once they are made.
        self.access_tokens: dict[str, str] = {}
        self._channels: list[grpc.aio.Channel] = []

    def calls(self, role: CallerRole | str, name: str, authority: Authority | None = None) -> Served:
        return self.with_certificate((authority or self.authority).issue(role, name))

    def with_certificate(self, directory: Path) -> Served:
        return self._served(Endpoint(self.master.address, tls=str(directory)))

    def with_token(self) -> Served:
        return self._served(Endpoint(self.master.local_address, self.master.token))

    async def make_access_tokens(self, user: str) -> None:
        """Make tokens of a user: a good one, an expired and a revoked one; beside them the master's own, and none."""
        self.access_tokens = {"none": "", "of the master": self.master.token}
        for kind, lasts_s in ((user, 600.0), ("expired", 1e-9), ("revoked", 600.0)):
            name, self.access_tokens[kind], digest = new_token(user)
            await self.master.writer.submit(CreateToken(name, digest, user, lasts_s, "olga"))
        await self.master.writer.submit(RevokeToken(name, "olga"))

    def with_access_token(self, text: str) -> Served:
        """Return calls over TLS without a certificate; without a text no token comes with them."""
        endpoint = Endpoint(self.master.token_address, text or "none", str(self.authority.issue("user", "unused")))
        channel = open_aio_channel(endpoint, (("grpc.enable_retries", 0),))
        if not text:
            channel._metadata = ()  # type: ignore[attr-defined]
        return self.over(channel)

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
        listen_tokens="127.0.0.1:0",
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
