"""The elastic loader: the same samples for any number of ranks and workers, and a position that is three numbers."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import pytest
import torch
from ganger.training.attached_job import attach
from ganger.training.attached_loops import ElasticLoader, SampleRange, mixed
from hypothesis import given, settings
from hypothesis import strategies as st


class _Quiet:
    """Listens to a loader; remembers nothing but what it is told."""

    def __init__(self) -> None:
        self.samples = 0
        self.resumed = 0

    def took_batch(self, loader: ElasticLoader, samples: int, waited_ns: int, is_last: bool) -> None:
        self.samples += samples

    def ended_pass(self, loader: ElasticLoader) -> None:
        pass

    def only_looked(self) -> None:
        pass

    def has_gone_on(self) -> bool:
        return True

    def resumed_pass(self, loader: ElasticLoader) -> None:
        self.resumed += 1


def _loader(
    length: int, *, batch: int, rank: int = 0, world: int = 1, workers: int | str = 0, **rest: Any
) -> ElasticLoader:
    dataset = rest.pop("dataset", list(range(length)))
    cut = SampleRange(length, batch, rank, world, True, rest.pop("drop_last", False))
    return ElasticLoader(dataset, cut, mixed(7, 0), workers, rest, _Quiet())


def _batches(loader: ElasticLoader) -> list[list[int]]:
    return [sorted(batch.tolist()) for batch in loader]


@settings(max_examples=60)
@given(st.integers(1, 60), st.sampled_from([1, 2, 3, 4]), st.integers(1, 5), st.integers(0, 3), st.booleans())
def test_each_global_batch_is_the_same_for_any_number_of_ranks(
    length: int, world: int, per: int, number: int, drop_last: bool
) -> None:
    batch = world * per
    alone = SampleRange(length, batch, 0, 1, True, drop_last)
    order = alone.order(7, number)
    assert sorted(order) == list(range(length))
    for start in alone.starts():
        cuts = [SampleRange(length, batch, rank, world, True, drop_last) for rank in range(world)]
        parts = [cut.batch(order, start) for cut in cuts]
        assert [len(part) for part in parts] == [cut.count(start) for cut in cuts]
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        dealt = [sample for turn in zip_longest(*parts) for sample in turn if sample is not None]
        whole = alone.batch(order, start)
        assert dealt[: len(whole)] == whole
        assert len(dealt) == max(len(whole), world)
        assert min(map(len, parts)) >= 1, "a rank without a sample could not step"


_WORLDS = [1, 2, 3, 4, 6]


@settings(max_examples=80)
@given(
    st.integers(6, 70),
    st.integers(1, 3).map(lambda per: 12 * per),
    st.lists(st.tuples(st.sampled_from(_WORLDS), st.integers(0, 4)), min_size=1, max_size=8),
    st.booleans(),
)
def test_whatever_the_resizes_each_sample_is_taken_once_a_pass(
    length: int, batch: int, resizes: list[tuple[int, int]], is_constant: bool
) -> None:
    taken: dict[int, list[int]] = {0: [], 1: [], 2: []}
    position: dict[str, Any] = {"pass": 0, "samples": 0, "active": False}
    for world, steps in [*resizes, (1, 1000)]:
        # Each rank of the new world begins from what one rank of the old one said.
        size = batch if is_constant else 5 * world
        ranks = [_loader(length, batch=size, rank=rank, world=world) for rank in range(world)]
        for rank in ranks:
            rank.go_to(position)
        while steps and ranks[0].position()["pass"] < 3:
            loops = [iter(rank) for rank in ranks]
            number = ranks[0].position()["pass"]
            while steps and (parts := [next(loop, None) for loop in loops])[0] is not None:
                taken[number] += [int(sample) for part in parts for sample in part]
                steps -= 1
            if not steps:
                break
        positions = [rank.position() for rank in ranks]
        assert all(one == positions[0] for one in positions)
        position = positions[0]
    for samples in taken.values():
        # Only what a batch with fewer samples than ranks lacks is taken again.
        assert sorted(set(samples)) == list(range(length))
        assert len(samples) - length < (1 if length % batch >= max(_WORLDS) and is_constant else max(_WORLDS))


def test_a_pass_gone_on_with_yields_exactly_what_was_left() -> None:
    whole = _loader(50, batch=8)
    passes = [_batches(whole), _batches(whole)]
    assert passes[0] != passes[1]
    for taken in range(8):
        loader = _loader(50, batch=8)
        loader.go_to({"pass": 0, "samples": taken * 8, "active": True})
        assert _batches(loader) == passes[0][taken:]
        assert _batches(loader) == passes[1]


def test_the_position_counts_batches_taken_not_prefetched() -> None:
    loader = _loader(64, batch=8, workers=2)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    assert loader.position() == {"pass": 0, "samples": 24, "active": True}


def test_a_loop_left_early_is_followed_by_the_next_pass() -> None:
    whole, loader = _loader(40, batch=8), _loader(40, batch=8)
    passes = [_batches(whole), _batches(whole)]
    for _ in loader:
        break
    assert _batches(loader) == passes[1]


class _Augmented(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(()) + index


def test_random_augmentation_in_workers_depends_neither_on_their_number_nor_on_a_restart() -> None:
    one, two = ([batch.tolist() for batch in _loader(24, batch=4, workers=n, dataset=_Augmented())] for n in (1, 2))
    assert one == two
    loader = _loader(24, batch=4, workers=2, dataset=_Augmented())
    loader.go_to({"pass": 0, "samples": 8, "active": True})
    assert [batch.tolist() for batch in loader] == one[2:]


def test_a_batch_that_does_not_divide_by_the_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of the number of ranks"):
        SampleRange(10, 5, 0, 2, True, False)


def test_a_pass_goes_on_in_batches_of_another_size() -> None:
    before, loader = _loader(40, batch=8), _loader(40, batch=16)
    loader.go_to({"pass": 0, "samples": 8, "active": True})
    assert [len(batch) for batch in _batches(loader)] == [16, 16]
    loader.go_to({"pass": 0, "samples": 8, "active": True})
    assert sorted([*_batches(before)[0], *(s for batch in _batches(loader) for s in batch)]) == list(range(40))


class _Workers:
    """A dataset whose samples are the workers that there are, and a random number."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, float]:
        info = torch.utils.data.get_worker_info()
        return (info.num_workers if info else 0), float(torch.rand(()))


