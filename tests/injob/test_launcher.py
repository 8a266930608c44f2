"""The launcher with real processes: fast starts, durable exit records, and a death that harms no rank."""

from __future__ import annotations

import json
import mmap
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from ganger.injob.launcher.child_process import error_of_child
from ganger.injob.launcher.client import Launcher, LauncherError
from ganger.injob.launcher.process_record import TaskPlace, torchrun_environment
from ganger.injob.process_identity import start_ticks
from injob.launcher_kit import HAS_TORCH, Place, exit_record, log_text, page_of
from kit.accounts import STRANGER, as_stranger, needs_a_stranger
from kit.waiting import eventually


@pytest.mark.torch
def test_forked_rank_is_a_process_of_its_own_in_its_place(zygote: Place) -> None:
    launch = zygote.script(
        zygote.launch([sys.executable, "train.py", "--lr", "1"], cores=[min(os.sched_getaffinity(0))]),
        "import os, sys, signal\n"
        "print(sys.argv, os.getcwd(), os.getsid(0) == os.getpid(), sorted(os.sched_getaffinity(0)))\n"
        "print('torch' in sys.modules, oct(os.umask(0)), sorted(map(int, os.listdir('/proc/self/fd')))[:4])\n"
        "print(signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT).__name__, 'RANK' in os.environ)\n"
        "import torch; print(torch.get_num_threads(), sys.stdin.read() == '')\n",
    )
    forked = zygote.fork(launch)
    assert exit_record(launch)["code"] == 0
    identity = page_of(launch).identity()
    assert (identity.pid, identity.start_ticks) == (forked.pid, forked.start_ticks)
    lines = log_text(launch).splitlines()
    assert lines[0] == f"['train.py', '--lr', '1'] {launch['cwd']} True [{min(os.sched_getaffinity(0))}]"
    assert lines[1] == "True 0o22 [0, 1, 2, 3]"
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
    assert exit_record(launch)["code"] == 0, log_text(launch)
    assert "done" in log_text(launch)


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
    assert exit_record(launch)["code"] == 0
    fresh = subprocess.run(
        [sys.executable, "-c", body], capture_output=True, text=True, check=True, env={}, cwd=launch["cwd"]
    )
    found = re.findall(r"Sig\w+:\s+(\w+)", log_text(launch))
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
    eventually(lambda: "a line" in log_text(launch), what="the line", story=lambda: log_text(launch))
    with open(os.path.join(launch["cwd"], "go"), "w"):
        pass
    assert exit_record(launch)["code"] == 0


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
    assert exit_record(launch)["code"] == 0, log_text(launch)
    # a machine of one core has no use for a second one
    most = min(2, len(os.sched_getaffinity(0)))
    assert f"threads {1 if given else most}" in log_text(launch)


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
    assert exit_record(launch)["code"] == 0, log_text(launch)
    assert "threads 1" in log_text(launch)


@pytest.mark.torch
def test_script_named_like_a_standard_module_does_not_break_torch(zygote: Place) -> None:
    launch = zygote.script(zygote.launch([sys.executable, "train.py"]), "raise RuntimeError('mine')", "http.py")
    zygote.script(launch, "import torch, torch.distributed.elastic.rendezvous\nprint('fine')")
    zygote.fork(launch)
    assert exit_record(launch)["code"] == 0, log_text(launch)


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
        exit_record(launch)
        took.append((int(log_text(launch).splitlines()[0]) - began) / 1e9)
    # Measured 0.02 s on two busy cores; importing torch alone takes two.
    assert sorted(took)[2] < 0.5


@pytest.mark.torch
def test_variable_only_a_fresh_interpreter_honours_gets_one(zygote: Place) -> None:
    launch = zygote.script(
        zygote.launch([sys.executable, "train.py"]), "import sys; print(sys.flags.hash_randomization, hash('a'))"
    )
    launch["env"]["PYTHONHASHSEED"] = "0"
    zygote.fork(launch)
    exit_record(launch)
    assert log_text(launch).startswith("0 ")


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
    record = exit_record(launch)
    assert (record["pid"], record["start_ticks"]) == forked
    assert (record["code"], record["signal"], record["source"]) == (code, None, "wait")
    # A bare `raise SystemExit` passes by everything that can be watched from inside a fresh interpreter.
    if either.preload or "raise" not in body:
        assert page_of(launch).progress().exit_code == code


@pytest.mark.torch
def test_deadly_signal_is_recorded_as_one(either: Place) -> None:
    launch = either.script(either.launch([sys.executable, "train.py"]), "import os; os.kill(os.getpid(), 9)")
    either.fork(launch)
    record = exit_record(launch)
    assert (record["code"], record["signal"]) == (137, 9)
    assert page_of(launch).progress().exit_code is None


