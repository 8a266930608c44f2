"""`ganger bench cpu`: how good the cores are that the default policy gives, and what it costs to find them.

A data-augmentation-heavy image job and a language job that needs one core, on a server with 24 cores: the numbers of
cores are those of AlexNet and of the language model on one P100 (Xiao et al., SoCC 2018 poster). The server is
modelled, in virtual time; the core, the planner's loop, the estimators and the tuning are those of a live cluster, with
the default policy and pace (`modelled_node`). Rates scatter by 2 % from second to second.

* `alone`: each job alone on a server with one GPU. The level where it settles is compared with all other levels.
* `cost`: what the trials of the first hour cost each job in work, as the planner reports it, and by the modelled rates.
* `together`: both jobs on a server with two GPUs, against the even split of its cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from benchmarks.modelled_node import Curve, ModelledNode, even_split
from benchmarks.report import BenchReport

CORES: Final = 24
HOUR_S: Final = 3600.0
QUICK_S: Final = 900.0
NEAR_BEST: Final = 0.97
ONE_LESS_LOSES: Final = 0.05
COST: Final = 0.02
NEVER_BELOW: Final = 0.98


def bounded(cores: float, steps_per_s: float) -> Curve:
    """Return the curve of a job whose input pipeline takes so many cores to feed its GPU at this rate."""
    return lambda given: steps_per_s * min(1.0, given / cores)


# By the poster's figure 2.
JOBS: Final[Mapping[str, Curve]] = {"image": bounded(19.0, 8.0), "language": bounded(1.0, 12.0)}


def main(only: str | None = None, quick: bool = False) -> dict[str, Any]:
    report = BenchReport("cpu")
    report.say("the server is modelled, in virtual time; core, planner and estimators are those of a cluster")
    seconds = QUICK_S if quick else HOUR_S
    for number, (name, curve) in enumerate(JOBS.items()):
        _alone(report, name, curve, seconds, seed=number)
    _together(report, seconds)
    return report.result()


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


if __name__ == "__main__":
    print(main())
