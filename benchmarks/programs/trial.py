"""Run one program alone and under Ganger, with suspends and moves on the way, and compare what it wrote."""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ganger.client import Client
from ganger.job import FINISHED
from ganger.v1 import job_pb2
from ganger.wire.errors import ApiError

from benchmarks.bench_cluster import BenchCluster, BenchClusterError
from benchmarks.programs import digests, inputs
from benchmarks.programs.program import Program
from benchmarks.programs.written_scripts import SCRIPTS

# Far above what a program takes on an idle machine: others may compute on this one.
RUN_S = 900.0
ORDER_S = 180
# A refusal with this text passes by itself.
SOON = ("try again", "is being moved", "starting")
STEPS = 3
LOG_BYTES = 100
OFFERS_S = 5.0
GROWN_S = 10.0
# One thread each, so that sums are the same in every run.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONUNBUFFERED": "1",
    "LANG": "C.UTF-8",
    "HF_HUB_OFFLINE": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "JAX_PLATFORMS": "cpu",
}
WRITTEN_ANEW = "written anew"
ALONE, UNDER_GANGER = "alone", "under-ganger"
OF_GANGER = re.compile(r"^ganger: ")


@dataclass
class Order:
    """A suspend or a move: `seconds` from the order to its end, `refusal` if there was one."""

    kind: str
    seconds: float = 0.0
    refusal: str = ""


@dataclass
class Outcome:
    """What became of a program. `files` and `log`: "" if they are as alone, else the first difference. `commit`, `day`:
    what of Ganger it was tried with, and when."""

    program: str
    kind: str
    source: str
    version: str
    mechanism: str = ""
    levels: list[str] = field(default_factory=list)
    refused_levels: dict[str, str] = field(default_factory=dict)
    refused_mechanisms: dict[str, str] = field(default_factory=dict)
    orders: list[Order] = field(default_factory=list)
    move_pause_s: float = 0.0
    alone_s: float = 0.0
    under_ganger_s: float = 0.0
    state: str = ""
    files: str = ""
    log: str = ""
    failure: str = ""
    commit: str = ""
    day: str = ""

    def done(self, *kinds: str) -> int:
        """Return how many orders of these kinds were carried out."""
        return sum(order.kind in kinds and not order.refusal for order in self.orders)

    @property
    def is_identical(self) -> bool:
        return self.state == "SUCCEEDED" and not (self.files or self.log or self.failure)

    @property
    def is_wrong(self) -> bool:
        """Return whether the job succeeded with another result than alone: the worst that can happen."""
        return self.state == "SUCCEEDED" and not self.failure and bool(self.files or self.log)

    @property
    def is_complete(self) -> bool:
        return self.is_identical and self.done("offload", "checkpoint", "pause") >= 2 and self.done("move") >= 1

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Outcome:
        own = {one.name: row[one.name] for one in fields(cls) if one.name in row}
        return cls(**{**own, "orders": [Order(**order) for order in row["orders"]]})

    def to_json(self) -> dict[str, Any]:
        judged = {"is_identical": self.is_identical, "is_complete": self.is_complete, "is_wrong": self.is_wrong}
        return {**asdict(self), **judged}


class ProgramError(Exception):
    """The program cannot be tried; the text has the reason."""


@dataclass(frozen=True)
class Rooms:
    """`python`: the interpreter of the programs' environment. `sources`: the directory with checkouts, if there is one.
    `work`: where programs run. Both runs of a program have the same path, as it may be in its log and files."""

    python: Path
    sources: Path | None
    work: Path

    def version_of(self, program: Program) -> str:
        """Return the commit of its checkout, or the versions of its packages."""
        if program.source and not program.is_packaged:
            return checkout_of(self.sources, program).version
        names = repr(list(program.packages))
        code = f"from importlib.metadata import version\nprint(', '.join(f'{{n}} {{version(n)}}' for n in {names}))"
        done = subprocess.run([self.python, "-c", code], capture_output=True, text=True, check=False)
        if done.returncode:
            raise ProgramError(f"its environment lacks one of {', '.join(program.packages)}")
        return done.stdout.strip()

    @contextmanager
    def run_directory(self, program: Program, kept_as: str) -> Iterator[Path]:
        """Make the directory of a run, and keep it under another name at its end."""
        top, kept = self.work / program.name / "run", self.work / program.name / kept_as
        for old in (top, kept):
            shutil.rmtree(old, ignore_errors=True)
        if program.source and not program.is_packaged:
            top.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(checkout_of(self.sources, program).path, top, ignore=shutil.ignore_patterns(".git"))
        else:
            top.mkdir(parents=True)
            if program.name in SCRIPTS:
                (top / f"{program.name}.py").write_text(SCRIPTS[program.name])
        place = top / program.directory
        for name in program.inputs:
            maker, _, to = name.partition(":")
            subprocess.run([self.python, inputs.__file__, maker, (place / to).resolve()], check=True)
        try:
            yield place
        finally:
            top.rename(kept)

    def command_of(self, program: Program) -> list[str]:
        first, *others = program.command
        return [str(self.python if first == "python" else self.python.parent / first), *others]


