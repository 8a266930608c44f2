"""A rank of a gang without a framework: free-running steps, a collective over shared memory, a log of what it did.

argv: directory, shared file, rank, world, queue depth, sync every, steps, seed.
"""

from __future__ import annotations

import mmap
import os
import random
import sys
import time

from ganger.injob.control import Control, Handlers, StopRequest
from ganger.injob.page_layout import Capability


def main() -> None:
    directory, shared_path = sys.argv[1:3]
    rank, world, depth, sync_every, steps, seed = map(int, sys.argv[3:9])
    with open(shared_path, "r+b") as file:
        begun = memoryview(mmap.mmap(file.fileno(), 4096)).cast("Q")
    draw = random.Random(seed * 100 + rank)
    log = open(os.path.join(directory, f"rank-{rank}.steps"), "a", buffering=1)  # noqa: SIM115

    def wait_for_device(step: int) -> None:
        while min(begun[other] for other in range(world)) < step:
            time.sleep(0.0001)

    def offload(request: StopRequest) -> int:
        log.write(f"offload {request.step} {sorted(request.details)}\n")
        return 1000

    def checkpoint(request: StopRequest) -> None:
        log.write(f"checkpoint {request.step} {request.exiting}\n")
        if not request.exiting:
            control.checkpoint_durable(request.seq, request.step)

    control = Control.from_environment()
    assert control is not None
    assert control.claim()
    control.handlers = Handlers(
        on_stop=wait_for_device,
        on_offload=offload,
        on_restore=lambda _: log.write(f"restore {control.step}\n") and None,
        on_checkpoint=checkpoint,
    )
    control.hello(Capability.PAUSE | Capability.OFFLOAD | Capability.CHECKPOINT)
    control.start(0)
    for step in range(1, steps + 1):
        begun[rank] = step
        time.sleep(draw.choice([0, 0, 0.0005, 0.003]))
        wait_for_device(step if sync_every and step % sync_every == 0 else step - depth)
        control.boundary()
    control.finish()
    log.write(f"end {control.step}\n")


main()
