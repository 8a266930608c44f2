"""Machines apart from each other on one: network namespaces on a bridge, each with a loopback of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

# A benchmark network (RFC 2544), which nothing else on this machine uses.
_NETWORK = "198.18.0"


@dataclass(frozen=True)
class Machine:
    """`prefix` goes before a command line that is to run there; `interface` is how others are reached."""

    name: str
    address: str
    prefix: tuple[str, ...]
    interface: str


def here(names: Sequence[str]) -> dict[str, Machine]:
    """Not apart at all: this machine's loopback, for where there are no namespaces."""
    return {name: Machine(name, "127.0.0.1", (), "lo") for name in names}


@contextmanager
def apart(names: Sequence[str]) -> Iterator[dict[str, Machine] | None]:
    """Machines of these names that reach each other by their addresses only; None where they cannot be made."""
    hub, made = f"gt{os.getpid()}", []
    try:
        try:
            _ip("netns", "add", hub)
            made.append(hub)
            _ip("-n", hub, "link", "add", "bridge", "type", "bridge")
            _ip("-n", hub, "link", "set", "bridge", "up")
            machines = {}
            for number, name in enumerate(names, 1):
                space, address = f"{hub}-{name}", f"{_NETWORK}.{number}"
                _ip("netns", "add", space)
                made.append(space)
                port = f"port{number}"
                _ip("link", "add", "lan", "netns", space, "type", "veth", "peer", "name", port, "netns", hub)
                _ip("-n", hub, "link", "set", port, "master", "bridge", "up")
                _ip("-n", space, "addr", "add", f"{address}/24", "dev", "lan")
                for interface in ("lan", "lo"):
                    _ip("-n", space, "link", "set", interface, "up")
                # Not `ip netns exec`: that hides the cgroups.
                machines[name] = Machine(name, address, ("nsenter", f"--net=/run/netns/{space}"), "lan")
        except (OSError, subprocess.CalledProcessError):
            yield None
        else:
            yield machines
    finally:
        for space in reversed(made):
            _ip("netns", "del", space)


def cut_off(machine: Machine) -> None:
    """Cut a machine off from all others; its loopback and its storage stay."""
    _set_link(machine, "down")


def heal(machine: Machine) -> None:
    """Let the other machines reach it again."""
    _set_link(machine, "up")


def _set_link(machine: Machine, state: str) -> None:
    subprocess.run([*machine.prefix, "ip", "link", "set", machine.interface, state], check=True, capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
