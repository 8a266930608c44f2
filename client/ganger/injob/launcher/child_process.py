"""A forked child of the launcher: it becomes a separate process, runs a script as if Python had been started with it,
or serves a rendezvous store."""

from __future__ import annotations

import atexit
import ctypes
import importlib
import importlib.machinery
import io
import json
import os
import runpy
import signal
import socket
import struct
import sys
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, BinaryIO, Callable, NoReturn, cast

from ganger.injob import bootstrap
from ganger.injob.launcher.namespaces import Unit, be_init, enter_unit, refuse_io_uring
from ganger.injob.launcher.preload import sets_library_variables
from ganger.injob.launcher.process_record import (
    Launch,
    LaunchError,
    PythonCommand,
    lift_limits,
    parse_launch,
    python_command,
    set_limits,
    shortened,
    write_durably,
)
from ganger.injob.page import Page
from ganger.injob.page_access import PageError
from ganger.injob.page_layout import Word
from ganger.injob.process_identity import peer_of, start_ticks
from ganger.injob.state_image import VARIABLE, arena_variable
from ganger.text import os_failure, os_reason

_interrupted = False

# Longest wait for the daemon at a gate: the kernel may take its time to let a process into a cgroup.
_GATE_S = 30.0
_GATE_BYTES = 4096


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
        bootstrap.set_code(bootstrap.code_of(leaving.code))
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
    """End this process by SIGINT after an uncaught KeyboardInterrupt, as Python does last of all."""
    if _interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


def _without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    """Cut the leading frames of this file; of a module's those of runpy stay, as Python shows them too."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


_NAMES = [f"{prefix}_set_num_threads{suffix}" for prefix in ("scipy_openblas", "openblas") for suffix in ("64_", "")]


def set_blas_threads(threads: int) -> None:
    """Let every OpenBLAS of this process compute with so many threads. Without effect where there is none."""
    for path in _libraries():
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue  # removed since it was loaded
        for name in _NAMES:
            function = getattr(library, name, None)
            if function is not None:
                function(ctypes.c_int(threads))


def _libraries() -> list[str]:
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        lines = [line.rstrip("\n").split(None, 5) for line in maps if "openblas" in line]
    return sorted({fields[5] for fields in lines if len(fields) == 6 and ".so" in fields[5]})


_LOOK_EVERY_S = 2.0


def open_listener(host: str) -> socket.socket:
    """A socket at a port of the kernel's choice that takes connections from now on. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.bind((host, 0))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def serve_store(directory: str, host: str, listener: socket.socket) -> NoReturn:
    """Serve in this (forked) process until the directory is gone; writes rendezvous.json there.

    Listens on ``host`` only. It ends by itself when the epoch's directory is removed; without a directory, when its
    parent, which is that of the ranks, has ended."""
    parent = os.getppid()
    distributed = importlib.import_module("torch.distributed")

    port = listener.getsockname()[1]
    # torch alone would listen on every address of the machine.
    store = distributed.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    while not directory:
        if os.getppid() != parent:
            os._exit(0)
        time.sleep(_LOOK_EVERY_S)
    path = os.path.join(directory, "rendezvous.json")
    content = {"host": host, "port": port, "pid": os.getpid(), "start_ticks": start_ticks(os.getpid())}
    write_durably(path, json.dumps(content).encode())
    while os.path.exists(path):
        time.sleep(_LOOK_EVERY_S)
    del store
    sys.stderr.flush()
    os._exit(0)


