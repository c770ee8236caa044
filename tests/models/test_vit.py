"""The vision transformer: its form, what it refuses, and that its closed form rebuilds images exactly."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradveil as gv
from gradveil.core.errors import UserError
from gradveil.data import DataSet
from gradveil.models import build


def made(spec: str, shape: tuple[int, int, int] = (3, 32, 32)) -> nn.Module:
    return build(spec, input_shape=shape, num_classes=10)


def test_a_class_token_is_one_more_position_and_the_mean_needs_none() -> None:
    token, mean = made("vit:patch=8"), made("vit:patch=8,pool=mean")
    assert token.get_parameter("position").shape == (1, 17, 96) and mean.get_parameter("position").shape == (1, 16, 96)
    assert isinstance(token.get_submodule("fc"), nn.Linear)
    # Without positions the mean does not depend on the order of the patches, and with them it does.
    image = torch.rand(1, 3, 32, 32)
    flipped = torch.cat([image[..., 16:], image[..., :16]], 3)
    with torch.no_grad():
        assert not torch.allclose(mean.eval()(image), mean(flipped), atol=1e-4)
        mean.get_parameter("position").zero_()
        assert torch.allclose(mean(image), mean(flipped), atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "shape", "message"),
    [
        ("vit:patch=5", (3, 32, 32), "images of 3×32×32 do not divide into patches of 5 pixels"),
        ("vit:width=10,heads=4", (3, 32, 32), "width=10 does not divide into 4 heads"),
    ],
)
def test_what_does_not_divide_is_refused(spec: str, shape: tuple[int, int, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        made(spec, shape)


@pytest.mark.parametrize("pool", ["token", "mean"])
def test_positions_give_away_single_images_unless_there_is_noise(pool: str, shapes: DataSet) -> None:
    data = (shapes.private.x, shapes.private.y)
    settings = {"model": f"vit:width=48,pool={pool}", "defenses": ["none", "gaussian:std=0.1"], "attacks": ["april"]}
    frame = gv.audit(data, **settings, victims=4, quiet=True).to_frame().set_index("defense")
    assert frame.psnr_mean["none"] > 60 > 20 > frame.psnr_mean["gaussian:std=0.1"]
    assert frame.verdict["none"] == "leaks" and frame.identified_low["none"] > 0.3
