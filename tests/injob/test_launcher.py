"""The launcher with real processes: fast starts, durable exit records, and a death that harms no rank."""

from __future__ import annotations

import importlib.util
import json
import mmap
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
from ganger.injob.bootstrap import prepare_inject_directory
from ganger.injob.environment import TaskPlace, rank_environment, torchrun_environment
from ganger.injob.launcher.client import Forked, Launcher, LauncherError, start_launcher
from ganger.injob.launcher.server import _error_of_child
from ganger.injob.launcher.starter import begin, make_starter
from ganger.injob.page import Opaque, Page, PageOrderKind, Word, now_ns, page_path
from ganger.injob.process_identity import start_ticks
from kit.waiting import eventually

HAS_TORCH = importlib.util.find_spec("torch") is not None


class Place:
    """A directory with a launcher in it, and the means to start ranks."""

    def __init__(self, directory: Path, preload: bool) -> None:
        self.directory = directory
        self.socket = str(directory / "l.sock")
        self.preload = preload
        self.inject = prepare_inject_directory(str(directory / "inject"))
        self.log = directory / "launcher.log"
        self.count = 0
        self.started: list[Forked] = []
        self.start()

    def start(self) -> None:
        start_launcher(
            sys.executable,
            self.socket,
            inject=self.inject,
            env=_environment(),
            log=str(self.log),
            idle_s=30,
            preload=self.preload,
        )

    def launch(self, argv: list[str], *, base: Mapping[str, str] | None = None, **more: Any) -> dict[str, Any]:
        number = self.count
        self.count += 1
        directory = self.directory / f"job-{number}"
        (directory / "orders").mkdir(parents=True)
        page = Page.create(page_path(str(directory), 0), epoch=1, rank=0, world=1)
        page.write_order(1, PageOrderKind.RUN)
        environment = rank_environment(
            base={**_environment(), **(base or {})},
            page=page.path,
            job_dir=str(directory),
            socket="",
            threads=more.get("threads", 1),
            inject=self.inject,
        )
        return {
            "name": f"uid-{number}/1/rank-0",
            "argv": argv,
            "env": environment,
            "cwd": str(directory),
            "log": str(directory / "rank.log"),
            "page": page.path,
            "exit_path": str(directory / "rank-0.exit.json"),
            "threads": 1,
            **more,
        }

    def fork(self, launch: dict[str, Any]) -> Forked:
        with Launcher(self.socket) as launcher:
            forked = launcher.fork(launch)
        self.started.append(forked)
        return forked

    def script(self, launch: dict[str, Any], body: str, name: str = "train.py") -> dict[str, Any]:
        Path(launch["cwd"], name).write_text(body)
        return launch

    def kill(self) -> None:
        with Launcher(self.socket) as launcher:
            info = launcher.info()
        os.kill(info["pid"], signal.SIGKILL)
        eventually(lambda: start_ticks(info["pid"]) != info["start_ticks"], what="the launcher's death")

    def end(self) -> None:
        for pid, ticks in self.started:
            if start_ticks(pid) == ticks:
                os.kill(pid, signal.SIGKILL)
        with Launcher(self.socket) as launcher:
            for child in launcher.list():
                launcher.kill(child["pid"], child["start_ticks"], signal.SIGKILL)
            eventually(lambda: not launcher.list(), what="the end of all children")
            launcher.stop()


def _environment() -> dict[str, str]:
    return {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PYTEST", "GANGER", "OMP_", "OPENBLAS_")) and key != "PYTHONUNBUFFERED"
    }


def _place(preload: bool) -> Iterator[Place]:
    # A short path: socket names have 107 bytes.
    directory = Path(tempfile.mkdtemp(prefix="ganger-launcher-"))
    place = Place(directory, preload)
    try:
        yield place
        place.end()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def zygote() -> Iterator[Place]:
    if not HAS_TORCH:
        pytest.skip("torch is not installed")
    yield from _place(preload=True)


@pytest.fixture(scope="module")
def plain() -> Iterator[Place]:
    yield from _place(preload=False)


@pytest.fixture(params=["fork", "exec"])
def either(request: pytest.FixtureRequest) -> Place:
    place: Place = request.getfixturevalue("zygote" if request.param == "fork" else "plain")
    return place


