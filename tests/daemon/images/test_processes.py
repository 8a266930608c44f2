"""What holds for images of processes, by CRIU and by the fake: they go on as they were, in another unit."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from daemon.images.unit_job import real, restored, started
from ganger_daemon.images import process_tree
from ganger_daemon.images.contract import DumpRequest, ImageRefusedError, ProcessImages
from ganger_daemon.images.criu import CriuImages
from ganger_daemon.images.driver import DeviceState, DriverProcessState
from ganger_daemon.images.process_tree import pid_inside
from injob.launcher_kit import Place, exit_record, launcher_place
from kit.fake_images import STEP_LOCK, FakeImages
from kit.scripted_driver import ScriptedDriver

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="units need root")

# Keeps its count in memory and, for the fake, in a file of the unit's own, from which it goes on if it is started.
COUNTING = f"""
import fcntl, os, sys, time
step = open(os.environ["TMPDIR"] + "/{STEP_LOCK}", "a")
path = os.environ["TMPDIR"] + "/count"
count = int(open(path).read() or 0) if os.path.exists(path) else 0
while not os.path.exists(sys.argv[1]):
    fcntl.flock(step, fcntl.LOCK_EX)
    count += 1
    with open(path + ".new", "w") as file:
        file.write(str(count))
    os.rename(path + ".new", path)
    print(count, os.getpid(), flush=True)
    fcntl.flock(step, fcntl.LOCK_UN)
    time.sleep(0.02)
"""

# A child counts and writes to its parent through a pipe; the parent prints what it reads.
TREE = """
import os, sys, time
reader, writer = os.pipe()
if os.fork() == 0:
    os.close(reader)
    count = 0
    while True:
        count += 1
        os.write(writer, b"%d\\n" % count)
        time.sleep(0.02)
os.close(writer)
for line in os.fdopen(reader):
    print(line.strip(), os.getpid(), flush=True)
"""


@pytest.fixture
def place() -> Iterator[Place]:
    yield from launcher_place(preload=False)


@pytest.fixture(params=["criu", "fake"])
def images(request: pytest.FixtureRequest) -> ProcessImages:
    return real() if request.param == "criu" else FakeImages()


@pytest.fixture
def image(tmp_path: Path) -> Path:
    directory = tmp_path / "image"
    directory.mkdir()
    return directory


def test_a_program_goes_on_with_its_count_and_its_process_id(images: ProcessImages, place: Place, image: Path) -> None:
    end = place.directory / "end"
    job = started(place, COUNTING, str(end))
    facts = images.dump(DumpRequest(job.unit, image, goes_on=False))
    assert exit_record(job.launch)["signal"] == signal.SIGKILL

    again = restored(images, place, image, facts)
    again.goes_on_from(job)
    assert pid_inside(again.root.pid) == facts.root_pid
    end.touch()
    assert exit_record(again.launch)["code"] == 0


def test_output_after_a_restore_goes_to_the_file_that_replaces_the_log(
    images: ProcessImages, place: Place, image: Path
) -> None:
    job = started(place, COUNTING, "/nowhere/end")
    facts = images.dump(DumpRequest(job.unit, image, goes_on=False))
    exit_record(job.launch)
    assert [log.path for log in facts.logs] == [str(job.log)]
    before = job.log.read_text()
    job.log.unlink()

    again = restored(images, place, image, facts)
    again.until_it_counts()

    assert again.counts()[0] == int(before.split("\n")[-2].split()[0]) + 1
    assert not job.log.exists()


def test_files_in_shared_memory_travel_with_the_image(images: ProcessImages, place: Place, image: Path) -> None:
    own = f"/dev/shm/{place.directory.name}"
    # another job holds it, as it holds most of what it has there
    others = f"{own}-of-another-job"
    held = os.open(others, os.O_CREAT | os.O_WRONLY)
    program = f"import os\nkept = open({own!r}, 'wb'); kept.write(b'batch' * 1000); kept.flush()\n"
    try:
        job = started(place, program + COUNTING, "/nowhere/end")
        os.chown(own, 1234, 1234)
        facts = images.dump(DumpRequest(job.unit, image, goes_on=False))
        os.unlink(own)

        first = restored(images, place, image, facts)
        shared = first.own_file(own)
        assert shared.read_bytes() == b"batch" * 1000
        # Beside it may be files that other programs of this user made meanwhile and that no process holds.
        assert Path(others).name not in [path.name for path in shared.parent.iterdir()]
        if not isinstance(images, FakeImages):  # which starts the program again
            assert shared.stat().st_uid == 1234
        assert not Path(own).exists()
        # in a unit all files of its shared memory are its own
        first.own_file("/dev/shm/batches").mkdir()
        os.symlink("batches/0", first.own_file("/dev/shm/latest"))
        shutil.rmtree(image)
        image.mkdir()
        facts = images.dump(DumpRequest(first.unit, image, goes_on=False))
        second = restored(images, place, image, facts)
        assert os.readlink(second.own_file("/dev/shm/latest")) == "batches/0"
        assert second.own_file("/dev/shm/batches").is_dir()
    finally:
        os.unlink(others)
        os.close(held)
        Path(own).unlink(missing_ok=True)


def test_files_in_shared_memory_that_no_process_holds_travel_with_modes_and_owners(place: Place, image: Path) -> None:
    images, own = real(), f"/dev/shm/{place.directory.name}"
    before = Path(f"{own}-before")
    before.touch()
    time.sleep(0.05)  # later than a tick of the kernel's clock of files, so that it is older than the program
    program = f"""
