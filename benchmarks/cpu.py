"""`ganger bench cpu`: how good the cores are that the default policy gives, and what it costs to find them.

A data-augmentation-heavy image job and a language job that needs one core, on a server with 24 cores: the numbers of
cores are those of AlexNet and of the language model on one P100 (Xiao et al., SoCC 2018 poster). The server is
modelled, in virtual time; the core, the planner's loop, the estimators and the tuning are those of a live cluster, with
the default policy and pace (`modelled_node`). Rates scatter by 2 % from one half second to the next.

* `alone`: each job alone on a server with one GPU. The level where it settles is compared with all other levels.
* `cost`: what the trials of the first hour cost each job in work, as the planner reports it, and by the modelled rates.
* `together`: both jobs on a server with two GPUs, against the even split of its cores.
* `phases`: a job that trains with 3 cores and evaluates with 16, at ten mini-batches a second; how many it does in each
  phase before it has that phase's cores. With rates that scatter by 10 %, the changes of cores in ten phases.
* `live`: such a job with real programs (`cpu_live`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from benchmarks.cpu_live import measure_live
from benchmarks.modelled_node import READ_S, Curve, ModelledNode, even_split
from benchmarks.report import BenchReport

CORES: Final = 24
HOUR_S: Final = 3600.0
QUICK_S: Final = 900.0
NEAR_BEST: Final = 0.97
ONE_LESS_LOSES: Final = 0.05
COST: Final = 0.02
NEVER_BELOW: Final = 0.98
PHASE_NOISE: Final = 0.1
LEARN_S: Final = 1200.0
PHASE_S: Final = 60.0
PHASES: Final = 10
LATE: Final = 20


def bounded(cores: float, steps_per_s: float) -> Curve:
    """Return the curve of a job whose input pipeline takes so many cores to feed its GPU at this rate."""
    return lambda given: steps_per_s * min(1.0, given / cores)


# By the poster's figure 2.
JOBS: Final[Mapping[str, Curve]] = {"image": bounded(19.0, 8.0), "language": bounded(1.0, 12.0)}


CASES: Final = ("modelled", "live")


def main(quick: bool = False, only: str = "") -> dict[str, Any]:
    """Run it; `quick`: less time, and nothing live; `only`: one of CASES. Raises ValueError for another."""
    if only and only not in CASES:
        raise ValueError(f"there is no case {only!r}: there are {', '.join(CASES)}")
    report = BenchReport("cpu")
    if only != "live":
        _modelled(report, quick)
    if only == "live" or not (only or quick):
        measure_live(report)
    return report.result()


def _modelled(report: BenchReport, quick: bool) -> None:
    report.say("the server is modelled, in virtual time; core, planner and estimators are those of a cluster")
    seconds = QUICK_S if quick else HOUR_S
    for number, (name, curve) in enumerate(JOBS.items()):
        _alone(report, name, curve, seconds, seed=number)
    _together(report, seconds)
    _phases(report)


def _alone(report: BenchReport, name: str, curve: Curve, seconds: float, seed: int) -> None:
    node = ModelledNode(1, CORES, seed=seed)
    number = node.submit(curve, signature=1)
    began = node.jobs[number].steps
    levels = [node.cores(number)]
    while node.now < seconds:
        node.run(1.0)
        if node.cores(number) != levels[-1]:
            levels.append(node.cores(number))
            report.samples([{"job": name, "second": node.now, "cores": levels[-1]}])
    chosen = _settled(node, number)
    by_level = {level: curve(level) for level in range(1, CORES + 1)}
    best = max(by_level.values())
    report.figure(f"{name}_chosen_cores", chosen)
    report.figure(f"{name}_levels_tried", len(set(levels)))
    report.at_least(f"{name}_rate_by_best", curve(chosen) / best, NEAR_BEST)
    if chosen > 1.0:
        loss = 1.0 - curve(chosen - 1.0) / curve(chosen)
        report.at_least(f"{name}_loss_with_one_core_less", loss, ONE_LESS_LOSES)
    reported = node.state.cores_curves[number]
    report.figure(f"{name}_trials_seconds", reported.tried_s)
    report.at_most(f"{name}_cost_as_reported", reported.lost_s / HOUR_S, COST)
    # Against a job that has its best rate from its first second on: what it began with counts, too.
    lost_s = seconds - (node.jobs[number].steps - began) / best
    report.at_most(f"{name}_cost_by_rates", max(0.0, lost_s) / HOUR_S, COST)


def _settled(node: ModelledNode, number: int) -> float:
    """Return the cores of a job once none are under trial."""
    for _ in range(600):
        if not node.is_on_trial(number):
            break
        node.run(1.0)
    return node.cores(number)


def _together(report: BenchReport, seconds: float) -> None:
    node = ModelledNode(2, CORES)
    numbers = {name: node.submit(curve, signature=at) for at, (name, curve) in enumerate(JOBS.items(), 1)}
    node.run(seconds)
    even = even_split(JOBS, CORES)
    gains = {}
    for name, number in numbers.items():
        chosen = _settled(node, number)
        gains[name] = JOBS[name](chosen) / even[name]
        report.figure(f"together_{name}_cores", chosen)
        report.at_least(f"together_{name}_by_even_split", gains[name], NEVER_BELOW)
    report.at_least("together_by_even_split", sum(gains.values()) / len(gains), 1.02)


def _phases(report: BenchReport) -> None:
    training, evaluation = bounded(3.0, 10.0), bounded(16.0, 10.0)
    node = ModelledNode(1, CORES, noise=PHASE_NOISE)
    number = node.submit(training, signature=1)
    job = node.jobs[number]
    node.run(LEARN_S)
    job.evaluation = evaluation
    node.run(LEARN_S)
    job.evaluation = None
    node.run(PHASE_S)
    late, changes = [0.0, 0.0], 0
    for _ in range(PHASES // 2):
        for phase, curve in enumerate((evaluation, None)):
            job.evaluation = curve
            held, began = node.cores(number), job.steps + job.evaluated
            for _ in range(round(PHASE_S / READ_S)):
                node.run(READ_S)
                if node.cores(number) != held:
                    changes += 1
                    held = node.cores(number)
                    late[phase] = max(late[phase], job.steps + job.evaluated - began)
                    report.samples([{"evaluates": curve is not None, "second": node.now, "cores": held}])
            report.figure("phases_evaluation_cores" if curve else "phases_training_cores", held)
    report.at_most("phases_batches_before_evaluation_has_its_cores", late[0], LATE)
    report.at_most("phases_steps_before_training_has_its_cores", late[1], LATE)
    report.at_most("phases_changes_beyond_one_for_each", abs(changes - PHASES), 0)


if __name__ == "__main__":
    print(main())
