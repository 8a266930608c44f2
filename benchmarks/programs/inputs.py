"""Write synthetic data, the same in every run, in a format that a program reads: NAME DIRECTORY.

Runs in the programs' environment.
"""

from __future__ import annotations

import importlib
import pickle
import random
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

_LETTERS = "".join(chr(code) for code in range(32, 97))


def _mnist(directory: Path, images: int = 2000) -> None:
    """Write what torchvision downloads: images and labels in the IDX format."""
    raw = directory / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    drawn = np.random.default_rng(1)
    for part, count in (("train", images), ("t10k", images // 10)):
        pixels = drawn.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = drawn.integers(0, 10, count, dtype=np.uint8)
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
    """Write one text of random letters."""
    (directory / "input.txt").write_text("O God, O God!\n" + _letters(20_000, 4))


def _words(directory: Path) -> None:
    """Write the three texts of a corpus of words."""
    directory.mkdir(parents=True, exist_ok=True)
    drawn = random.Random(5)
    for name, lines in (("train", 1500), ("valid", 100), ("test", 100)):
        text = "".join(f" {' '.join(f'w{drawn.randrange(300)}' for _ in range(12))} \n" for _ in range(lines))
        (directory / f"{name}.txt").write_text(text)


def _molecules(directory: Path) -> None:
    """Write molecules with a number each."""
    drawn = random.Random(6)
    parts = ("C", "N", "O", "CC", "C(=O)", "C(C)", "C(F)", "CN", "CO")
    rows = (f"C{''.join(drawn.choices(parts, k=6))}C,{drawn.random():.4f}\n" for _ in range(400))
    (directory / "data.csv").write_text("smiles,y\n" + "".join(rows))


def _pictures(directory: Path) -> None:
    """Write a folder of pictures for each class."""
    image = importlib.import_module("PIL.Image")
    drawn = np.random.default_rng(7)
    for part, count in (("train", 40), ("validation", 8)):
        for label in range(4):
            place = directory / part / f"class-{label}"
            place.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                pixels = drawn.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                image.fromarray(pixels).save(place / f"{number:03}.png")


INPUTS: dict[str, Callable[[Path], None]] = {
    "characters": _characters,
    "mnist": _mnist,
    "molecules": _molecules,
    "pictures": _pictures,
    "text": _text,
    "words": _words,
}

if __name__ == "__main__":
    INPUTS[sys.argv[1]](Path(sys.argv[2]))
