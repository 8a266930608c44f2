"""Access tokens of people: what the master keeps of each, and how they are made, revoked and forgotten.

A token is a text that its holder sends with every call over TLS, in place of a certificate. Only its digest is kept,
so that a copy of the database admits no caller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ganger.text import format_duration
from msgspec.structs import replace

from ganger_master.core.answers import RefusedError
from ganger_master.core.node_model import AccessToken

if TYPE_CHECKING:
    from ganger_master.core.commands import CreateToken
    from ganger_master.core.events import TokenChanged
    from ganger_master.core.state import State

_MOST: Final = 10_000
_LONGEST_S: Final = 366 * 86_400.0
# A token that has ended is listed, and refused by its name, for so long.
_KEPT_S: Final = 30 * 86_400.0


def made(state: State, command: CreateToken, now: float) -> AccessToken:
    """Return a new token. Raises RefusedError."""
    # Tested positively, because NaN is neither more nor less.
    if not 0.0 < command.lasts_s <= _LONGEST_S:
        raise RefusedError("REQUEST_INVALID", "lifetime: more than zero, at most a year")
    if sum([not _is_over(token, now) for token in state.tokens.values()]) >= _MOST:
        raise RefusedError("QUEUE_FULL", f"there are {_MOST} tokens already: wait until some have ended")
    return AccessToken(command.name, command.holder, command.digest, now, now + command.lasts_s, command.user)


def revoked(state: State, name: str, now: float) -> AccessToken:
    """Return a token as it is once it is revoked. Raises RefusedError for an unknown one."""
    token = state.tokens.get(name)
    if token is None:
        raise RefusedError("TOKEN_NOT_FOUND", f"there is no token {name!r}: `ganger tokens list` shows those there are")
    return token if token.revoke_time else replace(token, revoke_time=now)


def change(state: State, event: TokenChanged) -> None:
    """Store a new or revoked token, and forget those that ended long ago."""
    token = event.token
    kind = "token_revoked" if token.revoke_time else "token_created"
    lasts = "" if token.revoke_time else f" for {format_duration(token.expiry - event.time)}"
    state.put_token(token)
    state.history(event.time, "cluster", kind, event.cause, f"{token.name} of {token.user}{lasts}")
    for one in list(state.tokens.values()):
        if _is_over(one, event.time):
            state.forget_token(one.name)


def _is_over(token: AccessToken, now: float) -> bool:
    return now - token.expiry > _KEPT_S
