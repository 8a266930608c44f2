"""The former name of `ganger.injob.bootstrap`: ranks launched by version 0.1 import it."""

from __future__ import annotations
