"""Lists in pages: how much one holds, and the token by which the next goes on."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from typing import Final, TypeVar

from ganger.wire import errors
from ganger.wire.channels import PART_BYTES

PAGE_DEFAULT: Final = 100
PAGE_MOST: Final = 1_000
# A page of large messages must still fit into one.
PAGE_BYTES: Final = PART_BYTES

_Place = TypeVar("_Place")


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