import os
os.makedirs({own!r} + "/cache")
with open({own!r} + "/cache/batch", "wb") as file:
    file.write(b"batch")
os.symlink("cache/batch", {own!r} + "/newest")
for path, mode in (("/cache/batch", 0o666), ("/cache", 0o1777), ("", 0o750)):
    os.chmod({own!r} + path, mode)
    os.chown({own!r} + path, 0, 1234)
"""
    try:
        job = started(place, program + COUNTING, "/nowhere/end")
        facts = images.dump(DumpRequest(job.unit, image, goes_on=False))
        again = restored(images, place, image, facts)
        again.goes_on_from(job)
        there = again.own_file(own)
        assert (there / "newest").read_bytes() == b"batch"
        found = {str(path.relative_to(there)): path.lstat() for path in (there, there / "cache", there / "cache/batch")}
        modes = {name: (stat.S_IMODE(status.st_mode), status.st_gid) for name, status in found.items()}
        assert modes == {".": (0o750, 1234), "cache": (0o1777, 1234), "cache/batch": (0o666, 1234)}
        assert not again.own_file(str(before)).exists()
    finally:
        shutil.rmtree(own, ignore_errors=True)
        before.unlink()


def test_more_in_shared_memory_than_an_image_takes_is_refused_by_name(
    place: Place, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, own = real(), Path(f"/dev/shm/{place.directory.name}")
    monkeypatch.setattr(process_tree, "LOOSE_LIMIT_BYTES", 1 << 20)
    job = started(place, f"open({str(own)!r}, 'wb').write(bytes(2 << 20))\n" + COUNTING, "/nowhere/end")
    try:
        with pytest.raises(ImageRefusedError, match=rf"have 2 MiB, the largest is {own}; at most 1 MiB"):
            images.dump(DumpRequest(job.unit, image, goes_on=False))
        job.until_it_counts()
    finally:
        own.unlink()


def test_a_program_that_goes_on_is_not_disturbed_and_its_image_is_of_the_moment(
    images: ProcessImages, place: Place, image: Path
) -> None:
    end = place.directory / "end"
    job = started(place, COUNTING, str(end))
    facts = images.dump(DumpRequest(job.unit, image, goes_on=True))
    there = len(job.counts())
    job.until_it_counts(20)
    assert job.counts() == list(range(1, len(job.counts()) + 1))

    again = restored(images, place, image, facts)
    again.until_it_counts()
    assert again.counts()[0] <= there + 1
    end.touch()
    assert exit_record(job.launch)["code"] == 0
    assert exit_record(again.launch)["code"] == 0


def test_one_image_can_be_restored_twice(images: ProcessImages, place: Place, image: Path) -> None:
    job = started(place, COUNTING, "/nowhere/end")
    facts = images.dump(DumpRequest(job.unit, image, goes_on=False))
    first = restored(images, place, image, facts)
    first.until_it_counts()
    second = restored(images, place, image, facts)
    second.until_it_counts()
    assert first.counts()[0] == second.counts()[0] == job.counts()[-1] + 1


def test_a_refused_dump_leaves_the_program_running(images: ProcessImages, place: Place, tmp_path: Path) -> None:
    end = place.directory / "end"
    job = started(place, COUNTING, str(end))
    if isinstance(images, FakeImages):
        images.refusal = "as wanted"
    # An image cannot be written where a directory has the name of one of its files.
    (tmp_path / "image" / "own-0.tar").mkdir(parents=True)

    with pytest.raises(ImageRefusedError, match=r"/dev/shm cannot be saved|as wanted"):
        images.dump(DumpRequest(job.unit, tmp_path / "image", goes_on=False))

    job.until_it_counts()
    end.touch()
    assert exit_record(job.launch)["code"] == 0


def test_a_program_of_another_user_goes_on_as_that_user(place: Place, image: Path) -> None:
    images = real()
    job = started(place, "import os\nos.setresgid(*[65534] * 3)\nos.setresuid(*[65534] * 3)\n" + TREE)
    if not has_capability(CAP_SYS_RESOURCE):
        with pytest.raises(ImageRefusedError, match="the daemon lacks CAP_SYS_RESOURCE"):
            images.dump(DumpRequest(job.unit, image, goes_on=False))
        return
    facts = images.dump(DumpRequest(job.unit, image, goes_on=False))

    again = restored(images, place, image, facts)
    again.until_it_counts()

    status = Path(f"/proc/{again.root.pid}/status").read_text()
    assert "Uid:\t65534\t65534\t65534\t65534" in status


CAP_SYS_RESOURCE = 24


def has_capability(number: int) -> bool:
    lines = Path("/proc/self/status").read_text().splitlines()
    return bool(int(next(line for line in lines if line.startswith("CapEff:")).split()[1], 16) >> number & 1)


def test_a_tree_of_processes_goes_on_with_its_pipes(place: Place, image: Path) -> None:
    images = real()
    job = started(place, TREE)
    facts = images.dump(DumpRequest(job.unit, image, goes_on=False))
    assert facts.processes == 2

    again = restored(images, place, image, facts)
    again.goes_on_from(job, more=10)


def test_a_process_that_left_the_tree_is_named_and_all_run_on(place: Place, image: Path) -> None:
    images = real()
    # The child's child outlives its parent, and another process adopts it.
    leaving = """
