"""Synthetic data for the programs, the same in every run, in the formats that they read."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

_LETTERS = "".join(chr(code) for code in range(32, 97))


def _mnist(directory: Path, folder: str = "MNIST", images: int = 2000) -> None:
    """Write what torchvision downloads: images and labels in the IDX format."""
    raw = directory / "data" / folder / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(1)
    for part, count in (("train", images), ("t10k", images // 10)):
        pixels = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = random.integers(0, 10, count, dtype=np.uint8)
        head = struct.pack(">IIII", 2051, count, 28, 28)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(head + pixels.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + labels.tobytes())


def _letters(count: int, seed: int) -> str:
    numbers = np.random.default_rng(seed).integers(0, len(_LETTERS), count)
    return "".join(_LETTERS[number] for number in numbers)


def _characters(directory: Path) -> None:
    """Write the tokens that nanoGPT's preparation makes of a text."""
    place = directory / "data" / "shakespeare_char"
    place.mkdir(parents=True, exist_ok=True)
    for name, count, seed in (("train", 60_000, 2), ("val", 8_000, 3)):
        tokens = [_LETTERS.index(letter) for letter in _letters(count, seed)]
        np.array(tokens, dtype=np.uint16).tofile(place / f"{name}.bin")
    numbered = dict(enumerate(_LETTERS))
    meta = {"vocab_size": len(_LETTERS), "itos": numbered, "stoi": {letter: at for at, letter in numbered.items()}}
    (place / "meta.pkl").write_bytes(pickle.dumps(meta))


def _text(directory: Path) -> None:
    (directory / "input.txt").write_text("O God, O God!\n" + _letters(20_000, 4))


INPUTS: dict[str, Callable[[Path], None]] = {
    "mnist": _mnist,
    "characters": _characters,
    "text": _text,
}
