"""An ssh server on this machine that runs commands as the test's account, and what a client needs to know of it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import asyncssh


class SshServer:
    """`with SshServer(tmp_path / "ssh", environment) as ssh:` listens on 127.0.0.1. `home` is a client's home, where
    the server is known; `options` say how a client reaches it. Commands have `environment`."""

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        self._directory = directory
        self._environment = dict(environment)
        self.home = directory / "home"
        self.known_hosts = self.home / ".ssh" / "known_hosts"
        self.known_hosts.parent.mkdir(parents=True)

    def __enter__(self) -> SshServer:
        command = (sys.executable, __file__, str(self._directory))
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self._environment
        )
        assert self._process.stdout is not None
        port, self._host_key = self._process.stdout.readline().split(" ", 1)
        self._port = int(port)
        self.know()
        return self

    def know(self) -> None:
        """Let the client know the server's key."""
        self.known_hosts.write_text(f"[127.0.0.1]:{self._port} {self._host_key}")

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._process:
            self._process.terminate()

    @property
    def options(self) -> tuple[str, ...]:
        return ("--port", str(self._port), "--identity", str(self._directory / "key"))


async def _serve(directory: Path) -> None:
    host, user = (asyncssh.generate_private_key("ssh-ed25519") for _ in range(2))
    user.write_private_key(directory / "key")
    server = await asyncssh.listen(
        "127.0.0.1",
        0,
        server_host_keys=[host],
        authorized_client_keys=asyncssh.import_authorized_keys(user.export_public_key().decode()),
        encoding=None,
        process_factory=_run,
    )
    print(server.get_port(), host.export_public_key().decode(), end="", flush=True)
    await server.wait_closed()


async def _run(process: Any) -> None:
    pipe = asyncio.subprocess.PIPE
    ran = await asyncio.create_subprocess_shell(process.command, stdin=pipe, stdout=pipe, stderr=pipe)
    await process.redirect(stdin=ran.stdin, stdout=ran.stdout, stderr=ran.stderr)
    process.exit(await ran.wait())


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1])))
