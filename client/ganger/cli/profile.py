"""`ganger profile`: what was measured of a job with several numbers of CPU cores, as a table and a plot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import click

from ganger.cli.options import JobType, json_option, open_client

if TYPE_CHECKING:
    from ganger.v1.scheduling_pb2 import CoresCurve, CurvePoint

_WIDTH: Final = 64
_HEIGHT: Final = 12


@click.command()
@click.argument("job", type=JobType())
@json_option
def profile(job: str, as_json: bool) -> None:
    """Show the measured rates of a job by CPU cores, the fitted curve, and the number of cores chosen by it."""
    from ganger.console import plain, print_json, print_line, print_table

    with open_client() as client:
        answer = client.explain_job(job)
    curve = answer.cores_curve if answer.HasField("cores_curve") else None
    if as_json:
        found = None if curve is None else plain(curve)
        print_json({"job": job, "cores_reason": answer.cores_reason, "cores_curve": found})
        return
    for one in [] if curve is None else [curve, *curve.other_phases]:
        if one.phase:
            print_line(f"{one.phase}:")
        print_table(("CORES", "STEPS/S", "FITTED", "SOURCE"), list(_rows(one)), "not measured yet")
        print_line("")
        for line in plot(one) if one.points else []:
            print_line(line)
        print_line("")
    print_line(answer.cores_reason or "the master reports no reasons for cores: it is of an older version")


def _rows(curve: CoresCurve) -> Iterator[tuple[str, ...]]:
    fitted = {point.cores: point.steps_per_s for point in curve.fitted}
    for point in curve.points:
        text = f"{fitted[point.cores]:.4g}" if point.cores in fitted else ""
        yield f"{point.cores:g}", f"{point.steps_per_s:.4g}", text, "series" if point.is_inherited else "this job"


def plot(curve: CoresCurve) -> list[str]:
    """Return lines with rates over cores: `*` measured, `o` inherited from the series, `.` fitted, `|` theta."""
    every: list[CurvePoint] = [*curve.points, *curve.fitted]
    most_cores = max(point.cores for point in every)
    most_rate = max(point.steps_per_s for point in every)
    if not (most_cores > 0.0 and most_rate > 0.0):
        return []

    def column(cores: float) -> int:
        return min(_WIDTH - 1, max(0, round(cores / most_cores * (_WIDTH - 1))))

    grid = [[" "] * _WIDTH for _ in range(_HEIGHT)]

    def put(cores: float, rate: float, sign: str) -> None:
        row = round(rate / most_rate * (_HEIGHT - 1))
        grid[_HEIGHT - 1 - min(_HEIGHT - 1, max(0, row))][column(cores)] = sign

    if curve.fitted:
        for line in grid:
            line[column(curve.sweet_point)] = "|"
    for before, after in zip(curve.fitted, curve.fitted[1:], strict=False):
        # A line between two whole numbers of cores.
        for at in range(column(before.cores), column(after.cores) + 1):
            cores = at * most_cores / (_WIDTH - 1)
            share = min(1.0, max(0.0, (cores - before.cores) / (after.cores - before.cores)))
            put(cores, before.steps_per_s + share * (after.steps_per_s - before.steps_per_s), ".")
    for point in curve.points:
        put(point.cores, point.steps_per_s, "o" if point.is_inherited else "*")
    labels = [f"{most_rate:.3g}", *[""] * (_HEIGHT - 2), "0"]
    margin = max(map(len, labels))
    drawn = [f"{label:>{margin}} |{''.join(line)}".rstrip() for label, line in zip(labels, grid, strict=True)]
    last = f"{most_cores:g}"
    axis = " " * (margin + 1) + "+" + "-" * _WIDTH
    scale = " " * (margin + 2) + "0" + " " * (_WIDTH - 1 - len(last)) + last
    legend = "steps/s by cores for each GPU: * measured, o of its series, . fitted, | theta"
    return [*drawn, axis, scale, legend]
