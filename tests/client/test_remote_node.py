"""What is made on a machine of a node is removed from it, and nothing else is touched."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from ganger.console import ExitCode
from ganger.remote_node import NodePlaces, RemoteNode, RemoteNodeError, connected
from kit.shell import Shell
from kit.ssh import SshServer


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SshServer]:
    with SshServer(tmp_path / "ssh", os.environ) as server:
        monkeypatch.setenv("HOME", str(server.home))
        yield server


def on(ssh: SshServer, places: NodePlaces, story: Callable[[RemoteNode], Awaitable[None]]) -> None:
    async def told() -> None:
        _, port, _, key = ssh.options
        async with connected("127.0.0.1", places, int(port), Path(key)) as node:
            await node.probe()
            node.has_systemd = False
            await story(node)

    asyncio.run(told())


def test_an_environment_of_others_is_neither_installed_into_nor_removed(ssh: SshServer, tmp_path: Path) -> None:
    prefix = tmp_path / "their environment"
    (prefix / "bin").mkdir(parents=True)

    async def story(node: RemoteNode) -> None:
        with pytest.raises(RemoteNodeError, match="is there, and `cluster add` did not make it: name another --prefix"):
            await node.install("0.3.0", None)
        await node.remove()

    on(ssh, NodePlaces(str(prefix), str(tmp_path / "tls"), str(tmp_path / "state")), story)
    assert [path.name for path in prefix.iterdir()] == ["bin"]


def test_directories_that_were_there_stay_with_what_others_have_in_them(ssh: SshServer, tmp_path: Path) -> None:
    state, tls = tmp_path / "var" / "lib", tmp_path / "etc" / "ssl"
    for directory in (state, tls):
        directory.mkdir(parents=True)
        (directory / "theirs").touch()

    async def story(node: RemoteNode) -> None:
        await node.write(f"{tls}/cert.pem", b"certificate", 0o644)
        await node.start(("--help",))
        await node.remove()

    on(ssh, NodePlaces(str(tmp_path / "opt"), str(tls), str(state), python="/bin/true"), story)
    assert [path.name for path in tls.iterdir()] == ["theirs"]
    assert "theirs" in {path.name for path in state.iterdir()}


def test_directories_of_all_programs_go_with_the_last_one_in_them(ssh: SshServer, tmp_path: Path) -> None:
    etc, lib = tmp_path / "etc" / "ganger", tmp_path / "lib" / "ganger"
    (lib / "master").mkdir(parents=True)

    async def story(node: RemoteNode) -> None:
        await node.write(f"{etc}/tls/cert.pem", b"certificate", 0o644)
        await node.start(("--help",))
        await node.remove()

    on(ssh, NodePlaces(str(tmp_path / "opt"), str(etc / "tls"), str(lib / "daemon"), python="/bin/true"), story)
    assert sorted(path.name for path in (tmp_path / "etc").iterdir()) == []
    assert [path.name for path in lib.iterdir()] == ["master"]


def test_a_machine_that_prints_without_end_does_not_fill_the_terminal(ssh: SshServer, tmp_path: Path) -> None:
    talker = tmp_path / "python"
    talker.write_text("#!/bin/sh\nprintf '\\033[2J'; head -c 1000000 /dev/zero | tr '\\0' x\n")
    talker.chmod(0o755)

    async def story(node: RemoteNode) -> None:
        assert len(await node.install("0.3.0", None)) < 500

    on(ssh, NodePlaces(python=str(talker)), story)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("n1.lab", "--state-dir", "/"), "'/': name an absolute path"),
        (("n1.lab", "--prefix", "/opt/.."), "'/opt/..': name an absolute path"),
        (("n1.lab", "--tls", "etc/tls"), "'etc/tls': name an absolute path"),
        (("n1.lab", "--state-dir", "/var/a\nb"), "name an absolute path"),
        (("n1.lab", "root@n1.other"), "two of the hosts would be nodes/n1"),
        (("n1.lab", "::1"), "'::1' gives no name for a node"),
        (("--", "-oProxyCommand=x"), "gives no name for a node"),
    ],
)
def test_machines_and_places_that_cannot_be_meant_are_refused_before_any_is_touched(
    words: tuple[str, ...], said: str
) -> None:
    done = Shell("unused:1").try_("cluster", "remove", "--yes", *words)
    assert (done.code, said in done.err) == (ExitCode.USAGE, True), done
