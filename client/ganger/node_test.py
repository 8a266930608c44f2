"""The program that tests a node before it takes jobs of users again: `python3 -m ganger.node_test GPUS`.

It multiplies matrices on each GPU, fills most of its free memory with patterns and reads them back, and adds up values
over all GPUs. Each result is known beforehand, bit by bit. Without PyTorch or a GPU that it can use, it does the same
on the processor with PyTorch, NumPy or plain Python, and prints which. It needs Python 3.9.

The exit code is zero if all results were right, else a key of `FAILURES`; the last line printed has the details.
"""

from __future__ import annotations

import sys
from typing import Any

# The system's own identity, which no person can have: the colon is in no name of an account.
TEST_USER = "system:health"
GPU_MISSING, WRONG_PRODUCT, WRONG_MEMORY, WRONG_SUM = 40, 41, 42, 43
# By exit code.
FAILURES = {
    GPU_MISSING: "a GPU is missing",
    WRONG_PRODUCT: "a product of matrices was wrong",
    WRONG_MEMORY: "memory did not keep what was written to it",
    WRONG_SUM: "a sum over all GPUs was wrong",
}
_SIZE = 1024
_ROUNDS = 20
_CHUNK_BYTES = 256 << 20
# Of the free memory of a GPU; the rest is for the library.
_SHARE = 0.8
_PROCESSOR_BYTES = 64 << 20
_PATTERNS = (0x5555555555555555, -0x5555555555555556)


class NodeTestError(Exception):
    """`code`: a key of `FAILURES`."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class TorchTest:
    """The test by PyTorch: on its GPUs, or `count` times on the processor."""

    def __init__(self, torch: Any, count: int) -> None:
        self._torch = torch
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        self._has_gpus = gpus > 0 and count > 0
        if self._has_gpus and gpus < count:
            raise NodeTestError(GPU_MISSING, f"PyTorch finds {gpus} of {count} GPUs")
        self.places = [f"cuda:{index}" for index in range(count)] if self._has_gpus else ["cpu"] * max(1, count)
        where = "its GPUs" if self._has_gpus else "the processor: PyTorch finds no GPU"
        self.name = f"PyTorch {torch.__version__} on {where}"

    def multiply(self, place: str) -> None:
        """Compare products of matrices of small integers, which are exact, with the processor's."""
        torch = self._torch
        generator = torch.Generator().manual_seed(1)
        left, right = [torch.randint(-8, 8, (_SIZE, _SIZE), generator=generator).float() for _ in range(2)]
        expected, there = (left @ right).to(place), (left.to(place), right.to(place))
        for turn in range(_ROUNDS):
            if not torch.equal(there[0] @ there[1], expected):
                raise NodeTestError(WRONG_PRODUCT, f"{place}: product {turn + 1} of {_ROUNDS} differs")

    def remember(self, place: str) -> str:
        """Fill memory with patterns and read them back; return how much."""
        torch, size = self._torch, _PROCESSOR_BYTES
        if self._has_gpus:
            size = int(_SHARE * torch.cuda.mem_get_info(place)[0])
        sizes = [min(_CHUNK_BYTES, size - start) // 8 for start in range(0, size, _CHUNK_BYTES)]
        chunks = [torch.empty(words, dtype=torch.int64, device=place) for words in sizes if words]
        for pattern in _PATTERNS:
            # All of them first: a cell that shares an address with another is found only so.
            for number, chunk in enumerate(chunks):
                chunk.fill_(pattern ^ number)
            wrong = sum(int((chunk != pattern ^ number).sum()) for number, chunk in enumerate(chunks))
            if wrong:
                raise NodeTestError(WRONG_MEMORY, f"{place}: {wrong} words of {size >> 20} MiB differ")
        return f"{size >> 20} MiB"

    def add(self) -> None:
        """Add up values of all GPUs on each of them."""
        torch, count = self._torch, len(self.places)
        values = [torch.full((1 << 22,), float(index + 1), device=place) for index, place in enumerate(self.places)]
        if self._has_gpus and torch.cuda.nccl.is_available(values):
            torch.cuda.nccl.all_reduce(values)
        else:
            values = [sum(value.to(place) for value in values) for place in self.places]
        for place, value in zip(self.places, values):  # noqa: B905 - Python 3.9
            if not bool((value == count * (count + 1) / 2).all()):
                raise NodeTestError(WRONG_SUM, f"{place}: the sum over {count} differs")
        if self._has_gpus:
            torch.cuda.synchronize()


class ProcessorTest:
    """The test by NumPy, or without `numpy` by plain Python, `count` times on the processor."""

    def __init__(self, numpy: Any, count: int) -> None:
        self._numpy = numpy
        self.places = ["cpu"] * max(1, count)
        self.name = (f"NumPy {numpy.__version__}" if numpy else "plain Python") + " on the processor"

    def multiply(self, place: str) -> None:
        """Compare products of matrices of integers with products that are known."""
        if self._numpy:
            rows = self._numpy.arange(_SIZE, dtype="float64") % 7
            product = (rows[:, None] * self._numpy.ones(_SIZE)) @ self._numpy.ones((_SIZE, _SIZE))
            is_right = bool((product == rows[:, None] * _SIZE).all())
        else:
            size = 64
            rows = [[row % 7] * size for row in range(size)]
            product = [[sum(one * other for one, other in zip(row, [1] * size)) for _ in rows] for row in rows]  # noqa: B905
            is_right = product == [[row % 7 * size] * size for row in range(size)]
        if not is_right:
            raise NodeTestError(WRONG_PRODUCT, f"{place}: a product differs")

    def remember(self, place: str) -> str:
        """Fill memory with patterns and read them back; return how much."""
        for pattern in (b"\x55", b"\xaa"):
            memory = bytearray(pattern) * _PROCESSOR_BYTES
            if memory.count(pattern) != _PROCESSOR_BYTES:
                raise NodeTestError(WRONG_MEMORY, f"{place}: memory differs")
        return f"{_PROCESSOR_BYTES >> 20} MiB"

    def add(self) -> None:
        """Add up values of all places."""
        count, numpy = len(self.places), self._numpy
        values = [[float(index + 1)] * 1024 for index in range(count)]
        total = list(numpy.sum(values, axis=0)) if numpy else [sum(column) for column in zip(*values)]  # noqa: B905
        if total != [count * (count + 1) / 2] * 1024:
            raise NodeTestError(WRONG_SUM, f"the sum over {count} differs")


def choose_test(count: int) -> TorchTest | ProcessorTest:
    """Return the test of so many GPUs by the best library that there is."""
    for name in ("torch", "numpy"):
        try:
            module = __import__(name)
        except ImportError:
            continue
        return TorchTest(module, count) if name == "torch" else ProcessorTest(module, count)
    return ProcessorTest(None, count)


def main(arguments: list[str]) -> int:
    """Test this node. `arguments`: the number of its GPUs that are to be tested. Return the exit code."""
    try:
        test = choose_test(int(arguments[0]) if arguments else 0)
        print(f"node test by {test.name}", flush=True)
        for place in test.places:
            test.multiply(place)
            print(f"{place}: products are right; {test.remember(place)} of memory keep their patterns", flush=True)
        test.add()
    except NodeTestError as failure:
        print(failure, flush=True)
        return failure.code
    except Exception as error:
        # As a driver reports a GPU that does not answer.
        print(f"{type(error).__name__}: {error}", flush=True)
        return 1
    print(f"sums over {len(test.places)} are right", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
