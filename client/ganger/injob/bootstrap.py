"""Getting ready before the user's first line: called once per interpreter, by the launcher's child or by sitecustomize.
That is in a directory which stands first on PYTHONPATH of every rank; it has two names only, `ganger` (a link to this
package) and `sitecustomize.py`, so that it can shadow nothing else."""

from __future__ import annotations

import importlib
import io
import os
import sys
from typing import Callable

import ganger
from ganger.injob import exit_code as exitcode
from ganger.injob.page import Page


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
            exitcode.watch(page)
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