def test_workers_left_open_follow_the_cores_from_pass_to_pass_and_change_no_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes = []
    for cores, workers in ((4, 3), (2, 1), (1, 1)):
        monkeypatch.setattr("os.sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        found = list(_loader(8, batch=2, workers="auto", dataset=_Workers()))
        assert {int(number) for numbers, _ in found for number in numbers} == {workers}
        passes.append([drawn.tolist() for _, drawn in found])
    assert passes[0] == passes[1] == passes[2]
    with pytest.raises(ValueError, match='a number or "auto"'):
        attach(model=torch.nn.Linear(2, 2)).dataloader([1], global_batch=1, num_workers="many")


def test_iterating_a_loader_draws_nothing_from_the_script_s_generator() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    list(_loader(8, batch=2))
    assert torch.rand(1) == expected


def test_outside_ganger_every_call_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GANGER_PAGE", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    model = torch.nn.Linear(2, 2)
    job = attach(model=model)
    assert (job.managed, job.rank, job.world) == (False, 0, 1)
    loader = job.dataloader(list(range(10)), global_batch=2)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    by_world = job.dataloader(list(range(10)), global_batch=lambda world: 5 * world)
    assert [batch.tolist() for batch in by_world] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert list(job.epochs(3)) == [0, 1, 2]
    with job.no_suspend():
        job.step(1.0)
    job.safe_point()
    generator = job.register("noise", torch.Generator())
    assert isinstance(generator, torch.Generator)
    assert job.step_count == 1
    with pytest.raises(ValueError, match="registered already"):
        job.register("noise", torch.Generator())
    with pytest.raises(TypeError, match="no state_dict"):
        job.register("number", 3)
