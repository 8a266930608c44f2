"""The jobs of `ganger bench day`: what a trace makes them, the program that each rank runs, and the simulator's trace.

Pure. Every tenth job of the trace that comes with Ganger (a week of a cluster of 160 GPUs) becomes a job of a cluster
of eight: arrivals keep their proportions, gangs are half as large, 4 GPUs at most, and durations shrink by one factor
that offers the wanted load. Models take turns. Two of them keep their GPU busy and two wait for their data, each by the
utilisation that Gandiva published (OSDI 2018, table 1); elastic jobs scale as ElasticFlow measured (ASPLOS 2023). The
simulator has the same numbers.

**A virtual GPU.** A rank waits for the time in which its GPU would compute, and holds the lock of its device meanwhile:
co-located ranks compute one after the other, as on a GPU. So a step is mostly a wait, and jobs on different GPUs hardly
slow each other on a machine with few cores. Beside it each rank trains a small network. A data-bound job also prepares
every sample on the CPU, and waits for the rest of its input.

**The same result everywhere.** Each rank computes the gradients of its own samples, one by one. All ranks receive all
of them and add them in the order of the samples, so the result has the same bits at every number of GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

# Samples of a step: every number of GPUs up to four divides them.
BATCH = 12
STEP_S = 0.1
LEAST_S, MOST_S = 2.0, 60.0
LARGEST_GANG = 4
GPUS = 8
# Share of a step in which the GPU computes (Gandiva, table 1), and CPU time in seconds that its samples take.
UTILISATION = {"resnet50": 0.940, "vae": 0.087, "resnext50": 0.989, "superres": 0.141}
_CPU_S = {"vae": 0.006, "superres": 0.006}
ELASTIC_MODEL, ELASTIC_BATCH = "resnet50", 256
# Host memory that a job asks for, for each GPU, in MiB.
MEMORY_MIB = 512

PROGRAM = """
import fcntl, hashlib, json, math, operator, os, sys, time
from pathlib import Path
import torch
from torch import distributed, nn
import ganger

job_file = sys.argv[1]
plan = json.loads(Path(job_file).read_text())
torch.set_num_threads(1)
torch.manual_seed(plan["seed"])
world = int(os.environ.get("WORLD_SIZE", "1"))
if world > 1:
    distributed.init_process_group("gloo")
net = nn.Linear(8, 1).double()
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
job = ganger.attach(model=net, optimizer=optimizer)
count = plan["steps"] * plan["batch"]
generator = torch.Generator().manual_seed(plan["seed"])
inputs = torch.randn(count, 8, generator=generator, dtype=torch.float64)
loader = job.dataloader(
    torch.utils.data.TensorDataset(torch.arange(count), inputs), global_batch=plan["batch"], shuffle=True
)
is_fast = "GANGER_PAGE" not in os.environ
engine = None
if not is_fast:
    node = Path(os.environ["GANGER_PAGE"]).parents[2].name
    # The devices of all ranks of the job on this node.
    devices = os.environ["GANGER_DEVICES"].split(",")
    device = devices[int(os.environ.get("LOCAL_RANK", "0")) % len(devices)]
    engine = open(f"{plan['engines']}/{node}-{device}", "w")
step_s = plan["step_s"] / plan["speeds"][str(world)]
busy_s = plan["utilisation"] * step_s
cpu_s = 0.0 if is_fast else plan["cpu_s"] / plan["batch"]
picture = torch.ones(64, 64)


def prepared(x):
    # Takes processor time, and changes no bit.
    end = time.process_time() + cpu_s
    while time.process_time() < end:
        picture.mul(1.0).sum()
    return x


def gradient(x, weights, bias):
    # Of (tanh(w x + b) - mean(x * x)) ** 2, in plain floats: quick, and the same bits in every batch.
    output = math.tanh(sum(map(operator.mul, weights, x), bias))
    error = output - sum(map(operator.mul, x, x)) / len(x)
    slope = 2.0 * error * (1.0 - output * output)
    return [error * error, *[slope * one for one in x], slope]


def wait_until(due):
    if not is_fast and (left := due - time.monotonic()) > 0:
        time.sleep(left)


def compute():
    if engine is None:
        return
    fcntl.flock(engine, fcntl.LOCK_EX)
    time.sleep(busy_s)
    fcntl.flock(engine, fcntl.LOCK_UN)


due = 0.0
with open(plan["notes"], "a", buffering=1) as notes:
    for epoch in job.epochs(1):
        for chosen, x in loader:
            # From due time to due time: what a step takes does not depend on how fast the machine is.
            now = time.monotonic()
            begin = due if now < due + 0.25 * step_s else now
            due = begin + step_s
            weights, bias = net.weight[0].tolist(), net.bias.item()
            rows = zip(chosen.tolist(), x.tolist())
            own = torch.tensor([[at, *gradient(prepared(one), weights, bias)] for at, one in rows], dtype=torch.float64)
            wait_until(due - busy_s)
            compute()
            parts = [own]
            if world > 1:
                parts = [torch.empty_like(own) for _ in range(world)]
                distributed.all_gather(parts, own)
            whole = torch.cat(parts)
            total = whole[whole[:, 0].argsort()][:, 1:].sum(0) / plan["batch"]
            at = 1
            for parameter in net.parameters():
                parameter.grad = total[at : at + parameter.numel()].reshape(parameter.shape).clone()
                at += parameter.numel()
            optimizer.step()
            done = job.step_count + 1
            if job.rank == 0 and not is_fast and (done % plan["note_every"] == 0 or done == plan["steps"]):
                notes.write(f"{done} {time.time()} {world}\\n")
            job.step(total[0])
