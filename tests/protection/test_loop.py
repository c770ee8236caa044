"""Protection in a plain training loop: `shield.backward` is `loss.backward` with a defense, and nothing else."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import gradveil as gv
from gradveil.core.errors import UserError
from gradveil.core.types import Batch
from gradveil.data import DataSet
from gradveil.defenses.base import Defense, Step


def network(seed: int = 0, norm: bool = True) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        middle = [nn.BatchNorm2d(4)] if norm else []
        return nn.Sequential(nn.Conv2d(1, 4, 3), *middle, nn.ReLU(), nn.Flatten(), nn.Linear(400, 3))


def normalised(x: Tensor) -> Tensor:
    return (x - 0.5) / 0.25


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("norm", [True, False])
def test_without_a_defense_it_is_the_plain_loop(train: bool, norm: bool, shapes: DataSet) -> None:
    """The same gradients, weights and running statistics after three steps of SGD with momentum."""
    ours = network(norm=norm).train(train)
    theirs = copy.deepcopy(ours)
    shield = gv.protect(ours, "none", data=shapes.private, mean=[0.5], std=[0.25])
    assert shield.model is ours
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (ours, theirs)]
    for rows in torch.arange(24).split(8):
        x, y = shapes.private.x[rows], shapes.private.y[rows]
        for optimizer in optimizers:
            optimizer.zero_grad()
        shield.backward(x, y)
        F.cross_entropy(theirs(normalised(x)), y).backward()
        for mine, true in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(mine.grad, true.grad, rtol=1e-4, atol=1e-6)  # type: ignore[arg-type]
        for optimizer in optimizers:
            optimizer.step()
    for name, value in theirs.state_dict().items():
        assert torch.allclose(ours.state_dict()[name], value, rtol=1e-3, atol=1e-5), name


def test_running_statistics_move_in_training_and_rest_in_evaluation(shapes: DataSet) -> None:
    for train in (True, False):
        model = network().train(train)
        shield = gv.protect(model, "prune:ratio=0.5", data=shapes.private)
        before = model[1].running_mean.clone()
        shield.backward(shapes.private.x[:8], shapes.private.y[:8])
        assert torch.equal(model[1].running_mean, before) != train
        assert int(model[1].num_batches_tracked) == int(train)


def test_gradients_add_up_until_they_are_zeroed(shapes: DataSet) -> None:
    model = network(norm=False)
    shield = gv.protect(model, "none", data=shapes.private)
    x, y = shapes.private.x[:4], shapes.private.y[:4]
    shield.backward(x, y)
    once = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    shield.backward(x, y)
    assert all(torch.allclose(p.grad, 2 * g) for p, g in zip(model.parameters(), once, strict=True))  # type: ignore[arg-type]


def test_the_protected_gradient_is_what_the_optimiser_sees(shapes: DataSet) -> None:
    model = network()
    shield = gv.protect(model, "prune:ratio=0.9+clip:norm=0.01", data=shapes.private)
    shield.backward(shapes.private.x[:8], shapes.private.y[:8])
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert float((gradients[-2] == 0).float().mean()) > 0.85
    assert float(sum(g.square().sum() for g in gradients) ** 0.5) == pytest.approx(0.01, rel=1e-3)


def test_every_batch_has_noise_of_its_own(shapes: DataSet) -> None:
    model = network(norm=False)
    shield = gv.protect(model, "gaussian:std=0.1", data=shapes.private)
    found = []
    for _ in range(2):
        model.zero_grad()
        shield.backward(shapes.private.x[:4], shapes.private.y[:4])
        found.append(model[-1].bias.grad.clone())
    assert not torch.equal(*found)


class Darken(Defense):
    """Halves the pixels, and counts how many images it was given."""

    def __init__(self) -> None:
        self.seen = 0

    def data(self, batch: Batch, step: Step) -> Batch:
        self.seen += len(batch)
        return Batch(batch.x / 2, batch.y)


def test_the_data_stage_acts_once_on_every_image(shapes: DataSet) -> None:
    defense, model = Darken(), network(norm=False)
    shield = gv.protect(model, defense, data=shapes.private)
    x, y = shapes.private.x, shapes.private.y
    for rows in ([0, 1, 2, 3], [2, 3, 4, 5], [5, 0, 1, 4]):  # six images, in any company and order
        model.zero_grad()
        shield.backward(x[rows], y[rows])
        twin = copy.deepcopy(model)
        twin.zero_grad()
        F.cross_entropy(twin(x[rows] / 2), y[rows]).backward()
        assert torch.allclose(model[-1].weight.grad, twin[-1].weight.grad, atol=1e-6)
    assert defense.seen == 6


def test_what_an_image_became_it_stays(shapes: DataSet) -> None:
    """ATS draws at random; the same images must be fed in every epoch, or the draws would average out."""
    model = network(norm=False)
    shield = gv.protect(model, "ats", data=shapes.private)
    found = []
    for _ in range(2):
        model.zero_grad()
        shield.backward(shapes.private.x[:6], shapes.private.y[:6])
        found.append(model[-1].weight.grad.clone())
    assert torch.equal(*found)


def test_a_model_stage_gives_another_network_to_train(shapes: DataSet) -> None:
    model = network()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    shield = gv.protect(model, "precode:k=8", data=shapes.private)
    assert shield.model is not model
    names = dict(shield.model.named_parameters())
    assert any("bottleneck" in n for n in names)
    assert set(names) != set(dict(model.named_parameters()))
    optimizer = torch.optim.SGD(shield.model.parameters(), lr=0.1)
    shield.backward(shapes.private.x[:8], shapes.private.y[:8])
    optimizer.step()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in names.values())
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_a_protected_loop_learns(shapes: DataSet) -> None:
    """Bright or dark: any sound gradient tells them apart within a few passes."""
    x = shapes.private.x
    y = (x.mean((1, 2, 3)) > x.mean((1, 2, 3)).median()).long()
    model = network(norm=False)
    shield = gv.protect(model, "prune:ratio=0.7", data=(x, y), mean=[0.5], std=[0.25])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for _ in range(20):
        for rows in torch.arange(len(x)).split(20):
            optimizer.zero_grad()
            shield.backward(x[rows], y[rows])
            optimizer.step()
    with torch.no_grad():
        assert float((model(normalised(x)).argmax(1) == y).float().mean()) > 0.9


class Pairs(Dataset[tuple[Tensor, int]]):
    def __init__(self, batch: Batch):
        self.batch = batch

    def __len__(self) -> int:
        return len(self.batch)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.batch.x[index], int(self.batch.y[index])


def test_data_may_be_tensors_or_a_torch_dataset(shapes: DataSet) -> None:
    gradients = []
    for data in (shapes.private, (shapes.private.x, shapes.private.y), Pairs(shapes.private)):
        model = network(norm=False)
        gv.protect(model, "mixup", data=data).backward(shapes.private.x[:4], shapes.private.y[:4])
        gradients.append(model[-1].weight.grad)
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])


def test_a_frozen_layer_stays_frozen(shapes: DataSet) -> None:
    model = network(norm=False)
    model[0].requires_grad_(False)
    gv.protect(model, "gaussian:std=1", data=shapes.private).backward(shapes.private.x[:4], shapes.private.y[:4])
    assert model[0].weight.grad is None
    assert model[-1].weight.grad is not None


def test_without_data_it_says_what_is_missing() -> None:
    with pytest.raises(UserError, match="data="):
        gv.protect(network(), "prune")
