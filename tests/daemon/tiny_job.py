"""A job as small as a job can be: steps, a state of some bytes, and all that a framework does at a boundary.

argv: number of steps (0: for ever), seconds per step, bytes of state, and how it misbehaves: "keeps" its memory when it
is to give it up, is "deaf" to all orders, "fills its arena" at the start, or its ranks come to their boundaries
"apart". For a rank K whose directory has a file full-K storage is full. Prints one line per step.
"""

import errno
import json
import os
import signal
import sys
import time

import xxhash
from ganger.injob import state_image
from ganger.injob.control import Control, Handlers
from ganger.injob.page_layout import Capability, PagePhase, PageState, Word
from ganger.training import agent


def padded(size):
    return -(-size // 64) * 64


def image_parts(step, rank, world, data):
    """What comes before the data, the data itself and not a copy of it, what comes after."""
    header = {"format": 1, "step": step, "samples": step, "rank": rank, "world": world, "tensors": [], "tree": None}
    kind = state_image.preferred_digest()
    preamble, encoded = state_image.lay_out(header, len(data), kind)
    digests = state_image.ChunkDigests(kind, state_image.CHUNK_BYTES)
    digests.update(data)
    return preamble.pack() + encoded, memoryview(data), digests.trailer()


def read_image(whole):
    preamble = state_image.parse_preamble(whole)
    header = json.loads(whole[64 : preamble.data_offset])
    return header["step"], bytearray(whole[preamble.data_offset : preamble.trailer_offset])


def handlers(control, state, mode):
    """Return the handlers that offload, restore and save `state["data"]`."""
    page = control.page

    def current():
        return image_parts(control.step, control.rank, control.world, state["data"])

    def fill(request):
        front, data, back = current()
        half = len(data) // 2
        page.set(Word.ARENA_FILLED, 0)
        page.set(Word.ARENA_SIZE, len(front) + len(data) + len(back))
        filled = 0
        for part in (front, data[:half], data[half:], back):
            filled += os.pwrite(control.arena_fd, part, filled)
            page.set(Word.ARENA_FILLED, filled)
        return filled

    def offload(request):
        freed = fill(request)
        if mode == "keeps":
            state["kept"] = state["data"]
        state["data"] = bytearray()
        return freed

    def restore(request):
        whole = os.pread(control.arena_fd, page.get(Word.ARENA_SIZE), 0)
        _, state["data"] = read_image(whole)

    def checkpoint(request):
        directory = request.details["checkpoint"].replace("{step}", str(request.step))
        os.makedirs(directory, exist_ok=True)
        if os.path.exists(f"full-{control.rank}"):
            raise OSError(errno.ENOSPC, "No space left on device", directory)
        path = os.path.join(directory, f"rank-{control.rank}.shard")
        kept = (os.pread(control.arena_fd, page.get(Word.ARENA_SIZE), 0),) if request.offloaded else current()
        with open(path, "wb") as file:
            file.writelines(kept)
            os.fsync(file.fileno())
        if not request.exiting:
            control.checkpoint_durable(request.seq, request.step)

    return Handlers(on_offload=offload, on_restore=restore, on_checkpoint=checkpoint, on_hand_over=fill)


def restored(control):
    """Return the step and the data that the job starts from, from a checkpoint or an arena; None without either."""
    if control.restore is None:
        return None
    if control.restore.kind == "checkpoint":
        with open(os.path.join(control.restore.path, f"rank-{control.rank}.shard"), "rb") as file:
            return read_image(file.read())
    control.page.set(Word.STATE, PageState.RESTORING)
    wait_for_bytes(control, 64)
    total = state_image.parse_preamble(os.pread(control.arena_fd, 64, 0)).total_bytes
    wait_for_bytes(control, total)
    return read_image(os.pread(control.arena_fd, total, 0))


def wait_for_bytes(control, count):
    while control.page.get(Word.ARENA_AVAILABLE) < count:
        control.safe_point()
        time.sleep(0.001)


def misbehave(control, mode):
    """Ignore all orders for ever, or wait within a step for the file `go`, as the mode demands."""
    if mode == "deaf":
        control.boundary()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("deaf", flush=True)
        while True:
            time.sleep(1)
    if mode == "long step":
        signal.signal(signal.SIGUSR2, lambda *_: print("signalled", flush=True))
        while not os.path.exists("go"):
            time.sleep(0.02)


def main():
    steps, pause, size = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    mode = sys.argv[4] if len(sys.argv) > 4 else ""
    control = Control.from_environment()
    assert control is not None
    assert control.claim()
    agent.stand_down()
    state = {"data": bytearray(padded(size))}
    for at in range(0, size, 4096):
        state["data"][at] = 0  # memory counts once it is written to
    if mode == "fills its arena":
        os.posix_fallocate(control.arena_fd, 0, os.fstat(control.arena_fd).st_size)
    control.hello(Capability.PAUSE | Capability.OFFLOAD | Capability.CHECKPOINT)
    control.handlers = handlers(control, state, mode)
    first, state["data"] = restored(control) or (0, state["data"])
    control.start(first)
    control.page.set(Word.PHASE, PagePhase.TRAINING)
    misbehave(control, mode)
    while steps == 0 or control.step < steps:
        time.sleep(pause * (1 + control.rank) if mode == "apart" else pause)
        if mode.startswith("reads "):
            with open(mode[6:], "rb", buffering=0) as file:
                while file.read(1 << 20):
                    pass
        at = control.step % max(1, size - 8)
        state["data"][at] = (state["data"][at] + control.step) % 256
        digest = xxhash.xxh3_64_hexdigest(state["data"])
        print(f"step {control.step + 1} state {digest}", flush=True)
        control.boundary()
    control.finish()


main()
