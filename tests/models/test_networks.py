"""The networks as published: how many parameters they have, how they start, and what attacks rely on in them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from gradveil.cli.catalogue import catalogue
from gradveil.core.errors import UserError
from gradveil.core.kernels import plain_kernels
from gradveil.models import MODELS, build

GREY, COLOUR = (1, 28, 28), (3, 32, 32)
ALL = MODELS.names()
# Cheap forms of the large networks, for what does not depend on width.
SMALL = {"convnet": "convnet:width=4", "resnet18": "resnet18:width=4", "resnet34": "resnet34:width=4"}
SMALL |= {"resnet20": "resnet20:width=4", "resnet20-4": "resnet20-4:width=4"}


def made(spec: str, shape: tuple[int, int, int] = COLOUR, classes: int = 10, seed: int = 0) -> nn.Module:
    return build(spec, input_shape=shape, num_classes=classes, seed=seed)


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("spec", "shape", "classes", "parameters"),
    [
        # Counted by hand from the layers: 12·(25c + 1) + 2·12·(12·25 + 1) + (h + 1)·classes.
        ("lenet", GREY, 10, 12 * 26 + 2 * 12 * 301 + 589 * 10),
        ("lenet", COLOUR, 10, 12 * 76 + 2 * 12 * 301 + 769 * 10),
        ("lenet", (3, 64, 64), 10, 12 * 76 + 2 * 12 * 301 + 3073 * 10),
        ("lenet4", COLOUR, 10, 12 * 76 + 3 * 12 * 301 + 769 * 10),
        ("smlp", COLOUR, 10, 3073 * 1024 + 1025 * 1024 + 1025 * 10),
        ("dmlp", COLOUR, 10, 3073 * 1024 + 3 * 1025 * 1024 + 1025 * 10),
        ("ffn", COLOUR, 10, 3073 * 500 + 4 * 501 * 500 + 501 * 256 + 257 * 500 + 501 * 10),
        ("convbig", COLOUR, 10, 32 * 28 + 64 * 33 + 5185 * 2000 + 2001 * 1000 + 1001 * 10),
        ("bayes-cnn", COLOUR, 10, 32 * 28 + 64 * 289 + 4097 * 100 + 101 * 10),
        ("flower-cnn", COLOUR, 10, 62_006),
        ("cnn", GREY, 10, 51_154),
        # Embedding, class token and positions; per layer attention, two linear layers and two norms; norm and classifier.
        ("vit", COLOUR, 10, 96 * (49 + 1 + 65) + 2 * (4 * 97 * 96 + 97 * 384 + 385 * 96 + 4 * 96) + 2 * 96 + 97 * 10),
        # What is widely reported for these.
        ("vgg16", COLOUR, 10, 14_728_266),
        ("densenet121", COLOUR, 10, 6_956_298),
        ("resnet34", COLOUR, 10, 21_282_122),
        ("resnet18", COLOUR, 10, 11_173_962),
        ("resnet18:stem=imagenet", (3, 224, 224), 1000, 11_689_512),  # torchvision's
    ],
)
def test_parameters(spec: str, shape: tuple[int, int, int], classes: int, parameters: int) -> None:
    assert count(made(spec, shape, classes)) == parameters


@pytest.mark.parametrize(
    ("spec", "shape", "classes", "thousands"),
    [
        ("lenet", GREY, 10, 13.4),
        ("lenet", COLOUR, 10, 15.8),
        ("smlp", COLOUR, 10, 4_210),
        ("dmlp", COLOUR, 10, 6_310),
        ("convnet:width=32", COLOUR, 10, 730),
        ("convnet", COLOUR, 100, 3_110),
        ("resnet20-4", COLOUR, 100, 4_350),
        ("resnet18", COLOUR, 10, 11_170),
        ("resnet20", COLOUR, 10, 272),
    ],
)
def test_sizes_that_papers_and_their_code_give(spec: str, shape: tuple[int, int, int], classes: int, thousands: float) -> None:
    assert count(made(spec, shape, classes)) / 1000 == pytest.approx(thousands, rel=5e-3)


def test_the_tensors_that_published_settings_point_at() -> None:
    """DCS2 and Soteria name the protected layer by its place among the tensors."""
    for spec, place, total in (("lenet", 6, 8), ("lenet4", 8, 10), ("convnet:width=32", 32, 34)):
        parameters = list(made(spec).named_parameters())
        assert len(parameters) == total
        assert parameters[place][0] == "fc.weight"
    convolutions = [m for m in made("resnet18:width=4").modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) == 20
    assert [i for i, m in enumerate(convolutions) if m.kernel_size == (1, 1)] == [7, 12, 17]  # one a stage from the second
    assert dict(made("convbig").named_parameters())["fc2.weight"].shape == (1000, 2000)


def test_published_starts() -> None:
    uniform = torch.cat([p.flatten() for p in made("lenet").parameters()])
    assert -0.5 <= uniform.min() < -0.49
    assert 0.49 < uniform.max() <= 0.5
    assert uniform.std().item() == pytest.approx(1 / 12**0.5, rel=0.02)
    narrow = made("lenet:init=default").get_parameter("fc.weight")
    assert narrow.abs().max() <= 768**-0.5
    stem = made("resnet18").get_parameter("layer1.0.conv1.weight")
    assert stem.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.02)  # fan-out


@pytest.mark.parametrize("name", [n for n in ALL if n != "vit"])
def test_what_attacks_and_defenses_rely_on(name: str) -> None:
    model = made(SMALL.get(name, name))
    calls: dict[str, int] = {}
    for path, module in model.named_modules():
        assert not getattr(module, "inplace", False)
        if list(module.parameters(recurse=False)):
            assert isinstance(module, (nn.Linear, nn.Conv2d, nn.BatchNorm2d))
            calls[path] = 0
            module.register_forward_hook(lambda *_, path=path: calls.__setitem__(path, calls[path] + 1))
    assert model.training
    x = torch.rand(2, *COLOUR)
    kept = x.clone()
    assert model.eval()(x).shape == (2, 10)
    assert torch.equal(x, kept)
    assert set(calls.values()) == {1}
    assert list(model.named_children())[-1][0] == "fc"
    assert isinstance(model.get_submodule("fc"), nn.Linear)


@pytest.mark.parametrize("name", [n for n in ALL if n not in ("densenet121", "vgg16", "convbig", "smlp", "dmlp", "resnet34")])
def test_gradients_of_many_victims_at_once_and_their_derivative(name: str) -> None:
    """vmap(grad) agrees with one victim at a time, and the image can be reached through it."""
    model = made(SMALL.get(name, name), (3, 20, 20), 5).eval()
    state = {k: v.detach() for k, v in model.state_dict().items()}
    learned = {k: state[k] for k, _ in model.named_parameters()}

    def gradient(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return grad(lambda p: cross_entropy(functional_call(model, {**state, **p}, (x[None],)), y[None]))(learned)  # type: ignore[no-any-return]

    x = torch.rand(2, 3, 20, 20, generator=torch.Generator().manual_seed(0), requires_grad=True)
    y = torch.tensor([1, 3])
    with plain_kernels():
        both = vmap(gradient)(x, y)
    for n in range(2):
        single = gradient(x[n], y[n])
        assert all(torch.allclose(both[k][n], single[k], atol=1e-5) for k in single)
    (back,) = torch.autograd.grad(sum((g**2).sum() for g in both.values()), x)
    assert back.isfinite().all()
    assert back.abs().sum() > 0


@pytest.mark.parametrize("name", [n for n in ALL if n != "vgg16"])
def test_other_image_sizes(name: str) -> None:
    large = name in ("densenet121", "convbig", "dmlp")  # one size will do
    for shape in ((1, 28, 28), *([] if large else [(3, 64, 64), (2, 24, 40)])):
        assert made(SMALL.get(name, name), shape, 7).eval()(torch.rand(1, *shape)).shape == (1, 7)


@pytest.mark.parametrize(
    ("spec", "side"), [("flower-cnn", 8), ("convnet:width=4", 6), ("densenet121", 4), ("bayes-cnn", 2), ("vgg16", 28)]
)
def test_images_that_are_too_small(spec: str, side: int) -> None:
    with pytest.raises(UserError, match="too small for the model"):
        made(spec, (3, side, side))


def test_every_network_is_described_in_one_line() -> None:
    assert len(ALL) == len(set(ALL)) == len(list(MODELS))
    described = {card.name: card.idea for card in catalogue().methods_of("models")}
    assert described.keys() == {network.name for network in MODELS}
    for description in described.values():
        assert 20 < len(description) < 120
        assert description.endswith(".")
    asked = {"lenet", "lenet4", "smlp", "dmlp", "ffn", "convnet", "resnet20", "resnet20-4", "resnet18", "resnet34"}
    assert asked | {"vgg16", "densenet121", "convbig", "bayes-cnn", "cnn", "flower-cnn"} <= set(ALL)
