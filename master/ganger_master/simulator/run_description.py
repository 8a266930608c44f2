"""Descriptions of a trace, a cluster and a run, in words and as JSON, for `ganger simulate` and `ganger compare`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ganger_master.simulator import output_files
from ganger_master.simulator.inputs import Load, Material, ReplayOptions
from ganger_master.simulator.report import side_by_side
from ganger_master.simulator.report.figures import Figures
from ganger_master.simulator.traces.row_findings import RowFinding, RowFindingKind, rows_of, shown
from ganger_master.simulator.traces.servers import Servers

if TYPE_CHECKING:
    pass


def notes(source: Material, is_ideal: bool) -> list[str]:
    """Return lines on rows that were left out or changed; empty if every row became a job unchanged."""
    lines = []
    left_out = rows_of(source.findings, RowFindingKind.SKIPPED)
    if left_out or source.apart:
        kept = _several(source.rows - left_out - source.apart, "job")
        chosen = f", {source.apart:,} not asked for" if source.apart else ""
        lines.append(f"{_several(source.rows, 'row')}: {kept}, {left_out:,} left out{chosen}")
    words = {RowFindingKind.SKIPPED: "left out", RowFindingKind.CHANGED: "changed", RowFindingKind.MISTAKE: "mistake"}
    lines += [f"{words[finding.kind]}: {finding}" for finding in source.findings]
    if source.ignored_columns:
        lines.append(f"columns that were not read: {shown(', '.join(source.ignored_columns))}")
    unnamed = sum(not model for model in source.jobs.model.texts())
    # Ideal replays do not depend on models.
    if unnamed and not is_ideal:
        lines.append(f"changed: models are drawn for {_several(unnamed, 'job')} of unknown model")
    return [f"{source.trace}: {line}" for line in lines]


def cluster_in_words(servers: Servers) -> str:
    kinds = sorted({group.configuration_set.device_type for group in servers.groups if group.configuration_set.devices})
    types = "" if kinds == ["gpu"] else f" ({', '.join(kinds)})"
    parts = (
        _several(servers.nodes, "node"),
        _several(servers.gpus, "GPU") + types,
        _several(servers.millicores // 1000, "core"),
    )
    return ", ".join(parts)


def options_in_words(options: ReplayOptions) -> str:
    if options.ideal:
        words = "ideal: any free GPUs serve, nothing costs time"
    else:
        costs = ", ".join(f"{name.removesuffix('_s')} {seconds:g}s" for name, seconds in asdict(options.costs).items())
        words = f"costs: {costs}; stops at most every {options.plan_every_s:g}s"
    if options.moves_per_hour is not None:
        words += f"; at most {options.moves_per_hour:g} moves of a node in an hour that no pending job needs"
    if options.rates == "profiles":
        words += f"; rates by published profiles, known {options.profile_s:g}s after submission"
    return words if options.round_s is None else f"{words}; rounds of {options.round_s:g}s"


def quotas_if_any(options: ReplayOptions) -> list[tuple[str, str]]:
    """Return the row of the quotas, if there are any."""
    return [("quotas", ", ".join(f"{user}={gpus}" for user, gpus in options.quotas.items()))] if options.quotas else []


def unbounded_load_row(figures: Figures) -> list[tuple[str, str]]:
    """Return the row of the offered load for a run whose load is infinite, which the figures leave out."""
    if math.isfinite(figures.offered_load):
        return []
    return [("offered load", "all jobs are submitted at once")]


def simulated(source: Material, load: Load, options: ReplayOptions, figures: Figures) -> dict[str, Any]:
    """Return one run for JSON: figures by name, trace, cluster, options and load."""
    return output_files.as_json(figures) | about(source, options) | {"load": load_asked(load)}


def compared(
    source: Material, options: ReplayOptions, groups: Sequence[tuple[Load, Mapping[str, Sequence[Figures]]]]
) -> dict[str, Any]:
    """Return a comparison for JSON: every run, and the policies side by side at each load."""
    return about(source, options) | {
        "loads": [
            {
                "load": load_asked(load),
                "policies": side_by_side.as_json(runs),
                "runs": [output_files.as_json(run) for of_policy in runs.values() for run in of_policy],
            }
            for load, runs in groups
        ],
    }


def about(source: Material, options: ReplayOptions) -> dict[str, Any]:
    """Return trace, cluster and options of a run for JSON."""
    return {
        "trace": {
            "name": source.trace,
            "rows": source.rows,
            "jobs": source.jobs_of_a_run,
            "not_asked_for": source.apart,
            "left_out": [_finding(each) for each in source.findings if each.kind is RowFindingKind.SKIPPED],
            "changed": [_finding(each) for each in source.findings if each.kind is RowFindingKind.CHANGED],
            "ignored_columns": list(source.ignored_columns),
        },
        "cluster": {
            "nodes": source.servers.nodes,
            "gpus": source.servers.gpus,
            "cores": source.servers.millicores / 1000,
            "memory_bytes": source.servers.memory_bytes,
        },
        "options": {name: value for name, value in asdict(options).items() if name != "seed"},
    }


def load_asked(load: Load) -> float | list[dict[str, float]] | None:
    """Return the load for JSON; None: as recorded."""
    if load.phases:
        return [{"seconds": seconds, "load": offered} for seconds, offered in load.phases]
    return load.offered


def _finding(finding: RowFinding) -> dict[str, Any]:
    return {"what": finding.what, "rows": finding.rows, "first_lines": list(finding.lines)}


def _several(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