def _ended(launch: dict[str, Any]) -> dict[str, Any]:
    path = Path(launch["exit_path"])
    eventually(path.exists, what="the exit record", story=lambda: _log(launch))
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _log(launch: dict[str, Any]) -> str:
    path = Path(launch["log"])
    return path.read_text() if path.exists() else "no log"


def _page(launch: dict[str, Any]) -> Page:
    return Page.open(launch["page"])


@pytest.mark.torch
def test_forked_rank_is_a_process_of_its_own_in_its_place(zygote: Place) -> None:
    launch = zygote.script(
        zygote.launch([sys.executable, "train.py", "--lr", "1"], cores=[min(os.sched_getaffinity(0))], umask=0o027),
        "import os, sys, signal\n"
        "print(sys.argv, os.getcwd(), os.getsid(0) == os.getpid(), sorted(os.sched_getaffinity(0)))\n"
        "print('torch' in sys.modules, oct(os.umask(0)), sorted(map(int, os.listdir('/proc/self/fd')))[:4])\n"
        "print(signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT).__name__, 'RANK' in os.environ)\n"
        "import torch; print(torch.get_num_threads(), sys.stdin.read() == '')\n",
    )
    forked = zygote.fork(launch)
    assert _ended(launch)["code"] == 0
    identity = _page(launch).identity()
    assert (identity.pid, identity.start_ticks) == (forked.pid, forked.start_ticks)
    lines = _log(launch).splitlines()
    assert lines[0] == f"['train.py', '--lr', '1'] {launch['cwd']} True [{min(os.sched_getaffinity(0))}]"
    assert lines[1] == "True 0o27 [0, 1, 2, 3]"
    assert lines[2:] == [
        f"{signal.SIG_DFL!r} default_int_handler False".replace(repr(signal.SIG_DFL), str(signal.SIG_DFL)),
        "1 True",
    ]


@pytest.mark.torch
def test_zygote_has_one_thread_and_children_that_compute(zygote: Place) -> None:
    with Launcher(zygote.socket) as launcher:
        info = launcher.info()
    assert (info["torch"], info["fork_safe"]) == (True, True)
    assert len(os.listdir(f"/proc/{info['pid']}/task")) == 1
    launch = zygote.script(
        zygote.launch([sys.executable, "-u", "train.py"]),
        "import torch\ntorch.set_num_threads(2)\n"
        "w = torch.ones(300, 300, requires_grad=True); o = torch.optim.AdamW([w])\n"
        "for _ in range(3): (w @ w).sum().backward(); o.step()\nprint('done')\n",
    )
    zygote.fork(launch)
    assert _ended(launch)["code"] == 0, _log(launch)
    assert "done" in _log(launch)


@pytest.mark.torch
@pytest.mark.skipif(not HAS_TORCH, reason="torch is not installed")
def test_interpreter_that_has_computed_is_not_forked() -> None:
    poison = (
        "import torch; from ganger.injob.launcher import preload as zygote\n"
        "torch.set_num_threads(2); a = torch.ones(500, 500); (a @ a).sum()\n"
        "print(zygote.is_fork_safe())"
    )
    found = subprocess.run([sys.executable, "-c", poison], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout == "False\n"
    assert "scripts are started by exec" in found.stderr


@pytest.mark.torch
@pytest.mark.parametrize("starts", ["forked", "executed"])
def test_a_rank_has_the_signal_handlers_of_a_fresh_interpreter(zygote: Place, starts: str) -> None:
    body = (
        "import signal\n"
        "print(*[line for line in open('/proc/self/status') if line.startswith(('SigCgt', 'SigIgn'))], flush=True)\n"
    )
    command = [sys.executable, *(["-X", "dev"] if starts == "executed" else []), "train.py"]
    launch = zygote.script(zygote.launch(command), body)
    zygote.fork(launch)
    assert _ended(launch)["code"] == 0
    fresh = subprocess.run(
        [sys.executable, "-c", body], capture_output=True, text=True, check=True, env={}, cwd=launch["cwd"]
    )
    found = re.findall(r"Sig\w+:\s+(\w+)", _log(launch))
    assert len(found) == 2
    # of -X dev and of torch: faults are told of, which are no signals between programs
    faults = sum(1 << (number - 1) for number in (signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, 4))
    expected = re.findall(r"Sig\w+:\s+(\w+)", fresh.stdout)
    assert [int(mask, 16) & ~faults for mask in found] == [int(mask, 16) & ~faults for mask in expected]


@pytest.mark.torch
@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, "train.py"],
        [sys.executable, "-X", "dev", "train.py"],
        ["/bin/sh", "-c", f"{sys.executable} train.py; true"],
        ["/bin/sh", "-c", f"{sys.executable} train.py | cat"],
    ],
    ids=["forked", "executed", "behind a shell", "into a pipe"],
)
def test_a_line_is_in_the_log_when_it_is_printed(zygote: Place, command: list[str]) -> None:
    launch = zygote.script(zygote.launch(command), "print('a line')\nopen('go').read()\n")
    os.mkfifo(os.path.join(launch["cwd"], "go"))
    zygote.fork(launch)
    eventually(lambda: "a line" in _log(launch), what="the line", story=lambda: _log(launch))
    with open(os.path.join(launch["cwd"], "go"), "w"):
        pass
    assert _ended(launch)["code"] == 0