def test_command_that_is_not_python_is_executed(plain: Place) -> None:
    launch = plain.launch(["/bin/sh", "-c", "echo out; echo err >&2; exit 7"])
    plain.fork(launch)
    assert exit_record(launch)["code"] == 7
    assert log_text(launch) == "out\nerr\n"


def test_own_sitecustomize_is_loaded_after_ours(plain: Place) -> None:
    launch = plain.script(
        plain.launch([sys.executable, "-c", "import sitecustomize; print(sitecustomize.MINE)"]),
        "MINE = 'mine'; print('loaded')",
        "sitecustomize.py",
    )
    launch["env"]["PYTHONPATH"] += os.pathsep + launch["cwd"]
    plain.fork(launch)
    assert exit_record(launch)["code"] == 0, log_text(launch)
    assert log_text(launch) == "loaded\nmine\n"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"argv": ["/no/such/program"]}, "COMMAND"),
        ({"cwd": "/no/such/place"}, "CWD"),
        ({"log": "/no/such/place/log"}, "LOG"),
        ({"cgroup_procs": ["/no/such/cgroup.procs"]}, "CGROUP"),
        ({"cores": [100_000]}, "CORES"),
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
        assert exit_record(launch)["source"] == "launch"


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
        assert error_of_child(read_end, "killed") == heard
        os.close(read_end)


@needs_a_stranger
def test_a_launcher_of_another_account_is_given_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "l.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        with as_stranger():
            listener.listen(1)
        with pytest.raises(LauncherError, match=f"runs as user {STRANGER}"):
            Launcher(path)


@pytest.mark.parametrize("line", [b'{"id": 0}\n', b" "])
@pytest.mark.parametrize("call", [lambda one: one.info(), lambda one: one.fork_all([{}, {}])], ids=["one", "several"])
def test_a_launcher_that_sends_but_does_not_answer_is_given_up_in_time(
    tmp_path: Path, call: Callable[[Launcher], object], line: bytes
) -> None:
    path, is_over = str(tmp_path / "l.sock"), threading.Event()

    def send() -> None:
        connection, _ = listener.accept()
        # well within the time limit of the call; the end of it all lets the test fail, not hang
        with connection, suppress(OSError):
            for _ in range(100):
                connection.sendall(line)
                if is_over.wait(0.01):
                    return

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(1)
        sender = threading.Thread(target=send)
        sender.start()
        try:
            with Launcher(path, timeout=0.2) as launcher, pytest.raises(LauncherError) as refused:
                call(launcher)
        finally:
            is_over.set()
            sender.join()
    assert refused.value.reason == "TIMEOUT"


def test_same_rank_is_not_started_twice(plain: Place) -> None:
    launch = plain.launch(["/bin/sleep", "60"])
    plain.fork(launch)
    with pytest.raises(LauncherError, match="runs already"):
        plain.fork(launch)


def test_arena_is_shared_by_rank_launcher_and_daemon(plain: Place) -> None:
    body = (
        "import mmap, os\nfrom ganger.injob.state_image import inherited_arena\n"
        "fd = inherited_arena(os.environ['GANGER_ARENA'])\n"
        "m = mmap.mmap(fd, 0); m[:5] = b'state'; print(len(m), flush=True)\n"
        "try: os.ftruncate(fd, 0)\nexcept PermissionError: print('sealed', flush=True)\n"
        "open('go').read()\n"
    )
    launch = plain.script(plain.launch([sys.executable, "train.py"], arena={"bytes": 1 << 20}), body)
    os.mkfifo(os.path.join(launch["cwd"], "go"))
    with Launcher(plain.socket) as launcher:
        plain.started.append(launcher.fork({**launch, "touched_bytes": 1 << 19}))
        eventually(lambda: "sealed" in log_text(launch), what="the rank's writing", story=lambda: log_text(launch))
        first = launcher.arena(launch["name"])
        again = launcher.arena(launch["name"])
        with mmap.mmap(first, 0) as memory:
            assert memory[:5] == b"state"
        assert os.fstat(again).st_size == 1 << 20
        eventually(lambda: os.fstat(first).st_blocks * 512 == 1 << 19, what="what was asked for made resident")
        with open(os.path.join(launch["cwd"], "go"), "w"):
            pass
        exit_record(launch)
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
    assert rendezvous["port"] == store
    assert start_ticks(rendezvous["pid"]) == rendezvous["start_ticks"]
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
    assert exit_record(launch)["code"] == 0, log_text(launch)
    assert "met 1" in log_text(launch)
    shutil.rmtree(directory)
    eventually(lambda: start_ticks(rendezvous["pid"]) is None, what="the store's end")
