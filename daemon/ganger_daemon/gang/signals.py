"""Carries out the rungs of the escalation ladder on the local ranks of one gang."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Iterable

from ganger_daemon.cgroups.contract import Cgroups
from ganger_daemon.node.processes import ProcessId, send_signal

log = logging.getLogger(__name__)


def terminate(processes: Iterable[ProcessId]) -> None:
    """SIGTERM to main processes only: loader workers that die first would take a last checkpoint with them."""
    for process in processes:
        send_signal(process, signal.SIGTERM)


async def kill(cgroups: Cgroups, group: str, processes: Iterable[ProcessId]) -> None:
    """Everything in the group, and the main processes by themselves where there is no group."""
    await asyncio.to_thread(cgroups.kill, group)
    for process in processes:
        send_signal(process, signal.SIGKILL)
