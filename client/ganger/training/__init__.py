"""Inside a training script: what Ganger needs to pause, move and restart it between two mini-batches.

Runs in the user's interpreter: standard library and torch only. Torch is imported when a script attaches, not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ganger.training.attached_job import TrainingJob, attach

__all__ = ["TrainingJob", "attach"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from ganger.training import attached_job as job

        return getattr(job, name)
    raise AttributeError(f"module 'ganger.training' has no attribute {name!r}")
