"""Running a script in a forked interpreter as if Python had been started with it: argv, __main__, tracebacks, codes."""

from __future__ import annotations

import atexit
import importlib.machinery
import io
import os
import runpy
import signal
import sys
import types
from collections.abc import Sequence
from types import TracebackType
from typing import NoReturn

from ganger.injob import exit_code as exitcode
from ganger.injob.launcher.launch_request import PythonCommand

_interrupted = False


def run_as_main(command: PythonCommand, argv: Sequence[str]) -> NoReturn:
    """Run the program and leave through SystemExit, so that the interpreter ends as it always does."""
    # Registered before anything of the user's, so that it runs last.
    atexit.register(_die_if_interrupted)
    sys.argv = [command.script or "-m", *command.arguments]
    if hasattr(sys, "orig_argv"):
        sys.orig_argv = list(argv)
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = main
    try:
        if command.module:
            sys.path.insert(0, os.getcwd())
            # What the interpreter itself calls for -m.
            runpy._run_module_as_main(command.module)  # type: ignore[attr-defined]
        else:
            _run_script(command.script, main)
    except SystemExit as leaving:
        exitcode.set_code(exitcode.code_of(leaving.code))
        raise
    except BaseException as problem:
        _fail(problem)
    raise SystemExit(0)


def _run_script(path: str, main: types.ModuleType) -> None:
    if os.path.isdir(path) or path.endswith((".pyc", ".zip", ".pyz")):
        sys.path.insert(0, path)
        runpy.run_path(path, run_name="__main__")
        return
    # CPython resolves one link of the script's name, so that a linked script finds its neighbours.
    where = os.path.join(os.path.dirname(path), os.readlink(path)) if os.path.islink(path) else path
    sys.path.insert(0, os.path.dirname(os.path.abspath(where)))
    try:
        with io.open_code(os.path.abspath(path)) as file:
            source = file.read()
    except OSError as error:
        print(
            f"{sys.executable}: can't open file {os.path.abspath(path)!r}: [Errno {error.errno}] {error.strerror}",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    main.__dict__.update(
        __file__=os.path.abspath(path),
        __cached__=None,
        __loader__=importlib.machinery.SourceFileLoader("__main__", os.path.abspath(path)),
        __spec__=None,
        __package__=None,
        __doc__=None,
    )
    exec(compile(source, os.path.abspath(path), "exec", dont_inherit=True), main.__dict__)


def _fail(problem: BaseException) -> NoReturn:
    """Print an uncaught exception as Python does, without the frames that are ours, and end with its code."""
    global _interrupted
    _interrupted = isinstance(problem, KeyboardInterrupt)
    trace = _without_our_frames(problem.__traceback__)
    problem.__traceback__ = trace
    if sys.version_info >= (3, 12):
        sys.last_exc = problem
    sys.last_type, sys.last_value, sys.last_traceback = type(problem), problem, trace
    try:
        sys.excepthook(type(problem), problem, trace)
    except SystemExit:
        raise
    except BaseException as second:
        print(f"Error in sys.excepthook: {second!r}", file=sys.stderr)
    raise SystemExit(1) from None


def _die_if_interrupted() -> None:
    """After an uncaught KeyboardInterrupt Python dies of the signal itself, when everything else is done."""
    if _interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


def _without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    """Cut the leading frames of this file; of a module's those of runpy stay, as Python shows them too."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace
