"""Records of one process of a launcher: the request that starts it, checked whole, its environment, and its exit, which
is durable; and the publication of checkpoints, which exist by their manifest and then their rename."""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ganger.injob.page import Page
from ganger.injob.page_access import PageError
from ganger.text import os_failure, os_reason, parse_memory

# Variables an interpreter or a library reads once, when it starts: a forked child could not honour a different value.
_STARTUP_PREFIXES = ("PYTHON", "LD_", "MALLOC_", "TORCH_", "PYTORCH_", "KMP_", "GOMP_", "OMP_", "MKL_", "OPENBLAS_")
# Of those, the ones that are set again in the child, or by the launcher itself.
_NOT_STARTUP = (
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "OPENBLAS_NUM_THREADS",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
)
# OpenBLAS starts its threads when it is imported; a launcher has one thread.
LAUNCHER_BLAS_THREADS = "1"
# Characters; each takes at most twelve bytes as JSON, and a pipe holds 64 KiB.
_LONGEST_MESSAGE = 2000


class LaunchError(Exception):
    """A launch that cannot be carried out; ``reason`` is stable, the message is for people and has a length."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(shortened(message))
        self.reason = reason


def shortened(message: str) -> str:
    """Cut what a job has named, which may be of any length: a message fits into a pipe and into an answer."""
    return message if len(message) <= _LONGEST_MESSAGE else f"{message[:_LONGEST_MESSAGE]} ..."


class Launch(NamedTuple):
    """One rank. Paths are absolute; ``cgroup_procs`` are files its pid is written to; ``arena_bytes`` 0 means none.
    ``freezer`` is the file that freezes its control group, "" where signals have to. ``init`` is the pid of the
    init of the unit that it is restored into, 0 for a program that starts. ``no_io_uring``: it gets no rings, of which
    no process image can be taken. ``gate`` is the socket at which the daemon of another user lets it into its cgroups
    and gives it its log, "" where it enters and opens them itself. ``limits``: as `set_limits` takes them.

    ``cores`` None leaves the affinity alone, ``threads`` 0 the number of threads."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    log: str
    page: str
    exit_path: str
    cgroup_procs: Sequence[str]
    freezer: str
    cores: Sequence[int] | None
    threads: int
    arena_name: str
    arena_bytes: int
    touched_bytes: int
    init: int
    no_io_uring: bool
    gate: str
    umask: int
    limits: Mapping[str, Sequence[int]]


LIMITS = {"core": resource.RLIMIT_CORE, "memlock": resource.RLIMIT_MEMLOCK, "nofile": resource.RLIMIT_NOFILE}
UNLIMITED = "unlimited"
DEFAULT_LIMITS = "core=0,nofile=65536:1048576,memlock=unlimited"


def parse_limits(text: str) -> dict[str, tuple[int, int]]:
    """Return soft and hard limit by name of "core=0,nofile=65536:1048576,memlock=unlimited". Raises ValueError."""
    found = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in LIMITS or name in found:
            raise ValueError(f"{part!r} is no limit: write one of {', '.join(LIMITS)}, once each, with =SOFT[:HARD]")
        soft, _, hard = value.partition(":")
        pair = _limit(name, soft), _limit(name, hard or soft)
        if pair[1] != resource.RLIM_INFINITY and not 0 <= pair[0] <= pair[1]:
            raise ValueError(f"{part!r}: the soft limit is above the hard one")
        found[name] = pair
    return found


def _limit(name: str, text: str) -> int:
    if name == "nofile":
        if not text.isdecimal() or not int(text):
            raise ValueError(f"nofile={text}: write a number of open files")
        return int(text)
    return resource.RLIM_INFINITY if text == UNLIMITED else parse_memory(text)


def set_limits(limits: Mapping[str, Sequence[int]]) -> None:
    """Set soft and hard limits of this process by name, those of `LIMITS`. A process without root's rights stays below
    the hard limit that it has."""
    for name, (soft, hard) in limits.items():
        try:
            resource.setrlimit(LIMITS[name], (soft, hard))
        except (ValueError, OSError):
            most = resource.getrlimit(LIMITS[name])[1]
            resource.setrlimit(LIMITS[name], (min(soft, most, key=_size), min(hard, most, key=_size)))


def _size(limit: int) -> float:
    return math.inf if limit == resource.RLIM_INFINITY else limit


def lift_limits() -> None:
    """Allow this process, where it is root, whatever limits the processes of an image had: a restore sets them."""
    if os.geteuid() == 0:
        with open("/proc/sys/fs/nr_open", encoding="ascii") as file:
            most = int(file.read())
        everything = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        set_limits({"core": everything, "memlock": everything, "nofile": (most, most)})


class PythonCommand(NamedTuple):
    """A command line that is Python and nothing special: ``module`` or ``script``, its arguments, and -u."""

    script: str
    module: str
    arguments: Sequence[str]
    unbuffered: bool


def parse_launch(content: Mapping[str, Any]) -> Launch:
    """Read a launch; raises LaunchError(INVALID_LAUNCH) that names every field that is wrong."""
    wrong = []

    def take(field: str, kinds: Any, default: Any = None, check: Any = None) -> Any:
        value = content.get(field, default)
        if value is None and default is None and field in _OPTIONAL:
            return None
        if not isinstance(value, kinds) or isinstance(value, bool) != (kinds is bool) or (check and not check(value)):
            wrong.append(f"{field}={value!r}"[:200])
            return default
        return value

    arena = take("arena", dict) or {}
    launch = Launch(
        name=take("name", str, check=bool),
        argv=take("argv", list, check=lambda argv: argv and all(isinstance(part, str) for part in argv)),
        env=take("env", dict, check=lambda env: all(isinstance(part, str) for pair in env.items() for part in pair)),
        cwd=take("cwd", str, check=os.path.isabs),
        log=take("log", str, check=os.path.isabs),
        page=take("page", str, "", check=lambda path: not path or os.path.isabs(path)),
        exit_path=take("exit_path", str, check=os.path.isabs),
        cgroup_procs=take("cgroup_procs", list, [], check=lambda paths: all(map(os.path.isabs, paths))),
        freezer=take("freezer", str, "", check=lambda path: not path or os.path.isabs(path)),
        cores=take("cores", list, check=lambda cores: cores and all(isinstance(core, int) for core in cores)),
        threads=take("threads", int, 0, check=lambda threads: threads >= 0),
        arena_name=str(arena.get("name") or content.get("name", "")),
        arena_bytes=int(arena.get("bytes", 0)),
        touched_bytes=take("touched_bytes", int, 0, check=lambda size: size >= 0),
        init=take("init", int, 0, check=lambda pid: pid >= 0),
        no_io_uring=take("no_io_uring", bool, False),
        gate=take("gate", str, "", check=lambda path: not path or os.path.isabs(path)),
        umask=take("umask", int, 0o022, check=lambda mask: 0 <= mask <= 0o777),
        limits=take("limits", dict, {}, check=lambda limits: limits.keys() <= LIMITS.keys()),
    )
    if wrong:
        raise LaunchError("INVALID_LAUNCH", "launch has fields that cannot be used: " + ", ".join(wrong))
    return launch


_OPTIONAL = frozenset({"cores", "arena"})


def python_command(argv: Sequence[str], env: Mapping[str, str], cwd: str) -> PythonCommand | None:
    """Recognise ``python [-u] script ...`` and ``python [-u] -m module ...`` for this very interpreter.

    None for everything else, and when ``env`` asks for what only a fresh interpreter can give: it must be executed."""
    if not _is_this_python(argv[0], env, cwd):
        return None
    if startup_variables(env) != startup_variables(os.environ):
        return None
    # numpy was imported with the launcher's number of threads.
    if env.get("OPENBLAS_NUM_THREADS", LAUNCHER_BLAS_THREADS) != LAUNCHER_BLAS_THREADS:
        return None
    rest = list(argv[1:])
    unbuffered = bool(env.get("PYTHONUNBUFFERED"))
    while rest and rest[0] == "-u":
        unbuffered = True
        rest.pop(0)
    if rest and rest[0] == "-m" and len(rest) > 1:
        return PythonCommand("", rest[1], rest[2:], unbuffered)
    if rest and not rest[0].startswith("-"):
        return PythonCommand(rest[0], "", rest[1:], unbuffered)
    return None


