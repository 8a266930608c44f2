"""`make fuzz`: each decoder with mutations of what it accepts, guided by the branches that they reach (libFuzzer, by
atheris): a million of them together. An input that ends in a fault is kept in build/fuzz."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import atheris

with atheris.instrument_imports(include=["ganger", "ganger_master", "ganger_daemon"]):
    from fuzzing.decoders import Decoder, decoders

FAULTS: Final = Path("build", "fuzz")
_RUNS: Final = 45_000
# For each decoder; a slow one tries fewer.
_LONGEST_S: Final = 60
_FLAGS: Final = ("-timeout=5", "-rss_limit_mb=2048", "-max_len=20000", "-verbosity=0", "-print_final_stats=1")


def fuzz(decoder: Decoder, corpus: Path) -> None:
    """Run in this process, which libFuzzer ends: with 0, or with another code for a fault."""
    for number, seed in enumerate(decoder.seeds):
        (corpus / str(number)).write_bytes(seed)

    def once(data: bytes) -> None:
        try:
            decoder.decode(data)
        except decoder.errors:
            pass

    limits = [f"-runs={_RUNS}", f"-max_total_time={_LONGEST_S}", f"-artifact_prefix={FAULTS}/"]
    atheris.Setup([sys.argv[0], *_FLAGS, *limits, str(corpus)], once)
    atheris.Fuzz()


def tried(decoder: Decoder) -> tuple[int, str]:
    """Fuzz a decoder in a child process. Return how many inputs it got, and what libFuzzer wrote about a fault."""
    with tempfile.TemporaryDirectory() as place:
        said = Path(place, "said")
        if (child := os.fork()) == 0:
            try:
                with said.open("wb") as file:
                    os.dup2(file.fileno(), 1)
                    os.dup2(file.fileno(), 2)
                (corpus := Path(place, "corpus")).mkdir()
                fuzz(decoder, corpus)
            except BaseException:
                traceback.print_exc()
            finally:
                # Whatever is raised must not leave this block, whose end removes what was said.
                sys.stderr.flush()
                os._exit(1)
        _, status = os.waitpid(child, 0)
        text = said.read_text(errors="replace")
    runs = re.search(r"number_of_executed_units: (\d+)", text)
    return int(runs[1]) if runs else 0, "" if status == 0 else text


def main(names: Sequence[str]) -> int:
    """Fuzz the decoders of these names, all where there are none."""
    FAULTS.mkdir(parents=True, exist_ok=True)
    total, failed = 0, []
    for decoder in decoders():
        if names and decoder.name not in names:
            continue
        runs, fault = tried(decoder)
        total += runs
        print(f"{decoder.name:28} {runs:9,}  {'FAULT' if fault else 'ok'}", flush=True)
        if fault:
            failed.append(decoder.name)
            print(fault)
    print(f"{total:,} inputs; {f'faults in {failed}, inputs in {FAULTS}' if failed else 'no fault'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
