"""The state stream between machines: the same bytes, encrypted, and from daemon to daemon only."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemon.test_stream import UID, Arena, Sources, wait_for
from ganger.wire.tls import client_context
from ganger_daemon.transfer.state_stream import Landing, StreamError, StreamRequest, fetch, limit_silence, read_line
from ganger_daemon.transfer.stream_server import StreamServer
from kit.certified import Authority


class Target:
    def __init__(self, size: int) -> None:
        self.fd = os.memfd_create("target")
        os.ftruncate(self.fd, size)
        self.available: list[int] = []
        self.cancelled = threading.Event()

    def fetch(self, address: str, tls: Path | str, attempts: int = 20) -> int:
        with Landing(self.fd, os.fstat(self.fd).st_size) as landing:
            landing.enter(len(landing.view))
            request = StreamRequest("", UID, 1, 0, 0)
            return fetch(address, request, landing, self.available.append, self.cancelled, attempts, 0.02, tls=str(tls))

    def content(self) -> bytes:
        return os.pread(self.fd, os.fstat(self.fd).st_size, 0)


class Scene:
    def __init__(self, tmp_path: Path, data: bytes) -> None:
        self.data = data
        self.authority = Authority(tmp_path)
        self.other_authority = Authority(tmp_path, "other")
        self.arena, self.target = Arena(data), Target(len(data))
        self.server = self.serve()

    def serve(self, port: int = 0) -> StreamServer:
        tls = str(self.authority.issue("daemon", "n1"))
        server = StreamServer(Sources(self.arena).find, "t", "127.0.0.1", port, tls=tls)
        server.start()
        return server

    @property
    def destination(self) -> Path:
        return self.authority.issue("daemon", "n2")

    def close(self) -> None:
        self.server.close()
        os.close(self.arena.fd)
        os.close(self.target.fd)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Callable[[bytes], Scene]]:
    scenes: list[Scene] = []

    def make(data: bytes) -> Scene:
        scenes.append(Scene(tmp_path, data))
        return scenes[-1]

    yield make
    for scene in scenes:
        scene.close()


def test_an_arena_arrives_whole_while_it_is_being_filled(stage: Callable[[bytes], Scene]) -> None:
    data = os.urandom(9 << 20)
    scene = stage(data)

    def fill() -> None:
        for upto in range(1 << 20, len(data) + 1, 1 << 20):
            # the device is slower than the link: what was filled has come
            scene.arena.fill(upto)
            wait_for(lambda: bool(scene.target.available) and scene.target.available[-1] == upto)  # noqa: B023

    filler = threading.Thread(target=fill)
    filler.start()
    assert scene.target.fetch(scene.server.address, scene.destination) == len(data)
    filler.join()
    assert scene.target.content() == data
    assert scene.target.available == sorted(scene.target.available)


def test_what_is_filled_at_once_comes_in_large_pieces(stage: Callable[[bytes], Scene]) -> None:
    data = os.urandom(32 << 20)
    scene = stage(data)
    scene.arena.fill(len(data))
    scene.target.fetch(scene.server.address, scene.destination)
    assert scene.target.content() == data
    # progress is reported by pieces, not by the 16 KiB records of TLS
    assert len(scene.target.available) < len(data) // (16 << 10) // 4


def test_a_broken_connection_goes_on_from_where_it_was(stage: Callable[[bytes], Scene]) -> None:
    data = os.urandom(6 << 20)
    scene = stage(data)
    scene.arena.fill(3 << 20)
    address, destination = scene.server.address, scene.destination
    result: list[int] = []
    reader = threading.Thread(target=lambda: result.append(scene.target.fetch(address, destination)))
    reader.start()
    wait_for(lambda: bool(scene.target.available) and scene.target.available[-1] == 3 << 20)
    scene.server.close()
    scene.arena.fill(len(data))
    scene.server = scene.serve(int(address.rpartition(":")[2]))
    reader.join(20)
    assert result == [len(data)]
    assert scene.target.content() == data
    assert scene.target.available == sorted(scene.target.available)


def test_a_stop_that_ends_while_it_is_sent_leaves_a_torn_image(stage: Callable[[bytes], Scene]) -> None:
    scene = stage(b"x" * 4096)
    scene.arena.fill(4095)

    def resume() -> None:
        wait_for(lambda: bool(scene.target.available) and scene.target.available[-1] == 4095)
        scene.arena.is_valid = False
        scene.arena.fill(4096)

    resumer = threading.Thread(target=resume)
    resumer.start()
    with pytest.raises(StreamError, match="over"):
        scene.target.fetch(scene.server.address, scene.destination)
    resumer.join()


def test_a_source_that_has_not_begun_sees_that_its_client_left(stage: Callable[[bytes], Scene]) -> None:
    scene = stage(b"x" * 4096)
    destination = scene.destination

    def read() -> None:
        with pytest.raises(StreamError, match="cancelled"):
            scene.target.fetch(scene.server.address, destination)

    reader = threading.Thread(target=read)
    reader.start()
    wait_for(lambda: scene.arena.opened == 1)
    scene.target.cancelled.set()
    reader.join()
    wait_for(lambda: not scene.server._workers)


def refusal(scene: Scene, tls: Path | str) -> str:
    with pytest.raises(StreamError) as refused:
        scene.target.fetch(scene.server.address, tls, attempts=2)
    assert not scene.arena.opened
    assert not scene.target.available
    return str(refused.value)


def test_a_user_gets_no_state(stage: Callable[[bytes], Scene], caplog: pytest.LogCaptureFixture) -> None:
    scene = stage(b"x" * 4096)
    scene.arena.fill(4096)
    refusal(scene, scene.authority.issue("user", "ann"))
    assert "states travel between daemons only, and this is user 'ann'" in str([vars(r) for r in caplog.records])


def test_a_client_without_a_certificate_of_the_cluster_gets_no_state(stage: Callable[[bytes], Scene]) -> None:
    scene = stage(b"x" * 4096)
    scene.arena.fill(4096)
    assert "certificate verify failed" in refusal(scene, scene.other_authority.issue("daemon", "n2")).lower()
    refusal(scene, "")


def test_a_source_that_is_no_daemon_is_not_believed(stage: Callable[[bytes], Scene]) -> None:
    scene = stage(b"x" * 4096)
    scene.arena.fill(4096)
    tls = str(scene.authority.issue("master", "m"))
    false = StreamServer(Sources(scene.arena).find, "t", tls=tls)
    false.start()
    try:
        with pytest.raises(StreamError, match="between daemons only, and this is master 'm'"):
            scene.target.fetch(false.address, scene.destination)
    finally:
        false.close()


def test_a_connection_that_sends_nothing_is_closed_after_a_while(
    stage: Callable[[bytes], Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ganger_daemon.transfer.stream_server.SOCKET_TIMEOUT_S", 0.2)
    scene = stage(b"x" * 4096)
    host, _, port = scene.server.address.rpartition(":")
    with socket.create_connection((host, int(port))) as silent:
        wait_for(lambda: bool(scene.server._workers))
        wait_for(lambda: not scene.server._workers)
        assert silent.recv(1) == b""


def test_connections_that_send_nothing_keep_no_other_client_out(
    stage: Callable[[bytes], Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ganger_daemon.transfer.stream_server.MAX_CONNECTIONS", 4)
    monkeypatch.setattr("ganger_daemon.transfer.stream_server.MAX_STRANGERS", 4)
    scene = stage(b"x" * 4096)
    scene.arena.fill(4096)
    host, _, port = scene.server.address.rpartition(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(8)]
    try:
        assert scene.target.fetch(scene.server.address, scene.destination, attempts=1) == 4096
        # The oldest was closed for the new one; the newest is still open.
        assert silent[0].recv(1) == b""
        silent[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            silent[-1].recv(1)
    finally:
        for connection in silent:
            connection.close()


def test_a_tls_socket_is_limited_like_any_other(stage: Callable[[bytes], Scene]) -> None:
    scene = stage(b"x" * 4096)
    host, _, port = scene.server.address.rpartition(":")
    with (
        socket.create_connection((host, int(port))) as plain,
        client_context(scene.destination).wrap_socket(plain, server_hostname=host) as guarded,
    ):
        limit_silence(guarded, 0.05)
        with pytest.raises((TimeoutError, ssl.SSLWantReadError)):
            read_line(guarded)
