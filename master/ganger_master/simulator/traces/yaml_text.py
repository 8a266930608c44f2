"""YAML written by hand, read strictly."""

from __future__ import annotations

from typing import Any

import yaml


class YamlError(ValueError):
    """Why a text cannot be read, to go after a file's name and a colon: with a space before it, or the line."""


def parsed(text: bytes) -> object:
    """What a text holds. YamlError if it is no YAML, or gives a key twice."""
    try:
        return yaml.load(text.decode(), _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" line {mark.line + 1}:" if mark is not None else ""
        raise YamlError(f"{where} not readable as YAML: {error.problem}") from error
    # A date that is none is a ValueError, too many brackets a RecursionError.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise YamlError(f" not readable as YAML: {' '.join(str(error).split())}") from error


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice, of which YAML would take the last in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"{key.value} is given twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)
