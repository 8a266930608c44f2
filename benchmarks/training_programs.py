"""Pieces of the programs that benchmarks train: they run in processes of jobs, so they are texts here."""

from __future__ import annotations

# Process, number of the step, its begin and end (nanoseconds of the clock of control pages), and the processor time in
# nanoseconds that the process had used by then.
NOTE_FORMAT = "<QQQQQ"

# `note = note_to(path)`, `begin = now()`, and `note(number, begin)` at the end of each step.
NOTING = f"""
import os, struct, time
def now():
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)
def note_to(path):
    notes = open(path, "ab", buffering=0)
    def note(number, begin):
        notes.write(struct.pack("{NOTE_FORMAT}", os.getpid(), number, begin, now(), time.process_time_ns()))
    return note
"""

# `Heavy(size)`: most of the state is buffers that no step touches, so that a step stays short at any size.
HEAVY = """
import torch
class Heavy(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)
        for part in range(16):
            self.register_buffer(f"part{part}", torch.full((size // 64,), float(part)))
    def forward(self, x):
        return self.layer(x)
"""
