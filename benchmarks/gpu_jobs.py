"""Jobs that the GPU benchmark runs, and what a process uses of the machine's devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from ganger_daemon.devices.inventory import UNREADABLE
from ganger_daemon.devices.nvml import NoDriverError, NvmlDevices
from ganger_daemon.node.process_identity import anonymous_bytes

from benchmarks import gpu_process
from benchmarks.bench_cluster import START_S, BenchCluster, BenchClusterError

# A run of the example; on one processor it takes minutes.
RUN_S = 300.0
EXAMPLES = Path(__file__).parent.parent / "examples" / "char_transformer"


class DeviceMemory:
    """Memory of a process on the machine's devices by the driver; without a driver, its anonymous memory."""

    def __init__(self) -> None:
        try:
            self._devices: NvmlDevices | None = NvmlDevices()
        except NoDriverError:
            self._devices = None

    def used_bytes(self, pid: int) -> int:
        """Zero once the driver does not list the process; where it lists none, all memory in use on the devices."""
        if self._devices is None:
            return anonymous_bytes(pid) or 0
        of_process = sum(used for used in self._devices.used_by([pid]) if used != UNREADABLE)
        return of_process or sum(self._devices.used_memory())

    def close(self) -> None:
        if self._devices is not None:
            self._devices.close()


class OpaqueJob:
    """The program of `gpu_process` as a job without an agent."""

    def __init__(self, cluster: BenchCluster, script: str, size: int) -> None:
        self._cluster, self._counts = cluster, cluster.directory / "count"
        submitted = cluster.ganger(
            *("submit", *wants(size), "--agent", "none", "--directory", str(cluster.directory), "--json", "--"),
            *(sys.executable, script, str(size), str(self._counts)),
        )
        self._job = str(json.loads(submitted)["name"])
        self._goes_on(0)

    @property
    def pid(self) -> int:
        return int(json.loads(self._cluster.ganger("show", self._job, "--json"))["gang"]["pids"][0])

    def order(self, verb: str, *options: str) -> float:
        """Carry out an order; return the seconds until the job is suspended, or counts again with the state that it
        had. Raises BenchClusterError."""
        before, began = gpu_process.count_in(self._counts)[0], time.monotonic()
        self._cluster.ganger(verb, self._job, *options)
        if verb != "suspend":
            self._goes_on(before)
        return time.monotonic() - began

    def _goes_on(self, before: int) -> None:
        self._cluster.until(lambda: gpu_process.count_in(self._counts)[0] > before + 3, START_S, f"{self._job} counts")
        if not gpu_process.count_in(self._counts)[1]:
            raise BenchClusterError(f"{self._job} goes on with another state")


class ExampleRun:
    """A run of the example, alone or as a job."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self._directory = directory
        self.job = ""
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def alone(cls, directory: Path, form: str, steps: int) -> ExampleRun:
        run = cls(directory)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        run._process = subprocess.Popen(run._command(form, steps), env=environment, stdin=subprocess.DEVNULL)
        return run

    @classmethod
    def under(cls, cluster: BenchCluster, directory: Path, form: str, steps: int) -> ExampleRun:
        run = cls(directory)
        submitted = cluster.ganger(
            *("submit", *wants(10**8), "--env", "CUBLAS_WORKSPACE_CONFIG=:4096:8", "--json", "--"),
            *run._command(form, steps),
        )
        run.job = str(json.loads(submitted)["name"])
        return run

    def _command(self, form: str, steps: int) -> list[str]:
        return [
            *(sys.executable, str(EXAMPLES / f"{form}.py"), "--epochs", "1000", "--steps", str(steps)),
            *("--losses", str(self._directory / "losses"), "--weights", str(self._directory / "weights")),
        ]

    def until_steps(self, cluster: BenchCluster, more: int) -> None:
        """Wait until it has done so many steps more."""
        begun = self._losses()
        cluster.until(lambda: self._losses() >= begun + more, START_S, f"{self.job} trains")

    def result(self) -> tuple[str, str]:
        """Return its losses and the digest of its weights, once it has ended."""
        if self._process is not None and self._process.wait(RUN_S):
            raise BenchClusterError(f"a run alone ended with {self._process.returncode}")
        return (self._directory / "losses").read_text(), (self._directory / "weights").read_text()

    def is_over(self) -> bool:
        return (self._directory / "weights").exists()

    def _losses(self) -> int:
        losses = self._directory / "losses"
        return losses.read_text().count("\n") if losses.exists() else 0


def wants(size: int) -> tuple[str, ...]:
    """Options of a job with so many bytes of state."""
    return (
        *("--gpus", "1", "--cpus-per-gpu", "1", "--memory", f"{(2 * size >> 20) + 3072}M"),
        *("--gpu-memory", f"{(size >> 20) + 256}M", "--checkpoint-every", "never"),
    )
