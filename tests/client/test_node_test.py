"""The program that tests a node: results that are right pass, and each kind of wrong result has its exit code."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from ganger import node_test
from ganger.node_test import FAILURES, GPU_MISSING, WRONG_MEMORY, WRONG_PRODUCT, WRONG_SUM, NodeTestError, ProcessorTest

Output = pytest.CaptureFixture[str]


@pytest.mark.parametrize("missing", [(), ("torch",), ("torch", "numpy")])
def test_every_library_tests_the_processor_and_names_itself(
    missing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    try:
        __import__("torch")
        has_torch = True
    except ImportError:
        has_torch = False
    assert node_test.main(["2"]) == 0
    first, *places, last = capsys.readouterr().out.splitlines()
    if has_torch:
        assert first.startswith("node test by PyTorch")
    else:
        assert ("plain Python" in first) == ("numpy" in missing)
    assert len(places) == 2
    assert last == "sums over 2 are right"


class Altered:
    """A library in which some names stand for something else."""

    def __init__(self, library: Any, **names: Any) -> None:
        self._library = library
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)


def test_a_wrong_product_and_a_wrong_sum_are_found() -> None:
    numpy = pytest.importorskip("numpy")
    wrong = Altered(numpy, ones=numpy.zeros)
    with pytest.raises(NodeTestError) as found:
        ProcessorTest(wrong, 2).multiply("cpu")
    assert found.value.code == WRONG_PRODUCT
    wrong = Altered(numpy, sum=lambda values, axis: numpy.sum(values[1:], axis=axis))
    with pytest.raises(NodeTestError) as found:
        ProcessorTest(wrong, 2).add()
    assert found.value.code == WRONG_SUM


@pytest.mark.torch
def test_pytorch_finds_wrong_products_memory_sums_and_missing_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    torch = pytest.importorskip("torch")

    cuda = Altered(torch.cuda, is_available=lambda: True, device_count=lambda: 1)
    for altered, code in (
        ({"equal": lambda one, other: False}, WRONG_PRODUCT),
        ({"empty": lambda size, dtype, device: _Stuck(torch.zeros(size, dtype=dtype))}, WRONG_MEMORY),
        ({"full": lambda size, value, device: torch.zeros(size)}, WRONG_SUM),
        ({"cuda": cuda}, GPU_MISSING),
    ):
        monkeypatch.setitem(sys.modules, "torch", Altered(torch, **altered))
        assert node_test.main(["2"]) == code
        assert code in FAILURES
        assert capsys.readouterr().out.strip()


class _Stuck:
    """Memory of which the first word cannot be written."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory

    def fill_(self, value: int) -> None:
        self._memory[1:].fill_(value)

    def __ne__(self, value: object) -> Any:
        return self._memory != value

    __hash__ = None  # type: ignore[assignment]
