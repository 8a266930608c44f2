"""What became of each experiment, as JSON, as rows of a table for people, and as a page of the documentation."""

from __future__ import annotations

import math
import os
import platform
import textwrap
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from ganger_master.simulator.report.figures import Interval

from experiments.experiment import CoreUse, MeasuredRows
from experiments.paper_claims import PaperClaim, half_width, meets, middle, shortfalls

_PAGE = """# The papers' claims, run again

`ganger reproduce --all --json` runs the experiments of the papers anew, each with the paper's
set-up. It prints the paper's figures beside ours, whether the claim *holds*, and whether ours
*beats* it. `experiments/thresholds.toml` decides both; each experiment is a file beside it that
begins with its set-up. Published data are read from the folders `--traces` and `--papers`; an
experiment without its data is skipped and reported as such.

```console
$ ganger reproduce --list
$ ganger reproduce --only B14 --quick
$ ganger reproduce --all --document docs/measurements/reproduce.md
```

A stopped run continues: measurements by the same code on the same data are kept, unless with
`--anew`. Processor time, of one core, is stated below: {minutes:.0f} min for {noted} experiments.

*Core ran*: `yes` where the master's core, and the planner's loop where the policy plans, decided,
in virtual time or as real programs; `planner only`: a pass of the planner alone; `approval only`:
the core's approval of gangs alone; `arithmetic only`: the production's estimators, orders or
searches, called from a model of the experiment's own. *Short by* names each figure that misses its
limit.

± is the half-width of a 95 % confidence interval over seeds; the mean of such figures is compared.
A load is the offered work divided by the capacity of the cluster. Raw rows are in
`build/reproduce/NAME.jsonl`. Nothing is fitted to make a claim hold.

{date}, {machine}: of {claims} claims {run} were run, {hold} of them hold,
{beaten} are beaten. `--document` wrote this page.
"""
HEADINGS = ("name", "claim", "core ran", "holds", "beats", "short by", "paper", "ours", "load", "why")


@dataclass(frozen=True)
class Result:
    """One of `found`, `skipped` (why it is not run here) and `failed` (what went wrong) is there. `core`: whether the
    core runs in its experiment; None if there is no experiment. `cpu_s`: processor time of all parts, whenever they
    were measured; NaN: not recorded."""

    claim: PaperClaim
    core: CoreUse | None = None
    found: MeasuredRows | None = None
    skipped: str = ""
    failed: str = ""
    is_quick: bool = False
    cpu_s: float = math.nan

    @property
    def holds(self) -> bool | None:
        return None if self.found is None else meets(self.claim.holds, self.found.ours)

    @property
    def beats(self) -> bool | None:
        """None also where a claim only has to hold."""
        return None if self.found is None or not self.claim.beats else meets(self.claim.beats, self.found.ours)

    @property
    def short_by(self) -> Mapping[str, Sequence[str]]:
        """By how much figures miss what is to hold and what is to be beaten, each where it is missed."""
        if self.found is None:
            return {}
        missed = {
            "to hold": shortfalls(self.claim.holds, self.found.ours),
            "to beat": shortfalls(self.claim.beats, self.found.ours),
        }
        return {what: each for what, each in missed.items() if each}


def as_json(result: Result) -> dict[str, Any]:
    """Ready for `json.dumps`: no NaN. `interval` has the half-width of a 95 % confidence interval (Student's t over the
    seeds) of each figure in which chance has a part."""
    claim, found = result.claim, result.found
    told: dict[str, Any] = {
        "name": claim.name,
        "title": claim.title,
        "source": claim.source,
        "core_ran": result.core,
        "paper": dict(claim.paper),
        "ours": None if found is None else {name: _plain(middle(figure)) for name, figure in found.ours.items()},
        "holds": result.holds,
        "beats": result.beats,
        "short_by": {what: list(each) for what, each in result.short_by.items()},
        "criteria": {"holds": claim.holds, "beats": claim.beats},
    }
    if found is not None:
        told |= {
            "load": found.load,
            "seeds": found.seeds,
            "cpu_s": _plain(result.cpu_s),
            "interval": {
                name: _plain(half_width(figure)) for name, figure in found.ours.items() if isinstance(figure, Interval)
            },
            "why": found.why,
        }
    if result.skipped:
        told["skipped"] = result.skipped
    if result.failed:
        told["failed"] = result.failed
    return told | ({"quick": True} if result.is_quick else {})