@pytest.mark.torch
@pytest.mark.parametrize("given", [{}, {"OPENBLAS_NUM_THREADS": "1"}], ids=["launched with two", "asks for one"])
@pytest.mark.parametrize("starts", ["forked", "executed"])
def test_numpy_computes_with_the_threads_of_the_rank_however_it_is_started(
    zygote: Place, given: dict[str, str], starts: str
) -> None:
    command = [sys.executable, *(["-X", "dev"] if starts == "executed" else []), "train.py"]
    body = (
        "import ctypes, numpy\nfrom ganger.injob.launcher import child_process as blas\n"
        "(library,) = map(ctypes.CDLL, blas._libraries())\n"
        "names = [name.replace('_set_', '_get_') for name in blas._NAMES]\n"
        "print('threads', next(getattr(library, name)() for name in names if hasattr(library, name)))\n"
    )
    launch = zygote.script(zygote.launch(command, threads=2, base=given), body)
    zygote.fork(launch)
    assert _ended(launch)["code"] == 0, _log(launch)
    # a machine of one core has no use for a second one
    most = min(2, len(os.sched_getaffinity(0)))
    assert f"threads {1 if given else most}" in _log(launch)


SETS_THREADS = "import os\nos.environ['OMP_NUM_THREADS'] = '1'\n"


@pytest.mark.torch
@pytest.mark.parametrize(
    ("files", "given"),
    [
        ({"train.py": SETS_THREADS}, {}),
        ({"train.py": "import settings\n", "settings.py": SETS_THREADS}, {}),
        (
            {
                "train.py": "from own import setup\n",
                "own/__init__.py": "",
                "own/setup.py": "from . import threads\n",
                "own/threads.py": SETS_THREADS,
            },
            {},
        ),
        ({"train.py": ""}, {"OMP_NUM_THREADS": "1"}),
    ],
    ids=["in the script", "in its module", "in its package", "with the job"],
)
@pytest.mark.parametrize("starts", ["forked", "executed"])
def test_thread_variables_count_however_a_script_is_started(
    zygote: Place, files: dict[str, str], given: dict[str, str], starts: str
) -> None:
    command = [sys.executable, *(["-X", "dev"] if starts == "executed" else []), "train.py"]
    launch = zygote.launch(command, threads=2, base=given)
    for name, text in files.items():
        path = Path(launch["cwd"], name)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    with Path(launch["cwd"], "train.py").open("a") as script:
        script.write("import torch\nprint('threads', torch.get_num_threads())\n")
    zygote.fork(launch)
    assert _ended(launch)["code"] == 0, _log(launch)
    assert "threads 1" in _log(launch)


@pytest.mark.torch
def test_script_named_like_a_standard_module_does_not_break_torch(zygote: Place) -> None:
    launch = zygote.script(zygote.launch([sys.executable, "train.py"]), "raise RuntimeError('mine')", "http.py")
    zygote.script(launch, "import torch, torch.distributed.elastic.rendezvous\nprint('fine')")
    zygote.fork(launch)
    assert _ended(launch)["code"] == 0, _log(launch)


@pytest.mark.torch
def test_rank_starts_in_a_fraction_of_what_python_needs(zygote: Place) -> None:
    took = []
    for _ in range(5):
        launch = zygote.script(
            zygote.launch([sys.executable, "train.py"]),
            "import time; print(time.clock_gettime_ns(time.CLOCK_BOOTTIME))",
        )
        began = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        zygote.fork(launch)
        _ended(launch)
        took.append((int(_log(launch).splitlines()[0]) - began) / 1e9)
    # Measured 0.02 s on two busy cores; importing torch alone takes two.
    assert sorted(took)[2] < 0.5


