"""A job as small as a job can be: steps, a state of some bytes, and all that a framework does at a boundary.

argv: number of steps (0: for ever), seconds per step, bytes of state. Prints one line per step.
"""

import json
import os
import struct
import sys
import time

import xxhash
from ganger.injob.control import Control, Handlers
from ganger.injob.page import Capability, Phase, State, Word

PREAMBLE = struct.Struct("<8sIIQQQQQQ")
CHUNK = 16 << 20


def padded(size):
    return -(-size // 64) * 64


def make_image(step, rank, world, data):
    header = json.dumps({"format": 1, "step": step, "samples": step, "rank": rank, "world": world, "tensors": []}).encode()
    data_offset = padded(64 + len(header))
    trailer_offset = padded(data_offset + len(data))
    region = bytes(data) + bytes(trailer_offset - data_offset - len(data))
    digests = [xxhash.xxh3_64_intdigest(region[at : at + CHUNK]) for at in range(0, len(region), CHUNK)]
    words = b"".join(struct.pack("<Q", digest) for digest in digests)
    trailer = words + struct.pack("<Q", xxhash.xxh3_64_intdigest(words))
    total = trailer_offset + len(trailer)
    preamble = PREAMBLE.pack(
        b"GANGERST", 1, 1, len(header), total, data_offset, trailer_offset, xxhash.xxh3_64_intdigest(header), CHUNK
    )
    front = preamble + header
    return front + bytes(data_offset - len(front)) + region + trailer


def read_image(image):
    fields = PREAMBLE.unpack(image[:64])
    header = json.loads(image[64 : 64 + fields[3]])
    return header["step"], bytearray(image[fields[5] : fields[6]])


def main():
    steps, pause, size = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    control = Control.from_environment()
    assert control is not None
    assert control.claim()
    page = control.page
    state = {"data": bytearray(padded(size))}
    control.hello(Capability.PAUSE | Capability.OFFLOAD | Capability.CHECKPOINT)

    def current():
        return make_image(control.step, control.rank, control.world, state["data"])

    def fill(request):
        image = current()
        page.set(Word.ARENA_FILLED, 0)
        page.set(Word.ARENA_SIZE, len(image))
        half = len(image) // 2
        os.pwrite(control.arena_fd, image[:half], 0)
        page.set(Word.ARENA_FILLED, half)
        os.pwrite(control.arena_fd, image[half:], half)
        page.set(Word.ARENA_FILLED, len(image))
        return len(image)

    def offload(request):
        freed = fill(request)
        state["data"] = bytearray()
        return freed

    def restore(request):
        image = os.pread(control.arena_fd, page.get(Word.ARENA_SIZE), 0)
        _, state["data"] = read_image(image)

    def checkpoint(request):
        directory = request.details["checkpoint"].replace("{step}", str(request.step))
        os.makedirs(directory, exist_ok=True)
        path = os.path.join(directory, f"rank-{control.rank}.shard")
        if request.offloaded:
            image = os.pread(control.arena_fd, page.get(Word.ARENA_SIZE), 0)
        else:
            image = current()
        with open(path, "wb") as file:
            file.write(image)
            os.fsync(file.fileno())
        if not request.exiting:
            control.checkpoint_durable(request.seq, request.step)

    control.handlers = Handlers(
        on_offload=offload, on_restore=restore, on_checkpoint=checkpoint, on_hand_over=fill
    )
    first = 0
    if control.restore is not None and control.restore.kind == "checkpoint":
        with open(os.path.join(control.restore.path, f"rank-{control.rank}.shard"), "rb") as file:
            first, state["data"] = read_image(file.read())
    elif control.restore is not None:
        page.set(Word.STATE, State.RESTORING)
        while page.get(Word.ARENA_AVAILABLE) < 64:
            control.safe_point()
            time.sleep(0.001)
        total = PREAMBLE.unpack(os.pread(control.arena_fd, 64, 0))[4]
        while page.get(Word.ARENA_AVAILABLE) < total:
            control.safe_point()
            time.sleep(0.001)
        first, state["data"] = read_image(os.pread(control.arena_fd, total, 0))
    control.start(first)
    page.set(Word.PHASE, Phase.TRAINING)
    while steps == 0 or control.step < steps:
        time.sleep(pause)
        at = control.step % max(1, size - 8)
        state["data"][at] = (state["data"][at] + control.step) % 256
        digest = xxhash.xxh3_64_hexdigest(bytes(state["data"]))
        print(f"step {control.step + 1} state {digest}", flush=True)
        control.boundary()
    control.finish()


main()
