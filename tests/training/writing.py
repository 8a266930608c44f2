"""Ways in which scripts write lines into files of theirs; as a script: trains, and writes by all of them.

Each opens the file of a path and returns what writes a line into it. Runs in Python 3.9, like what it tests.
"""

# ruff: noqa: SIM115 (the files stay open)

from __future__ import annotations

import codecs
import io
import logging
import logging.config
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

_lines: list[str] = []


def _logged(name: str) -> Callable[[str], object]:
    log = logging.getLogger(name)
    log.setLevel("INFO")
    log.propagate = False
    return lambda line: log.info(line.strip())


def file_handler(path: str) -> Callable[[str], object]:
    write = _logged("plain")
    logging.getLogger("plain").addHandler(logging.FileHandler(path, mode="w"))
    return write


def configured(path: str) -> Callable[[str], object]:
    handler = {"class": "logging.handlers.RotatingFileHandler", "filename": path, "maxBytes": 2000}
    loggers = {"configured": {"handlers": ["file"]}}
    logging.config.dictConfig(
        {"version": 1, "disable_existing_loggers": False, "handlers": {"file": handler}, "loggers": loggers}
    )
    return _logged("configured")


def opened_each_time(path: str) -> Callable[[str], object]:
    def write(line: str) -> None:
        with open(path, "a") as file:
            file.write(line)

    return write


def with_codec(path: str) -> Callable[[str], object]:
    return codecs.open(path, "w", "utf-8", buffering=0).write


def in_bytes(path: str) -> Callable[[str], object]:
    file = open(path, "ab")
    return lambda line: file.write(line.encode())


def rewritten(path: str) -> Callable[[str], object]:
    file = open(path, "w", buffering=1)

    def write(line: str) -> None:
        _lines.append(line)
        file.seek(0)
        file.truncate()
        file.writelines(_lines)

    return write


def read_back(path: str) -> Callable[[str], object]:
    file = open(path, "w+", buffering=1)

    def write(line: str) -> None:
        file.seek(0)
        assert all(word.split()[0] in ("head", "step", "tail") for word in file)
        file.write(line)

    return write


WAYS: dict[str, Callable[[str], Callable[[str], object]]] = {
    "open w": lambda path: open(path, "w", 1).write,
    "open a": lambda path: open(path, "a", 1).write,
    "open x": lambda path: open(path, "x", 1).write,
    "buffered": lambda path: open(path, "w").write,
    "buffered bytes": in_bytes,
    "open w+": lambda path: open(path, "w+", 1).write,
    "open a+": lambda path: open(path, "a+", 1).write,
    "io.open": lambda path: io.open(path, "w", 1).write,  # noqa: UP020
    "Path.open": lambda path: Path(path).open("w", 1).write,
    "codecs.open": with_codec,
    "logging.config": configured,  # which closes the handlers there are
    "logging.FileHandler": file_handler,
    "opened for each line": opened_each_time,
    "rewritten in place": rewritten,
    "read back": read_back,
}


def writers(directory: str) -> list[Callable[[str], object]]:
    return [way(os.path.join(directory, name)) for name, way in WAYS.items()]


def write(line: str, writers: Iterable[Callable[[str], object]]) -> None:
    for writer in writers:
        writer(line)


def main(directory: str) -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(1)
    torch.manual_seed(1)
    files = writers(directory)
    write("head\n", files)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = 0
    for _epoch in range(3):
        for (x,) in DataLoader(TensorDataset(torch.randn(12, 4)), batch_size=2, shuffle=True):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            write(f"step {step} {loss.item().hex()}\n", files)
    write("tail\n", files)


if __name__ == "__main__":
    main(sys.argv[1])
