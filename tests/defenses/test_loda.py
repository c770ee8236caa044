"""LODA: the step against its closed form, layers and scale, extractors, and images hidden with their features kept."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.client import Client, prepare_client
from gradveil.core.errors import UserError
from gradveil.core.gradients import ModelFunction
from gradveil.core.local_training import LocalTraining
from gradveil.core.randomness import generator
from gradveil.core.task import Task
from gradveil.core.types import Batch
from gradveil.data import load
from gradveil.defenses import parse
from gradveil.defenses.base import Setup
from gradveil.defenses.data.loda import defense as loda
from gradveil.defenses.data.loda import extractors
from gradveil.defenses.data.loda.defense import Loda, Memory, _variants
from gradveil.defenses.data.loda.extractors import Extractor, Trained, Trunk, _folded, extractor, train
from gradveil.defenses.data.loda.resnet import ResNetExtractor, resnet_extractor
from gradveil.metrics import identify, lpips, psnr, ssim
from gradveil.models import build
from gradveil.storage.tensor_file import read_tensors

needs_weights = pytest.mark.skipif(
    not os.environ.get("GRADVEIL_DATA"), reason="the ImageNet trunks are read from GRADVEIL_DATA"
)


class Linear(Extractor):
    """Features that are a matrix times the pixels."""

    layers = ("conv1", "pooled")

    def __init__(self, matrix: Tensor):
        self.matrix = matrix

    def walk(self, x: Tensor) -> Iterator[Tensor]:
        yield x.flatten(1) @ self.matrix.T
        yield x.mean(dim=(2, 3))


def images(n: int, size: int = 6, name: str = "x") -> Tensor:
    return torch.rand(n, 1, size, size, generator=generator(0, name))


def shapes(n: int, name: str) -> Batch:
    """Three classes that a small network tells apart at once: bars that lie, bars that stand, squares."""
    rng = generator(0, name)
    x, y = 0.1 * torch.rand(n, 1, 12, 12, generator=rng), torch.arange(n) % 3
    for i in range(n):
        row, column = torch.randint(1, 8, (2,), generator=rng).tolist()
        height, width = ((2, 8), (8, 2), (4, 4))[int(y[i])]
        x[i, 0, row : row + height, column : column + width] += 0.8
    return Batch(x.clamp(0, 1), y)


def client(spec: str, private: Batch, public: Batch | None) -> Client:
    model = ModelFunction(nn.Sequential(nn.Flatten(), nn.Linear(private.x[0].numel(), 3)))
    return prepare_client(
        parse(spec),
        LocalTraining(),
        Setup(Task(model, (1, 12, 12), 3, torch.tensor([0.5]), torch.tensor([0.5])), model.state(), private, public),
    )


@pytest.fixture()
def small() -> Iterator[None]:
    """Short trainings: these tests need an extractor, not a good one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extractors, "STEPS", 50)
        yield


# -- the method --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fall", [False, True])
def test_a_step_follows_the_normalised_gradient_of_the_objective(fall: bool) -> None:
    matrix = torch.randn(5, 36, generator=generator(0, "matrix"))
    x, start = 0.2 + 0.6 * images(3), 0.2 + 0.6 * images(3, name="start")
    memory = Memory(Linear(matrix), ("conv1",), 0.7, None)
    moved = Loda(steps=2, lr=0.05, fall=fall, round=False).obscure(x, start, memory)
    expected = start.clone()
    for step in range(2):
        for i in range(3):
            apart = (expected[i] - x[i]).flatten()
            gradient = 2 * matrix.T @ (matrix @ apart) - 2 * 0.7 * apart
            length = 0.05 * (1 - step / 2 if fall else 1)
            expected[i] -= length * (gradient / gradient.norm()).view(1, 6, 6)
    torch.testing.assert_close(moved, expected, atol=1e-5, rtol=1e-5)


def test_images_stay_in_the_box_and_do_not_touch_each_other():
    memory = Memory(Linear(torch.randn(5, 36, generator=generator(0, "matrix"))), ("conv1", "pooled"), 5.0, None)
    method = Loda(steps=40, lr=0.5)
    x, start = images(4), images(4, name="start")
    together = method.obscure(x, start, memory)
    alone = torch.cat([method.obscure(x[i : i + 1], start[i : i + 1], memory) for i in range(4)])
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=0)
    assert together.min() == 0 and together.max() == 1  # c drives pixels to the walls


def test_c_trades_features_for_distance():
    matrix = torch.randn(8, 36, generator=generator(0, "matrix"))
    x, start = images(6), images(6, name="start")
    apart, unlike = [], []
    for c in (0.0, 2.0, 20.0):
        found = Loda(steps=200, lr=0.05).obscure(x, start, Memory(Linear(matrix), ("conv1",), c, None))
        apart.append(float((found - x).square().sum()))
        unlike.append(float(((found - x).flatten(1) @ matrix.T).square().sum()))
    assert apart == sorted(apart)
    assert unlike == sorted(unlike)


