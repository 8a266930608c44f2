"""One program of the catalogue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

NO_ENVIRONMENT: Mapping[str, str] = {}


@dataclass(frozen=True)
class Program:
    """A program, how it is started, and what of its work is compared.

    `command`: "python" and "torchrun" are those of the programs' environment.
    `source`: OWNER/NAME of the repository of which a checkout is copied, or "" for a script that is written anew.
    `is_packaged`: a package of the environment has the program, and no checkout is needed.
    `directory`: where in the copy it starts. `inputs`: makers of its data in `inputs.py`, as NAME or NAME:DIRECTORY.
    `weights`: a glob of what must be there at its end.
    `log`: a regular expression of what is compared of its log; "" compares every line, None nothing.
    `ignored`: globs of files that hold times of day. `packages`: those of the environment whose versions matter.
    `options`: of `ganger submit`.
    """

    name: str
    kind: str
    command: tuple[str, ...]
    source: str = ""
    is_packaged: bool = False
    directory: str = "."
    inputs: tuple[str, ...] = ()
    weights: str = ""
    log: str | None = ""
    ignored: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=lambda: NO_ENVIRONMENT)
    packages: tuple[str, ...] = ("torch",)
    options: tuple[str, ...] = ()

    @property
    def checkout(self) -> str:
        """The directory of its source below the one that has the checkouts."""
        return self.source.partition("/")[2]
