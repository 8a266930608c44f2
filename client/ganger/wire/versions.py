"""The versions of the wire: which ones this program speaks."""

from __future__ import annotations

# Raised with the first change of a message after a release; `make wire` records the messages of each version.
NEWEST_VERSION = 2
