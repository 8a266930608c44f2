"""What is imported ahead of time, and the proof that children forked afterwards are healthy.

Only imports: one tensor operation starts OpenMP's threads, and a child of such a process hangs for ever in its first
parallel region (libgomp does not survive fork); one CUDA call, and no child can use the device.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import sys

PRELOADED = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data",
    # Imported by the first optimizer step otherwise, at the cost of a second.
    "torch._dynamo",
    "multiprocessing.connection",
    "multiprocessing.queues",
    "multiprocessing.reduction",
    "ganger.injob.bootstrap",
    "ganger.injob.control",
    "ganger.training.agent",
    "ganger.training.attached_job",
    "ganger.training.unmodified_script",
)
_CANARY_S = 20.0


def preload() -> list[str]:
    """Import what most training needs; return the names that could be. What is missing is no error."""
    found = []
    for name in PRELOADED:
        if name.startswith(("torch.", "ganger.training.")) and "torch" not in found:
            continue
        try:
            importlib.import_module(name)
        except Exception as problem:  # a broken installation fails in the user's program, where it is seen
            if not isinstance(problem, ModuleNotFoundError):
                print(f"ganger launcher: {name} cannot be imported ahead of time: {problem}", file=sys.stderr)
            continue
        found.append(name)
    gc.collect()
    # Children share these pages; a collection that wrote into every object's header would copy them all.
    gc.freeze()
    return found


def is_fork_safe() -> bool:
    """Prove that a forked child can compute: one thread here, and a canary that multiplies matrices in parallel."""
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        print(f"ganger launcher: {threads} threads after importing, so scripts are started by exec", file=sys.stderr)
        return False
    torch = sys.modules.get("torch")
    if torch is None:
        return True
    if torch.cuda.is_initialized():
        print("ganger launcher: CUDA is initialised after importing, so scripts are started by exec", file=sys.stderr)
        return False
    pid = os.fork()
    if pid == 0:
        try:
            matrix = torch.ones(256, 256, requires_grad=True)
            (matrix @ matrix).sum().backward()
            os._exit(0)
        except BaseException:
            os._exit(1)
    descriptor = os.pidfd_open(pid)
    try:
        readable, _, _ = select.select([descriptor], [], [], _CANARY_S)
        if not readable:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    finally:
        os.close(descriptor)
    if status != 0:
        print("ganger launcher: a forked child cannot compute, so scripts are started by exec", file=sys.stderr)
    return status == 0
