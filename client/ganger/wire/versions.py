"""The versions of the wire that a program speaks, and the one that two programs have in common.

Both sides state the oldest and the newest version that they speak: a daemon and its master in CreateSession, every
other caller in the metadata of each call. The highest common version is used. A caller of Ganger 0.1 states nothing: it
speaks version 1.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ganger.wire.errors import RequestInvalid, WireVersionUnsupported

# Raised with the first change of a message after a release; `make wire` records the messages of each version.
NEWEST_VERSION = 2
# Of each call: "OLDEST-NEWEST".
VERSIONS_KEY = "ganger-wire-versions"

_RANGE = re.compile(r"(\d{1,6})-(\d{1,6})", re.ASCII)


class WireVersions(NamedTuple):
    """A range of versions of the wire, both ends included."""

    oldest: int
    newest: int

    def __str__(self) -> str:
        return f"{self.oldest}-{self.newest}"


SUPPORTED_VERSIONS = WireVersions(1, NEWEST_VERSION)
UNSTATED_VERSIONS = WireVersions(1, 1)


def read_versions(text: str) -> WireVersions:
    """Return the range that `text` states as "OLDEST-NEWEST". Raises RequestInvalid for any other text."""
    match = _RANGE.fullmatch(text)
    versions = WireVersions(*map(int, match.groups())) if match else None
    if versions is None or not 1 <= versions.oldest <= versions.newest:
        raise RequestInvalid(f"{VERSIONS_KEY} is {text[:40]!r}: state the range of versions as OLDEST-NEWEST")
    return versions


def common_version(
    caller: WireVersions, server: WireVersions = SUPPORTED_VERSIONS, *, names: tuple[str, str] = ("client", "server")
) -> int:
    """Return the highest version that both speak. `names`: of the caller and the server, for people.

    Raises WireVersionUnsupported where there is none; it names both ranges and the side to upgrade."""
    common = min(caller.newest, server.newest)
    if common >= max(caller.oldest, server.oldest):
        return common
    older = names[0] if caller.newest < server.oldest else names[1]
    raise WireVersionUnsupported(
        f"the {names[0]} speaks versions {caller} of the wire, the {names[1]} {server}: upgrade the {older}",
        caller=caller,
        server=server,
    )
