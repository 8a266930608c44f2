"""Runs trainings without Ganger, for comparison. PyTorch is imported once, in a process that computes nothing; each
rank is a fork of it that runs the unchanged script, which saves some seconds for each."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

LOOK_EVERY_SECONDS = 0.1

# Reads one request a line, answers with one line for each rank that ended. When its input closes, or it is killed, its
# ranks end with it. With more than one thread a fork could not compute, so the rank is started anew.
_FORKS = """
import ctypes, importlib, json, os, runpy, select, signal, sys, traceback

for name in "torch torch.distributed torch.nn.parallel torch.utils.data torch._dynamo sklearn.datasets".split():
    try:
        importlib.import_module(name)
    except ImportError:
        pass
own = os.getpid()
may_fork = len(os.listdir("/proc/self/task")) == 1

def become(request):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != own:
        os._exit(1)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(source, stream)
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    script, *rest = request["command"]
    if not may_fork:
        os.execv(sys.executable, [sys.executable, script, *rest])
    sys.argv = [script, *rest]
    sys.path[0] = os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")

def answer(pid, status):
    code = os.waitstatus_to_exitcode(status)
    print(json.dumps({"rank": running.pop(pid), "code": code}), flush=True)

running, waiting = {}, b""
while True:
    if select.select([0], [], [], 0.02)[0]:
        news = os.read(0, 65536)
        if not news:
            break
        *lines, waiting = (waiting + news).split(b"\\n")
        for line in lines:
            request = json.loads(line)
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    become(request)
                    code = 0
                except SystemExit as end:
                    code = end.code if isinstance(end.code, int) else int(end.code is not None)
                except BaseException:
                    traceback.print_exc()
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
            running[pid] = request["rank"]
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            break
        answer(pid, status)
"""


class AloneError(Exception):
    """The process that runs trainings alone has ended, or was too slow; the text says what it left."""


class Alone:
    """Use as a context manager: what still runs at its end is killed. Safe to use from several threads."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._numbers = itertools.count()
        self._codes: dict[int, int] = {}
        self._changed = threading.Condition()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GANGER_")}
        # One thread everywhere: what Ganger's ranks have too, and what a fork can keep.
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _FORKS],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, name="alone", daemon=True)

    def __enter__(self) -> Alone:
        self._reader.start()
        return self

    def __exit__(self, *reason: object) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def run(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        directory: Path,
        log: Path,
        seconds: float,
        look: Callable[[], None],
    ) -> list[int]:
        """Run a Python script, one process for each environment, and return their exit codes. `look` is called while
        it waits and may raise. Raises AloneError."""
        ranks = [
            self._begin(
                {
                    "command": list(command),
                    "environment": dict(environment),
                    "directory": str(directory),
                    "log": str(log),
                }
            )
            for environment in environments
        ]
        for _ in range(max(1, int(seconds / LOOK_EVERY_SECONDS))):
            look()
            with self._changed:
                if self._changed.wait_for(lambda: all(rank in self._codes for rank in ranks), LOOK_EVERY_SECONDS):
                    return [self._codes.pop(rank) for rank in ranks]
            if self._process.poll() is not None:
                raise AloneError(f"nothing runs alone any more: {self._log.read_text(errors='replace')[-2000:]}")
        raise AloneError(f"not done within {seconds:g} s: {' '.join(command)}")

    def _begin(self, request: dict[str, object]) -> int:
        with self._changed:
            rank = next(self._numbers)
            line = json.dumps({"rank": rank, **request}) + "\n"
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(line.encode())
                self._process.stdin.flush()
            except BrokenPipeError as problem:
                raise AloneError(self._log.read_text(errors="replace")[-2000:]) from problem
        return rank

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            ended = json.loads(line)
            with self._changed:
                self._codes[int(ended["rank"])] = int(ended["code"])
                self._changed.notify_all()
