"""The command of `make gpu`: runs the GPU benchmark and writes its result as a page and as JSON.

`python -m benchmarks.gpu_page --virtual` shows on any machine that the cases run, and writes nothing.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from ganger_daemon.devices.inventory import device_type_of

from benchmarks.gpu import VIRTUAL_BYTES, devices_here, main
from benchmarks.machine import machine, processor_ticks


@click.command()
@click.option("--quick", is_flag=True, help="Few cycles of small states.")
@click.option("--only", default="", metavar="CASE", help="Run one case.")
@click.option("--virtual", is_flag=True, help="Show that it runs, on virtual devices; writes no page.")
@click.option("--directory", type=click.Path(path_type=Path, file_okay=False), default=Path("docs/measurements"))
def report(quick: bool, only: str, virtual: bool, directory: Path) -> None:
    """Run the cases and write gpu-NAME.md and gpu-NAME.json, NAME being the device's type."""
    before = processor_ticks()
    result = {**main(quick, only, virtual), "machine": machine(before)}
    print(json.dumps(result, indent=1))
    devices = devices_here()[1]
    if devices and not virtual:
        name = f"gpu-{device_type_of(devices[0].name)}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        (directory / f"{name}.md").write_text(page_of(result))
    sys.exit(0 if result.get("ok", "skipped" in result) else 1)


def page_of(result: Mapping[str, Any]) -> str:
    """Return a page in Markdown: the machine, then a table of figures for each case."""
    virtual: dict[str, Any] = {"name": "virtual device", "memory_bytes": VIRTUAL_BYTES}
    device = result["devices"][0] if result["devices"] else virtual
    own = result["machine"]
    lines = [
        f"# {device['name']}",
        "",
        f"Measured by `make gpu`: {device['memory_bytes'] / 2**30:.0f} GiB, driver {result['driver'] or 'none'};",
        f"{own['cpus']} CPUs ({own['cpu']}), Linux {own['kernel']}, Python {own['python']}.",
        "What each case does: `benchmarks/gpu.py`. Memory is the driver's figure for the process.",
    ]
    for case, reason in result["failed"].items():
        lines += ["", f"**{case} failed**: {' '.join(str(reason).split())[:400]}"]
    for case, figures in itertools.groupby(result["figures"].items(), key=lambda item: str(item[0]).partition("_")[0]):
        lines += ["", f"## {case}", "", "| figure | value |", "|---|---|"]
        lines += [
            f"| {name} | {value:,.0f} |" if value >= 10_000 else f"| {name} | {value:.4g} |" for name, value in figures
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    report()
