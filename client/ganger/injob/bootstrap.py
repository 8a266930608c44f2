"""The interpreter of a rank: what happens before the user's first line, and how its exit code is kept.

`arm` is called once per interpreter, by the launcher's child or by sitecustomize. That is in a directory which stands
first on PYTHONPATH of every rank; it has two names only, `ganger` (a link to this package) and `sitecustomize.py`, so
that it can shadow nothing else. The directory of a daemon before an upgrade imports `arm` by this module's name.

The exit code is kept in the rank's page for the case that no launcher is there to see it. Python does not tell exit
handlers the code, so the ways out are watched: uncaught exceptions, sys.exit, exit, quit and os._exit. A SystemExit
that the script raises itself is seen only where we ran its first line, and taken for 0 elsewhere.
"""

from __future__ import annotations

import atexit
import builtins
import importlib
import io
import os
import sys
from types import TracebackType
from typing import Any, Callable, NoReturn

import ganger
from ganger.injob.page import Page
from ganger.injob.page_layout import Word


def arm() -> None:
    """Watch how this rank ends, and let the agent wait for a training loop. Never fails the user's program.

    Does nothing outside Ganger. In processes a rank starts (GANGER_PAGE is inherited) the agent waits too: the process
    whose optimizer steps may be one of them."""
    path = os.environ.get("GANGER_PAGE", "")
    if not path:
        return
    _print_lines_at_once()
    try:
        page = Page.open(path)
        is_rank = page.is_of_this_process()
        if is_rank:
            watch_exit(page)
        else:
            page.close()
        if os.environ.get("GANGER_AGENT") == "none":
            return  # The user wants no agent: how it ends is all we note
        importlib.import_module("ganger.training.agent").install()
    except Exception as problem:  # Whatever is wrong with the agent, the user's program runs
        print(f"ganger: this process runs without control: {problem}", file=sys.stderr)


def _print_lines_at_once() -> None:
    """A log is read while it grows, and a rank may be killed: whole lines go out when they are printed."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


_SITECUSTOMIZE = '''\
"""Arms Ganger's agent when this interpreter is a rank, then loads the sitecustomize this one stands before."""
import os
import sys


def _load_the_next_one():
    import importlib.machinery

    here = os.path.dirname(os.path.abspath(__file__))
    rest = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != here]
    found = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if found is None or found.loader is None:
        return
    # As the import system would: visible under its name while it runs, and instead of this module afterwards.
    import importlib.util

    module = importlib.util.module_from_spec(found)
    sys.modules["sitecustomize"] = module
    found.loader.exec_module(module)


if os.environ.get("GANGER_PAGE"):
    try:
        from ganger.injob.bootstrap import arm
    except ImportError as problem:
        print("ganger: the agent cannot be loaded:", problem, file=sys.stderr)
    else:
        arm()
_load_the_next_one()
'''


def prepare_inject_directory(path: str) -> str:
    """Create (or bring up to date) the directory and return its path. Raises OSError."""
    os.makedirs(path, mode=0o755, exist_ok=True)
    package = os.path.dirname(os.path.abspath(ganger.__file__))
    link = os.path.join(path, "ganger")
    if not (os.path.islink(link) and os.readlink(link) == package):
        _replace(link, lambda temporary: os.symlink(package, temporary))
    customize = os.path.join(path, "sitecustomize.py")
    if _content(customize) != _SITECUSTOMIZE:
        _replace(customize, _write)
    return path


def _content(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""


def _write(path: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(_SITECUSTOMIZE)


def _replace(path: str, make: Callable[[str], None]) -> None:
    temporary = f"{path}.{os.getpid()}.tmp"
    if os.path.lexists(temporary):
        os.unlink(temporary)
    make(temporary)
    os.replace(temporary, path)


_page: Page | None = None
_pid = 0
_code = 0
_real_exit = os._exit


def watch_exit(page: Page) -> None:
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
        record_exit()
        _real_exit(status)

    sys.excepthook = hook
    sys.exit = exit_recorded
    os._exit = exit_at_once
    _watch_quitter(type(getattr(builtins, "exit", None)))
    atexit.register(record_exit)


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


def record_exit() -> None:
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
    record_exit()
    _real_exit(code)
