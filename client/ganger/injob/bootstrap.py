"""Getting ready before the user's first line: called once per interpreter, by the launcher's child or sitecustomize."""

from __future__ import annotations

import importlib
import io
import os
import sys

from ganger.injob import exit_code as exitcode
from ganger.injob.page import Page


def arm() -> None:
    """Watch how this rank ends, and let the agent wait for a training loop. Never fails the user's program.

    Does nothing outside Ganger. In processes a rank starts (GANGER_PAGE is inherited) the agent waits too: the process
    whose optimizer steps may be one of them.
    """
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
            return  # the user wants no agent: how it ends is all we note
        importlib.import_module("ganger.training.agent").install()
    except Exception as problem:  # whatever is wrong with the agent, the user's program runs
        print(f"ganger: this process runs without control: {problem}", file=sys.stderr)


def _print_lines_at_once() -> None:
    """A log is read while it grows, and a rank may be killed: whole lines go out when they are printed."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
