"""Clipped sums by one pass against gradients of one image at a time, over kinds of layers and ways to use them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.core import layer_calls, per_image
from gradveil.core.gradients import Loss, ModelFunction, cross_entropy
from gradveil.core.losses import multi_label, regression
from gradveil.core.per_image import clipped_sum
from gradveil.core.types import Tensors

CLASSES = 3


class Form(nn.Module):
    """Layers and a function that says how they follow each other."""

    def __init__(self, run: Callable[..., Tensor], **parts: nn.Module | Tensor):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            if isinstance(part, nn.Module):
                self.add_module(name, part)
            else:
                self.register_parameter(name, nn.Parameter(part))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def stack(*layers: nn.Module, features: int) -> nn.Module:
    return nn.Sequential(*layers, nn.Tanh(), nn.Flatten(), nn.Linear(features, CLASSES))


def rows(x: Tensor) -> Tensor:
    """An image of 2 × 6 × 6 as 12 rows of 6."""
    return x.flatten(1, 2)


COVERED: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: stack(nn.Flatten(), nn.Linear(72, 5), features=5),
    "linear without bias": lambda: stack(nn.Flatten(), nn.Linear(72, 5, bias=False), features=5),
    "rows": lambda: Form(lambda m, x: m.fc(m.first(rows(x)).tanh().sum(1)), first=nn.Linear(6, 7), fc=nn.Linear(7, CLASSES)),
    "flat rows": lambda: Form(
        lambda m, x: m.fc(m.first(rows(x).flatten(0, 1)).tanh().view(len(x), 12, 7).sum(1)),
        **{"first": nn.Linear(6, 7), "fc": nn.Linear(7, CLASSES)},
    ),
    "rows first": lambda: Form(
        lambda m, x: m.fc(m.norm(m.first(rows(x).transpose(0, 1)).tanh()).sum(0)),
        **{"first": nn.Linear(6, 7), "norm": nn.LayerNorm(7), "fc": nn.Linear(7, CLASSES)},
    ),
    "convolution": lambda: stack(nn.Conv2d(2, 4, 3), features=64),
    "strided": lambda: stack(nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(2, 1)), features=40),
    "groups": lambda: stack(nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, 4, 3, groups=4, stride=2), features=16),
    "depthwise": lambda: stack(nn.Conv2d(2, 6, 3, groups=2, bias=False), features=96),
    "many channels": lambda: stack(nn.Conv2d(2, 16, 1), nn.Conv2d(16, 8, 3), features=128),
    "grouped channels": lambda: stack(nn.Conv2d(2, 16, 1), nn.Conv2d(16, 8, 3, groups=2), features=128),
    "same": lambda: stack(nn.Conv2d(2, 3, 3, padding="same", dilation=2), features=108),
    "reflected": lambda: stack(nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), features=108),
    "one axis": lambda: Form(
        lambda m, x: m.fc(m.conv(rows(x)).tanh().flatten(1)), conv=nn.Conv1d(12, 4, 3, stride=2), fc=nn.Linear(8, CLASSES)
    ),
    "three axes": lambda: Form(
        lambda m, x: m.fc(m.conv(x[:, None]).tanh().flatten(1)),
        conv=nn.Conv3d(1, 4, 2, padding=(0, 1, 0)),
        fc=nn.Linear(140, CLASSES),
    ),
    "crops": lambda: Form(
        lambda m, x: m.fc(m.conv(x.flatten(0, 1)[:, None]).tanh().view(len(x), -1)),
        **{"conv": nn.Conv2d(1, 3, 3, stride=2), "fc": nn.Linear(24, CLASSES)},
    ),
    "group norm": lambda: stack(nn.Conv2d(2, 4, 3, bias=False), nn.GroupNorm(2, 4), features=64),
    "layer norm": lambda: stack(nn.LayerNorm((6, 6)), nn.Conv2d(2, 4, 3), nn.LayerNorm([4, 4, 4]), features=64),
    "instance norm": lambda: stack(nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True), features=64),
    "embedding": lambda: Form(
        lambda m, x: m.fc(m.table((x[:, 0].flatten(1) * 9).abs().long() % 5).flatten(2).tanh().sum(1)),
        **{"table": nn.Embedding(5, 4, padding_idx=1), "fc": nn.Linear(4, CLASSES)},
    ),
    "attention": lambda: Form(
        lambda m, x: m.fc(m.encoder(m.embed(rows(x)) + m.position)[:, 0]),
        embed=nn.Linear(6, 8),
        position=0.1 * torch.randn(1, 12, 8),
        encoder=nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True, norm_first=True),
        fc=nn.Linear(8, CLASSES),
    ),
    "scale of channels": lambda: Form(
        lambda m, x: m.fc((m.scale * x).tanh().flatten(1)), scale=torch.rand(2, 1, 1), fc=nn.Linear(72, CLASSES)
    ),
    "changed in place": lambda: Form(
        lambda m, x: m.fc(m.conv(x).relu_().flatten(1)), conv=nn.Conv2d(2, 4, 3), fc=nn.Linear(64, CLASSES)
    ),
    "unused": lambda: Form(lambda m, x: m.fc(x.flatten(1)), aside=nn.Linear(3, 3), fc=nn.Linear(72, CLASSES)),
}
OTHERWISE: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {  # with the parameters that one pass does not tell
    "twice": (
        lambda: Form(
            lambda m, x: m.fc(m.one(m.one(x.flatten(1)).tanh()).tanh()), one=nn.Linear(72, 72), fc=nn.Linear(72, CLASSES)
        ),
        {"one.weight"},  # each image can have a bias of its own
    ),
    "tied": (
        lambda: Form(
            lambda m, x: m.fc(F.linear(m.one(x.flatten(1)).tanh(), m.one.weight.mT)),
            one=nn.Linear(72, 9),
            fc=nn.Linear(72, CLASSES),
        ),
        {"one.weight"},
    ),
    "computed": (
        lambda: Form(
            lambda m, x: m.fc(F.linear(x.flatten(1), m.weight.tanh())), weight=torch.randn(5, 72), fc=nn.Linear(5, CLASSES)
        ),
        {"weight"},
    ),
    "transposed": (lambda: stack(nn.ConvTranspose2d(2, 1, 2), features=49), {"0.weight", "0.bias"}),
}


def function(form: Callable[[], nn.Module], loss: Loss = cross_entropy, **options: str) -> ModelFunction:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return ModelFunction(form(), loss, **options)  # type: ignore[arg-type]


def images(count: int = 5) -> Tensor:
    return torch.randn(count, 2, 6, 6, generator=torch.Generator().manual_seed(1))


def expected(model: ModelFunction, x: Tensor, y: Tensor, noise: Tensors | None = None) -> tuple[Tensors, Tensor, float]:
    """Clipped to the norm of the image in the middle: so many images are not scaled."""
    alone = []
    for i in range(len(x)):
        draw = {name: values[i : i + 1] for name, values in (noise or {}).items()}
        alone.append(model.gradient(model.state(), x[i : i + 1], y[i : i + 1], draw))
    norms = torch.tensor([math.sqrt(sum(float(g.double().square().sum()) for g in one.values())) for one in alone]).double()
    clip = float(norms.median())
    factors = (clip / norms).clamp_max(1.0)
    return {n: sum(f * one[n] for f, one in zip(factors, alone, strict=True)) for n in alone[0]}, factors, clip  # type: ignore[misc]


def check(model: ModelFunction, x: Tensor, y: Tensor, noise: Tensors | None = None) -> set[str]:
    """Compares, and returns the parameters that were computed image by image."""
    sums, factors, clip = expected(model, x, y, noise)
    total, scaled = clipped_sum(model, model.state(), x, y, noise or {}, clip)
    torch.testing.assert_close(scaled, factors, rtol=1e-5, atol=0)
    size = math.sqrt(sum(float(g.square().sum()) for g in sums.values()))
    for name, g in sums.items():
        torch.testing.assert_close(total[name], g.float(), rtol=1e-5, atol=1e-5 * size)
    assert list(total) == model.trainable and not any(g.requires_grad for g in total.values())
    (plan,) = per_image._plans[model].values()
    return set(plan.rest.trainable) if plan.rest else set()


@pytest.mark.parametrize("form", COVERED)
@pytest.mark.parametrize("way", ["cheapest", "ghost", "direct", "again"])
def test_one_pass_tells_the_gradients_of_single_images(form: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way != "cheapest":
        monkeypatch.setattr(layer_calls, "GHOST", 1e9 if way == "ghost" else 0)
    if way == "again":  # too large to be kept: one image at a time
        monkeypatch.setattr(layer_calls, "KEPT", 0)
        monkeypatch.setattr(layer_calls, "SMALL", 0)
    assert check(function(COVERED[form], mode="train"), images(), torch.arange(5) % CLASSES) == set()


@pytest.mark.parametrize("form", OTHERWISE)
def test_the_rest_is_computed_image_by_image(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, rest = OTHERWISE[form]
    monkeypatch.setattr(per_image, "CHUNK", 3 * 5184)  # a few images at a time
    assert check(function(build), images(), torch.arange(5) % CLASSES) == rest


def test_batch_norm_at_fixed_statistics_is_read_and_in_training_is_left_to_single_images() -> None:
    def form() -> nn.Module:
        return stack(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), features=64)

    assert check(function(form), images(), torch.arange(5) % CLASSES) == set()
    model = function(form, mode="train")
    assert check(model, images(), torch.arange(5) % CLASSES) == set(model.trainable)


@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        (cross_entropy, torch.rand(5, CLASSES).softmax(1)),
        (multi_label, (torch.rand(5, CLASSES) > 0.5).float()),
        (regression, torch.randn(5, CLASSES)),
        (lambda outputs, y: F.cross_entropy(outputs, y, reduction="sum"), torch.arange(5) % CLASSES),
        (lambda outputs, y: F.cross_entropy(outputs, y, weight=torch.tensor([1.0, 5.0, 2.0])), torch.arange(5) % CLASSES),
    ],
    ids=["soft", "multi-label", "regression", "sum", "weighted"],
)
def test_any_loss(loss: Loss, targets: Tensor) -> None:
    assert check(function(COVERED["convolution"], loss), images(), targets) == set()


def test_frozen_parameters_count_for_nothing() -> None:
    def form() -> nn.Module:
        module = stack(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), features=64)
        module[0].requires_grad_(False)  # type: ignore[index]
        module[1].weight.requires_grad_(False)  # type: ignore[index, union-attr]
        return module

    model = function(form)
    assert check(model, images(), torch.arange(5) % CLASSES) == set() and len(model.trainable) == 3


def test_weights_of_zero_do_not_make_a_wrong_way_agree() -> None:
    build, rest = OTHERWISE["twice"]
    model = function(build)
    state = {name: torch.zeros_like(t) for name, t in model.state().items()}
    clipped_sum(model, state, images(), torch.arange(5) % CLASSES, {}, 1.0)
    (plan,) = per_image._plans[model].values()
    assert plan.rest is not None and set(plan.rest.trainable) == rest


def test_rows_that_cancel_are_not_measured_by_their_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signals that sum to almost nothing over rows of equal inputs: the product of rows loses all digits."""
    monkeypatch.setattr(layer_calls, "GHOST", 1e9)
    inputs = torch.ones(1, 2, 400) + 1e-4 * torch.rand(1, 2, 400, generator=torch.Generator().manual_seed(0))
    signal = torch.tensor([[[1.0], [-1.0]]]) * torch.ones(1, 2, 6)
    ((_, read), _) = layer_calls._linear(layer_calls.Layout(1), inputs, torch.zeros(6, 400))
    true = (signal.double().mT @ inputs.double()).norm()
    assert float(read(signal).squares.sqrt()) == pytest.approx(float(true), rel=1e-3)


