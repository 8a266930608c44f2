"""The members of a job array, and what each of them runs: the array's description with its parameters put in.

A member's description is made when it is shown or sent, and not stored: all members share one description, and what a
decision log leaves out of it is left out of all of them alike.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from ganger_master.core.array_model import MEMBERS_LIMIT
from ganger_master.core.job_model import JobRecord, JobSpec


def members_of(jobs: Mapping[int, JobRecord], array: int) -> list[JobRecord]:
    """Those that are kept, in their order; empty if there is no such array, or none any more."""
    found: list[JobRecord] = []
    end = array + 1 + MEMBERS_LIMIT
    number = array + 1
    while number < end:
        job = jobs.get(number)
        if job is not None:
            membership = job.spec.array
            if membership is None or membership.array != array:
                break
            end = array + 1 + membership.size
            found.append(job)
        number += 1
    return found


_PLACE: Final = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")


class Template:
    """A command with {NAME} in it, parsed once: the length of a member's command follows without building it."""

    def __init__(self, command: Sequence[str]) -> None:
        self._length = sum(map(bytes_of, command))
        self._places = Counter(name for word in command for name in _PLACE.findall(word))
        self.places = self._places.total()
        # Whether the first word has text of its own; else it is made of these parameters alone.
        program = command[0] if command else ""
        self._has_program = bool(_PLACE.sub("", program))
        self._program_names = frozenset(_PLACE.findall(program))

    def length(self, index: int, parameters: Mapping[str, str]) -> int:
        """Return the bytes of the member's command."""
        length = self._length
        for name, text in (("index", str(index)), *parameters.items()):
            count = self._places.get(name, 0)
            if count:
                length += count * (bytes_of(text) - bytes_of(name) - len("{}"))
        return length

    def has_program(self, index: int, parameters: Mapping[str, str]) -> bool:
        """Return whether the member's first word is not empty."""
        given = {"index": str(index), **parameters}
        return self._has_program or any(given.get(name, name) for name in self._program_names)


def bytes_of(text: str) -> int:
    """Return the bytes of a text on the wire and on disk."""
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def resolved(spec: JobSpec) -> JobSpec:
    """{NAME} and {index} replaced in the words of the command, all of it in the environment; any other job as it is."""
    array = spec.array
    if array is None:
        return spec
    given = {"index": str(array.index), **array.parameters}

    def filled(found: re.Match[str]) -> str:
        # Other braces are the program's own.
        return given.get(found.group(1), found.group())

    variables = {
        "GANGER_ARRAY": str(array.array),
        "GANGER_ARRAY_INDEX": str(array.index),
        "GANGER_ARRAY_SIZE": str(array.size),
        "GANGER_ARRAY_PARAMETERS": json.dumps(array.parameters),
        **{f"GANGER_ARRAY_{name}": text for name, text in array.parameters.items()},
    }
    command = tuple([_PLACE.sub(filled, word) for word in spec.command])
    return replace(spec, command=command, environment={**spec.environment, **variables})
