"""Callers of a launcher: connections on its socket, their requests as lines of JSON, and the answers. A caller that
sends too much or does not read its answers is disconnected; no caller makes the launcher wait."""

from __future__ import annotations

import json
import os
import selectors
import socket
import struct
from typing import Any, Callable

from ganger.injob.launcher.process_record import LaunchError, shortened
from ganger.injob.process_identity import peer_of
from ganger.text import os_failure

_REQUEST_LIMIT = 4 << 20  # bytes of one request: an environment and an argument vector fit many times over


class Caller:
    """One connection, and what was received of its next request."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.received = b""


class LauncherCallers:
    """Connections on ``listener``, served by ``selector``. ``answer`` carries out a request or raises LaunchError."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        listener: socket.socket,
        answer: Callable[[Caller, dict[str, Any]], None],
    ) -> None:
        self._selector = selector
        self._listener = listener
        self._answer = answer
        self._callers: dict[int, Caller] = {}
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self._accept)

    def __bool__(self) -> bool:
        return bool(self._callers)

    def reply(self, caller: Caller | None, number: Any, descriptor: int | None = None, **content: Any) -> None:
        """Answer the request of this number; with a descriptor where one is given. A caller that is gone gets none."""
        if caller is None or caller.connection.fileno() < 0:
            return
        data = json.dumps({"id": number, **content}).encode() + b"\n"
        rights = [] if descriptor is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", descriptor))]
        try:
            sent = caller.connection.sendmsg([data], rights)
        except OSError:
            sent = 0
        if sent != len(data):
            self._hang_up(caller)  # it does not read its answers

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if peer_of(connection).uid not in (0, os.getuid()):
            connection.close()
            return
        connection.setblocking(False)
        caller = Caller(connection)
        self._callers[connection.fileno()] = caller
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._receive(caller))

    def _receive(self, caller: Caller) -> None:
        try:
            data = caller.connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        caller.received += data
        if not data or len(caller.received) > _REQUEST_LIMIT:
            self._hang_up(caller)
            return
        while b"\n" in caller.received:
            line, _, caller.received = caller.received.partition(b"\n")
            self._carry_out(caller, line)

    def _carry_out(self, caller: Caller, line: bytes) -> None:
        number: Any = None
        try:
            request = json.loads(line)
            number = request.get("id")
            self._answer(caller, request)
        except LaunchError as error:
            self.reply(caller, number, error={"reason": error.reason, "message": str(error)})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            message = shortened(f"cannot be read: {error!r}")
            self.reply(caller, number, error={"reason": "INVALID_REQUEST", "message": message})
        except OSError as error:
            self.reply(caller, number, error={"reason": "SYSTEM", "message": shortened(os_failure(error))})

    def _hang_up(self, caller: Caller) -> None:
        descriptor = caller.connection.fileno()
        if descriptor >= 0:
            self._selector.unregister(caller.connection)
            del self._callers[descriptor]
            caller.connection.close()