def startup_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the part of an environment a launcher has to be started with: ranks that differ in it need another one.

    Of the locale what counts is the character set, under the one name LC_CTYPE: an interpreter that finds none, or C,
    gives itself C.UTF-8 (PEP 538) and would look different from what it was started with."""
    found = {key: value for key, value in env.items() if key.startswith(_STARTUP_PREFIXES) and key not in _NOT_STARTUP}
    locale = env.get("LC_ALL") or env.get("LC_CTYPE") or env.get("LANG") or "C"
    if locale == "C" and not env.get("LC_ALL") and env.get("PYTHONCOERCECLOCALE") != "0":
        locale = "C.UTF-8"
    found["LC_CTYPE"] = locale
    return found


def _is_this_python(program: str, env: Mapping[str, str], cwd: str) -> bool:
    if os.sep in program:
        found: str | None = os.path.join(cwd, program)
    else:
        found = shutil.which(program, path=env.get("PATH", os.defpath))
    if found is None or not sys.executable:
        return False
    # The same directory too: interpreters of different virtual environments are links to one file.
    own = os.path.abspath(sys.executable)
    same_place = os.path.dirname(os.path.abspath(found)) == os.path.dirname(own)
    return same_place and os.path.realpath(found) == os.path.realpath(own)


# Two ranks of one job may share a core set with others: spinning threads would burn what the others need (measured: up
# to five times slower), passive ones give the core back.
_THREADING = {"OMP_WAIT_POLICY": "passive"}
_OF_JOBS = ("GANGER_ARRAY", "GANGER_DEVICES")


class TaskPlace(NamedTuple):
    """Where a task is in its gang: ``rank`` of ``world``, ``local_rank`` of ``local_world`` on node ``node_rank`` of
    ``nodes``."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    node_rank: int = 0
    nodes: int = 1


def torchrun_environment(place: TaskPlace, host: str, port: int, *, run: str, has_store: bool) -> dict[str, str]:
    """Return what torchrun sets in a worker, but what names its own files.

    ``run`` names the gang. ``has_store``: a process of ours serves the rendezvous store at ``host``:``port``, so no
    rank opens one; otherwise rank 0 does."""
    environment = {
        "RANK": place.rank,
        "WORLD_SIZE": place.world,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_world,
        "NODE_RANK": place.node_rank,
        "GROUP_RANK": place.node_rank,
        "GROUP_WORLD_SIZE": place.nodes,
        "ROLE_RANK": place.rank,
        "ROLE_WORLD_SIZE": place.world,
        "ROLE_NAME": "default",
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": run,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        # Torch's store of an agent insists on it.
        "TORCHELASTIC_RESTART_COUNT": 0,
    }
    if has_store:
        environment["TORCHELASTIC_USE_AGENT_STORE"] = True
    return {name: str(value) for name, value in environment.items()}


