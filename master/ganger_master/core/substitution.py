"""What one member of an array runs: the array's description with the member's parameters put in.

Made when it is shown or sent, and not stored: all members share one description, and what a recording leaves out of
it is left out of all of them alike.
"""

from __future__ import annotations

import json
import re
from typing import Final

from msgspec.structs import replace

from ganger_master.core.model import JobSpec

_PLACE: Final = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")


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
