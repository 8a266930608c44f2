"""Set-up of a process: its log lines, its garbage collection, and its threads of linear algebra."""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

# Allocations before a collection of the youngest generation: most objects of a burst of calls die without one.
_YOUNGEST: Final = 20_000


def settle() -> None:
    """Exclude all present objects from garbage collection; for a program that has just loaded its state.

    The state is large, lives as long as the program and holds no cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNGEST, 50, 100)


@contextmanager
def settled() -> Iterator[None]:
    """Exclude the present objects from garbage collection within this context."""
    thresholds = gc.get_threshold()
    settle()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)


_STANDARD: Final = frozenset(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {"message", "asctime", "taskName"}


class Fields(logging.Formatter):
    """One event name and its fields: `2026-01-01T12:00:01.123Z INFO runtime.writer node_lost subject=nodes/n1 id=7`.

    Fields come from `extra`; a value with spaces or quotes is written as a JSON string, so a line stays a line.
    """

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        words = [f"{moment}.{int(record.msecs):03}Z", record.levelname, record.name, _text(record.getMessage())]
        words += [f"{name}={_text(value)}" for name, value in vars(record).items() if name not in _STANDARD]
        line = " ".join(words)
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def set_up_logs(level: str) -> None:
    """Everything of this process to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Fields())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Says at INFO what every start does.
    logging.getLogger("alembic").setLevel(logging.WARNING)


def _text(value: object) -> str:
    text = str(value)
    return text if text and not any(c.isspace() or c in '"=\\' for c in text) else json.dumps(text)


_NAMES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Limit linear algebra to one thread in processes started, and libraries first imported, within this context."""
    before = {name: os.environ.get(name) for name in _NAMES}
    os.environ.update(dict.fromkeys(_NAMES, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
