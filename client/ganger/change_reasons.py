"""Sentences about a change of a running job: what it is for, and what it gained, from the figures of its event."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# By goal: what a change with it is for, without and with the job that it is for.
_PURPOSES: Final[dict[str, tuple[str, str]]] = {
    "LOCALITY": ("to have its GPUs closer together", ""),
    "HOLE": ("to make room for a pending gang", "to make room for {job}"),
    "UNPACK": ("to have its GPUs to itself", ""),
    "DRAIN": ("because its node is drained", ""),
    "DEFRAGMENT": ("so that fewer nodes are half full", ""),
    "RETURN": ("to resume after it was parked for others", ""),
    "GROW": ("onto idle GPUs", ""),
    "GIVE_BACK": ("to give GPUs back", "to give GPUs to {job}"),
    "PACK": ("to try whether sharing GPUs at once pays", ""),
    "UNDO": ("back to where it was faster", ""),
    "EXCHANGE": ("to exchange places with a job that gains more", "to change places with {job}, which gains more"),
    "BALANCE": ("to suffer less interference", ""),
    "FAIRNESS": ("so that all time-sliced jobs get the same time", "so that {job} gets as much time as others"),
}  # fmt: skip


def purpose(figures: Mapping[str, str]) -> str:
    """Return what a change is for, and its expected gain: "to make room for jobs/9, to save 120 GPU-seconds".

    Empty for a change outside a plan. An unknown goal is named as it is."""
    goal = figures.get("goal", "")
    if not goal:
        return ""
    alone, helping = _PURPOSES.get(goal, (f"goal {goal}", f"goal {goal} for {{job}}"))
    job = figures.get("for", "")
    text = helping.format(job=job) if job and helping else alone
    if figures.get("detail"):
        return f"{text} ({figures['detail']})"
    saved, pause = _number(figures, "saved_gpu_seconds"), _number(figures, "expected_pause_ms")
    if saved and saved > 0.0:
        text += f", to save {saved:.0f} GPU-seconds"
        if pause:
            text += f" for a pause of {pause / 1_000.0:.2g} s"
    return text


def gain(figures: Mapping[str, str]) -> str:
    """Return the measured gain of a change: "its rate was 1.31 (± 0.02) times that of before"; "" if nothing was."""
    value, deviation = _number(figures, "gain"), _number(figures, "gain_deviation")
    if value is None:
        return ""
    measured = f"{value:.2f}" + (f" (± {deviation:.2f})" if deviation else "")
    if figures.get("goal") == "PACK":
        text = f"together they made {measured} of what one does alone"
    else:
        text = f"its rate was {measured} times that of before"
    return f"{text}: {figures['detail']}" if figures.get("detail") else text


def aim(figures: Mapping[str, str]) -> str:
    """Return what a judged change had been for: "the change to have its GPUs closer together"."""
    goal = figures.get("goal", "")
    if goal == "PACK":
        return "sharing its GPUs at once"
    if goal == "GROW":
        return "its growth onto idle GPUs"
    text = purpose({name: text for name, text in figures.items() if name in ("goal", "for")})
    return f"the move {text}" if text else "the change"


def _number(figures: Mapping[str, str], name: str) -> float | None:
    try:
        return float(figures.get(name, ""))
    except ValueError:
        return None
