"""Whether the device memory of parked ranks is really free: what was in use before against what is now.

For devices with a driver the driver's figure of each device counts. A virtual device's memory is its process's
anonymous memory, and there the raw figure of the process is compared, for a script may have built its model before
it said hello.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Of what the ranks say they freed, this share must be seen free: the rest is rounding and context.
SHARE = 0.95
# Allocators keep a little; for a small model that little is more than its state.
SLACK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Freed:
    expected_bytes: int
    seen_bytes: int

    @property
    def enough(self) -> bool:
        return self.seen_bytes >= int(self.expected_bytes * SHARE) - SLACK_BYTES


def compare(before: Mapping[int, int], after: Mapping[int, int], reported_bytes: int) -> Freed:
    """Sums over keys seen both times (devices or pids). What cannot be read after (-1) counts as still in use."""
    seen = 0
    for key in before:
        now = after.get(key, -1)
        seen += max(0, before[key] - now) if now >= 0 else 0
    return Freed(reported_bytes, seen)