def rank_environment(
    *,
    base: Mapping[str, str],
    page: str,
    job_dir: str,
    socket: str,
    threads: int,
    inject: str,
    restore: str = "",
    job: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the whole environment of one rank on top of what the user's shell had (``base``).

    ``inject``: a directory of `ganger.injob.bootstrap`. ``restore``: the path of a restore file, or empty.
    ``threads``: 0 leaves the number to the program. ``job``: variables about the job and its gang."""
    # The job keeps the variables that the master sets for members of an array and a daemon for virtual devices; all
    # others of that prefix are set here.
    environment = {
        key: value for key, value in base.items() if not key.startswith("GANGER_") or key.startswith(_OF_JOBS)
    }
    environment.update(_THREADING)
    environment.update(GANGER_PAGE=page, GANGER_JOB_DIR=job_dir, GANGER_SOCKET=socket, **(job or {}))
    if restore:
        environment["GANGER_RESTORE"] = restore
    if threads:
        # one that the user gave stands
        environment.setdefault("OMP_NUM_THREADS", str(threads))
    # Our directory first: it holds nothing but `ganger` and a sitecustomize that loads the user's own.
    parts = [inject, *(part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part and part != inject)]
    environment["PYTHONPATH"] = os.pathsep.join(parts)
    return environment


class ExitRecord(NamedTuple):
    """One end. ``code`` is None when it is unknown, and 128 + ``signal`` after a deadly signal.

    ``source`` is where the code came from: wait, page, launch (it never ran), unknown."""

    name: str
    pid: int
    start_ticks: int
    code: int | None
    signal: int | None
    time: float
    source: str
    message: str = ""


def from_code(name: str, pid: int, ticks: int, code: int) -> ExitRecord:
    """``code``: of the exit, or the negative number of a deadly signal."""
    number = -code if code < 0 else None
    return ExitRecord(name, pid, ticks, 128 - code if number else code, number, time.time(), "wait")


def from_page(name: str, pid: int, ticks: int, page_path: str) -> ExitRecord:
    """Ask the page of a rank that was not our child: it knows unless the rank was killed."""
    code = None
    if page_path:
        try:
            # never mapped: this launcher looks after other jobs too
            page = Page.open(page_path, writable=False, mapped=False)
            try:
                if page.identity().pid == pid:
                    code = page.progress().exit_code
            finally:
                page.close()
        except (OSError, PageError):
            pass
    return ExitRecord(name, pid, ticks, code, None, time.time(), "unknown" if code is None else "page")


def record(path: str, end: ExitRecord) -> None:
    """Write the exit record: it is there whole or not at all, and survives a power cut. Raises OSError."""
    content = {key: value for key, value in end._asdict().items() if key != "name" and value != ""}
    write_durably(path, json.dumps(content).encode() + b"\n")


def is_recorded(path: str, pid: int) -> bool:
    """Return whether there is an exit record of a process with this pid."""
    try:
        with open(path, "rb") as file:
            return bool(json.loads(file.read(1 << 16))["pid"] == pid)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def write_durably(path: str, data: bytes, mode: int = 0o600) -> None:
    """Replace a file by one with this content, synced, the directory too."""
    temporary = f"{path}.{os.getpid()}.tmp"
    for place in (temporary, path):
        # what a job has put there may be no file at all
        if os.path.lexists(place) and (os.path.islink(place) or not os.path.isfile(place)):
            os.rename(place, f"{place}.{time.monotonic_ns()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK, mode)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    except OSError:
        os.unlink(temporary)
        raise
    finally:
        os.close(descriptor)
    os.replace(temporary, path)
    sync(os.path.dirname(path))


def sync(path: str | os.PathLike[str]) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


MANIFEST = "MANIFEST.json"


def publish(temporary: str, final: str, manifest: Mapping[str, Any]) -> None:
    """Write the manifest into ``temporary``, sync, rename it to ``final``, sync the parent.

    Asked again after it was done, it agrees. Raises LaunchError(PUBLISH_FAILED) when shards the manifest names
    (``files``: name to {"bytes"}) are missing or of another size, LaunchError(STORAGE_FULL or STORAGE_FAILED) for what
    storage says."""
    if not os.path.isdir(temporary):
        if os.path.exists(os.path.join(final, MANIFEST)):
            return
        raise LaunchError("PUBLISH_FAILED", f"there is no {temporary} to publish")
    files = manifest.get("files", {})
    for name, facts in files.items() if isinstance(files, Mapping) else ():
        path = os.path.join(temporary, os.path.basename(name))
        try:
            size = os.stat(path).st_size
        except OSError as error:
            raise LaunchError("PUBLISH_FAILED", f"{path} is named in the manifest: {os_reason(error)}") from error
        if isinstance(facts, Mapping) and facts.get("bytes", size) != size:
            raise LaunchError("PUBLISH_FAILED", f"{path} has {size} bytes, the manifest says {facts['bytes']}")
    try:
        write_durably(os.path.join(temporary, MANIFEST), json.dumps(manifest, indent=1, sort_keys=True).encode(), 0o644)
        os.rename(temporary, final)
        sync(os.path.dirname(os.path.abspath(final)))
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise LaunchError("STORAGE_FULL" if full else "STORAGE_FAILED", os_failure(error)) from error