import os, time
if os.fork() == 0:
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
os.wait()
"""
    job = started(place, leaving + COUNTING, "/nowhere/end")

    with pytest.raises(ImageRefusedError, match=r"process \d+ \(python\S*\) has left the job's process tree"):
        images.dump(DumpRequest(job.unit, image, goes_on=False))
    job.until_it_counts()


@pytest.mark.skipif(shutil.which("script") is None, reason="`script` is not installed")
def test_a_program_that_runs_another_one_on_a_terminal_is_refused_and_runs_on(place: Place, image: Path) -> None:
    """It takes no signals but by a descriptor, so CRIU would interrupt its poll as nothing else does."""
    images = real()
    end = place.directory / "end"
    counting = place.directory / "counting.py"
    counting.write_text(COUNTING)
    command = f"{sys.executable} {counting} {end}"
    starts = f"import os\nos.execvp('script', ['script', '-qefc', {command!r}, '/dev/null'])\n"
    job = started(place, starts)
    with pytest.raises(ImageRefusedError, match=r"runs a program on a terminal, as `script` does, .*\(script, pid \d+"):
        images.dump(DumpRequest(job.unit, image, goes_on=True))
    job.until_it_counts()
    end.touch()
    assert exit_record(job.launch)["code"] == 0


def test_a_program_at_which_a_blocked_sigcont_waits_is_refused_and_runs_on(place: Place, image: Path) -> None:
    """CRIU would restore it to a stop that it takes for a fault."""
    images = real()
    blocking = "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n"
    job = started(place, blocking + COUNTING, "/nowhere/end")
    os.kill(job.unit.root_pid, signal.SIGCONT)
    with pytest.raises(ImageRefusedError, match=r"a SIGCONT waits at process \d+ \(python\S*\), which blocks"):
        images.dump(DumpRequest(job.unit, image, goes_on=False))
    job.until_it_counts()


def test_a_removed_file_that_is_still_open_travels_with_the_image(place: Place, image: Path) -> None:
    images = real()
    removed = (
        "import os\ngone = open('/dev/shm/gone', 'w+b'); gone.write(b'x' * 3000000); gone.flush()\n"
        "os.remove('/dev/shm/gone')\n"
    )
    check = COUNTING.replace("    print(", "    assert os.fstat(gone.fileno()).st_size == 3000000\n    print(")
    job = started(place, removed + check, "/nowhere/end")
    facts = images.dump(DumpRequest(job.unit, image, goes_on=False))

    again = restored(images, place, image, facts)
    again.until_it_counts()


def test_a_restore_that_fails_gives_the_reason(place: Place, image: Path) -> None:
    images = real()
    data = place.directory / "data"
    job = started(place, f"out = open({str(data)!r}, 'w')\nout.write('12345'); out.flush()\n" + COUNTING, "/nowhere")
    facts = images.dump(DumpRequest(job.unit, image, goes_on=False))
    assert str(data) in [file.path for file in facts.files if file.is_written]
    data.write_text("another length")

    with pytest.raises(Exception, match="restore"):
        restored(images, place, image, facts)

    assert f"{data} has 14 bytes; it had 5 when the image was made" in images.restore_failure(image)


LINKED = """
import socket, sys
link = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
"""


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """A server outside all units."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def test_a_connection_to_a_program_outside_is_refused_by_name_and_the_program_runs_on(
    place: Place, image: Path, server: socket.socket
) -> None:
    images = real()
    port = server.getsockname()[1]
    job = started(place, LINKED + COUNTING, "/nowhere", str(port))

    with pytest.raises(ImageRefusedError, match=rf"connected to 127\.0\.0\.1:{port} \(descriptor \d+ of python"):
        images.dump(DumpRequest(job.unit, image, goes_on=False))
    job.until_it_counts()


