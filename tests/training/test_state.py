"""Complete state: captured from one set of objects, restored into a fresh one, training goes on alike."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from ganger.training.attached_job import attach
from ganger.training.image_io import ArenaSink, ArenaSource, open_image, write_image
from ganger.training.state import (
    Restored,
    StateMismatchError,
    TrainingObjects,
    capture,
    capture_random,
    restore,
    restore_random,
)
from torch import nn

Make = Callable[[], TrainingObjects]


def _image(training: TrainingObjects, position: dict[str, Any] | None = None) -> bytearray:
    plan = capture(training, position or {}).plan(step=3, samples=9, rank=0, world=1)
    arena = bytearray(plan.total_bytes)
    write_image(plan, ArenaSink(memoryview(arena), lambda filled: None))
    return arena


def _restore(training: TrainingObjects, arena: bytearray) -> Restored:
    return restore(training, open_image(ArenaSource(memoryview(arena), lambda needed: None)))


def _train(training: TrainingObjects, steps: int) -> None:
    model, optimizer = training.models["model"], training.optimizers["optimizer"]
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
        for scheduler in training.schedulers.values():
            scheduler.step()


def _simple(make_optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> TrainingObjects:
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 2))
    optimizer = make_optimizer(model.parameters(), **options)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], 0.5)
    return TrainingObjects({"model": model}, {"optimizer": optimizer}, {"scheduler": scheduler})


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda: _simple(torch.optim.SGD, lr=0.01),
    "momentum": lambda: _simple(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True),
    "adamw": lambda: _simple(torch.optim.AdamW, lr=0.01, amsgrad=True),
    "adam, tensor lr": lambda: _simple(torch.optim.Adam, lr=torch.tensor(0.01)),
    "adagrad": lambda: _simple(torch.optim.Adagrad, lr=0.01),
    "rmsprop": lambda: _simple(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "radam": lambda: _simple(torch.optim.RAdam, lr=0.01),
    "nadam": lambda: _simple(torch.optim.NAdam, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_alike_in_fresh_objects(name: str) -> None:
    torch.manual_seed(0)
    first = OPTIMIZERS[name]()
    _train(first, 3)
    arena = _image(first)
    _train(first, 3)
    torch.manual_seed(99)
    second = OPTIMIZERS[name]()
    restored = _restore(second, arena)
    restore_random(restored.random)
    _train(second, 3)
    for one, other in zip(
        first.models["model"].state_dict().values(), second.models["model"].state_dict().values(), strict=False
    ):
        assert torch.equal(one, other)
    assert str(first.schedulers["scheduler"].state_dict()) == str(second.schedulers["scheduler"].state_dict())


def test_restoring_keeps_the_identity_and_address_of_parameters_and_optimizer_state() -> None:
    training = OPTIMIZERS["adamw"]()
    _train(training, 2)
    arena = _image(training)
    model, optimizer = training.models["model"], training.optimizers["optimizer"]
    parameters = [(parameter, parameter.data_ptr()) for parameter in model.parameters()]
    averages = [optimizer.state[parameter]["exp_avg"].data_ptr() for parameter, _ in parameters]
    _train(training, 2)
    _restore(training, arena)
    assert [(id(p), p.data_ptr()) for p in model.parameters()] == [(id(p), address) for p, address in parameters]
    assert [optimizer.state[p]["exp_avg"].data_ptr() for p, _ in parameters] == averages


def test_optimizer_state_of_a_higher_precision_than_its_parameter_loses_no_bit() -> None:
    training = TrainingObjects({"model": nn.Linear(3, 3).to(torch.bfloat16)})
    parameter = next(training.models["model"].parameters())
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter] = {"master": torch.randn(3, 3)}
    training.optimizers["optimizer"] = optimizer
    arena = _image(training)
    fresh_model = nn.Linear(3, 3).to(torch.bfloat16)
    fresh_parameter = next(fresh_model.parameters())
    fresh = torch.optim.SGD([fresh_parameter], lr=0.5)
    _restore(TrainingObjects({"model": fresh_model}, {"optimizer": fresh}), arena)
    assert torch.equal(fresh.state[fresh_parameter]["master"], optimizer.state[parameter]["master"])
    assert fresh.param_groups[0]["lr"] == 0.1


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


def test_tied_weights_are_stored_once_and_stay_tied() -> None:
    model = _Tied()
    captured = capture(TrainingObjects({"model": model}), {})
    assert sum(tensor.numel() == 40 for tensor in captured.tensors) == 1
    arena = _image(TrainingObjects({"model": model}))
    fresh = _Tied()
    _restore(TrainingObjects({"model": fresh}), arena)
    assert fresh.head.weight is fresh.embedding.weight
    assert torch.equal(fresh.head.weight, model.head.weight)


def test_buffers_that_state_dict_leaves_out_are_restored_too() -> None:
    model, fresh = _Tied(), _Tied()
    model.scratch += 5
    _restore(TrainingObjects({"model": fresh}), _image(TrainingObjects({"model": model})))
    assert fresh.scratch.tolist() == [5, 5, 5]


def test_the_scale_of_a_gradient_scaler_comes_back() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1000.0)
    scaler.scale(torch.ones(1))
    scaler.update(new_scale=123.0)
    fresh = torch.amp.GradScaler("cpu")
    _restore(TrainingObjects(scalers={"scaler": fresh}), _image(TrainingObjects(scalers={"scaler": scaler})))
    assert fresh.get_scale() == 123.0


def test_lazy_modules_are_initialized_by_the_restore() -> None:
    model = nn.LazyLinear(3)
    model(torch.randn(2, 7))
    fresh = nn.LazyLinear(3)
    _restore(TrainingObjects({"model": fresh}), _image(TrainingObjects({"model": model})))
    assert torch.equal(fresh.weight, model.weight)


def test_gradients_are_part_of_the_state() -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    fresh = nn.Linear(2, 2)
    _restore(TrainingObjects({"model": fresh}), _image(TrainingObjects({"model": model})))
    assert model.weight.grad is not None
    assert fresh.weight.grad is not None
    assert torch.equal(fresh.weight.grad, model.weight.grad)


def test_every_random_generator_goes_on_alike() -> None:
    state = capture_random()
    drawn = (random.random(), np.random.rand(), torch.rand(1).item(), np.random.randn(), random.gauss(0, 1))
    restore_random(state)
    assert (random.random(), np.random.rand(), torch.rand(1).item(), np.random.randn(), random.gauss(0, 1)) == drawn


def test_registered_tensors_and_generators_come_back() -> None:
    generator, tensor = torch.Generator().manual_seed(5), torch.arange(3)
    torch.rand(1, generator=generator)
    arena = _image(TrainingObjects(objects={"generator": generator, "tensor": tensor}))
    fresh_generator, fresh_tensor = torch.Generator(), torch.zeros(3, dtype=torch.int64)
    _restore(TrainingObjects(objects={"generator": fresh_generator, "tensor": fresh_tensor}), arena)
    assert fresh_tensor.tolist() == [0, 1, 2]
    assert torch.rand(1, generator=fresh_generator) == torch.rand(1, generator=generator)


def test_objects_not_registered_yet_are_left_for_later() -> None:
    arena = _image(TrainingObjects(objects={"counter": torch.tensor([4])}), {"epoch": 2})
    restored = _restore(TrainingObjects(), arena)
    assert restored.unclaimed["counter"].item() == 4
    assert restored.position == {"epoch": 2}


def test_going_on_on_another_model_of_device_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    # Processors do not tell their names; accelerators do.
    def called(name: str) -> None:
        monkeypatch.setattr(torch.cpu, "get_device_name", lambda device: name, raising=False)

    made = OPTIMIZERS["sgd"]()
    assert _restore(OPTIMIZERS["sgd"](), _image(made)).notice == ""
    called("A100")
    arena = _image(made)
    assert _restore(OPTIMIZERS["sgd"](), arena).notice == ""
    called("H200")
    assert "saved on A100 and goes on on H200" in _restore(OPTIMIZERS["sgd"](), arena).notice


def test_another_model_is_refused_with_the_names_that_differ() -> None:
    arena = _image(TrainingObjects({"model": nn.Linear(2, 2)}))
    with pytest.raises(StateMismatchError, match="bias"):
        _restore(TrainingObjects({"model": nn.Linear(2, 2, bias=False)}), arena)
    with pytest.raises(StateMismatchError, match=r"\(2, 2\)"):
        _restore(TrainingObjects({"model": nn.Linear(3, 2)}), arena)


def test_schedulers_with_functions_and_nested_schedulers_come_back() -> None:
    def make() -> TrainingObjects:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 10)
        cool = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=20)
        both = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cool], [3])
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return TrainingObjects({}, {"optimizer": optimizer}, {"both": both, "plateau": plateau})

    first, second = make(), make()
    first.optimizers["optimizer"].step()
    for _ in range(5):
        first.schedulers["both"].step()
    first.schedulers["plateau"].step(1.0)
    _restore(second, _image(first))
    second.optimizers["optimizer"].step()
    for training in (first, second):
        training.schedulers["both"].step()
    rates = [training.optimizers["optimizer"].param_groups[0]["lr"] for training in (first, second)]
    assert rates[0] == rates[1]
    assert second.schedulers["plateau"].best == 1.0


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"model": 5}, "model 'model' is a int"),
        ({"model": nn.Linear(1, 1).parameters()}, "model 'model' is a generator"),
        ({"model": [nn.Linear(1, 1), None]}, "model 'model1' is a NoneType"),
        ({"scheduler": {"warm up": lambda step: step}}, "scheduler 'warm up' is a function"),
    ],
)
def test_what_has_no_state_is_refused_when_it_is_attached_and_not_when_it_is_saved(
    given: dict[str, Any], told: str
) -> None:
    with pytest.raises(TypeError, match=rf"^attach: {told}, which has no state_dict\(\) and load_state_dict\(\)$"):
        attach(**given)
