"""Building by name, by a user's own function, or taking a module as it is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gradveil.core.errors import UserError
from gradveil.data import load
from gradveil.models import build

SHAPE = (1, 8, 8)


def tiny(classes: int = 4) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))


def make(spec: object, classes: int = 4, seed: int = 0) -> nn.Module:
    return build(spec, input_shape=SHAPE, num_classes=classes, seed=seed)  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", ["lenet", "cnn", tiny])
def test_weights_come_from_the_seed_alone(spec: object) -> None:
    torch.manual_seed(11)
    expected = torch.rand(2)
    torch.manual_seed(11)
    first = make(spec)
    assert torch.equal(torch.rand(2), expected)  # the global stream is where it was
    again, other = make(spec), make(spec, seed=1)
    for a, b, c in zip(first.parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c) or a.abs().sum() == 0  # biases that start at zero


def test_a_module_comes_back_as_it_is() -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(), nn.Flatten(), nn.Linear(72, 4))
    module[1].eval()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    modes = [m.training for m in module.modules()]
    assert make(module) is module
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())  # running statistics too
    assert [m.training for m in module.modules()] == modes


class Net(nn.Module):
    def __init__(self, num_classes: int = 10):
        super().__init__()
        self.fc = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.flatten(1))  # type: ignore[no-any-return]


def with_both(input_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    assert input_shape == SHAPE
    return tiny(num_classes)


def with_anything(**given: object) -> nn.Module:
    assert given == {"input_shape": SHAPE, "num_classes": 4}
    return tiny()


@pytest.mark.parametrize(
    "factory", [Net, with_both, with_anything, tiny, lambda: tiny(4), lambda *, num_classes: tiny(num_classes)]
)
def test_a_function_gets_what_it_takes(factory: Callable[..., nn.Module]) -> None:
    assert make(factory)(torch.rand(3, *SHAPE)).shape == (3, 4)


def test_a_function_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "ward_model.py").write_text(
        "from torch import nn\n"
        "def net(num_classes): return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))\n"
        "ready = net(4)\n"
        "def broken(): raise RuntimeError('weights are\\nmissing')\n"
        "number = 3\n"
    )
    assert make("ward_model:net")(torch.rand(1, *SHAPE)).shape == (1, 4)
    assert isinstance(make("ward_model:ready"), nn.Sequential)
    for spec, complaint in {
        "ward_model:broken": "raised RuntimeError: weights are missing",
        "ward_model:number": "is a int; give a module",
        "ward_model:nothing": "has no 'nothing'",
        "ward_models:net": "cannot import model",
    }.items():
        with pytest.raises(UserError, match=complaint) as caught:
            make(spec)
        assert "\n" not in str(caught.value)


class Pair(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x), x  # type: ignore[return-value]


class Frozen(Net):
    def __init__(self, num_classes: int):
        super().__init__(num_classes)
        self.requires_grad_(False)


BAD: dict[str, object] = {
    "no model 'lenett'; did you mean 'lenet'": "lenett",
    "no setting 'with'": "convnet:with=3",
    "greater than or equal to 1": "convnet:width=0",
    "init='zero'": "lenet:init=zero",
    "model's output is 2×9 for two images, the data has 4 classes": lambda: tiny(9),
    "model's output is a tuple": Pair,
    r"model's output is 2×4×1": lambda: nn.Sequential(tiny(), nn.Unflatten(1, (4, 1))),
    "no trainable parameters": Frozen,
    "does not take images of 1×8×8": lambda: nn.Linear(5, 4),
    "returned a int": lambda: 3,
    "missing 1 required positional argument: 'width'": lambda width: tiny(width + 1),
    "give a module": 3,
}


@pytest.mark.parametrize("complaint", BAD)
def test_one_clear_line_about(complaint: str) -> None:
    with pytest.raises(UserError, match=complaint) as caught:
        make(BAD[complaint])
    assert "\n" not in str(caught.value)


def test_the_small_network_learns_in_a_few_passes() -> None:
    """A quick form of the promise that `cnn` passes 90% on 2,000 digits within 20 passes."""
    data = load("mnist-5k")
    model = build("cnn", input_shape=data.input_shape, num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    random = torch.Generator().manual_seed(0)
    for _ in range(3):
        for pick in torch.randperm(2000, generator=random).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data.private.x[pick]), data.private.y[pick]).backward()
            optimizer.step()
    with torch.no_grad():
        accuracy = (model(data.test.x).argmax(1) == data.test.y).float().mean().item()
    assert accuracy > 0.8
