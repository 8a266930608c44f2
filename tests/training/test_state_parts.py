"""Shards by parameter: any number of ranks takes over what any number has saved, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ganger.injob.page_layout import Capability
from ganger.training.attached_job import attach
from ganger.training.image_io import ArenaSink, ArenaSource, OpenImage, open_image, write_image
from ganger.training.state import StateMismatchError, TrainingObjects, capture
from ganger.training.state_parts import keep_shard, restore_part, size_offer
from torch import nn

pytestmark = pytest.mark.torch


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3).to(torch.bfloat16))


def servers(number: int, seed: int, train: bool = False) -> list[TrainingObjects]:
    """Each of so many servers, with every so manieth parameter and its optimizer."""
    found = []
    for server in range(number):
        model = network(seed)
        own = list(model.parameters())[server::number]
        optimizer = torch.optim.AdamW(own, lr=0.1 * seed, amsgrad=True)
        training = TrainingObjects({"model": model}, {"optimizer": optimizer}, objects={"seen": torch.tensor([seed])})
        keep_shard(training, own)
        if train:
            for step in range(3):
                for place, parameter in enumerate(own):
                    parameter.grad = torch.full_like(parameter, 0.3 + step + place)
                optimizer.step()
        found.append(training)
    return found


def images(trainings: list[TrainingObjects]) -> Callable[[int], OpenImage]:
    """The shards of a world of a worker, these servers, and another worker."""
    worker = TrainingObjects({"model": network(9)})
    world = [worker, *trainings, worker]
    opened = []
    for rank, training in enumerate(world):
        plan = capture(training, {"steps": 3}).plan(step=3, samples=0, rank=rank, world=len(world))
        arena = bytearray(plan.total_bytes)
        write_image(plan, ArenaSink(memoryview(arena), lambda filled: None))
        opened.append(open_image(ArenaSource(memoryview(arena), lambda needed: None)))
    return opened.__getitem__


def contents(trainings: list[TrainingObjects]) -> dict[str, torch.Tensor]:
    """All parameters, gradients and optimizer states of the servers, by name."""
    found = {}
    for training in trainings:
        for path, parameter in training.models["model"].named_parameters():
            found[path] = parameter.detach()
            if parameter.grad is not None:
                found[f"{path} gradient"] = parameter.grad
            for key, value in training.optimizers["optimizer"].state[parameter].items():
                found[f"{path} {key}"] = value
    return found


@pytest.mark.parametrize(("former", "following"), [(1, 3), (3, 1), (2, 3), (3, 2), (2, 2)])
def test_other_numbers_of_servers_have_the_same_parameters_and_optimizer_state(former: int, following: int) -> None:
    old, new = servers(former, 1, train=True), servers(following, 2)
    shard = images(old)
    for number, training in enumerate(new):
        own = shard(1 + number % former)
        restored = restore_part(training, own, shard, range(1, 1 + former))
        assert (restored.step, restored.position) == (3, {"steps": 3})
    expected, found = contents(old), contents(new)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert all(expected[name].dtype == found[name].dtype for name in expected)
    for training in new:
        # What belongs to no parameter is that of the rank from whose shard it starts.
        assert training.optimizers["optimizer"].param_groups[0]["lr"] == 0.1
        assert training.objects["seen"].item() == 1


def test_servers_that_took_over_train_on_as_the_former_ones_would_have() -> None:
    old, new = servers(1, 1, train=True), servers(3, 2)
    for number, training in enumerate(new):
        restore_part(training, images(old)(1), images(old), [1])
        assert number < 3
    for training in (*old, *new):
        for parameter in training.models["model"].parameters():
            parameter.grad = torch.full_like(parameter, 0.7)
        training.optimizers["optimizer"].step()
    expected, found = contents(old), contents(new)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_optimizer_state_follows_its_parameter_into_another_order() -> None:
    (old,), (new,) = servers(1, 1, train=True), servers(1, 2)
    own = list(new.models["model"].parameters())[::-1]
    new.optimizers["optimizer"] = torch.optim.AdamW(own, lr=0.2, amsgrad=True)
    restore_part(new, images([old])(1), images([old]), [1])
    expected, found = contents([old]), contents([new])
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_servers_without_parameters_take_part() -> None:
    def idle() -> TrainingObjects:
        training = TrainingObjects({"model": network(3)}, objects={"seen": torch.tensor([3])})
        keep_shard(training, [])
        return training

    old, new = [*servers(1, 1, train=True), idle()], [idle(), *servers(1, 2)]
    shard = images(old)
    for number, training in enumerate(new):
        restore_part(training, shard(1 + number), shard, [1, 2])
    expected, found = contents(old[:1]), contents(new[1:])
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    # Its own shard has no optimizer.
    assert new[1].optimizers["optimizer"].param_groups[0]["lr"] == 0.1
    assert [training.objects["seen"].item() for training in new] == [1, 3]


def test_tied_parameters_and_some_without_a_step_keep_their_state() -> None:
    def server(seed: int, names: list[str]) -> TrainingObjects:
        torch.manual_seed(seed)
        model = nn.ModuleDict({"in": nn.Linear(3, 3, bias=False), "mid": nn.Linear(3, 3), "out": nn.Linear(3, 3)})
        model["out"].weight = model["in"].weight
        own = [model.get_parameter(name) for name in names]
        training = TrainingObjects({"model": model}, {"optimizer": torch.optim.Adam(own)})
        keep_shard(training, own)
        return training

    old = [server(1, ["in.weight", "mid.bias"]), server(1, ["mid.weight", "out.bias"])]
    for training in old:
        first = next(training.models["model"].parameters())
        first.grad = torch.ones_like(first)
        training.optimizers["optimizer"].step()
    new, shard = server(2, ["out.bias", "out.weight", "mid.weight", "mid.bias"]), images(old)
    restore_part(new, shard(2), shard, [1, 2])
    expected, found = contents(old), contents([new])
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    tied = dict(new.models["model"].named_parameters(remove_duplicate=False))
    assert tied["in.weight"] is tied["out.weight"]


def test_a_parameter_that_no_server_has_saved_or_that_changed_its_shape_stops_the_start() -> None:
    shard = images(servers(2, 1, train=True))
    (alone,) = servers(1, 2)
    with pytest.raises(StateMismatchError, match=r"the checkpoint's shards do not have model\.0\.bias"):
        restore_part(alone, shard(1), shard, [1])
    model = nn.Sequential(nn.Conv2d(1, 4, 5))
    training = TrainingObjects({"model": model}, {"optimizer": torch.optim.AdamW(model.parameters())})
    keep_shard(training, model.parameters())
    with pytest.raises(StateMismatchError, match=r"saved model\.0\.weight is \[4, 1, 3, 3\]"):
        restore_part(training, shard(1), shard, [1, 2])


def test_a_shard_of_another_checkpoint_is_refused() -> None:
    shard = images(servers(2, 1, train=True))
    (alone,) = servers(1, 2)
    with pytest.raises(StateMismatchError, match="the shard of rank 2 is of another checkpoint"):
        restore_part(alone, shard(1), lambda rank: shard(1), [1, 2])


def test_a_shard_is_offered_for_other_numbers_of_ranks_and_one_that_cannot_be_is_not() -> None:
    (training,) = servers(1, 1)
    assert size_offer(training) == (Capability.RESHARD, "")

    class Own(torch.optim.SGD):
        def state_dict(self) -> dict[str, object]:
            return {}

    training.optimizers = {"optimizer": Own(list(training.models["model"].parameters()), lr=0.1)}
    assert size_offer(training)[1] == "optimizer optimizer saves its state in a form of its own"


def test_a_shard_of_parameters_that_are_not_the_models_is_refused_at_once() -> None:
    model = network(1)
    with pytest.raises(ValueError, match="1 parameters of the shard are in no model"):
        attach(model=model, shard=[nn.Parameter(torch.ones(1))])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="optimizer has parameters that are not in the shard"):
        attach(model=model, optimizer=optimizer, shard=list(model.parameters())[:1])
