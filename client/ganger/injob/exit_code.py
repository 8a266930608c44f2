"""The exit code of a rank, kept in its page for the case that no launcher is there to see it. Python does not tell exit
handlers the code, so the ways out are watched: uncaught exceptions, sys.exit, exit, quit and os._exit. A SystemExit
that the script raises itself is seen only where we ran its first line, and taken for 0 elsewhere."""

from __future__ import annotations

import atexit
import builtins
import os
import sys
from types import TracebackType
from typing import Any, Callable, NoReturn

from ganger.injob.page import Page
from ganger.injob.page_layout import Word

_page: Page | None = None
_pid = 0
_code = 0
_real_exit = os._exit


def watch(page: Page) -> None:
    """Record in ``page`` how this process ends; processes forked from it record nothing."""
    global _page, _pid
    if _page is not None:
        return
    _page, _pid = page, os.getpid()
    original_hook = sys.excepthook
    original_exit = sys.exit

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        set_code(1)
        original_hook(kind, value, trace)

    def exit_recorded(status: str | int | None = None) -> NoReturn:
        set_code(code_of(status))
        original_exit(status)

    def exit_at_once(status: int) -> NoReturn:
        set_code(status & 0xFF)
        record()
        _real_exit(status)

    sys.excepthook = hook
    sys.exit = exit_recorded
    os._exit = exit_at_once
    _watch_quitter(type(getattr(builtins, "exit", None)))
    atexit.register(record)


def _watch_quitter(quitter: Any) -> None:
    """`exit` and `quit` of the site module raise SystemExit by themselves."""
    if quitter.__name__ != "Quitter":
        return  # Python was started without site
    original: Callable[..., NoReturn] = quitter.__call__

    def quit_recorded(self: object, code: str | int | None = None) -> NoReturn:
        set_code(code_of(code))
        original(self, code)

    quitter.__call__ = quit_recorded


def code_of(status: object) -> int:
    """Return the exit code CPython gives to SystemExit(status)."""
    if status is None:
        return 0
    return status & 0xFF if isinstance(status, int) else 1


def set_code(code: int) -> None:
    global _code
    _code = code


def has_failed() -> bool:
    return _code != 0


def record() -> None:
    """Write the code known so far into the page."""
    if _page is not None and os.getpid() == _pid:
        _page.set(Word.EXIT_CODE, (_code & 0xFF) + 1)


def leave_now(code: int) -> NoReturn:
    """End this process with ``code`` whatever the script would still like to do, its loader processes with it.

    No exit handlers run: they may wait for partners of a collective operation that will never answer."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is not None:
        for process in multiprocessing.active_children():
            process.terminate()
    set_code(code)
    record()
    _real_exit(code)
