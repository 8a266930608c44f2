"""What was measured part by part, so that a run that was stopped goes on: one line of JSON for each part, as it ends.

A line counts only for the code and the data it was measured with.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from experiments.experiment import Experiment, Row, Setting

_PACKAGES = ("ganger", "ganger_master", "ganger_daemon", "benchmarks", "experiments")


class Journal:
    """The parts of one experiment in a file of its own."""

    def __init__(self, path: Path, experiment: Experiment, setting: Setting) -> None:
        self._path = path
        self._of = fingerprint(experiment, setting)
        self._known = self._read()

    def rows(self, part: Row) -> list[Row] | None:
        """What was measured of this part by the same code on the same data; None if nothing was."""
        return self._known.get(_key(part))

    def add(self, part: Row, rows: Sequence[Row]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"of": self._of, "part": part, "rows": rows}, default=plain)
        with self._path.open("a", encoding="utf-8") as file:
            # A line that was cut off stays one line.
            file.write(f"\n{line}\n")

    def forget(self) -> None:
        self._path.unlink(missing_ok=True)
        self._known = {}

    def _read(self) -> dict[str, list[Row]]:
        if not self._path.is_file():
            return {}
        return {
            _key(line["part"]): line["rows"]
            for line in _lines(self._path.read_text(encoding="utf-8"))
            if line["of"] == self._of
        }


def fingerprint(experiment: Experiment, setting: Setting) -> str:
    """Of the code and of the data files that the experiment needs."""
    digest = hashlib.sha256(_code().encode())
    for path in experiment.files(setting):
        digest.update(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}\n".encode())
    return digest.hexdigest()


def plain(value: Any) -> Any:
    """NumPy's numbers are numbers."""
    return value.item()


@cache
def _code() -> str:
    digest = hashlib.sha256()
    for path, name in code_files():
        digest.update(f"{name}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def code_files() -> Iterator[tuple[Path, str]]:
    """Yield the files that a measurement may depend on, each with its name within its package."""
    for package in _PACKAGES:
        # Packages of the checkout have no __init__.py, so a resource of theirs is no path.
        spec = importlib.util.find_spec(package)
        assert spec is not None, f"{package} is not installed"
        for root in map(Path, spec.submodule_search_locations or ()):
            for path in sorted(root.rglob("*")):
                if path.suffix in {".py", ".csv", ".json"} and "__pycache__" not in path.parts:
                    yield path, f"{package}/{path.relative_to(root)}"


def _lines(text: str) -> Iterator[Any]:
    for line in text.splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            # Empty, or cut off when the run was stopped.
            continue


def _key(part: Row) -> str:
    return json.dumps(part, sort_keys=True, default=plain)
