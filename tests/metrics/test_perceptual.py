"""LPIPS against numbers of the reference package, and against a plain re-computation with drawn weights."""

import os

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from gradveil.core.errors import UserError
from gradveil.metrics import lpips, lpips_size
from gradveil.metrics.perceptual import NETWORKS


def waves(size, channels):
    i, j = torch.meshgrid(torch.arange(float(size)), torch.arange(float(size)), indexing="ij")
    return torch.stack([0.5 + 0.5 * torch.sin((c + 1) * i / 7 + j / 5) for c in range(channels)])[None]


CHANGES = {
    "shifted": lambda x: x.roll(3, -1),
    "negative": lambda x: 1 - x,
    "dim": lambda x: 0.5 * x,
    "spotted": lambda x: torch.where(torch.arange(x.shape[-1]) % 5 == 0, 1.0, x),
}

# Package lpips 0.1.4, version "0.1", given the same weights: waves(64, 3) against each change of it;
# `small grey`: waves(28, 1) against its shifted self, both repeated to RGB and enlarged to 64.
REFERENCE = {
    ("alex", "shifted"): 0.022777,
    ("alex", "negative"): 0.113376,
    ("alex", "dim"): 0.031893,
    ("alex", "spotted"): 0.393983,
    ("alex", "small grey"): 0.086823,
    ("vgg", "shifted"): 0.114795,
    ("vgg", "negative"): 0.584735,
    ("vgg", "dim"): 0.036743,
    ("vgg", "spotted"): 0.384559,
    ("vgg", "small grey"): 0.181304,
}


@pytest.mark.skipif(not os.environ.get("GRADVEIL_DATA"), reason="GRADVEIL_DATA is not set: no LPIPS weights")
@pytest.mark.parametrize(("net", "change"), REFERENCE)
def test_equals_the_reference_package(net, change):
    x = waves(28, 1) if change == "small grey" else waves(64, 3)
    y = CHANGES["shifted" if change == "small grey" else change](x)
    distance = lpips(x, y, net)
    if distance is None:
        pytest.skip(f"no LPIPS weights for {net} in GRADVEIL_DATA")
    assert distance.item() == pytest.approx(REFERENCE[net, change], abs=2e-6)


def alexnet():
    return nn.Sequential(
        nn.Conv2d(3, 64, 11, stride=4, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(64, 192, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(192, 384, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(256, 256, 3, padding=1),
        nn.ReLU(),
    )


def save(folder, network, heads):
    (folder / "lpips").mkdir()
    save_file({f"features.{k}": v for k, v in network.state_dict().items()}, folder / "lpips" / NETWORKS["alex"].trunk)
    save_file({f"lin{i}.weight": h for i, h in enumerate(heads)}, folder / "lpips" / NETWORKS["alex"].head)


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """A folder with weights drawn at random, and the network and heads that hold them."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = alexnet()
        heads = [torch.rand(1, c, 1, 1) for c in (64, 192, 384, 256, 256)]
    save(tmp_path, network, heads)
    monkeypatch.setenv("GRADVEIL_DATA", str(tmp_path))
    return network, heads


def plainly(x, y, network, heads):
    """One image pair, layer by layer."""
    mean, std = torch.tensor([-0.030, -0.088, -0.188]), torch.tensor([0.458, 0.448, 0.450])
    a, b = (((2 * z - 1).permute(1, 2, 0) - mean).div(std).permute(2, 0, 1)[None] for z in (x, y))
    total, taps = 0.0, iter(heads)
    for layer in network:
        a, b = layer(a), layer(b)
        if isinstance(layer, nn.ReLU):
            difference = nn.functional.normalize(a, dim=1) - nn.functional.normalize(b, dim=1)
            total += nn.functional.conv2d(difference**2, next(taps)).mean().item()
    return total


def test_equals_a_plain_computation(drawn):
    x, y = torch.rand(2, 3, 3, 70, 66, generator=torch.Generator().manual_seed(0))
    values = lpips(x, y)
    with torch.no_grad():
        for i in range(3):
            assert values[i].item() == pytest.approx(plainly(x[i], y[i], *drawn), rel=1e-4)


def test_features_that_are_all_zero_give_a_number(tmp_path, monkeypatch):
    network = alexnet()
    nn.utils.vector_to_parameters(torch.zeros(sum(p.numel() for p in network.parameters())), network.parameters())
    save(tmp_path, network, [torch.ones(1, c, 1, 1) for c in (64, 192, 384, 256, 256)])
    monkeypatch.setenv("GRADVEIL_DATA", str(tmp_path))
    assert lpips(torch.zeros(1, 1, 28, 28), torch.ones(1, 1, 28, 28)).tolist() == [0]


def test_an_exact_match_is_zero_and_order_does_not_matter(drawn):
    x, y = torch.rand(2, 2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    assert lpips(x, x).tolist() == [0, 0]
    assert torch.allclose(lpips(x, y), lpips(y, x))
    assert (lpips(x, y) > 0).all()


def test_grey_is_the_same_as_equal_channels(drawn):
    x, y = torch.rand(2, 2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(lpips(x, y), lpips(x.repeat(1, 3, 1, 1), y.repeat(1, 3, 1, 1)))


def test_many_pairs_are_the_same_as_each_by_itself(drawn):
    x, y = torch.rand(2, 70, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(lpips(x, y)[[0, 65]], torch.cat([lpips(x[:1], y[:1]), lpips(x[65:66], y[65:66])]), atol=1e-6)


def test_no_value_without_weights_or_for_other_channels(drawn, monkeypatch, tmp_path):
    x = torch.rand(1, 2, 32, 32)
    assert lpips(x, x) is None
    assert lpips(x[:, :1], x[:, :1]) is not None
    assert lpips(x[:, :1], x[:, :1], "vgg") is None  # its files are not there
    monkeypatch.setenv("GRADVEIL_DATA", str(tmp_path / "elsewhere"))
    assert lpips(x[:, :1], x[:, :1]) is None
    monkeypatch.delenv("GRADVEIL_DATA")
    assert lpips(x[:, :1], x[:, :1]) is None


def test_a_broken_file_is_named(tmp_path, monkeypatch):
    (tmp_path / "lpips").mkdir()
    for name in NETWORKS["alex"][:2]:
        (tmp_path / "lpips" / name).write_bytes(b"not weights")
    monkeypatch.setenv("GRADVEIL_DATA", str(tmp_path))
    with pytest.raises(UserError, match="is damaged"):
        lpips(torch.rand(1, 1, 28, 28), torch.rand(1, 1, 28, 28))


def test_the_size_compared_at_is_stated():
    assert lpips_size(28, 28) == (64, 64)
    assert lpips_size(32, 48) == (64, 96)
    assert lpips_size(64, 64) == (64, 64)
    assert lpips_size(224, 200) == (224, 200)
