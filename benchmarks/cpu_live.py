"""The live part of `ganger bench cpu`: real programs follow the phases of a real job.

Master, daemon, planner, agent and job are real, on a virtual GPU with declared cores. What the job's input pipeline
would take with the cores that it has is modelled: the job sleeps for that long, since the machine has too few cores. So
rates are as sure as sleeps are, whatever else the machine does.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Final

from benchmarks.bench_cluster import BenchCluster, BenchClusterError
from benchmarks.report import BenchReport

CORES: Final = 8
BATCH_S: Final = 0.1
TRAINING_CORES: Final = 2
EVALUATION_CORES: Final = 6
# Of each phase: long enough for all trials of the first ones, and then to see cores follow.
STEPS: Final = 600
EVALUATION_S: Final = 60.0
PHASES: Final = 4
LATE: Final = 20
COST: Final = 0.02
_START_S: Final = 60.0
_MOST_S: Final = 500.0
# Mini-batches of a phase that never got its cores.
_NEVER: Final = 10_000

JOB: Final = f"""
import time
import torch
import ganger
from ganger.injob.page_layout import Word
torch.set_num_threads(1)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.ones(8, 8)
job = ganger.attach(model=model, optimizer=optimizer)
def pipeline(most):
    time.sleep({BATCH_S} * most / min(most, max(1, job._control.page.get(Word.THREADS))))
for step in job.steps():
    pipeline({TRAINING_CORES})
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    job.step(loss)
    if step % {STEPS} == {STEPS - 1}:
        ends = time.time() + {EVALUATION_S}
        while time.time() < ends:
            pipeline({EVALUATION_CORES})
            job.safe_point()
"""


def measure_live(report: BenchReport) -> None:
    """Run it: some five minutes. Raises BenchClusterError where the job does not get through its phases."""
    report.say("live: the job's pipeline is modelled by sleeps, everything else is real")
    with BenchCluster(nodes=1, gpus=1, cores=CORES) as cluster:
        script = cluster.directory / "job.py"
        script.write_text(JOB)
        cluster.ganger("submit", "--gpus", "1", "--memory", "1G", "--", sys.executable, str(script))
        cluster.until(lambda: "running" in cluster.ganger("queue"), _START_S, "the job runs")
        late = _phases(report, cluster)
        found = json.loads(cluster.ganger("profile", "1", "--json"))["cores_curve"]
    enough = {one["phase"]: one["enough_millicores"] / 1000 for one in (found, *found["other_phases"])}
    for phase, cores in (("training", TRAINING_CORES), ("evaluation", EVALUATION_CORES)):
        report.at_most(f"live_{phase}_cores_off", abs(enough.get(phase, 0.0) - cores), 0)
        report.at_most(f"live_{phase}_batches_before_it_has_its_cores", max(late[phase], default=_NEVER), LATE)
    report.at_most("live_cost_as_reported", float(found["lost"]) / 3600.0, COST)


def _phases(report: BenchReport, cluster: BenchCluster) -> dict[str, list[int]]:
    """Return by phase after how many of its mini-batches the job had that phase's cores, for all but the first
    evaluations, in which these are found."""
    late: dict[str, list[int]] = {"training": [], "evaluation": []}
    wanted = {"training": TRAINING_CORES, "evaluation": EVALUATION_CORES}
    phase, seen, began, waits = "training", 0, 0, False
    ends = time.monotonic() + _MOST_S
    while seen < PHASES or waits:
        if time.monotonic() > ends:
            raise BenchClusterError(f"{seen} phases within {_MOST_S:g} s, {PHASES} were expected")
        job: dict[str, Any] = json.loads(cluster.ganger("show", "1", "--json"))
        time.sleep(0.1)
        if not (job["progress"] and job["gang"]):
            continue
        progress, cores = job["progress"], sum(job["gang"]["claims"][0]["millicores"]) / 1000
        evaluation = progress.get("evaluation")
        now = "evaluation" if evaluation else "training"
        done = evaluation["batches_in_row"] if evaluation else progress["step"] - began
        if now != phase:
            phase, seen, waits = now, seen + 1, seen > 0
            began = began if evaluation else STEPS * (progress["step"] // STEPS)
            done = evaluation["batches_in_row"] if evaluation else progress["step"] - began
            report.samples([{"phase": phase, "step": progress["step"], "batches": done, "cores": cores}])
        if waits and cores == wanted[phase]:
            late[phase].append(done)
            waits = False
            report.samples([{"phase": phase, "batches": done, "cores": cores}])
    return late
