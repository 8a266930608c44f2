"""Log lines as one event name and its fields: `12:00:01.123 INFO runtime.writer node_lost subject=nodes/n1 id=7`."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Final

_STANDARD: Final = frozenset(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {"message", "asctime", "taskName"}


class Fields(logging.Formatter):
    """Fields come from `extra`; a value with spaces or quotes is written as a JSON string, so a line stays a line."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        words = [f"{moment}.{int(record.msecs):03}Z", record.levelname, record.name, _text(record.getMessage())]
        words += [f"{name}={_text(value)}" for name, value in vars(record).items() if name not in _STANDARD]
        line = " ".join(words)
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def set_up(level: str) -> None:
    """Everything of this process to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Fields())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Says at INFO what every start does.
    logging.getLogger("alembic").setLevel(logging.WARNING)


def _text(value: object) -> str:
    text = str(value)
    return text if text and not any(c.isspace() or c in '"=\\' for c in text) else json.dumps(text)