def as_cells(result: Result) -> tuple[str, ...]:
    """Under `HEADINGS`; of our figures those that the paper gives or a criterion asks for."""
    claim, found = result.claim, result.found
    ours = "" if found is None else _figures(found, claim.figures | set(claim.paper))
    return (
        claim.name,
        claim.title,
        result.core or "-",
        _answer(result.holds, result),
        _answer(result.beats, result),
        "; ".join(f"{what}: {', '.join(each)}" for what, each in result.short_by.items()) or "-",
        ", ".join(f"{name} {_text(figure)}" for name, figure in claim.paper.items()),
        ours,
        "" if found is None else _load(found.load),
        # Where it went wrong is told beside the table.
        result.skipped or result.failed.partition("\n")[0] or ("" if found is None else found.why),
    )


def as_lines(result: Result, width: int) -> list[str]:
    """The same for people, in lines of `width` signs."""
    name, title, *rest = as_cells(result)
    lines = [f"{name}  {title}"]
    for heading, text in zip(HEADINGS[2:], rest, strict=True):
        if text:
            lines += textwrap.wrap(text, width, initial_indent=f"    {heading:8}  ", subsequent_indent=" " * 14)
    return lines


def in_short(result: Result) -> tuple[str, str, str, str, str]:
    """Name, whether the core ran, whether it holds, whether it is beaten, claim."""
    name, title, core, holds, beats, *_ = as_cells(result)
    return name, core, holds, beats, title


def document(results: Sequence[Result], date: str) -> str:
    """docs/measurements/reproduce.md: what the last full run found."""
    rows = ["| " + " | ".join(map(_cell, as_cells(result))) + " |" for result in results]
    ran = [result for result in results if result.found is not None]
    text = _PAGE.format(
        date=date,
        machine=_machine(),
        claims=len(results),
        minutes=sum(result.cpu_s for result in ran if not math.isnan(result.cpu_s)) / 60.0,
        noted=sum(not math.isnan(result.cpu_s) for result in ran),
        run=len(ran),
        hold=sum(bool(result.holds) for result in ran),
        beaten=sum(bool(result.beats) for result in ran),
    )
    head = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    every = [
        _wrapped(
            f"* **{result.claim.name}** ({result.claim.source}; {found.seeds} seed{'s' if found.seeds > 1 else ''}"
            f"{'' if math.isnan(result.cpu_s) else f'; {result.cpu_s:.0f} s'}): {_figures(found, set(found.ours))}"
        )
        for result in results
        if (found := result.found) is not None
    ]
    return "\n".join([text, *head, *rows, "", "## Every figure", "", *every, ""])


def _wrapped(item: str) -> str:
    """Break a list item of the page into lines of at most 100 columns."""
    return textwrap.fill(item, 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _machine() -> str:
    return f"{len(os.sched_getaffinity(0))} cores ({platform.machine()}), Python {platform.python_version()}"


def _answer(answer: bool | None, result: Result) -> str:
    if answer is not None:
        return "yes" if answer else "no"
    return "failed" if result.failed else "skipped" if result.skipped else "-"


def _load(load: Mapping[str, float] | float | None) -> str:
    if load is None:
        return "-"
    if isinstance(load, Mapping):
        return ", ".join(f"{name} {value:.2f}" for name, value in load.items())
    return f"{load:.2f}"


def _figures(found: MeasuredRows, names: Set[str]) -> str:
    return ", ".join(f"{name} {_text(figure)}" for name, figure in found.ours.items() if name in names)


def _text(figure: float | str | Interval) -> str:
    return figure if isinstance(figure, str) else str(figure) if isinstance(figure, Interval) else f"{figure:.4g}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _plain(value: float) -> float | None:
    return None if math.isnan(value) or math.isinf(value) else value
