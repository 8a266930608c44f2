"""Count in a file, and save the count at a signal as scripts for Slurm do. A worker process notes signals that it gets.

Usage: saves_itself.py DIRECTORY SIGNAL SAVE_S EXIT_CODE; ends once DIRECTORY/end exists.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from pathlib import Path
from types import FrameType

directory, number = Path(sys.argv[1]), signal.Signals[f"SIG{sys.argv[2]}"]
save_s, exit_code = float(sys.argv[3]), int(sys.argv[4])
asked: list[int] = []


def ask(signal_number: int, frame: FrameType | None) -> None:
    asked.append(signal_number)
    with (directory / "asked").open("a") as file:
        file.write(f"{signal.Signals(signal_number).name}\n")


def work() -> None:
    """Note each signal that a loader's worker is not to get."""

    def note(signal_number: int, frame: FrameType | None) -> None:
        (directory / "worker-signals").open("a").write(f"{signal_number}\n")

    for each in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
        signal.signal(each, note)
    while True:
        time.sleep(60)


def main() -> None:
    worker = multiprocessing.get_context("fork").Process(target=work, daemon=True)
    worker.start()
    signal.signal(number, ask)
    saved = directory / "saved"
    count = int(saved.read_text()) if saved.exists() else 0
    while not (directory / "end").exists():
        count += 1
        with (directory / "counted").open("a") as file:
            file.write(f"{count}\n")
        if asked and save_s >= 0:
            time.sleep(save_s)
            saved.write_text(str(count))
            worker.kill()
            sys.exit(exit_code)
        time.sleep(0.05)
    worker.kill()


main()