def test_relative_c_is_measured_in_the_extractors_own_scale(small):
    public = shapes(60, "public")
    one, double = (Loda(c=c).equip(public, (1, 12, 12)) for c in (0.1, 0.2))
    assert double.c == pytest.approx(2 * one.c)
    plain = Loda(c=0.1, relative=False).equip(public, (1, 12, 12))
    assert plain.c == 0.1
    # In a linear extractor of orthogonal rows the ratio is known: every pixel direction is stretched alike.
    memory = Memory(Linear(3 * torch.eye(36)), ("conv1",), 1.0, images(50))
    assert loda._scale(memory, (1, 6, 6)) == pytest.approx(9.0, rel=1e-4)


def test_variants_choose_layers(small):
    public = shapes(60, "public")
    chosen = {v: Loda(variant=v).equip(public, (1, 12, 12)).layers for v in ("loda1", "loda2", "loda3")}
    assert chosen["loda1"] == ("conv1", "conv2")
    assert chosen["loda2"] == tuple(f"conv{i}" for i in range(1, 7))
    assert chosen["loda3"] == ("conv5", "conv6", "pooled", "logits")
    own = parse("loda:layers=conv2/logits").equip(public, (1, 12, 12))  # type: ignore[attr-defined]
    assert own.layers == ("conv2", "logits")
    assert [tuple(f.shape[1:]) for f in own.features(public.x[:2])] == [(16, 6, 6), (3,)]
    with pytest.raises(UserError, match="did you mean 'conv6'"):
        parse("loda:layers=conv7").equip(public, (1, 12, 12))  # type: ignore[attr-defined]


# -- as a defense ------------------------------------------------------------------------------------------------------


def test_a_client_trains_on_obscured_images_and_keeps_the_starts_secret(small, monkeypatch):
    monkeypatch.setattr(loda, "BATCH", 4)
    private, public = shapes(10, "private"), shapes(60, "public")
    one = client("loda:steps=20", private, public)
    _, trace = one.round(one.task.model.state(), private, 0)
    assert torch.equal(trace.fed.y, private.y)
    start = trace.secrets["start"]
    for image in start:
        assert any(torch.equal(image, other) for other in public.x)
        assert not any(torch.equal(image, own) for own in private.x)
    assert torch.equal((trace.fed.x * 255).round() / 255, trace.fed.x)
    features = one.memory.features
    before, after = (
        sum(float((a - b).square().sum()) for a, b in zip(features(z), features(private.x), strict=True))
        for z in (start, trace.fed.x)
    )
    assert after < before / 3
    again, other = (one.round(one.task.model.state(), private, key)[1].fed.x for key in (0, 1))
    assert torch.equal(again, trace.fed.x)
    assert not torch.allclose(other, trace.fed.x)


def test_without_public_images_starts_are_noise_and_that_is_said(monkeypatch):
    monkeypatch.setattr(loda, "extractor", lambda *_: Linear(torch.eye(36)))
    private = Batch(images(200), torch.arange(200) % 3)
    with pytest.warns(UserWarning, match="start from noise"):
        one = client("loda:steps=1,layers=conv1", private, None)
    _, secrets = one.protect(one.task.model.state(), private, 0)
    assert float(secrets["start"].mean()) == pytest.approx(0.5, abs=0.02)
    assert float(secrets["start"].std()) == pytest.approx(math.sqrt(1 / 12), abs=0.02)


def test_nothing_to_extract_with_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("GRADVEIL_DATA", str(tmp_path))
    private, flat = shapes(6, "private"), Batch(images(20), torch.zeros(20, dtype=torch.long))
    for spec, public, words in (
        ("loda", None, "needs an extractor"),
        ("loda", flat, "needs an extractor"),
        ("loda:extractor=trained", flat, "two classes"),
        ("loda:extractor=vgg16", private, "no ImageNet weights"),
    ):
        with pytest.raises(UserError, match=words):
            client(spec, private, public)


def test_digits_are_hidden_and_the_extractor_still_reads_them(small):
    data = load("mnist-5k", seed=0)
    private = data.private[:24]
    method = Loda()
    memory = method.equip(data.public[:1000], (1, 28, 28))
    found = method.obscure(private.x, memory.starts(private.x.shape, generator(0, "start")), memory)
    seen = identify(private.x, private.y, found, data.pool())
    assert psnr(private.x, found).mean() < 10
    assert ssim(private.x, found).mean() < 0.3
    assert seen.identified.float().mean() <= 0.1  # by |correlation|: a negative would be found as well
    (clean,), (obscured,) = (memory.extractor(x, ["logits"]) for x in (private.x, found))
    assert (obscured.argmax(dim=1) == clean.argmax(dim=1)).float().mean() >= 0.8


# -- extractors --------------------------------------------------------------------------------------------------------


