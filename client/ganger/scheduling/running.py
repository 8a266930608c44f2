"""How long a process beside the master runs: until its work ends, it is told to stop, or its parent has died."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Coroutine, Sequence
from typing import Any


async def until_stopped(work: Coroutine[Any, Any, None], until_stdin_closes: bool) -> None:
    """Until the work is done, SIGTERM or SIGINT comes, or, if asked, standard input closes."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    parts = [work, set_of(stop)]
    if until_stdin_closes:
        parts.append(_stdin_closed())
    await first_end(parts)


async def first_end(parts: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Runs all until one ends; its error is raised."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def set_of(event: asyncio.Event) -> None:
    """Ends once the event is set."""
    await event.wait()


async def _stdin_closed() -> None:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    with contextlib.closing(transport):
        while await reader.read(4096):
            pass
