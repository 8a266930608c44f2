"""From what happened in the demo to its checks, build/demo.json and the table at the end."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from examples.demo.disturbed_run import Action, DisturbedRun

WIDTH = 120


@dataclass(frozen=True, slots=True)
class Check:
    """`ok` is True too for a figure that is only shown."""

    name: str
    ok: bool
    figure: float
    unit: str


def checks_of(outcomes: Sequence[DisturbedRun], approved: int, rejected: int, seconds: float) -> tuple[Check, ...]:
    """What must hold, and the figures to show, in the order of the table."""
    checks: list[Check] = []
    for outcome in outcomes:
        checks.extend(_of_example(outcome))
    actions = [action for outcome in outcomes for action in outcome.actions]
    suspends = [action for action in actions if action.kind.startswith("suspend")]
    moves = [action for action in actions if action.kind == "move"]
    repins = [action for action in actions if action.kind == "re-pin"]
    checks.append(Check("verdicts approved", approved >= len(outcomes), approved, "verdicts"))
    checks.append(Check("verdicts rejected", True, rejected, "verdicts"))
    for level in ("pause", "offload", "checkpoint"):
        of_level = [action for action in suspends if action.kind == f"suspend {level}"]
        checks.append(Check(f"suspends at {level}", bool(of_level), len(of_level), "suspends"))
        checks.append(_median(f"suspend latency, {level}", (action.seconds for action in of_level)))
        checks.append(_median(f"resume latency, {level}", (action.resume_seconds for action in of_level)))
    checks.append(Check("moves", bool(moves), len(moves), "moves"))
    given_up = sum(outcome.moves_given_up for outcome in outcomes)
    checks.append(Check("moves given up and ordered again", True, given_up, "moves"))
    checks.append(_median("move pause", (action.seconds for action in moves)))
    moved = [action for action in repins if action.before != action.after]
    checks.append(Check("re-pins to other cores", bool(moved), len(moved), "re-pins"))
    checks.append(_median("re-pin, order to new cores", (action.seconds for action in repins)))
    checks.append(Check("time taken", True, round(seconds, 1), "s"))
    return tuple(checks)


def is_ok(checks: Sequence[Check]) -> bool:
    return bool(checks) and all(check.ok for check in checks)


def write_report(path: Path, checks: Sequence[Check], outcomes: Sequence[DisturbedRun], seed: int) -> None:
    content: dict[str, Any] = {
        "ok": is_ok(checks),
        "seed": seed,
        "checks": [asdict(check) for check in checks],
        "examples": [
            {
                "name": outcome.example.title,
                "trouble": outcome.trouble,
                "steps_per_second": round(outcome.steps_per_second, 2),
                "actions": [asdict(action) for action in outcome.actions],
            }
            for outcome in outcomes
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)


def print_tables(checks: Sequence[Check], outcomes: Sequence[DisturbedRun]) -> None:
    # Loaded here: the command line must start fast, and only the end of a demo needs tables.
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        # Into a file or a pipe: no terminal limits the width.
        console = Console(highlight=False, width=WIDTH)
    story = Table(title="What was done to the jobs", box=box.SIMPLE_HEAD)
    for column in ("action", "at step", "took", "next step"):
        story.add_column(column, justify="left" if column == "action" else "right", no_wrap=True)
    story.add_column("what changed")
    for outcome in outcomes:
        story.add_row(f"[bold]{outcome.example.title}[/]")
        for action in outcome.actions:
            resumed = f"+ {_milliseconds(action.resume_seconds)}" if action.resume_seconds else ""
            story.add_row(f"  {action.kind}", str(action.step), _milliseconds(action.seconds), resumed, _change(action))
    console.print(story)
    table = Table(title="What holds", box=box.SIMPLE_HEAD)
    for column in ("", "check", "figure", "unit"):
        table.add_column(column, justify="right" if column == "figure" else "left", no_wrap=column != "check")
    title = ""
    for check in checks:
        group, _, name = check.name.rpartition(": ")
        if group != title:
            title = group
            table.add_row("", f"[bold]{group or 'all jobs'}[/]")
        mark = "[green]ok[/]" if check.ok else "[red]FAILED[/]"
        table.add_row(mark, f"  {name}", f"{check.figure:g}", check.unit)
    console.print(table)


def _change(action: Action) -> str:
    if action.before == action.after:
        return f"same {action.before.partition(' ')[0]}"
    return f"{action.before} -> {action.after}"


def _of_example(outcome: DisturbedRun) -> Iterable[Check]:
    name, found, planned = outcome.example.title, outcome.comparison, outcome.example.actions
    yield Check(
        f"{name}: every loss bit-identical",
        found is not None and found.differing == 0 and found.steps == outcome.example.steps,
        found.steps - found.differing if found else 0,
        f"of {outcome.example.steps} steps",
    )
    yield Check(f"{name}: final weights bit-identical", bool(found and found.same_weights), int(bool(found)), "digest")
    if outcome.example.form == "attached":
        yield Check(f"{name}: no step repeated", bool(found) and not _repeated(outcome), _repeated(outcome), "steps")
    yield Check(
        f"{name}: all planned actions done", len(outcome.actions) == len(planned), len(outcome.actions), "actions"
    )
    moves = [action for action in outcome.actions if action.kind == "move"]
    if moves:
        changed = sum(_changed(action) for action in moves)
        yield Check(f"{name}: moved to another node and process", changed == len(moves), changed, "moves")
    yield Check(f"{name}: rate", outcome.steps_per_second > 0, round(outcome.steps_per_second, 1), "steps/s")
    if outcome.rate_after_repin:
        yield Check(f"{name}: rate before the re-pin", True, round(outcome.rate_before_repin, 1), "steps/s")
        yield Check(f"{name}: rate after the re-pin", True, round(outcome.rate_after_repin, 1), "steps/s")


def _changed(action: Action) -> bool:
    node, _, pids = action.before.partition(" ")
    new_node, _, new_pids = action.after.partition(" ")
    return node != new_node and pids != new_pids


def _repeated(outcome: DisturbedRun) -> int:
    return outcome.comparison.repeated if outcome.comparison else 0


def _median(name: str, seconds: Iterable[float]) -> Check:
    values = list(seconds)
    return Check(name, bool(values), round(1000 * statistics.median(values), 1) if values else 0.0, "ms")


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"
