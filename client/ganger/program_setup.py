"""Set-up of a program: its log lines, its garbage collection, and its threads of linear algebra.

Master, planner, job-scheduler hosts and daemons have one format of log lines:

    time=2026-01-01T12:00:01.123456Z level=info program=master event=node_lost logger=... subject=nodes/n1 id=7

Fields come from `extra` of the standard library's logging. With GANGER_LOG_FORMAT=json a line is a JSON object of the
same fields. `read_line` reads both.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TextIO

from ganger.text import visible

if TYPE_CHECKING:
    from structlog.typing import EventDict, Processor

log = logging.getLogger(__name__)

FORMAT_VARIABLE: Final = "GANGER_LOG_FORMAT"
FORMATS: Final = ("text", "json")
_FIRST: Final = ("time", "level", "program", "event", "logger")
# Libraries that log at INFO what happens at every start.
_NOISY: Final = ("alembic", "asyncio", "grpc")


def set_up_log(program: str, level: str = "info", stream: TextIO | None = None) -> None:
    """Write all log lines of this process to standard error, or to `stream`.

    program: its name in each line. level: debug, info, warning or error. GANGER_LOG_FORMAT names the format; text is
    used, with a warning, in place of one that does not exist."""
    form = os.environ.get(FORMAT_VARIABLE) or FORMATS[0]
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_formatter(program, form))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if form not in FORMATS:
        log.warning("unknown log format", extra={FORMAT_VARIABLE: form, "use": " or ".join(FORMATS)})
    for noisy in _NOISY:
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _formatter(program: str, form: str) -> logging.Formatter:
    # Imported here: a process that has no log needs none of it.
    from structlog import processors, stdlib

    def add_program(_logger: Any, _name: str, fields: EventDict) -> EventDict:
        fields["program"] = program
        return fields

    renderer = processors.JSONRenderer(default=str) if form == "json" else _text_renderer(processors.LogfmtRenderer)
    render: list[Processor] = [
        stdlib.ProcessorFormatter.remove_processors_meta,
        processors.TimeStamper(fmt="iso", utc=True, key="time"),
        add_program,
        processors.format_exc_info,
        renderer,
    ]
    of_record: list[Processor] = [stdlib.ExtraAdder(), stdlib.add_log_level, stdlib.add_logger_name]
    return stdlib.ProcessorFormatter(foreign_pre_chain=of_record, processors=render)


def _text_renderer(make: Callable[..., Any]) -> Processor:
    to_line = make(key_order=_FIRST, drop_missing=True, bool_as_flag=False)

    def render(logger: Any, name: str, fields: EventDict) -> str:
        # People read a traceback line by line. No value may send control codes to the terminal that shows the log.
        traceback = fields.pop("exception", "")
        shown = {key: visible(str(value)) for key, value in fields.items()}
        return str(to_line(logger, name, shown)) + (f"\n{visible(traceback, lines=True)}" if traceback else "")

    return render


_FIELD: Final = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|[^ ]*)')


def read_line(line: str) -> dict[str, Any]:
    """Return the fields of a log line in either format; empty for a line of something else."""
    if line.startswith("{"):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) and "event" in found else {}
    if not line.startswith("time="):
        return {}
    return {
        name: re.sub(r"\\(.)", r"\1", text[1:-1]) if text[:1] == '"' else text for name, text in _FIELD.findall(line)
    }


# -- memory and threads ------------------------------------------------------------------------------------------------

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


_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Limit linear algebra to one thread in processes started, and libraries first imported, within this context."""
    before = {name: os.environ.get(name) for name in _THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
