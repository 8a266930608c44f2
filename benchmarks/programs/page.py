"""The page of the table."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.programs.trial import Outcome

NOTE_CHARACTERS = 300
_SUSPENDS = ("pause", "offload", "checkpoint")


def page_of(outcomes: Sequence[Outcome], machine: Mapping[str, Any]) -> str:
    """Return a page in Markdown: totals, the table, and what was refused or differs."""
    same = sum(outcome.is_identical for outcome in outcomes)
    moved = sum(outcome.is_identical and outcome.done("move") > 0 for outcome in outcomes)
    wrong = sum(outcome.is_wrong for outcome in outcomes)
    lines = [
        "# Public programs, unmodified",
        "",
        *textwrap.wrap(
            f"Measured by `make programs`{_runs(outcomes)}: {machine['cpus']} CPUs ({machine['cpu']}), Linux "
            f"{machine['kernel']}, two nodes with virtual GPUs on one machine.",
            98,
        ),
        "",
        "Each program runs alone first, with one thread, then as a job that",
        "is suspended twice (once at OFFLOAD where that is offered, once at CHECKPOINT), resumed, and moved",
        "to the other node. Its log and every file that it leaves, weights included, have to be the same",
        "bytes as alone; times of day in them are left out. Scripts *written anew* have the usual shape of",
        "their kind. How to run it: [below](#run-it).",
        "",
        f"**{same} of {len(outcomes)} ended as alone, {moved} of them moved; {wrong} succeeded with another result.**",
        "",
        "| program | source, version | mechanism | levels | suspends | moves | as alone | pause of a move |",
        "|---|---|---|---|---|---|---|---|",
        *(_row(outcome) for outcome in outcomes),
        "",
        "| program | what it is |",
        "|---|---|",
        *(f"| {outcome.program} | {outcome.kind} |" for outcome in outcomes),
    ]
    notes = [note for outcome in outcomes for note in _notes(outcome)]
    if notes:
        lines += ["", "## What was refused, and what differs", "", *notes]
    return "\n".join([*lines, "", *_RUN_IT])


_RUN_IT = [
    "## Run it",
    "",
    "```console",
    "$ make programs                    # the scripts that are written anew",
    "$ make programs SOURCES=DIR        # and the programs of checkouts below DIR",
    "```",
    "",
    "The first call makes an environment with the packages in `benchmarks/programs/requirements.txt`.",
    "`DIR/nanoGPT` is a checkout of `karpathy/nanoGPT`, and so on; nothing is fetched. The commits of",
    "this run are in the table, times and reasons in `docs/measurements/programs.json`.",
    "",
]


def _runs(outcomes: Sequence[Outcome]) -> str:
    """Return when and at which commit the rows were measured: one each, unless programs were tried again alone."""
    rows: dict[str, list[str]] = {}
    for outcome in outcomes:
        run = f"on {outcome.day} at commit {outcome.commit}" if outcome.commit else "at an earlier commit, not recorded"
        rows.setdefault(run, []).append(outcome.program)
    if len(rows) == 1:
        return f" {next(iter(rows))}"
    return ", " + ", ".join(f"{run} ({' '.join(names)})" for run, names in rows.items())


def _row(outcome: Outcome) -> str:
    source = f"{outcome.source}, {outcome.version}"
    suspends = ", ".join(order.kind for order in outcome.orders if order.kind in _SUSPENDS and not order.refusal)
    pause = f"{outcome.move_pause_s:.2f} s" if outcome.move_pause_s else ""
    cells = (
        *(outcome.program, source, outcome.mechanism or "-", " ".join(outcome.levels) or "-", suspends or "-"),
        *(str(outcome.done("move")), "yes" if outcome.is_identical else "**no**", pause),
    )
    return f"| {' | '.join(cells)} |"


def _notes(outcome: Outcome) -> list[str]:
    found = [text for text in (outcome.failure, outcome.files, outcome.log) if text]
    found += [f"{order.kind}: {order.refusal}" for order in outcome.orders if order.refusal]
    lines = (f"{outcome.program}: {' '.join(text.split())}"[:NOTE_CHARACTERS] for text in found)
    return [textwrap.fill(line, 98, initial_indent="* ", subsequent_indent="  ") for line in lines]
