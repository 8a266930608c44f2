"""What a framework can do with the state of a rank: the handlers by which the orders on a control page are carried out.
A level without a handler is refused with a reason."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple


class StopRequest(NamedTuple):
    """What a handler is asked to do at a boundary.

    ``details`` is the content of the order's file; ``offloaded``: the state is in the arena and not on the device;
    ``exiting``: the process may end once the handler returns, so its work must be durable by then."""

    seq: int
    step: int
    level: int
    details: dict[str, Any]
    offloaded: bool
    exiting: bool


class Handlers(NamedTuple):
    """What a framework can do; None where it cannot. Each is called in the training thread, at a boundary.

    on_stop(step): let the device finish. on_offload: state to the arena, free device memory; returns the bytes freed.
    on_restore: bring it back. on_checkpoint: write this rank's shard; True: its memory is freed until on_restore, which
    is called only if the rank is to go on. on_hand_over: state into the arena.
    on_retune(threads, workers): 0 leaves a number as it is. by_image: CHECKPOINT and HAND_OVER are process images,
    which the daemon takes while the rank waits."""

    on_stop: Callable[[int], None] | None = None
    on_offload: Callable[[StopRequest], int] | None = None
    on_restore: Callable[[StopRequest | None], None] | None = None
    on_checkpoint: Callable[[StopRequest], bool | None] | None = None
    on_hand_over: Callable[[StopRequest], None] | None = None
    on_retune: Callable[[int, int], None] | None = None
    by_image: bool = False
