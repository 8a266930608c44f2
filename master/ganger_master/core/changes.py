"""What a batch has changed: elements that a store must make durable, and what has to be looked at again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ganger.cluster.resources import ConfigurationSet
from msgspec import Struct

from ganger_master.core.model import Counters, Element, Gang, JobRecord, Node, NodeSet, Request

ELEMENT_TYPES: Final[Mapping[str, type[Element]]] = {
    "configuration_set": ConfigurationSet,
    "node": Node,
    "job": JobRecord,
    "request": Request,
    "gang": Gang,
    "node_set": NodeSet,
    "counters": Counters,
}


class StoredChanges(Struct, frozen=True, gc=False):
    """Elements to insert or replace, and keys to remove: (kind, key)."""

    puts: Mapping[tuple[str, str], Element]
    removes: tuple[tuple[str, str], ...]

    def __bool__(self) -> bool:
        return bool(self.puts or self.removes)


@dataclass(slots=True)
class Dirty:
    """What was touched: `jobs`, `rows`, `arenas`, `sets`, `arrays` by the present event, the others by the batch's."""

    jobs: dict[int, None] = field(default_factory=dict)
    rows: dict[str, None] = field(default_factory=dict)
    arenas: dict[int, None] = field(default_factory=dict)
    sets: dict[int, None] = field(default_factory=dict)
    # Numbers of arrays of which a member may have ended.
    arrays: dict[int, None] = field(default_factory=dict)
    # By node: new gangs and which of their pieces is there, if nothing else has changed there, else empty.
    wants: dict[str, list[tuple[Gang, int]]] = field(default_factory=dict)
    news: dict[int, None] = field(default_factory=dict)
    # Nodes whose rows differ from before.
    shown: dict[str, None] = field(default_factory=dict)
