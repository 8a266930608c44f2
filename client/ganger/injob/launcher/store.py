"""The rendezvous store of one epoch: a process that is nothing but torch's TCPStore server."""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import time
from typing import NoReturn

from ganger.injob.launcher.exit_record import write_durably
from ganger.injob.processes import start_ticks

_LOOK_EVERY_SECONDS = 2.0


def open_listener(host: str) -> socket.socket:
    """A socket at a port of the kernel's choice that takes connections from now on. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.bind((host, 0))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def serve_store(directory: str, host: str, listener: socket.socket) -> NoReturn:
    """Serve in this (forked) process until the directory is gone; writes rendezvous.json there.

    Listens on ``host`` only. Nobody needs to stop it: it ends when the epoch's directory is removed.
    """
    distributed = importlib.import_module("torch.distributed")

    port = listener.getsockname()[1]
    # torch alone would listen on every address of the machine.
    store = distributed.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    path = os.path.join(directory, "rendezvous.json")
    content = {"host": host, "port": port, "pid": os.getpid(), "start_ticks": start_ticks(os.getpid())}
    write_durably(path, json.dumps(content).encode())
    while os.path.exists(path):
        time.sleep(_LOOK_EVERY_SECONDS)
    del store
    sys.stderr.flush()
    os._exit(0)
