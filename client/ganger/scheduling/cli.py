"""Job schedulers of a user's own: `ganger scheduler` runs them, and a submission starts one beside itself.

Beside a submission the process is started first and receives its job once there is one. By then it has imported the
user's code, and can claim the job before the few leases that the master keeps for it expire. Code that cannot be
loaded, and a process that ends meanwhile, stop the submission."""

from __future__ import annotations

import importlib
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import click

from ganger.text import visible
from ganger.wire.endpoints import TLS_VARIABLE, TOKEN_VARIABLE, Endpoint, default_state_directory
from ganger.wire.errors import ApiError, SchedulerFailed, SpecInvalid, Violation

READY = b"ready\n"
# A module that imports PyTorch from a cold disk takes its time; one that waits for input never comes.
_LOAD_S = 120.0
# How our command line begins what it says; the user's code may print anything around it.
_SAYS = "ganger: "
# So much of the last line that the user's code printed is shown.
_SHOWN = 300


class DetachedScheduler:
    """`with DetachedScheduler("module:Class", master) as scheduler: ...; log = scheduler.serve("jobs/7", uid)`.

    Entered, the class is loaded, in a process and a session of its own, in the present directory. Left without `serve`,
    the process ends. Raises SpecInvalid with the reason if the class cannot be loaded, and SchedulerFailed if the
    process was killed, ended by itself or hung.
    """

    def __init__(self, name: str, master: str | Endpoint | None) -> None:
        self._name = name
        self._arguments = [sys.executable, "-m", "ganger.cli.main", "scheduler", "run", name, "--job-from-stdin"]
        self._environment = dict(os.environ)
        if isinstance(master, Endpoint):
            # Not among the arguments: every user of the machine can read those.
            self._environment |= {TOKEN_VARIABLE: master.token, TLS_VARIABLE: master.tls}
            master = str(master.masters or master.address)
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
            raise self._failed(f"did not load within {_LOAD_S:g} s")
        if self._output.readline() == READY:
            return
        code = self._process.wait()
        lines = self._log.read_text(errors="replace").splitlines()
        said = [line for line in lines if line.startswith(_SAYS)]
        if code == click.UsageError.exit_code and said:
            why = said[-1].removeprefix(_SAYS).removeprefix("scheduler ")
            raise SpecInvalid("the job cannot be submitted as described", violations=[Violation("scheduler", why)])
        ended = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with code {code}"
        last = f"; the last that it printed: {visible(lines[-1])[:_SHOWN]}" if lines else ""
        raise self._failed(f"{ended} while it was loaded{last}")

    def _failed(self, why: str) -> ApiError:
        return SchedulerFailed(f"nothing is submitted: the scheduler {self._name} {why}", scheduler=self._name)

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._input.close()
        self._output.close()
        self._log.unlink(missing_ok=True)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@click.group()
def scheduler() -> None:
    """Run job schedulers."""


@scheduler.command()
@click.option("--state-dir", "--master", "master", help="State directory of the master, or its address.")
@click.option("--until-stdin-closes", is_flag=True, help="End when standard input closes.")
@click.pass_context
def host(context: click.Context, master: str | None, until_stdin_closes: bool) -> None:
    """Serve all jobs that bring no scheduler of their own."""
    from ganger.scheduling.host import main
    from ganger.wire.endpoints import find_endpoint

    # Later a master that is away comes back; one that never was does not.
    master = master or context.find_root().obj
    find_endpoint(master)
    arguments = ["--state-dir", master] if master else []
    sys.exit(main([*arguments, *["--until-stdin-closes"] * until_stdin_closes]))


@scheduler.command()
@click.argument("name", metavar="MODULE:CLASS")
@click.option("--job", "jobs", multiple=True, help="Job to serve, 'jobs/7'; may be repeated.")
@click.option("--job-from-stdin", is_flag=True, hidden=True, help="Say 'ready', then read the job's name.")
@click.option("--master", "--state-dir", "master", help="State directory of the master, or its address.")
@click.pass_context
def run(context: click.Context, name: str, jobs: tuple[str, ...], job_from_stdin: bool, master: str | None) -> None:
    """Serve jobs with a scheduler of your own, until they have ended.

    MODULE is looked for in the working directory first.
    """
    import asyncio

    from ganger.scheduling.host import SchedulerHost
    from ganger.scheduling.program import until_stopped
    from ganger.wire.endpoints import find_endpoint
    from ganger.wire.resource_names import job_name_from_text

    if bool(jobs) == job_from_stdin:
        raise click.UsageError("name the jobs to serve: --job jobs/7")
    names = [job_name_from_text(job) for job in jobs]
    made = _load(name)
    master = master or context.find_root().obj
    find_endpoint(master)
    if job_from_stdin:
        names = _read_job()
        if not names:
            return
    served = SchedulerHost(lambda: find_endpoint(master), made, jobs=names)
    asyncio.run(until_stopped(served.run(), until_stdin_closes=False))


def _read_job() -> list[str]:
    """The job that was submitted, once it is; none if the submission failed."""

    os.write(sys.stdout.fileno(), READY)
    # The process that waited for READY closes the pipe: output of the user's code belongs in the log.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    line = sys.stdin.readline().strip()
    return [line] if line else []


def _load(name: str) -> type:
    """The class, checked; a click error says what is wrong with it."""
    from ganger.scheduling import JobScheduler

    module_name, colon, class_name = name.partition(":")
    if not (module_name and colon and class_name):
        raise click.UsageError(f"scheduler {name!r} is not of the form module:Class")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise click.UsageError(f"scheduler {name!r} cannot be loaded: {error}") from error
    except Exception as error:
        # The user's own code: where it broke is what its author wants to know.
        where = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {error}, in {where.filename}, line {where.lineno}"
        raise click.UsageError(f"scheduler {name!r} cannot be loaded: {what}") from error
    if not (isinstance(found, type) and issubclass(found, JobScheduler)):
        raise click.UsageError(f"scheduler {name!r} does not derive from ganger.scheduling.JobScheduler")
    return found
