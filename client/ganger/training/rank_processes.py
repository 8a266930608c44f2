"""Processes of a rank: training in a process that the rank started, and the process group of torch.distributed.

A process behind a shell script, torchrun or a multiprocessing pool is not controlled. Stopped at a boundary of its own,
its parent and its brothers would continue; started again, the rank's command begins at its first line; and its exit
code reaches its parent, which may ignore it. The first optimizer step there makes the rank opaque: it is paused by
freezing all of its processes, and offers nothing else.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any, Callable
from urllib.parse import urlparse

from ganger.injob import bootstrap
from ganger.injob.control import Control
from ganger.injob.page import Page
from ganger.injob.page_access import PageError
from ganger.injob.page_layout import EXIT_NO_STATE, Error, Opaque, Word
from ganger.injob.process_identity import start_ticks

CHILD = (
    "it trains in a process that its command started, not in the command's own: "
    "submit the training script itself, or let the command become it (exec python train.py)"
)
SEVERAL = "several of its processes train"

_watched_pid = 0
_is_forked = False


def is_child() -> bool:
    """Return whether this process inherited a rank's environment, and is not the rank."""
    if not os.environ.get("GANGER_PAGE"):
        return False
    if _is_forked:
        return True
    try:
        page = Page.open(os.environ["GANGER_PAGE"], writable=False)
    except (OSError, PageError):
        return False
    try:
        return not page.is_of_this_process()
    finally:
        page.close()


def watch() -> None:
    """Wait for the first optimizer step of this process, for which `is_child` holds. Idempotent; imports torch."""
    global _watched_pid
    if _watched_pid != os.getpid() and os.environ.get("GANGER_AGENT") != "none":
        _watched_pid = os.getpid()
        _ChildTraining()


def watch_after_fork() -> None:
    """Do the same in a process that was forked from a rank."""
    global _is_forked
    _is_forked = True
    watch()


class _ChildTraining:
    """A process that waits for its first optimizer step. Its steps are published if no other of the rank trains."""

    def __init__(self) -> None:
        self._control: Control | None = None
        self._stepping: object = None
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._stop_waiting = register_optimizer_step_pre_hook(self._first_step).remove

    def _first_step(self, optimizer: Any, *_: Any) -> None:
        self._stop_waiting()
        try:
            self._begin(optimizer)
        except Exception as problem:  # In the user's optimizer.step()
            print(f"ganger: this process trains without control: {problem}", file=sys.stderr, flush=True)

    def _begin(self, optimizer: Any) -> None:
        control = Control(Page.open(os.environ["GANGER_PAGE"]), job_dir=os.environ.get("GANGER_JOB_DIR", ""))
        is_first = control.claim()
        control.step_aside(*((Opaque.TRAINS_IN_CHILD, CHILD) if is_first else (Opaque.SEVERAL_TRAIN, SEVERAL)))
        if os.environ.get("GANGER_RESTORE"):
            message = f"cannot restore: {CHILD if is_first else SEVERAL}, and a state can only be brought back there"
            control.error(Error.STATE_UNREADABLE, message)
            # Its command may ignore how its child ended, and report success.
            pid = control.page.get(Word.PID)
            if pid and control.page.get(Word.START_TICKS) == start_ticks(pid):
                os.kill(pid, signal.SIGTERM)
            bootstrap.leave_now(EXIT_NO_STATE)
        if not is_first:
            control.close()
            return
        from torch.optim.optimizer import register_optimizer_step_post_hook

        # Of several optimizers one: a step of each of them is one step of training.
        self._control, self._stepping = control, optimizer
        register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if optimizer is self._stepping and self._control is not None:
            self._control.boundary()


_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
RENDEZVOUS = "GANGER_RENDEZVOUS"
_is_hooked = False
_is_group_kept = False


def hook_rendezvous() -> None:
    """Let rank 0 serve every tcp:// address except the gang's, as in `init_process_group("tcp://...")`. Idempotent.

    The gang's store is a process of Ganger, and TORCHELASTIC_USE_AGENT_STORE makes every rank a client of it. PyTorch
    applies that variable to all addresses, so no rank would serve an address that the script chose, and all would hang.

    In the gang's store, ranks with GANGER_RENDEZVOUS in their environment meet those with the same value only.
    """
    global _is_hooked
    from torch import distributed

    if _is_hooked or not distributed.is_available():
        return
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    handlers = getattr(rendezvous, "_rendezvous_handlers", {})
    if "tcp" in handlers:
        handlers["tcp"] = _with_own_store(handlers["tcp"])
    if os.environ.get(RENDEZVOUS):
        for scheme in handlers.keys() & {"tcp", "env"}:
            handlers[scheme] = _with_own_names(handlers[scheme])
    _is_hooked = True


def keep_default_group() -> None:
    """Keep the default gloo group alive until the process ends. Idempotent; does nothing without such a group.

    A gloo process group joins its threads when it is freed, and holds the interpreter lock meanwhile. A thread that
    has just finished a collective operation of a backward pass needs that lock to release a Python object. A script
    that ends within milliseconds of its last collective operation may therefore deadlock, and its gang with it (seen
    with torch 2.13, outside Ganger too).
    """
    global _is_group_kept
    from torch import distributed

    if _is_group_kept or not distributed.is_available() or not distributed.is_initialized():
        return
    if "gloo" not in str(distributed.get_backend_config()):
        return
    # A Python reference would be cleared at interpreter shutdown, and the group freed with it.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(distributed.group.WORLD))
    _is_group_kept = True


def _with_own_store(original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    def handler(url: str, *arguments: Any, **options: Any) -> Iterator[Any]:
        rendezvous = original(url, *arguments, **options)
        is_of_gang = str(urlparse(url).port) == os.environ.get("MASTER_PORT")
        value = None if is_of_gang else os.environ.pop(_AGENT_STORE, None)
        try:
            first = next(rendezvous)
        finally:
            if value is not None:
                os.environ[_AGENT_STORE] = value
        yield first
        yield from rendezvous

    return handler


def _with_own_names(original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    def handler(url: str, *arguments: Any, **options: Any) -> Iterator[Any]:
        from torch import distributed

        for store, rank, world in original(url, *arguments, **options):
            yield distributed.PrefixStore(os.environ[RENDEZVOUS], store), rank, world  # type: ignore[attr-defined]

    return handler


def rank_and_world(control: Control | None) -> tuple[int, int]:
    """Return the number of this rank and of all ranks, outside Ganger too."""
    if control is not None:
        return control.rank, control.world
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