@pytest.mark.torch
def test_variable_only_a_fresh_interpreter_honours_gets_one(zygote: Place) -> None:
    launch = zygote.script(
        zygote.launch([sys.executable, "train.py"]), "import sys; print(sys.flags.hash_randomization, hash('a'))"
    )
    launch["env"]["PYTHONHASHSEED"] = "0"
    zygote.fork(launch)
    _ended(launch)
    assert _log(launch).startswith("0 ")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("print('fine')", 0),
        ("import sys; sys.exit(3)", 3),
        ("exit(3)", 3),
        ("quit('word')", 1),
        ("1 / 0", 1),
        ("raise SystemExit('word')", 1),
    ],
)
@pytest.mark.torch
def test_exit_code_is_in_the_record_and_in_the_page(either: Place, body: str, code: int) -> None:
    launch = either.script(either.launch([sys.executable, "train.py"]), body)
    forked = either.fork(launch)
    record = _ended(launch)
    assert (record["pid"], record["start_ticks"]) == forked
    assert (record["code"], record["signal"], record["source"]) == (code, None, "wait")
    # A bare `raise SystemExit` passes by everything that can be watched from inside a fresh interpreter.
    if either.preload or "raise" not in body:
        assert _page(launch).progress().exit_code == code


@pytest.mark.torch
def test_deadly_signal_is_recorded_as_one(either: Place) -> None:
    launch = either.script(either.launch([sys.executable, "train.py"]), "import os; os.kill(os.getpid(), 9)")
    either.fork(launch)
    record = _ended(launch)
    assert (record["code"], record["signal"]) == (137, 9)
    assert _page(launch).progress().exit_code is None


def test_command_that_is_not_python_is_executed(plain: Place) -> None:
    launch = plain.launch(["/bin/sh", "-c", "echo out; echo err >&2; exit 7"])
    plain.fork(launch)
    assert _ended(launch)["code"] == 7
    assert _log(launch) == "out\nerr\n"


def test_own_sitecustomize_is_loaded_after_ours(plain: Place) -> None:
    launch = plain.script(
        plain.launch([sys.executable, "-c", "import sitecustomize; print(sitecustomize.MINE)"]),
        "MINE = 'mine'; print('loaded')",
        "sitecustomize.py",
    )
    launch["env"]["PYTHONPATH"] += os.pathsep + launch["cwd"]
    plain.fork(launch)
    assert _ended(launch)["code"] == 0, _log(launch)
    assert _log(launch) == "loaded\nmine\n"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"argv": ["/no/such/program"]}, "COMMAND"),
        ({"cwd": "/no/such/place"}, "CWD"),
        ({"log": "/no/such/place/log"}, "LOG"),
        ({"cgroup_procs": ["/no/such/cgroup.procs"]}, "CGROUP"),
        ({"cores": [100_000]}, "CORES"),
        ({"rlimits": {"NONSENSE": [1, 1]}}, "RLIMIT"),
        ({"page": "/no/such/page"}, "PAGE"),
        ({"argv": [], "cwd": "relative"}, "INVALID_LAUNCH"),
    ],
)
def test_launch_that_cannot_work_says_why(plain: Place, change: dict[str, Any], reason: str) -> None:
    launch = {**plain.launch(["/bin/true"]), **change}
    with pytest.raises(LauncherError) as refusal:
        plain.fork(launch)
    assert refusal.value.reason == reason
    if reason == "INVALID_LAUNCH":
        assert "argv=[]" in str(refusal.value)
        assert "cwd='relative'" in str(refusal.value)
    else:
        assert _ended(launch)["source"] == "launch"


def test_nonsense_is_refused_and_does_no_harm(plain: Place) -> None:
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(20)
        raw.connect(plain.socket)
        raw.sendall(b'no json\n{"id": 4, "op": "dance"}\n{"id": 5, "op": "fork"}\n[]\n')
        received = b""
        while received.count(b"\n") < 4:
            received += raw.recv(65536)
    reasons = [json.loads(line)["error"]["reason"] for line in received.splitlines()]
    assert reasons == ["INVALID_REQUEST", "UNKNOWN_OPERATION", "INVALID_REQUEST", "INVALID_REQUEST"]


