"""A job scheduler of a user's own, started beside the submission of its job and left to itself.

The process is started first and receives its job once there is one. By then it has imported the user's code, and can
claim the job before the few leases that the master keeps for it expire. Code that cannot be loaded stops the
submission.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path

from ganger.wire.endpoints import TLS_VARIABLE, TOKEN_VARIABLE, Endpoint, default_state_directory
from ganger.wire.errors import SpecInvalid, Violation

READY = b"ready\n"
# A module that imports PyTorch from a cold disk takes its time; one that waits for input never comes.
_LOAD_S = 120.0
# How our command line begins what it says; the user's code may print anything around it.
_SAYS = "ganger: "


class DetachedScheduler:
    """`with DetachedScheduler("module:Class", master) as scheduler: ...; log = scheduler.serve("jobs/7", uid)`.

    Entered, the class is loaded, in a process and a session of its own, in the present directory. Left without `serve`,
    the process ends. Raises SpecInvalid with the reason if the class cannot be loaded.
    """

    def __init__(self, name: str, master: str | Endpoint | None) -> None:
        self._name = name
        self._arguments = [sys.executable, "-m", "ganger.cli.main", "scheduler", "run", name, "--job-from-stdin"]
        self._environment = dict(os.environ)
        if isinstance(master, Endpoint):
            # Not among the arguments: every user of the machine can read those.
            self._environment |= {TOKEN_VARIABLE: master.token, TLS_VARIABLE: master.tls}
            master = master.address
        if master:
            self._arguments += ["--master", master]
        self._directory = default_state_directory().parent / "schedulers"
        self._log = self._directory / f"starting-{os.getpid()}-{time.monotonic_ns()}.log"

    def __enter__(self) -> DetachedScheduler:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log:
            self._process = subprocess.Popen(
                self._arguments,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        try:
            self._wait_loaded()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self._end()

    def serve(self, job: str, uid: str) -> Path:
        """Has it claim the job and leaves it to itself. Returns its log."""
        log = self._directory / f"job-{job.rpartition('/')[2]}-{uid[:8]}.log"
        self._log.replace(log)
        try:
            self._input.write(job.encode() + b"\n")
            self._input.close()
        except BrokenPipeError:
            # Killed just now. The job is submitted and continues by the default scheduler.
            pass
        self._output.close()
        # It outlives this process, so no wait() follows; the code keeps Popen from warning about it.
        self._process.returncode = 0
        return log

    def _wait_loaded(self) -> None:
        ready, _, _ = select.select([self._output], [], [], _LOAD_S)
        if not ready:
            self._refuse(f"did not load within {_LOAD_S:g} s")
        if self._output.readline() != READY:
            self._process.wait()
            said = [line for line in self._log.read_text(errors="replace").splitlines() if line.startswith(_SAYS)]
            told = said[-1].removeprefix(_SAYS) if said else f"ended with code {self._process.returncode}"
            self._refuse(told.removeprefix("scheduler "))

    def _refuse(self, why: str) -> None:
        raise SpecInvalid("the job cannot be submitted as described", violations=[Violation("scheduler", why)])

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._input.close()
        self._output.close()
        self._log.unlink(missing_ok=True)