@dataclass(frozen=True)
class Checkout:
    path: Path
    version: str


def checkout_of(sources: Path | None, program: Program) -> Checkout:
    """Return the checkout of a program's repository. Its commit is git's, or in a file COMMIT. Raises ProgramError."""
    if sources is None or not (sources / program.checkout).is_dir():
        raise ProgramError(f"no checkout of {program.source}: clone it below a directory, and give that by --sources")
    path = sources / program.checkout
    noted = path / "COMMIT"
    if noted.is_file():
        return Checkout(path, noted.read_text().strip()[:12])
    done = subprocess.run(["git", "-C", path, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return Checkout(path, done.stdout.strip()[:12] or "unknown")


def run_alone(program: Program, rooms: Rooms) -> tuple[str, float]:
    """Run it without Ganger. Return its log and how long it took in seconds."""
    with rooms.run_directory(program, ALONE) as place:
        began = time.monotonic()
        done = subprocess.run(
            rooms.command_of(program),
            cwd=place,
            env={"PATH": os.environ["PATH"], "HOME": str(place), **ENVIRONMENT, **program.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=RUN_S,
            check=False,
        )
        log = done.stdout.decode(errors="replace")
        if done.returncode:
            raise ProgramError(f"it fails alone, with exit code {done.returncode}: {log.strip()[-300:]}")
        return log, time.monotonic() - began


class Job:
    """A program that runs under Ganger."""

    def __init__(self, cluster: BenchCluster, program: Program, rooms: Rooms, place: Path) -> None:
        self._cluster = cluster
        self._client = Client(str(cluster.master))
        variables = {**ENVIRONMENT, "HOME": str(place), **program.environment}
        options = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
        self._name = json.loads(
            cluster.ganger(
                *("submit", "--json", "--name", program.name, "--directory", str(place)),
                *("--checkpoint-every", "never", *program.options, *options, "--", *rooms.command_of(program)),
            )
        )["name"].removeprefix("jobs/")

    def show(self) -> dict[str, Any]:
        shown: dict[str, Any] = json.loads(self._cluster.ganger("show", self._name, "--json"))
        return shown

    @property
    def state(self) -> str:
        return str(self.show()["state"])

    def log(self) -> str:
        return self._cluster.ganger("logs", self._name)

    def history(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._cluster.ganger("history", self._name, "--json"))
        return found

    def has_ended(self) -> bool:
        return self._is_over(self._client.get_job(self._name))

    def until(self, holds: Callable[[job_pb2.Job], object], limit_s: float) -> bool:
        """Wait; return whether it came to hold before the time and the end of the job."""
        deadline = time.monotonic() + limit_s
        while not holds(job := self._client.get_job(self._name)):
            if self._is_over(job) or time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def until_end(self) -> None:
        self.until(self._is_over, RUN_S)

    def until_steps(self) -> bool:
        """Wait until it has made its first steps; of a job that reports none, until it has written its first lines."""
        return self.until(lambda job: job.progress.step >= STEPS or self._log_bytes() >= LOG_BYTES, RUN_S)

    def until_progress(self) -> bool:
        """Wait until it runs and has made steps or written lines since this call."""
        if not self.until(lambda job: job.gang.phase == job_pb2.Gang.PHASE_RUNNING, ORDER_S):
            return False
        steps, size = self._client.get_job(self._name).progress.step, self._log_bytes()
        return self.until(lambda job: job.progress.step >= steps + STEPS or self._log_bytes() > size, GROWN_S)

    def _log_bytes(self) -> int:
        try:
            return sum(len(chunk.data) for chunk in self._client.read_log(self._name))
        except ApiError:
            # Nothing can be read of a job that goes from one node to another at the moment.
            return 0

    @staticmethod
    def _is_over(job: job_pb2.Job) -> bool:
        return job.state in FINISHED

    def order(self, kind: str) -> Order:
        """Suspend it at a level and resume it, or move it. Refusals that pass are tried again."""
        words = ["move", self._name] if kind == "move" else ["suspend", self._name, "--level", kind]
        deadline = time.monotonic() + ORDER_S
        while True:
            began = time.monotonic()
            try:
                self._cluster.ganger(*words, "--timeout", f"{ORDER_S}s")
                order = Order(kind, time.monotonic() - began)
                break
            except BenchClusterError as error:
                if not any(word in str(error) for word in SOON) or time.monotonic() > deadline:
                    return Order(kind, time.monotonic() - began, str(error))
                time.sleep(0.3)
        if kind != "move":
            try:
                self._cluster.ganger("resume", self._name, "--timeout", f"{ORDER_S}s")
            except BenchClusterError as error:
                order.refusal = str(error)
        return order

    def close(self) -> None:
        """End it if it has not ended."""
        if not self.has_ended():
            self._cluster.ganger("cancel", self._name)
        self._client.close()


def run_under_ganger(program: Program, rooms: Rooms, cluster: BenchCluster, outcome: Outcome) -> str:
    """Run it as a job that is suspended twice and moved once. Return its log; the rest goes to `outcome`."""
    with rooms.run_directory(program, UNDER_GANGER) as place:
        began = time.monotonic()
        job = Job(cluster, program, rooms, place)
        try:
            _give_orders(job, outcome)
            job.until_end()
            outcome.state = job.state
            outcome.under_ganger_s = time.monotonic() - began
            if outcome.state == "FAILED":
                outcome.failure = str(job.show()["failure"])[:600]
            totals = job.history()["totals"]
            outcome.move_pause_s = totals["move_pauses_ms"] / 1000 / max(1, totals["moves"])
            return job.log()
        finally:
            job.close()


def _give_orders(job: Job, outcome: Outcome) -> None:
    if not job.until_steps():
        return
    # What it offers may be known a moment later than its first steps.
    job.until(lambda shown: shown.capabilities.can_move, OFFERS_S)
    offers = job.show()["capabilities"] or {}
    outcome.mechanism = offers.get("mechanism", "").lower()
    outcome.levels = [name for name in ("pause", "offload", "checkpoint", "move") if offers.get(f"can_{name}")]
    outcome.refused_levels = dict(offers.get("missing", {}))
    outcome.refused_mechanisms = {
        str(one["mechanism"]).lower(): one["reason"] for one in offers.get("refused_mechanisms", ())
    }
    first = "offload" if "offload" in outcome.levels else "pause"
    for kind in (first, "checkpoint", "move"):
        if job.has_ended():
            outcome.orders.append(Order(kind, refusal="the job had ended: the program is too short"))
            continue
        outcome.orders.append(job.order(kind))
        job.until_progress()


def try_program(program: Program, rooms: Rooms, cluster: BenchCluster) -> Outcome:
    """Return what became of the program; a program that cannot be tried has a failure."""
    outcome = Outcome(program.name, program.kind, program.source or WRITTEN_ANEW, "")
    try:
        outcome.version = rooms.version_of(program)
        alone, outcome.alone_s = run_alone(program, rooms)
        log = run_under_ganger(program, rooms, cluster, outcome)
    except (ProgramError, BenchClusterError, subprocess.TimeoutExpired) as error:
        outcome.failure = f"{type(error).__name__}: {error}"[:600]
        return outcome
    expected = compared_lines(program, alone)
    if program.log is not None and not re.search(r"\d", " ".join(expected)):
        outcome.failure = "no number of its log is compared"
    outcome.log = first_difference(expected, compared_lines(program, log))
    outcome.files = different_files(program, rooms)
    if outcome.is_wrong and not _is_reproducible(program, rooms, expected):
        outcome.failure = "it ends differently each time that it runs alone, so nothing can be compared"
    return outcome


def _is_reproducible(program: Program, rooms: Rooms, lines: Sequence[str]) -> bool:
    """Return whether another run alone has the same log and files."""
    before = _files_of(program, rooms, ALONE)
    log, _ = run_alone(program, rooms)
    return compared_lines(program, log) == lines and _files_of(program, rooms, ALONE) == before


def compared_lines(program: Program, log: str) -> list[str]:
    if program.log is None:
        return []
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", log) if not OF_GANGER.match(line)]
    if not program.log:
        return [line for line in lines if line]
    return [" ".join(found) for line in lines for found in _matches(program.log, line)]


def _matches(pattern: str, line: str) -> Iterator[Sequence[str]]:
    for match in re.finditer(pattern, line):
        yield [group for group in match.groups() if group is not None] or [match.group()]


def first_difference(expected: Sequence[str], found: Sequence[str]) -> str:
    """Return "" if both are the same."""
    changes = list(difflib.unified_diff(expected, found, "alone", "under", n=0, lineterm=""))[3:]
    return f"{len(expected)} lines alone, {len(found)} under Ganger: {' | '.join(changes)[:300]}" if changes else ""


def different_files(program: Program, rooms: Rooms) -> str:
    """Return the first differences between the files that both runs left."""
    alone, under = (_files_of(program, rooms, name) for name in (ALONE, UNDER_GANGER))
    if program.weights and not any(Path(name).match(program.weights) for name in alone):
        return f"it wrote no {program.weights}"
    wrong = [name for name in sorted({*alone, *under}) if alone.get(name) != under.get(name)]
    return f"{len(wrong)} files differ: {', '.join(wrong[:5])}" if wrong else ""


def _files_of(program: Program, rooms: Rooms, kept_as: str) -> Mapping[str, str]:
    command = [str(rooms.python), digests.__file__, str(rooms.work / program.name / kept_as)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ProgramError(f"its files cannot be read: {done.stderr.strip()[-300:]}")
    ignored = ("__pycache__/*", ".*", *program.ignored)
    return {
        name: digest
        for name, digest in json.loads(done.stdout).items()
        if not any(Path(name).match(pattern) for pattern in ignored)
    }
