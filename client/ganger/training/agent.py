"""The zero-line form: finds the boundaries of an unmodified script, pauses it there, brings it back after a restart.

A boundary is the next fetch from the loader after an optimizer's step, so that what a script does after the step
(schedules, logging) is part of it. Torch is hooked when it is imported, not before. Only the process that was launched
takes the page; where another one trains, the job can be frozen and no more (see `rank_processes`). What the agent
cannot handle is named, and offered less: no failure of the agent ends a job, but where a state has to be brought back.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import sys
import zlib
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any, Callable

from ganger.training import rank_processes
from ganger.training.outside_changes import OutsideChanges
from ganger.training.replay import OutputReplay

if TYPE_CHECKING:
    from ganger.training.unmodified_script import UnmodifiedScript

_script: UnmodifiedScript | None = None
_diversion: OutputReplay | None = None
_outside: OutsideChanges | None = None
_waiting: _AfterImport | None = None
_is_installed = False


def install() -> None:
    """Wait for a training loop in this process. Does nothing outside Ganger or where the user wants no agent; harmless
    where torch is never imported."""
    global _is_installed, _diversion, _outside, _waiting
    if _is_installed or not os.environ.get("GANGER_PAGE") or os.environ.get("GANGER_AGENT") == "none":
        return
    _is_installed = True
    if not rank_processes.is_child():
        _outside = OutsideChanges()
        if os.environ.get("GANGER_RESTORE"):
            _diversion = OutputReplay(_replay_log())
            _diversion.on_new_file = _outside.before_repeating = _give_up_replay
            atexit.register(_ended_too_early)
        _outside.watch()
        _fix_seeds()
    if "torch" in sys.modules:
        _hook()
    else:
        _waiting = _AfterImport("torch", _hook)
        sys.meta_path.insert(0, _waiting)


def stand_down() -> None:
    """The script attaches by itself: leave it to `attach`. Idempotent."""
    global _script, _waiting
    if _waiting is not None:
        _waiting.remove()
        _waiting = None
    if _script is not None:
        _script.retire()
        _script = None
    if _diversion is not None:
        _diversion.end()
    if _outside is not None:
        _outside.end()


def _fix_seeds() -> None:
    """Let a script that gives no seed to its random generators draw the same numbers in every attempt of its job: what
    it draws before its first pass (a split of its data) is not part of the state. A seed of the script's own comes
    later, and holds. Builds of PyTorch differ in whether their generators have a fixed seed by themselves."""
    seed = zlib.crc32(f"{os.environ.get('GANGER_JOB_ID', '')} {os.environ.get('RANK', '')}".encode())

    def seed_random() -> None:
        sys.modules["random"].seed(seed)

    def seed_numpy() -> None:
        from numpy import random

        random.seed(seed)
        original, made = random.default_rng, itertools.count()

        @functools.wraps(original)
        def default_rng(seed: Any = None, *, _job: int = seed) -> Any:
            return original([_job, next(made)] if seed is None else seed)

        random.default_rng = default_rng

    def seed_torch() -> None:
        sys.modules["torch"].manual_seed(seed)

    for name, action in (("random", seed_random), ("numpy", seed_numpy), ("torch", seed_torch)):
        if name in sys.modules:
            action()
        else:
            sys.meta_path.insert(0, _AfterImport(name, action))


def _give_up_replay(reason: str) -> None:
    """End the process before it makes a change outside that it must not make again."""
    if _script is not None:
        _script.give_up_replay(reason)
    _stand_aside(RuntimeError(f"this script cannot be run again to its position: {reason}"))


def _replay_log() -> str:
    page = os.environ["GANGER_PAGE"]
    name = os.path.basename(page).replace(".page", "") + ".replay.log"
    return os.path.join(os.environ.get("GANGER_JOB_DIR") or os.path.dirname(page), name)


def _hook() -> None:
    global _script, _waiting
    if _waiting is not None:
        _waiting.remove()
        _waiting = None
    try:
        from ganger.training.rank_processes import hook_rendezvous

        hook_rendezvous()
        if rank_processes.is_child():
            rank_processes.watch()
            return
        from ganger.training.unmodified_script import UnmodifiedScript

        assert _outside is not None, "made at the start, as this process is the rank"
        _script = UnmodifiedScript(_diversion, _outside)
        os.register_at_fork(after_in_child=rank_processes.watch_after_fork)
        _script.hook()
        _watch_trainers(_script, _outside)
    except Exception as problem:  # in the middle of the user's `import torch`
        _stand_aside(problem)
        if _script is not None:
            _script.retire()


def _watch_trainers(script: UnmodifiedScript, outside: OutsideChanges) -> None:
    """Let an adapter begin where the script calls a trainer that the agent knows."""
    from ganger.training.trainer_run import KNOWN, Trainers

    trainers = Trainers(script.make_way, _diversion, outside)
    for name in KNOWN:
        action = functools.partial(trainers.hook, name)
        if name in sys.modules:
            action()
        else:
            sys.meta_path.insert(0, _AfterImport(name, action))


def _stand_aside(problem: Exception) -> None:
    """Report a failure of the agent before it has a control, and do nothing else. A rank with a state to bring back is
    ended: it would train from its first step."""
    from ganger.injob.control import Control, failure_text
    from ganger.injob.page_layout import Opaque

    try:
        control = Control.from_environment()
        if control is not None and control.restore is not None and not rank_processes.is_child():
            if _diversion is not None:
                _diversion.end()
            control.give_up_restore(f"cannot restore: {failure_text(problem)}")
        print(f"ganger: {failure_text(problem)}; training goes on", file=sys.stderr, flush=True)
        if control is not None:
            control.step_aside(Opaque.AGENT_FAILED, failure_text(problem))
            control.close()
    except Exception as unreadable:
        print(f"ganger: this process runs without control: {unreadable}", file=sys.stderr)


def _ended_too_early() -> None:
    """A script that ends before it is back where it was has lost its way: that must not look like success."""
    if _diversion is None or not _diversion.active:
        return
    from ganger.injob import exit_code as exitcode
    from ganger.injob.page_layout import EXIT_NO_STATE

    _diversion.give_up()
    print("ganger: the script ended before it came back to its position; the lines above are from its replay log. "
          "Attach it (ganger.attach) to restart without a replay", file=sys.stderr)  # fmt: skip
    if not exitcode.has_failed():
        exitcode.leave_now(EXIT_NO_STATE)


class _AfterImport(MetaPathFinder):
    """Calls `action` once the module `name` has been imported completely."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name = name
        self._action = action
        self._busy = False

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if name != self._name or self._busy:
            return None
        self._busy = True
        try:
            import importlib.util

            spec = importlib.util.find_spec(name)
        finally:
            self._busy = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Notifying(spec.loader, self._action)
        return spec


class _Notifying(Loader):
    def __init__(self, loader: Any, action: Callable[[], None]) -> None:
        self._loader = loader
        self._action = action

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self._loader.exec_module(module)
        self._action()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
