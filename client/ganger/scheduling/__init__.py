"""Job schedulers: one decision maker per job. It sees the view, has a turn, and proposes; the master judges.

Write your own by subclassing `JobScheduler`; `DefaultScheduler` is the normal path of every job.
"""

from __future__ import annotations

from ganger.scheduling.base import JobScheduler, Proposal, Turn
from ganger.scheduling.default import DefaultScheduler

__all__ = ["DefaultScheduler", "JobScheduler", "Proposal", "Turn"]
