"""Quotas as people write them: `alice=32,*=16`, or a table of the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

EVERYBODY_ELSE: Final = "*"


def quotas_of(value: object) -> dict[str, int]:
    """GPUs by user, of a table, or of `alice=8,*=4` as variables and flags have it. ValueError."""
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
    """As the core has them (`core.settings.Settings.quota_devices`)."""
    return {"" if user == EVERYBODY_ELSE else user: gpus for user, gpus in quotas.items()}


def _named(users: list[str]) -> str:
    return ", ".join(map(repr, users))
