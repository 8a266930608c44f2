"""One hypothesis profile for every test: on a busy machine an example's time says nothing about what it shows."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("ganger", deadline=None, print_blob=True)
settings.load_profile("ganger")
