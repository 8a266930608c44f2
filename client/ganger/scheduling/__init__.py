"""Job schedulers: what one job's scheduler decides, the default one, and the host that runs them.

Write your own by deriving from `JobScheduler`; see docs/how-to/job-schedulers.md.
"""

from __future__ import annotations

from ganger.scheduling.job_scheduler import JobScheduler, PlacementLease, Proposal

__all__ = ["JobScheduler", "PlacementLease", "Proposal", "Turn"]

# The name of versions up to 0.1.
Turn = PlacementLease