def settle(launch: Launch) -> None:
    """Take the child into its session, cgroups, log and directory. Raises LaunchError."""
    os.setsid()
    for number in signal.valid_signals():
        if number not in (signal.SIGKILL, signal.SIGSTOP, signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
            try:
                signal.signal(number, signal.SIG_DFL)
            except (OSError, ValueError):
                continue  # real-time signals the C library keeps for itself
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    log = enter(launch)
    if launch.cores is not None:
        cores = launch.cores
        _attempt("CORES", f"cannot run on cores {cores}", lambda: os.sched_setaffinity(0, cores))
    _attempt("LIMITS", "cannot set its limits", lambda: set_limits(launch.limits))
    if launch.no_io_uring:
        _attempt("FILTER", "cannot refuse io_uring", refuse_io_uring)
    os.umask(launch.umask)
    _attempt("LOG", f"cannot write the log {launch.log}", lambda: _redirect(launch.log, log))
    _attempt("CWD", f"cannot enter the working directory {launch.cwd}", lambda: os.chdir(launch.cwd))
    if launch.page:
        fill_page(launch.page, os.getpid())


def start(launch: Launch, may_fork: bool, arena: int | None, write_end: int) -> NoReturn:
    """Prepare a child and run its program. Write a failure as JSON into ``write_end``, and only close it on success."""
    try:
        settle(launch)
        run(launch, may_fork, arena, lambda: os.close(write_end))
    except LaunchError as error:
        problem = error
    except (OSError, ValueError) as error:
        problem = LaunchError("SYSTEM", f"cannot be started: {os_failure(error)}")
    os.write(write_end, json.dumps({"reason": problem.reason, "message": str(problem)}).encode())
    os._exit(127)


def start_executed(content: Mapping[str, Any], write_end: int, arena: int | None) -> NoReturn:
    """Be what a starter has forked: the init of a unit, or a program that is executed."""
    unit = content.get("unit")
    if unit is not None:
        be_init(Unit(**unit), write_end, content["cgroup_procs"])
    start(parse_launch(content), False, arena, write_end)


def restore(
    launch: Launch, command: Sequence[str], directory: str, files: Mapping[int, str], write_end: int
) -> NoReturn:
    """Execute the program that restores a process image as this process's sibling, in the image's ``directory``.
    ``files``: what it is to open for the image, by descriptor. Write a failure to begin into ``write_end``."""
    try:
        enter_unit(launch.init)
        # Where the command is another account's, it may not go through the directories above.
        os.chdir(directory)
        enter_cgroups(launch.cgroup_procs)
        if launch.cores is not None:
            os.sched_setaffinity(0, launch.cores)
        _redirect(os.devnull)
        lift_limits()
        for number, path in files.items():
            opened = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
            os.dup2(opened, number, inheritable=True)
            if opened != number:
                os.close(opened)
        os.execv(command[0], list(command))
    except (OSError, ValueError, LaunchError) as error:
        text = shortened(f"{command[0]} cannot be started: {os_reason(error)}")
        os.write(write_end, json.dumps({"reason": "RESTORE", "message": text}).encode())
    os._exit(127)


def enter(launch: Launch) -> int | None:
    """Put this process into its cgroups. Return the descriptor of its log, if it has one. Raises LaunchError."""
    if not launch.gate:
        enter_cgroups(launch.cgroup_procs)
        return None
    try:
        return _pass_gate(launch)
    except (OSError, ValueError, AttributeError, IndexError, struct.error) as error:
        raise LaunchError("GATE", f"the daemon does not let it in: {os_failure(error)}") from error


def enter_alone(launch: Launch) -> None:
    """Put this process, which writes no log, into its cgroups. Raises LaunchError."""
    log = enter(launch)
    if log is not None:
        os.close(log)


def _pass_gate(launch: Launch) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as gate:
        gate.settimeout(_GATE_S)
        gate.connect(launch.gate)
        if peer_of(gate).uid != 0:
            raise PermissionError(f"{launch.gate} is no daemon's")
        gate.sendall(json.dumps({"name": launch.name}).encode())
        answer, rights, _, _ = gate.recvmsg(_GATE_BYTES, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
        if not answer:
            raise OSError("it has ended")
        why = json.loads(answer).get("error")
        if why:
            raise OSError(why)
        return int(struct.unpack("i", rights[0][2])[0])


def enter_cgroups(procs: Sequence[str]) -> None:
    """Put this process into cgroups by their cgroup.procs files. Raises LaunchError."""
    for path in procs:
        _attempt("CGROUP", f"cannot enter the cgroup {path}", partial(_write, path, str(os.getpid())))


def run(launch: Launch, may_fork: bool, arena: int | None, settled: Callable[[], None]) -> NoReturn:
    """Become the user's program; the last thing a child calls. Raises LaunchError if it cannot be executed.

    Runs a script of this very interpreter in it, everything else by exec. ``settled`` is called when nothing can fail
    any more that is ours."""
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
        raise LaunchError("COMMAND", f"cannot execute {launch.argv[0][:200]!r}: {os_reason(error)}") from error


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
        # What -u makes: no buffer in between. (TextIOWrapper takes a raw file, although its stub does not.)
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


def fill_page(path: str, pid: int) -> None:
    """Name the process of a rank in its control page, by the pid that it has outside a unit. Raises LaunchError."""
    try:
        # never mapped: the launcher may be root's, and a job can cut its page
        page = Page.open(path, mapped=False)
    except (OSError, PageError) as error:
        raise LaunchError("PAGE", f"cannot open the control page {path}: {os_reason(error)}") from error
    page.set(Word.START_TICKS, start_ticks(pid) or 0)
    page.set(Word.PID, pid)
    page.close()


def _redirect(log: str, opened: int | None = None) -> None:
    """Write to a log from now on: at the path, or as it is open already."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    descriptor = os.open(log, flags, 0o600) if opened is None else opened
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


def _attempt(reason: str, what: str, action: Callable[[], object]) -> None:
    try:
        action()
    except (OSError, ValueError, AttributeError) as error:
        raise LaunchError(reason, f"{what}: {os_failure(error)}") from error


def run_store(directory: str, host: str, listener: socket.socket) -> NoReturn:
    """Be the rendezvous store of one epoch, in a forked child (see `serve_store`)."""
    os.setsid()
    try:
        if not directory:
            # It is part of process images, and the launcher's log is of this node.
            refuse_io_uring()
            _redirect(os.devnull)
        serve_store(directory, host, listener)
    except BaseException as error:
        print(f"ganger launcher: no rendezvous store in {directory}: {error!r}", file=sys.stderr)
        os._exit(1)


def run_helper(work: Callable[[], None], write_end: int) -> NoReturn:
    """Do `work` in a forked child, write how it went as JSON ({}: well), and end."""
    answer: dict[str, str] = {}
    try:
        work()
    except LaunchError as error:
        answer = {"reason": error.reason, "message": str(error)}
    except BaseException as error:
        answer = {"reason": "SYSTEM", "message": shortened(str(error) or repr(error))}
    os.write(write_end, json.dumps(answer).encode())
    os._exit(1 if answer else 0)


def touch_arena(launch: Launch, arena: int) -> None:
    """Make the kernel give the arena its first pages now, charged to the rank's cgroup."""
    enter(launch)
    os.posix_fallocate(arena, 0, min(launch.touched_bytes, launch.arena_bytes))


@contextmanager
def failure_pipe() -> Iterator[tuple[int, int]]:
    """Give the ends of the pipe for a child's failure; close both if the child cannot be started."""
    ends = os.pipe2(os.O_CLOEXEC)
    try:
        yield ends
    except (OSError, LaunchError):
        for end in ends:
            os.close(end)
        raise


def error_of_child(read_end: int, died: str) -> dict[str, str] | None:
    """Return the error that a child has written, {} for one without fields, None if it wrote nothing.

    What it wrote may be cut, because it was killed: no child ends its launcher."""
    data = os.read(read_end, 1 << 16)
    if not data:
        return None
    try:
        fields = json.loads(data)
        return {key: str(fields[key]) for key in ("reason", "message")} if fields else {}
    except (ValueError, KeyError, TypeError):
        return {"reason": "CHILD_DIED", "message": died}
