"""`ganger bench gpu`: what Ganger does on a real GPU, on a machine with one.

Each case stands alone: one that fails is reported with its reason, and the others go on. Device memory is the driver's
figure (NVML) for the process. The cluster's programs are real; where two nodes are needed, two daemons have the same
device. Without a device, `virtual` runs the same cases on virtual ones and processors, which shows only that they run.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from ganger.injob.page import Page
from ganger.v1 import job_pb2, resources_pb2, scheduling_pb2
from ganger_daemon.devices.inventory import Device
from ganger_daemon.devices.nvml import NoDriverError, NvmlDevices

from benchmarks import gpu_process
from benchmarks.bench_cluster import START_S, BenchCluster
from benchmarks.gpu_jobs import RUN_S, DeviceMemory, ExampleRun, OpaqueJob, wants
from benchmarks.move import measure_moves
from benchmarks.pack import ForcedPlans, step_rates
from benchmarks.report import BenchReport, quantile
from benchmarks.step_notes import HEAVY, NOTING, shares_of_cycles, steps_of, switches, turns_of
from benchmarks.switch_timing import PageWatch

MEBIBYTE = 1 << 20
# Memory that a virtual device has unless it is declared.
VIRTUAL_BYTES = 4 << 30
SIZES, QUICK_SIZES = (10**9, 8 * 10**9), (10**9,)
CYCLES, QUICK_CYCLES = 3, 2
QUANTUM_S, SWITCHES, QUICK_SWITCHES, SLICED_BYTES = 5.0, 6, 4, 300 * 10**6
LEAST_SWITCHES, SWITCHES_S = 2, 45.0
# Quanta grow where switches take long.
TURNS_S = 120.0
MODEL_STEPS, QUICK_MODEL_STEPS = 1500, 1000
HOOK_STEPS, QUICK_HOOK_STEPS = 4000, 1000
PACK_ROUNDS, QUICK_PACK_ROUNDS, PACK_S = 2, 1, 4.0
ORDER_S = 60.0
# Of the state's bytes, what the driver must see freed after OFFLOAD.
LEAST_FREED = 0.95

# Arguments: bytes of state, notes, seconds of waiting in a step, width of the matrices that a step multiplies.
JOB = f"""
import sys
import ganger
{NOTING}{HEAVY}
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.set_num_threads(1)
model = Heavy(int(sys.argv[1])).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
x = torch.ones(64, 64, device=device)
wait, width = float(sys.argv[3]), int(sys.argv[4])
matrix = torch.randn(width, width, device=device, dtype=torch.bfloat16)
note = note_to(sys.argv[2])
job = ganger.attach(model=model, optimizer=optimizer)
for step in job.steps():
    begin = now()
    time.sleep(wait)
    for _ in range(4):
        matrix @ matrix
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loss.item()
    note(step + 1, begin)
    job.step(loss)
"""

# Seconds of a step of a small model with and without the boundary, in turns. The device is waited for at the ends only.
HOOK = """
import json, sys, time
import torch
import ganger
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
x = torch.ones(64, 64, device=device)
job = ganger.attach(model=model, optimizer=optimizer)
def timed(steps, boundary):
    began = time.perf_counter()
    for _ in range(steps):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if boundary:
            job.step(loss)
    loss.item()
    return (time.perf_counter() - began) / steps