@pytest.mark.parametrize("place", ["plain", pytest.param("zygote", marks=pytest.mark.torch)])
@pytest.mark.parametrize(
    "change",
    [
        {"argv": ["\x01" * 60_000]},
        {"argv": ["/bin/true", "x" * 200_000]},
        {"argv": ["/bin/true\0"]},
        {"argv": ["/bin/true", "\ud800"]},
        {"argv": ["/bin/true", "a\0b"]},
        {"argv": ["/bin/true"], "cwd": "/" + "\x01" * 60_000},
        {"argv": ["/bin/true"], "log": "/" + "\U0001f600" * 60_000},
        {"argv": ["/bin/true"], "cores": ["\x01" * 60_000]},
    ],
    ids=["endless", "too long", "null", "no character", "null within", "directory", "log", "cores"],
)
def test_a_launch_that_cannot_be_refuses_and_harms_no_other(
    request: pytest.FixtureRequest, place: str, change: dict[str, Any]
) -> None:
    made: Place = request.getfixturevalue(place)
    launch = made.launch(["/bin/true"])
    with Launcher(made.socket) as other, Launcher(made.socket) as launcher:
        before = other.info()["pid"]
        with pytest.raises(LauncherError) as refusal:
            launcher.fork({**launch, **change})
        assert len(str(refusal.value)) < 5000
        assert other.info()["pid"] == before
        assert launcher.info()["pid"] == before


def test_what_a_child_that_was_killed_has_written_in_part_does_not_end_its_launcher() -> None:
    for said, heard in (
        (b"", None),
        (b"{}", {}),
        (b'{"reason": "LOG", "message": "full"}', {"reason": "LOG", "message": "full"}),
        (b'{"reason": "LOG", "mess', {"reason": "CHILD_DIED", "message": "killed"}),
        (b"[1]", {"reason": "CHILD_DIED", "message": "killed"}),
    ):
        read_end, write_end = os.pipe()
        os.write(write_end, said)
        os.close(write_end)
        assert _error_of_child(read_end, "killed") == heard
        os.close(read_end)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second account")
def test_a_launcher_of_another_account_is_given_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "l.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        # the kernel records the listener at the moment of listen()
        os.seteuid(12345)
        try:
            listener.listen(1)
        finally:
            os.seteuid(0)
        with pytest.raises(LauncherError, match="runs as user 12345"):
            Launcher(path)
        Launcher(path, user=12345).close()


def test_same_rank_is_not_started_twice(plain: Place) -> None:
    launch = plain.launch(["/bin/sleep", "60"])
    plain.fork(launch)
    with pytest.raises(LauncherError, match="runs already"):
        plain.fork(launch)


def test_watchers_hear_of_exits(plain: Place) -> None:
    with Launcher(plain.socket, timeout=20) as watcher:
        exits = watcher.exits()
        launch = plain.launch(["/bin/sh", "-c", "read line < go; exit 9"])
        os.mkfifo(os.path.join(launch["cwd"], "go"))
        forked = plain.fork(launch)
        with Launcher(plain.socket) as other:
            assert [child["pid"] for child in other.list() if child["name"] == launch["name"]] == [forked.pid]
        with open(os.path.join(launch["cwd"], "go"), "w"):
            pass
        end = next(exit for exit in exits if exit is not None and exit.name == launch["name"])
        assert (end.code, end.pid) == (9, forked.pid)


def test_arena_is_shared_by_rank_launcher_and_daemon(plain: Place) -> None:
    body = (
        "import mmap, os\nfrom ganger.injob.arena import inherited_arena\n"
        "fd = inherited_arena(os.environ['GANGER_ARENA'])\n"
        "m = mmap.mmap(fd, 0); m[:5] = b'state'; print(len(m), flush=True)\n"
        "try: os.ftruncate(fd, 0)\nexcept PermissionError: print('sealed', flush=True)\n"
        "open('go').read()\n"
    )
    launch = plain.script(plain.launch([sys.executable, "train.py"], arena={"bytes": 1 << 20}), body)
    os.mkfifo(os.path.join(launch["cwd"], "go"))
    with Launcher(plain.socket) as launcher:
        plain.started.append(launcher.fork({**launch, "touched_bytes": 1 << 19}))
        eventually(lambda: "sealed" in _log(launch), what="the rank's writing", story=lambda: _log(launch))
        first = launcher.arena(launch["name"])
        again = launcher.arena(launch["name"])
        with mmap.mmap(first, 0) as memory:
            assert memory[:5] == b"state"
        assert os.fstat(again).st_size == 1 << 20
        eventually(lambda: os.fstat(first).st_blocks * 512 == 1 << 19, what="what was asked for made resident")
        with open(os.path.join(launch["cwd"], "go"), "w"):
            pass
        _ended(launch)
        with pytest.raises(LauncherError, match="no arena"):
            launcher.arena(launch["name"])
        os.close(first)
        os.close(again)


