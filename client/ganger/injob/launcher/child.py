"""What a forked child does before the user's first instruction: become a process of its own, in its place."""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import BinaryIO, Callable, NoReturn, cast

from ganger.injob.arena import VARIABLE, arena_variable
from ganger.injob.launcher.child_process import set_blas_threads
from ganger.injob.launcher.launch_request import Launch, LaunchError, PythonCommand, python_command
from ganger.injob.launcher.script import run_as_main
from ganger.injob.launcher.sources import sets_library_variables
from ganger.injob.page import Page, PageError, Word
from ganger.injob.processes import start_ticks


def settle(launch: Launch) -> None:
    """Take the child into its session, cgroups, identity, log and directory. Raises LaunchError.

    From the outside in: what needs privileges first, then the identity, then what the user must be allowed to do.
    """
    os.setsid()
    for number in signal.valid_signals():
        if number not in (signal.SIGKILL, signal.SIGSTOP, signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
            try:
                signal.signal(number, signal.SIG_DFL)
            except (OSError, ValueError):
                continue  # real-time signals the C library keeps for itself
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    enter_cgroups(launch.cgroup_procs)
    if launch.cores is not None:
        cores = launch.cores
        _attempt("CORES", f"cannot run on cores {cores}", lambda: os.sched_setaffinity(0, cores))
    for name, limits in launch.rlimits.items():
        _attempt("RLIMIT", f"cannot set limit {name} to {limits}", partial(_limit, name, tuple(limits)))
    if launch.groups is not None:
        groups = launch.groups
        _attempt("CANNOT_SWITCH_USER", "cannot set groups", lambda: os.setgroups(groups))
    if launch.gid is not None and launch.gid != os.getgid():
        gid = launch.gid
        _attempt("CANNOT_SWITCH_USER", f"cannot become group {gid}", lambda: os.setresgid(gid, gid, gid))
    if launch.uid is not None and launch.uid != os.getuid():
        uid = launch.uid
        _attempt("CANNOT_SWITCH_USER", f"cannot become user {uid}", lambda: os.setresuid(uid, uid, uid))
    if launch.umask is not None:
        os.umask(launch.umask)
    _attempt("LOG", f"cannot write the log {launch.log}", lambda: _redirect(launch.log))
    _attempt("CWD", f"cannot enter the working directory {launch.cwd}", lambda: os.chdir(launch.cwd))
    if launch.page:
        _fill_page(launch.page)


def start(launch: Launch, may_fork: bool, arena: int | None, write_end: int) -> NoReturn:
    """All of a child's life that is ours: what cannot be done is said into ``write_end``, which else is just closed."""
    try:
        settle(launch)
        run(launch, may_fork, arena, lambda: os.close(write_end))
    except LaunchError as error:
        problem = error
    except (OSError, ValueError) as error:
        problem = LaunchError("SYSTEM", f"cannot be started: {error}")
    os.write(write_end, json.dumps({"reason": problem.reason, "message": str(problem)}).encode())
    os._exit(127)


def enter_cgroups(procs: Sequence[str]) -> None:
    """Put this process into cgroups by their cgroup.procs files. Raises LaunchError."""
    for path in procs:
        _attempt("CGROUP", f"cannot enter the cgroup {path}", partial(_write, path, str(os.getpid())))


def run(launch: Launch, may_fork: bool, arena: int | None, settled: Callable[[], None]) -> NoReturn:
    """Become the user's program; the last thing a child calls. Raises LaunchError if it cannot be executed.

    Runs a script of this very interpreter in it, everything else by exec. ``settled`` is called when nothing can fail
    any more that is ours.
    """
    environment = dict(launch.env)
    if arena is not None:
        environment[VARIABLE] = arena_variable(arena)
        os.set_inheritable(arena, True)
    command = python_command(launch.argv, environment, launch.cwd) if may_fork else None
    if command is None or sets_library_variables(command):
        _execute(launch, environment)
    _adopt_environment(environment, command)
    _use_threads(launch, environment)
    from ganger.injob.bootstrap import arm

    arm()
    settled()
    run_as_main(command, launch.argv)


def _execute(launch: Launch, environment: Mapping[str, str]) -> NoReturn:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(launch.argv[0], list(launch.argv), dict(environment))
    except (OSError, ValueError) as error:
        # a null byte, or characters that no file system encodes, are no OSError
        why = error.strerror if isinstance(error, OSError) else error
        raise LaunchError("COMMAND", f"cannot execute {launch.argv[0][:200]!r}: {why}") from error


def _adopt_environment(environment: Mapping[str, str], command: PythonCommand) -> None:
    """Give the interpreter what it would have read from its environment when starting."""
    inherited = _entries(os.environ.get("PYTHONPATH", ""))
    base = [entry for entry in sys.path if entry and os.path.abspath(entry) not in inherited]
    # Only what differs: each change is copied into the C library's environment.
    for name in [name for name in os.environ if name not in environment]:
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    sys.path[:] = [*_entries(environment.get("PYTHONPATH", "")), *base]
    if not command.unbuffered:
        return
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        raw = io.FileIO(descriptor, "wb", closefd=False)
        # What -u makes: no buffer in between. (TextIOWrapper takes a raw file, whatever its stub says.)
        stream = io.TextIOWrapper(cast(BinaryIO, raw), stream.encoding, stream.errors, write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _entries(python_path: str) -> list[str]:
    return [os.path.abspath(part) for part in python_path.split(os.pathsep) if part]


def _use_threads(launch: Launch, environment: Mapping[str, str]) -> None:
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()  # a fresh interpreter draws its own seed; brothers of one fork would share one
    # OMP_NUM_THREADS was read when torch was imported, in another process. A list is for nested regions.
    text = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    threads = int(text) if text.isdigit() else launch.threads
    if not threads and launch.cores is not None:
        threads = len(launch.cores)
    torch = sys.modules.get("torch")
    if threads and torch is not None:
        torch.set_num_threads(threads)
    if threads > 1 and numpy_random is not None and "OPENBLAS_NUM_THREADS" not in environment:
        set_blas_threads(threads)


def _fill_page(path: str) -> None:
    try:
        page = Page.open(path)
    except (OSError, PageError) as error:
        raise LaunchError("PAGE", f"cannot open the control page {path}: {error}") from error
    page.set(Word.START_TICKS, start_ticks(os.getpid()) or 0)
    page.set(Word.PID, os.getpid())
    page.close()


def _redirect(log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(nothing, 0)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    os.close(nothing)


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _limit(name: str, limits: tuple[int, ...]) -> None:
    soft, hard = limits
    resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (soft, hard))


def _attempt(reason: str, what: str, action: Callable[[], object]) -> None:
    try:
        action()
    except (OSError, ValueError, AttributeError) as error:
        raise LaunchError(reason, f"{what}: {error}") from error
