"""The command line against a real cluster, in this process: new interpreters would be most of a test's time."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ganger.cli.main import run


@dataclass(frozen=True)
class Done:
    """What a command printed, and its exit code."""

    arguments: Sequence[str]
    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Shell:
    """`master`: the master's state directory or address."""

    master: Path | str

    def try_(self, *arguments: str) -> Done:
        written = (io.BytesIO(), io.BytesIO())
        out, err = (io.TextIOWrapper(raw, write_through=True) for raw in written)
        with redirect_stdout(out), redirect_stderr(err):
            try:
                code = run(["--master", str(self.master), *arguments])
            except SystemExit as exit_:
                code = exit_.code if isinstance(exit_.code, int) else 1
            sys.stdout.flush()
        texts = [raw.getvalue().decode(errors="replace") for raw in written]
        return Done(arguments, code, *texts)

    def __call__(self, *arguments: str) -> str:
        """Its output; it must succeed."""
        done = self.try_(*arguments)
        assert done.code == 0, f"ganger {' '.join(arguments)}: {done.code}\n{done.out}\n{done.err}"
        return done.out

    def json(self, command: str, *arguments: str) -> Any:
        return json.loads(self(command, "--json", *arguments))

    def submit(self, *arguments: str) -> str:
        """The number of the new job."""
        return str(self.json("submit", *arguments)["name"]).removeprefix("jobs/")