def test_checkpoint_is_published_whole_or_not_at_all(plain: Place) -> None:
    temporary, final = plain.directory / "10-1.tmp", plain.directory / "10-1"
    temporary.mkdir()
    (temporary / "rank-0.shard").write_bytes(b"12345")
    with Launcher(plain.socket) as launcher:
        with pytest.raises(LauncherError, match="the manifest says 6"):
            launcher.publish(str(temporary), str(final), {"files": {"rank-0.shard": {"bytes": 6}}})
        with pytest.raises(LauncherError, match="named in the manifest"):
            launcher.publish(str(temporary), str(final), {"files": {"rank-1.shard": {"bytes": 6}}})
        assert not final.exists()
        manifest = {"step": 10, "files": {"rank-0.shard": {"bytes": 5}}}
        for _ in range(2):
            launcher.publish(str(temporary), str(final), manifest)
        assert json.loads((final / "MANIFEST.json").read_text()) == manifest
        assert not temporary.exists()
        with pytest.raises(LauncherError, match="there is no"):
            launcher.publish(str(temporary), str(plain.directory / "11-1"), manifest)


@pytest.mark.torch
def test_store_serves_on_its_address_and_ends_with_its_directory(zygote: Place) -> None:
    directory = zygote.directory / "run"
    directory.mkdir()
    with Launcher(zygote.socket) as launcher:
        store = launcher.store(str(directory), "127.0.0.1")
        assert launcher.store(str(directory), "127.0.0.1") == store
    path = directory / "rendezvous.json"
    eventually(path.exists, what="the rendezvous")
    rendezvous = json.loads(path.read_text())
    assert (rendezvous["pid"], rendezvous["start_ticks"], rendezvous["port"]) == store
    listening = Path("/proc/net/tcp").read_text()
    assert f" 0100007F:{rendezvous['port']:04X} 00000000:0000 0A" in listening
    launch = zygote.script(
        zygote.launch([sys.executable, "train.py"]),
        "import torch.distributed as d\nd.init_process_group('gloo')\nd.barrier()\nprint('met', d.get_world_size())\n",
    )
    launch["env"].update(
        torchrun_environment(TaskPlace(0, 1, 0, 1), "127.0.0.1", rendezvous["port"], run="a test", has_store=True)
    )
    zygote.fork(launch)
    assert _ended(launch)["code"] == 0, _log(launch)
    assert "met 1" in _log(launch)
    shutil.rmtree(directory)
    eventually(lambda: start_ticks(store.pid) != store.start_ticks, what="the store's end")


@pytest.fixture
def mortal() -> Iterator[Place]:
    """A launcher to be killed."""
    yield from _place(preload=False)


def test_ranks_survive_their_launcher_and_the_page_knows_their_end(mortal: Place) -> None:
    launches = []
    for body in ("import sys; open('go').read(); sys.exit(5)", "import os; open('go').read(); os.kill(os.getpid(), 9)"):
        launch = mortal.script(mortal.launch([sys.executable, "train.py"], arena={"bytes": 4096}), body)
        os.mkfifo(os.path.join(launch["cwd"], "go"))
        launches.append((launch, mortal.fork(launch)))
    mortal.kill()
    assert all(start_ticks(forked.pid) == forked.start_ticks for _, forked in launches)
    mortal.start()
    with Launcher(mortal.socket) as launcher:
        for launch, forked in launches:
            assert launcher.adopt(
                launch["name"], *forked, page=launch["page"], exit_path=launch["exit_path"], arena_name=launch["name"]
            )
            os.close(launcher.arena(launch["name"]))
        assert {child["adopted"] for child in launcher.list()} == {True}
        with pytest.raises(LauncherError, match="still the parent"):
            launcher.stop()
    for launch, _ in launches:
        with open(os.path.join(launch["cwd"], "go"), "w"):
            pass
    known, killed = (_ended(launch) for launch, _ in launches)
    assert (known["code"], known["source"]) == (5, "page")
    assert (killed["code"], killed["source"]) == (None, "unknown")