def test_a_network_that_changes_its_way_with_its_inputs_is_noticed() -> None:
    model = function(
        lambda: Form(
            lambda m, x: m.fc(m.one(x.flatten(1)).tanh() if x.mean() < 3 else m.one(m.one(x.flatten(1))).tanh()),
            **{"one": nn.Linear(72, 72), "fc": nn.Linear(72, CLASSES)},
        )
    )
    y = torch.arange(5) % CLASSES
    assert check(model, images(), y) == set()
    check(model, images() + 5, y)


def skipping(condition: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    """A network one of whose layers sees some of the rows alone."""

    def run(m: Form, x: Tensor) -> Tensor:
        inner, deeper = m.one(rows(x)).tanh().flatten(0, 1), condition(rows(x).flatten(0, 1))
        outer = inner.clone()
        if deeper.any():
            outer[deeper] = m.deep(inner[deeper])
        return m.fc(outer.view(len(x), 12, 9).sum(1))  # type: ignore[no-any-return]

    return lambda: Form(run, one=nn.Linear(6, 9), deep=nn.Linear(9, 9), fc=nn.Linear(9, CLASSES))


@pytest.mark.parametrize("first", ["all", "none"])
def test_a_layer_that_sees_other_rows_than_on_made_up_images_is_noticed(first: str) -> None:
    x, y = images(4), torch.arange(4) % CLASSES
    sees = x.clone()
    sees.view(48, 6)[:, 0] = torch.where(torch.arange(48) < 8, 9.0, -9.0)  # two rows per image, all of the first image
    model = function(skipping(lambda r: (r[:, 0] > 5) if first == "none" else (r[:, 0] > -5)))
    check(model, x, y)  # on these images and made-up ones like them it sees all rows, or none
    check(model, sees, y)


def test_a_network_that_relates_images_of_some_sizes_only_is_noticed() -> None:
    model = function(lambda: Form(lambda m, x: m.fc((x / x.max() if x.max() > 1 else x).flatten(1)), fc=nn.Linear(72, CLASSES)))
    assert check(model, 3 * images(), torch.arange(5) % CLASSES) == {"fc.weight", "fc.bias"}


def test_weights_that_hide_a_layer_at_first_do_not_make_a_wrong_way_agree() -> None:
    """A server may send weights without any gradient in the first round: a probe then tells nothing."""

    def form() -> nn.Module:
        return Form(
            lambda m, x: m.fc(m.post(m.first(rows(x).transpose(0, 1)).tanh().sum(0)).relu()),
            **{"first": nn.Linear(6, 7), "post": nn.Linear(7, 7), "fc": nn.Linear(7, CLASSES)},
        )

    model, y = function(form), torch.arange(5) % CLASSES
    silent = {**model.state(), "post.bias": torch.full((7,), -1e6)}
    clipped_sum(model, silent, images(), y, {}, 1.0)
    assert check(model, images(), y) == set()


@pytest.mark.parametrize(
    "second",
    [
        lambda m, x: x @ m.fc.weight.square().T,
        lambda m, x: torch.stack([m.fc.weight.T]).squeeze(0).T.matmul(x.T).T.square(),
        lambda m, x: F.linear(x, m.fc.weight.square()),
        lambda m, x: F.bilinear(x, x, m.fc.weight[:, None] * x.new_ones(72, 1)),
    ],
)
def test_a_second_use_that_a_buffer_hides_at_first_is_noticed(second: Callable[[Form, Tensor], Tensor]) -> None:
    """A server may hide one of two uses of a parameter in the first round: a probe then sees no trace of it."""

    def form() -> nn.Module:
        def run(m: Form, x: Tensor) -> Tensor:
            return m.fc(x.flatten(1)) + m.gate * second(m, x.flatten(1))

        module = Form(run, fc=nn.Linear(72, CLASSES))
        module.register_buffer("gate", torch.tensor(1.0))
        return module

    model, y = function(form), torch.arange(5) % CLASSES
    clipped_sum(model, {**model.state(), "gate": torch.tensor(0.0)}, images(), y, {}, 1.0)
    check(model, images(), y)


def test_labels_of_one_class_do_not_hide_the_weights_of_a_loss() -> None:
    model = function(COVERED["convolution"], lambda outputs, y: F.cross_entropy(outputs, y, torch.tensor([1.0, 5.0, 2.0])))
    check(model, images(), torch.ones(5, dtype=torch.long))
    check(model, images(), torch.arange(5) % CLASSES)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e38])
