"""Resource names: "jobs/{n}", "arrays/{n}", "nodes/{node}" and "nodeSets/{n}", parsed, formatted and checked here."""

from __future__ import annotations

import re
from functools import lru_cache

from ganger.wire.errors import NameInvalid

NODE_ID = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


def job_name(number: int) -> str:
    """The name of job `number`: "jobs/7"."""
    assert number >= 1, f"job numbers start at 1, not {number}"
    return f"jobs/{number}"


def parse_job_name(name: str) -> int:
    """The number in "jobs/7". Raises NameInvalid."""
    return _parse(name, "jobs", 'is not a job name: give "jobs/NUMBER", for example jobs/7')


def array_name(number: int) -> str:
    """The name of array `number`: "arrays/7"."""
    return f"arrays/{number}"


def parse_array_name(name: str) -> int:
    """The number in "arrays/7". Raises NameInvalid."""
    return _parse(name, "arrays", 'is not an array name: give "arrays/NUMBER", for example arrays/7')


def array_name_from_text(text: str | int) -> str:
    """Return "arrays/7" for 7, "7" and "arrays/7". Raises as `parse_array_name`."""
    return array_name(parse_array_name(text if "/" in (text := str(text)) else f"arrays/{text}"))


def parse_member(text: str) -> tuple[int, int] | None:
    """Return array and index of a member as users write it: (7, 3) for "7_3"; None for other texts."""
    array, _, index = text.partition("_")
    is_index = index.isdecimal() and index.isascii() and len(index) <= 10
    return (int(array), int(index)) if _is_number(array) and is_index else None


def _parse(name: str, kind: str, mistake: str) -> int:
    prefix, _, number = name.partition("/")
    if prefix != kind or not _is_number(number):
        raise NameInvalid(f"{name[:80]!r} {mistake}", name=name)
    return int(number)


def _is_number(text: str) -> bool:
    return text.isdecimal() and text.isascii() and text[0] != "0" and len(text) <= 18


def job_name_from_text(text: str) -> str:
    """Return the name of a job that users write as "7" or "jobs/7". Raises NameInvalid."""
    try:
        return job_name(parse_job_name(text if "/" in text else f"jobs/{text}"))
    except NameInvalid as error:
        hint = "give its number, for example 7; `ganger queue` lists jobs, --name NAME those of a name"
        raise NameInvalid(f"{text[:80]!r} is not a job: {hint}", name=text) from error


_QUARANTINED = "quarantinedGangs"


def quarantined_gang_name(uid: str, epoch: int) -> str:
    """The name of a quarantined gang: "quarantinedGangs/UID-EPOCH"."""
    return f"{_QUARANTINED}/{uid}-{epoch}"


def parse_quarantined_gang_name(name: str) -> tuple[str, int]:
    """The job's uid and the epoch in "quarantinedGangs/UID-EPOCH". Raises NameInvalid."""
    prefix, _, gang = name.partition("/")
    uid, _, epoch = gang.rpartition("-")
    if prefix != _QUARANTINED or not uid or not _is_number(epoch):
        raise NameInvalid(
            f'{name[:80]!r} is not a quarantined gang: give "{_QUARANTINED}/UID-EPOCH", as '
            "`ganger nodes quarantine list --json` shows it",
            name=name,
        )
    return uid, int(epoch)


def node_name(node: str) -> str:
    """The name of the node with the id `node`: "nodes/n1"; a name stays what it is."""
    return node if node.startswith("nodes/") else f"nodes/{node}"


@lru_cache(65_536)
def parse_node_name(name: str) -> str:
    """The id in "nodes/n1". Raises NameInvalid."""
    prefix, _, node = name.partition("/")
    if prefix != "nodes" or not is_node_id(node):
        example = re.sub(r"[^A-Za-z0-9.-]+", "-", node).strip(".-")[:40] or "n1"
        raise NameInvalid(
            f'{name[:80]!r} is not a node name: give "nodes/NODE", for example nodes/{example}', name=name
        )
    return node


def node_name_from_text(text: str) -> str:
    """Return the name of a node that users write as "n1" or "nodes/n1". Raises NameInvalid."""
    return node_name(parse_node_name(node_name(text)))


def node_set_name(number: int) -> str:
    """The name of node set `number`: "nodeSets/3"."""
    return f"nodeSets/{number}"


def parse_node_set_name(name: str) -> int:
    """The number in "nodeSets/3". Raises NameInvalid."""
    return _parse(name, "nodeSets", 'is no name of a node set: give "nodeSets/NUMBER"')


def is_node_id(node: str) -> bool:
    """Letters, digits, dots, dashes and underscores, at most 63, starting and ending with a letter or digit."""
    return NODE_ID.fullmatch(node) is not None