def test_rank_that_ended_without_a_launcher_is_recorded_on_adoption(mortal: Place) -> None:
    launch = mortal.script(
        mortal.launch([sys.executable, "train.py"]), "import sys; open('go').read(); print('x'); sys.exit(6)"
    )
    os.mkfifo(os.path.join(launch["cwd"], "go"))
    forked = mortal.fork(launch)
    mortal.kill()
    with open(os.path.join(launch["cwd"], "go"), "w"):
        pass
    eventually(lambda: start_ticks(forked.pid) != forked.start_ticks, what="the rank's end")
    assert not os.path.exists(launch["exit_path"])
    mortal.start()
    with Launcher(mortal.socket) as launcher:
        assert not launcher.adopt(launch["name"], *forked, page=launch["page"], exit_path=launch["exit_path"])
        assert not launcher.kill(*forked, signal.SIGKILL)
    assert _ended(launch)["code"] == 6


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


def _child_of(launch: dict[str, Any]) -> int:
    """Pid of what a shell has started; it writes it into a file."""
    path = Path(launch["cwd"], "pid")
    eventually(lambda: path.exists() and path.read_text().strip(), what="a child of the shell")
    return int(path.read_text())


_SHELL = ["sh", "-c", "setsid sleep 600 & echo $! > pid; wait"]


@pytest.mark.parametrize("is_adopted", [False, True], ids=["forked", "adopted"])
def test_a_job_that_does_not_stop_by_itself_is_frozen_with_all_its_processes_when_its_lease_ends(
    mortal: Place, is_adopted: bool
) -> None:
    launch = mortal.launch(_SHELL)
    page = _page(launch)
    page.extend_lease(now_ns() + 3600 * 10**9)
    forked = mortal.fork(launch)
    child = _child_of(launch)
    try:
        if is_adopted:
            mortal.kill()
            mortal.start()
            with Launcher(mortal.socket) as launcher:
                assert launcher.adopt(launch["name"], *forked, page=launch["page"], exit_path=launch["exit_path"])
        page.extend_lease(now_ns() + 10**8)
        eventually(lambda: _state(forked.pid) == _state(child) == "T", what="both standing still")
        # The daemon extends the lease before it thaws: it is not frozen again under the one that ended.
        page.extend_lease(now_ns() + 3600 * 10**9)
        for pid in (forked.pid, child):
            os.kill(pid, signal.SIGCONT)
        _looks_again(mortal)
        # For a moment after SIGCONT a process runs before it waits again.
        eventually(lambda: _state(forked.pid) == _state(child) == "S", what="both waiting, not frozen again")
    finally:
        os.kill(child, signal.SIGKILL)


def _looks_again(place: Place) -> None:
    """Wait until a launcher has been at its leases: it does so before each wait for callers."""
    with Launcher(place.socket) as launcher:
        launcher.info()
        launcher.info()


def test_a_job_goes_on_for_as_long_as_its_lease_is_extended(plain: Place) -> None:
    launch = plain.launch(["sh", "-c", "while :; do read line < go; echo $line; done"])
    os.mkfifo(os.path.join(launch["cwd"], "go"))
    page = _page(launch)
    page.extend_lease(now_ns() + 2 * 10**9)
    forked = plain.fork(launch)
    began = now_ns()
    beats = 0
    while now_ns() < began + 4 * 10**9:
        page.extend_lease(now_ns() + 2 * 10**9)
        with open(os.path.join(launch["cwd"], "go"), "w") as go:
            go.write(f"beat {beats}\n")
        eventually(lambda beat=beats: f"beat {beat}" in _log(launch), what="a line of a job that runs")
        beats += 1
    eventually(lambda: _state(forked.pid) == "T", what="standing still at last")
    os.kill(forked.pid, signal.SIGKILL)