timed(200, True)
found = [[timed(int(sys.argv[2]) // 8, boundary) for boundary in (False, True)] for _ in range(8)]
with open(sys.argv[1], "w") as file:
    json.dump(found, file)
"""


OF_THE_DRIVER = ("process", "image")
# That which takes longest comes last.
OF_A_JOB = ("opaque", "offload", "hook", "move", "slice", "pack", "identity")
# After this long the other cases are quick ones, and after this long none is begun: all take eight minutes at most.
LEISURE_S, LATEST_S = 200.0, 390.0


def case_names(is_virtual: bool) -> tuple[str, ...]:
    return OF_A_JOB if is_virtual else OF_THE_DRIVER + OF_A_JOB


class GpuCases:
    """The cases, a method each, which writes its figures to the report."""

    def __init__(self, report: BenchReport, is_quick: bool, is_virtual: bool) -> None:
        self._report, self._is_quick, self._is_virtual = report, is_quick, is_virtual

    def run(self, case: str) -> None:
        """Run one of `case_names`."""
        method: Callable[[], None] = getattr(self, case)
        method()

    def process(self) -> None:
        """A process without Ganger: the driver's calls alone free and restore its memory."""
        for size in self._sizes():
            for name, value in gpu_process.measure_calls(size, self._report.say).items():
                self._report.figure(f"process_{_size_name(size)}_{name}", value)

    def image(self) -> None:
        """The same process, written to files by CRIU and restored from them."""
        if not gpu_process.criu_program():
            self._report.say("image: there is no CRIU")
            return
        for name, value in gpu_process.measure_image(QUICK_SIZES[0], self._report.say).items():
            self._report.figure(f"image_{_size_name(QUICK_SIZES[0])}_{name}", value)

    def opaque(self) -> None:
        """The same process as a job without an agent: the driver takes its device in place, and its image is saved and
        moves to another daemon."""
        size = QUICK_SIZES[0]
        with self._cluster("--policy", "fifo", "--no-planner", nodes=2, is_run_in_memory=False) as cluster:
            job = OpaqueJob(cluster, self._script(cluster, "opaque.py", gpu_process.PROGRAM), size)
            memory, name = DeviceMemory(), f"opaque_{_size_name(size)}"
            self._report.figure(f"{name}_used_before_bytes", float(memory.used_bytes(job.pid)))
            self._report.figure(f"{name}_offload_seconds", job.order("suspend", "--level", "offload"))
            if not self._is_virtual:
                # A virtual device has no memory of its own.
                self._report.figure(f"{name}_used_while_offloaded_bytes", float(memory.used_bytes(job.pid)))
            self._report.figure(f"{name}_offload_resume_seconds", job.order("resume"))
            self._report.figure(f"{name}_used_after_resume_bytes", float(memory.used_bytes(job.pid)))
            memory.close()
            if not gpu_process.criu_program():
                self._report.say("opaque: there is no CRIU, so it is neither saved nor moved")
                return
            self._report.figure(f"{name}_image_seconds", job.order("suspend", "--level", "checkpoint"))
            self._report.figure(f"{name}_image_resume_seconds", job.order("resume"))
            self._report.figure(f"{name}_move_seconds", job.order("move"))

    def offload(self) -> None:
        """What the driver sees freed, what stays, and how long it takes."""
        for size in self._sizes():
            with self._cluster("--policy", "fifo", "--no-planner") as cluster:
                self._offload(cluster, size)

    def _offload(self, cluster: BenchCluster, size: int) -> None:
        name = _size_name(size)
        job, notes = self._submit(cluster, size)
        pid = steps_of(notes)[-1].pid
        memory = DeviceMemory()
        before = memory.used_bytes(pid)
        self._suspend(cluster, job, notes, "pause", f"offload_{name}_pause", memory)
        watch, residue = self._suspend(cluster, job, notes, "offload", f"offload_{name}", memory)
        report = self._report
        report.figure(f"offload_{name}_used_before_bytes", float(before))
        report.figure(f"offload_{name}_residue_bytes", float(residue))
        report.figure(f"offload_{name}_used_after_resume_bytes", float(memory.used_bytes(pid)))
        report.figure(f"offload_{name}_reported_freed_bytes", float(watch.freed_bytes))
        memory.close()
        report.at_least(f"offload_{name}_freed_share_of_state", (before - residue) / watch.freed_bytes, LEAST_FREED)

    def _suspend(
        self, cluster: BenchCluster, job: str, notes: Path, level: str, name: str, memory: DeviceMemory
    ) -> tuple[PageWatch, int]:
        """Suspend and resume some times; return what the pages showed, and the most memory that was left meanwhile."""
        cycles = QUICK_CYCLES if self._is_quick else CYCLES
        path = str(next(iter(cluster.pages().values())))
        with closing(Page.open(path, writable=False)) as page:
            epoch = page.identity().epoch
        residue = 0
        with PageWatch(cluster) as watch:
            for number in range(cycles):
                self._report.say(f"{name}: cycle {number + 1} of {cycles}")
                cluster.ganger("suspend", job, "--level", level)
                residue = max(residue, memory.used_bytes(steps_of(notes)[-1].pid))
                done = len(steps_of(notes))
                cluster.ganger("resume", job)
                cluster.until(
                    lambda done=done: len(steps_of(notes)) > done + 20,  # type: ignore[misc]
                    ORDER_S,
                    f"{job} goes on",
                )
        for part, each in watch.parts({epoch: 0}).items():
            if level == "pause" and part != "first_step":
                continue
            self._report.samples({"case": name, "part": part, "seconds": seconds} for seconds in each)
            self._report.figure(f"{name}_{part}_p50_seconds", quantile(each, 0.5))
            # The first OFFLOAD page-locks the arena.
            self._report.figure(f"{name}_{part}_first_seconds", each[0])
        return watch, residue

    def hook(self) -> None:
        """What a boundary costs a step on the device."""
        with self._cluster("--policy", "fifo", "--no-planner") as cluster:
            found = cluster.directory / "hook.json"
            steps = QUICK_HOOK_STEPS if self._is_quick else HOOK_STEPS
            cluster.ganger(
                *("submit", *wants(0), "--directory", str(cluster.directory), "--json", "--"),
                *(sys.executable, self._script(cluster, "hook.py", HOOK), str(found), str(steps)),
            )
            cluster.until(lambda: found.exists() and found.read_text().endswith("]]"), START_S, "the steps are timed")
            pairs = json.loads(found.read_text())
        without, with_boundary = (quantile([pair[i] for pair in pairs], 0.5) for i in (0, 1))
        self._report.figure("hook_step_without_boundary_microseconds", 1e6 * without)
        self._report.figure("hook_boundary_microseconds", 1e6 * (with_boundary - without))

    def identity(self) -> None:
        """A small real model, attached and unmodified: suspended at every level and moved, its weights and losses are
        those of a run alone. Two runs alone are compared first: a kernel may be indeterminate by itself."""
        steps = QUICK_MODEL_STEPS if self._is_quick else MODEL_STEPS
        with self._cluster("--policy", "fifo", "--no-planner", nodes=2) as cluster:
            for form in ("attached", "plain"):
                alone = [ExampleRun.alone(cluster.directory / f"{form}-{number}", form, steps) for number in range(2)]
                results = [run.result() for run in alone]
                self._report.figure(f"identity_{form}_alone_twice_equal", float(results[0] == results[1]))
                self._report.say(f"identity: {form}, suspended and moved")
                run = ExampleRun.under(cluster, cluster.directory / form, form, steps)
                for order in (("suspend", "--level", "pause"), ("suspend", "--level", "offload"), ("move",)):
                    run.until_steps(cluster, 50)
                    cluster.ganger(order[0], run.job, *order[1:])
                    if order[0] == "suspend":
                        cluster.ganger("resume", run.job)
                run.until_steps(cluster, 50)
                cluster.ganger("suspend", run.job, "--level", "checkpoint")
                cluster.ganger("resume", run.job)
                cluster.until(run.is_over, RUN_S, f"{run.job} ends")
                is_equal = run.result() == results[0]
                self._report.at_least(f"identity_{form}_equals_alone", float(is_equal), 1.0)

    def move(self) -> None:
        """From one daemon to another: the state leaves the device, crosses loopback and returns to the device."""
        with self._cluster("--policy", "fifo", "--no-planner", nodes=2) as cluster:
            script = self._script(cluster, "job.py", JOB)
            for size in self._sizes():
                moves = 1 if self._is_quick else 2
                found = measure_moves(cluster, size, moves, self._report, (script,), ("0.002", "64"))
                name = f"move_{_size_name(size)}"
                for part in ("pause", "stop", "copy", "start", "first_step"):
                    middle = quantile([getattr(sample, part) for sample in found], 0.5)
                    self._report.figure(f"{name}_{part}_p50_seconds", middle)
                raw = quantile([sample.raw_bytes_per_second for sample in found], 0.5)
                self._report.figure(f"{name}_raw_stream_bytes_per_second", raw)
                pause = quantile([sample.pause for sample in found], 0.5)
                self._report.figure(f"{name}_pause_over_raw_ratio", pause / (size / raw))

    def slice(self) -> None:
        """Two time-sliced jobs on the device, in slices of five seconds, by a plan. At the end of its slice a job keeps
        its device memory, or frees it."""
        for level in (job_pb2.SUSPEND_LEVEL_PAUSE, job_pb2.SUSPEND_LEVEL_OFFLOAD):
            with self._cluster("--policy", "gandiva", "--quantum", f"{QUANTUM_S:g}s", "--no-planner") as cluster:
                name = job_pb2.SuspendLevel.Name(level).rpartition("_")[2].lower()
                self._slice(cluster, f"slice_{name}", level)

    def _slice(self, cluster: BenchCluster, name: str, level: job_pb2.SuspendLevel.ValueType) -> None:
        wanted = QUICK_SWITCHES if self._is_quick else SWITCHES
        size = SLICED_BYTES
        pair = [self._enter(cluster, size) for _ in range(2)]
        jobs, notes = [job for job, _ in pair], [path for _, path in pair]
        rows = [
            scheduling_pb2.SliceChange(slices=[number], claims=[_claim(size, False)], level=level)
            for number in range(2)
        ]
        for row in rows:
            row.quantum.FromMilliseconds(int(1000 * QUANTUM_S))
        ForcedPlans(cluster).until_agreed(
            {job: {"slice": row, "group": 1} for job, row in zip(jobs, rows, strict=True)}
        )
        for path in notes:
            cluster.until(lambda path=path: len(steps_of(path)) >= 20, START_S, "both jobs train")  # type: ignore[misc]
        with PageWatch(cluster) as watch:
            began = _now()
            self._report.say(f"{name}: {wanted} switches")

            def are_enough() -> bool:
                # The daemon lengthens slices whose switches are long: then there are fewer of them.
                least = LEAST_SWITCHES if (_now() - began) / 1e9 > SWITCHES_S else wanted
                return len(turns_of([_since(path, began) for path in notes])) > least + 1

            cluster.until(are_enough, TURNS_S, "the jobs are time-sliced")
            ended = _now()
        steps = [_since(path, began) for path in notes]
        dead, _ = switches(steps, began, ended)
        self._report.samples({"case": name, "dead_seconds": gap} for gap in dead)
        self._report.figure(f"{name}_switches", float(len(dead)))
        self._report.figure(f"{name}_dead_p50_seconds", quantile(dead, 0.5))
        self._report.figure(f"{name}_dead_share", sum(dead) / ((ended - began) / 1e9))
        for number, share in enumerate(shares_of_cycles(turns_of(steps), 2)):
            self._report.figure(f"{name}_share_of_job{number + 1}", share)
        for part, each in watch.parts(dict.fromkeys(range(1, 9), 0)).items():
            if part in ("order", "wait_for_k", "offload", "release_seen", "first_step"):
                self._report.figure(f"{name}_{part}_p50_seconds", quantile(each, 0.5))

    def pack(self) -> None:
        """Two jobs on the device at once: their rates alone and together, for two that wait and two that compute."""
        rounds = QUICK_PACK_ROUNDS if self._is_quick else PACK_ROUNDS
        width = 256 if self._is_virtual else 8192
        for name, workload in (("waiting", ("0.02", "64")), ("computing", ("0", str(width)))):
            with self._cluster("--policy", "gandiva", "--quantum", "never", "--no-planner") as cluster:
                gains = []
                plans = ForcedPlans(cluster)
                pair = [self._submit(cluster, 10**8, workload, plans, number > 0)[0] for number in range(2)]
                for number in range(rounds):
                    self._report.say(f"pack, {name}: round {number + 1} of {rounds}")
                    together = step_rates(cluster, pair, PACK_S)
                    alone = []
                    for left, other in ((0, 1), (1, 0)):
                        plans.park(pair[other])
                        alone += step_rates(cluster, [pair[left]], PACK_S)
                        plans.until_approved(pair[other], resume=scheduling_pb2.ResumeChange())
                    gains.append(sum(a / b for a, b in zip(together, alone, strict=True)))
                    self._report.samples([{"case": f"pack_{name}", "alone": alone, "together": together}])
                self._report.figure(f"pack_{name}_gain", quantile(gains, 0.5))

    # -- helpers

    def _sizes(self) -> Sequence[int]:
        return QUICK_SIZES if self._is_quick or self._is_virtual else SIZES

    def _cluster(self, *master: str, nodes: int = 1, is_run_in_memory: bool = True) -> BenchCluster:
        devices: dict[str, Any] = {"gpus": 1, "cores": 4, "memory": "64G"} if self._is_virtual else {"gpus": None}
        daemon = ("--verbose",)
        return BenchCluster(nodes=nodes, master=master, daemon=daemon, is_run_in_memory=is_run_in_memory, **devices)

    def be_quick(self) -> None:
        self._is_quick = True

    def _script(self, cluster: BenchCluster, name: str, text: str) -> str:
        (cluster.directory / name).write_text(text)
        return str(cluster.directory / name)

    def _submit(
        self,
        cluster: BenchCluster,
        size: int,
        workload: tuple[str, str] = ("0.002", "64"),
        plans: ForcedPlans | None = None,
        is_shared: bool = False,
    ) -> tuple[str, Path]:
        """Return the job and its notes, once it trains. With `plans` it starts by a plan, on a device that it may
        share."""
        job, notes = self._enter(cluster, size, workload)
        if plans is not None:
            plans.until_approved(job, start=scheduling_pb2.StartChange(claims=[_claim(size, is_shared)]))
        cluster.until(lambda: len(steps_of(notes)) >= 20, START_S, f"{job} trains")
        return job, notes

    def _enter(self, cluster: BenchCluster, size: int, workload: tuple[str, str] = ("0.002", "64")) -> tuple[str, Path]:
        notes = cluster.directory / f"notes-{len(list(cluster.directory.glob('notes-*')))}"
        notes.touch()
        script = self._script(cluster, "job.py", JOB)
        submitted = cluster.ganger(
            *("submit", *wants(size), "--directory", str(cluster.directory), "--json", "--"),
            *(sys.executable, script, str(size), str(notes), *workload),
        )
        return str(json.loads(submitted)["name"]), notes


def main(quick: bool = False, only: str = "", virtual: bool = False) -> dict[str, object]:
    """Run it; `quick`: few cycles of small states; `only`: one case; `virtual`: without a device.

    Raises ValueError for a case that does not exist.
    """
    driver, devices, capabilities = devices_here()
    if not devices and not virtual:
        return {"name": "gpu", "skipped": "this machine has no GPU with a driver that answers"}
    names = case_names(virtual)
    if only and only not in names:
        raise ValueError(f"there is no case {only!r}: there are {', '.join(names)}")
    report = BenchReport("gpu")
    cases = GpuCases(report, quick, virtual)
    failed: dict[str, str] = {}
    started = time.monotonic()
    for name in [only] if only else names:
        began = time.monotonic()
        if began - started > LEISURE_S:
            cases.be_quick()
        try:
            if began - started > LATEST_S:
                raise TimeoutError(f"not begun, {began - started:.0f} s after the start: --only {name} runs it alone")
            cases.run(name)
        except Exception as error:  # The other cases go on
            report.say(traceback.format_exc())
            failed[name] = str(error) or type(error).__name__
        report.figure(f"{name}_case_seconds", time.monotonic() - began)
        # What was measured so far is on the terminal, whatever ends the run.
        report.say(f"{name} took {time.monotonic() - began:.0f} s: {report.figures_of(name)}")
    result = report.result()
    named = [{"name": one.name, "memory_bytes": one.memory_bytes} for one in devices]
    facts = {"driver": driver, "devices": named, "capabilities": dict(capabilities), "failed": failed}
    return {**result, **facts, "ok": bool(result["ok"]) and not failed}


def devices_here() -> tuple[str, tuple[Device, ...], Mapping[str, str]]:
    """Return the driver's version, the devices and what a daemon reports of them; no devices without a driver."""
    try:
        devices = NvmlDevices()
    except NoDriverError:
        return "", (), {}
    found = devices.inventory
    capabilities = devices.capabilities
    devices.close()
    return found.driver, found.devices, capabilities


def _claim(size: int, is_shared: bool) -> resources_pb2.Claim:
    return resources_pb2.Claim(
        node="nodes/n1",
        device_mask=1,
        millicores=[1000],
        memory_bytes=((2 * size >> 20) + 3072) * MEBIBYTE,
        arena_bytes=((size >> 20) + 256) * MEBIBYTE * 11 // 10,
        tasks=[1],
        shared_mask=1 if is_shared else 0,
    )


def _since(path: Path, began: int) -> list[Any]:
    return list(itertools.dropwhile(lambda step: step.begin < began, steps_of(path)))


def _now() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def _size_name(size: int) -> str:
    return f"{size // 10**9}GB" if size >= 10**9 else f"{size // 10**6}MB"
