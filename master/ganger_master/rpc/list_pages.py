"""Lists in pages: how much one holds, and the token by which the next goes on."""

from __future__ import annotations

import base64
import binascii
import sys
from collections.abc import Callable
from typing import Final, TypeVar

from ganger.wire import errors
from ganger.wire.channels import PART_BYTES
from google.protobuf.message import Message

PAGE_DEFAULT: Final = 100
PAGE_MOST: Final = 1_000
# A page of large messages must still fit into one.
PAGE_BYTES: Final = PART_BYTES

# Most bytes that an entry takes in its message beyond its own.
_FIELD_BYTES: Final = 16
# Entries that are examined before other calls are served.
ENTRIES_AT_ONCE: Final = 500

_Place = TypeVar("_Place")


class PageRoom:
    """Room in one message: so many entries, together of at most PAGE_BYTES, but always one."""

    def __init__(self, entries: int = sys.maxsize) -> None:
        self._entries = entries
        self._bytes = PAGE_BYTES
        self._is_empty = True

    def take(self, *messages: Message) -> bool:
        """Return whether there is room for an entry of these messages; if so, count it."""
        size = sum([message.ByteSize() + _FIELD_BYTES for message in messages])
        if not self._is_empty and (self._entries <= 0 or size > self._bytes):
            return False
        self._is_empty = False
        self._entries -= 1
        self._bytes -= size
        return True


def page_token(name: str) -> str:
    """Of a page whose last entry has this name."""
    return base64.urlsafe_b64encode(f"after:{name}".encode()).decode()


def place_of(token: str, parse: Callable[[str], _Place], first: _Place) -> _Place:
    """What the name in a token means; `first` without a token. Raises PageTokenInvalid."""
    if not token:
        return first
    try:
        word, _, name = base64.urlsafe_b64decode(token.encode()).decode().partition(":")
        if word == "after":
            return parse(name)
    except (ValueError, binascii.Error, errors.NameInvalid):
        pass
    raise errors.PageTokenInvalid(f"page_token {token[:40]!r} was not made by this method: start without one")
