"""Job schedulers: what one job's scheduler decides, the default one, and the host that runs them.

Write your own by deriving from `JobScheduler`; see docs/job-schedulers.md.
"""

from __future__ import annotations

from ganger.scheduling.scheduler import JobScheduler, Proposal, Turn

__all__ = ["JobScheduler", "Proposal", "Turn"]
