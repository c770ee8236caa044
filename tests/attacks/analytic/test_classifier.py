"""The inputs of a classifier, from the gradient of a batch with fewer images than classes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import jacrev

import gradveil as gv
from gradveil.attacks.analytic.classifier import _Equations, affordable_starts, classifier_inputs, read_gradient
from gradveil.core.local_training import LocalTraining
from gradveil.data import DataSet

CLASSES, WIDTH = 10, 48


def problem(images: int, seed: int) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Inputs, labels, and the gradient of their mean loss in single precision with the classifier's parameters."""
    rng = torch.Generator().manual_seed(seed)
    x, labels = torch.rand(images, WIDTH, generator=rng), torch.randint(CLASSES, (images,), generator=rng)
    weight, bias = torch.randn(CLASSES, WIDTH, generator=rng) / WIDTH**0.5, 0.1 * torch.randn(CLASSES, generator=rng)
    parameters = [weight.requires_grad_(), bias.requires_grad_()]
    gradients = torch.autograd.grad(F.cross_entropy(x @ weight.T + bias, labels), parameters)
    tensors = [t.detach().double() for t in (*gradients, *parameters)]
    return x.double(), labels, (tensors[0], tensors[1], tensors[2], tensors[3])


def farthest(x: Tensor, inputs: Tensor) -> float:
    """Distance of the worst read image from its own, as a share of its length."""
    return float((torch.cdist(x, inputs).amin(1) / x.norm(dim=1)).max())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("images", [2, 4, 7])
def test_inputs_are_exact_for_any_order_of_the_labels(images: int, seed: int) -> None:
    x, labels, tensors = problem(images, seed)
    reading = read_gradient(*tensors, labels.flip(0), size=1.0)
    assert reading is not None and reading.error < 1e-5 and farthest(x, reading.inputs) < 1e-4


@pytest.mark.parametrize("scale", [None, 2.0])
def test_steps_use_the_derivative_of_the_equations(scale: float | None) -> None:
    _, labels, (gradient, bias_gradient, weight, bias) = problem(3, 0)
    whole = torch.cat([gradient, bias_gradient[:, None]], 1)
    equations = _Equations(whole / whole.norm(), weight, bias, labels, scale)
    unknowns, targets = (t[:2] for t in equations._start())
    slopes = [
        jacrev(lambda z, y=y: equations._residual(z[None], y[None])[0])(u) for u, y in zip(unknowns, targets, strict=True)
    ]
    expected = torch.stack(slopes)
    if scale is not None:
        expected[..., -1] = 0  # it stays
    assert torch.allclose(equations._derivative(unknowns, targets), expected)


def test_many_classes_and_images_are_read_in_bounded_work() -> None:
    assert affordable_starts(8, 10) == 64 and affordable_starts(16, 100) >= 4 > affordable_starts(64, 100)
    gradient, bias = torch.rand(100, 70).double(), torch.rand(100).double()
    assert read_gradient(gradient, bias, gradient, bias, torch.arange(64)) is None


@pytest.mark.parametrize("seed", range(3))
def test_the_size_of_the_gradient_need_not_be_known(seed: int) -> None:
    x, labels, (gradient, bias_gradient, weight, bias) = problem(3, seed)
    reading = read_gradient(0.01 * gradient, 0.01 * bias_gradient, weight, bias, labels)
    assert reading is not None and farthest(x, reading.inputs) < 1e-3


@pytest.mark.parametrize("seed", range(3))
def test_noise_is_not_taken_for_images(seed: int) -> None:
    x, labels, (gradient, bias_gradient, weight, bias) = problem(4, seed)
    noisy = gradient + gradient.std() * torch.randn(gradient.shape, generator=torch.Generator().manual_seed(seed)).double()
    reading = read_gradient(noisy, bias_gradient, weight, bias, labels, size=1.0)
    assert reading is None or (reading.error > 0.01 and farthest(x, reading.inputs) > 0.1)


def test_where_other_inputs_explain_the_gradient_as_well_it_says_so() -> None:
    """Two images with one label and one probability for all: any mixture of them has the same gradient."""
    weight, bias = torch.zeros(3, 5).double(), torch.zeros(3).double()
    x, labels = torch.rand(2, 5, generator=torch.Generator().manual_seed(0)).double(), torch.tensor([0, 1])
    signals = (torch.full((2, 3), 1 / 3).double() - F.one_hot(labels, 3)) / 2
    reading = read_gradient(signals.T @ x, signals.sum(0), weight, bias, labels, size=1.0)
    assert reading is not None and farthest(x, reading.inputs) < 1e-4  # other labels tell them apart …
    same = torch.tensor([0, 0])
    signals = (torch.full((2, 3), 1 / 3).double() - F.one_hot(same, 3)) / 2
    merged = read_gradient(signals.T @ x, signals.sum(0), weight, bias, same, size=1.0)
    assert merged is None or len(merged.inputs) == 1  # … equal ones do not


def softmax_regression() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 6))


def pictures() -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    return torch.rand(120, 1, 12, 12, generator=rng), torch.arange(120) % 6


@pytest.mark.parametrize("size", [2, 4])
def test_a_batch_of_softmax_regression_is_rebuilt_and_noise_stops_it(size: int) -> None:
    defenses, settings = ["none", "clip:norm=0.01", "gaussian:std=1.0"], {"batch_size": size, "victims": 2, "quiet": True}
    frame = gv.audit(pictures(), softmax_regression(), defenses, ["linear"], **settings).to_frame()
    least, most = (frame.set_index("defense")[f"psnr_{which}"] for which in ("min", "max"))
    assert least["none"] > 60 and least["clip:norm=0.01"] > 60  # a smaller update says the same
    assert most["gaussian:std=1.0"] < 25


def linear(**settings: object) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 3, **settings))


@pytest.mark.parametrize(
    ("images", "training", "model"),
    [
        (3, LocalTraining(), linear()),  # as many images as classes
        (2, LocalTraining(lr=0.01, optimizer="adam"), linear()),
        (2, LocalTraining(), linear(bias=False)),
        (2, LocalTraining(), nn.Sequential(linear(), nn.Hardtanh(-0.01, 0.01))),  # gives out something else than logits
    ],
)
def test_what_cannot_be_read_is_left_alone(
    images: int, training: LocalTraining, model: nn.Module, observe_victims: Callable, shapes: DataSet
) -> None:
    readable, _ = observe_victims(data=shapes, model=linear(), batch_size=2, victims=1)
    assert classifier_inputs(readable[0]) is not None
    seen, _ = observe_victims(data=shapes, model=model, training=training, batch_size=images, victims=1)
    assert classifier_inputs(seen[0]) is None


def test_a_weight_difference_of_small_steps_is_read() -> None:
    steps = {"local_epochs": 2, "local_batch_size": 2, "local_lr": 0.001}
    report = gv.audit(pictures(), softmax_regression(), ["none"], ["linear"], batch_size=4, victims=2, quiet=True, **steps)
    assert report.to_frame()["psnr_min"].min() > 30
