"""Protection in a plain training loop: `shield.backward` is `loss.backward` with a defense, and nothing else."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import Dataset

import gradveil as gv
from gradveil.core.errors import UserError
from gradveil.core.randomness import generator
from gradveil.core.types import Batch, Tensors
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


def noise_of(shapes: DataSet, **options: int) -> Tensor:
    """The noise of a new shield: its gradient less the plain one."""
    model = network(norm=False)
    x, y = shapes.private.x[:4], shapes.private.y[:4]
    plain = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    gv.protect(model, "gaussian:std=1.0", data=shapes.private, **options).backward(x, y)
    return torch.cat([(p.grad - g).flatten() for p, g in zip(model.parameters(), plain, strict=True)])


def test_no_two_shields_draw_the_same_noise(shapes: DataSet) -> None:
    one, two = noise_of(shapes), noise_of(shapes)
    assert abs(float(torch.corrcoef(torch.stack([one, two]))[0, 1])) < 0.15  # 1,255 values
    code = (
        "import torch, gradveil as gv\n"
        "model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))\n"
        "x, y = torch.zeros(2, 1, 2, 2), torch.tensor([0, 1])\n"
        "gv.protect(model, 'gaussian:std=1.0', data=(x, y)).backward(x, y)\n"
        "print(model[1].weight.grad.tolist())  # the images are zero: noise alone\n"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(2)]
    assert runs[0].stdout != runs[1].stdout
    assert runs[0].stdout.startswith("[[")


def test_streams_of_known_seeds_do_not_remove_the_noise(shapes: DataSet) -> None:
    noise, model = noise_of(shapes), network(norm=False)
    for seed in range(3):
        rng = generator(seed, "round", 1)
        guess = torch.cat([torch.randn(p.shape, generator=rng).flatten() for p in model.parameters()])
        assert float((noise - guess).norm()) > 1.2 * float(noise.norm())  # independent: 1.41 times


def test_a_seed_is_asked_for_and_warned_of(shapes: DataSet) -> None:
    with pytest.warns(UserWarning, match="everyone who knows the seed can undo it") as warned:
        one = noise_of(shapes, reproducible=3)
    assert len(warned) == 1
    with pytest.warns(UserWarning, match="everyone"):
        assert torch.equal(one, noise_of(shapes, reproducible=3))
    with pytest.warns(UserWarning, match="everyone"):
        assert not torch.equal(one, noise_of(shapes, reproducible=4))


class Answer(Defense):
    """Returns in the update stage whatever a test has it return."""

    def __init__(self, answer: Callable[[Tensors], object]):
        self.answer = answer

    def update(self, tensors: Tensors, step: Step) -> Tensors:
        return self.answer(tensors)  # type: ignore[return-value]


def removed(tensors: Tensors) -> Tensors:
    tensors.pop("0.bias")
    return tensors


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda t: {}, "returned nothing for '0.weight'"),
        (removed, "returned nothing for '0.bias'"),
        (lambda t: {**t, "more": torch.zeros(1)}, "added 'more'"),
        (lambda t: None, "returned NoneType"),
        (lambda t: {**t, "0.bias": [0.0] * 4}, "'0.bias' holds list"),
        (lambda t: {**t, "0.bias": torch.zeros(4, dtype=torch.complex64)}, "'0.bias' holds torch.complex64"),
        (lambda t: {**t, "0.bias": torch.zeros(4, dtype=torch.int64)}, "'0.bias' holds torch.int64"),
        (lambda t: {**t, "0.bias": torch.zeros(5)}, r"'0.bias' is \(5,\) after the defense"),
        (lambda t: {**t, "3.bias": t["3.bias"] * float("nan")}, "not finite in '3.bias'"),
        (lambda t: {**t, "3.bias": torch.full((3,), 1e300, dtype=torch.double)}, "not finite in '3.bias'"),
    ],
)
def test_what_must_not_leave_changes_no_gradient(answer: Callable[[Tensors], object], words: str, shapes: DataSet) -> None:
    model = network(norm=False)
    model[0].bias.grad = torch.ones(4)
    shield = gv.protect(model, Answer(answer), data=shapes.private)
    with pytest.raises(UserError, match=words) as refused:
        shield.backward(shapes.private.x[:4], shapes.private.y[:4])
    assert "\n" not in str(refused.value)
    assert torch.equal(model[0].bias.grad, torch.ones(4))
    assert all(p.grad is None for n, p in model.named_parameters() if n != "0.bias")


def test_gradients_that_overflow_when_added_are_refused(shapes: DataSet) -> None:
    model = network(norm=False)
    shield = gv.protect(model, Answer(lambda t: {n: torch.full_like(v, 3e38) for n, v in t.items()}), shapes.private)
    shield.backward(shapes.private.x[:4], shapes.private.y[:4])
    with pytest.raises(UserError, match="not finite in '0.weight'"):
        shield.backward(shapes.private.x[:4], shapes.private.y[:4])
    assert all(bool((p.grad == 3e38).all()) for p in model.parameters())  # type: ignore[union-attr]


def test_each_round_is_logged(shapes: DataSet, caplog: pytest.LogCaptureFixture) -> None:
    shield = gv.protect(network(norm=False), "prune:ratio=0.5", data=shapes.private)
    with caplog.at_level("INFO", logger="gradveil"):
        shield.backward(shapes.private.x[:4], shapes.private.y[:4])
    assert caplog.messages == ["'prune:ratio=0.5' acted on 4 tensors"]


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


def test_what_an_image_became_it_stays_after_a_restart(shapes: DataSet, tmp_path: Path) -> None:
    x, y = shapes.private.x[:6], shapes.private.y[:6]
    first, second = network(norm=False), network(norm=False)
    shield = gv.protect(first, "ats", data=shapes.private)
    assert shield.state_dict() == {}
    shield.backward(x, y)
    save_file(shield.state_dict(), tmp_path / "shield.safetensors")
    defense = Darken()  # encodes nothing of what is loaded
    again = gv.protect(second, defense, data=shapes.private)
    again.load_state_dict(load_file(tmp_path / "shield.safetensors"))
    again.backward(x.flip(0), y.flip(0))
    assert defense.seen == 0
    assert torch.allclose(first[-1].weight.grad, second[-1].weight.grad, atol=1e-6)
    again.backward(shapes.private.x[4:8], shapes.private.y[4:8])
    assert defense.seen == 2
    assert {n: tuple(t.shape) for n, t in again.state_dict().items()} == {"hash": (8, 32), "x": (8, 1, 12, 12), "y": (8,)}


HASHES, LABELS = torch.zeros(2, 32, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    "state",
    [
        {"x": torch.zeros(2, 1, 2, 2)},
        {"hash": torch.zeros(1, 32), "x": torch.zeros(2), "y": torch.zeros(2)},
        {"hash": HASHES[:1], "x": torch.zeros(2, 1, 12, 12), "y": LABELS},
        {"hash": HASHES[:, :31], "x": torch.zeros(2, 1, 12, 12), "y": LABELS},
        {"hash": HASHES.float(), "x": torch.zeros(2, 1, 12, 12), "y": LABELS},
        {"hash": HASHES, "x": torch.zeros(2, 1, 12, 12), "y": LABELS[0]},
        {"hash": HASHES, "x": torch.zeros(2, 3, 12, 12), "y": LABELS},
        {"hash": HASHES, "x": torch.full((2, 1, 12, 12), float("nan")), "y": LABELS},
    ],
)
def test_another_state_is_refused(state: Tensors, shapes: DataSet) -> None:
    with pytest.raises(UserError, match="not the state of a shield"):
        gv.protect(network(), "ats", data=shapes.private).load_state_dict(state)


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


@pytest.mark.filterwarnings("ignore:the protection is reproducible")
def test_data_may_be_tensors_or_a_torch_dataset(shapes: DataSet) -> None:
    gradients = []
    for data in (shapes.private, (shapes.private.x, shapes.private.y), Pairs(shapes.private)):
        model = network(norm=False)
        gv.protect(model, "mixup", data=data, reproducible=0).backward(shapes.private.x[:4], shapes.private.y[:4])
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
