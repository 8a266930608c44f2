"""Entry of the agent: install it in a rank, and hook torch when it is imported. `unmodified_script` finds the loop.

A boundary is the next fetch from the loader after an optimizer's step, so that what a script does after the step
(schedules, logging) is part of it. Torch is hooked when it is imported, not before. Only the process that was launched
takes the page; where another one trains, the job can be frozen and no more (see `rank_processes`). What the agent
cannot handle is named, and offered less: no failure of the agent ends a job, but where a state has to be brought back.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import sys
import zlib
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any, Callable

from ganger.training import rank_processes
from ganger.training.outside_changes import OutsideChanges
from ganger.training.replay import OutputReplay

if TYPE_CHECKING:
    from ganger.training.unmodified_script import UnmodifiedScript

_script: UnmodifiedScript | None = None
_output_replay: OutputReplay | None = None
_outside: OutsideChanges | None = None
_is_installed = _is_stood_down = False


def install() -> None:
    """Wait for a training loop in this process. Does nothing outside Ganger or where the user wants no agent."""
    global _is_installed, _output_replay, _outside
    if _is_installed or not os.environ.get("GANGER_PAGE") or os.environ.get("GANGER_AGENT") == "none":
        return
    _is_installed = True
    if not rank_processes.is_child():
        _outside = OutsideChanges()
        if os.environ.get("GANGER_RESTORE"):
            page = os.environ["GANGER_PAGE"]
            name = os.path.basename(page).replace(".page", "") + ".replay.log"
            _output_replay = OutputReplay(os.path.join(os.environ.get("GANGER_JOB_DIR") or os.path.dirname(page), name))
            _output_replay.on_new_file = _outside.before_repeating = _give_up_replay
            atexit.register(_ended_too_early)
        _outside.watch()
        _fix_seeds()
    _after_import("torch", _hook)


def stand_down() -> None:
    """The script attaches by itself: leave it to `attach`. Idempotent."""
    global _script, _is_stood_down
    _is_stood_down = True
    if _script is not None:
        _script.release_page()
        _script = None
    if _output_replay is not None:
        _output_replay.end()
    if _outside is not None:
        _outside.end()


def _fix_seeds() -> None:
    """Let a script that gives no seed to its random generators draw the same numbers in every attempt of its job: what
    it draws before its first pass (a split of its data) is not part of the state. A seed of the script's own comes
    later, and holds. Builds of PyTorch differ in whether their generators have a fixed seed by themselves."""
    seed = zlib.crc32(f"{os.environ.get('GANGER_JOB_ID', '')} {os.environ.get('RANK', '')}".encode())

    def seed_numpy() -> None:
        from numpy import random

        random.seed(seed)
        original, made = random.default_rng, itertools.count()

        @functools.wraps(original)
        def default_rng(seed: Any = None, *, _job: int = seed) -> Any:
            return original([_job, next(made)] if seed is None else seed)

        random.default_rng = default_rng

    _after_import("random", lambda: sys.modules["random"].seed(seed))
    _after_import("numpy", seed_numpy)
    _after_import("torch", lambda: sys.modules["torch"].manual_seed(seed))


def _give_up_replay(reason: str) -> None:
    """End the process before it makes a change outside that it must not make again."""
    if _script is not None:
        _script.give_up_replay(reason)
    _stand_aside(RuntimeError(f"this script cannot be run again to its position: {reason}"))


def _hook() -> None:
    global _script
    if _is_stood_down:
        return
    try:
        rank_processes.hook_rendezvous()
        if rank_processes.is_child():
            rank_processes.watch()
            return
        from ganger.training.unmodified_script import UnmodifiedScript

        assert _outside is not None, "made at the start, as this process is the rank"
        _script = UnmodifiedScript(_output_replay, _outside)
        os.register_at_fork(after_in_child=rank_processes.watch_after_fork)
        _script.hook()
        # An adapter begins where the script calls a trainer that the agent knows.
        from ganger.training.trainer_run import KNOWN, Trainers

        trainers = Trainers(_script.make_way, _stand_aside, _output_replay, _outside)
        for name in KNOWN:
            _after_import(name, functools.partial(trainers.hook, name))
    except Exception as problem:  # In the middle of the user's `import torch`
        _stand_aside(problem)
        if _script is not None:
            _script.release_page()


def _stand_aside(problem: Exception) -> None:
    """Report a failure of the agent before it has a control, and do nothing else. A rank with a state to bring back is
    ended: it would train from its first step."""
    from ganger.injob.control import Control, failure_text
    from ganger.injob.page_layout import Opaque

    try:
        control = Control.from_environment()
        if control is not None and control.restore is not None and not rank_processes.is_child():
            if _output_replay is not None:
                _output_replay.end()
            control.give_up_restore(f"cannot restore: {failure_text(problem)}")
        print(f"ganger: {failure_text(problem)}; training goes on", file=sys.stderr, flush=True)
        if control is not None:
            control.step_aside(Opaque.AGENT_FAILED, failure_text(problem))
            control.close()
    except Exception as unreadable:
        print(f"ganger: this process runs without control: {unreadable}", file=sys.stderr)


def _ended_too_early() -> None:
    """A script that ends before it is back where it was has lost its way: that must not look like success."""
    if _output_replay is None or not _output_replay.active:
        return
    from ganger.injob import bootstrap
    from ganger.injob.page_layout import EXIT_NO_STATE

    _output_replay.give_up()
    print("ganger: the script ended before it came back to its position; the lines above are from its replay log. "
          "Attach it (ganger.attach) to restart without a replay", file=sys.stderr)  # fmt: skip
    if not bootstrap.has_failed():
        bootstrap.leave_now(EXIT_NO_STATE)


def _after_import(name: str, action: Callable[[], None]) -> None:
    """Call `action` once the module `name` has been imported completely."""
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _AfterImport(name, action))


class _AfterImport(MetaPathFinder):
    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name = name
        self._action = action
        self._busy = False
        self._is_done = False

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if name != self._name or self._busy or self._is_done:
            return None
        self._busy = True
        try:
            import importlib.util

            spec = importlib.util.find_spec(name)
        finally:
            self._busy = False
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            original = loader.exec_module

            def exec_module(module: Any) -> None:
                original(module)
                # Some loaders are those of many modules.
                if module.__name__ == name and not self._is_done:
                    self._is_done = True
                    self._action()

            # A loader that takes no attribute leaves the module without its hook, and the user's import alone.
            with contextlib.suppress(AttributeError):
                loader.exec_module = exec_module
        return spec