if job.rank == 0:
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in net.parameters())
    result = {"steps": job.step_count, "weights": hashlib.sha256(weights).hexdigest()}
    Path(plan["result"]).write_text(json.dumps(result))
"""


@dataclass(frozen=True, slots=True)
class DayJob:
    """A job of the day. `at_s`: its submission, in seconds from the first. `duration_s`: with its `gpus`, alone;
    `most_gpus`: more than `gpus` for an elastic job."""

    name: str
    at_s: float
    gpus: int
    most_gpus: int
    duration_s: float
    model: str

    @property
    def steps(self) -> int:
        return round(self.duration_s / STEP_S)

    @property
    def is_elastic(self) -> bool:
        return self.most_gpus > self.gpus

    @property
    def is_data_bound(self) -> bool:
        return self.model in _CPU_S


@dataclass(frozen=True, slots=True)
class TraceRow:
    submit_s: float
    gpus: int
    duration_s: float


def day_of(rows: Sequence[TraceRow], span_s: float, load: float) -> list[DayJob]:
    """Return the jobs of a day whose submissions take `span_s` seconds and offer `load` of the GPUs meanwhile."""
    gangs = [min(LARGEST_GANG, max(1, row.gpus // 2)) for row in rows]
    factor = _factor(rows, gangs, load * GPUS * span_s)
    first_s, last_s = rows[0].submit_s, rows[-1].submit_s
    models = list(UTILISATION)
    found = []
    for number, (row, gpus) in enumerate(zip(rows, gangs, strict=True)):
        is_elastic = number % (2 * len(models)) == 0 and gpus < LARGEST_GANG
        found.append(
            DayJob(
                name=f"job{number:02d}",
                at_s=(row.submit_s - first_s) / (last_s - first_s) * span_s,
                gpus=gpus,
                most_gpus=LARGEST_GANG if is_elastic else gpus,
                duration_s=_shrunk_s(row, factor),
                model=models[number % len(models)],
            )
        )
    return found


def _shrunk_s(row: TraceRow, factor: float) -> float:
    return min(MOST_S, LEAST_S + factor * row.duration_s)


def _factor(rows: Sequence[TraceRow], gangs: Sequence[int], gpu_s: float) -> float:
    """Return the factor of durations with which all jobs together take so many GPU-seconds."""
    low, high = 1e-9, 1.0
    for _ in range(100):
        factor = math.sqrt(low * high)
        offered = sum(gpus * _shrunk_s(row, factor) for row, gpus in zip(rows, gangs, strict=True))
        low, high = (low, factor) if offered > gpu_s else (factor, high)
    return factor


def plan_of(job: DayJob, speeds: Mapping[int, float], directory: str) -> dict[str, object]:
    """Return what `PROGRAM` reads. `speeds`: by number of GPUs, relative to `job.gpus`; files lie in `directory`."""
    return {
        "seed": int(job.name.removeprefix("job")) + 1,
        "steps": job.steps,
        "batch": BATCH,
        "step_s": STEP_S,
        "speeds": {str(gpus): speed for gpus, speed in speeds.items()},
        "utilisation": UTILISATION[job.model],
        "cpu_s": _CPU_S.get(job.model, 0.0),
        "note_every": 5,
        "engines": directory,
        "notes": f"{directory}/{job.name}.notes",
        "result": f"{directory}/{job.name}.result",
    }


@dataclass(frozen=True, slots=True)
class DayRun:
    """What became of a job. Seconds, from the first submission; `step_s`: the median of its steps at its own size;
    `end_s`: from its last step until it had succeeded."""

    name: str
    submit_s: float
    jct_s: float
    step_s: float
    end_s: float
    steps: int
    preemptions: int
    moves: int
    resizes: int
    weights: str

    @property
    def alone_s(self) -> float:
        """Return what it takes from its first step, without any pause."""
        return (self.steps - 1) * self.step_s + self.end_s

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def simulator_trace(jobs: Iterable[DayJob], submit_s: Mapping[str, float], alone_s: Mapping[str, float]) -> str:
    """Return the CSV file that `ganger simulate` reads. By name: `submit_s`, when each was submitted; `alone_s`, its
    run time with its own GPUs, from its first step to its end."""
    lines = ["job_id,submit_time_s,gpus,duration_s,memory_mib,model,batch_size,min_gpus,max_gpus"]
    for job in jobs:
        batch = ELASTIC_BATCH if job.model == ELASTIC_MODEL else ""
        sizes = f"{job.gpus},{job.most_gpus}" if job.is_elastic else ","
        times = f"{submit_s[job.name]:.3f},{job.gpus},{alone_s[job.name]:.3f}"
        lines.append(f"{job.name},{times},{MEMORY_MIB * job.gpus},{job.model},{batch},{sizes}")
    return "\n".join(lines) + "\n"
