"""Quotas as people write them: `alice=32,*=16`, or a table of the same.

Imports nothing heavy: command line flags are parsed by it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

ALL_OTHER_USERS: Final = "*"


def quotas_of(value: object) -> dict[str, int]:
    """Return GPUs by user from a table, or from the `alice=8,*=4` of variables and flags. Raises ValueError."""
    if isinstance(value, str):
        pairs = [pair.partition("=") for pair in value.split(",") if pair.strip()]
        named = Counter(user.strip() for user, _, _ in pairs)
        twice = [user for user, times in named.items() if times > 1]
        if twice:
            raise ValueError(f"quotas: {_named(twice)} twice: give each user one number")
        value = {user.strip(): gpus.strip() for user, _, gpus in pairs}
    if not isinstance(value, Mapping):
        raise ValueError(f"quotas: {value!r} is no table of users and GPUs")
    wrong = [user for user, gpus in value.items() if not user or isinstance(gpus, bool) or not str(gpus).isdecimal()]
    if wrong:
        raise ValueError(
            f"quotas: {_named(wrong)}: write USER=GPUS, a number from 0 on, and *=GPUS for every other user"
        )
    return {user: int(str(gpus)) for user, gpus in value.items()}


def as_settings(quotas: Mapping[str, int]) -> dict[str, int]:
    """Return quotas as `CoreSettings.quota_devices` has them: the empty name stands for all other users."""
    return {"" if user == ALL_OTHER_USERS else user: gpus for user, gpus in quotas.items()}


def _named(users: list[str]) -> str:
    return ", ".join(map(repr, users))
