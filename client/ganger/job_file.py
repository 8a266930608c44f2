"""Job files: the description of a job in YAML or TOML, with the keys of docs/reference/cli.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ganger.protocol.os_errors import os_reason
from ganger.spec_values import shortened
from ganger.wire.errors import SpecInvalid


def load_job_file(path: Path) -> dict[str, Any]:
    """Return the description in a .yaml, .yml or .toml file. A relative `directory` in it is relative to the file.
    Raises SpecInvalid."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecInvalid(f"cannot read the job file {path}: {os_reason(error)}") from error
    is_toml = path.suffix == ".toml"
    if not is_toml and path.suffix not in (".yaml", ".yml"):
        raise SpecInvalid(f"the job file {path} must end in .yaml, .yml or .toml")
    try:
        if is_toml:
            import tomllib

            description: Any = tomllib.loads(text)
        else:
            description = read_yaml(text)
    except (ValueError, RecursionError) as error:
        raise SpecInvalid(f"the job file {path} is not {'TOML' if is_toml else 'YAML'}: {error}") from error
    if not isinstance(description, dict):
        raise SpecInvalid(f"the job file {path} must be a mapping, for example `command: [python, train.py]`")
    if wrong := [key for key in description if not isinstance(key, str)]:
        raise SpecInvalid(f"the job file {path}: the key {shortened(wrong[0])} is no text: write a key of a job")
    directory = description.get("directory", ".")
    if isinstance(directory, str) and "\0" not in directory:
        description["directory"] = str((path.resolve().parent / Path(directory).expanduser()).resolve())
    return description


def read_yaml(text: str) -> Any:
    """Return what a YAML text holds. Raises ValueError: why it is no YAML, and where."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Leaves 2:8 and 1:30:00 as they are written: YAML 1.1 takes them for numbers to the base of sixty. A key
        that is given twice is a mistake, of which YAML itself would keep the last."""

        def compose_mapping_node(self, anchor: Any) -> Any:
            # Not where it is constructed: there `<<: *other` has brought in keys that are given again on purpose.
            node = super().compose_mapping_node(anchor)
            seen: set[str] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"{key.value} is given twice", problem_mark=key.start_mark)
                seen.add(str(key.value))
            return node

    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if not (tag.endswith(":int") and pattern.match("2:8"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:int",
        re.compile(r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]+|0|[1-9][0-9_]*)$"),
        list("-+0123456789"),
    )
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (at line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""
        raise ValueError(f"{getattr(error, 'problem', None) or str(error).splitlines()[0]}{where}") from error
    except RecursionError as error:
        raise ValueError(f"brackets without end: {error}") from error