def test_a_folded_convolution_is_the_convolution_with_its_norm():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        convolution, norm = nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8)
        nn.init.uniform_(norm.weight, 0.5, 2)
        nn.init.uniform_(norm.bias)
        for _ in range(5):
            norm(convolution(torch.rand(16, 3, 9, 9)))
        x = torch.rand(4, 3, 9, 9)
    folded = _folded(convolution, norm)
    with torch.no_grad():
        expected = norm.eval()(convolution(x))
    found = F.conv2d(x, folded["weight"], folded["bias"], stride=2, padding=1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_training_learns_and_depends_on_the_public_images_alone(monkeypatch):
    monkeypatch.setattr(extractors, "STEPS", 80)
    public, other = shapes(240, "public"), shapes(60, "other")
    weights = train(public)
    (logits,) = Trained(weights)(other.x, ["logits"])
    assert (logits.argmax(dim=1) == other.y).float().mean() > 0.9
    torch.manual_seed(99)  # the global stream has no part in it
    again = train(public)
    assert all(torch.equal(weights[name], again[name]) for name in weights)


def test_the_cache_is_used_and_keyed_by_content(small, tmp_path, monkeypatch):
    public = shapes(60, "public")
    first = extractor("auto", public, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    monkeypatch.setattr(extractors, "_KEPT", {})
    monkeypatch.setattr(extractors, "train", lambda *_: pytest.fail("trained again"))
    second = extractor("trained", public, tmp_path)
    assert isinstance(first, Trained) and isinstance(second, Trained)
    assert all(torch.equal(first.weights[name], w) for name, w in second.weights.items())
    monkeypatch.setattr(extractors, "train", train)
    changed = Batch(public.x, public.y.roll(1))
    extractor("trained", changed, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    monkeypatch.setattr(extractors, "_KEPT", {})
    file.write_bytes(b"broken")
    with pytest.raises(UserError, match="damaged"):
        extractor("trained", public, tmp_path)


@needs_weights
@pytest.mark.parametrize(("kind", "net", "convolutions"), [("alexnet", "alex", 5), ("vgg16", "vgg", 13)])
def test_trunks_have_the_features_that_lpips_compares(kind, net, convolutions):
    trunk = Trunk(kind)
    assert trunk.layers == (*(f"conv{i + 1}" for i in range(convolutions)), "pooled")
    x, y = images(2, 32), images(2, 32, name="y")
    heads = read_tensors(extractors._trunk_file(kind).parent / f"lpips_v0.1_lin_{net}.safetensors")
    taps = {"alex": (1, 2, 3, 4, 5), "vgg": (2, 4, 7, 10, 13)}[net]
    layers = [f"conv{i}" for i in taps]
    total = torch.zeros(2)
    for i, (a, b) in enumerate(zip(trunk(x, layers), trunk(y, layers), strict=True)):
        unit_a, unit_b = F.normalize(a.relu(), dim=1), F.normalize(b.relu(), dim=1)
        total += ((unit_a - unit_b).square() * heads[f"lin{i}.weight"]).sum(dim=1).mean(dim=(1, 2))
    expected = lpips(x, y, net)
    assert expected is not None
    torch.testing.assert_close(total.double(), expected, atol=1e-4, rtol=1e-3)


def test_the_papers_extractor_has_twenty_convolutions_before_their_batch_norm(tmp_path: Path) -> None:
    """ResNet18 as in the public code: loda1 takes the first five, loda2 all, loda3 the last five and the linear part."""
    module = build("resnet18:width=4", input_shape=(3, 32, 32), num_classes=3)
    network = ResNetExtractor(module)
    assert len(network.convolutions) == 20 and network.layers[-2:] == ("pooled", "logits")
    variants = _variants(network)
    assert variants["loda1"] == tuple(f"conv{i}" for i in range(1, 6)) and len(variants["loda2"]) == 20
    assert variants["loda3"] == (*(f"conv{i}" for i in range(16, 21)), "pooled", "logits")
    x = torch.rand(2, 3, 32, 32)
    first, logits = network(x, ("conv1", "logits"))
    stem = next(m for m in module.modules() if isinstance(m, nn.Conv2d))
    assert torch.equal(first, stem(x)) and torch.equal(logits, module.eval()(x))


def test_the_papers_extractor_is_trained_once(tmp_path: Path) -> None:
    public = Batch(torch.rand(12, 3, 16, 16), torch.arange(12) % 3)
    one = resnet_extractor(public, tmp_path, epochs=1, network="resnet18:width=2")
    (file,) = tmp_path.glob("extractor-*.safetensors")
    written = file.stat().st_mtime_ns
    again = resnet_extractor(public, tmp_path, epochs=1, network="resnet18:width=2")
    assert file.stat().st_mtime_ns == written
    assert torch.equal(one(public.x, ("pooled",))[0], again(public.x, ("pooled",))[0])