@pytest.mark.parametrize("form", ["linear", "transposed"])
def test_an_image_without_a_finite_gradient_counts_as_zero(form: str, value: float) -> None:
    build = COVERED[form] if form in COVERED else OTHERWISE[form][0]
    x, y, others = images(), torch.arange(5) % CLASSES, torch.tensor([0, 1, 3, 4])
    x[2, 0, 0] = value
    model = function(build)
    total, factors = clipped_sum(model, model.state(), x, y, {}, 0.01)
    alone, scaled = clipped_sum(model, model.state(), x[others], y[others], {}, 0.01)
    assert float(factors[2]) <= 1 and torch.allclose(factors[others], scaled)
    distance = math.sqrt(sum(float((total[name] - alone[name]).square().sum()) for name in total))
    assert distance <= 0.01 * 1.001  # false for what is not a number


def test_no_image_gives_nothing() -> None:
    model = function(COVERED["convolution"])
    total, factors = clipped_sum(model, model.state(), images(0), torch.zeros(0, dtype=torch.long), {}, 1.0)
    assert len(factors) == 0 and all(not g.any() for g in total.values())


def test_dropout_drops_and_buffers_count_as_in_training() -> None:
    class Counts(nn.Module):
        passes: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("passes", torch.zeros(()))
            self.drop, self.fc = nn.Dropout(0.5), nn.Linear(72, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            self.passes += 1
            output: Tensor = self.fc(self.drop(x.flatten(1)))
            return output

    model = function(Counts, mode="train")
    state = model.state()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        total, _ = clipped_sum(model, state, images(1), torch.zeros(1, dtype=torch.long), {}, 1.0)
    assert float(state["passes"]) == 1
    dropped = (total["fc.weight"] == 0).all(0).float().mean()
    assert 0.3 < float(dropped) < 0.7


def test_nothing_of_a_pass_stays_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks, graph and inputs must not keep each other: the garbage collector does not see such a ring."""
    passes: list[weakref.ref[per_image._Calls]] = []

    class Calls(per_image._Calls):
        def __init__(self, *args: Any):
            super().__init__(*args)
            passes.append(weakref.ref(self))

    monkeypatch.setattr(per_image, "_Calls", Calls)
    model = function(COVERED["many channels"])
    clipped_sum(model, model.state(), images(), torch.arange(5) % CLASSES, {}, 1.0)
    assert passes and not any(calls() for calls in passes)