def test_a_connection_outside_that_may_be_closed_is_closed_after_the_restore(
    place: Place, image: Path, server: socket.socket
) -> None:
    images = real()
    send = LINKED + "link.settimeout(0.0)\n"
    check = COUNTING.replace(
        "    print(count,",
        "    try: found = link.recv(1)\n    except BlockingIOError: found = None\n"
        "    except OSError: found = b'closed'\n    print(count, found,",
    )
    job = started(place, send + check, "/nowhere", str(server.getsockname()[1]))
    facts = images.dump(DumpRequest(job.unit, image, goes_on=False, is_outside_closed=True))
    assert facts.is_outside_closed
    assert "None" in job.log.read_text()

    again = restored(images, place, image, facts)
    again.until_it_counts()

    assert "None" not in again.log.read_text()


def test_connections_inside_the_tree_go_on(place: Place, image: Path) -> None:
    images = real()
    program = TREE.replace("reader, writer = os.pipe()", PAIR)
    job = started(place, program)
    facts = images.dump(DumpRequest(job.unit, image, goes_on=False))

    again = restored(images, place, image, facts)
    again.goes_on_from(job, more=10)


# A loopback connection in place of the pipe, and other sockets that lead nowhere.
PAIR = """import socket
listener = socket.create_server(("127.0.0.1", 0))
sender = socket.create_connection(listener.getsockname())
reader, writer = listener.accept()[0].detach(), sender.detach()
unconnected = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
unconnected.bind(("127.0.0.1", 0))
routes = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
routes.bind((0, 0))
ends = socket.socketpair()
"""


@pytest.mark.parametrize("goes_on", [False, True])
def test_device_state_is_saved_before_the_dump_and_given_back_to_what_goes_on(
    place: Place, image: Path, goes_on: bool
) -> None:
    job = started(place, COUNTING, "/nowhere/end")
    driver = ScriptedDriver(job.root.pid)
    images = with_driver(driver)
    facts = images.dump(DumpRequest(job.unit, image, goes_on=goes_on))
    assert driver.made == ["lock", "checkpoint", *(["restore", "unlock"] if goes_on else [])]
    assert facts.device_pids == (facts.root_pid,)

    again = restored(images, place, image, facts)
    assert again.root.pid


def test_device_state_is_given_back_where_the_dump_fails(place: Place, tmp_path: Path) -> None:
    job = started(place, COUNTING, "/nowhere/end")
    driver = ScriptedDriver(job.root.pid)
    (tmp_path / "image" / "own-0.tar").mkdir(parents=True)

    with pytest.raises(ImageRefusedError):
        with_driver(driver).dump(DumpRequest(job.unit, tmp_path / "image", goes_on=False))

    assert driver.states[job.root.pid] is DriverProcessState.RUNNING
    job.until_it_counts()


def with_driver(driver: ScriptedDriver) -> ProcessImages:
    found = real()
    assert isinstance(found, CriuImages)
    return CriuImages(found.program, "4", DeviceState(driver))


# Traces a process, and lets it go once its standard input ends.
TRACING = """
import ctypes, sys
if ctypes.CDLL(None, use_errno=True).ptrace(0x4206, int(sys.argv[1]), 0, 0):
    sys.exit(f"cannot trace: {ctypes.get_errno()}")
print("traced", flush=True)
sys.stdin.read()
"""


def test_a_process_that_another_program_still_traces_is_dumped_once_that_has_let_it_go(
    place: Place, image: Path
) -> None:
    images, job = real(), started(place, COUNTING, "/nowhere/end")
    command = [sys.executable, "-c", TRACING, str(job.root.pid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as tracer:
        assert tracer.stdout is not None
        assert tracer.stdin is not None
        assert tracer.stdout.readline() == "traced\n"
        with ThreadPoolExecutor() as pool:
            dump = pool.submit(images.dump, DumpRequest(job.unit, image, goes_on=True))
            job.until_it_counts()
            assert not dump.done()
            tracer.stdin.close()
            dump.result(60)
    job.until_it_counts()