def test_a_job_that_stops_at_boundaries_is_not_frozen_when_its_lease_ends(plain: Place) -> None:
    attached, silent = plain.launch(["sleep", "600"]), plain.launch(["sleep", "600"])
    pids = []
    for launch in (attached, silent):
        page = _page(launch)
        if launch is attached:
            page.set(Word.HELLO_TIME, now_ns())
        page.extend_lease(now_ns() + 10**8)
        pids.append(plain.fork(launch).pid)
    eventually(lambda: _state(pids[1]) == "T", what="the silent one standing still")
    assert _state(pids[0]) == "S"
    _page(attached).set(Word.OPAQUE, Opaque.AGENT_FAILED)
    eventually(lambda: _state(pids[0]) == "T", what="standing still once it has no boundaries any more")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_a_job_that_removes_and_cuts_off_its_page_is_frozen_under_the_lease_that_it_had(plain: Place) -> None:
    launch = plain.launch(["sh", "-c", "echo > cut; read line < go"])
    os.mkfifo(os.path.join(launch["cwd"], "go"))
    _page(launch).extend_lease(now_ns() + 2 * 10**9)
    forked = plain.fork(launch)
    _looks_again(plain)
    os.truncate(launch["page"], 8)
    os.unlink(launch["page"])
    eventually(lambda: _state(forked.pid) == "T", what="standing still")
    os.kill(forked.pid, signal.SIGKILL)


def test_what_is_executed_comes_from_the_small_starter_and_without_it_from_the_launcher(mortal: Place) -> None:
    """As children of the launcher either way."""
    with Launcher(mortal.socket) as launcher:
        owner = launcher.info()["pid"]
    (starter,) = psutil.Process(owner).children()
    for code in (3, 4):
        launch = mortal.launch(["/bin/sh", "-c", f"echo $PPID; exit {code}"])
        mortal.fork(launch)
        assert (_ended(launch)["code"], _ended(launch)["source"]) == (code, "wait")
        assert _log(launch) == f"{owner}\n"
        if code == 3:
            starter.kill()
    assert not starter.is_running()


def test_a_starter_without_word_from_its_launcher_starts_no_process(tmp_path: Path) -> None:
    def run(content: Any, write_end: int, arena: int | None) -> NoReturn:
        Path(content["path"]).touch()
        os._exit(0)

    starter = make_starter(run)
    assert starter is not None, "no machine these tests run on is without"
    ends = []
    for path, is_told in ((tmp_path / "told", True), (tmp_path / "untold", False)):
        read_end, write_end = os.pipe()
        pid, word = starter.start({"path": str(path)}, write_end, None)
        if is_told:
            begin(word)
        else:
            os.close(word)
        ends.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        os.close(read_end)
        os.close(write_end)
    starter.end()
    assert ends == [0, 127]
    assert [path.name for path in tmp_path.iterdir()] == ["told"]


def test_second_launcher_on_a_socket_leaves_it_to_the_first(mortal: Place) -> None:
    with Launcher(mortal.socket) as launcher:
        before = launcher.info()["pid"]
    mortal.start()
    with Launcher(mortal.socket) as launcher:
        assert launcher.info()["pid"] == before


def test_idle_launcher_ends_by_itself() -> None:
    directory = Path(tempfile.mkdtemp(prefix="ganger-launcher-"))
    path = str(directory / "l.sock")
    try:
        start_launcher(
            sys.executable,
            path,
            inject=prepare_inject_directory(str(directory / "inject")),
            env=_environment(),
            log=str(directory / "log"),
            idle_s=0.2,
            preload=False,
        )
        eventually(lambda: not os.path.exists(path), what="the launcher's end")
    finally:
        shutil.rmtree(directory)


def test_launcher_whose_socket_is_gone_ends_when_its_last_rank_has(mortal: Place) -> None:
    launch = mortal.launch(["/bin/sh", "-c", "read line < go; exit 0"])
    os.mkfifo(os.path.join(launch["cwd"], "go"))
    mortal.fork(launch)
    with Launcher(mortal.socket) as launcher:
        info = launcher.info()
    os.unlink(mortal.socket)
    with open(os.path.join(launch["cwd"], "go"), "w") as go:
        go.write("\n")
    assert _ended(launch)["code"] == 0
    eventually(lambda: start_ticks(info["pid"]) != info["start_ticks"], what="the launcher's end")
    mortal.start()


def test_interpreter_that_cannot_run_a_launcher_is_named(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match="/bin/false runs no launcher"):
        start_launcher(
            "/bin/false",
            str(tmp_path / "l.sock"),
            inject=prepare_inject_directory(str(tmp_path / "inject")),
            env=_environment(),
            log=str(tmp_path / "log"),
        )
